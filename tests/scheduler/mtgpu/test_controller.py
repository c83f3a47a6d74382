"""The controller of MtgpuPods on the playground's API server, without its HTTP (tests/mtgpu_rig.py)."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from mgpu.dialects import mtgpu
from mgpu.kube import ApiError
from mgpu.settings import load_settings
from tests import builders as b
from tests.mtgpu_rig import DEVICES, GIB, ITEMS, PODS, WHOLE, Raw, Rig

Story = Callable[[Rig], object]


@pytest.fixture
def rig() -> Rig:
    """n1: two cards. s1: two that NVIDIA's plugin gives out."""
    return Rig(("n1", 2, False), ("s1", 2, True))


def bound(rig: Rig, name: str) -> tuple[str, str, str]:
    """Of its condition Bound the status and reason, and its card."""
    status = rig.item(name).get("status") or {}
    row = condition(rig, name, "Bound")
    return row.get("status", ""), row.get("reason", ""), status.get("BoundDeviceID", "")


def condition(rig: Rig, name: str, type: str) -> dict[str, Any]:
    rows = (rig.item(name).get("status") or {}).get("conditions") or ()
    return next((row for row in rows if row["type"] == type), {})


def own(rig: Rig, name: str) -> Raw:
    found = rig.pod(name)
    assert found is not None
    return found


def names(rig: Rig, resource: str = PODS) -> list[str]:
    return [raw["metadata"]["name"] for raw in rig.cluster.all(resource)]


def refusing(verb: str, part: str, error: ApiError) -> Callable[[str, str], None]:
    def refuse(asked: str, path: str) -> None:
        if asked == verb and part in path:
            raise error

    return refuse


def test_the_pod_of_one_runs_on_the_card_of_its_gpuid(rig: Rig) -> None:
    rig.create("a", "zxcvb", "0.25", memory=20 * GIB)
    rig.settle()
    assert bound(rig, "a") == ("True", "Bound", "GPU-n1-0")
    pod, item = own(rig, "a"), rig.item("a")
    assert pod["spec"]["nodeName"] == "n1"
    env = {row["name"]: row["value"] for row in pod["spec"]["containers"][0]["env"]}
    assert (env["NVIDIA_VISIBLE_DEVICES"], env["MGPU_CORE_PERCENT"]) == ("GPU-n1-0", "25")
    assert pod["metadata"]["ownerReferences"][0]["uid"] == item["metadata"]["uid"]
    assert item["metadata"]["finalizers"] == [mtgpu.FINALIZER]
    assert item["status"]["phase"] == "Running"
    assert item["status"]["PodStatus"]["phase"] == "Running"
    assert item["status"]["PodObjectMeta"]["uid"] == pod["metadata"]["uid"]
    assert item["status"]["observedGeneration"] == 1


def test_the_story_of_the_seed(rig: Rig) -> None:
    rig.create("pod1", "zxcvb", "0.2")
    rig.settle()
    rig.create("pod2", "qwert", "0.3")
    rig.settle()
    rig.create("pod3", "zxcvb", "0.4")
    rig.settle()
    cards = [bound(rig, f"pod{i}")[2] for i in (1, 2, 3)]
    assert cards[0] == cards[2] != cards[1]
    rig.delete("pod2")
    rig.settle()
    assert rig.occupy("qwert") is None
    rig.create("pod4", "asdfg", "0.5")
    rig.settle()
    assert bound(rig, "pod4") == ("True", "Bound", cards[1])


def test_shares_add_up_to_exactly_one_card(rig: Rig) -> None:
    for name, request in zip("abcd", ("0.2", "0.4", "0.3", "0.1"), strict=True):
        rig.create(name, "x", request)
    rig.create("e", "x", "0.001")
    rig.settle()
    assert [bound(rig, name)[0] for name in "abcde"] == ["True"] * 4 + ["False"]
    assert bound(rig, "e")[1] == "ResourceExceeded"


def test_who_waits_is_served_in_order_and_told_once(rig: Rig) -> None:
    for name, request in (("a", "0.9"), ("b", "0.5"), ("c", "0.1")):
        rig.create(name, "x", request)
        rig.settle()
    assert [bound(rig, name)[1] for name in "abc"] == ["Bound", "ResourceExceeded", "ResourceExceeded"]
    rig.delete("a")
    rig.settle()
    assert [bound(rig, name)[0] for name in "bc"] == ["True", "True"]
    told = [what.reason for name, what in rig.scheduler.told if name == "b" and what.type == "Bound"]
    assert told == ["ResourceExceeded", "Bound"]


