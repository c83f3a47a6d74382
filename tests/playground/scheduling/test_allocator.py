"""Which devices the allocator chooses, in the order of kube-scheduler's structured allocator."""

from typing import Any

import pytest

from mgpu.model.resource_claims import DRIVER
from playground.scheduling.claims.allocator import AllocationError, allocate
from playground.scheduling.claims.capacity import consumption
from playground.scheduling.claims.device_requests import usage_of
from playground.scheduling.claims.pools import SliceIndex
from tests.playground.claim_objects import card, claim, device, device_class, device_slice, request, share
from tests.playground.fake_cluster import Json

CLASSES = {"mgpu": device_class(), "any": device_class("any", "true")}
SELECT_1 = [{"cel": {"expression": f'device.attributes["{DRIVER}"].index == 1'}}]
TAINT = {"key": "mgpu.io/unhealthy", "effect": "NoSchedule"}


def node(name: str = "n1", **labels: str) -> Json:
    return {"metadata": {"name": name, "labels": labels}}


def chosen(*claims: Json, slices: list[Json], used: list[Json] | None = None, on: Json | None = None) -> Any:
    """Return the names of the chosen devices of each claim, or None."""
    whole: list[Json] = [{**one, "spec": _defaults(one["spec"])} for one in claims]
    found = allocate(whole, on or node(), slices, CLASSES, usage_of(used or []))
    if found is None:
        return None
    return [[row["device"] for row in one["devices"]["results"]] for one in found]


def _defaults(spec: Json) -> Json:
    """Return the spec with what the API server sets if a claim does not contain it."""
    rows = [
        {**row, "exactly": {"count": 1, **row["exactly"]}} if "exactly" in row else row
        for row in spec["devices"]["requests"]
    ]
    return {"devices": {**spec["devices"], "requests": rows}}


def allocation(device: str, cores: str = "", **more: Any) -> Json:
    row = {"request": "gpu", "driver": DRIVER, "pool": "n1", "device": device, **more}
    row |= {"shareID": device, "consumedCapacity": {"cores": cores, "memory": "1Gi"}} if cores else {}
    return {"devices": {"results": [row]}}


def test_first_device_of_the_slice_that_fits_is_chosen() -> None:
    slices = [device_slice("n1", card(2), card(0), card(1))]
    assert chosen(claim("c", share(30, "8Gi")), slices=slices) == [["card-2"]]
    assert chosen(claim("c", share(30, "8Gi")), slices=slices, used=[allocation("card-2", "71")]) == [["card-0"]]
    assert chosen(claim("c", share(30, "8Gi")), slices=slices, used=[allocation("card-2", "70")]) == [["card-2"]]


def test_slices_of_a_pool_are_tried_by_name_and_pools_by_driver_and_name() -> None:
    pool = {"name": "n1", "resourceSliceCount": 2}
    slices = [
        device_slice("n1", card(1), name="b", pool=pool),
        device_slice("n1", card(0), name="c", driver="a.example.com", pool={"name": "z"}),
        device_slice("n1", card(2), name="a", pool=pool),
    ]
    wanted = claim("c", request(deviceClassName="any", count=3))
    assert chosen(wanted, slices=slices) == [["card-0", "card-2", "card-1"]]


def test_result_names_share_consumption_and_node() -> None:
    found = allocate(
        [claim("c", share(30, "8Gi", count=1))], node(), [device_slice("n1", card(0))], CLASSES, usage_of([])
    )
    assert found is not None
    row = found[0]["devices"]["results"][0]
    assert len(row.pop("shareID")) == 36
    assert row == {
        "request": "gpu",
        "driver": DRIVER,
        "pool": "n1",
        "device": "card-0",
        "consumedCapacity": {"cores": "30", "memory": "8Gi"},
    }
    fields = [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]
    assert found[0]["nodeSelector"] == {"nodeSelectorTerms": [{"matchFields": fields}]}


