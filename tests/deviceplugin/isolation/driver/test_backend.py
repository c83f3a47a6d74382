"""The limits of the driver, on simulated cards with simulated cgroups."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.event_loop import Wakeup
from deviceplugin.isolation.backend import Ability, Measured, Unable
from deviceplugin.isolation.driver.backend import DriverBackend, DriverEvents, Surroundings
from deviceplugin.isolation.driver.containers import RunningContainer
from deviceplugin.isolation.driver.memory_limits import Limit, MemoryLimits
from deviceplugin.isolation.driver.toolkit_hook import ToolkitHook
from deviceplugin.isolation.limits import LimitedContainer, limits_of
from deviceplugin.pods.gpu_pod import GpuPod, LimitedPod, read_gpu_pod
from deviceplugin.pods.identity import Target
from mgpu.settings import load_settings
from playground.cgroup_limits import make_cgroup
from playground.gpu_processes import OutOfMemory, use
from playground.nvml_state import set_driver, set_switch
from playground.simulated_nvml import SimulatedNvml
from tests.builders import GIB, cards
from tests.deviceplugin.fake_node import FixedGpus
from tests.deviceplugin.records import decided

CARDS = cards(2)
CARD = CARDS[0].uuid
HOOK = ToolkitHook("/usr/bin/nvidia-cdi-hook", ("nvidia-cdi-hook",))


@dataclass
class FakePods:
    pods: dict[str, GpuPod] = field(default_factory=dict)
    limited: list[LimitedPod] = field(default_factory=list)

    def by_uid(self, uid: str) -> GpuPod | None:
        return self.pods.get(uid)

    def limited_pods(self) -> list[LimitedPod]:
        return self.limited


@dataclass
class FakeRuntime:
    containers: list[RunningContainer] = field(default_factory=list)
    announce: Callable[[], None] = lambda: None

    async def running(self) -> list[RunningContainer]:
        return self.containers

    async def follow(self, announced: Callable[[], None]) -> None:
        self.announce = announced
        await asyncio.Event().wait()


class Rig:
    """A node with driver R615 and cgroups of version 2, and a back end, which `restart` replaces."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "cards.mig.json"
        set_driver(self.file, "615.65.06", memory_accounting="dmem")
        self.root = make_cgroup(folder / "cgroup", dmem=False)
        self.nvml = SimulatedNvml(self.file, CARDS)
        self.limits = MemoryLimits(self.nvml)
        self.pods = FakePods()
        self.runtime = FakeRuntime()
        self.said: list[str] = []
        self.hook: ToolkitHook | None = None
        self.is_chosen = False
        self.restart()

    def restart(self) -> DriverBackend:
        self.backend = DriverBackend(
            self.limits,
            self.runtime,
            self.pods,
            FixedGpus(CARDS),
            Surroundings(self.root, lambda: self.hook, is_chosen=lambda: self.is_chosen),
            Wakeup(),
            DriverEvents(
                lambda gpu_pod, text: self.said.append(f"{gpu_pod.pod.name}: {text}"),
                lambda pod, text: self.said.append(f"{pod.name}: {text}"),
            ),
        )
        return self.backend

    def take(self, name: str, mib: int) -> Target:
        gpu_pod = read_gpu_pod(decided(name, "0", core=10, mib=mib), load_settings())
        assert gpu_pod is not None
        self.pods.pods[gpu_pod.pod.uid] = gpu_pod
        return Target(gpu_pod, "c")

    def start(self, target: Target, attempt: int = 0) -> Path:
        """Start the container in a cgroup of its own, and return the cgroup."""
        folder = make_cgroup(self.root / f"{target.gpu_pod.pod.name}-{attempt}")
        running = RunningContainer(folder.name, target.gpu_pod.pod.uid, target.container, folder)
        self.runtime.containers = [c for c in self.runtime.containers if c.uid != running.uid] + [running]
        return folder

    def limit(self, cgroup: Path) -> int | None:
        found = self.limits.read(CARD, cgroup)
        assert isinstance(found, Limit)
        return found.hard

    def check(self) -> None:
        asyncio.run(self.backend.check())


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def limited(target: Target) -> LimitedContainer:
    return LimitedContainer(target, limits_of(target.shares, CARDS))


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def prepared(rig: Rig, target: Target) -> Any:
    return run(rig.backend.prepare([limited(target)], 0.0))[target.key]


