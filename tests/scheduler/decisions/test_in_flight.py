"""The filter beside pods whose cards are not decided yet."""

import random
from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import orjson
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.strategies import DataObject, data, floats, sampled_from

from mgpu.kube import ApiError
from mgpu.model.errors import RetryLater
from mgpu.model.gpu_requests import Rejection
from scheduler.api.extender import Extender
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.decisions import in_flight, in_flight_filter
from scheduler.decisions.decider import Decider
from scheduler.decisions.effort_budgets import EffortExceeded, never
from tests import builders
from tests.scheduler.fake import FakeApi, Replica, admitted, cluster

PROFILES = ((20, 8192), (30, 16384), (50, 40960), (100, None))


def extended(api: FakeApi) -> tuple[Replica, Extender]:
    replica = Replica(api)
    api.admit = admitted(replica)
    process: Any = replica
    return replica, Extender(process)


def create(replica: Replica, *names: str, core: int = 100, mib: int | None = None) -> None:
    for name in names:
        replica.api.put("pods", builders.pod(name, builders.container("c", core, mib)))
    replica.deliver()


def pod(replica: Replica, name: str) -> GpuPod:
    found = replica.state.gpu_pod(f"uid-{name}")
    assert found is not None
    return found


def must_not_wait(_seconds: float) -> None:
    raise AssertionError("the filter waits")


def body(replica: Replica, name: str, nodes: list[str]) -> bytes:
    return orjson.dumps({"Pod": replica.api.pod(name), "NodeNames": nodes})


def nodes_of(replica: Replica, extender: Extender, name: str) -> list[str]:
    """Call `filter` as kube-scheduler does, with all nodes."""
    found: list[str] = extender.filter(body(replica, name, sorted(replica.api.nodes)))["NodeNames"]
    return found


def choose(replica: Replica, extender: Extender, name: str, rnd: random.Random) -> str | None:
    """Return the node that kube-scheduler chooses for a pod, or None if the pod fits nowhere."""
    passed = nodes_of(replica, extender, name)
    if len(passed) > 1:
        rows = extender.prioritize(body(replica, name, passed))
        best = max(row["Score"] for row in rows)
        passed = [row["Host"] for row in rows if row["Score"] == best]
    return rnd.choice(passed) if passed else None


def test_the_next_pod_gets_another_node_while_the_last_card_of_one_is_expected_to_be_taken() -> None:
    replica, extender = extended(cluster(("n1", 2), ("n2", 2)))
    create(replica, "a", "b", "other")
    replica.api.bind("other", "n2")
    replica.deliver()
    assert choose(replica, extender, "a", random.Random(0)) == "n2"
    assert nodes_of(replica, extender, "b") == ["n1"]


def test_several_pods_in_flight_count_together() -> None:
    replica, extender = extended(cluster(("n1", 1), ("n2", 1)))
    create(replica, "a", "b", "c", core=40, mib=1024)
    create(replica, "half", core=60, mib=1024)
    replica.api.bind("half", "n1")
    replica.deliver()
    for name in ("a", "b"):
        replica.flights.begin(pod(replica, name), ["n2"])
    assert nodes_of(replica, extender, "c") == ["n1"]


def test_a_node_that_is_left_out_leaves_the_scores_of_the_others() -> None:
    """The shortlist takes the scores from the filter's evaluation, which has the nodes that are left out, too."""
    replica, _ = extended(cluster(("n1", 1), ("n2", 1), ("n3", 2), ("n4", 4)))
    create(replica, "a", "b")
    replica.flights.begin(pod(replica, "a"), ["n2"])
    found = replica.in_flight.filter(pod(replica, "b"), sorted(replica.api.nodes))
    assert found.passed == ["n1", "n3", "n4"]
    assert replica.filter.scores_of_passed(pod(replica, "b"), found) == replica.filter.scores(
        pod(replica, "b"), found.passed
    )


def test_pods_that_are_bound_one_after_another_get_the_cards_that_they_get_without_pods_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cards_of_all() -> list[Any]:
        replica, extender = extended(cluster(("n1", 2), ("n2", 3), ("n3", 4)))
        found = []
        for i in range(24):
            core, mib = PROFILES[i % len(PROFILES)]
            create(replica, f"p{i}", core=core, mib=mib)
            node = choose(replica, extender, f"p{i}", random.Random(i))
            if node:
                replica.api.bind(f"p{i}", node)
                replica.deliver()
                found.append((node, replica.cards_held()))
        return found

    beside = cards_of_all()
    monkeypatch.setattr(in_flight_filter, "_MAX_NODES", 0)  # No pod is in flight.
    assert beside == cards_of_all()
    assert len(beside) > 12


def bursting(cards: int = 1) -> tuple[Replica, Extender]:
    """Return a cluster of one node, where a pod `a` is in flight and a pod `b` waits."""
    replica, extender = extended(cluster(("n1", cards)))
    create(replica, "a", "b")
    assert nodes_of(replica, extender, "a") == ["n1"]
    return replica, extender


