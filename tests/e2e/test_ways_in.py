"""However a pod comes to its node, and however often: it gets its cards, or its reason."""

from collections.abc import Callable
from typing import Any

import pytest
from kubernetes import client

from tests.e2e.bench import Bench, share
from tests.waiting import until


def by_subresource(bench: Bench, name: str, node: str) -> None:
    bench.cluster.api.create(f"/api/v1/namespaces/default/pods/{name}/binding", binding(name, node))


def by_collection(bench: Bench, name: str, node: str) -> None:
    bench.cluster.api.create("/api/v1/namespaces/default/bindings", binding(name, node))


def binding(name: str, node: str) -> dict[str, Any]:
    target = {"apiVersion": "v1", "kind": "Node", "name": node}
    return {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}


@pytest.mark.parametrize("bind", [by_subresource, by_collection])
def test_a_binding_by_someone_who_knows_nothing_of_mgpu_gets_its_cards(
    bench: Bench, bind: Callable[[Bench, str, str], None]
) -> None:
    bench.create(share("p", schedulerName="somebody-else"))
    bind(bench, "p", "node-1")
    bench.exact("p")
    assert bench.pod("p").spec.node_name == "node-1"


def test_a_binding_that_does_not_fit_is_refused_and_leaves_the_pod_alone(bench: Bench) -> None:
    bench.create(share("p", mib=200 << 10, schedulerName="somebody-else"))
    with pytest.raises(Exception, match="409"):
        by_subresource(bench, "p", "node-1")
    pod = bench.pod("p")
    assert (pod.spec.node_name, pod.metadata.annotations) == (None, None)


def test_a_pod_created_with_its_node_is_decided_late(bench: Bench) -> None:
    bench.create(share("p", nodeName="node-1"))
    bench.exact("p")


def test_a_pod_created_with_its_node_that_does_not_fit_fails_with_a_reason(bench: Bench) -> None:
    bench.create(share("p", mib=200 << 10, nodeName="node-1"))
    until(lambda: bench.pod("p").status.phase == "Failed")
    assert bench.cards("p") == {}


def test_a_deletion_frees_the_cards(bench: Bench) -> None:
    bench.create(share("first", core=400, mib=None, nodeName="node-1"))
    bench.create(share("second", core=400, mib=None, nodeName="node-2"))
    bench.exact("first")
    bench.exact("second")
    bench.create(share("third", core=400, mib=None))
    bench.waits("third")
    bench.delete("first")
    bench.exact("third")


def test_many_equal_pods_at_once_and_each_has_its_own_cards(bench: Bench) -> None:
    names = [f"p{i}" for i in range(16)]
    for i, name in enumerate(names):
        bench.create(share(name, core=45 if i % 2 else 46, mib=4096 + i % 2))
    waiting = [name for name in names if not bench.samples.settled(name, 60).running]
    for name in set(names) - set(waiting):
        bench.exact(name)
    assert len(waiting) == 8  # two on each of the four cards of the node whose policy they have
    assert bench.within_capacity()


def test_a_restarted_container_has_the_same_cards(bench: Bench) -> None:
    bench.create(share("p"))
    bench.exact("p")
    before = bench.sees("p")
    kubelet = bench.cluster.kubelets[bench.pod("p").spec.node_name]
    kubelet.restart_container("default", "p", "c")
    until(lambda: bench.pod("p").status.container_statuses[0].restart_count == 1)
    assert bench.sees("p") == before


def test_a_name_used_again_is_another_pod(bench: Bench) -> None:
    for core in (100, 200, 300):
        bench.create(share("p", core=core, mib=None))
        bench.exact("p")
        assert len(bench.cards("p")["c"]) == core // 100
        bench.delete("p")
    assert all(state.idle for states in bench.samples.states().values() for state in states)


def test_a_pod_without_gpu_is_left_alone(bench: Bench) -> None:
    plain = {"metadata": {"name": "plain"}, "spec": {"containers": [{"name": "c", "image": "busybox"}]}}
    bench.create(plain)
    assert bench.runs("plain").metadata.annotations is None
    assert bench.core.read_namespaced_pod_log("plain", "default") == ""


def test_a_dry_run_reserves_nothing(bench: Bench) -> None:
    bench.create(share("p", core=400, mib=None, schedulerName="somebody-else"))
    path = "/api/v1/namespaces/default/pods/p/binding"
    bench.cluster.api.create(path, binding("p", "node-1"), dryRun="All")
    bench.create(share("q", core=400, mib=None, nodeName="node-1"))
    bench.exact("q")


def test_the_cards_are_reported_as_devices(bench: Bench) -> None:
    devices: Any = client.CustomObjectsApi(bench.core.api_client).list_cluster_custom_object(
        "scheduling.koordinator.sh", "v1alpha1", "devices"
    )
    assert {item["metadata"]["name"]: len(item["spec"]["devices"]) for item in devices["items"]} == {
        "node-1": 4,
        "node-2": 4,
    }
