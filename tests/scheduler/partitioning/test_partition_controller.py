"""From a pod that finds no slice to one that is bound to it."""

from collections.abc import Collection

import pytest

from mgpu.model.node_slices import ANNOTATION, with_spec
from scheduler.cluster.reservations import Reservation
from scheduler.partitioning.partition_controller import MISSING_SECONDS, PartitionController
from scheduler.partitioning.promises import PROMISE_SECONDS
from tests.scheduler.fake import Replica
from tests.scheduler.partitioning.cluster import MIG, MPS, cluster, known, slices, submit, turn, wants


def test_a_pod_that_finds_no_slice_gets_one() -> None:
    replica, agents = cluster(("n1", MIG, 1))
    (pod,) = submit(replica, wants("p", {"mig-2g.20gb": 1}))
    assert replica.filter.filter(pod, ["n1"]).failed == {"n1": "the node's cards are to be repartitioned for the pod"}
    assert "spec-partitioning-plan" not in agents["n1"].said  # a filter writes nothing
    replica.planning.work()
    assert '"spec-partitioning-plan": 1000' in agents["n1"].said
    replica.deliver()
    assert replica.filter.filter(pod, ["n1"]).failed == {"n1": "the node waits for partition plan 1000"}
    turn(replica, agents.values())
    assert replica.filter.filter(pod, ["n1"]).passed == ["n1"]
    decision = replica.decider.decide(pod, "n1")
    assert isinstance(decision, Reservation)
    (_, _, indexes) = decision.placement.others[0]
    assert {s.index for s in agents["n1"].found.existing if s.name == "2g.20gb"}.issuperset(indexes)
    assert "n1" in replica.freed


def test_one_plan_serves_all_that_wait_and_is_followed_by_no_other() -> None:
    replica, agents = cluster(("n1", MIG, 1), ("n2", MIG, 1))
    pods = submit(replica, *(wants(name, {"mig-2g.20gb": 1}) for name in "pqr"))
    for pod in pods:
        replica.filter.filter(pod, ["n1", "n2"])
    turn(replica)
    turn(replica)
    assert [agent.found.has_pending_plan for agent in agents.values()] == [True, False]
    assert sum(s.name == "2g.20gb" for s in agents["n1"].found.planned or ()) == 3


def test_a_pod_that_its_plan_does_not_serve_in_time_gets_another_node() -> None:
    replica, agents = cluster(("n1", MIG, 1), ("n2", MIG, 1))
    (pod,) = submit(replica, wants("p", {"mig-2g.20gb": 1}))
    replica.filter.filter(pod, ["n1", "n2"])
    turn(replica)
    replica.clock.now += PROMISE_SECONDS
    turn(replica)
    assert [agent.found.has_pending_plan for agent in agents.values()] == [True, True]
    assert ("n1", "PlanLate") in [event[:2] for event in replica.events]
    text = "partition plan 1000 is not in force after 60 s: check that mgpu's agent runs on the node"
    assert any(text in event[2] for event in replica.events)
    replica.clock.now += 1
    turn(replica)
    assert agents["n2"].found.partitioning.plan == 1000


def test_a_refused_plan_is_told_and_not_repeated_at_once() -> None:
    replica, agents = cluster(("n1", MIG, 1))
    (pod,) = submit(replica, wants("p", {"mig-2g.20gb": 1}))
    replica.filter.filter(pod, ["n1"])
    turn(replica)
    agents["n1"].refuse("busy")
    replica.deliver()
    assert ("n1", "PlanRefused", "the agent refused partition plan 1000: busy") in replica.events
    text = "the node's cards are to be repartitioned for the pod, but partition plan 1000 was refused: busy"
    assert replica.filter.filter(pod, ["n1"]).failed == {"n1": text}
    turn(replica)
    assert agents["n1"].found.partitioning.plan == 1000
    replica.clock.now += 61
    turn(replica)
    assert agents["n1"].found.partitioning.plan == 1001


def test_what_a_node_refuses_for_two_pods_is_not_tried_in_turn_for_ever() -> None:
    replica, agents = cluster(("n1", MIG, 1))
    for pod in submit(replica, wants("p", {"mig-3g.40gb": 1}), wants("q", {"mig-7g.80gb": 1})):
        replica.filter.filter(pod, ["n1"])
    tried = set[int | None]()
    for _ in range(6):
        turn(replica)
        tried.add(agents["n1"].found.partitioning.plan)
        agents["n1"].refuse("no permission")
        replica.deliver()
    assert tried == {1000, 1001}  # one for each of them


