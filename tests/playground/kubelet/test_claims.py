"""The ResourceClaims of pods: prepared before the pods start, given to their containers, unprepared at the end."""

import json
import zlib
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from playground.kubelet.dra import DraConfig
from proto import dra_health_pb2, dra_pb2
from proto import podresources_pb2 as resources
from proto import podresources_pb2_grpc as services
from tests.playground.fake_cluster import EVENTS, PODS, FakeCluster
from tests.playground.fake_plugin import CORE
from tests.playground.kubelet.fake_driver import DRIVER, Driver
from tests.waiting import until

CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
QUICK = DraConfig(registration_seconds=0.02, prepare_retry_seconds=0.1, wipe_delay=0.3, reconcile_seconds=0.2)
Json = dict[str, Any]


class Claims:
    """A kubelet with a DRA driver, and claims whose devices are the cards of the node n1."""

    def __init__(self, cluster: FakeCluster, config: DraConfig = QUICK) -> None:
        self.cluster = cluster
        self.drivers: list[Driver] = []
        cluster.start_kubelet(dra=config)

    def driver(self, instance: str = "d", **options: Any) -> Driver:
        """Return a driver that has registered."""
        driver = Driver(self.cluster.folder, instance, **options)
        self.drivers.append(driver)
        until(lambda: driver.statuses)
        return driver

    def claim(self, name: str, cards: dict[str, str] | None = None) -> Json:
        """Create an allocated claim. `cards` has the request of each card, by the name of the device."""
        cards = cards or {"card-0": "gpu"}
        requests = [
            {"name": request, "exactly": {"deviceClassName": "mgpu", "count": [*cards.values()].count(request)}}
            for request in dict.fromkeys(cards.values())
        ]
        made = self.cluster.api.create(
            CLAIMS, {"metadata": {"name": name}, "spec": {"devices": {"requests": requests}}}
        )
        results = [
            {"request": request, "driver": DRIVER, "pool": "n1", "device": card} for card, request in cards.items()
        ]
        status = {"allocation": {"devices": {"results": results}}}
        return self.cluster.api.patch(f"{CLAIMS}/{name}/status", {"status": status} | _version(made))

    def reserve(self, name: str, *pods: Json) -> None:
        """Reserve the claim for the pods, and for no others."""
        rows = [{"resource": "pods", "name": p["metadata"]["name"], "uid": p["metadata"]["uid"]} for p in pods]
        self.cluster.api.patch(f"{CLAIMS}/{name}/status", {"status": {"reservedFor": rows}})

    def pod(self, name: str, claims: dict[str, str], *containers: Json, **spec: Any) -> Json:
        """Create a pod, and reserve its claims for it. `claims` has the names of the claims by the pod's names.

        The kubelet sees the pod when the claims are reserved. Without `containers`, one container has all claims.
        """
        entries = [{"name": entry, "resourceClaimName": claim} for entry, claim in claims.items()]
        with self.cluster.kubelet.holding():
            pod = self.cluster.create(
                name,
                core=0,
                containers=[*(containers or [_container("c", *claims)])],
                resourceClaims=entries,
                **spec,
            )
            for claim in claims.values():
                self.reserve(claim, pod)
        return pod

    def bind(self, name: str) -> None:
        """Bind a pod to the node, as a scheduler does when the pod's status is complete."""
        target = {"kind": "Node", "name": "n1"}
        self.cluster.api.create(f"{PODS}/{name}/binding", {"metadata": {"name": name}, "target": target})

    def extended(self, name: str, *, limits: dict[str, str]) -> None:
        """Create a pod with two containers c and d, each of which gets a card by the claim of kube-scheduler."""
        requests = {"c": "container-0-request-0", "d": "container-1-request-0"}
        claim = f"{name}-extended"
        self.claim(claim, {"card-0": requests["c"], "card-1": requests["d"]})
        amounts = {"requests": limits, "limits": limits}
        containers = [{"name": container, "image": "i", "resources": amounts} for container in requests]
        self.reserve(claim, self.cluster.submit(name, containers=containers))
        mappings = [
            {"containerName": container, "resourceName": resource, "requestName": request}
            for container, request in requests.items()
            for resource in limits
        ]
        status = {"extendedResourceClaimStatus": {"resourceClaimName": claim, "requestMappings": mappings}}
        self.cluster.api.patch(f"{PODS}/{name}/status", {"status": status})
        self.bind(name)

    def log(self, pod: str, container: str = "c") -> str:
        return self.cluster.runtime.logs("default", pod, container)

    def warnings(self, reason: str = "FailedPrepareDynamicResources") -> list[str]:
        events, _ = self.cluster.api.list(EVENTS, fieldSelector="type=Warning")
        return [event["message"] for event in events if event["reason"] == reason]

    def checkpoint(self) -> list[Json]:
        """Return the claims in the kubelet's checkpoint, read as a program outside the kubelet reads it."""
        whole = json.loads((self.cluster.folder / "dra_manager_state").read_text())
        assert whole["Checksum"] == zlib.crc32(whole["Data"].encode())
        return json.loads(whole["Data"])["ClaimInfoStateList"] or []

    def dynamic_resources(self, pod: str, container: str = "c") -> Any:
        """Return what PodResources lists for a container."""
        with grpc.insecure_channel(f"unix:{self.cluster.config.pod_resources / 'kubelet.sock'}") as channel:
            stub = services.PodResourcesListerStub(channel)  # type: ignore[no-untyped-call]
            request = resources.GetPodResourcesRequest(pod_name=pod, pod_namespace="default")
            found = stub.Get(request, timeout=5).pod_resources.containers
        return next(row.dynamic_resources for row in found if row.name == container)


