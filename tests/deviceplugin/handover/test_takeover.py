"""The handover of a node from one agent to the next."""

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.agent import Agent
from deviceplugin.agent_process import AgentProcess
from deviceplugin.handover import node_ownership, takeover
from deviceplugin.handover.node_ownership import NodeLock
from deviceplugin.handover.takeover import SOCKET
from tests.builders import CORE, share
from tests.deviceplugin import records
from tests.deviceplugin.node import PODS, Node
from tests.waiting import until


def decided(name: str, card: str = "1") -> dict[str, Any]:
    return records.decided(name, card, 1, mib=1, node="n1")


@contextmanager
def takeover_of(node: Node) -> Iterator[tuple[Agent, Agent]]:
    """Yield an agent, and a second one that has taken the node over from it."""
    with node.agent() as old, node.starting() as new:
        until(lambda: not new.not_ready_reason())
        yield old, new


@contextmanager
def process_on(node: Node) -> Iterator[AgentProcess]:
    """Yield the process of an agent, which serves the node."""
    with ExitStack() as stack:
        process = AgentProcess(lambda: stack.enter_context(node.made()))
        thread = threading.Thread(target=lambda: asyncio.run(process.run()))
        thread.start()
        stack.callback(thread.join, 60)
        stack.callback(process.stop)
        until(lambda: not process.agent.not_ready_reason() and node.healthy_ids())
        yield process


def run_pod(node: Node) -> None:
    node.create(decided("p"))
    node.runs("p")


