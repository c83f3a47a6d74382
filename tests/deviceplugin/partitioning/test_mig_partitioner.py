"""The partitions of a MIG node, and how the agent reports them."""

from pathlib import Path

import pynvml
import pytest

from deviceplugin.kubelet.checkpoint import PodDevicesEntry
from deviceplugin.mig.mig_driver import NvmlMig
from mgpu.model.errors import RetryLater
from mgpu.model.node_slices import ANNOTATION, EXISTING, LABEL, UNKNOWN_POD
from playground.nvml_state import deregister, reboot, set_switch
from playground.simulated_nvml import forgetful
from tests.builders import share
from tests.deviceplugin.mig.rig import A30, CHANGES, H100, T4, Crash
from tests.deviceplugin.partitioning.rig import Rig, gpu, place, places, slice_pod

FULL = places("2g.20gb@0", "2g.20gb@2", "3g.40gb@4")


def test_plan_is_applied_and_reported(rig: Rig) -> None:
    rig.plan(5, *FULL).reconcile()
    assert rig.made().keys() == {*FULL}
    assert rig.users == dict.fromkeys(FULL, "")
    assert {s.uuid for s in rig.reported.existing} == {*rig.made().values()}
    assert rig.annotation == {
        "spec-gpu-0-2g.20gb": 2,
        "spec-gpu-0-3g.40gb": 1,
        "spec-partitioning-plan": 5,
        "status-gpu-0-2g.20gb-free": 2,
        "status-gpu-0-3g.40gb-free": 1,
        "status-partitioning-plan": 5,
    }
    assert rig.warnings == []


def test_empty_card_is_reported_so_that_it_can_be_planned(rig: Rig) -> None:
    rig.reconcile()
    assert (rig.reported.existing, rig.reported.cards, rig.reported.has_pending_plan) == ((), frozenset({0}), False)


def test_unchanged_status_is_not_written_again(rig: Rig) -> None:
    rig.plan(5, *FULL).reconcile()
    before = rig.nodes.patches
    rig.reconcile(3)
    assert rig.nodes.patches == before


def test_pods_of_slices_are_reported(rig: Rig) -> None:
    rig.plan(5, *FULL).reconcile()
    rig.take("p", FULL[0]).take("ended", FULL[1], phase="Succeeded").reconcile()
    assert rig.users == {FULL[0]: "uid-p", FULL[1]: "", FULL[2]: ""}
    assert rig.annotation["status-gpu-0-2g.20gb-used"] == 1
    assert rig.annotation["status-gpu-0-2g.20gb-free"] == 1


def test_cdi_files_count_where_the_record_is_unreadable(rig: Rig) -> None:
    rig.plan(5, *FULL).reconcile()
    rig.take("p")
    rig.pods.take(share("q", node="n1"))
    rig.hand_out("q", FULL[1]).reconcile()
    assert rig.users == {FULL[0]: "", FULL[1]: "uid-q", FULL[2]: ""}
    rig.hand_out("q", NVIDIA_VISIBLE_DEVICES=rig.made()[FULL[2]]).reconcile()
    assert rig.users == {FULL[0]: "", FULL[1]: "", FULL[2]: "uid-q"}


def test_slice_given_out_by_another_plugin_belongs_to_its_pod(rig: Rig) -> None:
    rig.make(*FULL).reconcile()
    rig.pods.take(share("q", node="n1"))
    rig.kubelet.held["nvidia.com/mig-2g.20gb"] = [
        PodDevicesEntry("uid-q", "c", frozenset({rig.made()[FULL[1]]})),
        PodDevicesEntry("uid-gone", "c", frozenset({rig.made()[FULL[0]]})),
        PodDevicesEntry("uid-q", "d", frozenset({"3"}), "mgpu.io/card=1"),
    ]
    rig.reconcile()
    assert rig.users == {FULL[0]: "", FULL[1]: "uid-q", FULL[2]: ""}


def test_plan_from_before_the_agent_keeps_slices_of_another_plugin(rig: Rig) -> None:
    """An administrator partitioned the card and set the label later. No process runs on the instances now."""
    rig.make(*FULL)
    rig.pods.take(share("q", node="n1"))
    rig.kubelet.held["nvidia.com/mig-2g.20gb"] = [PodDevicesEntry("uid-q", "c", frozenset({rig.made()[FULL[1]]}))]
    before = rig.made()
    rig.plan(5, place("7g.80gb@0")).reconcile()
    assert rig.made()[FULL[1]] == before[FULL[1]]
    assert rig.reported.refused is not None
    assert "2g.20gb at 2 of card 0 in use, but not in the plan" in rig.reported.refused[1]


