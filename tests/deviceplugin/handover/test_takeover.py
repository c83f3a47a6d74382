"""One agent takes over from another on its node, and no pod fails for it."""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.agent import Agent
from deviceplugin.agent_process import AgentProcess
from deviceplugin.handover import node_ownership, takeover
from deviceplugin.handover.node_ownership import NodeLock
from deviceplugin.handover.takeover import SOCKET
from tests.builders import CORE, share
from tests.deviceplugin.node import PODS, Node
from tests.deviceplugin.records import ASSUMED, RECORD
from tests.waiting import until

Json = dict[str, Any]


def decided(name: str, card: str = "1", core: int = 1) -> Json:
    return share(name, core, 1, node="n1", annotations={ASSUMED: "true", RECORD + "c": card})


@pytest.fixture
def drops(node: Node, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The resources whose devices the kubelet has marked as unhealthy, in order."""
    found: list[str] = []
    disconnected = node.kubelet.devices.disconnected

    def noted(resource: str) -> None:
        found.append(resource)
        disconnected(resource)

    monkeypatch.setattr(node.kubelet.devices, "disconnected", noted)
    return found


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most agents here have no process that stands by after them: it need not be waited for."""
    monkeypatch.setattr(node_ownership, "_STAND_BY_SECONDS", 0.0)


class Arrivals:
    """Pods that come at a steady rate, from `start` on."""

    def __init__(self, node: Node, count: int, pause: float) -> None:
        self._node = node
        self._count = count
        self._pause = pause
        self._thread = threading.Thread(target=self._create)

    def start(self) -> None:
        self._thread.start()

    def not_running(self) -> list[str]:
        """The names of the pods that have not come to run, once all have come and started or failed."""
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


def test_takeover_pods_arrive_none_fails(node: Node, drops: list[str]) -> None:
    arrivals = Arrivals(node, 60, 0.02)
    with node.agent() as old:
        arrivals.start()
        until(lambda: node.api.list(PODS)[0])
        with node.starting() as new:
            until(lambda: not new.not_ready_reason())
            assert not old._ownership.serves
            assert arrivals.not_running() == []
            assert drops == []


def test_replacement_old_agent_ends_first_resource_is_without_devices(node: Node, drops: list[str]) -> None:
    """The former sequence, which the one above is measured by: every resource is dropped."""
    with node.agent():
        pass
    with node.agent():
        assert CORE in drops


def test_takeover_done_kubelet_notices_the_end_of_the_new_agent(node: Node, drops: list[str]) -> None:
    """Else pods would be sent to a node whose agent is gone."""
    with node.agent(), node.starting() as new:
        until(lambda: not new.not_ready_reason())
        assert drops == []
    until(lambda: CORE in drops)
    until(lambda: node.healthy_ids() == 0)


def test_takeover_back_and_forth_sockets_do_not_pile_up(node: Node, drops: list[str]) -> None:
    with node.agent(), node.starting() as second:
        until(lambda: not second.not_ready_reason())
        with node.starting() as third:
            until(lambda: not third.not_ready_reason())
            names = {path.name for path in (node.folder / "device-plugins").glob("mgpu-core*")}
            assert names == {"mgpu-core.sock"}
            node.create(decided("p"))
            node.runs("p")
            assert drops == []


def test_takeover_pod_admitted_before_it_starts_after_it_on_its_cards(node: Node) -> None:
    with node.agent():
        node.create(share("p", 1, 1, node="n1"))
        until(lambda: node.waits("p"))
        with node.starting() as new:
            until(lambda: not new.not_ready_reason())
            node.decide("p", c="1")
            node.runs("p")
            assert node.visible("p") == "GPU-n1-1"


def test_takeover_only_one_agent_writes(node: Node) -> None:
    with node.agent() as old, node.starting() as new:
        until(lambda: not new.not_ready_reason())
        assert old.card_holdings().gpus == ()
        assert len(new.card_holdings().gpus) == 2
        assert not old._reporter._thread.is_alive()
        assert new._reporter._thread.is_alive()


def test_standby_agent_that_serves_ends_takes_the_node_at_once(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that serves cannot hand over, as an older version."""
    with node.agent() as old:
        (node.folder / "device-plugins" / SOCKET).unlink()
        monkeypatch.setattr(node_ownership, "request", nobody_answers)
        monkeypatch.setattr(node_ownership, "_UNANSWERED_SECONDS", 0.2)
        with node.starting() as new:
            until(lambda: new.not_ready_reason() == "another agent serves this node; this one stands by")
            until(lambda: not new.not_ready_reason())  # else a rolling update would wait for it for ever
            assert not new._ownership.serves
            assert node.healthy_ids() == 200
            old.stop()
            until(lambda: new._ownership.serves and not new.not_ready_reason())
            node.create(decided("p"))
            node.runs("p")


async def nobody_answers(_: object) -> None:
    await asyncio.sleep(0)


def test_takeover_successor_ends_before_it_serves_old_agent_lets_go(node: Node) -> None:
    """Its lock is free, and whoever stands by takes it: here the process's own next agent."""

    async def ask_and_end() -> None:
        _, writer = await asyncio.open_unix_connection(node.folder / "device-plugins" / SOCKET)
        writer.write(b"take over\n")
        await writer.drain()
        writer.close()

    with node.agent() as old:
        asyncio.run(ask_and_end())
        until(lambda: not old._ownership.serves)
        with node.agent():
            node.create(decided("p"))
            node.runs("p")


async def hand_over_nothing(folder: Path, asked: list[bytes]) -> asyncio.Server:
    """An agent that says "yours" to whoever asks, while another one has the lock."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        writer.write(b"yours\n")
        try:
            await reader.read()
        finally:
            writer.close()

    return await asyncio.start_unix_server(talk, folder / SOCKET)


def test_takeover_third_agent_locks_the_node_first_it_is_asked_in_turn(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the second one waits for the third one's end and is never ready: the rolling update would stop."""
    monkeypatch.setattr(node_ownership, "_UNANSWERED_SECONDS", 0.2)
    folder, asked = node.folder / "device-plugins", list[bytes]()
    lock = NodeLock(folder)
    assert lock.try_acquire()

    async def work() -> None:
        async with await hand_over_nothing(folder, asked):
            await soon(lambda: len(asked) > 1)

    with node.starting() as new:
        asyncio.run(work())
        lock.release()
        until(lambda: not new.not_ready_reason())


def test_takeover_not_answered_agent_ends_at_once_when_told(node: Node) -> None:
    """The agent that serves hangs. A pod has 30 s to end, of which the answer would be waited for 20 s."""
    folder, asked = node.folder / "device-plugins", list[bytes]()
    lock = NodeLock(folder)
    assert lock.try_acquire()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        try:
            asked.append(await reader.read())  # b"" where the other one has hung up
        finally:
            writer.close()

    async def work(new: Agent) -> None:
        async with await asyncio.start_unix_server(talk, folder / SOCKET), asyncio.timeout(10):
            await soon(lambda: asked)
            new.stop()
            await soon(lambda: asked[1:])

    with node.starting() as new:
        asyncio.run(work(new))
    lock.release()


def test_takeover_lasts_long_old_agent_stays_ready(node: Node) -> None:
    """Its successor reads a checkpoint on a slow disk, say; the loop of the old one runs."""

    async def ask_and_wait(old: Agent) -> None:
        reader, writer = await asyncio.open_unix_connection(node.folder / "device-plugins" / SOCKET)
        writer.write(b"take over\n")
        assert await reader.readline() == b"yours\n"
        await asyncio.sleep(1.2)
        assert old._heartbeat.silence() < 1
        assert not old.not_ready_reason()
        writer.close()

    with node.agent() as old:
        asyncio.run(ask_and_wait(old))


def test_takeover_stranger_asks_for_something_else_is_hung_up_on(node: Node) -> None:
    async def say() -> bytes:
        reader, writer = await asyncio.open_unix_connection(node.folder / "device-plugins" / SOCKET)
        writer.write(b"give me the node\n")
        answer = await reader.read()
        writer.close()
        return answer

    with node.agent() as old:
        assert asyncio.run(say()) == b""
        assert not old.not_ready_reason()


@pytest.fixture
def listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Whether something listens on the agents' socket in `tmp_path`, which agents look after every few ms."""
    monkeypatch.setattr(takeover, "_CHECK_SECONDS", 0.005)
    return (tmp_path / SOCKET).exists


async def soon(found: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not found():
            await asyncio.sleep(0.005)


def test_listening_agent_that_handed_over_leaves_the_socket_of_its_successor(
    tmp_path: Path, listens: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old agent still listens while it hands over, which may take seconds; a third agent must reach the new one."""
    made: list[object] = []
    start = asyncio.start_unix_server

    async def counted(*arguments: Any) -> asyncio.Server:
        made.append(arguments)
        return await start(*arguments)

    monkeypatch.setattr(asyncio, "start_unix_server", counted)

    async def work() -> None:
        async with takeover.listening(tmp_path):
            await soon(listens)
            async with takeover.listening(tmp_path):
                await soon(lambda: len(made) == 2)
                await asyncio.sleep(0.1)  # 20 looks of the old one
                assert len(made) == 2

    asyncio.run(work())


def test_listening_ends_agent_that_stood_by_is_hung_up_on(tmp_path: Path, listens: Callable[[], bool]) -> None:
    """It then turns to the agent that serves now; the process of the former one may go on for hours."""

    async def work() -> None:
        async with takeover.listening(tmp_path) as others:
            await soon(listens)
            waiting = asyncio.create_task(takeover.stand_by(tmp_path))
            await soon(others.standing_by)
        async with asyncio.timeout(30):
            assert await waiting is None

    asyncio.run(work())


def test_kubelet_restart_agent_can_still_be_asked(node: Node) -> None:
    with node.agent() as old:
        node.kubelet.stop()
        until(old.not_ready_reason)
        node.kubelet.start()
        until(lambda: not old.not_ready_reason() and node.healthy_ids() == 200)
        until(lambda: (node.folder / "device-plugins" / SOCKET).exists())
        with node.starting() as new:
            until(lambda: not new.not_ready_reason())
            node.create(decided("p"))
            node.runs("p")


def test_shifts_successor_ends_replaced_process_serves_again(node: Node, drops: list[str]) -> None:
    """A new version that crashes after it took over leaves the node to the old one, which asked for nothing before."""
    with ExitStack() as stack:
        process = AgentProcess(lambda: stack.enter_context(node.made()))
        thread = threading.Thread(target=lambda: asyncio.run(process.run()))
        thread.start()
        stack.callback(thread.join, 60)
        stack.callback(process.stop)
        until(lambda: not process.not_ready_reason() and node.healthy_ids())
        first = process.agent
        with node.starting() as new:
            until(lambda: not new.not_ready_reason())
            until(
                lambda: process.agent is not first and not process.not_ready_reason()
            )  # else a rolling update would end it
            assert process.card_holdings().gpus == ()
            until(lambda: standing_by(new))
        until(lambda: process.card_holdings().gpus and not process.not_ready_reason())
        assert drops == []
        node.create(decided("p"))
        node.runs("p")


def test_successor_stopped_right_after_yours_gives_the_node_back_and_no_pod_fails(
    node: Node, drops: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had the node, served nothing and ended: pods failed until the old process had registered again."""
    monkeypatch.setattr(node_ownership, "_STAND_BY_SECONDS", 30.0)
    made: list[Agent] = []

    async def ask_and_be_stopped(folder: Path) -> takeover.Predecessor | None:
        predecessor = await takeover.request(folder)
        if predecessor is not None:
            made[-1].stop()
        return predecessor

    with ExitStack() as stack:
        process = AgentProcess(lambda: stack.enter_context(node.made()))
        thread = threading.Thread(target=lambda: asyncio.run(process.run()))
        thread.start()
        stack.callback(thread.join, 60)
        stack.callback(process.stop)
        until(lambda: not process.not_ready_reason() and node.healthy_ids())
        first = process.agent
        monkeypatch.setattr(node_ownership, "request", ask_and_be_stopped)
        arrivals = Arrivals(node, 40, 0.05)
        with node.made() as new:
            made.append(new)
            arrivals.start()
            asyncio.run(new.run())  # ends by itself
        until(lambda: process.agent is not first and process.card_holdings().gpus and not process.not_ready_reason())
        monkeypatch.setattr(node_ownership, "_STAND_BY_SECONDS", 0.0)  # nobody stands by after this one
        assert arrivals.not_running() == []
        assert drops == []


def standing_by(agent: Agent) -> bool:
    others = agent._ownership._other_agents
    return others is not None and others.standing_by() is not None