async def connect(node: Node, message: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a message to the agent that serves the node."""
    reader, writer = await asyncio.open_unix_connection(node.folder / "device-plugins" / SOCKET)
    writer.write(message)
    await writer.drain()
    return reader, writer


@pytest.fixture
def drops(node: Node, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the resources whose devices the kubelet has marked as unhealthy."""
    found: list[str] = []
    disconnected = node.kubelet.devices.disconnected

    def noted(resource: str) -> None:
        found.append(resource)
        disconnected(resource)

    monkeypatch.setattr(node.kubelet.devices, "disconnected", noted)
    return found


@pytest.fixture(autouse=True)
def no_wait_for_stand_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most predecessors here have no process that creates another agent."""
    monkeypatch.setattr(node_ownership, "_STAND_BY_SECONDS", 0.0)


class Arrivals:
    """Creates pods at a steady rate."""

    def __init__(self, node: Node, count: int, pause: float) -> None:
        self._node = node
        self._count = count
        self._pause = pause
        self._thread = threading.Thread(target=self._create)

    def start(self) -> None:
        self._thread.start()

    def not_running(self) -> list[str]:
        """Return the names of the pods that do not run, once all have started or failed."""
        self._thread.join(60)
        phases = until(lambda: settled(self._node))
        return sorted(name for name, phase in phases.items() if phase != "Running")

    def _create(self) -> None:
        for i in range(self._count):
            self._node.create(decided(f"p{i}", str(i % 2)))
            time.sleep(self._pause)


def settled(node: Node) -> dict[str, str] | None:
    found = {p["metadata"]["name"]: p["status"]["phase"] for p in node.api.list(PODS)[0]}
    return None if "Pending" in found.values() else found


def test_takeover_while_pods_are_created_fails_none(node: Node, drops: list[str]) -> None:
    arrivals = Arrivals(node, 15, 0.04)
    with node.agent() as old:
        arrivals.start()
        until(lambda: node.api.list(PODS)[0])
        with node.starting() as new:
            until(lambda: not new.not_ready_reason())
            assert not old._ownership.serves
            assert arrivals.not_running() == []
            assert drops == []


def test_restart_without_takeover_leaves_the_resources_without_devices(node: Node, drops: list[str]) -> None:
    """This is the loss that a takeover avoids."""
    with node.agent():
        pass
    with node.agent():
        assert CORE in drops


def test_kubelet_notices_the_end_of_the_new_agent_after_a_takeover(node: Node, drops: list[str]) -> None:
    with takeover_of(node):
        assert drops == []
    until(lambda: CORE in drops)
    until(lambda: node.healthy_ids() == 0)


def test_second_takeover_uses_the_first_socket_name_again(node: Node, drops: list[str]) -> None:
    with takeover_of(node), node.starting() as third:
        until(lambda: not third.not_ready_reason())
        names = {path.name for path in (node.folder / "device-plugins").glob("mgpu-core*")}
        assert names == {"mgpu-core.sock"}
        run_pod(node)
        assert drops == []


def test_pod_admitted_before_a_takeover_starts_on_its_cards_after_it(node: Node) -> None:
    with node.agent():
        node.create(share("p", 1, 1, node="n1"))
        until(lambda: node.waits("p"))
        with node.starting() as new:
            until(lambda: not new.not_ready_reason())
            node.decide("p", c="1")
            node.runs("p")
            assert node.visible("p") == "GPU-n1-1"


def test_only_the_new_agent_writes_after_a_takeover(node: Node) -> None:
    with takeover_of(node) as (old, new):
        assert old.card_holdings().gpus == ()
        assert len(new.card_holdings().gpus) == 2
        assert not old._reporter._thread.is_alive()
        assert new._reporter._thread.is_alive()


def test_agent_takes_the_node_when_an_old_version_ends(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old versions cannot hand over. The new agent must become ready, or a rolling update would wait forever."""
    with node.agent() as old:
        (node.folder / "device-plugins" / SOCKET).unlink()
        monkeypatch.setattr(node_ownership, "request", no_answer)
        monkeypatch.setattr(node_ownership, "_UNANSWERED_SECONDS", 0.2)
        with node.starting() as new:
            until(lambda: new.not_ready_reason() == "another agent serves this node; this one stands by")
            until(lambda: not new.not_ready_reason())
            assert not new._ownership.serves
            assert node.healthy_ids() == 200
            old.stop()
            until(lambda: new._ownership.serves and not new.not_ready_reason())
            run_pod(node)


async def no_answer(_: object) -> None:
    await asyncio.sleep(0)


def test_successor_that_ends_before_it_serves_leaves_the_lock_free(node: Node) -> None:
    async def request_and_end() -> None:
        _, writer = await connect(node, b"take over\n")
        writer.close()

    with node.agent() as old:
        asyncio.run(request_and_end())
        until(lambda: not old._ownership.serves)
        with node.agent():
            run_pod(node)


@contextmanager
def locked(node: Node) -> Iterator[NodeLock]:
    """Hold the lock of the node, as another agent."""
    lock = NodeLock(node.folder / "device-plugins")
    assert lock.try_acquire()
    try:
        yield lock
    finally:
        lock.release()


async def fake_agent(node: Node, answer: bytes, received: list[bytes]) -> asyncio.Server:
    """Listen as an agent that serves the node, and store what is received: b"" at the end of a connection."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.readline())
        writer.write(answer)
        try:
            received.append(await reader.read())
        finally:
            writer.close()

    return await asyncio.start_unix_server(talk, node.folder / "device-plugins" / SOCKET)


def test_node_is_requested_again_if_a_third_agent_has_taken_the_lock(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the second agent would wait for the end of the third one, and the rolling update would stop."""
    monkeypatch.setattr(node_ownership, "_UNANSWERED_SECONDS", 0.2)
    received: list[bytes] = []

    async def agree_twice() -> None:
        async with await fake_agent(node, b"yours\n", received):
            await soon(lambda: received.count(b"take over\n") > 1)

    with locked(node) as lock, node.starting() as new:
        asyncio.run(agree_twice())
        lock.release()
        until(lambda: not new.not_ready_reason())


def test_stopped_agent_does_not_wait_for_the_answer_to_its_request(node: Node) -> None:
    """The agent that serves hangs. A pod has 30 s to end, and the answer could take 20 s."""
    received: list[bytes] = []

    async def stop(new: Agent) -> None:
        async with await fake_agent(node, b"", received), asyncio.timeout(10):
            await soon(lambda: received)
            new.stop()
            await soon(lambda: received[1:])

    with locked(node), node.starting() as new:
        asyncio.run(stop(new))


def test_old_agent_stays_ready_during_a_long_takeover(node: Node) -> None:
    async def request_and_wait(old: Agent) -> None:
        reader, writer = await connect(node, b"take over\n")
        assert await reader.readline() == b"yours\n"
        await asyncio.sleep(1.2)
        assert old._heartbeat.silence() < 1
        assert not old.not_ready_reason()
        writer.close()

    with node.agent() as old:
        asyncio.run(request_and_wait(old))


def test_connection_with_another_message_is_closed(node: Node) -> None:
    async def send() -> bytes:
        reader, writer = await connect(node, b"give me the node\n")
        answer = await reader.read()
        writer.close()
        return answer

    with node.agent() as old:
        assert asyncio.run(send()) == b""
        assert not old.not_ready_reason()


@pytest.fixture
def listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Return a function that returns whether an agent listens in `tmp_path`. Agents check their socket every 5 ms."""
    monkeypatch.setattr(takeover, "_CHECK_SECONDS", 0.005)
    return (tmp_path / SOCKET).exists


async def soon(found: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not found():
            await asyncio.sleep(0.005)


def test_listening_agent_does_not_replace_the_socket_of_its_successor(
    tmp_path: Path, listens: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old agent still listens while it hands over. A third agent must reach the new one."""
    servers: list[object] = []
    start = asyncio.start_unix_server

    async def counted(*arguments: Any, **options: Any) -> asyncio.Server:
        servers.append(arguments)
        return await start(*arguments, **options)

    monkeypatch.setattr(asyncio, "start_unix_server", counted)

    async def work() -> None:
        async with takeover.listening(tmp_path):
            await soon(listens)
            async with takeover.listening(tmp_path):
                await soon(lambda: len(servers) == 2)
                await asyncio.sleep(0.1)  # 20 checks of the old agent
                assert len(servers) == 2

    asyncio.run(work())


def test_listening_that_ends_while_it_begins_leaves_no_socket(tmp_path: Path) -> None:
    async def work(turns: int) -> None:
        async with takeover.listening(tmp_path):
            for _ in range(turns):
                await asyncio.sleep(0)

    for turns in range(8):
        asyncio.run(work(turns))
        gc.collect()  # An unclosed socket is a ResourceWarning, and so an error.
        assert not (tmp_path / takeover.SOCKET).exists()


def test_end_of_listening_closes_connections_of_waiting_agents(tmp_path: Path, listens: Callable[[], bool]) -> None:
    """They then connect to the agent that serves now. The process of the former one may run for hours."""

    async def work() -> None:
        async with takeover.listening(tmp_path) as others:
            await soon(listens)
            waiting = asyncio.create_task(takeover.stand_by(tmp_path))
            await soon(others.standing_by)
        async with asyncio.timeout(30):
            assert await waiting is None

    asyncio.run(work())


def test_takeover_is_possible_after_a_kubelet_restart(node: Node) -> None:
    with node.agent() as old:
        node.kubelet.stop()
        until(old.not_ready_reason)
        node.kubelet.start()
        until(lambda: not old.not_ready_reason() and node.healthy_ids() == 200)
        until(lambda: (node.folder / "device-plugins" / SOCKET).exists())
        with node.starting() as new:
            until(lambda: not new.not_ready_reason())
            run_pod(node)


def test_replaced_process_serves_again_after_its_successor_has_ended(node: Node, drops: list[str]) -> None:
    with process_on(node) as process:
        first = process.agent
        with node.starting() as new:
            until(lambda: not new.not_ready_reason())
            until(lambda: process.agent is not first and not process.agent.not_ready_reason())
            assert process.agent.card_holdings().gpus == ()
            until(lambda: standing_by(new))
        until(lambda: process.agent.card_holdings().gpus and not process.agent.not_ready_reason())
        assert drops == []
        run_pod(node)


def test_successor_that_is_stopped_during_the_takeover_gives_the_node_back(
    node: Node, drops: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it ended without serving, pods would fail until the old process had registered again."""
    monkeypatch.setattr(node_ownership, "_STAND_BY_SECONDS", 30.0)
    made: list[Agent] = []

    async def request_and_stop(folder: Path) -> takeover.Predecessor | None:
        predecessor = await takeover.request(folder)
        if predecessor is not None:
            made[-1].stop()
        return predecessor

    with process_on(node) as process:
        first = process.agent
        monkeypatch.setattr(node_ownership, "request", request_and_stop)
        arrivals = Arrivals(node, 10, 0.1)
        with node.made() as new:
            made.append(new)
            arrivals.start()
            asyncio.run(new.run())
        until(
            lambda: (
                process.agent is not first
                and process.agent.card_holdings().gpus
                and not process.agent.not_ready_reason()
            )
        )
        monkeypatch.setattr(node_ownership, "_STAND_BY_SECONDS", 0.0)
        assert arrivals.not_running() == []
        assert drops == []


def standing_by(agent: Agent) -> bool:
    others = agent._ownership._other_agents
    return others is not None and others.standing_by() is not None