def test_card_that_does_not_answer_keeps_its_slices_and_offers_none(tmp_path: Path) -> None:
    rig = Rig(tmp_path, cards=(gpu(0), gpu(1))).reconcile()
    both = place("2g.20gb@0"), place("2g.20gb@0", 1)
    rig.plan(5, *both).take("p", both[1]).reconcile()
    rig.flaky.fail(0, pynvml.NVML_ERROR_GPU_IS_LOST, "nvmlDeviceGetMigMode", times=99)
    with pytest.raises(RetryLater, match="does not answer queries about MIG"):
        rig.reconcile()
    assert rig.users == {both[1]: "uid-p"}
    rig.flaky.heal()
    rig.reconcile()
    assert rig.users == {both[0]: "", both[1]: "uid-p"}


def test_slice_with_an_unknown_process_is_not_free(rig: Rig) -> None:
    rig.plan(5, *FULL).reconcile()
    rig.run_on(FULL[1])
    rig.reconcile()
    assert rig.users[FULL[1]] == UNKNOWN_POD
    deregister(rig.file, rig.made()[FULL[1]], 7)
    rig.reconcile()
    assert rig.users[FULL[1]] == ""


def test_next_plan_keeps_slices_in_use(rig: Rig) -> None:
    rig.plan(5, *FULL).reconcile()
    before = rig.made()[FULL[1]]
    rig.take("p", FULL[1]).plan(6, FULL[1], *places("1g.10gb@0", "1g.10gb@1")).reconcile()
    assert rig.made()[FULL[1]] == before
    assert rig.made().keys() == {FULL[1], *places("1g.10gb@0", "1g.10gb@1")}
    assert rig.annotation["status-partitioning-plan"] == 6


@pytest.mark.parametrize("how", ["record", "handed", "busy"])
def test_plan_without_a_slice_in_use_is_refused_and_changes_nothing(rig: Rig, how: str) -> None:
    rig.plan(5, *FULL).reconcile()
    before = rig.made()
    if how == "busy":
        rig.run_on(FULL[0])
    elif how == "record":
        rig.take("p", FULL[0])
    else:
        rig.take("p").hand_out("p", FULL[0])
        rig.pods.take(share("p", node="n1"))
    rig.plan(6, *places("7g.80gb@0")).reconcile(2)
    assert rig.made() == before
    assert rig.reported.refused is not None
    assert rig.reported.refused[0] == 6
    assert "2g.20gb at 0 of card 0 in use, but not in the plan" in rig.reported.refused[1]
    assert rig.annotation["status-partitioning-plan"] == 5
    assert len([w for w in rig.warnings if "plan 6 is refused" in w]) == 1


def test_refused_plan_is_tried_again_after_a_change(rig: Rig) -> None:
    rig.plan(5, *FULL).reconcile()
    rig.take("p", FULL[0]).plan(6, *places("7g.80gb@0")).reconcile(2)
    rig.take("p", FULL[0], phase="Succeeded").reconcile()
    assert rig.reported.has_pending_plan, "the scheduler must not write a new plan while this one is tried"
    assert rig.made().keys() == {*FULL}
    rig.reconcile()
    assert rig.made().keys() == {place("7g.80gb@0")}
    assert (rig.reported.refused, rig.annotation["status-partitioning-plan"]) == (None, 6)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (places("2g.20gb@0", card=3), "spec-gpu-3-2g.20gb]: the node has no card 3"),
        (places("2g.12gb@0"), "spec-gpu-0-2g.12gb]: "),
        (places("7g.80gb@0", "1g.10gb@0"), "spec-gpu-0-…]: 1 of 1g.10gb, 1 of 7g.80gb do not fit on"),
    ],
)
def test_impossible_plan_is_refused_with_its_path(rig: Rig, spec: tuple, why: str) -> None:  # type: ignore[type-arg]
    rig.plan(5, *FULL).reconcile()
    before = rig.made()
    rig.plan(6, *spec, placed=False).reconcile(2)
    assert rig.made() == before
    assert why in (rig.reported.refused or (0, ""))[1]


