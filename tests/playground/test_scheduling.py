"""The scheduling loop against our API server, and with an extender over HTTP."""

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import orjson
import pytest
from kubernetes import client

from mgpu.kube import Api, ApiError
from playground.apiserver import ApiServer, User, running
from playground.scheduling import Extender, Scheduling
from playground.scheduling.queue import Queue
from tests.builders import node
from tests.waiting import until

Json = dict[str, Any]
PODS = "/api/v1/namespaces/default/pods"


class FakeExtender:
    """Answers /filter and /prioritize by what it is told; remembers what it was asked."""

    def __init__(self) -> None:
        self.refuse: dict[str, str] = {}
        self.scores: dict[str, Any] = {}
        self.null = False
        self.status = 200
        self.asked: list[tuple[str, Json]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = orjson.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append((self.path, body))
                answer = orjson.dumps(outer.answer(self.path, body))
                self.send_response(outer.status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def answer(self, path: str, body: Json) -> Any:
        names = body["NodeNames"]
        if path == "/prioritize":
            return [{"Host": name, "Score": self.scores.get(name, 0)} for name in names]
        if self.null:
            return {"NodeNames": None}
        left = [name for name in names if name not in self.refuse]
        failed = {name: self.refuse[name] for name in names if name in self.refuse}
        return {"NodeNames": left, "FailedNodes": failed}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Bench:
    def __init__(self, api: Api) -> None:
        self.api = api
        self.loops: list[Scheduling] = []

    def start(self, *extenders: Extender) -> None:
        self.loops.append(Scheduling(self.api, extenders, backoff=(0.02, 0.2)))
        self.loops[-1].start()

    def node(self, name: str, **status: str) -> None:
        body = node(name)
        del body["metadata"]["uid"]
        self.api.create("/api/v1/nodes", body)
        allocatable = {"cpu": "4", "memory": "8Gi", "pods": "10", **status}
        self.api.patch(
            f"/api/v1/nodes/{name}/status", {"status": {"capacity": allocatable, "allocatable": allocatable}}
        )

    def pod(self, name: str, resources: dict[str, str] | None = None, **spec: Any) -> None:
        amounts = resources or {}
        own = {"name": "c", "image": "i", "resources": {"requests": amounts, "limits": amounts}}
        self.api.create(PODS, {"metadata": {"name": name}, "spec": {"containers": [own], **spec}})

    def where(self, name: str) -> str:
        return str(self.api.get(f"{PODS}/{name}")["spec"].get("nodeName", ""))

    def lands(self, name: str) -> str:
        return str(until(lambda: self.where(name)))

    def refused(self, name: str) -> str:
        """The message of PodScheduled=False."""

        def found() -> str:
            rows = self.api.get(f"{PODS}/{name}")["status"].get("conditions") or ()
            return next((r["message"] for r in rows if (r["type"], r["status"]) == ("PodScheduled", "False")), "")

        return str(until(found))


@pytest.fixture
def bench() -> Iterator[Bench]:
    with running(ApiServer(tokens={"admin": User("admin", ("system:masters",))})) as url:
        made = Bench(Api(client.Configuration(host=url, api_key={"authorization": "Bearer admin"})))
        yield made
        for loop in made.loops:
            loop.stop()
        made.api.close()


@pytest.fixture
def extender() -> Iterator[FakeExtender]:
    fake = FakeExtender()
    yield fake
    fake.close()


def test_pods_go_to_the_emptiest_node_and_never_over_what_it_has(bench: Bench) -> None:
    bench.node("n1")
    bench.node("n2")
    bench.start()
    for i in range(4):
        bench.pod(f"p{i}", {"cpu": "2"})
    assert sorted(bench.lands(f"p{i}") for i in range(4)) == ["n1", "n1", "n2", "n2"]
    bench.pod("more", {"cpu": "1"})
    assert bench.refused("more") == "0/2 nodes are available: 2 Insufficient cpu."
    events = bench.api.list("/api/v1/namespaces/default/events")[0]
    assert {"Scheduled", "FailedScheduling"} >= {event["reason"] for event in events}


def test_a_refused_pod_is_tried_again_when_another_one_goes(bench: Bench) -> None:
    bench.node("n1")
    bench.start()
    bench.pod("first", {"cpu": "4"})
    bench.lands("first")
    bench.pod("second", {"cpu": "4"})
    bench.refused("second")
    bench.api.delete(f"{PODS}/first", {"gracePeriodSeconds": 0})
    assert bench.lands("second") == "n1"


def test_a_refused_pod_is_tried_again_when_a_node_comes_or_changes(bench: Bench) -> None:
    bench.start()
    bench.pod("p", nodeSelector={"a": "b"})
    assert bench.refused("p") == "no nodes available to schedule pods"
    bench.node("n1")
    until(lambda: "1 node(s) didn't match" in bench.refused("p"))
    bench.api.patch("/api/v1/nodes/n1", {"metadata": {"labels": {"a": "b"}}})
    assert bench.lands("p") == "n1"


def test_the_pods_of_another_scheduler_and_gated_ones_are_left_alone(bench: Bench) -> None:
    bench.node("n1")
    bench.pod("other", schedulerName="volcano")
    bench.pod("gated", schedulingGates=[{"name": "wait"}])
    bench.start()
    bench.pod("mine")
    assert bench.lands("mine") == "n1"
    assert bench.where("other") == bench.where("gated") == ""


def test_the_extender_filters_and_its_score_weighs_ten_times(bench: Bench, extender: FakeExtender) -> None:
    for name in ("n1", "n2", "n3"):
        bench.node(name)
    extender.refuse, extender.scores = {"n3": "no card"}, {"n1": 1, "n2": 2, "n3": 10}
    bench.start(Extender(extender.url, weight=5))
    bench.pod("p")
    assert bench.lands("p") == "n2"
    path, body = extender.asked[0]
    assert (path, body["NodeNames"], body["Nodes"]) == ("/filter", ["n1", "n2", "n3"], None)
    assert body["Pod"]["metadata"]["name"] == "p"


def test_the_extenders_reasons_are_told(bench: Bench, extender: FakeExtender) -> None:
    bench.node("n1")
    extender.refuse = {"n1": "half of 50% short"}
    bench.start(Extender(extender.url))
    bench.pod("p")
    assert bench.refused("p") == "0/1 nodes are available: 1 half of 50% short."
    [event] = until(lambda: bench.api.list("/api/v1/namespaces/default/events")[0])
    # The real one formats an Event's message once more (seen on 1.36.2), the condition's not.
    assert (event.get("note") or event["message"]) == "0/1 nodes are available: 1 half of 50%!s(MISSING)hort."
    extender.refuse = {}
    bench.api.patch("/api/v1/nodes/n1", {"metadata": {"annotations": {"touched": "1"}}})
    assert bench.lands("p") == "n1"


def test_only_managed_pods_are_shown_and_ignored_resources_are_the_extenders(
    bench: Bench, extender: FakeExtender
) -> None:
    bench.node("n1")
    bench.start(Extender(extender.url, managed={"example.com/core": True}))
    bench.pod("plain", {"cpu": "1"})
    bench.pod("gpu", {"example.com/core": "5"})
    assert bench.lands("plain") == bench.lands("gpu") == "n1"
    assert {body["Pod"]["metadata"]["name"] for _, body in extender.asked} == {"gpu"}


def test_an_outage_of_the_extender_holds_its_pods(bench: Bench, extender: FakeExtender) -> None:
    bench.node("n1")
    extender.status = 500
    bench.start(Extender(extender.url, managed={"example.com/core": True}))
    bench.pod("plain")
    assert bench.lands("plain") == "n1"
    bench.api.patch(
        "/api/v1/nodes/n1/status",
        {"status": {"capacity": {"example.com/core": "9"}, "allocatable": {"example.com/core": "9"}}},
    )
    bench.pod("gpu", {"example.com/core": "5"})
    assert "failed filter with extender" in bench.refused("gpu")
    extender.status = 200
    assert bench.lands("gpu") == "n1"


def test_an_extender_that_is_not_there_is_named_by_its_url(bench: Bench, extender: FakeExtender) -> None:
    bench.node("n1")
    extender.close()
    bench.start(Extender(extender.url))
    bench.pod("p")
    assert bench.refused("p").startswith(f'Post "{extender.url}/filter": ')


def test_null_for_the_remaining_nodes_means_none(bench: Bench, extender: FakeExtender) -> None:
    bench.node("n1")
    extender.null = True
    bench.start(Extender(extender.url))
    bench.pod("p")
    assert bench.refused("p") == "0/1 nodes are available."


def test_a_score_that_is_no_integer_counts_nothing(bench: Bench, extender: FakeExtender) -> None:
    bench.node("n1")
    bench.node("n2")
    extender.scores = {"n2": 8.0, "n1": 0}
    bench.start(Extender(extender.url, weight=100))
    bench.pod("p")
    assert bench.lands("p") == "n1"


def test_a_refused_binding_is_tried_again(bench: Bench) -> None:
    bench.node("n1")

    class Refusing(Api):
        refusals = 2

        def create(self, path: str, body: Any, **query: object) -> Json:
            if path.endswith("/binding") and self.refusals:
                self.refusals -= 1
                raise ApiError(409, "Conflict", "no card is left")
            return bench.api.create(path, body, **query)

    refusing = Refusing(bench.api._configuration)
    loop = Scheduling(refusing, backoff=(0.02, 0.2))
    bench.loops.append(loop)
    loop.start()
    bench.pod("p")
    assert bench.refused("p") == 'running Bind plugin "DefaultBinder": no card is left'
    assert bench.lands("p") == "n1"


@pytest.fixture
def queue() -> Queue:
    return Queue(first=0.001, longest=0.001)


def waiting(name: str, priority: int = 0) -> Json:
    return {"metadata": {"name": name, "uid": name}, "spec": {"priority": priority}}


def popped(queue: Queue) -> str:
    pod = queue.pop()
    return str(pod["metadata"]["name"]) if pod else ""


def test_priority_first_then_arrival(queue: Queue) -> None:
    for name, priority in (("a", 0), ("b", 0), ("high", 9)):
        queue.put(waiting(name, priority))
    assert [popped(queue) for _ in range(3)] == ["high", "a", "b"]


def _move(queue: Queue) -> None:
    queue.changed()


def _update(queue: Queue) -> None:
    queue.put(waiting("a", priority=1))


@pytest.mark.parametrize("event", [_move, _update])
def test_a_refused_pod_waits_for_a_change(queue: Queue, event: Callable[[Queue], None]) -> None:
    queue.put(waiting("a"))
    popped(queue)
    queue.refused("a")
    queue.put(waiting("b"))
    assert popped(queue) == "b"
    event(queue)
    assert popped(queue) == "a"


def test_a_change_during_the_attempt_is_not_missed(queue: Queue) -> None:
    queue.put(waiting("a"))
    popped(queue)
    queue.changed()
    queue.refused("a")
    assert popped(queue) == "a"


def test_a_pod_that_is_being_bound_is_not_taken_twice(queue: Queue) -> None:
    queue.put(waiting("a"))
    popped(queue)
    queue.put(waiting("a", priority=1))
    queue.changed()
    queue.close()
    assert queue.pop() is None
