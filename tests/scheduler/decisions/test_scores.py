"""Nodes and cards by judgement: the live scheduler and the experiment choose the same."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu.model.compute_resources import CpuMemory
from mgpu.model.device_object import write_device
from mgpu.model.gpu_requests import Placement
from mgpu.model.pods import Node
from mgpu.settings import Settings, load_settings
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.forecast import LEARNING_POLICIES
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.cluster.reservations import Reservation
from scheduler.decisions import scores
from scheduler.decisions.scores import Ranking
from scheduler.engine.learning.node_board import UNFIT, Judge, NodeBoard, extender_scores
from scheduler.engine.learning.shapes import Ints, NodeClass, NodeRows, Shape
from scheduler.engine.node_assessment import Foresight, assess
from tests import builders as b
from tests.examples import examples

INDEX = "vke.volcengine.com/gpu-index-container-c"


def settings(policy: str) -> Settings:
    return load_settings(f"nodePolicy: {policy}\ncardPolicy: {policy}")


def a_pod(name: str, core: int, cpu: int, *, on: str = "", cards: str = "") -> dict[str, Any]:
    record = {"vke.volcengine.com/assumed": "true", INDEX: cards} if on else {}
    raw = b.pod(name, b.container("c", core, None if core >= 100 else 256), annotations=record, node=on)
    raw["spec"]["containers"][0]["resources"]["requests"]["cpu"] = str(cpu)
    raw["metadata"]["resourceVersion"] = "1"
    return raw


def a_cluster(held: Sequence[Sequence[Sequence[int]]], policy: str, seen: Sequence[tuple[int, int]]) -> ClusterCache:
    """Nodes n0, n1, … with cards that hold so many percent each; pods (core, cpu) that wait. All of them are learnt."""
    state = ClusterCache(settings(policy))
    for i, cards in enumerate(held):
        state.node_changed(b.node(f"n{i}"))
        state.device_changed(write_device(Node(f"n{i}"), "", b.cards(len(cards), node=f"n{i}")))
    for i, (core, cpu) in enumerate(seen):
        state.pod_changed(a_pod(f"waits-{i}", core, cpu))
    for i, cards in enumerate(held):
        for j, cores in enumerate(cards):
            for k, core in enumerate(cores):
                state.pod_changed(a_pod(f"runs-{i}-{j}-{k}", core, 4, on=f"n{i}", cards=str(j)))
    state.forecast.refresh()
    return state


def a_ranking(state: ClusterCache, policy: str) -> Ranking:
    ranking = Ranking(state, settings(policy))
    ranking.refresh()
    return ranking


def known(state: ClusterCache, core: int, cpu: int) -> GpuPod:
    state.pod_changed(a_pod("asked", core, cpu))
    found = state.gpu_pod("uid-asked")
    assert found is not None
    return found


held_on_a_card = st.lists(st.sampled_from([10, 25, 50]), max_size=2)
clusters = st.lists(st.lists(held_on_a_card, min_size=1, max_size=3), min_size=1, max_size=4)
sizes = st.sampled_from([(10, 1), (25, 8), (50, 30), (75, 2), (100, 8), (200, 40)])


@pytest.mark.parametrize("policy", LEARNING_POLICIES)
@given(held=clusters, seen=st.lists(sizes, min_size=1, max_size=6), asked=sizes)
@examples(9)
def test_property_simulation_and_scheduler_choose_the_same_node(
    policy: str, held: list[list[list[int]]], seen: list[tuple[int, int]], asked: tuple[int, int]
) -> None:
    state = a_cluster(held, policy, seen)
    pod, names = known(state, *asked), [f"n{i}" for i in range(len(held))]
    judge = state.forecast.judges[policy]
    board = NodeBoard()
    for i, cards in enumerate(held):
        kind = NodeClass(64_000, 256 * b.GIB, len(cards), "A100-SXM4-80GB", 80 * b.GIB)
        cpu = 64_000 - 4000 * sum(map(len, cards))
        board.put(i, kind, cpu, 256 * b.GIB, [1000 - 10 * sum(cores) for cores in cards])
    core, cpu = asked
    shape = Shape(1000 * cpu, 0, max(1, core // 100), min(10 * core, 1000), 0 if core >= 100 else 256 << 20)
    keys = board.keys(judge, shape)
    row = int(np.argmax(keys))
    scores = a_ranking(state, policy).points(pod, names)
    if keys[row] == UNFIT:
        assert scores is None
        return
    assert scores is not None
    assert (scores.index(10), scores.count(10)) == (row, 1)
    view = state.node_snapshot(names[row], "uid-asked")
    assert view.node is not None
    assert pod.request is not None
    foresight = Foresight({policy: judge}, view.free_resources, pod.pod.cpu_memory)
    found = assess(pod.request, view.node, view.cards, settings(policy), foresight)
    assert isinstance(found, Placement)
    assert found.cards("c") == judge.cards(board.rows([row]), shape)


def test_scores_name_exactly_one_best_node() -> None:
    keys = np.array([5, 9, UNFIT, 9, 0, 8])
    assert extender_scores(["f", "e", "d", "c", "b", "a"], keys) == [2, 4, 0, 10, 0, 3]
    assert extender_scores(["b", "a"], np.array([3, 3])) == [4, 10]
    assert extender_scores(["b", "a"], np.array([UNFIT, -(2**61)])) == [0, 10]
    assert extender_scores(["b", "a"], np.array([UNFIT, UNFIT])) == [0, 0]


@pytest.mark.parametrize("policy", LEARNING_POLICIES)
def test_changed_nodes_alone_are_scored_again(policy: str) -> None:
    state = a_cluster([[[50], []], [[], []], [[25], [25]]], policy, [(50, 8), (100, 8)])
    ranking, names = a_ranking(state, policy), ["n0", "n1", "n2", "gone"]
    pod = known(state, 50, 8)
    changes: tuple[Callable[[], None], ...] = (
        lambda: None,
        lambda: state.pod_changed(a_pod("more", 50, 8, on="n0", cards="0")),
        lambda: state.pod_changed(b.pod("cpu", {"name": "c", "resources": {"requests": {"cpu": "60"}}}, node="n1")),
        lambda: state.node_gone(b.node("n0")),
        lambda: state.node_changed(b.node("n0")),
        lambda: state.pod_gone(a_pod("more", 50, 8, on="n0", cards="0")),
    )
    for change in changes:
        change()
        found = ranking.points(pod, names)
        state._snapshots._changed.update(names)  # a new ranking has no nodes yet
        assert found == a_ranking(state, policy).points(pod, names)


def test_own_reservation_does_not_change_the_score() -> None:
    state = a_cluster([[[]], [[50]]], "fgd", [(75, 8)])
    pod = known(state, 75, 8)
    view = state.node_snapshot("n0", "uid-asked")
    assert view.node is not None
    assert pod.request is not None
    placement = Placement((("c", (0,)),))
    decision = Reservation("uid-asked", "default", "asked", "n0", pod.request, placement, {}, CpuMemory(8000, 0))
    assert state.reservations.reserve(decision, view.version)
    assert a_ranking(state, "fgd").points(pod, ["n0", "n1"]) == [10, 0]


def test_nodes_with_shared_card_of_spread_group_score_last() -> None:
    """By the judge alone the half-full card is the better one."""
    state = a_cluster([[[]], [[]]], "fgd", [(100, 8), (50, 8)])
    group = {"mgpu.io/spread-group": "workers"}
    for name, on in (("first", "n0"), ("second", "")):
        raw = a_pod(name, 50, 8, on=on, cards="0")
        raw["metadata"]["annotations"].update(group)
        state.pod_changed(raw)
    pod, alone = state.gpu_pod("uid-second"), known(state, 50, 8)
    assert pod is not None
    ranking = a_ranking(state, "fgd")
    assert ranking.points(alone, ["n0", "n1"]) == [10, 0]
    assert ranking.points(pod, ["n0", "n1"]) == [0, 10]
    assert ranking.points(pod, ["n0"]) == [10]


def test_new_judge_scores_all_changes_since_the_last() -> None:
    state = a_cluster([[[50], []], [[], []], [[25], [25]]], "fgd", [(50, 8)])
    ranking, names = a_ranking(state, "fgd"), ["n0", "n1", "n2"]
    pod = known(state, 50, 8)
    ranking.points(pod, names)
    before = state.forecast.judges["fgd"]
    for i in range(20):
        state.pod_changed(a_pod(f"whole-{i}", 100, 8))
    state.forecast.refresh()
    assert state.forecast.judges["fgd"] is not before
    ranking.refresh()
    state.pod_changed(a_pod("more", 50, 8, on="n0", cards="0"))
    found = ranking.points(pod, names)
    state._snapshots._changed.update(names)
    assert found == a_ranking(state, "fgd").points(pod, names)


class Interrupted:
    """A judge in whose calls something else happens. The ranking's lock must be free then."""

    def __init__(self, judge: Judge, ranking: Ranking, event: Callable[[], object]) -> None:
        self._judge, self._ranking, self._event = judge, ranking, event

    def keys(self, rows: NodeRows, shape: Shape) -> Ints:
        assert not self._ranking._lock.locked()
        self._event()
        return self._judge.keys(rows, shape)

    def cards(self, rows: NodeRows, shape: Shape) -> tuple[int, ...]:
        return self._judge.cards(rows, shape)

    def rate_changes(self, before: NodeRows, after: NodeRows) -> Ints:
        return self._judge.rate_changes(before, after)