def test_refused_plan_that_was_replaced_is_not_tried_again(rig: Rig) -> None:
    rig.plan(5, *FULL).reconcile()
    rig.take("p", FULL[0]).plan(6, *places("7g.80gb@0")).reconcile(2)
    rig.take("p", FULL[0], phase="Succeeded")
    rig.nodes.on_patch = lambda: rig.plan(7, *FULL[1:])
    rig.reconcile(2)
    assert rig.made().keys() == {*FULL[1:]}
    assert rig.annotation["status-partitioning-plan"] == 7


def test_restarted_agent_keeps_the_state_from_before_a_refused_plan(rig: Rig) -> None:
    rig.plan(5, *FULL).reconcile()
    rig.take("p", FULL[0]).plan(6, *places("7g.80gb@0")).reconcile(2)
    before = rig.made()
    rig.worker.withdraw()
    assert rig.users == {FULL[0]: "uid-p"}
    rig.restart().reconcile(3)
    assert rig.made() == before
    assert rig.users == {FULL[0]: "uid-p", FULL[1]: "", FULL[2]: ""}
    assert (rig.reported.refused or (0, ""))[0] == 6


def test_plan_that_fails_on_the_second_card_is_undone_on_the_first(tmp_path: Path) -> None:
    rig = Rig(tmp_path, cards=(gpu(0), gpu(1))).reconcile()
    rig.plan(5, place("2g.20gb@0"), place("2g.20gb@0", 1)).reconcile()
    before = {*rig.made(0)}
    rig.plan(6, *places("1g.10gb@0"), *places("3g.40gb@0", card=1))
    rig.flaky.fail(1, pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES, CHANGES[0])
    rig.reconcile()
    assert {*rig.made(0)} == before
    assert {*rig.made(1)} == {place("2g.20gb@0", 1)}
    assert (rig.reported.refused or (0, ""))[0] == 6


def test_plan_that_fails_for_now_is_not_refused(rig: Rig) -> None:
    rig.reconcile().plan(5, *FULL)
    rig.flaky.fail(0, pynvml.NVML_ERROR_UNKNOWN, CHANGES[0])
    with pytest.raises(RetryLater):
        rig.reconcile()
    assert (rig.reported.refused, rig.reported.has_pending_plan) == (None, True)
    rig.reconcile()
    assert not rig.reported.has_pending_plan


def test_counts_without_places_keep_existing_instances(rig: Rig) -> None:
    rig.plan(5, *places("2g.20gb@2", "1g.10gb@6"), placed=False).reconcile()
    first = {s.name: s.start for s in rig.made()}
    assert sorted(first) == ["1g.10gb", "2g.20gb"]
    rig.plan(6, *places("2g.20gb@0", "1g.10gb@6", "1g.10gb@4"), placed=False).reconcile()
    assert {s.name: s.start for s in rig.made() if s.name == "2g.20gb"} == {"2g.20gb": first["2g.20gb"]}
    assert sorted(s.name for s in rig.made()) == ["1g.10gb", "1g.10gb", "2g.20gb"]


def test_instances_of_an_administrator_are_adopted(rig: Rig) -> None:
    rig.make(*FULL[:2]).reconcile(2)
    assert rig.users == dict.fromkeys(FULL[:2], "")
    assert rig.made().keys() == {*FULL[:2]}


def test_half_made_instance_is_completed_before_it_is_reported(rig: Rig) -> None:
    rig.make(FULL[0])
    rig.flaky.left, rig.flaky.only = 0, ("nvmlGpuInstanceCreateComputeInstance",)
    with pytest.raises(Crash):
        NvmlMig(rig.flaky).create(rig.cards[0].uuid, FULL[1].instance)
    assert rig.made()[FULL[1]] == ""
    rig.restart().reconcile()
    assert rig.users == {FULL[0]: "", FULL[1]: ""}
    assert {s.uuid for s in rig.kubelet.offered} == {*rig.made().values()}
    assert "" not in rig.made().values()


def test_plan_that_came_meanwhile_is_not_reported_as_refused(rig: Rig) -> None:
    rig.plan(5, *FULL).reconcile()
    rig.take("p", FULL[0])
    rig.plan(6, *FULL[1:])
    rig.nodes.on_patch = lambda: rig.plan(7, *FULL)
    rig.reconcile()
    assert rig.reported.refused is None
    rig.reconcile()
    assert (rig.reported.refused, rig.reported.partitioning.applied) == (None, 7)


