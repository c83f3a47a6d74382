"""Pods that wait for slices do not have a node cut for ever, nor keep those of other namespaces waiting."""

from collections.abc import Iterator
from itertools import pairwise

from scheduler.cluster.reservations import Reservation
from scheduler.partitioning.promises import READY_SECONDS
from scheduler.partitioning.waiting_pods import BURST, FIRST_PAUSE, LONGEST_PAUSE, REFILL_SECONDS
from tests.scheduler.fake import Replica
from tests.scheduler.partitioning.cluster import MIG, Agent, cluster, known, submit, turn, wants

SEVEN, ONES, HALF = {"mig-7g.80gb": 1}, {"mig-1g.10gb": 7}, {"mig-3g.40gb": 1}


def one_card() -> tuple[Replica, Agent]:
    replica, agents = cluster(("n1", MIG, 1))
    return replica, agents["n1"]


def request(replica: Replica, name: str) -> bool:
    """kube-scheduler's turn with a Pod; whether it is bound."""
    pod = known(replica, name)
    passed = replica.filter.filter(pod, ["n1"]).passed
    return bool(passed) and isinstance(replica.decider.decide(pod, "n1"), Reservation)


def seconds(replica: Replica, agent: Agent, count: int) -> Iterator[int]:
    for second in range(count):
        turn(replica, [agent])
        yield second
        replica.clock.now += 1


def plans(replica: Replica, agent: Agent, count: int) -> int:
    """How many plans the node gets in so many seconds."""
    return len({agent.found.partitioning.plan for _ in seconds(replica, agent, count)} - {None})


def wait(replica: Replica, agent: Agent, name: str, limit: int = 600) -> int:
    """In how many seconds a Pod is bound that kube-scheduler asks about each second."""
    return next(second for second in seconds(replica, agent, limit) if request(replica, name))


def test_two_pods_that_are_asked_about_once_have_a_node_cut_once_each() -> None:
    """kube-scheduler refuses them by itself after that, by an anti-affinity that holds since."""
    replica, agent = one_card()
    for pod in submit(replica, wants("a1", SEVEN), wants("a2", ONES)):
        replica.filter.filter(pod, ["n1"])
    assert plans(replica, agent, 600) == 2


def test_a_pod_of_another_namespace_is_bound_beside_two_that_never_come() -> None:
    replica, agent = one_card()
    for pod in submit(replica, wants("a1", SEVEN), wants("a2", ONES)):
        replica.filter.filter(pod, ["n1"])
    plans(replica, agent, 3)
    submit(replica, wants("v", HALF, namespace="victim"))
    assert wait(replica, agent, "v") <= READY_SECONDS


def test_a_pod_of_another_namespace_is_bound_beside_a_crowd_that_is_asked_about_and_never_comes() -> None:
    """Such as Pods whose volumes are never made: the filter passes them, and no Binding follows."""
    replica, agent = one_card()
    crowd = [f"a{i}" for i in range(20)]
    submit(replica, *(wants(name, (SEVEN, ONES)[i % 2]) for i, name in enumerate(crowd)))
    submit(replica, wants("v", HALF, namespace="victim"))
    found = set()
    for second in seconds(replica, agent, 300):
        for name in crowd:
            replica.filter.filter(known(replica, name), ["n1"])
        found.add(agent.found.partitioning.plan)
        if second >= 30 and request(replica, "v"):
            break
    assert second <= 32 + READY_SECONDS
    assert len(found) <= 4


def test_pods_that_are_created_again_and_again_and_never_come_have_a_node_cut_seldom() -> None:
    replica, agent = one_card()
    found = set()
    for second in seconds(replica, agent, 300):
        name = f"a{second}"
        (pod,) = submit(replica, wants(name, (SEVEN, ONES)[second % 2]))
        replica.filter.filter(pod, ["n1"])
        if second >= 2:
            replica.api.remove("pods", f"a{second - 2}")
            replica.deliver()
        found.add(agent.found.partitioning.plan)
    assert len(found - {None}) <= 2 + 300 / (6 * REFILL_SECONDS)


def test_pods_that_come_and_end_have_a_node_cut_so_often_in_a_row_and_then_once_in_a_while() -> None:
    replica, agent = one_card()
    found, name, count = set(), "a0", 0
    submit(replica, wants(name, SEVEN))
    for _ in seconds(replica, agent, 300):
        found.add(agent.found.partitioning.plan)
        if request(replica, name):
            replica.planning.work()  # it hears of the decision before the Pod ends
            replica.api.remove("pods", name)
            count += 1
            name = f"a{count}"
            submit(replica, wants(name, (SEVEN, ONES)[count % 2]))
    assert BURST <= len(found - {None}) <= BURST + 2 + 300 / REFILL_SECONDS
    assert count >= len(found) - 2  # none was made in vain