@pytest.mark.parametrize("policy", LEARNING_POLICIES)
def test_nodes_that_change_while_they_are_rated_are_rated_again(policy: str) -> None:
    state = a_cluster([[[50], []], [[], []], [[25], [25]]], policy, [(50, 8), (100, 8)])
    ranking, names = a_ranking(state, policy), ["n0", "n1", "n2"]
    pod, other = known(state, 50, 8), state.gpu_pod("uid-waits-1")
    assert other is not None

    def more_pods_and_calls() -> None:
        ranking._judge = judge
        state.pod_changed(a_pod("more", 50, 8, on="n0", cards="0"))
        ranking.points(other, names)

    judge = state.forecast.judges[policy]
    ranking._judge = Interrupted(judge, ranking, more_pods_and_calls)
    assert ranking.points(pod, names) is not None
    ranking._judge = judge
    found = ranking.points(pod, names)
    state._snapshots._changed.update(names)
    assert found == a_ranking(state, policy).points(pod, names)


def test_changed_nodes_are_taken_in_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    state = a_cluster([[[50]], [[]], [[25]], [[]], [[75]]], "fgd", [(50, 8)])
    pod, names = known(state, 50, 8), [f"n{i}" for i in range(5)]
    at_once = a_ranking(state, "fgd").points(pod, names)
    monkeypatch.setattr(scores, "NODES_PER_LOCK", 2)
    state._snapshots._changed.update(names)
    assert a_ranking(state, "fgd").points(pod, names) == at_once
    state._snapshots._changed.update(names)
    assert [len(state.take_changed_nodes(2)) for _ in range(4)] == [2, 2, 1, 0]
