"""The kubelet's pods: admitted, started, restarted, ended."""

import pytest

from playground.kubelet.kubelet import MIRROR
from tests.playground.fake_cluster import EVENTS, NODE, PODS, FakeCluster
from tests.playground.fake_plugin import CORE
from tests.waiting import until


def test_pod_runs_with_the_plugins_answer_and_deletion_frees_its_ids(node: FakeCluster) -> None:
    plugin = node.plugin(ids=2)
    node.create("a", core=2)
    pod = node.wait_running("a")
    status = pod["status"]["containerStatuses"][0]
    assert (status["ready"], status["started"], bool(status["containerID"])) == (True, True, True)
    assert pod["status"]["podIP"]
    assert "IDS=id-0,id-1\n" in node.runtime.logs("default", "a")
    assert plugin.started == plugin.allocated
    node.api.delete(f"{PODS}/a")
    node.wait_gone(f"{PODS}/a")
    node.create("b", core=2)
    node.wait_running("b")
    assert not any(c.running for c in node.runtime.containers(pod["metadata"]["uid"]))


def test_mirror_pod_is_not_run(node: FakeCluster) -> None:
    mirror = {"name": "agent", "namespace": "default", "annotations": {MIRROR: "0" * 32}}
    containers = [{"name": "c", "image": "i"}]
    node.api.create(PODS, {"metadata": mirror, "spec": {"nodeName": "n1", "containers": containers}})
    node.create("later", core=0)
    node.wait_running("later")
    assert not [c for c in node.runtime.containers() if c.pod == "agent"]


def test_pod_with_too_few_ids_fails_and_can_be_deleted(node: FakeCluster) -> None:
    node.plugin(ids=2)
    node.create("a", core=3)
    until(lambda: node.phase("a") == "Failed")
    status = node.pod("a")["status"]
    assert status["reason"] == "UnexpectedAdmissionError"
    assert "Requested: 3, Available: 2" in status["message"]
    events = until(lambda: node.api.list(EVENTS, fieldSelector="type=Warning")[0])
    assert events[0]["reason"] == "UnexpectedAdmissionError"
    node.api.delete(f"{PODS}/a")
    node.wait_gone(f"{PODS}/a")


def test_pod_refused_by_the_plugin_fails(node: FakeCluster) -> None:
    node.plugin().refuse_allocate = "no cards"
    node.create("a")
    until(lambda: node.phase("a") == "Failed")
    assert "rpc error: code = Internal desc = no cards" in node.pod("a")["status"]["message"]


def test_pod_with_unknown_resource_runs(node: FakeCluster) -> None:
    node.create("a")
    node.wait_running("a")
    assert node.runtime.logs("default", "a") == "NVIDIA_VISIBLE_DEVICES=all\n"


def test_pod_beyond_the_nodes_cpu_fails(node: FakeCluster) -> None:
    own = {"name": "c", "image": "i", "resources": {"requests": {"cpu": "65"}}}
    node.create("a", containers=[own])
    until(lambda: node.phase("a") == "Failed")
    assert node.pod("a")["status"]["reason"] == "OutOfcpu"


def test_start_refused_by_the_plugin_is_retried(node: FakeCluster) -> None:
    plugin = node.plugin()
    plugin.refuse_start = "no decision yet"
    node.create("a")
    until(lambda: node.waiting("a").get("reason") == "CreateContainerConfigError")
    failed = "device plugin PreStartContainer rpc failed with err: "
    assert node.waiting("a")["message"] == f"{failed}rpc error: code = FailedPrecondition desc = no decision yet"
    assert node.phase("a") == "Pending"
    plugin.refuse_start = ""
    node.wait_running("a")
    assert len(plugin.allocated) == 1