def test_slice_is_reported_only_after_the_kubelet_knows_it(rig: Rig) -> None:
    rig.kubelet.slow = True
    rig.plan(5, *FULL).take("p", FULL[0]).reconcile()
    assert {s.place for s in rig.kubelet.offered} == {*FULL}
    assert rig.users == {FULL[0]: "uid-p"}
    assert rig.reported.has_pending_plan
    rig.kubelet.slow = False
    rig.reconcile()
    assert rig.users == {FULL[0]: "uid-p", FULL[1]: "", FULL[2]: ""}
    assert not rig.reported.has_pending_plan


@pytest.mark.parametrize("model", ["NVIDIA A100-SXM4-80GB", H100])
def test_all_slices_are_created_again_after_a_reboot(tmp_path: Path, model: str) -> None:
    rig = Rig(tmp_path, cards=(gpu(0, model),)).reconcile().plan(5, *FULL).reconcile()
    rig.take("p", FULL[1])
    old = rig.made()
    reboot(rig.file, forgetful=forgetful(rig.cards))
    rig.restart().reconcile(2)
    assert rig.made().keys() == {*FULL}
    assert not {*old.values()} & {s.uuid for s in rig.reported.existing}
    assert rig.users == {FULL[0]: "", FULL[1]: "uid-p", FULL[2]: ""}


def test_record_with_a_missing_slice_destroys_nothing(rig: Rig) -> None:
    rig.plan(5, *FULL).reconcile()
    before = rig.made()
    rig.take("p", place("4g.40gb@0")).take("q", place("1g.10gb@3")).reconcile()
    assert rig.made() == before
    rig.plan(6, *FULL[:1]).reconcile()
    assert rig.made().keys() == {FULL[0]}
    rig.reconcile()
    assert rig.made().keys() == {FULL[0], place("1g.10gb@3")}


def test_slices_of_pods_are_created_again_without_a_plan(rig: Rig) -> None:
    rig.make(*FULL).reconcile()
    rig.take("p", FULL[1])
    reboot(rig.file, forgetful=forgetful(rig.cards))
    rig.restart().reconcile()
    assert rig.made().keys() == {FULL[1]}


@pytest.mark.parametrize("step", range(10))
@pytest.mark.parametrize("after", [False, True])
def test_next_agent_completes_a_plan_after_a_crash_at_any_call(rig: Rig, step: int, after: bool) -> None:
    """There are ten calls that change a card."""
    rig.plan(5, *FULL).reconcile()
    used = rig.made()[FULL[2]]
    rig.take("p", FULL[2]).plan(6, FULL[2], *places("1g.10gb@0", "1g.10gb@1", "1g.20gb@2"))
    rig.flaky.left, rig.flaky.error, rig.flaky.after, rig.flaky.only = step, None, after, CHANGES
    with pytest.raises(Crash):
        rig.reconcile()
    rig.restart().reconcile()
    assert rig.made().keys() == {FULL[2], *places("1g.10gb@0", "1g.10gb@1", "1g.20gb@2")}
    assert rig.made()[FULL[2]] == used
    assert rig.annotation["status-partitioning-plan"] == 6


def test_concurrent_write_of_the_node_is_kept(rig: Rig) -> None:
    rig.reconcile().plan(5, *FULL)
    rig.nodes.on_patch = lambda: rig.plan(6, *FULL[:2])
    rig.reconcile()
    assert rig.annotation["spec-partitioning-plan"] == 6
    assert "status-partitioning-plan" not in rig.annotation
    rig.reconcile()
    assert rig.annotation["status-partitioning-plan"] == 6
    assert rig.made().keys() == {*FULL[:2]}


@pytest.mark.parametrize(
    ("annotation", "path"),
    [
        ("{", "metadata.annotations[dynamicgpuslice]"),
        ('{"spec-gpu-0-2g.20gb": "x"}', "metadata.annotations[dynamicgpuslice][spec-gpu-0-2g.20gb]"),
    ],
)
def test_invalid_annotation_destroys_nothing(rig: Rig, annotation: str, path: str) -> None:
    rig.plan(5, *FULL).reconcile()
    before = rig.made()
    rig.nodes.annotate(**{ANNOTATION: annotation})
    for _ in range(2):
        rig.reconcile()
        assert rig.made() == before
        assert rig.nodes.raw["metadata"]["annotations"][ANNOTATION] == annotation
    assert len([w for w in rig.warnings if path in w]) == 1
    rig.restart().reconcile()
    assert rig.made() == before