def test_a_refused_plan_is_repeated_when_the_node_has_changed() -> None:
    replica, agents = cluster(("n1", MIG, 1))
    (pod,) = submit(replica, wants("p", {"mig-2g.20gb": 1}))
    replica.filter.filter(pod, ["n1"])
    turn(replica)
    agents["n1"].refuse()
    replica.deliver()
    turn(replica)
    agents["n1"].make(*slices((0, 6, "1g.10gb")))
    replica.deliver()
    turn(replica)
    assert agents["n1"].found.partitioning.plan == 1001


def test_what_is_held_is_in_every_plan() -> None:
    replica, agents = cluster(("n1", MIG, 1))
    agents["n1"].make(*slices((0, 0, "1g.10gb"), (0, 4, "1g.10gb")))
    first, second = submit(replica, wants("p", {"mig-1g.10gb": 1}), wants("q", {"mig-3g.40gb": 1}))
    assert isinstance(replica.decider.decide(first, "n1"), Reservation)  # the one at 4: the highest start
    replica.filter.filter(second, ["n1"])
    replica.planning.work()
    planned = agents["n1"].found.planned
    assert planned is not None
    assert slices((0, 4, "1g.10gb"))[0] in planned
    assert slices((0, 0, "3g.40gb"))[0] in planned


def test_a_decision_that_comes_between_makes_the_plan_anew() -> None:
    replica, agents = cluster(("n1", MIG, 1))
    agents["n1"].make(*slices((0, 0, "1g.10gb")))
    small, large = submit(replica, wants("p", {"mig-1g.10gb": 1}), wants("q", {"mig-4g.40gb": 1}))
    target = replica.state.partitions.get("n1")
    assert target
    assert isinstance(replica.decider.decide(small, "n1"), Reservation)
    replica.filter.filter(large, ["n1"])
    replica.planning.work()
    assert agents["n1"].found.partitioning.plan is None  # 4g.40gb lies at 0 alone


def test_no_decision_gives_out_what_a_plan_takes_away() -> None:
    replica, agents = cluster(("n1", MIG, 1))
    agents["n1"].make(*slices((0, 0, "1g.10gb")))
    small, large = submit(replica, wants("p", {"mig-1g.10gb": 1}), wants("q", {"mig-7g.80gb": 1}))
    replica.filter.filter(large, ["n1"])
    replica.planning.work()  # not seen by the watch yet
    assert not isinstance(replica.decider.decide(small, "n1"), Reservation)
    replica.deliver()
    assert not isinstance(replica.decider.decide(small, "n1"), Reservation)


def test_a_plan_whose_node_has_changed_is_dropped_and_made_anew() -> None:
    replica, agents = cluster(("n1", MIG, 1))
    agents["n1"].make(*slices((0, 0, "1g.10gb")))
    replica.deliver()
    (pod,) = submit(replica, wants("p", {"mig-7g.80gb": 1}))
    replica.filter.filter(pod, ["n1"])
    agents["n1"].give("stranger", *slices((0, 0, "1g.10gb")))  # the watch is late
    replica.planning.work()
    assert agents["n1"].found.partitioning.plan is None
    assert replica.state.partitions.plans() == ()
    replica.deliver()
    turn(replica)
    assert agents["n1"].found.partitioning.plan is None


def test_a_write_of_which_nobody_knows_is_looked_for() -> None:
    replica, agents = cluster(("n1", MIG, 1))
    (pod,) = submit(replica, wants("p", {"mig-2g.20gb": 1}))
    replica.filter.filter(pod, ["n1"])
    replica.api.reachable = False
    replica.planning.work()
    assert len(replica.state.partitions.plans()) == 1
    replica.api.reachable = True
    replica.planning.work()
    replica.deliver()
    assert replica.state.partitions.plans() == ()
    assert agents["n1"].found.partitioning.plan == 1000


def test_slices_that_a_reboot_took_are_made_again_where_they_were() -> None:
    replica, agents = cluster(("n1", MIG, 1))
    agents["n1"].make(*slices((0, 2, "2g.20gb"), (0, 6, "1g.10gb")))
    (pod,) = submit(replica, wants("p", {"mig-2g.20gb": 1}))
    decision = replica.decider.decide(pod, "n1")
    assert isinstance(decision, Reservation)
    submit(replica, wants("p", {"mig-2g.20gb": 1}, node="n1", annotations=dict(decision.annotations)))
    agents["n1"].reboot()
    replica.deliver()
    turn(replica)
    assert agents["n1"].found.partitioning.plan is None  # its agent does that by itself, mostly
    replica.clock.now += MISSING_SECONDS
    turn(replica, agents.values())
    assert slices((0, 2, "2g.20gb"))[0] in agents["n1"].made


