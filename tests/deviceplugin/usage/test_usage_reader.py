"""The agent measures on a thread, says what it cannot know, and reports containers above their share."""

import asyncio
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pynvml
import pytest

from deviceplugin.isolation.backend import Measured
from deviceplugin.pods.container_runtime import RunningRow
from deviceplugin.usage import usage_reader
from deviceplugin.usage.container_use import ContainerUse, NodeShares, Usage
from deviceplugin.usage.usage_reader import UsageInputs, UsageReader, UsageSource
from mgpu.model.errors import RetryLater
from mgpu.model.ledger import Holding, Share
from mgpu.model.usage_problems import UsageProblem
from playground.gpu_processes import use
from playground.simulated_nvml import SimulatedNvml
from tests.builders import GIB, cards
from tests.deviceplugin.isolation.mps.fake import on_loop
from tests.deviceplugin.mig.rig import Flaky
from tests.deviceplugin.records import decided, read, started
from tests.deviceplugin.usage.proc import Proc, container_id, uid

GPUS = cards(1)
CARD = GPUS[0].uuid


class Rig:
    """A node with one card, where the pod `p` has 4 GiB. Its process is number 41."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "cards.mig.json"
        self.proc = Proc(folder / "proc")
        self.proc.run(41, pod=1, container=10)
        self.flaky = Flaky(SimulatedNvml(self.file, GPUS))
        self.running: list[RunningRow] | None = [RunningRow(container_id(10), uid(1), "c")]
        self.asked = 0
        self.held = False
        self.measured: list[Measured] = []
        self.events: list[str] = []
        self.changes = 0
        nvml: Any = self.flaky
        inputs = UsageInputs(self._shares, lambda: self.measured, self._running, lambda _: self.held)
        self.reader = UsageReader(UsageSource(nvml, self.proc.folder), inputs, self._over, self._changed)

    def _shares(self) -> NodeShares:
        pod = read(started(decided("p", "0")))
        pod = replace(pod, pod=replace(pod.pod, uid=uid(1)))
        held = Holding(uid(1), "ns", "p", "n1", "mgpu", (Share("c", 0, memory=4 * GIB),))
        return NodeShares(GPUS, GPUS, [held], [pod])

    async def _running(self) -> list[RunningRow]:
        self.asked += 1
        if self.running is None:
            raise RetryLater("the runtime is away")
        return self.running

    def _over(self, _: ContainerUse, text: str) -> None:
        self.events.append(text)

    def _changed(self) -> None:
        self.changes += 1

    async def read(self) -> Usage:
        await self.reader.read()
        return self.reader.usage


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def memory(usage: Usage) -> list[int | None]:
    return [one.memory for one in usage.containers]


@on_loop
async def test_use_of_a_container_is_read_from_the_driver_and_the_kernel(rig: Rig) -> None:
    use(rig.file, CARD, 41, memory=3 * GIB, sm=50)
    assert memory(await rig.read()) == [3 * GIB]
    (found,) = (await rig.read()).containers
    assert (found.pod, found.container, found.sm, found.limit) == ("p", "c", 0.5, 4 * GIB)
    assert rig.reader.usage.cards[0].memory == 3 * GIB
    assert (rig.events, rig.changes) == ([], 0)


@on_loop
async def test_runtime_is_asked_only_for_the_names_of_new_containers(rig: Rig) -> None:
    use(rig.file, CARD, 41, memory=GIB)
    for _ in range(3):
        await rig.read()
    assert rig.asked == 1
    rig.proc.run(42, pod=1, container=11)
    use(rig.file, CARD, 42, memory=GIB)
    rig.running = None
    assert memory(await rig.read()) == [2 * GIB], "the pod has no other container on the card"
    assert rig.asked == 2


@on_loop
async def test_container_over_its_share_gets_one_event_unless_it_is_held(rig: Rig) -> None:
    use(rig.file, CARD, 41, memory=5 * GIB)
    rig.held = True
    await rig.read()
    assert rig.events == []
    rig.held = False
    for _ in range(2):
        await rig.read()
    assert rig.events == [
        f"container c uses 5.0 GiB of card 0 ({CARD}), its share is 4.0 GiB, and nothing holds it to that"
    ]


@on_loop
async def test_problem_is_reported_when_it_changes_and_logged_once(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    use(rig.file, CARD, 41, memory=5 * GIB)
    rig.proc.write("1", "/")
    rig.proc.write("self", "/")
    for _ in range(2):
        found = await rig.read()
        assert (found.problem, memory(found), found.cards[0].memory) == (UsageProblem.NO_HOST_PIDS, [None], 5 * GIB)
    assert (rig.changes, len(caplog.messages), rig.events) == (1, 1, [])
    rig.proc.write("1", "/init.scope")
    assert (await rig.read()).problem is None
    assert rig.changes == 2


@on_loop
async def test_driver_that_fails_leaves_nothing_of_an_earlier_reading(rig: Rig) -> None:
    use(rig.file, CARD, 41, memory=GIB)
    await rig.read()
    rig.flaky.fail(0, pynvml.NVML_ERROR_UNKNOWN, "nvmlInit")
    found = await rig.read()
    assert (found.problem, memory(found), found.cards[0].memory) == (UsageProblem.NVML, [None], None)


@on_loop
async def test_driver_that_hangs_is_asked_by_one_thread_only(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_reader, "_ANSWER_SECONDS", 0.01)
    hanging = threading.Event()
    calls: list[int] = []

    def hang() -> Iterable[Measured]:
        calls.append(1)
        hanging.wait(60)
        return ()

    rig.reader._inputs = replace(rig.reader._inputs, measure=hang)  # type: ignore[arg-type]
    for _ in range(2):
        assert (await rig.read()).problem is UsageProblem.HANGS
    assert memory(rig.reader.usage) == [None]
    assert len(calls) == 1
    hanging.set()
    monkeypatch.setattr(usage_reader, "_ANSWER_SECONDS", 60)
    assert (await rig.read()).problem is None


@on_loop
async def test_error_of_a_back_end_is_raised_and_does_not_look_like_a_hanging_driver(rig: Rig) -> None:
    def fail() -> list[Measured]:
        raise ZeroDivisionError

    rig.reader._inputs = replace(rig.reader._inputs, measure=fail)
    with pytest.raises(ZeroDivisionError):
        await rig.read()


@on_loop
async def test_reader_repeats_until_it_ends_and_leaves_nothing_behind(rig: Rig) -> None:
    use(rig.file, CARD, 41, memory=GIB)
    task = asyncio.create_task(rig.reader.run(0.001))
    while not rig.reader.usage.containers or rig.reader.usage.containers[0].sm is None:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert rig.reader.usage == Usage()
