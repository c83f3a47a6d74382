"""Contract of ResourceSlices: defaults, validation and selection by fields."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.playground.apiserver.api import Api, Reply
from tests.playground.claim_objects import SLICES, card, device, device_slice

pytestmark = pytest.mark.kubernetes(1, 34)

RANGE = {"min": "1", "step": "1"}


@pytest.fixture
def made(api: Api, name: str) -> Iterator[str]:
    """The name of a ResourceSlice, which is deleted after the test."""
    yield name
    api.call("DELETE", f"{SLICES}/{name}")


def create(api: Api, name: str, *devices: Any, **spec: Any) -> Reply:
    return api.call("POST", SLICES, device_slice("n1", *devices, name=name, **spec))


def fields(reply: Reply) -> set[str]:
    """The fields of the causes of a 422."""
    assert reply.code == 422, reply
    return {cause["field"] for cause in reply.body["details"]["causes"]}


def with_policy(value: str, **policy: Any) -> Any:
    """A shared device whose only capacity has this policy."""
    capacity = {"value": value, "requestPolicy": policy} if policy else {"value": value}
    return {"name": "card-0", "allowMultipleAllocations": True, "capacity": {"cores": capacity}}


def test_slice_is_stored_with_canonical_quantities_and_a_generation(api: Api, made: str) -> None:
    stored = create(api, made, card(0, memory="81920Mi")).body
    assert stored["spec"]["devices"][0]["capacity"]["memory"]["value"] == "80Gi"
    assert stored["metadata"]["generation"] == 1
    annotated = api.patch(f"{SLICES}/{made}", {"metadata": {"annotations": {"mgpu.io/wake": "1"}}}).body
    assert annotated["metadata"]["generation"] == 1
    stored["spec"]["devices"] = [card(1)]
    stored["metadata"].pop("resourceVersion")
    assert api.call("PUT", f"{SLICES}/{made}", stored).body["metadata"]["generation"] == 2


def test_slices_are_selected_by_node_and_driver(api: Api, made: str) -> None:
    create(api, made, card(0), driver=f"{made}.example.com")
    for selector, count in (
        (f"spec.driver={made}.example.com", 1),
        (f"spec.driver={made}.example.com,spec.nodeName=n2", 0),
    ):
        assert len(api.get(f"{SLICES}?fieldSelector={selector}")["items"]) == count


def test_driver_pool_and_node_of_a_slice_are_immutable(api: Api, made: str) -> None:
    create(api, made, card(0))
    for change in ({"driver": "other.example.com"}, {"pool": {"name": "other"}}, {"nodeName": "n2"}):
        assert api.patch(f"{SLICES}/{made}", {"spec": change}).code == 422
    assert api.patch(f"{SLICES}/{made}", {"spec": {"pool": {"generation": 2}}}).code == 200


def test_new_taint_gets_a_time(api: Api, made: str) -> None:
    stored = create(api, made, card(0, taints=[{"key": "a.b/c", "effect": "NoSchedule"}])).body
    assert stored["spec"]["devices"][0]["taints"][0]["timeAdded"]


@pytest.mark.parametrize(
    ("devices", "allowed"),
    [
        ([device(f"d-{i}") for i in range(128)], True),
        ([device(f"d-{i}") for i in range(129)], False),
        ([card(i, taints=[{"key": "a", "effect": "NoSchedule"}] if i == 0 else []) for i in range(64)], True),
        pytest.param(
            [card(i, taints=[{"key": "a", "effect": "NoSchedule"}] if i == 0 else []) for i in range(65)],
            False,
            marks=pytest.mark.kubernetes(1, 35),
        ),
    ],
)
def test_number_of_devices_is_limited_more_if_one_has_a_taint(
    api: Api, made: str, devices: list[Any], *, allowed: bool
) -> None:
    reply = create(api, made, *devices)
    assert (reply.code == 201) == allowed
    assert allowed or fields(reply) == {"spec.devices"}


@pytest.mark.parametrize(
    "policy",
    [
        {},
        {"default": "100"},
        {"default": "5"},
        {"default": "1", "validRange": {"min": "1"}},
        {"default": "10", "validRange": {"min": "0", "step": "1"}},
        {"default": "10", "validRange": {"min": "2", "max": "10", "step": "2"}},
        {"default": "5", "validValues": ["1", "5", "10"]},
    ],
)
def test_request_policy_is_accepted(api: Api, made: str, policy: Any) -> None:
    assert create(api, made, with_policy("10", **policy)).code == 201


def test_policy_with_only_a_default_allows_any_capacity(api: Api, made: str) -> None:
    assert create(api, made, with_policy("0", default="100")).code == 201


def test_capacity_has_room_for_the_minimum_and_one_step(api: Api, made: str) -> None:
    field = "spec.devices[0].capacity[cores].requestPolicy.validRange.step"
    assert fields(create(api, made, with_policy("1", default="100", validRange=RANGE))) == {field}
    assert create(api, made, with_policy("2", default="100", validRange=RANGE)).code == 201


@pytest.mark.parametrize(
    ("policy", "field"),
    [
        ({"validRange": {"min": "1"}}, "default"),
        ({"validValues": ["1"]}, "default"),
        ({"default": "1", "validRange": {"step": "1"}}, "validRange.min"),
        ({"default": "11", "validRange": {"min": "11"}}, "validRange.min"),
        ({"default": "1", "validRange": {"min": "2"}}, "validRange.min"),
        ({"default": "6", "validRange": {"min": "1", "max": "5"}}, "validRange.max"),
        ({"default": "1", "validRange": {"min": "1", "max": "20"}}, "validRange.max"),
        ({"default": "4", "validRange": {"min": "1", "step": "2"}}, "validRange.step"),
        ({"default": "1", "validValues": ["2", "5"]}, "validValues"),
        ({"default": "2", "validValues": ["5", "2"]}, "validValues[1]"),
        ({"default": "2", "validValues": ["2", "50"]}, "validValues[1]"),
    ],
)
def test_request_policy_is_refused(api: Api, made: str, policy: Any, field: str) -> None:
    path = "spec.devices[0].capacity[cores].requestPolicy"
    assert f"{path}.{field}" in fields(create(api, made, with_policy("10", **policy)))


def test_request_policy_needs_a_shared_device(api: Api, made: str) -> None:
    single = with_policy("10", default="1") | {"allowMultipleAllocations": False}
    assert fields(create(api, made, single)) == {"spec.devices[0].capacity[cores].requestPolicy"}


@pytest.mark.parametrize(
    ("attributes", "field"),
    [
        ({"a b": {"int": 1}}, "attributes"),
        ({"a": {}}, "attributes[a]"),
        ({"a": {"int": 1, "string": "b"}}, "attributes[a]"),
        ({"a": {"string": "x" * 65}}, "attributes[a].string"),
        ({"a": {"version": "1.0"}}, "attributes[a].version"),
        ({f"a{i}": {"int": 1} for i in range(33)}, ""),
    ],
)
def test_attribute_is_refused(api: Api, made: str, attributes: Any, field: str) -> None:
    reply = create(api, made, {"name": "d", "attributes": attributes})
    assert any(found.startswith(f"spec.devices[0].{field}".rstrip(".")) for found in fields(reply))


def test_attributes_of_all_types_are_stored(api: Api, made: str) -> None:
    attributes = {
        "a": {"int": 1},
        "b": {"bool": False},
        "c": {"string": "x" * 64},
        "d": {"version": "1.2.3-rc.1+b"},
        "example.com/e": {"int": -1},
        "a.example.com/b/c": {"int": 1},  # against the documentation, but accepted
    }
    assert (
        create(api, made, {"name": "d", "attributes": attributes}).body["spec"]["devices"][0]["attributes"]
        == attributes
    )


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"nodeName": None}, "spec"),
        ({"allNodes": True}, "spec"),
        ({"nodeName": ""}, "spec.nodeName"),
        ({"driver": ""}, "spec.driver"),
        ({"driver": "d" * 64}, "spec.driver"),
        ({"pool": {"resourceSliceCount": 0}}, "spec.pool.resourceSliceCount"),
        ({"pool": {"generation": -1}}, "spec.pool.generation"),
        ({"pool": {"name": ""}}, "spec.pool.name"),
    ],
)
def test_slice_is_refused(api: Api, made: str, spec: Any, field: str) -> None:
    assert field in fields(create(api, made, card(0), **spec))


@pytest.mark.kubernetes(1, 35)
def test_devices_of_a_slice_have_different_names(api: Api, made: str) -> None:
    assert fields(create(api, made, card(0), card(0))) == {"spec.devices[1]"}
    assert fields(create(api, made, device(""))) == {"spec.devices[0].name"}


@pytest.mark.kubernetes(1, 35)
def test_counters_are_in_a_slice_without_devices(api: Api, made: str) -> None:
    counters = [{"name": "gpu-0", "counters": {"slices": {"value": "7"}}}]
    whole = device_slice("n1", name=made)
    whole["spec"] |= {"sharedCounters": counters, "devices": None}
    stored = api.ok("POST", SLICES, whole)
    assert stored["spec"]["sharedCounters"] == counters
    assert "spec" in fields(
        api.call("POST", SLICES, device_slice("n1", card(0), name=f"{made}-2", sharedCounters=counters))
    )
