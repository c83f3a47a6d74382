"""Which back end limits a container, and what happens if it cannot."""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.delivery.cdi import CdiFiles, Edits, new_name
from deviceplugin.isolation.backend import Ability, Key, Measured, Unable
from deviceplugin.isolation.choice import Choice
from deviceplugin.isolation.isolation import Isolation, Policy
from deviceplugin.isolation.limits import LimitedContainer
from deviceplugin.pods.gpu_pod import GpuPod, read_gpu_pod
from deviceplugin.pods.identity import Refused, Target
from mgpu.model.cards import Card
from mgpu.settings import load_settings
from tests.builders import cards
from tests.deviceplugin.fake_node import FixedGpus
from tests.deviceplugin.records import decided

ALL = Ability(memory=True, compute=True, several_cards=True, resizable=True)
MEMORY = Ability(memory=True, compute=False, several_cards=True)


@dataclass
class FakeBackend:
    """A back end that records what it is asked to do."""

    name: str
    able: Ability | Unable = ALL
    prepared: list[Key] = field(default_factory=list)
    limited: list[tuple[Card, ...]] = field(default_factory=list)
    recovered: Mapping[Key, Mapping[str, str]] = field(default_factory=dict)
    resized: list[Key] = field(default_factory=list)
    released: list[Key] = field(default_factory=list)

    def ability(self) -> Ability | Unable:
        return self.able

    async def prepare(self, containers: Sequence[LimitedContainer], deadline: float) -> Mapping[Key, Edits]:  # noqa: ARG002
        self.prepared += [container.target.key for container in containers]
        self.limited += [tuple(limit.card for limit in container.limits) for container in containers]
        return {container.target.key: Edits({"LIMIT": self.name}) for container in containers}

    def lift(self, variables: Iterable[str]) -> Mapping[str, str]:
        return dict.fromkeys(variables, "no limit")

    def mark_started(self, keys: Iterable[Key]) -> None: ...

    def release(self, keys: Collection[Key]) -> None:
        self.released += keys

    def keep_only(self, uids: Collection[str]) -> None: ...

    def recover(self, environments: Mapping[Key, Mapping[str, str]]) -> None:
        self.recovered = environments

    async def run(self) -> None: ...

    async def resize(self, container: LimitedContainer) -> Unable | None:
        self.resized.append(container.target.key)
        return None

    def measure(self) -> Sequence[Measured]:
        return [Measured(("u", "c"), self.name)]


class NoSlices:
    async def ready_slices(self, targets: Sequence[Target], deadline: float) -> Mapping[Key, Edits]:  # noqa: ARG002
        return {}


class Rig:
    """The back ends of a node with two cards, of which the policy chooses one."""

    def __init__(self, folder: Path, policy: Policy, *backends: FakeBackend) -> None:
        self.files = CdiFiles(folder)
        self.said: list[str] = []
        self.isolation = Isolation(
            {backend.name: backend for backend in backends},
            NoSlices(),
            policy,
            self.files,
            FixedGpus(cards(2)),
            lambda gpu_pod, reason: self.said.append(f"{gpu_pod.pod.name}: {reason}"),
        )

    def ready(self, gpu_pod: GpuPod) -> Mapping[str, str] | None:
        """Return the variables of the container, or None if nothing limits it."""
        found = asyncio.run(self.isolation.ready([Target(gpu_pod, "c")], 0.0))
        return dict(found[gpu_pod.pod.uid, "c"].env) if found else None


def pod_of(raw: dict[str, Any], isolation: str = "") -> GpuPod:
    found = read_gpu_pod(raw, load_settings())
    assert found is not None
    assert found.request is not None
    return replace(found, request=replace(found.request, isolation=isolation))


def test_container_gets_the_limits_of_the_chosen_back_end_and_its_name(tmp_path: Path) -> None:
    driver, mps = FakeBackend("driver"), FakeBackend("mps")
    rig = Rig(tmp_path, Policy("auto"), mps, driver)
    assert rig.ready(pod_of(decided("p", "0"))) == {"LIMIT": "driver", "MGPU_ISOLATION": "driver"}
    assert (mps.prepared, rig.said) == ([], [])
    assert rig.isolation.backend_of(("uid-p", "c")) == "driver"
    rig.isolation.keep_only(["uid-q"])
    assert rig.isolation.backend_of(("uid-p", "c")) == "none"


def test_container_that_starts_again_under_another_back_end_leaves_the_former_one(tmp_path: Path) -> None:
    label = ["driver"]
    driver, mps = FakeBackend("driver"), FakeBackend("mps")
    rig = Rig(tmp_path, Policy("none", label=lambda: label[0]), driver, mps)
    key = ("uid-p", "c")
    rig.ready(pod_of(decided("p", "0")))
    assert (driver.released, mps.released) == ([], [key])
    label[0] = "mps"
    rig.ready(pod_of(decided("p", "0")))
    assert (driver.released, mps.released, rig.isolation.backend_of(key)) == ([key], [key], "mps")
    label[0] = "none"
    rig.ready(pod_of(decided("p", "0")))
    assert (driver.released, mps.released, rig.isolation.backend_of(key)) == ([key, key], [key, key], "none")


