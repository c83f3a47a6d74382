"""How large an object may be."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given

from mgpu.model import budget
from mgpu.model.budget import excess, excess_of_spec
from mgpu.model.device_object import read_device
from mgpu.model.errors import BadObject
from tests.arbitrary import JSON, PARTS
from tests.builders import container, pod, share

CRDS = Path(__file__).parents[3] / "manifests" / "crds"
VARIABLE = {"name": "A", "value": "b"}


def with_resources(count: int) -> dict[str, Any]:
    return pod("p", {"name": "c", "resources": {"limits": {f"a/{i}": "1" for i in range(count)}}})


MAKERS = {
    "spec.containers: has {} containers": (
        lambda n: pod("p", *map(container, map(str, range(n)))),
        budget.MAX_CONTAINERS,
    ),
    "spec.containers: has {} resource": (with_resources, budget.MAX_RESOURCES),
    "spec.containers: has {} environment": (
        lambda n: pod("p", {**container(), "env": [VARIABLE] * n}),
        budget.MAX_VARIABLES,
    ),
    "metadata.annotations: has {} ": (
        lambda n: share(annotations={str(i): "" for i in range(n)}),
        budget.MAX_ANNOTATIONS,
    ),
    "metadata.labels: has {} ": (
        lambda n: {"metadata": {"labels": {str(i): "" for i in range(n)}}},
        budget.MAX_LABELS,
    ),
}


@pytest.mark.parametrize(("says", "case"), MAKERS.items(), ids=MAKERS)
def test_object_at_its_bound_is_accepted_and_one_above_it_is_named(says: str, case: Any) -> None:
    make, most = case
    assert excess(make(most)) == []
    (problem,) = excess(make(most + 1))
    assert str(problem).startswith(says.format(most + 1))
    assert f"more than the {most} that mgpu accepts; " in problem.message


def nested(levels: int) -> dict[str, Any]:
    """A spec of so many levels, itself the first."""
    value: Any = {}
    for _ in range(levels - 2):
        value = [value]
    return {"spec": {"x": value}}


def test_spec_at_the_deepest_nesting_is_accepted_and_one_level_more_is_denied() -> None:
    assert excess_of_spec(nested(budget.MAX_NESTING)) == []
    for levels in (budget.MAX_NESTING + 1, 253, 1000):
        (problem,) = excess_of_spec(nested(levels))
        assert str(problem).startswith(f"spec: is nested more than {budget.MAX_NESTING} levels deep")


def test_spec_that_was_nested_too_deeply_before_can_be_changed() -> None:
    assert excess_of_spec(nested(300), nested(300)) == []
    assert excess_of_spec(nested(3), nested(300)) == []


def test_init_containers_count_as_containers() -> None:
    half = [container(str(i)) for i in range(budget.MAX_CONTAINERS // 2 + 1)]
    assert excess(pod("p", *half, init=tuple(half)))


def test_object_from_before_may_stay_as_large_as_it_was_and_may_not_grow() -> None:
    old = share(annotations={str(i): "" for i in range(budget.MAX_ANNOTATIONS + 5)})
    more = share(annotations={str(i): "" for i in range(budget.MAX_ANNOTATIONS + 6)})
    assert excess(old, old) == []
    assert len(excess(more, old)) == 1


@given(JSON | PARTS)
def test_property_arbitrary_object_has_a_size(raw: Any) -> None:
    assert excess(raw) == []


def schema(name: str, *path: str) -> Any:
    """A part of the schema of a kind, by the names of its properties; "[]" are the items of a list."""
    crd = yaml.safe_load((CRDS / f"{name}.yaml").read_text())
    found = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for key in path:
        found = found["items"] if key == "[]" else found["properties"][key]
    return found


@pytest.mark.parametrize("kind", ["containers", "initContainers"])
def test_schema_of_mtgpupods_limits_what_the_budget_limits(kind: str) -> None:
    resources = schema("mtgpupod", "spec", kind, "[]", "resources")
    assert schema("mtgpupod", "spec", kind)["maxItems"] == budget.MAX_CONTAINERS
    assert schema("mtgpupod", "spec", kind, "[]", "env")["maxItems"] == budget.MAX_VARIABLES
    assert {resources["properties"][key]["maxProperties"] for key in ("limits", "requests")} == {budget.MAX_RESOURCES}


def test_schema_of_devices_accepts_as_many_as_are_read() -> None:
    most = schema("device", "spec", "devices")["maxItems"]
    rows = [{"type": "rdma", "minor": i} for i in range(most + 1)]
    assert len(read_device({"spec": {"devices": rows[:most]}})) == most
    with pytest.raises(BadObject, match=f"at most {most}"):
        read_device({"spec": {"devices": rows}})
