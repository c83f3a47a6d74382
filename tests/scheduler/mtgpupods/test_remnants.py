"""MtgpuPods of a namespace whose Pods were deleted by force and still run."""

from typing import Any

import pytest

from mgpu.dialects import mtgpu
from mgpu.model.pods import Pod
from mgpu.settings import load_settings
from scheduler.cluster.remnants import WAIT_SECONDS
from tests import builders as b
from tests.mtgpu_rig import DEVICES, PODS, Rig, items_path
from tests.scheduler.mtgpupods.rigged import bound, condition, own, pooled

ONE = load_settings("dialects: {mtgpu: {occupyPriorityClass: '', maxGPUIDsPerNamespace: 1}}")
CARDS = 4


@pytest.fixture
def rig() -> Rig:
    """Two nodes; a namespace may use one GPUID."""
    rig = Rig(("n1", CARDS, False), ("n2", CARDS, False))
    rig.settings = ONE
    rig.restart()
    return rig


def rounds(rig: Rig, count: int = 4) -> None:
    """Let everybody work, for a time in which no remnant is forgotten."""
    for _ in range(count):
        rig.round()
        rig.clock.now += 2


def create(rig: Rig, name: str, gpuid: str, node: str = "n1", namespace: str = "default", request: str = "0.2") -> None:
    if rig.cluster.storage.get("namespaces", "", namespace) is None:
        rig.cluster.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
    raw = b.mtgpupod(name, gpuid, request, namespace=namespace, node=node)
    rig.cluster.create(items_path(namespace), {key: raw[key] for key in raw if key != "status"})
    rounds(rig)


def is_running(rig: Rig, name: str, namespace: str = "default") -> bool:
    found = rig.pod(name, namespace)
    return found is not None and found["status"]["phase"] == "Running"


def reasons(rig: Rig, name: str, namespace: str = "default") -> dict[str, str]:
    """The reason of each condition of an MtgpuPod."""
    status = rig.cluster.get(f"{items_path(namespace)}/{name}")["status"]
    return {row["type"]: row["reason"] for row in status["conditions"]}


def delete_item(rig: Rig, name: str) -> None:
    """Delete the MtgpuPod, and its Pod by force while that ends."""
    rig.delete(name)
    rig.scheduler.hear()
    rig.control()
    assert "deletionTimestamp" in own(rig, name)["metadata"]
    rig.abandon(own(rig, name))


def delete_pod(rig: Rig, name: str) -> None:
    """Delete the Pod by force, then the MtgpuPod."""
    rig.abandon(own(rig, name))
    rig.delete(name)


def take_finalizer(rig: Rig, name: str) -> None:
    """Let the MtgpuPod go at once; garbage collection deletes its Pod, and the tenant deletes that by force."""
    rig.cluster.patch(f"{items_path('default')}/{name}", {"metadata": {"finalizers": []}})
    rig.delete(name)
    rig.scheduler.hear()
    rig.collect()
    rig.abandon(own(rig, name))


def orphan(rig: Rig, name: str) -> None:
    """Take the owner off the Pod and let the MtgpuPod go, as `kubectl delete --cascade=orphan` does."""
    rig.cluster.patch(f"/api/v1/namespaces/default/pods/{name}", {"metadata": {"ownerReferences": None}})
    rig.cluster.patch(f"{items_path('default')}/{name}", {"metadata": {"finalizers": []}})
    rig.delete(name)
    rig.abandon(own(rig, name))


def in_use(rig: Rig) -> set[str]:
    """The UUIDs of the cards on which containers of MtgpuPods run."""
    pods = [raw for raw in rig.cluster.all(PODS) if mtgpu.GPUID in (raw["metadata"].get("annotations") or {})]
    remnants = [given for node in rig.nodes.values() for given in node.remnants.values()]
    return {mtgpu.visible_card(raw) or "" for raw in pods} | {card for given in remnants for card in given.ids}


@pytest.mark.parametrize("let_go", [delete_item, delete_pod, take_finalizer, orphan])
def test_loop_of_forced_deletions_holds_at_most_twice_the_bound(rig: Rig, let_go: Any) -> None:
    for i in range(CARDS):
        create(rig, f"m{i}", f"x{i}", "n1" if i % 2 else "n2")
        if is_running(rig, f"m{i}"):
            let_go(rig, f"m{i}")
            rounds(rig)
    assert len(in_use(rig)) == 1
    assert bound(rig, "m3")[:2] == ("False", "DeletedPodsRunning")


