"""What pods request by claims that are not allocated yet, as the filter rates nodes for it."""

from mgpu.model.device_object import write_device
from mgpu.model.pods import Node
from mgpu.model.resource_claims import DeviceRequest
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.decisions.open_claims import sets_of_alternatives
from tests import builders as b
from tests.scheduler.claim_objects import (
    Raw,
    allocated,
    claim,
    device_class,
    request,
    serving,
    share,
    submit,
    waiting_pod,
)
from tests.scheduler.fake import Replica


def read(replica: Replica, *names: str) -> GpuPod | None:
    raw = waiting_pod("p")
    raw["spec"]["resourceClaims"] = [{"name": f"claim-{i}", "resourceClaimName": name} for i, name in enumerate(names)]
    return replica.open_claims.read(raw)


def amounts(found: GpuPod | None) -> list[tuple[str, int, int, int]]:
    assert found is not None
    assert found.request is not None
    return [(one.container, one.cards, one.core, one.memory >> 30) for one in found.request.containers]


def of(*claims: Raw) -> Replica:
    replica = serving(("n1", 2))
    submit(replica.api, *claims)
    replica.deliver()
    return replica


def test_each_request_of_each_open_claim_counts() -> None:
    replica = of(claim("c", request("a", 30, "8Gi"), request("b", 20, "4Gi", count=2)), claim("d"))
    assert amounts(read(replica, "c", "d")) == [("c/a", 1, 300, 8), ("c/b", 2, 200, 4), ("d/gpu", 1, 300, 8)]


def test_claim_that_a_pod_names_twice_counts_once() -> None:
    assert amounts(read(of(claim("c")), "c", "c")) == [("c/gpu", 1, 300, 8)]


def test_allocated_claim_does_not_count() -> None:
    assert read(of(allocated(claim("c"), share("card-0"))), "c") is None


def test_least_amounts_of_alternatives_count() -> None:
    big = {"name": "big", "deviceClassName": "mgpu", "count": 2}
    small = {
        "name": "small",
        "deviceClassName": "mgpu",
        "capacity": {"requests": {"cores": "5", "memory": "1Gi"}},
    }
    found = read(of(claim("c", {"name": "gpu", "firstAvailable": [big, small]})), "c")
    assert amounts(found) == [("c/gpu/big", 1, 50, 1)]


def test_class_for_a_new_size_of_cards_counts_soon_after_a_node_has_them() -> None:
    """The cards of all nodes are read only from time to time."""
    replica = of(claim("c"))
    expression = 'device.attributes["gpu.mgpu.io"].totalMemory > 100 * 1024 * 1024 * 1024'
    replica.api.put("deviceclasses", device_class("mgpu", expression))
    replica.deliver()
    assert read(replica, "c") is None
    replica.api.put("nodes", b.node("n2"))
    replica.api.put("devices", write_device(Node("n2"), "", b.cards(1, 141, node="n2")))
    replica.deliver()
    replica.clock.now += 11
    assert amounts(read(replica, "c")) == [("c/gpu", 1, 300, 8)]


def test_alternatives_are_combined_in_the_order_of_kube_scheduler() -> None:
    found = sets_of_alternatives(DeviceRequest(name) for name in ("a/x", "a/y", "b", "c/x", "c/y"))
    assert found == [{"a/x", "b", "c/x"}, {"a/x", "b", "c/y"}, {"a/y", "b", "c/x"}, {"a/y", "b", "c/y"}]


def test_number_of_combinations_is_limited() -> None:
    names = (f"r{i}/{alternative}" for i in range(32) for alternative in "abcdefgh")
    assert len(sets_of_alternatives(DeviceRequest(name) for name in names)) == 64
    assert sets_of_alternatives(()) == []
