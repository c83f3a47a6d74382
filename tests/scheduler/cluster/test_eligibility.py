"""Codes of all nodes' cards, kept up to date, are what the wishes say of each card."""

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
@examples(200)
def test_property_codes_are_what_the_engine_says(
    steps: list[tuple[int, list[tuple[str, str]], int]], several: list[Constraints]
) -> None:
    kept = Eligibility()
    rows: dict[int, list[CardState]] = {}
    for row, those, asked in steps:
        cards = [
            CardState(replace(card(i), uuid=f"GPU-{row}-{i}", model=model), gpuid=gpuid)
            for i, (model, gpuid) in enumerate(those)
        ]
        rows[row] = cards
        kept.put(row, cards)
        constraints = several[asked % len(several)]
        codes = kept.exclusion_codes(constraints)
        if codes is None:
            assert not constraints.limits_cards
            assert not any(state.gpuid for held in rows.values() for state in held)
            continue
        for at, held in rows.items():
            said = [kept.exclusions[code] if code else None for code in codes[at, : len(held)].tolist()]
            assert said == exclusions(GpuRequest("mgpu", (), constraints=constraints), held)
            assert not codes[at, len(held) :].any()


def test_a_row_without_cards_has_codes_too_and_a_dropped_one_none() -> None:
    kept, constraints = Eligibility(), Constraints(models=("H100",))
    kept.put(0, [CardState(card(0))])
    assert kept.exclusion_codes(NO_CONSTRAINTS) is None
    kept.put(7, [])
    kept.drop(0)
    codes = kept.exclusion_codes(constraints)
    assert codes is not None
    assert len(codes) >= 8
    assert not np.any(codes)
