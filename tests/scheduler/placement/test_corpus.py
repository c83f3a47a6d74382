"""The benchmark's corpus does not drift, and the search solves it well within its budget."""

import pytest

from bench.corpus import DIGESTS, cases, digest
from mgpu.model.asks import Placement
from scheduler.placement import FULL, Limits, place, policy_named


@pytest.mark.parametrize("shape", DIGESTS)
def test_the_corpus_is_the_committed_one(shape: tuple[int, int]) -> None:
    assert digest(cases(*shape, 100)) == DIGESTS[shape]


@pytest.mark.parametrize("policy", ["binpack", "spread"])
def test_eight_containers_on_sixteen_cards_are_proven_with_half_of_the_limit(policy: str) -> None:
    for case in cases(8, 16, 40):
        found = place(case.ask, case.cards, policy_named(policy, 20), limits=Limits(FULL.search // 2, FULL.fallback))
        assert not isinstance(found, Placement) or found.proven