def test_request_without_capacity_takes_the_default_of_each_capacity() -> None:
    slices = [device_slice("n1", card(0), card(1))]
    assert chosen(claim("c", request()), slices=slices, used=[allocation("card-0", "1")]) == [["card-1"]]
    assert chosen(claim("c", request()), slices=[device_slice("n1", card(0, cores=99))]) is None


def test_device_that_is_not_shared_is_allocated_once() -> None:
    slices = [device_slice("n1", device("a"), device("b"))]
    assert chosen(claim("c", request()), claim("d", request()), slices=slices) == [["a"], ["b"]]
    assert chosen(claim("c", request(count=3)), slices=slices) is None
    assert chosen(claim("c", request()), slices=slices, used=[allocation("a")]) == [["b"]]


def test_requests_of_one_claim_share_a_card() -> None:
    slices = [device_slice("n1", card(0), card(1))]
    two = claim("c", share(60, "8Gi", name="a"), share(60, "8Gi", name="b"))
    assert chosen(two, slices=slices) == [["card-0", "card-1"]]
    assert chosen(claim("c", share(40, "8Gi", name="a"), share(60, "8Gi", name="b")), slices=slices) == [["card-0"] * 2]


def test_request_for_several_cards_gets_different_ones() -> None:
    slices = [device_slice("n1", card(0), card(1))]
    assert chosen(claim("c", share(10, "8Gi", count=2)), slices=slices) == [["card-0", "card-1"]]
    assert chosen(claim("c", share(10, "8Gi", count=3)), slices=slices) is None


def test_unknown_capacity_fits_no_device() -> None:
    wanted = request(capacity={"requests": {"bandwidth": "1"}})
    assert chosen(claim("c", wanted), slices=[device_slice("n1", card(0))]) is None


def test_selectors_of_class_and_request_choose_the_device() -> None:
    slices = [device_slice("n1", card(0), card(1))]
    assert chosen(claim("c", share(10, "1Gi", selectors=SELECT_1)), slices=slices) == [["card-1"]]
    large = [{"cel": {"expression": f'device.capacity["{DRIVER}"].memory.compareTo(quantity("100Gi")) >= 0'}}]
    assert chosen(claim("c", share(10, "1Gi", selectors=large)), slices=slices) is None
    foreign = [device_slice("n1", card(0), driver="other.example.com")]
    assert chosen(claim("c", share(10, "1Gi")), slices=foreign) is None


def test_failing_selector_is_an_error() -> None:
    wrong = [{"cel": {"expression": f'device.attributes["{DRIVER}"].nonsense == 1'}}]
    with pytest.raises(AllocationError, match="CEL runtime error"):
        chosen(claim("c", request(selectors=wrong)), slices=[device_slice("n1", card(0))])


def test_all_devices_are_allocated_or_none() -> None:
    slices = [device_slice("n1", device("a"), device("b"))]
    every = claim("c", request(allocationMode="All"))
    assert chosen(every, slices=slices) == [["a", "b"]]
    assert chosen(every, slices=slices, used=[allocation("a")]) is None
    assert chosen(every, slices=[]) is None
    incomplete = [device_slice("n1", device("a"), pool={"resourceSliceCount": 2})]
    with pytest.raises(AllocationError, match="currently being updated"):
        chosen(every, slices=incomplete)


def test_incomplete_and_invalid_pools_are_not_used() -> None:
    wanted = claim("c", request())
    assert chosen(wanted, slices=[device_slice("n1", device("a"), pool={"resourceSliceCount": 2})]) is None
    twice = {"resourceSliceCount": 2}
    slices = [device_slice("n1", device("a"), name=name, pool=twice) for name in ("x", "y")]
    assert chosen(wanted, slices=slices) is None


def test_only_the_newest_generation_of_a_pool_counts() -> None:
    slices = [
        device_slice("n1", device("a"), name="x"),
        device_slice("n1", device("b"), name="y", pool={"generation": 2}),
    ]
    assert chosen(claim("c", request()), slices=slices) == [["b"]]


