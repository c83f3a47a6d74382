"""The partitions of an MPS node: the ConfigMap lists its slices, and each partitioned card has a daemon."""

import pytest

from mgpu.model.errors import RetryLater
from mgpu.model.slice_names import Slice
from tests.builders import share
from tests.deviceplugin.partitioning.rig import Rig, place, places, slice_pod

SHARES = places("2gb@0", "4gb@1", "4gb@2")


def test_cards_in_the_configmap_are_cut_and_others_stay_whole(mps: Rig) -> None:
    mps.plan(5, *SHARES).configure(*SHARES).reconcile()
    assert mps.users == dict.fromkeys(SHARES, "")
    assert mps.annotation["status-gpu-0-4gb-free"] == 2
    assert mps.annotation["status-partitioning-plan"] == 5
    assert mps.mps.cards == ("GPU-0",)
    found = {(card.type, card.index) for card in mps.partitions.devices(mps.cards)}
    assert found == {("gpu", 1), ("gpu-2gb", 0), ("gpu-4gb", 1), ("gpu-4gb", 2)}


def test_plan_is_applied_only_when_the_configmap_matches_it(mps: Rig) -> None:
    mps.plan(5, *SHARES).configure(*SHARES).reconcile()
    mps.plan(6, *SHARES[:2]).reconcile()
    assert mps.reported.has_pending_plan
    assert mps.users == dict.fromkeys(SHARES, "")
    assert [card.index for card in mps.partitions.whole(mps.cards) or ()] == [1]
    mps.configure(*SHARES[:2]).reconcile()
    assert (mps.reported.has_pending_plan, mps.users) == (False, dict.fromkeys(SHARES[:2], ""))


def test_configmap_written_by_hand_is_numbered_beside_shares_in_use(mps: Rig) -> None:
    mps.configure(*places("4gb@0", "4gb@1", "4gb@2")).reconcile()
    mps.take("p", place("4gb@1")).configure(*places("4gb@0", "2gb@0", "2gb@1")).reconcile()
    assert mps.users == {place("2gb@0"): "", place("4gb@1"): "uid-p", place("2gb@2"): ""}
    mps.configure(*places("4gb@0", "4gb@1", "2gb@0")).reconcile()
    assert mps.users == {place("2gb@0"): "", place("4gb@1"): "uid-p", place("4gb@2"): ""}


def test_plan_decides_the_numbers(mps: Rig) -> None:
    far = places("4gb@7", "2gb@9")
    mps.plan(5, *far).configure(*far).reconcile()
    assert mps.users.keys() == {*far}


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (SHARES[:1], "4gb at 1 of card 0 in use, but not in the configuration"),
        (
            (*SHARES, *places(*[f"20gb@{i}" for i in range(5)], card=1)),
            "the slices of card 1 have 100 GiB in total, but the card has 80 GiB",
        ),
        ((*SHARES, Slice(7, 0, "4gb")), "the node has no card 7"),
    ],
)
def test_impossible_plan_is_refused_and_changes_nothing(mps: Rig, wanted: tuple[Slice, ...], why: str) -> None:
    mps.configure(*SHARES).reconcile()
    mps.take("p", SHARES[1]).plan(6, *wanted).configure(*wanted).reconcile(2)
    assert mps.users.keys() == {*SHARES}
    assert mps.reported.refused is not None
    assert mps.reported.refused[1] == f"ConfigMap m data[n1]: {why}"
    assert len([w for w in mps.warnings if "plan 6 is refused" in w]) == 1