def test_a_waiting_one_gets_the_card_that_a_pool_pod_leaves(rig: Rig) -> None:
    for i in range(2):
        rig.submit(pooled(f"p{i}"))
    rig.settle()
    rig.create("a", "x")
    rig.settle()
    assert bound(rig, "a")[1] == "ResourceExceeded"
    rig.kill(own(rig, "p1"), force=True)
    rig.settle()
    assert bound(rig, "a") == ("True", "Bound", "GPU-n1-1")


def pooled(name: str, core: int = 80, node: str = "n1") -> Raw:
    raw = b.share(name, core)
    return {**raw, "metadata": {**raw["metadata"], "labels": {"test/node": node}}}


@pytest.mark.parametrize("node", ["n1", "s1"])
def test_a_card_is_kept_for_it_from_its_admission_on(rig: Rig, node: str) -> None:
    if node == "n1":
        rig.submit(pooled("there"))
        rig.settle()
    rig.create("a", "x", node=node)
    rig.scheduler.hear()
    rig.control()
    assert rig.occupy("x", node) is not None
    assert rig.bind(rig.submit(pooled("late", node=node)), node)
    rig.settle()
    assert bound(rig, "a")[0] == "True"


# Somebody else's Pods.


def test_a_foreign_pod_of_its_name_is_left_alone_and_waited_for(rig: Rig) -> None:
    foreign = rig.submit(b.pod("a", {"name": "c", "image": "x"}))
    rig.create("a", "x")
    rig.create("other", "x")
    rig.settle()
    assert bound(rig, "a") == ("False", "NameConflict", "")
    assert bound(rig, "other")[0] == "True"
    assert own(rig, "a") == foreign
    rig.delete("a")
    rig.settle()
    assert names(rig, ITEMS) == ["other"]
    assert own(rig, "a") == foreign
    rig.create("a", "x")
    rig.settle()
    rig.kill(foreign, force=True)
    rig.settle()
    assert bound(rig, "a")[0] == "True"


def test_the_pod_of_a_predecessor_is_a_foreign_one(rig: Rig) -> None:
    rig.create("a", "x")
    rig.settle()
    rig.cluster.patch("/apis/lsalab.nthu/v1/namespaces/default/mtgpupods/a", {"metadata": {"finalizers": []}})
    rig.delete("a")
    rig.create("a", "y")
    rig.scheduler.hear()
    rig.control()
    assert bound(rig, "a")[1] == "NameConflict"
    assert own(rig, "a")["metadata"]["annotations"][mtgpu.GPUID] == "x"
    rig.settle()
    assert bound(rig, "a")[0] == "True"
    assert own(rig, "a")["metadata"]["annotations"][mtgpu.GPUID] == "y"
    assert rig.occupy("x") is None


def test_a_foreign_pod_of_the_occupy_pods_name_is_not_used(rig: Rig) -> None:
    name = mtgpu.occupy_name("n1", "x")
    rig.submit(b.pod(name, {"name": "c", "image": "x"}, namespace="kube-system"))
    rig.create("a", "x")
    rig.settle()
    assert bound(rig, "a")[1] == "OccupyNameConflict"
    rig.delete("a")
    rig.settle()
    assert name in names(rig)


def test_an_own_pod_that_just_came_is_no_foreign_one_whatever_the_watch_has_brought(rig: Rig) -> None:
    rig.create("a", "x")
    rig.round()
    rig.scheduler.hear()
    rig.control()
    assert rig.pod("a") is not None
    rig.scheduler.hear(ITEMS)
    rig.control()
    rig.settle()
    assert "NameConflict" not in [what.reason for _, what in rig.scheduler.told]


# Its own Pod.


def test_a_pod_that_ends_by_its_deletion_is_made_again(rig: Rig) -> None:
    rig.create("a", "x")
    rig.create("b", "x", "1")
    rig.settle()
    before = own(rig, "a")
    rig.kill(before)
    rig.run("n1")
    assert own(rig, "a")["status"]["phase"] == "Failed"
    rig.scheduler.hear()
    rig.control()
    assert rig.item("a")["status"]["phase"] == "Running"
    assert condition(rig, "a", "PodCreated")["reason"] == "PodTerminating"
    rig.settle()
    assert own(rig, "a")["metadata"]["uid"] != before["metadata"]["uid"]
    assert rig.item("a")["status"]["phase"] == "Running"
    assert bound(rig, "b")[1] == "ResourceExceeded"


