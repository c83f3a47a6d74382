"""What a container gets so that HAMi-core limits it, and what becomes of its folder."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.delivery.cdi import Edits, Mount
from deviceplugin.isolation.backend import Ability, Measured, Unable
from deviceplugin.isolation.hami_core.backend import HamiCoreBackend, make_hami_core
from deviceplugin.isolation.hami_core.folders import Folders, NoMounts
from deviceplugin.isolation.limits import CardLimit, LimitedContainer, limits_of
from deviceplugin.pods.gpu_pod import read_gpu_pod
from deviceplugin.pods.identity import Refused, Target
from mgpu.settings import load_settings
from tests.builders import GIB, cards
from tests.deviceplugin.fake_node import FixedGpus
from tests.deviceplugin.isolation.hami_core.region import add_process, region
from tests.deviceplugin.records import decided

CARDS = cards(2)


class FakeMounts:
    def __init__(self) -> None:
        self.mounted: set[Path] = set()

    def mount(self, folder: Path) -> None:
        self.mounted.add(folder)

    def unmount(self, folder: Path) -> None:
        self.mounted.discard(folder)


class Rig:
    def __init__(self, folder: Path, *, heeds_disable: bool = False) -> None:
        self.library = folder / "libvgpu.so"
        self.library.write_bytes(b"")
        self.state = folder / "state"
        self.mounts = FakeMounts()
        self.said: list[str] = []
        self.backend = HamiCoreBackend(
            self.library,
            Folders(self.state, self.mounts),
            FixedGpus(CARDS),
            lambda gpu_pod, text: self.said.append(f"{gpu_pod.pod.name}: {text}"),
            heeds_disable=heeds_disable,
        )

    def prepare(self, container: LimitedContainer) -> Edits | None:
        return asyncio.run(self.backend.prepare([container], 0.0)).get(container.target.key)

    def resize(self, container: LimitedContainer) -> Any:
        return asyncio.run(self.backend.resize(container))


def container(name: str = "p", mib: int = 2048, core: int = 30, **env: str) -> LimitedContainer:
    raw = decided(name, "0", core=core, mib=mib)
    raw["spec"]["containers"][0]["env"] = [{"name": key, "value": text} for key, text in env.items()]
    gpu_pod = read_gpu_pod(raw, load_settings())
    assert gpu_pod is not None
    target = Target(gpu_pod, "c")
    return LimitedContainer(target, limits_of(target.shares, CARDS))


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_container_gets_the_library_and_its_limits(rig: Rig) -> None:
    folder = rig.state / "uid-p_c"
    assert rig.prepare(container()) == Edits(
        {
            "CUDA_DEVICE_MEMORY_LIMIT_0": "2048m",
            "CUDA_DEVICE_SM_LIMIT": "30",
            "CUDA_DEVICE_SM_LIMIT_0": "30",
            "GPU_CORE_UTILIZATION_POLICY": "force",
            "CUDA_DEVICE_MEMORY_SHARED_CACHE": "/run/mgpu-hami-core/region.cache",
        },
        (
            Mount(str(rig.library), "/usr/local/vgpu/libvgpu.so", read_only=True),
            Mount(str(rig.state / "ld.so.preload"), "/etc/ld.so.preload", read_only=True),
            Mount("/dev/null", "/overrideEnv", read_only=True),
            Mount(str(folder / "lock"), "/tmp/vgpulock"),
            Mount(str(folder / "shared"), "/run/mgpu-hami-core"),
        ),
    )
    assert (rig.state / "ld.so.preload").read_text() == "/usr/local/vgpu/libvgpu.so\n"
    assert (folder / "shared").stat().st_mode & 0o7777 == 0o1777
    assert rig.mounts.mounted == {folder}


def test_each_card_has_its_own_limit_and_only_what_the_share_states(rig: Rig) -> None:
    limits = (CardLimit(CARDS[0], GIB, None), CardLimit(CARDS[1], None, 505))
    found = rig.prepare(LimitedContainer(container().target, limits))
    assert found is not None
    assert {key: text for key, text in found.env.items() if "LIMIT" in key} == {
        "CUDA_DEVICE_MEMORY_LIMIT_0": "1024m",
        "CUDA_DEVICE_SM_LIMIT": "50",
        "CUDA_DEVICE_SM_LIMIT_1": "50",
    }


def test_node_without_the_library_is_unable(rig: Rig) -> None:
    assert isinstance(rig.backend.ability(), Ability)
    rig.library.unlink()
    found = rig.backend.ability()
    assert isinstance(found, Unable)
    assert "does not exist" in found.reason
    unset = make_hami_core(load_settings().deviceplugin, FixedGpus(CARDS), lambda *_: None)
    assert unset.ability() == Unable("deviceplugin.hamiCoreDir is not set")


def test_pod_that_disables_control_is_limited_unless_the_setting_heeds_it(tmp_path: Path) -> None:
    disabling = container(CUDA_DISABLE_CONTROL="true")
    assert Rig(tmp_path).prepare(disabling) is not None
    heeding = Rig(tmp_path, heeds_disable=True)
    assert heeding.prepare(disabling) is None
    (said,) = heeding.said
    assert said.startswith("p: the share of container c is not enforced: the pod sets CUDA_DISABLE_CONTROL=true")
    assert heeding.prepare(container("q", CUDA_DISABLE_CONTROL="false")) is not None


def test_folder_that_cannot_be_made_refuses_the_start(rig: Rig) -> None:
    rig.state.write_text("a file")
    with pytest.raises(Refused, match="HAMi-core's folder cannot be made: File exists"):
        rig.prepare(container())


def test_folder_is_removed_with_its_pod_and_not_before(rig: Rig) -> None:
    for name in "pq":
        rig.prepare(container(name))
    (rig.state / "uid-p_c/shared/by a container").mkdir()
    (rig.state / "foreign").mkdir()
    rig.backend.keep_only(["uid-q"])
    assert sorted(file.name for file in rig.state.iterdir()) == ["foreign", "ld.so.preload", "uid-q_c"]
    assert rig.mounts.mounted == {rig.state / "uid-q_c"}


def test_measured_use_is_bounded_by_the_card_and_only_of_known_cards(rig: Rig) -> None:
    rig.prepare(container())
    made = region(CARDS[0].uuid, "GPU-foreign", limit=2 * GIB)
    add_process(made, 1, 0, GIB, sm=25)
    add_process(made, 2, 0, 2**63, sm=2**40)
    (rig.state / "uid-p_c/shared/region.cache").write_bytes(bytes(made))
    assert rig.backend.measure() == [Measured(("uid-p", "c"), CARDS[0].uuid, CARDS[0].memory, 1.0, 2 * GIB)]


def test_next_agent_measures_the_containers_of_the_earlier_one(rig: Rig, tmp_path: Path) -> None:
    rig.prepare(container())
    (rig.state / "uid-p_c/shared/region.cache").write_bytes(bytes(region(CARDS[0].uuid)))
    later = HamiCoreBackend(rig.library, Folders(tmp_path / "state", NoMounts()), FixedGpus(CARDS), lambda *_: None)
    assert later.measure() == []
    later.recover({("uid-p", "c"): {}})
    assert [row.key for row in later.measure()] == [("uid-p", "c")]


def test_running_container_is_resized_unless_it_uses_more(rig: Rig) -> None:
    rig.prepare(container())
    found = rig.resize(container(mib=4096))
    assert isinstance(found, Unable)
    assert "the library's file cannot be opened" in found.reason
    file = rig.state / "uid-p_c/shared/region.cache"
    made = region(CARDS[0].uuid, limit=2 * GIB)
    add_process(made, 1, 0, 3 * GIB)
    file.write_bytes(bytes(made))
    assert rig.resize(container(mib=4096)) is None
    assert rig.backend.measure()[0].memory_limit == 4 * GIB
    found = rig.resize(container(mib=1024))
    assert found == Unable(f"default/p container c: it uses 3072 MiB of card {CARDS[0].uuid}, more than 1024 MiB")
    assert rig.backend.measure()[0].memory_limit == 4 * GIB
    without_memory = replace(container(), limits=(CardLimit(CARDS[0], None, 100),))
    assert rig.resize(without_memory) is None
