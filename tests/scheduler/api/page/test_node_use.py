"""The page learns what is used only of the nodes that somebody looks at, and no agent can keep it busy."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from deviceplugin.health import HealthServer
from mgpu.model.agent_pods import AgentPod
from mgpu.presentation.measured_use import CardInUse, ContainerUse, MeasuredUse, NodeUse, UnknownUse, Used, read_use
from scheduler.api.page import agent_client
from scheduler.api.page.node_use import EVERY_SECONDS, FORGET_SECONDS, MOST_NODES, NodeUses
from tests import builders as b
from tests.agent_metrics import page
from tests.agent_pods import agent
from tests.clock import Clock
from tests.scheduler.cluster.objects import put, record
from tests.scheduler.fake import Replica, cluster

GIB = 1 << 30
USE = NodeUse(
    (CardInUse(0, "GPU-n1-0", Used(300, 5 * GIB)),),
    (
        ContainerUse("default/p", "c", 0, "GPU-n1-0", Used(120, None)),
        ContainerUse("default/<b>invented", "c", 0, "GPU-n1-0", Used(120, None)),
    ),
)
JSON = {"cards": [[0, 300, 5 * GIB], [1, None, None]], "pods": [[0, "default/p", 120, None]]}


class Agents:
    """Agents that answer with `answer`. Each asked node is in `asked`."""

    def __init__(self, answer: MeasuredUse = USE) -> None:
        self.answer = answer
        self.asked: list[str] = []

    def __call__(self, pod: AgentPod) -> MeasuredUse:
        self.asked.append(pod.node)
        return self.answer


class Later:
    """Stores functions, and runs them when the test calls `run`."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def __call__(self, work: Callable[[], None]) -> None:
        self.waiting.append(work)

    def run(self) -> None:
        waiting, self.waiting = self.waiting, []
        for work in waiting:
            work()


@pytest.fixture
def replica() -> Replica:
    made = Replica(cluster(("n1", 2), ("n2", 2)))
    put(made, agent("n1", ip="192.0.2.7", port=9404), agent("n2", ip="192.0.2.8", port=9404))
    put(made, b.share("p", node="n1", annotations=record()))
    return made


def test_an_agent_is_asked_in_the_background_and_again_after_some_seconds(replica: Replica) -> None:
    agents, later, clock = Agents(), Later(), Clock()
    uses = NodeUses(replica.state, agents, later, clock)
    assert uses.json(["n1"]) == {}
    assert agents.asked == []
    later.run()
    assert uses.json(["n1", "n1"]) == {"n1": JSON}
    clock.now += EVERY_SECONDS - 0.1
    uses.json(["n1"])
    later.run()
    assert agents.asked == ["n1"]
    clock.now += 0.2
    agents.answer = UnknownUse("late")
    assert uses.json(["n1"]) == {"n1": JSON}
    later.run()
    assert uses.json(["n1"]) == {"n1": {"unknown": "late"}}
    assert agents.asked == ["n1", "n1"]


def test_only_nodes_that_are_asked_for_cost_something(replica: Replica) -> None:
    agents, later, clock = Agents(), Later(), Clock()
    uses = NodeUses(replica.state, agents, later, clock)
    uses.json(["n2", "nobody"])
    later.run()
    assert agents.asked == ["n2"]
    uses.json(["n1"])
    clock.now += FORGET_SECONDS
    assert uses.json([]) == {}
    assert uses.json(["n2"]) == {}, "what nobody has asked for is forgotten"


def test_many_nodes_are_asked_by_few_threads_and_none_twice() -> None:
    names = [f"n{i}" for i in range(2, 2 + MOST_NODES + 10)]
    made = Replica(cluster(*((name, 1) for name in names)))
    put(made, *(agent(name, ip="192.0.2.7", port=9404) for name in names))
    agents, later, clock = Agents(), Later(), Clock()
    uses = NodeUses(made.state, agents, later, clock)
    uses.json(names)
    clock.now += EVERY_SECONDS
    uses.json(names)
    assert len(later.waiting) == 4
    later.run()
    assert agents.asked == names[:MOST_NODES]