def test_its_pod_is_made_again_on_the_same_card(rig: Rig) -> None:
    rig.create("a", "x", node="s1")
    rig.settle()
    before = own(rig, "a")
    rig.kill(before, force=True)
    rig.settle()
    after = own(rig, "a")
    assert after["metadata"]["uid"] != before["metadata"]["uid"]
    assert after["spec"]["containers"][0]["env"][0] == before["spec"]["containers"][0]["env"][0]
    assert rig.item("a")["status"]["PodObjectMeta"]["uid"] == after["metadata"]["uid"]


def test_a_pod_that_goes_as_soon_as_it_is_made_is_made_again_in_growing_pauses(rig: Rig) -> None:
    """As with a scheduler that preempts it for a pod which then finds it there again."""
    rig.create("a", "x")
    rig.settle()
    began, made = rig.clock.now, list[float]()
    while len(made) < 6:
        found = rig.pod("a")
        if found is not None:
            made.append(rig.clock.now - began)
            rig.kill(found, force=True)
        rig.round()
        rig.clock.now += 0.5
    pauses = [after - before for before, after in itertools.pairwise(made)]
    assert pauses[0] <= 0.5, "once it is made again at once"
    assert all(pause >= 2**i for i, pause in enumerate(pauses[1:])), pauses
    rig.settle()
    assert own(rig, "a")["status"]["phase"] == "Running"
    assert condition(rig, "a", "PodCreated")["reason"] == "PodCreated"


def test_one_that_has_ended_leaves_its_share_and_is_not_started_again(rig: Rig) -> None:
    rig.create("a", "x", "1")
    rig.create("b", "x", "1")
    rig.settle()
    rig.end(own(rig, "a"), "Succeeded")
    rig.settle()
    assert rig.item("a")["status"]["phase"] == "Succeeded"
    assert bound(rig, "b") == ("True", "Bound", "GPU-n1-0")
    rig.kill(own(rig, "a"), force=True)
    rig.settle()
    assert rig.pod("a") is None


def test_one_whose_pod_is_invalid_has_failed(rig: Rig) -> None:
    bad = {"containers": [{"name": "c"}], "nodeName": "n1", "restartPolicy": "Sometimes"}
    raw = b.mtgpupod("a", "x") | {"spec": bad}
    rig.cluster.create("/apis/lsalab.nthu/v1/namespaces/default/mtgpupods", {k: raw[k] for k in raw if k != "status"})
    rig.settle()
    assert rig.item("a")["status"]["phase"] == "Failed"
    assert condition(rig, "a", "PodCreated")["reason"] == "PodRefused"
    assert rig.occupy("x") is None


@pytest.mark.parametrize(
    "refusal",
    [
        ApiError(403, "Forbidden", "exceeded quota: pods"),
        ApiError(400, "BadRequest", 'admission webhook "w" denied the request: no'),
        # A ValidatingAdmissionPolicy denies with 422 Invalid where it names no reason of its own.
        ApiError(
            422, "Invalid", "pods \"a\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied request"
        ),
    ],
    ids=lambda error: str(error.status),
)
def test_a_pod_that_may_not_be_made_now_is_made_as_soon_as_it_may(rig: Rig, refusal: ApiError) -> None:
    rig.cluster.refuse = refusing("create", "/default/pods", refusal)
    rig.create("a", "x")
    rig.settle()
    assert condition(rig, "a", "PodCreated")["reason"] == "PodForbidden"
    assert bound(rig, "a")[0] == "True"
    rig.cluster.refuse = lambda *_: None
    rig.settle()
    assert condition(rig, "a", "PodCreated")["reason"] == "PodCreated"
    assert rig.item("a")["status"]["phase"] == "Running"


def test_one_that_cannot_be_read_is_told_so_and_can_be_deleted(rig: Rig) -> None:
    rig.create("a", "X", "1.5")
    rig.settle()
    assert bound(rig, "a")[1] == "Invalid"
    assert lacks_all(rig, "a")
    rig.delete("a")
    rig.settle()
    assert names(rig, ITEMS) == []