def force_delete(rig: Rig, name: str = "m") -> None:
    """Run an MtgpuPod on n1 and delete it while its containers run on."""
    create(rig, name, "x")
    delete_item(rig, name)
    rounds(rig)


def test_waiting_mtgpupod_gets_its_card_once_the_remnant_has_ended_on_another_node(rig: Rig) -> None:
    force_delete(rig)
    create(rig, "next", "y", "n2")
    assert bound(rig, "next")[:2] == ("False", "DeletedPodsRunning")
    assert rig.occupy("y", "n2") is None
    rig.stop_remnants("n1")
    rounds(rig)
    assert is_running(rig, "next")
    assert condition(rig, "next", "PodCreated")["status"] == "True"


def test_waiting_mtgpupod_is_told_of_with_one_warning(rig: Rig) -> None:
    force_delete(rig)
    create(rig, "next", "y")
    rounds(rig)
    told = [(name, what.warning) for name, what in rig.scheduler.told if what.reason == "DeletedPodsRunning"]
    assert told == [("next", True)]


def test_remnant_that_does_not_end_holds_up_its_namespace_for_a_while_only(rig: Rig) -> None:
    """Nothing else happens: the controller looks by itself when the time has passed."""
    force_delete(rig)
    create(rig, "next", "y")
    rig.clock.now += WAIT_SECONDS
    rounds(rig)
    assert is_running(rig, "next")


def test_other_namespaces_get_cards_beside_a_remnant(rig: Rig) -> None:
    force_delete(rig)
    create(rig, "next", "y")
    create(rig, "v", "y", namespace="victim")
    create(rig, "w", "z", "n2", namespace="victim")
    assert is_running(rig, "v", "victim")
    assert bound(rig, "next")[1] == "DeletedPodsRunning"


def test_remnant_does_not_stop_other_namespaces_of_its_gpuid(rig: Rig) -> None:
    """A tenant may name any GPUID, and must not put the card in doubt by deleting a Pod by force."""
    create(rig, "m", "x")
    create(rig, "v", "x", namespace="victim")
    rig.abandon(own(rig, "m"))
    rounds(rig)
    assert reasons(rig, "v", "victim")["Degraded"] == "AsBound"
    assert reasons(rig, "m")["Degraded"] == "AsBound"
    create(rig, "w", "x", namespace="victim")
    assert is_running(rig, "w", "victim")


def test_share_of_a_remnant_is_not_given_to_others_of_its_gpuid(rig: Rig) -> None:
    create(rig, "v", "x", namespace="victim")
    create(rig, "m", "x")
    delete_item(rig, "m")
    rounds(rig)
    create(rig, "w", "x", namespace="victim", request="0.7")
    assert reasons(rig, "w", "victim")["Bound"] == "ResourceExceeded"
    rig.stop_remnants("n1")
    rounds(rig)
    assert is_running(rig, "w", "victim")


def test_remnant_of_another_gpuid_is_a_stranger_on_a_card(rig: Rig) -> None:
    """That GPUID got the card before the node reported the remnant."""
    create(rig, "m", "x")
    pod = own(rig, "m")
    delete_item(rig, "m")
    rig.nodes["n1"].remnants.clear()
    rounds(rig)
    create(rig, "v", "y", namespace="victim")
    rig.count_as_remnant(pod)
    rounds(rig)
    assert reasons(rig, "v", "victim")["Degraded"] == "CardShared"


def test_deleted_pod_is_not_made_again_while_its_containers_run(rig: Rig) -> None:
    create(rig, "m", "x")
    rig.abandon(own(rig, "m"))
    rig.report("n1")
    rounds(rig)
    assert rig.pod("m") is None
    assert bound(rig, "m")[:2] == ("True", "Bound")
    assert condition(rig, "m", "PodCreated")["reason"] == "DeletedPodsRunning"
    rig.stop_remnants("n1")
    rounds(rig)
    assert is_running(rig, "m")