def test_slices_are_for_their_nodes() -> None:
    terms = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["z"]}]}]
    shared = device_slice("pool", device("a"), nodeName=None, nodeSelector={"nodeSelectorTerms": terms})
    wanted = claim("c", request(count=1))
    assert chosen(wanted, slices=[shared]) is None
    found = allocate([wanted], node(zone="z"), [shared], CLASSES, usage_of([]))
    assert found is not None
    assert found[0]["nodeSelector"] == {"nodeSelectorTerms": terms}
    everywhere = device_slice("pool", device("a"), nodeName=None, allNodes=True)
    found = allocate([wanted], node(), [everywhere], CLASSES, usage_of([]))
    assert found is not None
    assert "nodeSelector" not in found[0]
    assert chosen(wanted, slices=[device_slice("n2", device("a"))]) is None


def test_index_finds_the_slices_of_the_pools_of_a_node() -> None:
    spanning = [device_slice(node, device(node), pool={"name": "p", "resourceSliceCount": 2}) for node in ("n1", "n2")]
    own = device_slice("n3", device("a"))
    shared = device_slice("all", device("b"), nodeName=None, allNodes=True)
    index = SliceIndex([*spanning, own, shared])
    assert index.of_node("n1") == [shared, *spanning]
    assert index.of_node("n3") == [shared, own]
    assert index.of_node("n4") == [shared]


def test_first_alternative_that_fits_is_chosen() -> None:
    rows = [
        {"name": "big", "deviceClassName": "mgpu", "count": 3},
        {"name": "small", "deviceClassName": "mgpu", "count": 1, "selectors": SELECT_1},
    ]
    wanted = claim("c", {"name": "gpu", "firstAvailable": rows})
    slices = [device_slice("n1", card(0), card(1))]
    found = allocate([wanted], node(), slices, CLASSES, usage_of([]))
    assert found is not None
    assert [(r["request"], r["device"]) for r in found[0]["devices"]["results"]] == [("gpu/small", "card-1")]


def test_constraints_between_devices() -> None:
    slices = [device_slice("n1", device("a", numa=0), device("b", numa=1), device("c", numa=1), device("d", numa=0))]
    same = [{"matchAttribute": f"{DRIVER}/numa"}]
    assert chosen(claim("c", request(count=2), constraints=same), slices=slices) == [["a", "d"]]
    different = [{"distinctAttribute": f"{DRIVER}/numa"}]
    assert chosen(claim("c", request(count=2), constraints=different), slices=slices) == [["a", "b"]]
    assert chosen(claim("c", request(count=3), constraints=different), slices=slices) is None
    missing = [{"matchAttribute": f"{DRIVER}/nonsense"}]
    assert chosen(claim("c", request(), constraints=missing), slices=slices) is None
    other = [{"requests": ["x"], "matchAttribute": f"{DRIVER}/numa"}]
    three = claim("c", request("x", count=2), request("y"), constraints=other)
    assert chosen(three, slices=slices) == [["a", "d", "b"]]


def test_search_goes_back_to_an_earlier_choice() -> None:
    slices = [device_slice("n1", card(0), card(1))]
    taken = [allocation("card-1", "50")]
    first = claim("c", share(40, "1Gi", name="a"), share(100, "1Gi", name="b"))
    assert chosen(first, slices=slices, used=taken) == [["card-1", "card-0"]]


def test_taints_need_a_toleration() -> None:
    slices = [device_slice("n1", card(0, taints=[TAINT]), card(1))]
    assert chosen(claim("c", share(10, "1Gi")), slices=slices) == [["card-1"]]
    tolerated = [{"key": "mgpu.io/unhealthy", "operator": "Exists"}]
    assert chosen(claim("c", share(10, "1Gi", tolerations=tolerated)), slices=slices) == [["card-0"]]
    harmless = [device_slice("n1", card(0, taints=[{**TAINT, "effect": "None"}]))]
    assert chosen(claim("c", share(10, "1Gi")), slices=harmless) == [["card-0"]]