def lacks_all(rig: Rig, name: str) -> bool:
    return rig.pod(name) is None and not [raw for raw in rig.cluster.all(PODS) if mtgpu.OCCUPY_LABEL in str(raw)]


# The end of one.


def test_it_holds_its_share_until_its_pod_is_gone(rig: Rig) -> None:
    rig.create("a", "x", "1")
    rig.create("b", "x", "1")
    rig.settle()
    rig.delete("a")
    rig.scheduler.hear()
    rig.control()
    rig.scheduler.hear()
    rig.control()
    assert own(rig, "a")["metadata"]["deletionGracePeriodSeconds"] == 30
    assert bound(rig, "b")[1] == "ResourceExceeded"
    rig.settle()
    assert names(rig, ITEMS) == ["b"]
    assert bound(rig, "b")[0] == "True"


def test_a_pod_that_the_watch_has_not_brought_is_found_before_the_finalizer_goes(rig: Rig) -> None:
    rig.create("a", "x")
    rig.round()
    assert rig.pod("a") is None
    rig.scheduler.hear()
    rig.control()
    assert rig.pod("a") is not None  # and the scheduler has not heard of it
    rig.delete("a")
    rig.scheduler.hear(ITEMS)
    rig.control()
    assert names(rig, ITEMS) == ["a"]
    assert "deletionTimestamp" in own(rig, "a")["metadata"]
    rig.settle()
    assert names(rig, ITEMS) == names(rig) == []


def test_after_an_orphaning_deletion_its_pod_goes_all_the_same(rig: Rig) -> None:
    rig.create("a", "x")
    rig.settle()
    rig.cluster.patch("/api/v1/namespaces/default/pods/a", {"metadata": {"ownerReferences": []}})
    rig.delete("a")
    rig.settle()
    assert names(rig, ITEMS) == names(rig) == []


def test_a_gpuid_that_was_retired_gets_a_card_anew(rig: Rig) -> None:
    rig.create("a", "x")
    rig.settle()
    rig.delete("a")
    rig.scheduler.hear()
    rig.control()
    rig.create("b", "x")
    rig.settle()
    assert names(rig, ITEMS) == ["b"]
    assert bound(rig, "b")[0] == "True"


def test_a_namespace_can_be_deleted(rig: Rig) -> None:
    rig.cluster.create("/api/v1/namespaces", {"metadata": {"name": "team"}})
    raw = b.mtgpupod("a", "x", namespace="team")
    path = "/apis/lsalab.nthu/v1/namespaces/team/mtgpupods"
    rig.cluster.create(path, {key: raw[key] for key in raw if key != "status"})
    rig.round()
    rig.cluster.delete("/api/v1/namespaces/team")
    rig.settle()
    assert names(rig, ITEMS) == names(rig) == []
    assert "team" not in names(rig, "namespaces")


# Occupy pods and nodes.


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


# Writes that go wrong.


def test_who_does_not_lead_writes_nothing(rig: Rig) -> None:
    rig.scheduler.leads = False
    rig.create("a", "x")
    before = rig.cluster.storage.rv
    rig.scheduler.hear()
    rig.control()
    assert rig.cluster.storage.rv == before
    rig.scheduler.leads = True
    rig.scheduler.controller.begin()
    rig.settle()
    assert bound(rig, "a")[0] == "True"


@pytest.mark.parametrize("what", ["bound", "ended"])
def test_one_whose_writes_are_refused_does_not_keep_other_gpuids_waiting(rig: Rig, what: str) -> None:
    refuse = ApiError(422, "Invalid", "a schema that became stricter")
    if what == "bound":
        rig.cluster.refuse = refusing("replace", "/mtgpupods/a/", refuse)
        rig.create("a", "x")
    else:
        rig.create("a", "x")
        rig.settle()
        rig.cluster.refuse = refusing("delete", "/default/pods/a", refuse)
        rig.delete("a")
    rig.create("b", "y")
    rig.settle()
    assert bound(rig, "b")[0] == "True"
    rig.cluster.refuse = lambda *_: None
    rig.settle()
    assert what == "ended" or bound(rig, "a")[0] == "True"
    assert names(rig, ITEMS) == (["b"] if what == "ended" else ["a", "b"])


