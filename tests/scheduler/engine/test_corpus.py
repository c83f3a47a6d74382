"""The benchmark's corpus does not drift, and the search solves it within its budget."""

import pytest

from bench.corpus import DIGESTS, cases, digest
from mgpu.model.gpu_requests import Placement
from mgpu.model.pods import Stage
from scheduler.engine import FULL, Limits, place, policy_named


@pytest.mark.parametrize("shape", DIGESTS)
def test_corpus_equals_the_committed_one(shape: tuple[int, int]) -> None:
    assert digest(cases(*shape, 100)) == DIGESTS[shape]


@pytest.mark.parametrize("policy", ["binpack", "spread"])
def test_place_of_eight_containers_on_sixteen_cards_is_proven(policy: str) -> None:
    """Within half of the limit, but for pods with init containers, of which the search compares what they hold too."""
    for case in cases(8, 16, 20):
        reuses = any(container.stage is Stage.INIT for container in case.request.containers)
        limits = FULL if reuses else Limits(FULL.search // 2, FULL.fallback)
        found = place(case.request, case.cards, policy_named(policy, 20), limits=limits)
        assert not isinstance(found, Placement) or found.proven
