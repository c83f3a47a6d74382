"""What containers were given in words, and what they must see (playground/containers.py)."""

import pytest

from mgpu.model.errors import BadObject
from mgpu.model.ledger import Share
from mgpu.model.node_slices import NodeSlices, Partitioning
from mgpu.model.slice_names import MIG, Slice
from playground import containers
from playground.containers import VISIBLE
from tests.builders import cards, state

SLICES = (Share("c", 104, type="mig-2g.20gb"), Share("c", 6, type="mig-1g.10gb"))
MPS_SHARE = Share("c", 3, type="gpu-4gb")


def cut(plan: int, spec: dict[int, dict[str, int]]) -> NodeSlices:
    return NodeSlices(MIG, Partitioning(spec, plan))


def test_describe_cards_names_what_was_free_before() -> None:
    before = (state(0, core=400, gib_used=60), state(1))
    shares = (Share("c", 0), Share("w", 1), Share("w", "GPU-n1-0"))
    assert containers.describe_cards(shares, before) == (
        "c on card 0 (60% and 20.0 GiB free before); w on cards 0 (60% and 20.0 GiB free before), 1 (idle before)"
    )


def test_describe_slices_names_the_start_of_mig_instances_only() -> None:
    assert containers.describe_slices(SLICES) == "c on 1g.10gb at 6 of card 0, 2g.20gb at 4 of card 1"
    assert containers.describe_slices((MPS_SHARE,)) == "c on 4gb of card 0"
    assert containers.describe_slices((Share("c", 0),)) == ""


def test_describe_plan_names_the_cards_that_changed() -> None:
    before, after = cut(4, {0: {"7g.80gb": 1}}), cut(5, {0: {"7g.80gb": 1}, 1: {"2g.20gb": 1, "1g.10gb": 5}})
    assert containers.describe_plan(before, after) == "5: card 1, not partitioned before, into 5 × 1g.10gb and 2g.20gb"
    later = containers.describe_plan(after, cut(6, {0: {"7g.80gb": 1}}))
    assert later == "6: card 1, 5 × 1g.10gb and 2g.20gb before, into nothing"
    assert containers.describe_plan(after, after) == "none: there were free slices"


def test_expected_cards_are_those_of_the_record() -> None:
    expected = containers.expected_cards((Share("c", 1), Share("c", 0), Share("d", "GPU-n1-1")), cards(2))
    assert expected == {"c": "GPU-n1-0,GPU-n1-1", "d": "GPU-n1-1"}
    with pytest.raises(BadObject, match="card 7"):
        containers.expected_cards((Share("c", 7),), cards(2))


def test_expected_slices_are_mig_devices_or_the_cards_of_mps_shares() -> None:
    uuids = {Slice(1, 4, "2g.20gb"): "MIG-b", Slice(0, 6, "1g.10gb"): "MIG-a"}
    assert containers.expected_slices(SLICES, uuids, cards(2)) == {"c": "MIG-a,MIG-b"}
    assert containers.expected_slices(SLICES, {}, cards(2)) == {"c": "missing"}
    assert containers.expected_slices((Share("c", 103, type="gpu-4gb"),), {}, cards(2)) == {"c": "GPU-n1-1"}


def test_differences_name_wrong_and_missing_containers() -> None:
    expected = {"c": "GPU-0", "d": "GPU-1"}
    assert containers.differences(expected, {name: {VISIBLE: uuid} for name, uuid in expected.items()}) == []
    wrong, missing = containers.differences(expected, {"c": {VISIBLE: "all"}})
    assert "GPU-0, and sees all" in wrong
    assert "sees None" in missing