def _version(made: Json) -> Json:
    return {"metadata": {"resourceVersion": made["metadata"]["resourceVersion"]}}


def _container(name: str, *claims: str, request: str = "") -> Json:
    rows = [{"name": claim} | ({"request": request} if request else {}) for claim in claims]
    return {"name": name, "image": "i", "resources": {"claims": rows}}


def _device(card: int, *requests: str, share: str | None = None) -> dra_pb2.Device:
    return dra_pb2.Device(
        request_names=requests,
        pool_name="n1",
        device_name=f"card-{card}",
        cdi_device_ids=[f"{DRIVER}/claim=card-{card}"],
        share_id=share,
    )


def _write_cdi(cluster: FakeCluster) -> None:
    """Write CDI devices for four cards. Each sets the variable CARD<index>."""
    devices = [{"name": f"card-{i}", "containerEdits": {"env": [f"CARD{i}=yes"]}} for i in range(4)]
    folder = cluster.folder / "cdi"
    folder.mkdir()
    spec = {"cdiVersion": "0.6.0", "kind": f"{DRIVER}/claim", "devices": devices}
    (folder / "mgpu.json").write_text(json.dumps(spec))


def _slice(node: str) -> Json:
    spec = {"driver": DRIVER, "nodeName": node, "pool": {"name": node, "generation": 1, "resourceSliceCount": 1}}
    return {"metadata": {"name": f"{node}-slice"}, "spec": {**spec, "devices": [{"name": "card-0"}]}}


@pytest.fixture
def claims(cluster: FakeCluster) -> Iterator[Claims]:
    _write_cdi(cluster)
    made = Claims(cluster)
    yield made
    for driver in made.drivers:
        driver.stop()


def test_claim_is_prepared_given_to_its_containers_and_unprepared(claims: Claims) -> None:
    driver = claims.driver()
    driver.devices["a"] = [_device(0)]
    claims.claim("a")
    pod = claims.pod("p", {"gpu": "a"}, _container("c", "gpu"), _container("other"))
    claims.cluster.wait_running("p")
    assert claims.log("p") == "CARD0=yes\n"
    assert claims.log("p", "other") == ""
    assert claims.checkpoint()[0]["PodUIDs"] == {pod["metadata"]["uid"]: {}}
    claims.cluster.api.delete(f"{PODS}/p")
    claims.cluster.wait_gone(f"{PODS}/p")
    assert (driver.prepared, driver.unprepared) == (["a"], ["a"])
    assert claims.checkpoint() == []


