"""What the agent reports of a node whose MIG instances claims get."""

from pathlib import Path

import pynvml
import pytest

from mgpu.model.mig import Instance
from mgpu.model.node_slices import EXISTING, UNKNOWN_POD
from tests.deviceplugin.mig.rig import T4, gpu
from tests.deviceplugin.partitioning.rig import Rig, place, places


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path, mode="mig-claims", cards=(gpu(0), gpu(1), gpu(2, T4, 16)))


def test_cards_in_mig_mode_are_reported(rig: Rig) -> None:
    rig.reconcile()
    assert (rig.reported.cards, rig.reported.existing, rig.reported.has_positions) == (frozenset({0, 1}), (), True)
    assert rig.partitions.cards_in_mig_mode() == {0, 1}
    assert rig.warnings == []


def test_card_that_cannot_be_switched_is_not_reported(rig: Rig) -> None:
    rig.flaky.fail(0, pynvml.NVML_ERROR_IN_USE, "nvmlDeviceSetMigMode", times=1)
    rig.reconcile()
    assert rig.reported.cards == {1}
    assert len(rig.warnings) == 1


def test_instances_that_are_not_of_claims_are_reported_and_stay(rig: Rig) -> None:
    rig.make(*places("2g.20gb@0", "3g.40gb@4"))
    rig.owned.add(("GPU-0", Instance(4, "3g.40gb")))
    before = rig.made()
    rig.reconcile(2)
    assert rig.users == {place("2g.20gb@0"): UNKNOWN_POD}
    assert rig.warnings == ["card 0 has a 2g.20gb at 0, which is not of a claim; no claim gets its place"]
    assert rig.made() == before
    assert rig.partitions.devices(rig.cards) == rig.cards[2:]


def test_report_does_not_change_between_reconciliations(rig: Rig) -> None:
    rig.make(*places("2g.20gb@0"))
    rig.reconcile()
    before = rig.nodes.patches
    rig.reconcile(3)
    assert rig.nodes.patches == before


def test_slices_of_a_former_plan_are_nobodys_until_the_agent_has_seen_the_label(rig: Rig) -> None:
    rig.label("mig").plan(5, *places("2g.20gb@0", "3g.40gb@4")).reconcile()
    rig.label("mig-claims")
    assert rig.users == dict.fromkeys(places("2g.20gb@0", "3g.40gb@4"), UNKNOWN_POD)
    rig.reconcile()
    assert rig.users == dict.fromkeys(places("2g.20gb@0", "3g.40gb@4"), UNKNOWN_POD)
    rig.label(None).reconcile()
    assert EXISTING not in rig.nodes.raw["metadata"]["annotations"]
