"""Changes of a card's MIG instances to the planned ones, and their rollback."""

from pathlib import Path

import pynvml
import pytest

from deviceplugin.mig.instance_changes import RollbackFailed, apply
from deviceplugin.mig.mig_driver import MigRefused
from mgpu.model.errors import RetryLater
from playground.nvml_state import reboot, register
from tests.deviceplugin.mig.rig import CHANGES, GPU, Crash, Rig, instance, instances


def test_card_is_cut_as_planned_and_cut_again(rig: Rig) -> None:
    for plan in (
        instances("1g.10gb@0", "2g.20gb@2", "3g.40gb@4"),
        instances("4g.40gb@0", "3g.40gb@4"),
        instances("7g.80gb@0"),
        instances(),
    ):
        apply(rig.driver, GPU, plan, ())
        assert rig.made().keys() == plan


def test_instances_that_stay_are_not_touched(rig: Rig) -> None:
    before = rig.make(instance("2g.20gb@0"), instance("3g.40gb@4")).made()
    apply(rig.driver, GPU, instances("2g.20gb@0", "2g.20gb@4"), ())
    assert rig.made()[instance("2g.20gb@0")] == before[instance("2g.20gb@0")]


@pytest.mark.parametrize("how", ["pod", "process"])
def test_plan_without_an_instance_in_use_is_refused(rig: Rig, how: str) -> None:
    used = instance("2g.20gb@0")
    before = rig.make(used, instance("3g.40gb@4")).made()
    if how == "process":
        register(rig.file, before[used], 1)
    with pytest.raises(MigRefused, match=r"GPU-0: 2g.20gb at 0 in use, but not in the plan"):
        apply(rig.driver, GPU, instances("7g.80gb@0"), [used] if how == "pod" else [])
    assert rig.made() == before


def test_plan_that_does_not_fit_destroys_nothing(rig: Rig) -> None:
    before = rig.make(instance("3g.40gb@4")).made()
    for plan in (instances("2g.20gb@1"), instances("2g.20gb@0", "1g.10gb@1"), instances("5g.50gb@0")):
        with pytest.raises(MigRefused, match="GPU-0: "):
            apply(rig.driver, GPU, plan, ())
    assert rig.made() == before


