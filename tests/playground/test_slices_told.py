"""What happened to a pod that asked for slices, in words."""

from mgpu.model.ledger import Share
from mgpu.model.partitioning import NodeSlices, Partitioning
from mgpu.model.slices import MIG, MPS, Slice
from playground import slices_told
from tests.builders import cards

TWO = (Share("c", 104, type="mig-2g.20gb"), Share("c", 6, type="mig-1g.10gb"))


def cut(plan: int, spec: dict[int, dict[str, int]]) -> NodeSlices:
    return NodeSlices(MIG, Partitioning(spec, plan))


def test_where_slices_lie_and_shares_lie_nowhere() -> None:
    assert slices_told.given(TWO) == "c on 1g.10gb at 6 of card 0, 2g.20gb at 4 of card 1"
    assert slices_told.given((Share("c", 3, type="gpu-4gb"),)) == "c on 4gb of card 0"
    assert slices_told.given((Share("c", 0),)) == ""


def test_what_a_plan_changes() -> None:
    before, after = cut(4, {0: {"7g.80gb": 1}}), cut(5, {0: {"7g.80gb": 1}, 1: {"2g.20gb": 1, "1g.10gb": 5}})
    assert slices_told.planned(before, after) == "5: card 1, not cut before, into 5 × 1g.10gb and 2g.20gb"
    assert slices_told.planned(after, cut(6, {0: {"7g.80gb": 1}})) == (
        "6: card 1, 5 × 1g.10gb and 2g.20gb before, into nothing"
    )
    assert slices_told.planned(after, after) == "none: there were free slices"


def test_what_a_container_must_see() -> None:
    devices = {Slice(1, 4, "2g.20gb"): "MIG-b", Slice(0, 6, "1g.10gb"): "MIG-a"}
    assert slices_told.visible(TWO, devices, cards(2), MIG) == {"c": "MIG-a,MIG-b"}
    assert slices_told.visible(TWO, {}, cards(2), MIG) == {"c": "one that is not there"}
    assert slices_told.visible((Share("c", 103, type="gpu-4gb"),), {}, cards(2), MPS) == {"c": "GPU-n1-1"}