@pytest.mark.parametrize(
    ("pods", "reason"),
    [
        ([], "there is no Pod of an agent"),
        ([agent(ready=False, waiting="CrashLoopBackOff")], "the agent is not ready (CrashLoopBackOff)"),
    ],
)
def test_a_node_without_a_ready_agent_is_unknown(pods: list[dict[str, object]], reason: str) -> None:
    made = Replica(cluster(("n1", 1)))
    put(made, *pods)
    uses = NodeUses(made.state, Agents(), lambda work: work())
    uses.json(["n1"])
    assert uses.json(["n1"]) == {"n1": {"unknown": reason}}


def test_an_error_with_one_node_does_not_hide_the_others(replica: Replica, caplog: pytest.LogCaptureFixture) -> None:
    def ask(pod: AgentPod) -> MeasuredUse:
        if pod.node == "n1":
            raise RuntimeError("a bug")
        return USE

    uses = NodeUses(replica.state, ask, lambda work: work())
    uses.json(["n1", "n2"])
    found = uses.json(["n1", "n2"])
    assert found["n1"] == {"unknown": "an internal error occurred; the scheduler's log has the details"}
    assert found["n2"]["cards"] == [[0, 300, 5 * GIB], [1, None, None]]
    assert "a bug" in caplog.text


# What agents answer


def pod(ip: str | None = "127.0.0.1", port: int | None = 9) -> AgentPod:
    return AgentPod("n1", "agent-n1", None, ip=ip, port=port)


def ask(port: int) -> MeasuredUse:
    return agent_client.ask(pod(port=port), lambda _: True)


def test_the_metrics_of_an_agent_are_read() -> None:
    text = page(("default/p/c", 0, 0.12, GIB))
    server = HealthServer(0, lambda: None, lambda: None, "127.0.0.1", lambda: text, "text/plain")
    threading.Thread(target=server._server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        assert ask(server.port) == read_use(text)
        assert isinstance(read_use(text), NodeUse)
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("ip", "port", "reason"),
    [
        (None, 1, "has no address or no port"),
        ("192.0.2.7", None, "has no address or no port"),
        ("127.0.0.1", 1, "is not allowed"),
        ("::ffff:127.0.0.1", 1, "is not allowed"),
        ("169.254.169.254", 80, "is not allowed"),
        ("localhost", 1, "is not allowed"),
    ],
)
def test_a_pod_cannot_lead_this_process_to_its_own_host(ip: str | None, port: int | None, reason: str) -> None:
    found = agent_client.ask(pod(ip, port))
    assert isinstance(found, UnknownUse)
    assert reason in found.reason


@contextmanager
def answering(*parts: bytes, forever: bytes = b"") -> Iterator[int]:
    """Serve one answer, of which `forever` is repeated until the client is gone. The value is the port."""

    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            connection.settimeout(10)
            connection.recv(4096)
            try:
                for part in parts:
                    connection.sendall(part)
                while forever:
                    connection.sendall(forever)
                    if len(forever) < 10:
                        gone.wait(0.01)
            except OSError:
                return

    gone = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        gone.set()
        thread.join()


@pytest.mark.parametrize(
    ("parts", "forever", "reason"),
    [
        ([b"HTTP/1.0 500 no\r\n\r\nx"], b"", "answers with the status 500"),
        ([b"HTTP/1.0 302 x\r\nLocation: http://192.0.2.9/\r\n\r\n"], b"", "answers with the status 302"),
        ([b"what?\r\n"], b"", "does not answer: what?"),
        ([], b"", "does not answer: "),
        ([b"HTTP/1.0 200 ok\r\n\r\n"], b"x" * 65536, "more than 1 MiB"),
        ([b"HTTP/1.0 200 ok\r\n\r\n"], b"x", "timed out"),
        ([b"HTTP/1.0 200 ok\r\n"], b"a: b\r\n", "does not answer"),
        ([b"HTTP/1.0 200 ok\r\n"], b"a: " + b"b" * 60000 + b"\r\n", "the answer is too long"),
        ([], b"x", "timed out"),
    ],
    ids=["error", "redirection", "no HTTP", "nothing", "large", "slow body", "many headers", "large head", "slow head"],
)
def test_a_hostile_agent_is_an_unknown_use_soon(
    monkeypatch: pytest.MonkeyPatch, parts: list[bytes], forever: bytes, reason: str
) -> None:
    monkeypatch.setattr(agent_client, "SECONDS", 0.2)
    with answering(*parts, forever=forever) as port:
        found = ask(port)
    assert isinstance(found, UnknownUse)
    assert reason in found.reason