def test_a_pod_that_was_bound_without_slices_gets_them_late() -> None:
    replica, agents = cluster(("n1", MIG, 1))
    submit(replica, wants("p", {"mig-2g.20gb": 1}, node="n1"))
    for _ in range(4):
        replica.late.work()
        turn(replica, agents.values())
        replica.clock.now += 1
    assert "mgpu.io/slices-given" in replica.api.annotations("p")
    assert known(replica, "p").pod.phase == "Pending"


def test_a_bound_pod_fails_where_no_cut_serves_it() -> None:
    replica, _ = cluster(("n1", MIG, 1))
    submit(replica, wants("p", {"mig-7g.80gb": 2}, node="n1"))
    replica.late.work()
    replica.clock.now += 31  # until then a node without cards may be one that is starting
    replica.late.work()
    assert replica.api.pod("p")["status"]["phase"] == "Failed"


def test_a_bound_pod_fails_where_its_plan_is_never_applied() -> None:
    replica, _ = cluster(("n1", MIG, 1))
    submit(replica, wants("p", {"mig-2g.20gb": 1}, node="n1"))
    for _ in range(5):
        replica.late.work()
        turn(replica)
        replica.clock.now += 40
    assert replica.api.pod("p")["status"]["phase"] == "Failed"


def test_under_mps_the_configmap_follows_from_the_annotation() -> None:
    replica, agents = cluster(("n1", MPS, 2))
    (pod,) = submit(replica, wants("p", {"gpu-4gb": 1}))
    replica.filter.filter(pod, ["n1"])
    replica.planning.work()
    data = replica.api.configmaps["mps-configmap"]["data"]
    assert "gpu-4gb" in data["n1"]
    replica.api.put(
        "configmaps", {"metadata": {**replica.api.configmaps["mps-configmap"]["metadata"]}, "data": {"n2": "x"}}
    )
    replica.deliver()
    replica.planning.work()
    assert replica.api.configmaps["mps-configmap"]["data"] == {"n2": "x", "n1": data["n1"]}
    turn(replica, agents.values())
    assert replica.filter.filter(pod, ["n1"]).passed == ["n1"]


def test_a_crash_between_annotation_and_configmap_is_made_good() -> None:
    replica, agents = cluster(("n1", MPS, 1))
    (pod,) = submit(replica, wants("p", {"gpu-4gb": 1}))
    replica.filter.filter(pod, ["n1"])
    replica.api.broken = {"configmaps"}
    replica.planning.work()
    assert replica.api.configmaps == {}
    replica.api.broken = set()
    other = Replica(replica.api)
    other.planning.begin()
    other.planning.work()
    assert "n1" in replica.api.configmaps["mps-configmap"]["data"]
    assert agents["n1"].found.partitioning.plan == 1000


def test_the_agents_keys_stay_as_they_are() -> None:
    replica, agents = cluster(("n1", MIG, 1))
    agents["n1"].make(*slices((0, 0, "1g.10gb")))
    replica.deliver()
    (pod,) = submit(replica, wants("p", {"mig-2g.20gb": 1}))
    replica.filter.filter(pod, ["n1"])
    agents["n1"].make(*slices((0, 6, "1g.10gb")))  # the watch is late: a write by an old version would lose it
    replica.planning.work()
    assert '"status-gpu-0-1g.10gb-free": 2' in agents["n1"].said
    assert '"spec-partitioning-plan": 1000' in agents["n1"].said


def test_a_slice_that_is_kept_for_a_nominated_pod_is_in_the_plan_for_another() -> None:
    replica, agents = cluster(("n1", MIG, 1))
    agents["n1"].make(*slices((0, 0, "1g.10gb")))
    submit(replica, wants("member", {"mig-1g.10gb": 1}))
    replica.api.edit_pod("member", lambda raw: raw["status"].update(nominatedNodeName="n1"))
    (pod,) = submit(replica, wants("p", {"mig-7g.80gb": 1}))
    assert replica.filter.filter(pod, ["n1"]).repartitionable == []
    replica.planning.request_plan(pod, ["n1"])
    replica.planning.work()
    assert agents["n1"].found.partitioning.plan is None