def test_damaged_own_annotation_is_repaired(rig: Rig) -> None:
    rig.plan(5, *FULL).reconcile()
    rig.nodes.annotate(**{EXISTING: "{"})
    rig.reconcile()
    assert rig.users == dict.fromkeys(FULL, "")


def test_unknown_label_is_reported_and_changes_nothing(rig: Rig) -> None:
    rig.plan(5, *FULL).reconcile()
    rig.label("mix").reconcile(2)
    assert [w for w in rig.warnings if LABEL in w] == [
        f"metadata.labels[{LABEL}]: must be mig, mps or mig-claims, not 'mix'; the last valid state stays in force"
    ]
    assert rig.made().keys() == {*FULL}


def test_without_the_label_nothing_is_reported_and_nothing_destroyed(rig: Rig) -> None:
    rig.plan(5, *FULL).reconcile()
    rig.label(None).reconcile()
    assert EXISTING not in rig.nodes.raw["metadata"]["annotations"]
    assert not [key for key in rig.annotation if key.startswith("status-gpu")]
    assert rig.made().keys() == {*FULL}
    assert rig.kubelet.offered == ()


def test_node_without_the_label_is_not_written(tmp_path: Path) -> None:
    rig = Rig(tmp_path, mode="")
    rig.nodes.annotate(**{ANNOTATION: '{ "status-gpu-0-2g.20gb-free": 1 }'})
    rig.reconcile()
    assert rig.nodes.patches == 0


def test_nothing_is_changed_before_all_pods_are_known(rig: Rig) -> None:
    rig.synced = False
    rig.plan(5, *FULL).reconcile()
    assert rig.nodes.patches == 0
    assert rig.partitions.state is None


def test_without_permission_nothing_is_reported(rig: Rig) -> None:
    rig.plan(5, *FULL).reconcile()
    before = dict(rig.nodes.raw["metadata"]["annotations"])
    set_switch(rig.file, privileged=False)
    with pytest.raises(RetryLater):
        rig.reconcile()
    assert rig.nodes.raw["metadata"]["annotations"] == before


def test_card_in_use_by_other_vocabularies_keeps_its_mode(tmp_path: Path) -> None:
    rig = Rig(tmp_path, cards=(gpu(0), gpu(1)))
    rig.pods.take(share("p", node="n1", annotations=_on("0")))
    rig.reconcile()
    assert rig.reported.cards == {1}
    assert any("pods hold it" in w for w in rig.warnings)
    assert rig.partitions.devices(rig.cards) == rig.cards[:1], "its containers may start again"
    assert rig.partitions.whole(rig.cards) == (), "nobody else may come"
    rig.pods.drop(share("p", node="n1"))
    rig.reconcile()
    assert rig.reported.cards == {0, 1}


def test_card_with_mps_shares_keeps_its_mode_until_their_pod_is_gone(tmp_path: Path) -> None:
    """The label was `mps` before. No process runs on the card at this moment."""
    rig = Rig(tmp_path, mode="mps", cards=(gpu(0), gpu(1)))
    rig.configure(place("4gb@0")).reconcile()
    rig.take("p", place("4gb@0")).reconcile()
    rig.label("mig").reconcile()
    assert rig.reported.cards == {1}
    assert any("pods hold it" in w for w in rig.warnings)
    rig.pods.drop(slice_pod("p", place("4gb@0")))
    rig.reconcile()
    assert rig.reported.cards == {0, 1}


def test_cards_that_cannot_be_cut_stay_whole(tmp_path: Path) -> None:
    rig = Rig(tmp_path, cards=(gpu(0, T4, 16), gpu(1, A30, 24))).reconcile()
    assert rig.reported.cards == {1}
    assert [card.index for card in rig.partitions.devices(rig.cards)] == [0]


def test_slices_are_devices_beside_whole_cards(rig: Rig) -> None:
    assert rig.partitions.devices(rig.cards) == rig.cards
    rig.plan(5, *FULL).reconcile()
    found = {(card.type, card.index): card.uuid for card in rig.partitions.devices(rig.cards)}
    assert found == {
        ("mig-2g.20gb", 0): rig.made()[FULL[0]],
        ("mig-2g.20gb", 2): rig.made()[FULL[1]],
        ("mig-3g.40gb", 4): rig.made()[FULL[2]],
    }


def _on(card: str) -> dict[str, str]:
    return {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": card}
