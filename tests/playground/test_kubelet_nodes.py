"""The kubelet's node, plugins and PodResources, over the API and gRPC."""

from collections.abc import Callable
from typing import Any

import grpc
import pytest
import urllib3

from proto import podresources_pb2 as resources
from proto import podresources_pb2_grpc as services
from tests.playground.kubelet_bench import NODE, Bench
from tests.playground.kubelet_plugin import CORE
from tests.waiting import until


def test_a_node_is_registered_ready_and_allocatable_follows_capacity(bench: Bench) -> None:
    node = bench.api.get(NODE)
    assert {"type": "Ready", "status": "True"}.items() <= node["status"]["conditions"][0].items()
    bench.api.patch(f"{NODE}/status", {"status": {"capacity": {"example.com/memory": "5"}}})
    until(lambda: bench.capacity("example.com/memory") == ("5", "5"))
    bench.plugin()
    until(lambda: bench.capacity() == ("8", "8"))
    assert bench.capacity("example.com/memory") == ("5", "5")


def test_what_others_write_before_the_answer_to_an_own_write_is_not_lost(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch = bench.api.patch

    def slow(path: str, body: Any, *more: Any) -> Any:
        answer = patch(path, body, *more)
        if body.get("status", {}).get("capacity", {}).get(CORE) == "8":
            patch(f"{NODE}/status", {"status": {"capacity": {"example.com/memory": "5"}}})
            until(lambda: "example.com/memory" in bench.kubelet.node.node["status"]["capacity"])  # type: ignore[index]
        return answer

    monkeypatch.setattr(bench.api, "patch", slow)
    bench.plugin()
    until(lambda: bench.capacity("example.com/memory") == ("5", "5"))


def test_logs_are_served_over_https_where_the_node_says(bench: Bench) -> None:
    bench.create("a")
    bench.runs("a")
    port = bench.api.get(NODE)["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"]
    with urllib3.PoolManager(ca_certs=str(bench.folder / "apiserver.crt")) as pool:
        logs = pool.request("GET", f"https://127.0.0.1:{port}/containerLogs/default/a/c")
        absent = pool.request("GET", f"https://127.0.0.1:{port}/containerLogs/default/b/c")
    assert (logs.status, logs.data) == (200, b"NVIDIA_VISIBLE_DEVICES=all\n")
    assert absent.status == 400


def test_without_a_checkpoint_extended_resources_are_zeroed(make: Callable[..., Bench]) -> None:
    first = make()
    first.api.patch(f"{NODE}/status", {"status": {"capacity": {"example.com/memory": "5"}}})
    first.kubelet.stop()
    first.kubelet.start()
    assert first.capacity("example.com/memory") == ("0", "0")


def test_with_a_checkpoint_they_stay_and_the_plugin_is_asked_to_come_back(bench: Bench) -> None:
    plugin = bench.plugin()
    until(lambda: bench.capacity() == ("8", "8"))
    bench.api.patch(f"{NODE}/status", {"status": {"capacity": {"example.com/memory": "5"}}})
    bench.kubelet.stop()
    bench.kubelet.start()
    assert not (bench.config.plugins / plugin.socket).exists()
    until(lambda: bench.capacity() == ("0", "0"))
    assert bench.capacity("example.com/memory")[0] == "5"
    plugin.stop()
    bench.plugin()
    until(lambda: bench.capacity() == ("8", "8"))


def test_the_resource_of_a_gone_plugin_goes_to_zero_after_the_grace(make: Callable[..., Bench]) -> None:
    bench = make(removal_grace=0.3)
    plugin = bench.plugin()
    until(lambda: bench.capacity() == ("8", "8"))
    plugin.stop()
    until(lambda: bench.capacity() == ("0", "0"))


def test_health_changes_reach_allocatable_and_the_status_of_pods(bench: Bench) -> None:
    plugin = bench.plugin()
    until(lambda: bench.capacity() == ("8", "8"))
    bench.create("a")
    row = bench.runs("a")["status"]["containerStatuses"][0]["allocatedResourcesStatus"][0]
    held = row["resources"][0]["resourceID"]
    assert row == {"name": CORE, "resources": [{"resourceID": held, "health": "Healthy"}]}
    plugin.set_health(held, healthy=False)
    until(lambda: bench.capacity() == ("8", "7"))
    until(lambda: "Unhealthy" in str(bench.pod("a")["status"]["containerStatuses"]))


def test_a_device_list_beyond_the_message_limit_ends_the_stream(make: Callable[..., Bench]) -> None:
    bench = make(max_message=4096)
    bench.plugin(ids=8)
    until(lambda: bench.capacity() == ("8", "8"))
    bench.plugin(ids=1000, socket="q.sock", arrives=False)
    until(lambda: bench.capacity() == ("8", "0"))


def test_the_end_of_an_old_stream_disconnects_the_plugin_that_is_registered_now(bench: Bench) -> None:
    old = bench.plugin()
    until(lambda: bench.capacity() == ("8", "8"))
    bench.plugin(ids=4, socket="new.sock")
    until(lambda: bench.capacity() == ("4", "4"))
    old.end_streams()
    until(lambda: bench.capacity() == ("4", "0"))


def test_stream_ends_after_a_registration_failed_nobody_is_disconnected(bench: Bench) -> None:
    """connectClient (server/handler.go) drops its note of the resource's client where the new one cannot be connected:
    a 1.36.3 kubelet that was asked so did not mark the devices as unhealthy, and went on asking the plugin.
    """
    old = bench.plugin()
    new = bench.plugin(ids=4, socket="new.sock")
    new.refuse_options = True
    with pytest.raises(grpc.RpcError, match="not now"):
        new.register()
    old.end_streams()
    new.end_streams()
    bench.create("a")
    bench.runs("a")
    assert (len(old.allocated), len(new.allocated)) == (0, 1)
    new.refuse_options = False
    new.register()
    until(lambda: new.streams == 2)
    assert bench.capacity() == ("4", "4")
    new.end_streams()
    until(lambda: bench.capacity() == ("4", "0"))


def test_a_registration_of_another_version_is_refused(bench: Bench) -> None:
    plugin = bench.plugin()
    with pytest.raises(grpc.RpcError, match="unsupported device plugin API version"):
        plugin.register("v1alpha")


def test_a_pod_is_listed_by_pod_resources_while_its_container_starts(bench: Bench) -> None:
    plugin = bench.plugin()
    plugin.hold_start.clear()
    bench.create("a")
    ids = until(lambda: plugin.started and plugin.started[0])
    assert bench.listed() == {"a": {"c": ids}}
    assert bench.phase("a") == "Pending"
    plugin.hold_start.set()


def test_init_containers_run_in_order_and_are_not_listed_by_pod_resources(bench: Bench) -> None:
    bench.plugin(ids=2)
    limits = {"limits": {CORE: "1"}}
    init = [
        {"name": "side", "image": "i", "resources": limits, "restartPolicy": "Always"},
        {"name": "init", "image": "i", "resources": limits},
    ]
    bench.create("a", initContainers=init)
    bench.runs("a")
    assert [c.name for c in bench.runtime.containers()] == ["side", "init", "c"]
    ids = bench.listed()["a"]
    assert set(ids) == {"side", "c"}
    assert not set(ids["side"]) & set(ids["c"])


def test_pod_resources_of_one_pod_and_of_the_node(bench: Bench) -> None:
    plugin = bench.plugin()
    bench.create("a", core=2)
    bench.runs("a")
    with grpc.insecure_channel(f"unix:{bench.config.pod_resources / 'kubelet.sock'}") as channel:
        stub = services.PodResourcesListerStub(channel)  # type: ignore[no-untyped-call]
        one = stub.Get(resources.GetPodResourcesRequest(pod_name="a", pod_namespace="default"), timeout=5)
        node = stub.GetAllocatableResources(resources.AllocatableResourcesRequest(), timeout=5)
        with pytest.raises(grpc.RpcError, match="not found"):
            stub.Get(resources.GetPodResourcesRequest(pod_name="b", pod_namespace="default"), timeout=5)
    # An entry for each id, as the real kubelet answers.
    assert [(d.resource_name, list(d.device_ids)) for d in one.pod_resources.containers[0].devices] == [
        (CORE, [device]) for device in plugin.allocated[0]
    ]
    assert [(d.resource_name, list(d.device_ids)) for d in node.devices] == [(CORE, [d]) for d in plugin.devices]


def test_pod_resources_beyond_its_rate_are_refused(make: Callable[..., Bench]) -> None:
    bench = make(queries_per_second=0.001, query_burst=2)
    assert bench.listed() == bench.listed() == {}
    with pytest.raises(grpc.RpcError) as refused:
        bench.listed()
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