def test_card_with_shares_of_other_vocabularies_is_not_cut(mps: Rig) -> None:
    record = {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": "0"}
    mps.pods.take(share("p", node="n1", annotations=record))
    mps.plan(5, *SHARES).configure(*SHARES).reconcile()
    assert "pods in other vocabularies have shares of card 0" in (mps.reported.refused or (0, ""))[1]
    assert mps.reported.existing == ()
    assert mps.partitions.devices(mps.cards) == mps.cards
    assert mps.partitions.whole(mps.cards) == mps.cards[1:]
    mps.pods.drop(share("p"))
    mps.reconcile()
    assert (mps.reported.has_pending_plan, mps.reported.existing) == (True, ())
    mps.reconcile()
    assert mps.users.keys() == {*SHARES}


def test_invalid_yaml_is_reported_and_changes_nothing(mps: Rig) -> None:
    mps.configure(*SHARES).reconcile()
    mps.mps.config = "sharing: ["
    mps.reconcile(2)
    assert mps.users.keys() == {*SHARES}
    assert len([w for w in mps.warnings if w.startswith("ConfigMap m data[n1]: is not YAML")]) == 1
    assert mps.reported.refused is None


def test_invalid_yaml_does_not_refuse_a_plan_equal_to_the_last_valid_configuration(mps: Rig) -> None:
    mps.plan(5, *SHARES).configure(*SHARES).reconcile()
    mps.mps.config = "sharing: ["
    mps.plan(6, *places("2gb@7", "4gb@1", "4gb@2")).reconcile(2)
    assert (mps.reported.refused, mps.reported.has_pending_plan) == (None, True)


def test_card_without_its_daemon_offers_nothing(mps: Rig) -> None:
    mps.mps.silent = {"GPU-0"}
    other = place("2gb@0", 1)
    mps.take("p", place("4gb@1")).plan(5, *SHARES, other).configure(*SHARES, other).reconcile()
    assert mps.users == {place("4gb@1"): "uid-p", other: ""}
    assert {s.place for s in mps.kubelet.unhealthy} == {*SHARES}
    assert mps.reported.has_pending_plan
    mps.mps.silent = set()
    mps.reconcile()
    assert mps.users.keys() == {*SHARES, other}
    assert not mps.reported.has_pending_plan


def test_restarted_agent_goes_on_from_the_reported_slices(mps: Rig) -> None:
    mps.configure(*places("4gb@0", "4gb@1")).reconcile()
    mps.configure(*places("4gb@0", "2gb@5")).take("p", place("4gb@1")).reconcile()
    before = mps.users
    mps.restart().reconcile()
    assert mps.users == before == {place("4gb@1"): "uid-p", place("2gb@0"): ""}


def test_slices_of_one_uuid_are_told_apart_by_their_places(mps: Rig) -> None:
    mps.configure(*SHARES).reconcile()
    mps.pods.take(share("q", node="n1"))
    mps.hand_out("q", place("4gb@1"), NVIDIA_VISIBLE_DEVICES="GPU-0").reconcile()
    assert mps.users == {SHARES[0]: "", SHARES[1]: "uid-q", SHARES[2]: ""}


def test_unknown_configmap_changes_nothing(mps: Rig) -> None:
    mps.configure(*SHARES).reconcile()
    before = dict(mps.nodes.raw["metadata"]["annotations"])
    mps.mps.config = None
    mps.restart()
    with pytest.raises(RetryLater):
        mps.reconcile()
    assert mps.nodes.raw["metadata"]["annotations"] == before


@pytest.mark.parametrize("mode", [None, "mig"])
def test_no_daemon_is_kept_on_a_node_of_another_mode(mps: Rig, mode: str | None) -> None:
    mps.configure(*SHARES).reconcile()
    mps.label(mode).reconcile()
    assert mps.mps.cards == ()


def test_empty_configmap_makes_cards_whole_again(mps: Rig) -> None:
    mps.configure(*SHARES).reconcile()
    mps.mps.config = ""
    mps.reconcile()
    assert mps.reported.existing == ()
    assert mps.mps.cards == ()
    assert [card.type for card in mps.partitions.devices(mps.cards)] == ["gpu", "gpu"]


def test_instances_that_another_plugin_gave_out_stay_while_their_pod_runs(mps: Rig) -> None:
    """An administrator partitioned the card and set the label `mps` later. No process runs on the instances now."""
    mps.make(*places("2g.20gb@0", "3g.40gb@4"))
    before = mps.made()
    raw = slice_pod("q", place("2g.20gb@0"))
    raw["metadata"]["annotations"] = {}
    raw["status"]["containerStatuses"] = [{"name": "c", "containerID": "containerd://1", "state": {"running": {}}}]
    mps.pods.take(raw)
    mps.reconcile()
    assert mps.made() == before
    mps.bare = frozenset({raw["metadata"]["uid"]})
    mps.reconcile()
    assert mps.made() == {}, "its containers run, and were handed nothing"
    mps.bare = frozenset()
    mps.make(*places("2g.20gb@0", "3g.40gb@4"))
    mps.pods.drop(raw)
    mps.reconcile()
    assert mps.made() == {}