def test_memory_alone_is_limited_on_any_number_of_cards(rig: Rig) -> None:
    found = rig.backend.ability()
    assert isinstance(found, Ability)
    assert replace(found, caution="") == Ability(memory=True, compute=False, several_cards=True, resizable=True)
    assert "a container runs for a moment before its limit is set" in found.caution
    rig.hook = HOOK
    found = rig.restart().ability()
    assert isinstance(found, Ability)
    assert found.caution == "managed memory is not limited"


def test_node_without_what_the_driver_needs_is_unable(rig: Rig, tmp_path: Path) -> None:
    set_driver(rig.file, "580.126.09")
    found = rig.restart().ability()
    assert isinstance(found, Unable)
    assert found.reason.startswith("the driver is older than R615")
    set_driver(rig.file, "615.65.06", memory_accounting="")
    found = rig.restart().ability()
    assert isinstance(found, Unable)
    assert "the driver does not limit memory" in found.reason
    rig.root = tmp_path
    assert rig.restart().ability() == Unable(f"{tmp_path} is not the root of cgroups of version 2")


def test_limit_holds_the_container_after_its_start(rig: Rig) -> None:
    target = rig.take("p", 2048)
    assert not prepared(rig, target).hooks
    cgroup = rig.start(target)
    assert rig.limit(cgroup) is None
    rig.check()
    assert rig.limit(cgroup) == 2 * GIB
    use(rig.file, CARD, 7, memory=2 * GIB, cgroup=cgroup)
    with pytest.raises(OutOfMemory):
        use(rig.file, CARD, 7, memory=2 * GIB + 1)
    rig.check()
    assert rig.backend.measure() == (Measured(target.key, CARD, 2 * GIB, None, 2 * GIB),)
    assert rig.said == []


def test_hook_of_the_toolkit_sets_the_limit_before_the_start(rig: Rig) -> None:
    rig.hook = HOOK
    edits = prepared(rig, rig.take("p", 2048))
    assert edits.env["NVIDIA_GPU_MEMORY_LIMIT"] == "2048"
    assert [hook.name for hook in edits.hooks] == ["createRuntime"]


def test_container_that_starts_again_is_limited_again(rig: Rig) -> None:
    target = rig.take("p", 1024)
    prepared(rig, target)
    rig.start(target)
    rig.check()
    again = rig.start(target, attempt=1)
    rig.check()
    assert rig.limit(again) == GIB


def test_next_agent_keeps_the_limits_in_force(rig: Rig) -> None:
    target = rig.take("p", 1024)
    cgroup = rig.start(target)
    rig.restart()
    rig.backend.recover({target.key: {}})
    rig.check()
    assert rig.limit(cgroup) == GIB


def test_containers_of_other_back_ends_and_of_gone_pods_are_left_alone(rig: Rig) -> None:
    other, gone = rig.take("other", 1024), rig.take("gone", 1024)
    cgroups = [rig.start(other), rig.start(gone)]
    prepared(rig, gone)
    rig.backend.keep_only([])
    rig.backend.recover({("another", "c"): {}})
    rig.check()
    assert [rig.limit(cgroup) for cgroup in cgroups] == [None, None]


