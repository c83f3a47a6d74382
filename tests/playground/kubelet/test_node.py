"""The kubelet's node, plugins and PodResources, over the API and gRPC."""

import socket
from typing import Any

import grpc
import pytest
import urllib3

from proto import podresources_pb2 as resources
from proto import podresources_pb2_grpc as services
from tests.playground.fake_cluster import NODE, FakeCluster
from tests.playground.fake_plugin import CORE
from tests.waiting import until


def test_node_is_registered_ready_and_allocatable_follows_capacity(node: FakeCluster) -> None:
    ready = node.api.get(NODE)["status"]["conditions"][0]
    assert {"type": "Ready", "status": "True"}.items() <= ready.items()
    node.api.patch(f"{NODE}/status", {"status": {"capacity": {"example.com/memory": "5"}}})
    until(lambda: node.capacity("example.com/memory") == ("5", "5"))
    node.plugin()
    until(lambda: node.capacity() == ("8", "8"))
    assert node.capacity("example.com/memory") == ("5", "5")


def test_node_status_written_by_others_during_own_write_is_kept(
    node: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch = node.api.patch

    def slow(path: str, body: Any, *more: Any) -> Any:
        answer = patch(path, body, *more)
        if body.get("status", {}).get("capacity", {}).get(CORE) == "8":
            patch(f"{NODE}/status", {"status": {"capacity": {"example.com/memory": "5"}}})
            until(lambda: "example.com/memory" in node.kubelet.node.node["status"]["capacity"])  # type: ignore[index]
        return answer

    monkeypatch.setattr(node.api, "patch", slow)
    node.plugin()
    until(lambda: node.capacity("example.com/memory") == ("5", "5"))


def test_logs_are_served_over_https_at_the_port_of_the_node(node: FakeCluster) -> None:
    node.create("a")
    node.wait_running("a")
    port = node.api.get(NODE)["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"]
    ca = str(node.folder / "apiserver.crt")
    # A client that never begins its handshake does not block the others.
    with socket.create_connection(("127.0.0.1", port)), urllib3.PoolManager(ca_certs=ca, timeout=20) as pool:
        logs = pool.request("GET", f"https://127.0.0.1:{port}/containerLogs/default/a/c")
        absent = pool.request("GET", f"https://127.0.0.1:{port}/containerLogs/default/b/c")
    assert (logs.status, logs.data) == (200, b"NVIDIA_VISIBLE_DEVICES=all\n")
    assert absent.status == 400


def test_restart_without_checkpoint_zeroes_extended_resources(cluster: FakeCluster) -> None:
    cluster.start_kubelet()
    cluster.api.patch(f"{NODE}/status", {"status": {"capacity": {"example.com/memory": "5"}}})
    cluster.kubelet.stop()
    cluster.kubelet.start()
    assert cluster.capacity("example.com/memory") == ("0", "0")


def test_restart_with_checkpoint_keeps_resources_and_removes_plugin_sockets(node: FakeCluster) -> None:
    plugin = node.plugin()
    until(lambda: node.capacity() == ("8", "8"))
    node.api.patch(f"{NODE}/status", {"status": {"capacity": {"example.com/memory": "5"}}})
    node.kubelet.stop()
    node.kubelet.start()
    assert not (node.config.plugins / plugin.socket).exists()
    until(lambda: node.capacity() == ("0", "0"))
    assert node.capacity("example.com/memory")[0] == "5"
    plugin.stop()
    node.plugin()
    until(lambda: node.capacity() == ("8", "8"))


def test_resource_of_a_stopped_plugin_becomes_zero_after_the_grace_period(cluster: FakeCluster) -> None:
    cluster.start_kubelet(removal_grace=0.3)
    plugin = cluster.plugin()
    until(lambda: cluster.capacity() == ("8", "8"))
    plugin.stop()
    until(lambda: cluster.capacity() == ("0", "0"))


def test_health_changes_reach_allocatable_and_pod_status(node: FakeCluster) -> None:
    plugin = node.plugin()
    until(lambda: node.capacity() == ("8", "8"))
    node.create("a")
    row = node.wait_running("a")["status"]["containerStatuses"][0]["allocatedResourcesStatus"][0]
    held = row["resources"][0]["resourceID"]
    assert row == {"name": CORE, "resources": [{"resourceID": held, "health": "Healthy"}]}
    plugin.set_health(held, healthy=False)
    until(lambda: node.capacity() == ("8", "7"))
    until(lambda: "Unhealthy" in str(node.pod("a")["status"]["containerStatuses"]))


def test_device_list_beyond_the_message_limit_ends_the_stream(cluster: FakeCluster) -> None:
    cluster.start_kubelet(max_message=4096)
    cluster.plugin(ids=8)
    until(lambda: cluster.capacity() == ("8", "8"))
    cluster.plugin(ids=1000, socket="q.sock", arrives=False)
    until(lambda: cluster.capacity() == ("8", "0"))


def test_end_of_an_old_stream_disconnects_the_current_plugin(node: FakeCluster) -> None:
    old = node.plugin()
    until(lambda: node.capacity() == ("8", "8"))
    node.plugin(ids=4, socket="new.sock")
    until(lambda: node.capacity() == ("4", "4"))
    old.end_streams()
    until(lambda: node.capacity() == ("4", "0"))


def test_end_of_stream_after_failed_registration_disconnects_no_plugin(node: FakeCluster) -> None:
    """connectClient (server/handler.go) removes the resource's client from its map when a new one fails to connect.

    A kubelet 1.36.3 in this situation did not mark the devices as unhealthy, and went on calling the plugin.
    """
    old = node.plugin()
    new = node.plugin(ids=4, socket="new.sock")
    new.refuse_options = True
    with pytest.raises(grpc.RpcError, match="not now"):
        new.register()
    old.end_streams()
    new.end_streams()
    node.create("a")
    node.wait_running("a")
    assert (len(old.allocated), len(new.allocated)) == (0, 1)
    new.refuse_options = False
    new.register()
    until(lambda: new.streams == 2)
    assert node.capacity() == ("4", "4")
    new.end_streams()
    until(lambda: node.capacity() == ("4", "0"))


def test_registration_with_another_version_is_refused(node: FakeCluster) -> None:
    plugin = node.plugin()
    with pytest.raises(grpc.RpcError, match="unsupported device plugin API version"):
        plugin.register("v1alpha")


def test_pod_resources_list_a_pod_whose_container_starts(node: FakeCluster) -> None:
    plugin = node.plugin()
    plugin.hold_start.clear()
    node.create("a")
    ids = until(lambda: plugin.started and plugin.started[0])
    assert node.listed() == {"a": {"c": ids}}
    assert node.phase("a") == "Pending"
    plugin.hold_start.set()


def test_init_containers_run_in_order_and_pod_resources_omit_them(node: FakeCluster) -> None:
    node.plugin(ids=2)
    limits = {"limits": {CORE: "1"}}
    init = [
        {"name": "side", "image": "i", "resources": limits, "restartPolicy": "Always"},
        {"name": "init", "image": "i", "resources": limits},
    ]
    node.create("a", initContainers=init)
    node.wait_running("a")
    assert [c.name for c in node.runtime.containers()] == ["side", "init", "c"]
    ids = node.listed()["a"]
    assert set(ids) == {"side", "c"}
    assert not set(ids["side"]) & set(ids["c"])


def test_pod_resources_return_one_pod_and_the_node(node: FakeCluster) -> None:
    plugin = node.plugin()
    node.create("a", core=2)
    node.wait_running("a")
    with grpc.insecure_channel(f"unix:{node.config.pod_resources / 'kubelet.sock'}") as channel:
        stub = services.PodResourcesListerStub(channel)  # type: ignore[no-untyped-call]
        one = stub.Get(resources.GetPodResourcesRequest(pod_name="a", pod_namespace="default"), timeout=5)
        allocatable = stub.GetAllocatableResources(resources.AllocatableResourcesRequest(), timeout=5)
        with pytest.raises(grpc.RpcError, match="not found"):
            stub.Get(resources.GetPodResourcesRequest(pod_name="b", pod_namespace="default"), timeout=5)
    # An entry for each id, as the real kubelet answers.
    assert [(d.resource_name, list(d.device_ids)) for d in one.pod_resources.containers[0].devices] == [
        (CORE, [device]) for device in plugin.allocated[0]
    ]
    assert [(d.resource_name, list(d.device_ids)) for d in allocatable.devices] == [(CORE, [d]) for d in plugin.devices]


def test_pod_resources_beyond_its_rate_are_refused(cluster: FakeCluster) -> None:
    cluster.start_kubelet(queries_per_second=0.001, query_burst=2)
    assert cluster.listed() == cluster.listed() == {}
    with pytest.raises(grpc.RpcError) as refused:
        cluster.listed()
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
