"""The MIG driver on a simulated NVML."""

from pathlib import Path

import pynvml
import pytest

from deviceplugin.mig.mig_driver import MigInstance, MigRefused, NvmlMig
from mgpu.model.errors import RetryLater
from playground.nvml_state import Compute as ComputeInstance
from playground.nvml_state import changing, mig_uuid, register, set_switch
from playground.simulated_nvml import SimulatedNvml
from tests.deviceplugin.mig.rig import GPU, H100, T4, Rig, gpu, instance

TWO = instance("2g.20gb@2")


def test_cards_are_read_with_their_instances(tmp_path: Path) -> None:
    rig = Rig(tmp_path, gpu(), gpu(1, T4, 16), gpu(2, H100)).on()
    rig.make(instance("1g.10gb+me@6"), TWO)
    register(rig.file, rig.made()[TWO], 5)
    a100, t4, h100 = rig.driver.read()
    assert (a100.capable, a100.current, a100.pending, a100.busy) == (True, True, True, True)
    assert [(made.instance, made.busy) for made in a100.instances] == [(TWO, True), (instance("1g.10gb+me@6"), False)]
    assert all(made.uuid.startswith("MIG-") for made in a100.instances)
    assert (t4.capable, t4.layout) == (False, None)
    assert (h100.capable, h100.current, h100.instances) == (True, False, ())


def test_create_and_destroy_are_idempotent(rig: Rig) -> None:
    first = rig.driver.create(GPU, TWO)
    assert rig.driver.create(GPU, TWO) == first == MigInstance(TWO, rig.made()[TWO], busy=False)
    for _ in range(2):
        rig.driver.destroy(GPU, TWO)
        assert rig.made() == {}


def test_profile_has_the_name_that_pods_request(tmp_path: Path) -> None:
    """Some drivers round the memory differently, or the card's memory differs from the name of its model."""
    rig = Rig(tmp_path, gpu(gib=39)).on()
    assert rig.driver.create(GPU, instance("7g.40gb@0")).uuid
    assert [made.instance.profile for made in rig.card().instances] == ["7g.40gb"]


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("2g.20gb@3", "NVML rejects the arguments"),
        ("2g.20gb@2", "not have enough free capacity"),
        ("3g.71gb@0", "has no profile 3g.71gb; it has 1g.10gb"),
    ],
)
def test_refusal_of_nvml_is_reported(rig: Rig, wanted: str, said: str) -> None:
    rig.make(instance("3g.40gb@0"))
    with pytest.raises(MigRefused, match=said):
        rig.driver.create(GPU, instance(wanted))


def test_instance_in_use_is_not_destroyed(rig: Rig) -> None:
    uuid = rig.make(TWO).made()[TWO]
    register(rig.file, uuid, 5)
    with pytest.raises(MigRefused, match=r"destroying 2g.20gb at 2 on GPU-0: it is in use"):
        rig.driver.destroy(GPU, TWO)
    assert rig.made() == {TWO: uuid}


def test_without_permission_no_card_looks_empty(rig: Rig) -> None:
    set_switch(rig.file, privileged=False)
    with pytest.raises(MigRefused, match="must run privileged"):
        rig.driver.read()


def test_missing_driver_and_lost_card_raise_retry_later(tmp_path: Path) -> None:
    with pytest.raises(RetryLater):
        Rig(tmp_path).driver.create("GPU-gone", TWO)
    rig = Rig(tmp_path)
    rig.flaky.fail(0, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    with pytest.raises(RetryLater, match="NVML"):
        rig.driver.read()


def test_card_that_does_not_answer_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(tmp_path, gpu(), gpu(1))
    rig.flaky.fail(0, pynvml.NVML_ERROR_GPU_IS_LOST, "nvmlDeviceGetMigMode")
    assert [card.uuid for card in rig.driver.read()] == ["GPU-1"]
    assert "card 0 does not answer queries about MIG" in caplog.text


def test_card_is_busy_where_nvml_does_not_list_processes(rig: Rig) -> None:
    rig.make(TWO)
    rig.flaky.fail(0, pynvml.NVML_ERROR_UNKNOWN, "nvmlDeviceGetComputeRunning")
    assert [made.busy for made in rig.driver.read()[0].instances] == [True]


def test_failed_compute_instance_leaves_no_gpu_instance(rig: Rig) -> None:
    rig.flaky.fail(0, pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES, "nvmlGpuInstanceCreateComputeInstance")
    with pytest.raises(MigRefused):
        rig.driver.create(GPU, TWO)
    assert rig.made() == {}


def test_half_made_instance_has_no_uuid_until_it_is_completed(rig: Rig) -> None:
    """An agent died in the middle, or an administrator created a compute instance that takes only a part."""
    rig.make(TWO)
    for compute in ([], [ComputeInstance(0, 0, mig_uuid(GPU, 99, 0))]):
        with changing(rig.file) as state:
            state.cards[GPU].instances[0].compute = compute
        assert rig.made() == {TWO: ""}
        assert rig.driver.create(GPU, TWO).uuid == rig.made()[TWO] != ""


def test_nvml_is_open_only_during_calls(tmp_path: Path) -> None:
    nvml = SimulatedNvml(tmp_path / "mig.json", (gpu(),))
    driver = NvmlMig(nvml)
    driver.set_mode(GPU, on=True)
    with pytest.raises(MigRefused):
        driver.create(GPU, instance("2g.20gb@1"))
    with pytest.raises(pynvml.NVMLError) as caught:
        nvml.nvmlDeviceGetCount()
    assert caught.value.value == pynvml.NVML_ERROR_UNINITIALIZED