def test_limit_that_cannot_be_set_is_said_once_until_it_can(rig: Rig) -> None:
    set_switch(rig.file, privileged=False)
    target = rig.take("p", 1024)
    prepared(rig, target)
    cgroup = rig.start(target)
    rig.check()
    rig.check()
    (said,) = rig.said
    assert said.startswith("p: the memory of container c on card 0 is not limited: the agent may not set limits")
    set_switch(rig.file, privileged=True)
    rig.check()
    assert rig.limit(cgroup) == GIB
    set_switch(rig.file, privileged=False)
    rig.start(target, attempt=1)
    rig.check()
    assert len(rig.said) == 2


def test_cgroup_that_is_gone_or_unknown_is_said(rig: Rig) -> None:
    target = rig.take("p", 1024)
    prepared(rig, target)
    rig.runtime.containers = [RunningContainer("x", target.gpu_pod.pod.uid, "c", None)]
    rig.check()
    assert rig.said[-1].endswith("the container runtime does not report its cgroup")
    rig.runtime.containers = [RunningContainer("y", target.gpu_pod.pod.uid, "c", rig.root / "gone")]
    rig.check()
    assert rig.said[-1].endswith("the cgroup is gone, or the agent cannot open it")


def test_container_that_ends_during_the_check_is_no_reason_for_an_event(rig: Rig) -> None:
    target = rig.take("p", 1024)
    prepared(rig, target)
    listed = [[RunningContainer("x", target.gpu_pod.pod.uid, "c", rig.root / "gone")], []]

    async def running() -> list[RunningContainer]:
        return listed.pop(0)

    rig.runtime.running = running  # type: ignore[method-assign]
    rig.check()
    assert (rig.said, listed) == ([], [])


def test_use_above_the_limit_before_it_was_set_is_said(rig: Rig) -> None:
    target = rig.take("p", 1024)
    prepared(rig, target)
    cgroup = rig.start(target)
    use(rig.file, CARD, 7, memory=2 * GIB, cgroup=cgroup)
    rig.check()
    assert rig.said == [
        "p: the memory of container c on card 0 is not limited: the driver did not take the limit; it does not lower "
        "one below the present use"
    ]


def test_pod_of_an_mtgpupod_is_limited_where_the_node_has_chosen_the_driver(rig: Rig) -> None:
    rig.pods.limited = [LimitedPod("default", "m", "uid-m", CARD, 500, 1000, GIB)]
    cgroup = make_cgroup(rig.root / "m")
    rig.runtime.containers = [RunningContainer("m", "uid-m", "main", cgroup)]
    rig.check()
    assert rig.limit(cgroup) is None
    rig.is_chosen = True
    rig.check()
    assert rig.limit(cgroup) == GIB


def test_running_container_is_resized_unless_it_uses_more(rig: Rig) -> None:
    target = rig.take("p", 2048)
    prepared(rig, target)
    cgroup = rig.start(target)
    rig.check()
    larger, smaller = rig.take("p", 4096), rig.take("p", 1024)
    assert run(rig.backend.resize(limited(larger))) is None
    assert rig.limit(cgroup) == 4 * GIB
    use(rig.file, CARD, 7, memory=3 * GIB, cgroup=cgroup)
    found = run(rig.backend.resize(limited(smaller)))
    assert found == Unable("default/p container c: it uses 3072 MiB of card 0, more than 1024 MiB")
    assert rig.limit(cgroup) == 4 * GIB
    use(rig.file, CARD, 7, memory=GIB)
    assert run(rig.backend.resize(limited(smaller))) is None
    assert rig.limit(cgroup) == GIB
    rig.runtime.containers = []
    assert run(rig.backend.resize(limited(larger))) == Unable("default/p container c does not run")


def test_announced_container_is_limited_without_a_wait_for_the_next_check(rig: Rig) -> None:
    target = rig.take("p", 1024)

    async def announced() -> None:
        task = asyncio.create_task(rig.backend.run())
        await rig.backend.prepare([limited(target)], 0.0)
        await asyncio.sleep(0.01)
        cgroup = rig.start(target)
        rig.runtime.announce()
        async with asyncio.timeout(5):
            while rig.limit(cgroup) is None:
                await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(announced())