def test_container_gets_only_the_devices_of_its_request(claims: Claims) -> None:
    claims.driver().devices["a"] = [_device(0, "small"), _device(1, "large"), _device(2)]
    claims.claim("a", {"card-0": "small", "card-1": "large", "card-2": "large"})
    claims.pod("p", {"gpu": "a"}, _container("c", "gpu", request="large"), _container("all", "gpu"))
    claims.cluster.wait_running("p")
    assert claims.log("p") == "CARD1=yes\nCARD2=yes\n"  # a device without request names serves all of them
    assert claims.log("p", "all") == "CARD0=yes\nCARD1=yes\nCARD2=yes\n"


def test_pod_waits_for_the_driver_and_is_deleted_without_it(claims: Claims) -> None:
    claims.claim("a")
    claims.pod("p", {"gpu": "a"})
    until(claims.warnings)
    expected = (
        "Failed to prepare dynamic resources: prepare dynamic resources: DRA driver gpu.mgpu.io is not registered"
    )
    assert claims.warnings() == [expected]
    assert claims.cluster.waiting("p") == {"reason": "ContainerCreating"}
    claims.cluster.api.delete(f"{PODS}/p")
    claims.cluster.wait_gone(f"{PODS}/p")


def test_failed_preparation_is_retried(claims: Claims) -> None:
    driver = claims.driver()
    driver.refuse_prepare = "the card is gone"
    claims.claim("a")
    claims.pod("p", {"gpu": "a"})
    until(lambda: len(driver.prepared) >= 2)
    assert "NodePrepareResources failed for ResourceClaim a: the card is gone" in until(claims.warnings)[0]
    assert claims.cluster.phase("p") == "Pending"
    driver.refuse_prepare = ""
    claims.cluster.wait_running("p")


def test_change_of_the_pod_makes_the_kubelet_retry_at_once(cluster: FakeCluster) -> None:
    claims = Claims(cluster, DraConfig(registration_seconds=0.02))
    driver = claims.driver()
    driver.refuse_prepare = "not now"
    claims.claim("a")
    claims.pod("p", {"gpu": "a"})
    until(claims.warnings)
    driver.refuse_prepare = ""
    cluster.api.patch(f"{PODS}/p", {"metadata": {"annotations": {"touched": "yes"}}})
    cluster.wait_running("p")
    driver.stop()


def test_preparation_that_takes_too_long_is_retried(cluster: FakeCluster) -> None:
    claims = Claims(cluster, DraConfig(registration_seconds=0.02, prepare_retry_seconds=0.1, call_seconds=0.2))
    driver = claims.driver()
    driver.hold_prepare.clear()
    claims.claim("a")
    claims.pod("p", {"gpu": "a"})
    assert "code = DeadlineExceeded" in until(claims.warnings)[0]
    driver.hold_prepare.set()
    cluster.wait_running("p")
    driver.stop()


def test_claim_that_is_not_reserved_for_the_pod_is_refused(claims: Claims) -> None:
    driver = claims.driver()
    claims.claim("a")
    pod = claims.cluster.create(
        "p", core=0, containers=[_container("c", "gpu")], resourceClaims=[{"name": "gpu", "resourceClaimName": "a"}]
    )
    assert "is not allowed to use ResourceClaim a" in until(claims.warnings)[0]
    assert driver.prepared == []
    claims.reserve("a", pod)
    claims.cluster.wait_running("p")


def test_shared_claim_is_prepared_once_and_unprepared_after_the_last_pod(claims: Claims) -> None:
    driver = claims.driver()
    driver.devices["a"] = [_device(0)]
    claims.claim("a")
    first = claims.pod("first", {"gpu": "a"})
    claims.cluster.wait_running("first")
    with claims.cluster.kubelet.holding():
        second = claims.pod("second", {"gpu": "a"})
        claims.reserve("a", first, second)
    claims.cluster.wait_running("second")
    assert claims.log("second") == "CARD0=yes\n"
    claims.cluster.api.delete(f"{PODS}/first")
    claims.cluster.wait_gone(f"{PODS}/first")
    assert driver.unprepared == []
    claims.cluster.api.delete(f"{PODS}/second")
    claims.cluster.wait_gone(f"{PODS}/second")
    assert (driver.prepared, driver.unprepared) == (["a"], ["a"])


