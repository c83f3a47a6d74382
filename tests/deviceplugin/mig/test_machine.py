"""State machine: with any plan, crash or NVML error, instances in use stay, and the card converges to the plan."""

import tempfile
from pathlib import Path

import pynvml
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deviceplugin.mig.instance_changes import apply
from deviceplugin.mig.mig_driver import MigRefused
from mgpu.model.errors import RetryLater
from mgpu.model.mig import Instance, Layout, invalid_reason, layout_of, possible_instances
from playground.nvml_state import deregister, reboot, register
from tests.deviceplugin.mig.rig import A30, A100, CHANGES, GPU, Crash, Rig, gpu
from tests.examples import examples

_PID = 9


class Machine(RuleBasedStateMachine):
    """One card. `given` are the instances of pods, also missing ones; `uuids` has the UUIDs of the existing ones."""

    @initialize(model=st.sampled_from([(A100, 80), (A30, 24)]))
    def plug_in(self, model: tuple[str, int]) -> None:
        self.folder = tempfile.TemporaryDirectory()
        card = gpu(0, *model)
        layout = layout_of(card.model, card.memory)
        assert layout is not None
        self.layout: Layout = layout
        self.rig = Rig(Path(self.folder.name), card).on()
        self.given: set[Instance] = set()
        self.uuids: dict[Instance, str] = {}
        self.plan: frozenset[Instance] = frozenset()

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()

    @rule(data=st.data(), count=st.integers(0, 5), honest=st.booleans())
    def plans(self, data: st.DataObject, count: int, honest: bool) -> None:
        """Plan as a planner that knows the instances in use, or as one that does not."""
        plan = set(self.given) if honest else set()
        for _ in range(count):
            if free := possible_instances(self.layout, plan):
                plan.add(data.draw(st.sampled_from(free)))
        self.plan = frozenset(plan)

    @rule()
    def applies(self) -> None:
        self.rig.flaky.heal()
        if self.plan >= self.given:
            self._apply()
            assert self.rig.made().keys() == self.plan
            assert all(self.rig.made().values())
        else:
            with pytest.raises(MigRefused, match="in use, but not in the plan"):
                self._apply()
            assert self.given <= self.rig.made().keys()
        self._learn()

    @rule(left=st.integers(0, 12), after=st.booleans())
    def dies_at_a_change(self, left: int, after: bool) -> None:
        self.rig.flaky.left, self.rig.flaky.after, self.rig.flaky.only = left, after, CHANGES
        self._try()

    @rule(left=st.integers(0, 400), after=st.booleans())
    def dies_at_any_call(self, left: int, after: bool) -> None:
        self.rig.flaky.left, self.rig.flaky.after, self.rig.flaky.only = left, after, ("nvml",)
        self._try()

    @rule(left=st.integers(0, 400), error=st.sampled_from([pynvml.NVML_ERROR_UNKNOWN, pynvml.NVML_ERROR_IN_USE]))
    def sees_an_error_at_any_call(self, left: int, error: int) -> None:
        self._fails(left, error, "nvml")

    @rule(left=st.integers(0, 12), error=st.sampled_from([pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_IN_USE]))
    def sees_an_error_at_a_change(self, left: int, error: int) -> None:
        self._fails(left, error, *CHANGES)

    def _fails(self, left: int, error: int, *only: str) -> None:
        before, complete = self.rig.made(), self.given == self.uuids.keys()
        self.rig.flaky.fail(left, error, *only)
        if not self._try() and complete:
            after = self.rig.made()
            assert {i for i, uuid in before.items() if uuid} <= {i for i, uuid in after.items() if uuid}
            assert after.keys() <= before.keys()

    def _try(self) -> bool:
        """Return whether the plan is applied, although something may fail."""
        try:
            self._apply()
        except (Crash, MigRefused, RetryLater):
            return False
        finally:
            self.rig.flaky.heal()
            self._learn()
        assert self.rig.made().keys() == self.plan
        return True

    def _apply(self) -> None:
        apply(self.rig.driver, GPU, self.plan, self.given)

    def _learn(self) -> None:
        """What pods have had is there again, under new names."""
        for instance, uuid in self.rig.made().items():
            if uuid and instance in self.given:
                self.uuids.setdefault(instance, uuid)

    @precondition(lambda self: any(uuid and i not in self.given for i, uuid in self.rig.made().items()))
    @rule(data=st.data(), runs=st.booleans())
    def gives(self, data: st.DataObject, runs: bool) -> None:
        """A free instance to a pod, whose process runs or not yet."""
        free = sorted(i for i, uuid in self.rig.made().items() if uuid and i not in self.given)
        instance = data.draw(st.sampled_from(free))
        if invalid_reason(self.layout, {*self.given, instance}):
            return  # what is missing has the place
        self.given.add(instance)
        self.uuids[instance] = self.rig.made()[instance]
        if runs:
            register(self.rig.file, self.uuids[instance], _PID)

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def ends(self, data: st.DataObject) -> None:
        instance = data.draw(st.sampled_from(sorted(self.given)))
        self.given.remove(instance)
        deregister(self.rig.file, self.uuids.pop(instance, ""), _PID)

    @rule()
    def reboots(self) -> None:
        reboot(self.rig.file)
        self.uuids = {}

    @invariant()
    def what_is_in_use_is_there(self) -> None:
        if hasattr(self, "rig"):
            made = self.rig.made()
            assert {instance: made.get(instance) for instance in self.uuids} == self.uuids

    @invariant()
    def what_is_made_is_possible(self) -> None:
        if hasattr(self, "rig"):
            assert invalid_reason(self.layout, self.rig.made()) is None


TestMachine = Machine.TestCase
TestMachine.settings = examples(12, steps=12)
