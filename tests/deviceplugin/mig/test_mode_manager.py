"""Switching cards into MIG mode and out of it."""

from dataclasses import dataclass
from pathlib import Path

import pynvml
import pytest

from deviceplugin.mig.mig_driver import MigRefused
from deviceplugin.mig.mode_manager import ModeManager
from playground.nvml_state import deregister, reboot, register, reset, set_switch
from playground.simulated_nvml import forgetful
from tests.deviceplugin.mig.rig import GPU, H100, T4, Rig, gpu, instance


@dataclass
class Desk:
    rig: Rig
    now: float = 0.0

    def __post_init__(self) -> None:
        self.manager = ModeManager(self.rig.driver, lambda: self.now)

    def switch(self, *in_use: str, on: bool) -> str:
        """Return why the card does not have the desired mode; "" if it has."""
        return self.manager.switch({GPU}, in_use, on=on).get(GPU, "")

    @property
    def attempts(self) -> int:
        return 1000 - (self.rig.flaky.left or 0)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    """Return an A100 that is not in MIG mode. Attempts to set its mode are counted."""
    rig = Rig(tmp_path)
    rig.flaky.fail(1000, pynvml.NVML_ERROR_UNKNOWN, "nvmlDeviceSetMigMode")
    return Desk(rig)


def test_capable_cards_are_switched_and_others_left_alone(tmp_path: Path) -> None:
    rig = Rig(tmp_path, gpu(), gpu(1, T4, 16), gpu(2, H100), gpu(3))
    manager = ModeManager(rig.driver)
    assert manager.switch({"GPU-0", "GPU-1", "GPU-2", "GPU-9"}, (), on=True) == {}
    assert [card.current for card in rig.driver.read()] == [True, False, True, False]
    assert manager.switch({"GPU-0"}, (), on=False) == {}
    assert [card.current for card in rig.driver.read()] == [False, False, True, False]


def test_card_in_its_desired_mode_is_not_touched(desk: Desk) -> None:
    for _ in range(3):
        assert desk.switch(on=True) == ""
    assert desk.attempts == 1


def test_card_of_pods_or_processes_is_not_switched(desk: Desk) -> None:
    assert desk.switch(GPU, on=True) == f"the MIG mode of {GPU} cannot be switched on yet: pods hold it"
    register(desk.rig.file, GPU, 3)
    assert desk.switch(on=True) == f"the MIG mode of {GPU} cannot be switched on yet: processes run on it"
    assert desk.attempts == 0
    deregister(desk.rig.file, GPU, 3)
    assert desk.switch(on=True) == ""
    assert desk.switch(GPU, on=True) == "", "nothing is to be done"


def test_pending_mode_is_reported_and_retried_after_growing_pauses(desk: Desk) -> None:
    set_switch(desk.rig.file, passthrough=True)
    pending = f"the MIG mode of {GPU} is not on yet: the card must be reset, or the node rebooted"
    attempts = []
    for _ in range(0, 1000, 5):
        assert desk.switch(on=True) == pending
        attempts.append(desk.attempts)
        desk.now += 5
    made = [5 * i for i, (before, now) in enumerate(zip([0, *attempts], attempts, strict=False)) if now > before]
    assert made == [0, 5, 15, 35, 75, 155, 315, 615, 915]
    reset(desk.rig.file, GPU)
    assert desk.switch(on=True) == ""


def test_pending_mode_can_be_reverted_at_once(desk: Desk) -> None:
    set_switch(desk.rig.file, passthrough=True)
    desk.switch(on=True)
    assert desk.switch(GPU, on=False) == ""
    assert not desk.rig.card().pending


def test_free_instances_are_destroyed_with_the_mode_and_used_ones_keep_it(desk: Desk) -> None:
    desk.switch(on=True)
    one = instance("1g.10gb@0")
    uuid = desk.rig.make(one, instance("3g.40gb@4")).made()[one]
    register(desk.rig.file, uuid, 8)
    assert desk.switch(on=False).endswith("processes run on it")
    assert len(desk.rig.made()) == 2
    deregister(desk.rig.file, uuid, 8)
    assert desk.switch(GPU, on=False).endswith("pods hold it")
    assert len(desk.rig.made()) == 2
    assert desk.switch(on=False) == ""
    assert not desk.rig.card().current


def test_mode_is_set_again_after_a_reboot(tmp_path: Path) -> None:
    rig = Rig(tmp_path, gpu(0, H100))
    ModeManager(rig.driver).switch({GPU}, (), on=True)
    reboot(rig.file, forgetful=forgetful(rig.cards))
    assert not rig.card().current
    assert ModeManager(rig.driver).switch({GPU}, (), on=True) == {}
    assert rig.card().current


def test_refusal_of_nvml_is_reported_for_its_card_only(tmp_path: Path) -> None:
    rig = Rig(tmp_path, gpu(), gpu(1))
    rig.flaky.fail(0, pynvml.NVML_ERROR_GPU_IS_LOST, "nvmlDeviceSetMigMode")
    said = ModeManager(rig.driver).switch({"GPU-0", "GPU-1"}, (), on=True)
    assert list(said) == ["GPU-0"]
    assert "switching the MIG mode of GPU-0 on" in said["GPU-0"]
    assert rig.card("GPU-1").current


def test_missing_permission_is_reported(desk: Desk) -> None:
    set_switch(desk.rig.file, privileged=False)
    with pytest.raises(MigRefused, match="privileged"):
        desk.switch(on=True)
