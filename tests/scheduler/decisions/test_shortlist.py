"""The shortlist has the nodes with the best scores, and pods with preferences of their own get none."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu.settings import load_settings
from scheduler.cluster.gpu_pods import GpuPod, read_gpu_pod
from scheduler.decisions.effort_budgets import CallerGone, never
from scheduler.decisions.filter import Filtered
from scheduler.decisions.shortlist import Shortlists, best, has_preferences
from tests import builders as b
from tests.clock import Clock

PREFERRED: dict[str, Any] = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1}]}
REQUIRED: dict[str, Any] = {"requiredDuringSchedulingIgnoredDuringExecution": {}}


@given(st.lists(st.integers(0, 10), max_size=30), st.integers(1, 12))
def test_shortlist_has_the_highest_scores_in_the_order_of_the_call(scores: list[int], count: int) -> None:
    first = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]
    assert best(scores, count) == sorted(first)


class Scoring:
    """Scores nodes by their names, and counts the calls."""

    def __init__(self) -> None:
        self.calls = 0

    def scores(self, _: GpuPod, names: list[str], __: CallerGone) -> list[int]:
        self.calls += 1
        return [int(name) for name in names]

    def scores_of_passed(self, pod: GpuPod, found: Filtered, gone: CallerGone) -> list[int]:
        return self.scores(pod, found.passed, gone)


def test_scores_of_a_shortlist_are_computed_once() -> None:
    scoring: Any = Scoring()
    clock = Clock()
    shortlists = Shortlists(scoring, 2, clock)
    pod = read_gpu_pod(b.share("p"), load_settings())
    assert pod is not None
    for passed, wait, calls in (["3", "1", "2"], 0.0, 1), (["3", "1", "2"], 2.0, 2), (["2", "1"], 0.0, 1):
        scoring.calls = 0
        names = shortlists.choose(pod, {}, Filtered(passed), never)
        clock.now += wait
        assert shortlists.scores(pod, names, never) == [int(name) for name in names]
        assert scoring.calls == calls
    names = shortlists.choose(pod, {}, Filtered(["3", "1", "2"]), never)
    assert shortlists.scores(pod, ["1", "2"], never) == [1, 2]


def test_forgotten_pods_are_scored_again() -> None:
    scoring: Any = Scoring()
    shortlists = Shortlists(scoring, 1)
    pods = [read_gpu_pod(b.share(f"p{i}"), load_settings()) for i in range(100)]
    for pod in pods:
        assert pod is not None
        assert shortlists.choose(pod, {}, Filtered(["1", "2"]), never) == ["2"]
    scoring.calls = 0
    assert [shortlists.scores(pod, ["2"], never) for pod in (pods[0], pods[99]) if pod] == [[2], [2]]
    assert scoring.calls == 1


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