def test_mtgpupod_with_a_reservation_keeps_it_and_gets_no_pod(rig: Rig) -> None:
    """The node reports the remnant while the occupy pod of the next GPUID starts: that pod stays."""
    create(rig, "m", "x")
    delete_item(rig, "m")
    rig.scheduler.hear()
    rig.control()  # the finalizer goes, and nobody uses the GPUID any more
    rig.nodes["n1"].remnants, reported = {}, rig.nodes["n1"].remnants
    raw = b.mtgpupod("next", "y", "0.2", node="n1")
    rig.cluster.create(items_path("default"), {key: raw[key] for key in raw if key != "status"})
    rig.scheduler.hear()
    rig.control()
    occupy = rig.occupy("y")
    assert occupy is not None
    rig.nodes["n1"].remnants = reported
    rig.report("n1")
    rounds(rig)
    assert bound(rig, "next")[0] == "True"
    assert rig.pod("next") is None
    after = rig.occupy("y")
    assert after is not None
    assert after["metadata"]["uid"] == occupy["metadata"]["uid"]
    rig.stop_remnants("n1")
    rounds(rig)
    assert is_running(rig, "next")


@pytest.mark.parametrize("heard", [False, True])
def test_remnant_counts_whether_the_node_or_the_api_server_tells_first(rig: Rig, heard: bool) -> None:
    create(rig, "m", "x")
    rig.abandon(own(rig, "m"))
    rig.delete("m")
    rig.report("n1")
    rig.scheduler.hear(PODS if heard else DEVICES)
    rounds(rig)
    create(rig, "next", "y")
    assert bound(rig, "next")[1] == "DeletedPodsRunning"


def test_remnant_of_an_mtgpupod_keeps_pods_of_its_namespace_from_cards_too(rig: Rig) -> None:
    force_delete(rig)
    assert "was deleted by force and still runs on n1" in rig.bind(rig.submit(pooled("p")), "n2")
    other = rig.submit({**pooled("p"), "metadata": {"name": "p", "namespace": "kube-system"}})
    assert rig.bind(other, "n2") == ""


# Deletions that are not forced.


def test_pod_that_ends_before_its_object_goes_is_no_remnant(rig: Rig) -> None:
    """As every Pod that the controller, a preemption or garbage collection deletes; the node's report may be late."""
    create(rig, "m", "x")
    rig.count_as_remnant(own(rig, "m"))
    rig.delete("m")
    rounds(rig)
    assert rig.pod("m") is None
    create(rig, "next", "y")
    assert is_running(rig, "next")


def test_pod_that_the_controller_deletes_by_force_on_a_lost_node_is_no_remnant(rig: Rig) -> None:
    create(rig, "m", "x")
    pod = own(rig, "m")
    node = rig.remove_node("n1")
    rig.scheduler.hear()
    rig.control()
    assert rig.pod("m") is None
    rig.scheduler.hear()
    rig.add_node(node)
    rig.count_as_remnant(pod)
    rounds(rig)
    assert rig.scheduler.state.remnant_problem(Pod("default", "p")) is None
    assert condition(rig, "m", "PodCreated")["reason"] != "DeletedPodsRunning"


# Processes that come and go.


def test_replica_that_has_only_followed_knows_the_remnants(rig: Rig) -> None:
    create(rig, "m", "x")
    rig.take_over()
    rig.take_over()
    delete_item(rig, "m")
    rounds(rig)
    rig.take_over()
    create(rig, "next", "y")
    assert bound(rig, "next")[1] == "DeletedPodsRunning"


def test_scheduler_that_has_just_started_gives_the_card_of_a_remnant_to_nobody(rig: Rig) -> None:
    force_delete(rig)
    rig.restart()
    create(rig, "next", "y")
    assert bound(rig, "next") == ("True", "Bound", "GPU-n1-1")


# Occupy pods.


def test_remnant_in_kube_system_does_not_keep_the_occupy_pods_of_other_namespaces(rig: Rig) -> None:
    create(rig, "m", "x", namespace="kube-system")
    pod = rig.pod("m", "kube-system")
    assert pod is not None
    rig.abandon(pod)
    rig.report("n1")
    rounds(rig)
    assert rig.pod("m", "kube-system") is None
    create(rig, "next", "y")
    assert is_running(rig, "next")
