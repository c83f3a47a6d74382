"""Pods that request slices of many sizes delay no others: each search uses the effort of the call that it serves."""

from random import Random
from typing import Any

import pytest

from mgpu.model.errors import RetryLater
from mgpu.model.gpu_requests import Rejection
from mgpu.model.slice_names import Slice
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.decisions.effort_budgets import ALLOWANCE, DEBT, FULL_CALL, SHORT_CALL, EffortBudgets
from scheduler.decisions.preemption import Victims
from scheduler.engine import FULL, LEAST, Effort
from scheduler.engine.effort import Budget, Exhausted
from scheduler.engine.partitioning import slice_allocation
from scheduler.engine.partitioning.mps_shares import MpsCard
from scheduler.engine.partitioning.partition_plan import PartitionableCards, can_offer, plan_cards
from tests import builders as b
from tests.clock import Clock
from tests.scheduler.fake import FakeApi, Replica
from tests.scheduler.partitioning.cluster import MPS, Agent, cluster, submit

HARD = {"12gb": 7, "35gb": 3, "44gb": 7, "14gb": 2, "34gb": 4, "54gb": 6}
"""Of an attack: on most nodes where some slices are in use the search for these takes half a second."""
NODES = [f"n{i}" for i in range(8)]


def pod(name: str, wanted: dict[str, int]) -> dict[str, Any]:
    kinds = [size for size, count in wanted.items() for _ in range(count)]
    containers = (
        {"name": f"c{i}", "resources": {"limits": {f"nvidia.com/gpu-{size}": "1"}}} for i, size in enumerate(kinds)
    )
    return b.pod(name, *containers)


def used(seed: int) -> list[Slice]:
    """What is in use of eight cards of 141 GiB."""
    random = Random(seed)
    return [Slice(card, j, f"{random.randint(1, 40)}gb") for card in range(8) for j in range(random.randint(0, 2))]


def node(seed: int = 1) -> PartitionableCards:
    slices = used(seed)
    cards = ((i, tuple((s.start, s.name) for s in slices if s.card == i)) for i in range(8))
    return PartitionableCards(MPS, tuple((i, MpsCard(141, places, ())) for i, places in cards))


@pytest.fixture(autouse=True)
def _no_answers_are_known() -> None:
    slice_allocation._cached.cache_clear()


@pytest.fixture
def hard() -> tuple[Replica, GpuPod]:
    """A pod of slices of many sizes, and nodes of which no two are alike."""
    api = FakeApi()
    for seed, name in enumerate(NODES):
        Agent(api, name, MPS, 8, 141).make(*used(seed), pod="other")
    replica = Replica(api)
    (known,) = submit(replica, pod("p", HARD))
    return replica, known


def rationed(replica: Replica) -> EffortBudgets:
    budgets = EffortBudgets(Clock(), lambda _: None)
    for part in (replica.filter, replica.preemption, replica.planning):
        part._budgets = budgets
    return budgets


def test_a_search_for_slices_of_many_sizes_takes_at_most_its_budget() -> None:
    effort = Effort()
    with pytest.raises(Exhausted):
        can_offer(node(), HARD, Budget(effort, 2_000))
    assert 0 < effort.spent <= 2_000


def test_a_search_that_has_ended_is_not_begun_again_with_no_more_steps() -> None:
    effort = Effort()
    for _ in range(3):
        with pytest.raises(Exhausted):
            can_offer(node(), HARD, Budget(effort, 2_000))
    assert effort.spent <= 2_000


def test_a_plan_whose_search_has_ended_is_rejected_without_proof() -> None:
    found = plan_cards(node(), [HARD], Budget(Effort(), 2_000))
    assert isinstance(found, Rejection)
    assert (found.proven, found.hopeless) == (False, False)
    assert "not proven" in str(found)


def test_a_pod_beside_the_first_one_takes_none_of_its_steps() -> None:
    alone, beside = Effort(), Effort()
    first = {"9gb": 1}
    plan_cards(node(), [first], Budget(alone, FULL.search))
    plan_cards(node(), [first, *[HARD] * 3], Budget(beside, FULL.search))
    assert beside.spent <= alone.spent + 8 * 500  # each card is cut once more for all of them


def test_an_ask_for_one_size_is_answered_without_any_steps() -> None:
    assert can_offer(node(), {"9gb": 4}, Budget(Effort(), 0))


def test_filter_of_slices_of_many_sizes_takes_at_most_the_steps_of_one_call(hard: tuple[Replica, GpuPod]) -> None:
    replica, known = hard
    budgets = rationed(replica)
    found = replica.filter.filter(known, NODES)
    assert not found.passed
    assert any("not proven" in reason for reason in found.failed.values())
    assert 0 < ALLOWANCE - budgets.remaining("default") <= FULL_CALL + SHORT_CALL + FULL.search


def test_filter_of_slices_of_a_namespace_in_debt_takes_hardly_any_steps(hard: tuple[Replica, GpuPod]) -> None:
    replica, known = hard
    budgets = rationed(replica)
    budgets._charge("default", ALLOWANCE + DEBT + 1)
    before = budgets.remaining("default")
    found = replica.filter.filter(known, NODES)
    assert set(found.failed) == set(NODES)
    assert before - budgets.remaining("default") <= LEAST.search


def test_filter_of_slices_whose_caller_has_gone_ends(hard: tuple[Replica, GpuPod]) -> None:
    replica, known = hard
    with pytest.raises(RetryLater):
        replica.filter.filter(known, NODES, lambda: True)


def test_preemption_for_slices_whose_caller_has_gone_ends(hard: tuple[Replica, GpuPod]) -> None:
    replica, known = hard
    proposed = dict.fromkeys(NODES, Victims(()))
    with pytest.raises(RetryLater):
        replica.preemption.choose(known, pod("p", HARD), proposed, lambda: True)


def test_a_plan_for_slices_is_charged_to_the_namespace_of_its_pod(hard: tuple[Replica, GpuPod]) -> None:
    replica, known = hard
    budgets = rationed(replica)
    replica.planning.request_plan(known, NODES)
    replica.planning.work()
    assert 0 < ALLOWANCE - budgets.remaining("default") <= FULL_CALL + SHORT_CALL + FULL.search


def test_a_pod_of_one_slice_gets_its_plan_although_its_namespace_is_in_debt() -> None:
    replica, agents = cluster(("n1", MPS, 2))
    rationed(replica)._charge("default", 10 * (ALLOWANCE + DEBT))
    (known,) = submit(replica, pod("p", {"9gb": 1}))
    assert replica.filter.filter(known, ["n1"]).repartitionable == ["n1"]
    replica.planning.work()
    assert agents["n1"].found.has_pending_plan