def test_what_was_decided_in_an_earlier_term_is_not_written(rig: Rig) -> None:
    """A call takes so long that another replica leads meanwhile, and this one again."""
    rig.create("a", "x")
    rig.scheduler.hear()
    rig.cluster.refuse = lambda *_: rig.scheduler.controller.begin()
    rig.scheduler.controller.look_at("n1")
    assert rig.item("a")["metadata"]["finalizers"] == [mtgpu.FINALIZER]
    assert "status" not in rig.item("a")
    assert rig.occupy("x") is None
    rig.cluster.refuse = lambda *_: None
    rig.settle()
    assert bound(rig, "a")[0] == "True"


def test_one_that_may_not_be_written_does_not_keep_the_others_waiting(rig: Rig) -> None:
    rig.cluster.refuse = refusing("patch", "/mtgpupods/a", ApiError(403, "Forbidden", "a policy"))
    rig.create("a", "x")
    rig.create("b", "x")
    rig.settle()
    assert bound(rig, "a")[2] == ""
    assert bound(rig, "b")[0] == "True"


def test_what_the_watch_has_not_brought_yet_binds_nobody_to_another_card(rig: Rig) -> None:
    """One of two is bound when the API server is lost; then their occupy pod comes back on the other card."""
    rig.create("a", "x", node="s1")
    rig.create("b", "x", node="s1")
    rig.round()
    rig.scheduler.hear()
    rig.scheduler.wire.fail(1)
    rig.control()
    rig.scheduler.wire.fail(None)
    occupy = rig.occupy("x", "s1")
    assert occupy is not None
    assert [bound(rig, name)[2] for name in "ab"] == ["GPU-s1-0", ""]
    rig.nodes["s1"].takes = 1
    rig.kill(occupy, force=True)
    for _ in range(4):
        for resource in (DEVICES, PODS):
            rig.scheduler.hear(resource)
        rig.control()
        rig.schedule()
        rig.run("s1")
        rig.report("s1")
        rig.clock.now += 100
    assert list(rig.nodes["s1"].given.values()) == ["GPU-s1-1"]
    assert [bound(rig, name)[2] for name in "ab"] == ["GPU-s1-0", ""]
    rig.settle()
    assert [bound(rig, name)[2] for name in "ab"] == ["GPU-s1-0", ""]
    assert condition(rig, "a", "Degraded")["reason"] == "OtherCard"


def _start(rig: Rig) -> None:
    rig.create("a", "x", "0.5")
    rig.create("s", "x", "0.5", node="s1")


def _join(rig: Rig) -> None:
    _start(rig)
    rig.settle()
    rig.create("b", "x", "0.5")
    rig.create("c", "x", "0.5")


def _retire(rig: Rig) -> None:
    _join(rig)
    rig.settle()
    for name in "ab":
        rig.delete(name)
    rig.create("d", "y")


def _lose(rig: Rig) -> None:
    _start(rig)
    rig.settle()
    for gpuid, node in (("x", "n1"), ("x", "s1")):
        occupy = rig.occupy(gpuid, node)
        assert occupy is not None
        rig.end(occupy, "Failed")
    rig.kill(own(rig, "a"), force=True)


def _picture(rig: Rig) -> Any:
    """All but uids, times and versions."""
    items = [(raw["metadata"]["name"], *bound(rig, raw["metadata"]["name"])) for raw in rig.items()]
    pods = [
        (raw["metadata"]["name"], raw["status"]["phase"], raw["spec"].get("nodeName")) for raw in rig.cluster.all(PODS)
    ]
    return items, pods


@pytest.mark.parametrize("story", [_start, _join, _retire, _lose])
@pytest.mark.parametrize("after", [False, True])
def test_a_crash_at_any_call_changes_nothing_in_the_end(story: Story, after: bool) -> None:
    rig = Rig(("n1", 2, False), ("s1", 2, True))
    story(rig)
    rig.scheduler.wire.calls = 0
    rig.settle()
    calls, wanted = rig.scheduler.wire.calls, _picture(rig)
    assert calls >= 5
    for left in range(calls):
        crashed = Rig(("n1", 2, False), ("s1", 2, True))
        story(crashed)
        crashed.scheduler.wire.fail(left, crash=True, after=after)
        crashed.settle()
        assert _picture(crashed) == wanted, f"after {left} calls"
