"""A pod of every dialect gets its wishes: they reach the placement beside whatever it asks for."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu import dialects
from mgpu.model.cards import CardState
from mgpu.model.gpu_requests import GpuRequest, Placement, Rejection
from mgpu.model.groups import Group
from mgpu.model.pods import read_pod
from mgpu.settings import load_settings
from scheduler.engine import place, policy_named
from tests.builders import GIB, card
from tests.examples import examples
from tests.mgpu.dialects.contract import CASES, Case, Raw

SETTINGS, POLICY = load_settings(), policy_named("binpack", 20)
WEB = Group("spread-group", "default", "web")
EMPTY = [CardState(replace(card(i, 2**40 // GIB), model="H100" if i % 2 else "Tesla T4")) for i in range(40)]

WISHING = {name: case for name, case in CASES.items() if case.constraints}
every_dialect = pytest.mark.parametrize("case", WISHING.values(), ids=WISHING.keys())


def placed(raw: Raw, wished: dict[str, str], cards: list[CardState]) -> tuple[GpuRequest, Placement | Rejection]:
    meta = raw["metadata"]
    wishful = {**raw, "metadata": {**meta, "annotations": {**meta["annotations"], **wished}}}
    request = dialects.read_request(read_pod(wishful), SETTINGS)
    assert request is not None
    return request, place(request, cards, POLICY)


def taken(found: Placement | Rejection) -> set[int]:
    assert isinstance(found, Placement), str(found)
    return {index for _, cards in found.containers for index in cards}


@every_dialect
@given(data=st.data())
@examples(10)
def test_property_models_wanted_and_excluded(case: Case, data: st.DataObject) -> None:
    raw = data.draw(case.pods)
    for wished in ({"mgpu.io/card-models": "H100"}, {"mgpu.io/exclude-card-models": "T4"}):
        assert all(index % 2 for index in taken(placed(raw, wished, EMPTY)[1]))
    _, found = placed(raw, {"mgpu.io/card-models": "L40S"}, EMPTY)
    assert isinstance(found, Rejection)
    assert found.hopeless
    assert "not among card-models" in str(found)


@every_dialect
@given(data=st.data())
@examples(10)
def test_property_others_of_the_group_are_avoided(case: Case, data: st.DataObject) -> None:
    beside = [replace(state, groups=frozenset([WEB])) if state.card.index < 8 else state for state in EMPTY]
    _, found = placed(data.draw(case.pods), {"mgpu.io/spread-group": "web"}, beside)
    assert min(taken(found)) >= 8


@every_dialect
@given(data=st.data())
@examples(10)
def test_property_a_group_that_shares_a_card_gets_one(case: Case, data: st.DataObject) -> None:
    raw = data.draw(case.pods)
    bare = dialects.read_request(read_pod(raw), SETTINGS)
    assert bare is not None
    if all(container.cards == 1 for container in bare.containers):
        _, found = placed(raw, {"mgpu.io/same-card-group": "pair"}, EMPTY)
        assert isinstance(found, Rejection) or len(taken(found)) == 1