def test_a_pod_that_fits_nowhere_else_waits_for_the_decision_and_is_rejected() -> None:
    replica, extender = bursting()
    replica.while_waiting = lambda _seconds: replica.api.bind("a", "n1")
    assert nodes_of(replica, extender, "b") == []


def test_a_pod_that_waits_gets_the_card_if_the_binding_is_refused() -> None:
    replica, extender = bursting()

    def refuse(_seconds: float) -> None:
        replica.api.put("devices", replica.api.devices["n1"])
        with pytest.raises(ApiError):
            replica.api.bind("a", "unknown")

    began = replica.clock.now
    replica.while_waiting = refuse
    assert nodes_of(replica, extender, "b") == ["n1"]
    assert replica.clock.now == began


def test_no_pod_waits_if_there_is_room_beside_the_pods_in_flight() -> None:
    replica, extender = bursting(cards=2)
    replica.while_waiting = must_not_wait
    assert nodes_of(replica, extender, "b") == ["n1"]


@pytest.mark.parametrize("error", [EffortExceeded("rationed"), RetryLater("too many calls")])
def test_a_pod_in_flight_whose_namespace_has_used_up_its_searches_fails_no_other_call(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    replica, extender = bursting()

    def decide_beside(*_: object) -> None:
        raise error

    monkeypatch.setattr(Decider, "decide_beside", decide_beside)
    assert nodes_of(replica, extender, "b") == ["n1"]


def test_a_pod_in_flight_delays_others_only_once() -> None:
    replica, extender = bursting()
    create(replica, "c")
    began = replica.clock.now
    assert nodes_of(replica, extender, "b") == ["n1"]
    assert replica.clock.now - began == pytest.approx(0.1)
    replica.flights.end("uid-b")
    replica.while_waiting = must_not_wait
    assert nodes_of(replica, extender, "c") == ["n1"]


def test_a_call_whose_caller_has_gone_does_not_wait() -> None:
    replica, extender = bursting()
    replica.while_waiting = must_not_wait
    with pytest.raises(RetryLater):
        extender.filter(body(replica, "b", ["n1"]), lambda: True)


def test_only_few_calls_wait() -> None:
    replica, _ = bursting()
    waiting = 0

    def wait(_seconds: float = 0) -> bool:
        nonlocal waiting
        waiting += 1
        return replica.flights.wait(replica.flights.ended, replica.clock.now + 1, never)

    def next_call(_seconds: float) -> None:
        if not wait():
            replica.flights.end("uid-a")

    replica.while_waiting = next_call
    assert wait()
    assert waiting == in_flight._MAX_WAITING + 1


def test_a_pod_in_flight_keeps_no_card_from_a_binding() -> None:
    replica, _ = bursting()
    replica.api.bind("b", "n1")
    replica.deliver()
    assert replica.cards_held() == {"b": [(0, 1000)]}


def test_a_pod_is_in_flight_until_it_is_deleted_decided_or_overdue() -> None:
    def gone(replica: Replica) -> None:
        replica.api.remove("pods", "a")
        replica.deliver()

    def late(replica: Replica) -> None:
        replica.clock.now += in_flight._FLIGHT_SECONDS

    def elsewhere(replica: Replica) -> None:
        replica.api.put("nodes", builders.node("n2"))
        replica.deliver()
        with pytest.raises(ApiError):
            replica.api.bind("a", "n2")

    for event in (gone, late, elsewhere):
        replica, extender = bursting()
        event(replica)
        replica.while_waiting = must_not_wait
        assert "n1" in nodes_of(replica, extender, "b"), event


def test_a_dry_run_of_a_binding_ends_no_flight() -> None:
    replica, _ = bursting()
    replica.api.bind("a", "n1", dry_run=True)
    assert len(replica.flights.current()) == 1


def test_gangs_nominated_pods_and_pods_with_several_gpu_containers_are_not_expected_anywhere() -> None:
    replica, extender = extended(cluster(("n1", 4)))
    gang = {"mgpu.io/gang": "g", "mgpu.io/gang-size": "2"}
    member = builders.share("member")
    member["metadata"]["labels"] = gang
    nominated = builders.share("nominated")
    nominated["status"]["nominatedNodeName"] = "n1"
    two = builders.pod("two", builders.container("c", 50, 1024), builders.container("d", 50, 1024))
    for raw in (member, nominated, two):
        replica.api.put("pods", raw)
    replica.deliver()
    for name in ("nominated", "two", "member"):
        choose(replica, extender, name, random.Random(0))
        assert replica.flights.current() == (), name


def test_a_pod_is_not_expected_where_too_many_nodes_are_equally_good() -> None:
    replica, extender = extended(cluster(*((f"n{i}", 1) for i in range(in_flight_filter._MAX_NODES + 1))))
    create(replica, "a")
    choose(replica, extender, "a", random.Random(0))
    assert replica.flights.current() == ()


def test_the_number_of_pods_in_flight_is_bounded() -> None:
    replica, extender = bursting(cards=8)
    for i in range(in_flight._MAX_PODS + 3):
        create(replica, f"x{i}", core=10, mib=1024)
        choose(replica, extender, f"x{i}", random.Random(0))
    assert len(replica.flights.current()) == in_flight._MAX_PODS


@dataclass(frozen=True)
class Outcome:
    bound: int
    refused: int


class Burst:
    """A scheduler that takes 8 ms for a pod, and whose bindings take 5 to 50 ms, in simulated time."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.replica, self.extender = extended(cluster(*((f"n{i}", 8) for i in range(6))))
        self.clock = self.replica.clock
        self.replica.while_waiting = self.wait
        self.queue: deque[str] = deque()
        self.events: list[tuple[float, str, str]] = []  # The time, the pod, and its node, or "" if it is tried again.
        self.bound = self.refused = 0

    def run(self, pods: int) -> Outcome:
        for i in range(pods):
            core, mib = PROFILES[i % len(PROFILES)]
            create(self.replica, f"p{i}", core=core, mib=mib)
            self.queue.append(f"p{i}")
        while self.queue or self.events:
            self.until(self.clock.now + 0.008)
            if not self.queue:
                continue
            name = self.queue.popleft()
            node = choose(self.replica, self.extender, name, self.random)
            if node:
                heappush(self.events, (self.clock.now + self.random.uniform(0.005, 0.05), name, node))
        return Outcome(self.bound, self.refused)

    def wait(self, seconds: float) -> None:
        self.until(min(self.clock.now + seconds, self.events[0][0]))

    def until(self, time: float) -> None:
        while self.events and self.events[0][0] <= time:
            self.clock.now, name, node = heappop(self.events)
            self.queue.append(name) if not node else self.bind(name, node)
        self.clock.now = max(self.clock.now, time)

    def bind(self, name: str, node: str) -> None:
        try:
            self.replica.api.bind(name, node)
            self.bound += 1
        except ApiError:
            self.refused += 1
            heappush(self.events, (self.clock.now + 1, name, ""))
        self.replica.deliver()


def test_hardly_any_binding_of_a_burst_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    after = [Burst(seed).run(110) for seed in range(2)]
    monkeypatch.setattr(in_flight_filter, "_MAX_NODES", 0)  # No pod is in flight.
    before = [Burst(seed).run(110) for seed in range(2)]
    bindings = sum(one.bound + one.refused for one in after)
    assert sum(one.refused for one in before) > 0.04 * bindings
    assert sum(one.refused for one in after) < 0.01 * bindings


class Interleavings(RuleBasedStateMachine):
    """Calls, bindings, deletions and time in any order, beside a filter and a decider that know no pods in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.replica, self.extender = extended(cluster(("n1", 1), ("n2", 2), ("n3", 1)))
        client: Any = self.replica.api
        self.plain = Decider(self.replica.state, client, self.replica.settings)
        self.chosen: dict[str, str] = {}
        self.made = 0

    @property
    def unbound(self) -> list[str]:
        return [name for (_, name), raw in self.replica.api.pods.items() if not raw["spec"].get("nodeName")]

    @rule(profile=sampled_from(PROFILES))
    def create(self, profile: tuple[int, int | None]) -> None:
        self.made += 1
        create(self.replica, f"p{self.made}", core=profile[0], mib=profile[1])

    @precondition(lambda self: self.unbound)
    @rule(draw=data())
    def filter(self, draw: DataObject) -> None:
        name = draw.draw(sampled_from(self.unbound))
        began = self.replica.clock.now
        passed = nodes_of(self.replica, self.extender, name)
        plain = self.replica.filter.filter(pod(self.replica, name), ["n1", "n2", "n3"]).passed
        assert set(passed) <= set(plain)
        assert bool(passed) == bool(plain)
        assert self.replica.clock.now - began <= in_flight_filter._WAIT_SECONDS + 0.001
        if len(passed) > 1:
            self.extender.prioritize(body(self.replica, name, passed))
        if passed:
            self.chosen[name] = draw.draw(sampled_from(passed))

    @precondition(lambda self: self.chosen)
    @rule(draw=data())
    def bind(self, draw: DataObject) -> None:
        name = draw.draw(sampled_from(sorted(self.chosen)))
        node = self.chosen.pop(name)
        plain = self.plain.decide(pod(self.replica, name), node, reserve=False)
        try:
            self.replica.api.bind(name, node)
            assert not isinstance(plain, Rejection)
        except ApiError:
            assert isinstance(plain, Rejection)
        assert f"uid-{name}" not in {flight.gpu_pod.pod.uid for flight in self.replica.flights.current()}

    @precondition(lambda self: self.replica.api.pods)
    @rule(draw=data())
    def delete(self, draw: DataObject) -> None:
        name = draw.draw(sampled_from(sorted(name for _, name in self.replica.api.pods)))
        self.chosen.pop(name, None)
        self.replica.api.remove("pods", name)

    @rule()
    def deliver(self) -> None:
        self.replica.deliver()

    @rule(seconds=floats(0.01, 3))
    def wait(self, seconds: float) -> None:
        self.replica.clock.now += seconds

    @invariant()
    def no_card_is_given_twice(self) -> None:
        for node in self.replica.api.nodes:
            for state in self.replica.state.node_snapshot(node, "").cards:
                assert state.core_used <= 1000


Interleavings.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestInterleavings = Interleavings.TestCase