def test_card_that_is_not_in_mig_mode_is_refused(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    with pytest.raises(MigRefused, match="GPU-0 is not in MIG mode"):
        apply(rig.driver, GPU, instances("7g.80gb@0"), ())
    with pytest.raises(RetryLater, match="GPU-9 does not answer"):
        apply(rig.driver, "GPU-9", instances("7g.80gb@0"), ())


def test_instances_in_use_are_created_at_their_places_after_a_reboot(rig: Rig) -> None:
    used, plan = instances("1g.10gb@3", "2g.20gb@4"), instances("1g.10gb@3", "2g.20gb@4", "2g.20gb@0")
    before = rig.make(*plan).made()
    reboot(rig.file)
    apply(rig.driver, GPU, plan, used)
    assert rig.made().keys() == plan
    assert not {*rig.made().values()} & {*before.values()}


def test_instances_in_use_are_created_again_although_the_plan_is_refused(rig: Rig) -> None:
    """A free instance in their way is destroyed; other instances stay."""
    rig.make(instance("1g.10gb@1"), instance("1g.10gb@2"))
    with pytest.raises(MigRefused, match=r"2g.20gb at 0 in use, but not in the plan"):
        apply(rig.driver, GPU, instances("7g.80gb@0"), instances("2g.20gb@0"))
    assert rig.made().keys() == instances("2g.20gb@0", "1g.10gb@2")


def test_busy_instance_is_not_destroyed_to_restore_another_one(rig: Rig) -> None:
    other = instance("1g.10gb@1")
    before = rig.make(other).made()
    register(rig.file, before[other], 1)
    with pytest.raises(MigRefused, match="overlaps"):
        apply(rig.driver, GPU, instances("2g.20gb@0"), instances("2g.20gb@0"))
    assert rig.made() == before


def half_made(rig: Rig, text: str) -> None:
    """Leave an incomplete instance, as an agent that dies while it creates it."""
    rig.flaky.left, rig.flaky.only = 0, ("nvmlGpuInstanceCreateComputeInstance",)
    with pytest.raises(Crash):
        apply(rig.driver, GPU, instances(text), ())
    rig.flaky.heal()
    assert rig.made() == {instance(text): ""}


def test_half_made_instances_are_completed_or_destroyed(rig: Rig) -> None:
    half_made(rig, "2g.20gb@0")
    apply(rig.driver, GPU, instances("2g.20gb@0"), ())
    assert rig.made()[instance("2g.20gb@0")]
    apply(rig.driver, GPU, (), ())
    half_made(rig, "2g.20gb@0")
    apply(rig.driver, GPU, instances("1g.10gb@1"), ())
    assert rig.made().keys() == instances("1g.10gb@1")


def test_instances_in_use_are_completed_although_the_plan_is_refused(rig: Rig) -> None:
    half_made(rig, "2g.20gb@0")
    with pytest.raises(MigRefused, match="in use, but not in the plan"):
        apply(rig.driver, GPU, (), instances("2g.20gb@0"))
    assert rig.made()[instance("2g.20gb@0")]


def test_steps_are_undone_in_reverse_order(rig: Rig) -> None:
    """A new instance must be destroyed before the one that was in its place can be created again."""
    before = rig.make(instance("7g.80gb@0")).made()
    rig.flaky.fail(1, pynvml.NVML_ERROR_UNKNOWN, "nvmlDeviceCreateGpuInstance")
    with pytest.raises(RetryLater):
        apply(rig.driver, GPU, instances("3g.40gb@0", "3g.40gb@4"), ())
    assert rig.made().keys() == before.keys()


@pytest.mark.parametrize("call", range(8))
def test_failed_step_undoes_all_steps(rig: Rig, call: int) -> None:
    """One of the NVML calls that change something fails."""
    used = instance("2g.20gb@4")
    before = rig.make(used, instance("1g.10gb@0"), instance("1g.10gb@1")).made()
    rig.flaky.fail(call, pynvml.NVML_ERROR_UNKNOWN, *CHANGES)
    plan = instances("2g.20gb@4", "2g.20gb@0", "1g.10gb@2")
    with pytest.raises(RetryLater):
        apply(rig.driver, GPU, plan, [used])
    assert rig.made().keys() == before.keys()
    assert all(rig.made().values())
    assert rig.made()[used] == before[used]
    apply(rig.driver, GPU, plan, [used])
    assert rig.made().keys() == plan


def test_changes_above_are_all(rig: Rig) -> None:
    """So the test above makes each of them fail once."""
    rig.make(instance("2g.20gb@4"), instance("1g.10gb@0"), instance("1g.10gb@1"))
    rig.flaky.fail(1000, pynvml.NVML_ERROR_UNKNOWN, *CHANGES)
    apply(rig.driver, GPU, instances("2g.20gb@4", "2g.20gb@0", "1g.10gb@2"), ())
    assert rig.flaky.left == 1000 - 8


def test_failed_rollback_is_reported_and_repaired_later(rig: Rig) -> None:
    rig.make(instance("3g.40gb@4"))
    rig.flaky.fail(0, pynvml.NVML_ERROR_UNKNOWN, "nvmlDeviceCreateGpuInstance", times=2)
    with pytest.raises(RollbackFailed, match=r"creating 2g.20gb at 4 .*could not be undone: destroy 3g.40gb at 4"):
        apply(rig.driver, GPU, instances("2g.20gb@4"), ())
    assert rig.made() == {}
    apply(rig.driver, GPU, instances("2g.20gb@4"), ())
    assert rig.made().keys() == instances("2g.20gb@4")


def test_instance_that_cannot_be_restored_does_not_prevent_the_others(rig: Rig) -> None:
    rig.flaky.fail(0, pynvml.NVML_ERROR_UNKNOWN, "nvmlDeviceCreateGpuInstance")
    with pytest.raises(RetryLater, match=r"creating 1g.10gb at 0"):
        apply(rig.driver, GPU, instances("7g.80gb@0"), instances("1g.10gb@0", "1g.10gb@1", "1g.10gb@2"))
    assert rig.made().keys() == instances("1g.10gb@1", "1g.10gb@2")