def test_start_that_takes_too_long_is_retried(node: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("playground.kubelet.services.PRE_START_SECONDS", 0.1)
    plugin = node.plugin()
    plugin.hold_start.clear()
    node.create("a")
    until(lambda: "DeadlineExceeded" in node.waiting("a").get("message", ""))
    plugin.hold_start.set()
    node.wait_running("a")


def test_restarted_container_calls_pre_start_again(node: FakeCluster) -> None:
    plugin = node.plugin()
    node.create("a")
    node.wait_running("a")
    node.kubelet.restart_container("default", "a", "c")
    until(lambda: node.pod("a")["status"]["containerStatuses"][0]["restartCount"] == 1)
    assert len(plugin.started) == 2
    assert len(plugin.allocated) == 1


def test_kubelet_restart_keeps_containers_and_skips_pre_start_until_the_plugin_registers(
    node: FakeCluster,
) -> None:
    plugin = node.plugin()
    node.create("a")
    before = node.wait_running("a")["status"]["containerStatuses"][0]["containerID"]
    node.kubelet.stop()
    plugin.stop()
    node.kubelet.start()
    until(lambda: "a" in node.listed() and node.listed()["a"]["c"])
    node.kubelet.restart_container("default", "a", "c")
    until(lambda: node.pod("a")["status"]["containerStatuses"][0]["restartCount"] == 1)
    row = node.pod("a")["status"]["containerStatuses"][0]
    assert row["containerID"] != before
    assert row["lastState"]["terminated"]["containerID"] == before
    assert len(plugin.started) == len(plugin.allocated) == 1


def test_kubelet_restart_keeps_the_ids_of_running_pods(node: FakeCluster) -> None:
    """All pods are admitted again one by one, and none is refused because of its own ids."""
    plugin = node.plugin(ids=3)
    for name in ("a", "b", "c"):
        node.create(name)
        node.wait_running(name)
    held = node.listed()
    node.kubelet.stop()
    plugin.stop()
    node.kubelet.start()
    until(lambda: node.listed() == held)
    node.create("d", core=0)
    node.wait_running("d")
    assert [node.phase(name) for name in ("a", "b", "c")] == ["Running"] * 3


def test_kubelet_restart_with_shrunk_resource_fails_its_pods(node: FakeCluster) -> None:
    node.plugin()
    node.api.patch(f"{NODE}/status", {"status": {"capacity": {"example.com/memory": "8"}}})
    until(lambda: node.capacity("example.com/memory") == ("8", "8"))
    limits = {CORE: "1", "example.com/memory": "4"}
    node.create("a", containers=[{"name": "c", "image": "i", "resources": {"limits": limits}}])
    node.wait_running("a")
    node.api.patch(f"{NODE}/status", {"status": {"capacity": {"example.com/memory": "3"}}})
    until(lambda: node.capacity("example.com/memory") == ("3", "3"))
    assert node.phase("a") == "Running"
    node.kubelet.stop()
    node.kubelet.start()
    until(lambda: node.phase("a") == "Failed")
    assert node.pod("a")["status"]["reason"] == "OutOfexample.com/memory"


def test_reboot_fails_pods_admitted_before_the_plugin_registers(node: FakeCluster) -> None:
    node.plugin()
    node.create("a")
    node.wait_running("a")
    node.kubelet.stop()
    node.runtime.reboot()
    node.kubelet.start()
    until(lambda: node.phase("a") == "Failed")
    assert node.pod("a")["status"]["reason"] == "UnexpectedAdmissionError"


@pytest.mark.parametrize("order", ["arrival", "created", "random"])
def test_allocate_calls_of_a_pod_are_contiguous_in_every_admission_order(cluster: FakeCluster, order: str) -> None:
    cluster.start_kubelet(admission=order, seed=1)
    plugin = cluster.plugin(ids=32)
    names = [f"p{i}" for i in range(8)]
    two = [{"name": n, "image": "i", "resources": {"limits": {CORE: "1"}}} for n in ("c1", "c2")]
    with cluster.kubelet.holding():
        for name in names:
            cluster.create(name, containers=two)
        until(lambda: len(cluster.listed()) == 8)
        assert plugin.allocated == []
    for name in names:
        cluster.wait_running(name)
    owner = {i: (pod, c) for pod, ids in cluster.listed().items() for c, held in ids.items() for i in held}
    calls = [owner[ids[0]] for ids in plugin.allocated]
    assert calls == [(pod, c) for pod, _ in calls[::2] for c in ("c1", "c2")]
    assert ([pod for pod, _ in calls[::2]] == names) is (order != "random")


def test_pod_that_completes_frees_its_ids(node: FakeCluster) -> None:
    node.plugin(ids=1)
    own = {"name": "c", "image": "i", "resources": {"limits": {CORE: "1"}}}
    meta = {"name": "a", "annotations": {"playground.mgpu.io/run-seconds": "0.05"}}
    node.api.create(PODS, {"metadata": meta, "spec": {"nodeName": "n1", "restartPolicy": "Never", "containers": [own]}})
    until(lambda: node.phase("a") == "Succeeded")
    node.create("b")
    node.wait_running("b")


def test_pod_failed_by_another_client_is_stopped(node: FakeCluster) -> None:
    node.plugin(ids=1)
    node.create("a")
    uid = node.wait_running("a")["metadata"]["uid"]
    node.api.patch(f"{PODS}/a/status", {"status": {"phase": "Failed", "reason": "Told"}})
    until(lambda: not any(c.running for c in node.runtime.containers(uid)))
    assert (node.phase("a"), node.pod("a")["status"]["reason"]) == ("Failed", "Told")


def test_pod_failed_while_its_container_waits_never_starts(node: FakeCluster) -> None:
    node.plugin().refuse_start = "no decision yet"
    node.create("a")
    until(lambda: node.waiting("a").get("reason") == "CreateContainerConfigError")
    node.api.patch(f"{PODS}/a/status", {"status": {"phase": "Failed", "reason": "Told"}})
    state = until(lambda: node.pod("a")["status"]["containerStatuses"][0]["state"].get("terminated"))
    assert (state["reason"], state["exitCode"]) == ("ContainerStatusUnknown", 137)
    assert (node.phase("a"), node.pod("a")["status"]["reason"]) == ("Failed", "Told")


def test_pod_deleted_by_force_frees_its_ids_at_once(node: FakeCluster) -> None:
    node.plugin(ids=1)
    node.create("a")
    node.wait_running("a")
    node.api.delete(f"{PODS}/a", {"gracePeriodSeconds": 0})
    node.wait_gone(f"{PODS}/a")
    until(lambda: node.listed() == {})
    node.create("a")
    node.wait_running("a")