def test_administrative_access_needs_no_free_device() -> None:
    slices = [device_slice("n1", device("a"))]
    admin = claim("c", request(adminAccess=True))
    assert chosen(admin, slices=slices, used=[allocation("a")]) == [["a"]]
    assert chosen(claim("c", request()), slices=slices, used=[allocation("a", adminAccess=True)]) == [["a"]]


def test_partitions_share_the_counters_of_their_hardware() -> None:
    def part(name: str, slices: str) -> Json:
        return device(name) | {"consumesCounters": [{"counterSet": "gpu-0", "counters": {"slices": {"value": slices}}}]}

    counters = [{"name": "gpu-0", "counters": {"slices": {"value": "7"}}}]
    pool = {"resourceSliceCount": 2}
    held = device_slice("n1", name="counters", pool=pool, sharedCounters=counters)
    slices = [held, device_slice("n1", part("whole", "7"), part("half", "4"), part("third", "3"), name="x", pool=pool)]
    assert chosen(claim("c", request()), slices=slices) == [["whole"]]
    assert chosen(claim("c", request(count=2)), slices=slices) == [["half", "third"]]
    assert chosen(claim("c", request()), slices=slices, used=[allocation("half")]) == [["third"]]
    assert chosen(claim("c", request()), slices=slices, used=[allocation("whole")]) is None


def test_configuration_of_class_and_claim_is_in_the_allocation() -> None:
    opaque = {"opaque": {"driver": DRIVER, "parameters": {"a": 1}}}
    classes = {"mgpu": device_class(config=[opaque])}
    of_claim = [{"requests": ["a"], **opaque}, {"requests": ["b"], **opaque}, opaque]
    wanted = claim("c", request("a", count=1), request("b", count=1), config=of_claim)
    found = allocate([wanted], node(), [device_slice("n1", device("x"), device("y"))], classes, usage_of([]))
    assert found is not None
    assert [(row["source"], row.get("requests")) for row in found[0]["devices"]["config"]] == [
        ("FromClass", None),
        ("FromClaim", ["a"]),
        ("FromClaim", ["b"]),
        ("FromClaim", None),
    ]


def test_claim_for_too_many_devices_is_an_error() -> None:
    with pytest.raises(AllocationError, match="exceeds the claim limit of 32"):
        chosen(claim("c", request(count=33)), slices=[])
    with pytest.raises(AllocationError, match="could not retrieve device class"):
        chosen(claim("c", request(deviceClassName="nonsense")), slices=[])


@pytest.mark.parametrize(
    ("requested", "policy", "consumed"),
    [
        (None, {}, "10Gi"),
        (None, {"default": "2Gi"}, "2Gi"),
        ("1500Mi", {}, "1500Mi"),
        ("1500Mi", {"default": "1Gi"}, "1500Mi"),
        ("1", {"default": "1Gi", "validRange": {"min": "1Gi"}}, "1Gi"),
        ("1500Mi", {"default": "1Gi", "validRange": {"min": "1Gi", "step": "1Gi"}}, "2Gi"),
        ("1537Mi", {"default": "1Gi", "validRange": {"min": "1Gi", "step": "512Mi"}}, "2Gi"),
        ("3Gi", {"default": "1Gi", "validRange": {"min": "1Gi", "max": "2Gi"}}, None),
        ("1500Mi", {"default": "1Gi", "validValues": ["1Gi", "2Gi"]}, "2Gi"),
        ("3Gi", {"default": "1Gi", "validValues": ["1Gi", "2Gi"]}, None),
        ("11Gi", {}, None),
        (None, {"default": "20Gi"}, None),
    ],
)
def test_policy_rounds_the_requested_amount_up(requested: str | None, policy: Json, consumed: str | None) -> None:
    capacity = {"memory": {"value": "10Gi", "requestPolicy": policy}}
    found = consumption({} if requested is None else {"memory": requested}, capacity, {})
    assert found == (None if consumed is None else {"memory": consumed})