def test_pods_of_two_namespaces_that_are_asked_about_seldom_both_come_to_their_slices() -> None:
    """Each needs all of the card, and kube-scheduler comes to each of them every 20 s."""
    replica, agent = one_card()
    submit(replica, wants("p", SEVEN), wants("q", ONES, namespace="other"))
    bound = []
    for second in seconds(replica, agent, 600):
        for name, at in (("p", 0), ("q", 10)):
            if name not in bound and second % 20 == at and request(replica, name):
                bound.append(name)
                replica.api.remove("pods", name, known(replica, name).pod.namespace)
                replica.deliver()
    assert sorted(bound) == ["p", "q"]


def test_what_a_plan_made_is_kept_from_other_plans_until_its_pod_had_its_chance() -> None:
    replica, agent = one_card()
    for pod in submit(replica, wants("p", SEVEN), wants("q", ONES, namespace="other")):
        replica.filter.filter(pod, ["n1"])
    assert plans(replica, agent, int(READY_SECONDS)) == 1
    assert request(replica, "p")
    assert plans(replica, agent, 60) == 1


def test_slices_that_others_took_are_made_again_for_their_pod_without_a_pause() -> None:
    replica, agents = cluster(("n1", MIG, 2))
    agent = agents["n1"]
    agent.make()
    (pod,) = submit(replica, wants("p", {"mig-7g.80gb": 1}))
    replica.filter.filter(pod, ["n1"])
    assert plans(replica, agent, 2) == 1
    submit(replica, wants("quick", SEVEN, namespace="other"))
    assert request(replica, "quick")
    replica.filter.filter(pod, ["n1"])
    assert wait(replica, agent, "p", 5) <= 2


def test_a_pod_that_does_not_come_pauses_longer_each_time() -> None:
    replica, agent = one_card()
    submit(replica, wants("p", SEVEN))
    made: list[tuple[int | None, int]] = [(None, 0)]
    for second in seconds(replica, agent, 1500):
        replica.filter.filter(known(replica, "p"), ["n1"])
        if agent.found.partitioning.plan not in [plan for plan, _ in made]:
            made.append((agent.found.partitioning.plan, second))
        if second == made[-1][1] + READY_SECONDS + 3:
            agent.made = {}  # somebody takes them away
            agent.report()
    gaps = [b - a for (_, a), (_, b) in pairwise(made[1:])]
    assert gaps == sorted(gaps)
    assert gaps[0] >= FIRST_PAUSE
    assert gaps[-1] <= LONGEST_PAUSE + 2 * READY_SECONDS


def test_a_promise_is_over_for_a_pod_that_no_filter_is_asked_about() -> None:
    """It was asked about once. The slices are anybody's then, and it is no reason for another plan."""
    replica, agent = one_card()
    (pod,) = submit(replica, wants("p", SEVEN))
    replica.filter.filter(pod, ["n1"])
    plans(replica, agent, int(READY_SECONDS) + 2)
    assert not replica.planning._waiting


def test_namespaces_take_turns_for_plans() -> None:
    """A namespace with ten Pods of two demands has one plan before a Pod of another namespace has its own."""
    replica, agent = one_card()
    submit(replica, *(wants(f"a{i}", (SEVEN, ONES)[i % 2]) for i in range(10)))
    submit(replica, wants("v", HALF, namespace="victim"))
    bound: list[str] = []
    for _ in seconds(replica, agent, 120):
        for name in [f"a{i}" for i in range(10)] + ["v"]:
            if name not in bound and request(replica, name):
                bound.append(name)
                replica.deliver()
                replica.planning.work()
                namespace = known(replica, name).pod.namespace
                replica.api.remove("pods", name, namespace)
                replica.deliver()
    assert bound.index("v") < bound.index("a1")


def test_the_first_pod_of_a_namespace_has_the_first_plan() -> None:
    replica, agent = one_card()
    for pod in submit(replica, wants("q", SEVEN), wants("p", ONES)):
        replica.filter.filter(pod, ["n1"])
    turn(replica, [agent])
    assert {s.name for s in agent.made} == {"1g.10gb"}
