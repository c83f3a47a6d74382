"""The Pods of MtgpuPods: made, refused, gone; and Pods of others that have their names."""

import itertools

import pytest

from mgpu.dialects import mtgpu
from mgpu.kube import ApiError
from tests import builders as b
from tests.mtgpu_rig import ITEMS, Rig
from tests.scheduler.mtgpupods.rigged import bound, condition, lacks_all, names, own, refusing

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