def test_without_a_back_end_nothing_is_limited_and_nothing_is_said(tmp_path: Path) -> None:
    rig = Rig(tmp_path, Policy("none"), FakeBackend("mps"))
    assert rig.ready(pod_of(decided("p", "0"))) is None
    assert rig.said == []


def test_pod_that_names_a_back_end_gets_it_whatever_the_node_has_chosen(tmp_path: Path) -> None:
    rig = Rig(tmp_path, Policy("none"), FakeBackend("hami-core"))
    assert rig.isolation.offers_hami_core()
    found = rig.ready(pod_of(decided("p", "0"), "hami-core"))
    assert found == {"LIMIT": "hami-core", "MGPU_ISOLATION": "hami-core"}


@pytest.mark.parametrize(
    ("policy", "named", "backends", "said"),
    [
        (Policy("driver"), "", [FakeBackend("driver", Unable("it is old"))], "isolation back end driver: it is old"),
        (Policy("none"), "hami-core", [], "isolation back end hami-core: this agent does not have it"),
        (
            Policy("auto"),
            "",
            [FakeBackend("mps", Unable("no program"))],
            "no isolation back end works here: mps: no program",
        ),
    ],
)
def test_pod_without_the_limits_that_it_should_have_gets_an_event(
    tmp_path: Path, policy: Policy, named: str, backends: list[FakeBackend], said: str
) -> None:
    rig = Rig(tmp_path, policy, *backends)
    assert rig.ready(pod_of(decided("p", "0"), named)) is None
    assert rig.said == [f"p: the share of container c is not enforced: {said}"]


def test_what_a_back_end_cannot_hold_is_said_and_the_rest_is_held(tmp_path: Path) -> None:
    rig = Rig(tmp_path, Policy("driver"), FakeBackend("driver", MEMORY))
    assert rig.ready(pod_of(decided("p", "0", core=30, mib=1024))) is not None
    text = "its compute on card 0 is not limited; isolation back end driver"
    assert rig.said == [f"p: the share of container c is not enforced: {text}"]


def test_required_limits_that_cannot_be_held_keep_the_container_from_starting(tmp_path: Path) -> None:
    rig = Rig(tmp_path, Policy("driver", required=True), FakeBackend("driver", MEMORY))
    with pytest.raises(Refused, match=r"compute on card 0 is not limited.*isolationRequired"):
        rig.ready(pod_of(decided("p", "0", core=30, mib=1024)))


def test_next_agent_finds_each_container_with_its_back_end(tmp_path: Path) -> None:
    files = CdiFiles(tmp_path)
    files.write(new_name(), "a", "c", Edits({"MGPU_ISOLATION": "driver", "X": "1"}))
    files.write(new_name(), "b", "c", Edits({"CUDA_MPS_PIPE_DIRECTORY": "/p"}))
    files.write(new_name(), "d", "c", Edits({"NVIDIA_VISIBLE_DEVICES": "GPU-0"}))
    driver, mps = FakeBackend("driver"), FakeBackend("mps")
    rig = Rig(tmp_path, Policy("none"), driver, mps)
    assert driver.recovered == {("a", "c"): {"MGPU_ISOLATION": "driver", "X": "1"}}
    assert mps.recovered == {("b", "c"): {"CUDA_MPS_PIPE_DIRECTORY": "/p"}}
    names = [rig.isolation.backend_of((uid, "c")) for uid in "abd"]
    assert names == ["driver", "mps", "none"]


def test_running_container_is_resized_by_its_own_back_end(tmp_path: Path) -> None:
    driver = FakeBackend("driver")
    rig = Rig(tmp_path, Policy("driver"), driver)
    target = Target(pod_of(decided("p", "0")), "c")
    assert asyncio.run(rig.isolation.resize(target)) is None
    assert driver.resized == []
    rig.ready(target.gpu_pod)
    assert asyncio.run(rig.isolation.resize(target)) is None
    assert driver.resized == [target.key]
    driver.able = MEMORY
    refused = asyncio.run(rig.isolation.resize(target))
    assert refused == Unable("isolation back end driver: it limits a container only at its start")


def test_label_of_the_node_overrides_the_setting(tmp_path: Path) -> None:
    rig = Rig(tmp_path, Policy("none", label=lambda: "mps"), FakeBackend("mps"))
    assert rig.isolation.chosen() == Choice("mps")
    assert [row.card for row in rig.isolation.measure()] == ["mps"]