def test_no_plan_takes_away_what_a_pod_is_about_to_be_bound_to() -> None:
    replica, agents = cluster(("n1", MIG, 1))
    agents["n1"].make(*slices((0, 0, "1g.10gb"), (0, 3, "1g.10gb"), (0, 6, "1g.10gb")))
    replica.deliver()
    small, large, most = submit(
        replica, wants("p", {"mig-1g.10gb": 1}), wants("q", {"mig-4g.40gb": 1}), wants("r", {"mig-7g.80gb": 1})
    )
    assert replica.filter.filter(small, ["n1"]).passed == ["n1"]
    replica.filter.filter(most, ["n1"])
    replica.planning.work()
    assert agents["n1"].found.partitioning.plan is None  # it would take them all
    replica.filter.filter(large, ["n1"])
    replica.planning.work()
    assert {s.start for s in agents["n1"].found.planned or ()} >= {0, 6}  # 4g.40gb, and one is left to the pod
    assert isinstance(replica.decider.decide(small, "n1"), Reservation)


def test_a_pod_that_is_not_bound_after_all_keeps_nothing() -> None:
    replica, agents = cluster(("n1", MIG, 1))
    agents["n1"].make(*slices((0, 6, "1g.10gb")))
    replica.deliver()
    small, large = submit(replica, wants("p", {"mig-1g.10gb": 1}), wants("q", {"mig-7g.80gb": 1}))
    replica.filter.filter(small, ["n1"])
    replica.filter.filter(large, ["n1"])
    replica.planning.work()
    assert agents["n1"].found.partitioning.plan is None
    replica.clock.now += 5
    replica.planning.work()
    assert agents["n1"].found.partitioning.plan == 1000


def test_what_a_decision_says_of_slices() -> None:
    replica, agents = cluster(("n1", MIG, 1))
    agents["n1"].make(*slices((0, 0, "1g.10gb"), (0, 1, "1g.10gb")))
    agents["n1"].give("stranger", *slices((0, 0, "1g.10gb"), (0, 1, "1g.10gb")))
    replica.deliver()
    small, large = submit(replica, wants("p", {"mig-1g.10gb": 1}), wants("q", {"mig-7g.80gb": 1}))
    assert str(replica.decider.decide(small, "n1")) == "2 mig-1g.10gb slices: 2 in use"
    assert str(replica.decider.decide(large, "n1")) == "node n1 has no mig-7g.80gb slice"


def test_what_a_refused_plan_withholds_is_planned_as_it_is() -> None:
    replica, agents = cluster(("n1", MIG, 1))
    agents["n1"].make(*slices(*((0, start, "1g.10gb") for start in range(7))))
    agents["n1"].give("stranger", *slices(*((0, start, "1g.10gb") for start in range(6))))
    by_hand = with_spec(agents["n1"].said, {}, 900)
    replica.api.annotate("n1", **{ANNOTATION: by_hand})
    agents["n1"].refuse("in use")
    (pod,) = submit(replica, wants("p", {"mig-1g.10gb": 1}))
    assert replica.filter.filter(pod, ["n1"]).repartitionable == ["n1"]
    turn(replica)
    turn(replica, agents.values())
    assert agents["n1"].found.partitioning.applied == 1000
    assert replica.filter.filter(pod, ["n1"]).passed == ["n1"]


@pytest.mark.parametrize("going", ["the node", "the label"])
def test_nothing_is_kept_of_a_node_that_is_cut_no_more(going: str) -> None:
    """Names of nodes that an autoscaler makes never come again."""
    replica, agents = cluster(("n1", MIG, 1))
    (pod,) = submit(replica, wants("p", {"mig-2g.20gb": 1}))
    replica.filter.filter(pod, ["n1"])
    turn(replica)
    agents["n1"].refuse()
    replica.deliver()
    turn(replica)
    if going == "the node":
        replica.api.remove("nodes", "n1")
    else:
        raw = replica.api.nodes["n1"]
        replica.api.put("nodes", {**raw, "metadata": {**raw["metadata"], "labels": {}}})
    replica.deliver()
    replica.planning.work()
    kept = [name for name, known in _deep(replica.planning) if "n1" in known]
    assert kept == []


def _deep(planning: PartitionController) -> list[tuple[str, Collection[object]]]:
    """What planning knows by the names of nodes."""
    found = {**vars(planning), **vars(planning._refused)}
    return [(name, known) for name, known in found.items() if isinstance(known, dict | set)]
