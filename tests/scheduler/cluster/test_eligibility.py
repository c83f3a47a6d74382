"""The exclusion codes of all cards agree with the engine's exclusions of each card."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mgpu.model.cards import CardState
from mgpu.model.gpu_requests import GpuRequest
from mgpu.model.pod_constraints import NO_CONSTRAINTS, Constraints
from scheduler.cluster.eligibility import Eligibility
from scheduler.engine.card_constraints import exclusions
from tests.builders import card
from tests.examples import examples

MODELS = ["A100-SXM4-80GB", "H100", "T4", ""]
those = st.lists(st.tuples(st.sampled_from(MODELS), st.sampled_from(["", "", "zxcvb"])), max_size=3)
steps = st.lists(st.tuples(st.integers(0, 5), those, st.integers(0, 2)), max_size=12)
lists = st.lists(st.sampled_from(["A100", "H100", "T4"]), max_size=2).map(tuple)
wished = st.builds(Constraints, st.just(""), lists, lists, st.sampled_from([(), ("GPU-0-0",), ("GPU-1-1", "GPU-9-9")]))


@given(steps, st.lists(wished, min_size=1, max_size=3))
@examples(40)
def test_property_codes_stand_for_the_exclusions_of_the_engine(
    steps: list[tuple[int, list[tuple[str, str]], int]], several: list[Constraints]
) -> None:
    eligibility = Eligibility()
    rows: dict[int, list[CardState]] = {}
    for row, those, asked in steps:
        cards = [
            CardState(replace(card(i), uuid=f"GPU-{row}-{i}", model=model), gpuid=gpuid)
            for i, (model, gpuid) in enumerate(those)
        ]
        rows[row] = cards
        eligibility.put(row, cards)
        constraints = several[asked % len(several)]
        codes = eligibility.exclusion_codes(constraints)
        if codes is None:
            assert not constraints.limits_cards
            assert not any(state.gpuid for held in rows.values() for state in held)
            continue
        for at, held in rows.items():
            said = [eligibility.exclusions[code] if code else None for code in codes[at, : len(held)].tolist()]
            assert said == exclusions(GpuRequest("mgpu", (), constraints=constraints), held)
            assert not codes[at, len(held) :].any()


def test_codes_of_rows_without_cards_are_zero() -> None:
    eligibility, constraints = Eligibility(), Constraints(models=("H100",))
    eligibility.put(0, [CardState(card(0))])
    assert eligibility.exclusion_codes(NO_CONSTRAINTS) is None
    eligibility.put(7, [])
    eligibility.drop(0)
    codes = eligibility.exclusion_codes(constraints)
    assert codes is not None
    assert len(codes) >= 8
    assert not np.any(codes)


def test_eligibility_forgets_models_without_cards() -> None:
    """An agent can report another model with each update of its Device."""
    eligibility = Eligibility()
    eligibility.put(1, [CardState(card(0))])
    for i in range(10_000):
        eligibility.put(2, [CardState(replace(card(0), model=f"model-{i}"))])
        if i % 100 == 0:
            codes = eligibility.exclusion_codes(Constraints(models=("A100",)))
            assert codes is not None
            found = codes[:3, 0].tolist()
            assert found[:2] == [0, 0]
            assert eligibility.exclusions[found[2]].reason == f"model model-{i} not among card-models"
    assert len(eligibility._models) < 100
    assert len(eligibility.exclusions) < 5_000


def test_exclusion_codes_of_an_earlier_call_keep_their_meaning() -> None:
    eligibility = Eligibility()
    eligibility.put(1, [CardState(replace(card(0), model="T4"))])
    exclusions, found = eligibility.exclusions, eligibility.exclusion_codes(Constraints(models=("first",)))
    assert found is not None
    code = int(found[1, 0])
    later = set()
    for i in range(5_000):
        eligibility.put(1, [CardState(replace(card(0), model=f"T4-{i}"))])
        codes = eligibility.exclusion_codes(Constraints(models=("H100",)))
        assert codes is not None
        later.add(int(codes[1, 0]))
    assert exclusions[code].reason == "model T4 not among card-models"
    assert code not in later  # A result cached with this code must not be found for another reason.
