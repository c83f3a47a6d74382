"""The kubelet against a real API server of ours and a real gRPC plugin: nodes, pods, plugins, restarts."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import urllib3
from kubernetes import client

from mgpu.kube import Api, ApiError
from playground.apiserver import ApiServer, User, running
from playground.kubelet import Kubelet, KubeletConfig
from playground.runtime import Runtime
from proto import podresources_pb2 as resources
from proto import podresources_pb2_grpc as services
from tests.playground.kubelet_plugin import CORE, Plugin
from tests.waiting import until

Json = dict[str, Any]
NODE, PODS = "/api/v1/nodes/n1", "/api/v1/namespaces/default/pods"


class Bench:
    def __init__(self, url: str, folder: Path, **config: Any) -> None:
        self.api = Api(client.Configuration(host=url, api_key={"authorization": "Bearer admin"}))
        self.folder = folder
        self.config = KubeletConfig("n1", folder, retry_seconds=0.05, status_seconds=0.2, **config)
        self.runtime = Runtime(folder / "cdi")
        self.kubelet = Kubelet(self.config, self.api, self.runtime)
        self.kubelet.start()
        self.plugins: list[Plugin] = []

    def plugin(self, *, arrives: bool = True, **options: Any) -> Plugin:
        """A plugin that is registered, and whose device list has arrived."""
        plugin = Plugin(self.config.plugins, **options)
        self.plugins.append(plugin)
        plugin.register()
        if arrives:
            until(lambda: set(self.kubelet.devices.all_ids()[CORE]) == set(plugin.devices))
        return plugin

    def capacity(self, resource: str = CORE) -> tuple[str | None, str | None]:
        status = self.api.get(NODE)["status"]
        return status["capacity"].get(resource), status["allocatable"].get(resource)

    def create(self, name: str, core: int = 1, **spec: Any) -> Json:
        own = {"name": "c", "image": "cuda", "resources": {"limits": {CORE: str(core)}}}
        body = {"metadata": {"name": name}, "spec": {"nodeName": "n1", "containers": [own], **spec}}
        return self.api.create(PODS, body)

    def pod(self, name: str) -> Json:
        return self.api.get(f"{PODS}/{name}")

    def phase(self, name: str) -> str:
        return str(self.pod(name)["status"]["phase"])

    def runs(self, name: str) -> Json:
        return dict(until(lambda: (pod := self.pod(name))["status"]["phase"] == "Running" and pod))

    def waits(self, name: str) -> Json:
        rows = self.pod(name)["status"].get("containerStatuses") or [{}]
        return rows[0].get("state", {}).get("waiting") or {}

    def gone(self, name: str) -> bool:
        try:
            self.pod(name)
        except ApiError as error:
            return error.status == 404
        return False

    def listed(self) -> dict[str, dict[str, list[str]]]:
        """PodResources: pod → container → ids."""
        with grpc.insecure_channel(f"unix:{self.config.pod_resources / 'kubelet.sock'}") as channel:
            stub = services.PodResourcesListerStub(channel)  # type: ignore[no-untyped-call]
            pods = stub.List(resources.ListPodResourcesRequest(), timeout=5).pod_resources
        return {p.name: {c.name: [i for d in c.devices for i in d.device_ids] for c in p.containers} for p in pods}

    def close(self) -> None:
        self.kubelet.stop()
        for plugin in self.plugins:
            plugin.stop()
        self.api.close()


@pytest.fixture
def make() -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []
    with tempfile.TemporaryDirectory(prefix="k") as folder, running(_server()) as url:

        def bench(**config: Any) -> Bench:
            benches.append(Bench(url, Path(folder), **config))
            return benches[-1]

        yield bench
        for made in benches:
            made.close()


@pytest.fixture
def bench(make: Callable[..., Bench]) -> Bench:
    return make()


def _server() -> ApiServer:
    return ApiServer(tokens={"admin": User("admin", ("system:masters",))})


def test_a_node_is_registered_ready_and_allocatable_follows_capacity(bench: Bench) -> None:
    node = bench.api.get(NODE)
    assert {"type": "Ready", "status": "True"}.items() <= node["status"]["conditions"][0].items()
    bench.api.patch(f"{NODE}/status", {"status": {"capacity": {"example.com/memory": "5"}}})
    until(lambda: bench.capacity("example.com/memory") == ("5", "5"))
    bench.plugin()
    until(lambda: bench.capacity() == ("8", "8"))
    assert bench.capacity("example.com/memory") == ("5", "5")


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


def test_a_registration_of_another_version_is_refused(bench: Bench) -> None:
    plugin = bench.plugin()
    with pytest.raises(grpc.RpcError, match="unsupported device plugin API version"):
        plugin.register("v1alpha")


def test_a_pod_runs_with_what_the_plugin_answered_and_its_deletion_frees_the_ids(bench: Bench) -> None:
    plugin = bench.plugin(ids=2)
    bench.create("a", core=2)
    pod = bench.runs("a")
    status = pod["status"]["containerStatuses"][0]
    assert (status["ready"], status["started"], bool(status["containerID"])) == (True, True, True)
    assert pod["status"]["podIP"]
    assert "IDS=id-0,id-1\n" in bench.runtime.logs("default", "a")
    assert plugin.started == plugin.allocated
    bench.api.delete(f"{PODS}/a")
    until(lambda: bench.gone("a"))
    bench.create("b", core=2)
    bench.runs("b")
    assert not any(c.running for c in bench.runtime.containers(pod["metadata"]["uid"]))


def test_too_few_ids_fail_the_pod_and_the_failed_pod_can_be_deleted(bench: Bench) -> None:
    bench.plugin(ids=2)
    bench.create("a", core=3)
    until(lambda: bench.phase("a") == "Failed")
    status = bench.pod("a")["status"]
    assert status["reason"] == "UnexpectedAdmissionError"
    assert "Requested: 3, Available: 2" in status["message"]
    events = until(lambda: bench.api.list("/api/v1/namespaces/default/events", fieldSelector="type=Warning")[0])
    assert events[0]["reason"] == "UnexpectedAdmissionError"
    bench.api.delete(f"{PODS}/a")
    until(lambda: bench.gone("a"))


def test_a_plugins_error_fails_the_pod(bench: Bench) -> None:
    bench.plugin().refuse_allocate = "no cards"
    bench.create("a")
    until(lambda: bench.phase("a") == "Failed")
    assert "rpc error: code = Internal desc = no cards" in bench.pod("a")["status"]["message"]


def test_a_request_for_what_the_node_does_not_have_is_dropped(bench: Bench) -> None:
    bench.create("a")
    bench.runs("a")
    assert bench.runtime.logs("default", "a") == "NVIDIA_VISIBLE_DEVICES=all\n"


def test_more_than_the_node_has_is_refused_by_the_kubelet_too(bench: Bench) -> None:
    own = {"name": "c", "image": "i", "resources": {"requests": {"cpu": "65"}}}
    bench.create("a", containers=[own])
    until(lambda: bench.phase("a") == "Failed")
    assert bench.pod("a")["status"]["reason"] == "OutOfcpu"


def test_a_refused_start_waits_and_is_tried_again(bench: Bench) -> None:
    plugin = bench.plugin()
    plugin.refuse_start = "no decision yet"
    bench.create("a")
    until(lambda: bench.waits("a").get("reason") == "CreateContainerConfigError")
    assert bench.waits("a")["message"] == "rpc error: code = FailedPrecondition desc = no decision yet"
    assert bench.phase("a") == "Pending"
    plugin.refuse_start = ""
    bench.runs("a")
    assert len(plugin.allocated) == 1


def test_a_start_that_takes_too_long_is_given_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("playground.kubelet.plugins.PRE_START_SECONDS", 0.1)
    plugin = bench.plugin()
    plugin.hold_start.clear()
    bench.create("a")
    until(lambda: "DeadlineExceeded" in bench.waits("a").get("message", ""))
    plugin.hold_start.set()
    bench.runs("a")


def test_a_pod_is_listed_by_pod_resources_while_its_container_starts(bench: Bench) -> None:
    plugin = bench.plugin()
    plugin.hold_start.clear()
    bench.create("a")
    ids = until(lambda: plugin.started and plugin.started[0])
    assert bench.listed() == {"a": {"c": ids}}
    assert bench.phase("a") == "Pending"
    plugin.hold_start.set()


def test_every_start_of_a_container_calls_pre_start_again(bench: Bench) -> None:
    plugin = bench.plugin()
    bench.create("a")
    bench.runs("a")
    bench.kubelet.restart_container("default", "a", "c")
    until(lambda: bench.pod("a")["status"]["containerStatuses"][0]["restartCount"] == 1)
    assert len(plugin.started) == 2
    assert len(plugin.allocated) == 1


def test_a_kubelet_restart_leaves_containers_alone_and_skips_pre_start_until_the_plugin_is_back(bench: Bench) -> None:
    plugin = bench.plugin()
    bench.create("a")
    before = bench.runs("a")["status"]["containerStatuses"][0]["containerID"]
    bench.kubelet.stop()
    plugin.stop()
    bench.kubelet.start()
    until(lambda: "a" in bench.listed() and bench.listed()["a"]["c"])
    bench.kubelet.restart_container("default", "a", "c")
    until(lambda: bench.pod("a")["status"]["containerStatuses"][0]["restartCount"] == 1)
    row = bench.pod("a")["status"]["containerStatuses"][0]
    assert row["containerID"] != before
    assert row["lastState"]["terminated"]["containerID"] == before
    assert len(plugin.started) == len(plugin.allocated) == 1


def test_a_resource_published_below_what_pods_hold_fails_them_at_the_next_restart(bench: Bench) -> None:
    bench.plugin()
    bench.api.patch(f"{NODE}/status", {"status": {"capacity": {"example.com/memory": "8"}}})
    until(lambda: bench.capacity("example.com/memory") == ("8", "8"))
    limits = {CORE: "1", "example.com/memory": "4"}
    bench.create("a", containers=[{"name": "c", "image": "i", "resources": {"limits": limits}}])
    bench.runs("a")
    bench.api.patch(f"{NODE}/status", {"status": {"capacity": {"example.com/memory": "3"}}})
    until(lambda: bench.capacity("example.com/memory") == ("3", "3"))
    assert bench.phase("a") == "Running"
    bench.kubelet.stop()
    bench.kubelet.start()
    until(lambda: bench.phase("a") == "Failed")
    assert bench.pod("a")["status"]["reason"] == "OutOfexample.com/memory"


def test_after_a_reboot_pods_are_admitted_before_the_plugin_is_back_and_fail(bench: Bench) -> None:
    bench.plugin()
    bench.create("a")
    bench.runs("a")
    bench.kubelet.stop()
    bench.runtime.reboot()
    bench.kubelet.start()
    until(lambda: bench.phase("a") == "Failed")
    assert bench.pod("a")["status"]["reason"] == "UnexpectedAdmissionError"


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


@pytest.mark.parametrize("order", ["arrival", "created", "random"])
def test_the_calls_of_a_pod_are_contiguous_in_any_order_of_pods(make: Callable[..., Bench], order: str) -> None:
    bench = make(admission=order, seed=1)
    plugin = bench.plugin(ids=32)
    names = [f"p{i}" for i in range(8)]
    two = [{"name": n, "image": "i", "resources": {"limits": {CORE: "1"}}} for n in ("c1", "c2")]
    with bench.kubelet.holding():
        for name in names:
            bench.create(name, containers=two)
        until(lambda: len(bench.listed()) == 8)
        assert plugin.allocated == []
    for name in names:
        bench.runs(name)
    owner = {i: (pod, c) for pod, ids in bench.listed().items() for c, held in ids.items() for i in held}
    calls = [owner[ids[0]] for ids in plugin.allocated]
    assert calls == [(pod, c) for pod, _ in calls[::2] for c in ("c1", "c2")]
    assert ([pod for pod, _ in calls[::2]] == names) is (order != "random")


def test_pod_resources_of_one_pod_and_of_the_node(bench: Bench) -> None:
    plugin = bench.plugin()
    bench.create("a")
    bench.runs("a")
    with grpc.insecure_channel(f"unix:{bench.config.pod_resources / 'kubelet.sock'}") as channel:
        stub = services.PodResourcesListerStub(channel)  # type: ignore[no-untyped-call]
        one = stub.Get(resources.GetPodResourcesRequest(pod_name="a", pod_namespace="default"), timeout=5)
        node = stub.GetAllocatableResources(resources.AllocatableResourcesRequest(), timeout=5)
        with pytest.raises(grpc.RpcError, match="not found"):
            stub.Get(resources.GetPodResourcesRequest(pod_name="b", pod_namespace="default"), timeout=5)
    assert [list(d.device_ids) for d in one.pod_resources.containers[0].devices] == plugin.allocated
    assert {d.resource_name: set(d.device_ids) for d in node.devices} == {CORE: set(plugin.devices)}


def test_pod_resources_beyond_its_rate_are_refused(make: Callable[..., Bench]) -> None:
    bench = make(queries_per_second=0.001, query_burst=2)
    assert bench.listed() == bench.listed() == {}
    with pytest.raises(grpc.RpcError) as refused:
        bench.listed()
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_pod_completes_by_itself_and_its_ids_go_to_the_next(bench: Bench) -> None:
    bench.plugin(ids=1)
    own = {"name": "c", "image": "i", "resources": {"limits": {CORE: "1"}}}
    meta = {"name": "a", "annotations": {"playground.mgpu.io/run-seconds": "0.05"}}
    bench.api.create(
        PODS, {"metadata": meta, "spec": {"nodeName": "n1", "restartPolicy": "Never", "containers": [own]}}
    )
    until(lambda: bench.phase("a") == "Succeeded")
    bench.create("b")
    bench.runs("b")


def test_failed_from_outside_is_honoured(bench: Bench) -> None:
    bench.plugin(ids=1)
    bench.create("a")
    uid = bench.runs("a")["metadata"]["uid"]
    bench.api.patch(f"{PODS}/a/status", {"status": {"phase": "Failed", "reason": "Told"}})
    until(lambda: not any(c.running for c in bench.runtime.containers(uid)))
    assert (bench.phase("a"), bench.pod("a")["status"]["reason"]) == ("Failed", "Told")


def test_force_deletion_frees_ids_at_once(bench: Bench) -> None:
    bench.plugin(ids=1)
    bench.create("a")
    bench.runs("a")
    bench.api.delete(f"{PODS}/a", {"gracePeriodSeconds": 0})
    until(lambda: bench.gone("a"))
    until(lambda: bench.listed() == {})
    bench.create("a")
    bench.runs("a")
