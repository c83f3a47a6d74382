"""What comes and goes around MtgpuPods: their occupy pods, and their nodes."""

import pytest

from mgpu.kube import ApiError
from mgpu.settings import load_settings
from tests import builders as b
from tests.mtgpu_rig import ITEMS, WHOLE, Rig
from tests.scheduler.mtgpupods.rigged import bound, condition, names, own, refusing


@pytest.mark.parametrize("how", ["deleted", "failed"])
def test_an_occupy_pod_is_made_again_and_gets_the_same_card(rig: Rig, how: str) -> None:
    rig.create("a", "x")
    rig.create("b", "y")
    rig.settle()
    occupy = rig.occupy("y")
    assert occupy is not None
    if how == "deleted":
        rig.kill(occupy, force=True)
    else:
        rig.end(occupy, "Failed")
    rig.settle()
    again = rig.occupy("y")
    assert again is not None
    assert again["metadata"]["uid"] != occupy["metadata"]["uid"]
    assert again["status"]["phase"] == "Running"
    assert condition(rig, "b", "Degraded")["status"] == "False"


def test_one_that_comes_back_on_another_card_moves_nobody(rig: Rig) -> None:
    rig.create("a", "x", node="s1")
    rig.settle()
    occupy = rig.occupy("x", "s1")
    assert occupy is not None
    rig.nodes["s1"].takes = 1
    rig.kill(occupy, force=True)
    rig.settle()
    degraded = condition(rig, "a", "Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "OtherCard")
    assert rig.item("a")["status"]["BoundDeviceID"] == "GPU-s1-0"
    rig.create("b", "x", node="s1")
    rig.settle()
    assert bound(rig, "b")[1] == "Degraded"
    other = rig.occupy("x", "s1")
    assert other is not None
    rig.nodes["s1"].takes = 0
    rig.kill(other, force=True)
    rig.settle()
    assert condition(rig, "a", "Degraded")["status"] == "False"
    assert bound(rig, "b") == ("True", "Bound", "GPU-s1-0")


def test_an_occupy_pod_that_fails_each_time_is_tried_in_growing_pauses(rig: Rig) -> None:
    whole = {"name": "c", "image": "x", "resources": {"limits": {WHOLE: "2"}, "requests": {WHOLE: "2"}}}
    rig.create("a", "x", node="s1")
    rig.settle()
    occupy = rig.occupy("x", "s1")
    assert occupy is not None
    rig.kill(occupy, force=True)
    rig.nodes["s1"].given = {"somebody": "GPU-s1-0", "else": "GPU-s1-1"}
    taken = rig.submit(b.pod("w", whole, node="s1"))
    rig.nodes["s1"].given = dict.fromkeys([taken["metadata"]["uid"]], "GPU-s1-1")
    made = 0
    for _ in range(60):
        before = rig.occupy("x", "s1")
        rig.round()
        after = rig.occupy("x", "s1")
        made += after is not None and (before is None or before["metadata"]["uid"] != after["metadata"]["uid"])
        if after is not None and after["status"]["phase"] != "Failed":
            rig.end(after, "Failed")
        rig.clock.now += 1
    assert 3 <= made <= 8


def test_why_an_occupy_pod_cannot_be_made_is_said(rig: Rig) -> None:
    rig.cluster.refuse = refusing("create", "/kube-system/pods", ApiError(403, "Forbidden", "exceeded quota: gpus"))
    rig.create("a", "x")
    rig.settle()
    assert bound(rig, "a")[1] == "OccupyPodRefused"
    assert "exceeded quota: gpus" in condition(rig, "a", "Bound")["message"]
    rig.cluster.refuse = lambda *_: None
    rig.settle()
    assert bound(rig, "a")[0] == "True"


def test_an_occupy_pod_that_nobody_needs_is_swept(rig: Rig) -> None:
    raw = b.occupy_pod("stale", "n1")
    rig.submit({**raw, "spec": {**raw["spec"], "containers": [{**raw["spec"]["containers"][0], "image": "x"}]}})
    rig.settle()
    assert names(rig) == []


def test_on_a_node_that_is_gone_nothing_is_left_and_it_goes_on_when_it_is_back(rig: Rig) -> None:
    rig.create("a", "x")
    rig.create("b", "y")
    rig.settle()
    node = rig.remove_node("n1")
    rig.collect()  # before the scheduler hears of it
    rig.settle()
    assert names(rig) == []
    assert condition(rig, "a", "Bound")["reason"] == "NodeNotFound"
    rig.delete("b")
    rig.settle()
    assert names(rig, ITEMS) == ["a"]
    rig.add_node(node)
    rig.settle()
    assert bound(rig, "a") == ("True", "Bound", "GPU-n1-0")
    assert own(rig, "a")["status"]["phase"] == "Running"


def test_nothing_is_begun_on_a_cordoned_node(rig: Rig) -> None:
    rig.cordon("n1", on=True)
    rig.create("a", "x")
    rig.settle()
    assert bound(rig, "a")[1] == "NodeUnschedulable"
    rig.cordon("n1", on=False)
    rig.settle()
    assert bound(rig, "a")[0] == "True"


def test_nothing_is_begun_where_the_kubelet_would_refuse_it_for_good(rig: Rig) -> None:
    taint = {"key": "maintenance", "value": "now", "effect": "NoExecute"}
    rig.create("a", "x")
    rig.settle()
    rig.cluster.patch("/api/v1/nodes/n1", {"spec": {"taints": [taint]}})
    rig.kill(own(rig, "a"))
    rig.create("b", "x")
    rig.settle()
    assert rig.pod("a") is None
    assert condition(rig, "a", "PodCreated")["reason"] == bound(rig, "b")[1] == "NodeTainted"
    assert "the taint maintenance=now:NoExecute" in condition(rig, "b", "Bound")["message"]
    rig.cluster.patch("/api/v1/nodes/n1", {"spec": {"taints": None}})
    rig.settle()
    assert [own(rig, name)["status"]["phase"] for name in "ab"] == ["Running"] * 2


def test_where_they_are_disabled_those_that_have_a_card_keep_it_and_can_go(rig: Rig) -> None:
    rig.create("a", "x")
    rig.settle()
    rig.settings = load_settings("dialects: {mtgpu: {enabled: false}}")
    rig.restart()
    rig.create("b", "x")
    rig.kill(own(rig, "a"), force=True)
    rig.settle()
    assert own(rig, "a")["status"]["phase"] == "Running"
    assert "status" not in rig.item("b")
    rig.delete("a")
    rig.settle()
    assert (names(rig, ITEMS), names(rig)) == (["b"], [])
