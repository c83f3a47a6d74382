"""From what is made to what is wanted."""

from pathlib import Path

import pynvml
import pytest

from deviceplugin.mig.instance_changes import RollbackFailed, apply
from deviceplugin.mig.mig_driver import MigRefused
from mgpu.model.errors import RetryLater
from playground.nvml_state import reboot, register
from tests.deviceplugin.mig.rig import CHANGES, GPU, Crash, Rig, instance, instances


def test_a_card_is_cut_as_planned_and_anew(rig: Rig) -> None:
    for plan in (
        instances("1g.10gb@0", "2g.20gb@2", "3g.40gb@4"),
        instances("4g.40gb@0", "3g.40gb@4"),
        instances("7g.80gb@0"),
        instances(),
    ):
        apply(rig.driver, GPU, plan, ())
        assert rig.made().keys() == plan


def test_what_stays_is_not_touched(rig: Rig) -> None:
    before = rig.make(instance("2g.20gb@0"), instance("3g.40gb@4")).made()
    apply(rig.driver, GPU, instances("2g.20gb@0", "2g.20gb@4"), ())
    assert rig.made()[instance("2g.20gb@0")] == before[instance("2g.20gb@0")]


@pytest.mark.parametrize("how", ["pod", "process"])
def test_a_plan_without_what_is_in_use_is_refused(rig: Rig, how: str) -> None:
    used = instance("2g.20gb@0")
    before = rig.make(used, instance("3g.40gb@4")).made()
    if how == "process":
        register(rig.file, before[used], 1)
    with pytest.raises(MigRefused, match=r"GPU-0: 2g.20gb at 0 in use, but not in the plan"):
        apply(rig.driver, GPU, instances("7g.80gb@0"), [used] if how == "pod" else [])
    assert rig.made() == before


def test_a_plan_that_cannot_be_placed_destroys_nothing(rig: Rig) -> None:
    before = rig.make(instance("3g.40gb@4")).made()
    for plan in (instances("2g.20gb@1"), instances("2g.20gb@0", "1g.10gb@1"), instances("5g.50gb@0")):
        with pytest.raises(MigRefused, match="GPU-0: "):
            apply(rig.driver, GPU, plan, ())
    assert rig.made() == before


def test_out_of_mig_mode_nothing_is_applied(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    with pytest.raises(MigRefused, match="GPU-0 is not in MIG mode"):
        apply(rig.driver, GPU, instances("7g.80gb@0"), ())
    with pytest.raises(RetryLater, match="GPU-9 does not answer"):
        apply(rig.driver, "GPU-9", instances("7g.80gb@0"), ())


def test_after_a_reboot_what_pods_have_is_made_where_it_was(rig: Rig) -> None:
    used, plan = instances("1g.10gb@3", "2g.20gb@4"), instances("1g.10gb@3", "2g.20gb@4", "2g.20gb@0")
    before = rig.make(*plan).made()
    reboot(rig.file)
    apply(rig.driver, GPU, plan, used)
    assert rig.made().keys() == plan
    assert not {*rig.made().values()} & {*before.values()}


def test_what_pods_have_is_made_again_although_the_plan_is_refused(rig: Rig) -> None:
    """And a free instance in its way goes, others stay."""
    rig.make(instance("1g.10gb@1"), instance("1g.10gb@2"))
    with pytest.raises(MigRefused, match=r"2g.20gb at 0 in use, but not in the plan"):
        apply(rig.driver, GPU, instances("7g.80gb@0"), instances("2g.20gb@0"))
    assert rig.made().keys() == instances("2g.20gb@0", "1g.10gb@2")


def test_what_processes_use_is_not_destroyed_for_what_a_pod_has_lost(rig: Rig) -> None:
    other = instance("1g.10gb@1")
    before = rig.make(other).made()
    register(rig.file, before[other], 1)
    with pytest.raises(MigRefused, match="overlaps"):
        apply(rig.driver, GPU, instances("2g.20gb@0"), instances("2g.20gb@0"))
    assert rig.made() == before


def half_made(rig: Rig, text: str) -> None:
    """The agent died while it made this one."""
    rig.flaky.left, rig.flaky.only = 0, ("nvmlGpuInstanceCreateComputeInstance",)
    with pytest.raises(Crash):
        apply(rig.driver, GPU, instances(text), ())
    rig.flaky.heal()
    assert rig.made() == {instance(text): ""}


def test_what_was_left_half_made_is_completed_or_goes(rig: Rig) -> None:
    half_made(rig, "2g.20gb@0")
    apply(rig.driver, GPU, instances("2g.20gb@0"), ())
    assert rig.made()[instance("2g.20gb@0")]
    apply(rig.driver, GPU, (), ())
    half_made(rig, "2g.20gb@0")
    apply(rig.driver, GPU, instances("1g.10gb@1"), ())
    assert rig.made().keys() == instances("1g.10gb@1")


def test_what_pods_have_is_completed_although_the_plan_is_refused(rig: Rig) -> None:
    half_made(rig, "2g.20gb@0")
    with pytest.raises(MigRefused, match="in use, but not in the plan"):
        apply(rig.driver, GPU, (), instances("2g.20gb@0"))
    assert rig.made()[instance("2g.20gb@0")]


def test_going_back_goes_backwards(rig: Rig) -> None:
    """What was made in the place of what was destroyed must go before that can be made again."""
    before = rig.make(instance("7g.80gb@0")).made()
    rig.flaky.fail(1, pynvml.NVML_ERROR_UNKNOWN, "nvmlDeviceCreateGpuInstance")
    with pytest.raises(RetryLater):
        apply(rig.driver, GPU, instances("3g.40gb@0", "3g.40gb@4"), ())
    assert rig.made().keys() == before.keys()


@pytest.mark.parametrize("call", range(8))
def test_a_step_that_fails_takes_all_back(rig: Rig, call: int) -> None:
    """One call of NVML that changes something goes wrong."""
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


def test_the_changes_above_are_all(rig: Rig) -> None:
    """So that a failure of each of them was tried."""
    rig.make(instance("2g.20gb@4"), instance("1g.10gb@0"), instance("1g.10gb@1"))
    rig.flaky.fail(1000, pynvml.NVML_ERROR_UNKNOWN, *CHANGES)
    apply(rig.driver, GPU, instances("2g.20gb@4", "2g.20gb@0", "1g.10gb@2"), ())
    assert rig.flaky.left == 1000 - 8


def test_going_back_that_fails_is_told_and_done_later(rig: Rig) -> None:
    rig.make(instance("3g.40gb@4"))
    rig.flaky.fail(0, pynvml.NVML_ERROR_UNKNOWN, "nvmlDeviceCreateGpuInstance", times=2)
    with pytest.raises(RollbackFailed, match=r"making 2g.20gb at 4 .*could not be undone: destroy 3g.40gb at 4"):
        apply(rig.driver, GPU, instances("2g.20gb@4"), ())
    assert rig.made() == {}
    apply(rig.driver, GPU, instances("2g.20gb@4"), ())
    assert rig.made().keys() == instances("2g.20gb@4")


def test_one_that_cannot_be_made_again_does_not_keep_the_others_away(rig: Rig) -> None:
    rig.flaky.fail(0, pynvml.NVML_ERROR_UNKNOWN, "nvmlDeviceCreateGpuInstance")
    with pytest.raises(RetryLater, match=r"making 1g.10gb at 0"):
        apply(rig.driver, GPU, instances("7g.80gb@0"), instances("1g.10gb@0", "1g.10gb@1", "1g.10gb@2"))
    assert rig.made().keys() == instances("1g.10gb@1", "1g.10gb@2")