def test_pod_that_cannot_be_unprepared_stays(claims: Claims) -> None:
    driver = claims.driver()
    claims.claim("a")
    claims.pod("p", {"gpu": "a"})
    claims.cluster.wait_running("p")
    driver.refuse_unprepare = "busy"
    claims.cluster.api.delete(f"{PODS}/p")
    until(lambda: len(driver.unprepared) >= 2)
    pod = claims.cluster.pod("p")
    assert pod["metadata"]["deletionTimestamp"]
    assert "terminated" in pod["status"]["containerStatuses"][0]["state"]
    driver.refuse_unprepare = ""
    claims.cluster.wait_gone(f"{PODS}/p")


def test_phase_of_a_finished_pod_waits_for_unprepare(claims: Claims) -> None:
    driver = claims.driver()
    driver.refuse_unprepare = "busy"
    claims.claim("a")
    claims.pod("p", {"gpu": "a"}, restartPolicy="Never")
    claims.cluster.wait_running("p")
    claims.cluster.kubelet.complete("default", "p")
    until(lambda: len(driver.unprepared) >= 2)
    assert claims.cluster.phase("p") == "Running"
    driver.refuse_unprepare = ""
    until(lambda: claims.cluster.phase("p") == "Succeeded")
    assert claims.cluster.pod("p")["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 0


def test_force_deleted_pod_is_unprepared(claims: Claims) -> None:
    driver = claims.driver()
    claims.claim("a")
    claims.pod("p", {"gpu": "a"})
    claims.cluster.wait_running("p")
    claims.cluster.api.delete(f"{PODS}/p", {"gracePeriodSeconds": 0})
    until(lambda: claims.checkpoint() == [])
    assert driver.unprepared == ["a"]


def test_restart_of_the_kubelet_prepares_nothing_again(claims: Claims) -> None:
    driver = claims.driver()
    driver.devices["a"] = [_device(0)]
    claims.claim("a")
    claims.pod("p", {"gpu": "a"})
    before = claims.cluster.wait_running("p")["status"]["containerStatuses"][0]["containerID"]
    claims.cluster.kubelet.stop()
    driver.statuses.clear()
    claims.cluster.kubelet.start()
    until(lambda: driver.registered)
    assert claims.cluster.wait_running("p")["status"]["containerStatuses"][0]["containerID"] == before
    claims.cluster.kubelet.restart_container("default", "p", "c")
    until(lambda: claims.cluster.pod("p")["status"]["containerStatuses"][0]["restartCount"] == 1)
    assert claims.log("p") == "CARD0=yes\n"
    claims.cluster.api.delete(f"{PODS}/p")
    claims.cluster.wait_gone(f"{PODS}/p")
    assert (driver.prepared, driver.unprepared) == (["a"], ["a"])


def test_pod_that_vanished_while_the_kubelet_was_stopped_is_unprepared(claims: Claims) -> None:
    driver = claims.driver()
    claims.claim("a")
    claims.pod("p", {"gpu": "a"})
    claims.cluster.wait_running("p")
    claims.cluster.kubelet.stop()
    claims.cluster.api.delete(f"{PODS}/p", {"gracePeriodSeconds": 0})
    claims.cluster.kubelet.start()
    until(lambda: driver.unprepared == ["a"])


def test_pod_is_deleted_when_its_driver_comes_back(claims: Claims) -> None:
    first = claims.driver()
    claims.claim("a")
    claims.pod("p", {"gpu": "a"})
    claims.cluster.wait_running("p")
    first.stop()
    claims.cluster.api.delete(f"{PODS}/p")
    until(lambda: "terminated" in claims.cluster.pod("p")["status"]["containerStatuses"][0]["state"])
    second = claims.driver()
    claims.cluster.wait_gone(f"{PODS}/p")
    assert second.unprepared == ["a"]


def test_reboot_of_the_node_prepares_the_claims_again(claims: Claims) -> None:
    driver = claims.driver()
    driver.devices["a"] = [_device(0)]
    claims.claim("a")
    claims.pod("p", {"gpu": "a"})
    claims.cluster.wait_running("p")
    claims.cluster.kubelet.stop()
    claims.cluster.runtime.reboot()
    claims.cluster.kubelet.start()
    until(lambda: claims.cluster.pod("p")["status"]["containerStatuses"][0]["restartCount"] == 1)
    assert driver.prepared == ["a", "a"]
    assert claims.log("p") == "CARD0=yes\n"


def test_claim_of_a_template_belongs_to_its_pod(claims: Claims) -> None:
    claims.driver().devices["made"] = [_device(0)]
    claims.claim("made")
    entries = [{"name": "gpu", "resourceClaimTemplateName": "t"}]
    pod = claims.cluster.submit("p", containers=[_container("c", "gpu")], resourceClaims=entries)
    claims.reserve("made", pod)
    status = {"status": {"resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": "made"}]}}
    claims.cluster.api.patch(f"{PODS}/p/status", status)
    claims.bind("p")
    assert "was not created for Pod default/p (Pod is not owner)" in until(claims.warnings)[0]
    owner = {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": pod["metadata"]["uid"], "controller": True}
    claims.cluster.api.patch(f"{CLAIMS}/made", {"metadata": {"ownerReferences": [owner]}})
    claims.cluster.wait_running("p")
    assert claims.log("p") == "CARD0=yes\n"


def test_extended_resource_comes_from_the_claim_of_kube_scheduler(claims: Claims) -> None:
    claims.driver().devices["p-extended"] = [_device(0, "container-0-request-0"), _device(1, "container-1-request-0")]
    claims.extended("p", limits={CORE: "1"})
    claims.cluster.wait_running("p")
    assert claims.log("p", "c") == "CARD0=yes\n"
    assert claims.log("p", "d") == "CARD1=yes\n"
    assert [row.claim_name for row in claims.dynamic_resources("p", "d")] == ["p-extended"]


def test_extended_resource_of_a_claim_is_not_allocated_by_the_device_plugin(claims: Claims) -> None:
    plugin = claims.cluster.plugin(ids=1, pre_start=False)
    claims.driver()
    claims.extended("p", limits={CORE: "1"})  # two containers, but the plugin has one id
    claims.cluster.wait_running("p")
    assert plugin.allocated == []


def test_pre_start_fails_for_an_extended_resource_of_a_claim(claims: Claims) -> None:
    """The kubelet of 1.36 asks the plugin before the start although it has not allocated anything there."""
    claims.cluster.plugin()
    claims.driver()
    claims.extended("p", limits={CORE: "1"})
    until(lambda: "no devices found allocated in local cache" in claims.cluster.waiting("p").get("message", ""))


def test_pod_resources_and_checkpoint_name_the_devices_of_a_container(claims: Claims) -> None:
    claims.driver().devices["a"] = [_device(0, "gpu", share="s0"), _device(1, "gpu")]
    claims.claim("a", {"card-0": "gpu", "card-1": "gpu"})
    claims.pod("p", {"gpu": "a"}, _container("c", "gpu"), _container("other"))
    claims.cluster.wait_running("p")
    found = claims.dynamic_resources("p")[0]
    assert (found.claim_name, found.claim_namespace) == ("a", "default")
    first, second = found.claim_resources
    assert (first.driver_name, first.pool_name, first.device_name, first.share_id) == (DRIVER, "n1", "card-0", "s0")
    assert not second.HasField("share_id")
    # The kubelet repeats the CDI devices of the devices before.
    assert [[d.name for d in row.cdi_devices] for row in (first, second)] == [
        [f"{DRIVER}/claim=card-0"],
        [f"{DRIVER}/claim=card-0", f"{DRIVER}/claim=card-1"],
    ]
    assert not claims.dynamic_resources("p", "other")
    assert claims.checkpoint()[0]["DriverState"][DRIVER]["Devices"][0] == {
        "PoolName": "n1",
        "DeviceName": "card-0",
        "ShareID": "s0",
        "RequestNames": ["gpu"],
        "CDIDeviceIDs": [f"{DRIVER}/claim=card-0"],
    }


def test_first_read_of_a_claim_is_refused_if_the_authorizer_is_late(cluster: FakeCluster) -> None:
    claims = Claims(cluster, DraConfig(registration_seconds=0.02, prepare_retry_seconds=0.1, access_delay=0.05))
    driver = claims.driver()
    claims.claim("a")
    claims.pod("p", {"gpu": "a"})
    assert "no relationship found between node 'n1' and this object" in until(claims.warnings)[0]
    cluster.wait_running("p")
    driver.stop()


def test_health_of_a_device_is_in_the_status_of_its_pod(claims: Claims) -> None:
    driver = claims.driver()
    driver.devices["a"] = [_device(0)]
    claims.claim("a")
    claims.pod("p", {"gpu": "a"})
    claims.cluster.wait_running("p")

    def health() -> Json:
        rows = claims.cluster.pod("p")["status"]["containerStatuses"][0]["allocatedResourcesStatus"]
        assert rows[0]["name"] == "claim:gpu"
        return dict(rows[0]["resources"][0])

    assert health() == {"resourceID": f"{DRIVER}/claim=card-0", "health": "Unknown"}
    driver.set_health("card-0", dra_health_pb2.UNHEALTHY)
    until(lambda: health()["health"] == "Unhealthy")
    driver.set_health("card-0", dra_health_pb2.HEALTHY)
    until(lambda: health()["health"] == "Healthy")


def test_driver_without_a_known_service_is_refused(claims: Claims) -> None:
    driver = claims.driver(versions=("v1alpha4.DRAPlugin",))
    assert not driver.registered
    assert "none of services supported by the plugin" in driver.statuses[0].error


def test_driver_that_restarts_is_registered_again(claims: Claims) -> None:
    claims.driver().stop()
    again = claims.driver()
    assert again.registered
    claims.claim("a")
    claims.pod("p", {"gpu": "a"})
    claims.cluster.wait_running("p")
    assert again.prepared == ["a"]


def test_newest_connected_instance_of_a_driver_is_called(claims: Claims) -> None:
    old = claims.driver("old")
    new = claims.driver("new")
    claims.claim("a")
    claims.claim("b")
    claims.pod("p", {"gpu": "a"})
    claims.cluster.wait_running("p")
    new.stop()
    claims.pod("q", {"gpu": "b"})
    claims.cluster.wait_running("q")
    assert (old.prepared, new.prepared) == (["b"], ["a"])


def test_kubelet_deletes_the_slices_of_its_node_at_its_start(claims: Claims) -> None:
    claims.cluster.kubelet.stop()
    claims.cluster.api.create(SLICES, _slice("n1"))
    claims.cluster.api.create(SLICES, _slice("n2"))
    claims.cluster.kubelet.start()
    claims.cluster.wait_gone(f"{SLICES}/n1-slice")
    assert claims.cluster.exists(f"{SLICES}/n2-slice")


@pytest.mark.parametrize("end", ["stop", "crash"])
def test_slices_are_deleted_when_a_driver_has_been_gone_for_a_while(claims: Claims, end: str) -> None:
    driver = claims.driver()
    until(lambda: claims.cluster.kubelet.dra.drivers.get(DRIVER).connected)
    claims.cluster.api.create(SLICES, _slice("n1"))
    getattr(driver, end)()
    claims.cluster.wait_gone(f"{SLICES}/n1-slice")


def test_slices_stay_if_the_driver_comes_back_in_time(cluster: FakeCluster) -> None:
    claims = Claims(cluster, DraConfig(registration_seconds=0.02, wipe_delay=3600.0))
    first = claims.driver("first")
    first.stop()
    second = claims.driver("second")
    drivers = cluster.kubelet.dra.drivers
    until(lambda: drivers.get(DRIVER).connected)
    assert not drivers.pending_wipes()
    second.stop()
    until(drivers.pending_wipes)
