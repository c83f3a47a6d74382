"""The shortlist has the nodes with the best scores, and pods with preferences of their own get none."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.decisions.shortlist import best, has_preferences

PREFERRED: dict[str, Any] = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1}]}
REQUIRED: dict[str, Any] = {"requiredDuringSchedulingIgnoredDuringExecution": {}}


@given(st.lists(st.integers(0, 10), max_size=30), st.integers(1, 12))
def test_shortlist_has_the_highest_scores_in_the_order_of_the_call(scores: list[int], count: int) -> None:
    names = [f"n{i}" for i in range(len(scores))]
    found = best(names, scores, count)
    first = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]
    assert found == [names[i] for i in sorted(first)]


@pytest.mark.parametrize(
    ("spec", "prefers"),
    [
        ({}, False),
        ({"affinity": {"nodeAffinity": REQUIRED, "podAffinity": {}}}, False),
        ({"topologySpreadConstraints": [{"whenUnsatisfiable": "DoNotSchedule"}]}, False),
        ({"affinity": None, "topologySpreadConstraints": None}, False),
        ({"affinity": {"nodeAffinity": REQUIRED | PREFERRED}}, True),
        ({"affinity": {"podAffinity": PREFERRED}}, True),
        ({"affinity": {"podAntiAffinity": PREFERRED}}, True),
        ({"topologySpreadConstraints": [{}, {"whenUnsatisfiable": "ScheduleAnyway"}]}, True),
    ],
)
def test_preferences_are_preferred_affinity_and_soft_spread(spec: dict[str, Any], prefers: bool) -> None:
    assert has_preferences({"spec": spec}) is prefers
