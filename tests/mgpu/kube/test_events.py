import queue
import threading
from typing import Any

import pytest

from mgpu.kube import ApiError, events
from mgpu.kube.events import Recorder, node_reference, pod_reference
from tests.waiting import until


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


def test_recorder_that_is_stopped_posts_what_waits_and_leaves_no_thread() -> None:
    """An agent's process makes a recorder for each agent, of which it has one after the other."""
    before = set(threading.enumerate())
    api = Events()
    made = recorder(api)
    (thread,) = set(threading.enumerate()) - before
    for i in range(5):
        made.warn(node_reference("n1"), "BadDevice", f"{i}")
    made.stop()
    thread.join(60)
    assert not thread.is_alive()
    assert api.posted.qsize() == 5


def test_recorder_that_is_stopped_with_a_full_queue_ends_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_QUEUE", 1)
    api, go_on = Events(), threading.Event()
    before = set(threading.enumerate())
    client: Any = Slow(api, go_on)
    made = Recorder(client, "mgpu-scheduler")
    (thread,) = set(threading.enumerate()) - before
    made.warn(node_reference("n1"), "BadDevice", "posted while the other one waits")
    until(client.began.is_set)
    made.warn(node_reference("n1"), "BadDevice", "waits")
    made.stop()
    go_on.set()
    thread.join(60)
    assert not thread.is_alive()
    assert api.posted.qsize() == 2


class Slow:
    """An API that posts an Event only after `go_on` is set."""

    def __init__(self, api: Events, go_on: threading.Event) -> None:
        self.api, self.go_on, self.began = api, go_on, threading.Event()

    def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.began.set()
        self.go_on.wait(60)
        return self.api.create(path, body)
