"""Calls, namespaces and long searches are limited, so that hard pods do not delay others."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mgpu.model.device_object import write_device
from mgpu.model.errors import RetryLater
from mgpu.model.gpu_requests import ContainerRequest, GpuRequest
from mgpu.model.pods import Node, Pod
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.cluster.reservations import Reservation
from scheduler.decisions.decider import Decider
from scheduler.decisions.effort_budgets import (
    ALLOWANCE,
    DEBT,
    FREE,
    FULL_CALL,
    REFILL,
    REFILL_OF_ALL,
    SECOND,
    SHORT_CALL,
    Call,
    EffortBudgets,
    EffortExceeded,
)
from scheduler.decisions.filter import Filter
from scheduler.engine import FULL, LEAST, SHORT
from tests import builders as b
from tests.clock import Clock
from tests.scheduler.fake import SETTINGS, FakeApi

MIB = 1 << 20
SEVERAL = GpuRequest("mgpu", (ContainerRequest("a"), ContainerRequest("b")))
SINGLE = GpuRequest("mgpu", (ContainerRequest("a"),))
MOST_NODE = FULL.search + 3 * SHORT.search + FULL.fallback + SHORT.fallback + 100_000
"""What one node takes at most, with what is linear."""


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def budgets(clock: Clock) -> EffortBudgets:
    return EffortBudgets(clock, lambda _: None)


def spend(budgets: EffortBudgets, namespace: str, steps: int) -> None:
    with budgets.call(namespace, SEVERAL) as call:
        call.effort.spend(steps)


@contextmanager
def asked(budgets: EffortBudgets, namespace: str = "x", request: GpuRequest = SEVERAL) -> Iterator[Call]:
    with budgets.call(namespace, request) as call:
        yield call


def test_call_gets_full_then_short_then_no_searches(budgets: EffortBudgets) -> None:
    with asked(budgets) as call:
        assert call.next_limits() is FULL
        call.effort.spend(FULL_CALL)
        assert call.next_limits() is SHORT
        call.effort.spend(SHORT_CALL)
        assert call.next_limits() is None
        with pytest.raises(EffortExceeded):
            call.require_limits()


def test_namespace_without_allowance_gets_short_searches(
    budgets: EffortBudgets,
) -> None:
    spend(budgets, "x", ALLOWANCE + FREE)
    with asked(budgets) as call:
        assert call.next_limits() is SHORT
    spend(budgets, "x", DEBT + FREE)
    with asked(budgets) as call:
        assert call.next_limits() is LEAST
        call.effort.spend(SECOND // 1000)
        assert call.next_limits() is None


def test_allowance_of_other_namespaces_is_untouched(budgets: EffortBudgets) -> None:
    spend(budgets, "x", 10 * SECOND)
    with asked(budgets, "y") as call:
        assert call.next_limits() is FULL


def test_allowance_refills_with_time(budgets: EffortBudgets, clock: Clock) -> None:
    spend(budgets, "x", ALLOWANCE + FREE)
    clock.now += 1
    assert budgets.remaining("x") == pytest.approx(REFILL * SECOND)
    clock.now += 1 / REFILL
    assert budgets.remaining("x") == ALLOWANCE


def test_refill_of_all_namespaces_together_is_limited(budgets: EffortBudgets, clock: Clock) -> None:
    for i in range(50):
        spend(budgets, f"n{i}", ALLOWANCE + FREE)
    clock.now += 1
    assert sum(budgets.remaining(f"n{i}") for i in range(50)) == pytest.approx(REFILL_OF_ALL * SECOND)


def test_small_calls_and_single_containers_are_not_charged(budgets: EffortBudgets) -> None:
    for _ in range(10):
        spend(budgets, "x", FREE)
    with asked(budgets, request=SINGLE) as call:
        call.effort.spend(10 * SECOND)
        assert call.next_limits() is FULL
    assert budgets.remaining("x") == ALLOWANCE


def test_search_ends_when_its_caller_has_gone(budgets: EffortBudgets) -> None:
    with pytest.raises(RetryLater, match="has given up"), budgets.call("x", SEVERAL, lambda: True) as call:
        call.effort.spend(FREE)
    with asked(budgets, "y") as call:  # other calls can run
        call.effort.spend(2 * FREE)


def test_long_calls_run_one_at_a_time_without_delaying_short_calls(budgets: EffortBudgets) -> None:
    running, most, done = 0, 0, []
    lock = threading.Lock()

    def work(steps: int) -> None:
        nonlocal running, most
        with budgets.call("x", SEVERAL) as call:
            call.effort.spend(steps)
            if steps > FREE:
                with lock:
                    running += 1
                    most = max(most, running)
                threading.Event().wait(0.01)
                with lock:
                    running -= 1
            done.append(steps)

    with asked(budgets, "y") as call:
        call.effort.spend(2 * FREE)  # is the long call that runs
        long = [threading.Thread(target=work, args=(2 * FREE,)) for _ in range(4)]
        for thread in long:
            thread.start()
        work(FREE // 2)
        assert done == [FREE // 2]
    for thread in long:
        thread.join(10)
    assert (most, len(done)) == (1, 5)


def test_long_calls_beyond_the_limit_are_rejected(budgets: EffortBudgets) -> None:
    ended: list[str] = []
    gone = threading.Event()

    def work() -> None:
        try:
            with budgets.call("x", SEVERAL, gone.is_set) as call:
                call.effort.spend(2 * FREE)
        except EffortExceeded:
            ended.append("busy")
        except RetryLater:
            ended.append("gone")

    with asked(budgets, "y") as call:
        call.effort.spend(2 * FREE)
        threads = [threading.Thread(target=work) for _ in range(12)]
        for thread in threads:
            thread.start()
        until = time.monotonic() + 10
        while ended.count("busy") < 4 and time.monotonic() < until:
            threading.Event().wait(0.01)
        gone.set()
        for thread in threads:
            thread.join(10)
    assert (ended.count("busy"), ended.count("gone")) == (4, 8)


# The filter and the decision, with pods that take long.


def pod(name: str, request: GpuRequest, namespace: str = "default") -> GpuPod:
    return GpuPod(Pod(namespace, name, f"uid-{name}"), request)


def unsolvable(count: int = 30, cards: int = 8, seed: int = 0) -> GpuRequest:
    """By the sums it fits the cards of `packed`, with hardly anything left: no search finds how."""
    step = 3 + 2 * seed
    sizes = [step * (1 + i % 7) * 100 + step * i for i in range(count)]
    factor = (80 * 1024 * cards - 600) / sum(sizes)
    return GpuRequest(
        "mgpu", tuple(ContainerRequest(f"c{i}", 1, 1, int(s * factor) * MIB) for i, s in enumerate(sizes))
    )


def packed(nodes: int, cards: int = 8) -> ClusterCache:
    """Nodes of which no two are alike."""
    state = ClusterCache(SETTINGS)
    for i in range(nodes):
        name = f"n{i}"
        state.node_changed(b.node(name))
        state.device_changed(write_device(Node(name), "", b.cards(cards, node=name)))
        record = {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": "0"}
        raw = b.share(f"held-{i}", 1, 256 + i, annotations=record, node=name)
        state.pod_changed({**raw, "metadata": {**raw["metadata"], "resourceVersion": "1"}})
    return state


def test_filter_effort_of_hard_pod_is_limited_for_any_number_of_nodes(clock: Clock) -> None:
    state, budgets = packed(40), EffortBudgets(clock, lambda _: None)
    filter_ = Filter(state, SETTINGS, budgets=budgets)
    found = filter_.filter(pod("hard", unsolvable()), [f"n{i}" for i in range(40)])
    assert not found.passed
    assert not found.hopeless
    assert sum("not examined" in why for why in found.failed.values()) > 20
    assert all("not proven" in why for why in found.failed.values())
    assert ALLOWANCE - budgets.remaining("default") < FULL_CALL + SHORT_CALL + MOST_NODE


def test_filter_of_hard_pod_continues_with_unexamined_nodes(clock: Clock) -> None:
    budgets = EffortBudgets(clock, lambda _: None)
    filter_, names = Filter(packed(6), SETTINGS, budgets=budgets), [f"n{i}" for i in range(6)]
    unseen = []
    for _ in range(3):
        found = filter_.filter(pod("hard", unsolvable()), names)
        unseen.append(sum("not examined" in why for why in found.failed.values()))
        clock.now += 1000
    assert unseen == sorted(unseen, reverse=True)
    assert unseen[-1] == 0
    filter_.filter(pod("hard", unsolvable()), names)
    assert budgets.remaining("default") == ALLOWANCE


def test_hard_pods_do_not_change_decisions_for_other_namespaces(clock: Clock) -> None:
    """16 pods that each took minutes: in all they take what one namespace may take, and then next to nothing."""
    state, budgets = packed(8), EffortBudgets(clock, lambda _: None)
    filter_, names = Filter(state, SETTINGS, budgets=budgets), [f"n{i}" for i in range(8)]
    ordinary = pod(
        "ordinary",
        GpuRequest("mgpu", (ContainerRequest("a", 1, 100, 900), ContainerRequest("b", 2, 100, 700))),
        "other",
    )
    alone = Filter(state, SETTINGS).filter(ordinary, names)
    for i in range(16):
        filter_.filter(pod(f"hard-{i}", unsolvable(seed=i)), names)
    assert -2 * DEBT - MOST_NODE < budgets.remaining("default") < 0
    assert filter_.filter(ordinary, names) == alone
    assert alone.passed == names
    assert budgets.remaining("other") == ALLOWANCE


def test_decision_that_exceeds_its_effort_raises_effort_exceeded(clock: Clock) -> None:
    state, budgets = packed(1), EffortBudgets(clock, lambda _: None)
    decider = Decider(state, FakeApi(), SETTINGS, budgets)  # type: ignore[arg-type]
    spend(budgets, "default", ALLOWANCE + FREE)
    with pytest.raises(EffortExceeded, match="not proven"):
        decider.decide(pod("hard", unsolvable()), "n0")
    assert state.reservation("uid-hard") is None


def test_decision_whose_caller_has_gone_reserves_nothing(clock: Clock) -> None:
    state, budgets = packed(1), EffortBudgets(clock, lambda _: None)
    decider = Decider(state, FakeApi(), SETTINGS, budgets)  # type: ignore[arg-type]
    with pytest.raises(RetryLater, match="has given up"):
        decider.decide(pod("hard", unsolvable()), "n0", gone=lambda: True)
    assert state.reservation("uid-hard") is None


THIRTY_CONTAINERS = GpuRequest(
    "mgpu", tuple(ContainerRequest(f"c{i}", 1, 10 + i, (900 + 37 * i) * MIB) for i in range(30)), 16
)


def test_filter_for_thirty_containers_on_many_different_nodes_stays_within_its_budget(clock: Clock) -> None:
    state, budgets = packed(60), EffortBudgets(clock, lambda _: None)
    names = [f"n{i}" for i in range(60)]
    Filter(state, SETTINGS, budgets=budgets).filter(pod("hard", THIRTY_CONTAINERS), names)
    assert 0 < ALLOWANCE - budgets.remaining("default") < FULL_CALL + SHORT_CALL + MOST_NODE


@pytest.mark.parametrize("spent", [0, ALLOWANCE + FREE])
def test_node_that_passes_a_short_filter_gets_a_decision(clock: Clock, spent: int) -> None:
    """Many different containers on cards with free capacity: a placement is found, but not proven to be the best."""
    state, budgets = packed(3), EffortBudgets(clock, lambda _: None)
    spend(budgets, "default", spent)
    found = Filter(state, SETTINGS, budgets=budgets).filter(pod("hard", THIRTY_CONTAINERS), ["n0", "n1", "n2"])
    assert found.passed == ["n0", "n1", "n2"]
    decision = Decider(state, FakeApi(), SETTINGS, budgets).decide(pod("hard", THIRTY_CONTAINERS), "n1")  # type: ignore[arg-type]
    assert isinstance(decision, Reservation)
    assert not decision.placement.proven
