import queue
from typing import Any

from mgpu.kube import ApiError
from mgpu.kube.events import Recorder, node_reference, pod_reference


class Events:
    """An API server that takes Events; refuses the first `refusals`."""

    def __init__(self, refusals: int = 0) -> None:
        self.refusals = refusals
        self.posted: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()

    def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if self.refusals:
            self.refusals -= 1
            raise ApiError(403, "Forbidden", "no")
        self.posted.put((path, body))
        return body


def recorder(api: Events) -> Recorder:
    client: Any = api
    return Recorder(client, "mgpu-scheduler")


def test_an_event_stands_on_its_object() -> None:
    api = Events()
    recorder(api).warn(pod_reference("team", "p", "uid-p"), "MgpuNoCards", "nothing fits")
    path, event = api.posted.get(timeout=60)
    assert path == "/api/v1/namespaces/team/events"
    assert event["metadata"]["namespace"] == event["involvedObject"]["namespace"] == "team"
    assert (event["type"], event["reason"], event["message"]) == ("Warning", "MgpuNoCards", "nothing fits")


def test_an_event_of_a_node_is_where_kubectl_looks_for_it() -> None:
    api = Events()
    recorder(api).record(node_reference("n1"), "Ready", "cards are there")
    path, event = api.posted.get(timeout=60)
    assert path == "/api/v1/namespaces/default/events"
    assert event["involvedObject"]["uid"] == "n1"


def test_the_same_again_is_said_once() -> None:
    api = Events()
    made = recorder(api)
    for message in ("same", "same", "same", "other"):
        made.warn(node_reference("n1"), "BadDevice", message)
    assert [api.posted.get(timeout=60)[1]["message"] for _ in range(2)] == ["same", "other"]


def test_a_refused_event_does_not_stop_the_next() -> None:
    api = Events(refusals=1)
    made = recorder(api)
    made.warn(node_reference("n1"), "BadDevice", "first")
    made.warn(node_reference("n1"), "BadDevice", "second")
    assert api.posted.get(timeout=60)[1]["message"] == "second"
