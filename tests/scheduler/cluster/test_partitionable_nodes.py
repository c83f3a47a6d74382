"""What the cluster cache offers and holds of partitioned nodes, and which cards it lets the planner partition."""

from typing import Any

import pytest

from mgpu.model.node_slices import ANNOTATION, EXISTING, LABEL
from scheduler.cluster.reservations import Reservation
from scheduler.cluster.slice_state import PartitionPlan
from scheduler.decisions.preemption import Victims
from tests import builders as b
from tests.scheduler.fake import Replica
from tests.scheduler.partitioning.cluster import MIG, MPS, Agent, cluster, slices, submit, turn, wants

ONE, TWO = slices((0, 0, "1g.10gb"), (0, 2, "2g.20gb"))


@pytest.fixture
def made() -> tuple[Replica, Agent]:
    """Return a node whose only card has both slices."""
    replica, agents = cluster(("n1", MIG, 1))
    agents["n1"].make(ONE, TWO)
    replica.deliver()
    return replica, agents["n1"]


def offered(replica: Replica, node: str = "n1") -> dict[str, bool]:
    """Return by device whether it is free."""
    snapshot = replica.state.node_snapshot(node, "")
    return {f"{s.card.type} {s.card.index}": s.idle for s in (*snapshot.cards, *snapshot.other_devices)}


def bind(replica: Replica, raw: dict[str, Any], node: str = "n1") -> Reservation:
    """Decide a pod and bind it with its allocation record, as the API server does."""
    (pod,) = submit(replica, raw)
    decision = replica.decider.decide(pod, node)
    assert isinstance(decision, Reservation), str(decision)
    raw["spec"]["nodeName"] = node
    raw["metadata"]["annotations"] |= decision.annotations
    replica.api.put("pods", raw)
    replica.deliver()
    return decision


def relabel(agent: Agent, **labels: str) -> None:
    raw = agent.api.nodes["n1"]
    agent.api.put("nodes", {**raw, "metadata": {**raw["metadata"], "labels": labels}})


def test_partitioned_card_is_offered_only_as_slices(made: tuple[Replica, Agent]) -> None:
    replica, _ = made
    assert offered(replica) == {"mig-1g.10gb 0": True, "mig-2g.20gb 2": True}
    (share,) = submit(replica, b.share("p"))
    reason = replica.filter.filter(share, ["n1"]).hopeless["n1"]
    assert reason == "node n1 has no whole GPU cards: its cards are partitioned into slices (gpu.partitioning=mig)"


def test_card_without_mps_shares_is_offered_whole() -> None:
    replica, agents = cluster(("n1", MPS, 2))
    agents["n1"].make(*slices((1, 0, "4gb")))
    replica.deliver()
    assert offered(replica) == {"gpu 0": True, "gpu-4gb 100": True}


def planned(replica: Replica, agent: Agent) -> set[int]:
    """Return the cards that the plan of the node partitions after a pod has requested a slice."""
    (pod,) = submit(replica, wants("p", {"gpu-4gb": 1}))
    replica.filter.filter(pod, ["n1"])
    turn(replica)
    return {s.card for s in agent.found.planned or ()}


def test_card_with_a_gpuid_is_not_partitioned() -> None:
    replica, agents = cluster(("n1", MPS, 2))
    replica.api.put("mtgpupods", b.mtgpupod(bound="GPU-n1-0"))
    replica.deliver()
    assert planned(replica, agents["n1"]) == {1}


def test_planned_card_that_gets_a_gpuid_cannot_be_partitioned_again() -> None:
    """Another replica has led, and bound the MtgpuPod."""
    replica, agents = cluster(("n1", MPS, 2))
    assert planned(replica, agents["n1"]) == {0}
    replica.api.put("mtgpupods", b.mtgpupod(bound="GPU-n1-0"))
    replica.deliver()
    target = replica.state.partitions.get("n1")
    assert target is not None
    assert [index for index, _ in target.cards.cards] == [1]


def test_partitioned_card_is_not_offered_to_mtgpupods() -> None:
    replica, agents = cluster(("n1", MPS, 2))
    agents["n1"].make(*slices((0, 0, "4gb")))
    replica.deliver()
    assert [s.card.index for s in replica.state.mtgpupods.snapshot("n1").node.cards] == [1]
    assert [s.card.index for s in replica.state.node_snapshot("n1", "", "zxcvb").cards] == [1]


def test_slice_in_an_allocation_record_is_held(made: tuple[Replica, Agent]) -> None:
    replica, _ = made
    bind(replica, wants("p", {"mig-2g.20gb": 1}))
    assert offered(replica) == {"mig-1g.10gb 0": True, "mig-2g.20gb 2": False}
    assert offered(Replica(replica.api)) == offered(replica)


def test_slice_is_held_until_the_node_reports_it_free(made: tuple[Replica, Agent]) -> None:
    replica, agent = made
    bind(replica, wants("p", {"mig-2g.20gb": 1}))
    agent.give("uid-p", TWO)
    replica.api.edit_pod("p", lambda raw: raw["status"].update(phase="Succeeded"))
    replica.deliver()
    assert not offered(replica)["mig-2g.20gb 2"]
    replica.api.remove("pods", "p")
    replica.deliver()
    assert not offered(replica)["mig-2g.20gb 2"]
    replica.freed.clear()
    agent.give("uid-p")
    replica.deliver()
    assert offered(replica)["mig-2g.20gb 2"]
    assert "n1" in replica.freed


def test_slice_that_the_node_gave_is_held_in_addition_to_the_record(made: tuple[Replica, Agent]) -> None:
    replica, agent = made
    bind(replica, wants("p", {"mig-2g.20gb": 1}))
    agent.give("uid-p", ONE)
    replica.deliver()
    assert not any(offered(replica).values())


def test_reservation_moves_from_a_slice_that_another_pod_was_given() -> None:
    replica, agents = cluster(("n1", MIG, 1))
    agents["n1"].make(*slices((0, 0, "1g.10gb"), (0, 4, "1g.10gb")))
    (pod,) = submit(replica, wants("p", {"mig-1g.10gb": 1}))
    first = replica.decider.decide(pod, "n1")
    agents["n1"].give("stranger", *slices((0, 4, "1g.10gb")))
    replica.deliver()
    second = replica.decider.decide(pod, "n1")
    assert isinstance(first, Reservation)
    assert isinstance(second, Reservation)
    assert [d.placement.others[0][2] for d in (first, second)] == [(4,), (0,)]


@pytest.mark.parametrize(
    ("annotation", "text", "path"),
    [
        (ANNOTATION, "{", "metadata.annotations[dynamicgpuslice]: is not JSON"),
        (
            EXISTING,
            '{"cards": {"0": [{"profile": "4g", "start": 0}]}}',
            "metadata.annotations[mgpu.io/slices].cards[0][0]",
        ),
    ],
)
def test_unreadable_annotation_leaves_the_last_slices_in_force_with_a_warning(
    made: tuple[Replica, Agent], annotation: str, text: str, path: str
) -> None:
    replica, agent = made
    before = offered(replica)
    agent.api.annotate("n1", **{annotation: text})
    replica.deliver()
    assert offered(replica) == before
    assert [(name, reason) for name, reason, _ in replica.events] == [("n1", "BadSlices")]
    assert path in replica.events[0][2]
    (pod,) = submit(replica, wants("p", {"mig-4g.40gb": 1}))
    assert replica.filter.filter(pod, ["n1"]).failed["n1"].startswith("the node's report of its slices cannot be read")
    replica.planning.work()
    assert replica.state.partitions.plans() == ()
    # A scheduler that has never read the annotation cannot tell which cards are whole.
    assert offered(Replica(agent.api)) == {}


def test_unknown_label_rejects_the_node_with_a_warning(made: tuple[Replica, Agent]) -> None:
    replica, agent = made
    relabel(agent, **{LABEL: "mps,mig"})
    (pod,) = submit(replica, wants("p", {"mig-2g.20gb": 1}))
    assert replica.filter.filter(pod, ["n1"]).hopeless == {"n1": "node label gpu.partitioning is mps,mig, not mig"}
    assert "must be mig, mps or mig-claims, not 'mps,mig'" in replica.events[0][2]
    assert offered(replica) == {"mig-1g.10gb 0": True, "mig-2g.20gb 2": True}


def test_card_of_a_node_without_label_is_whole_once_no_pod_holds_a_slice_of_it(made: tuple[Replica, Agent]) -> None:
    replica, agent = made
    bind(replica, wants("p", {"mig-2g.20gb": 1}))
    relabel(agent)
    replica.deliver()
    assert offered(replica) == {"gpu 0": False}
    replica.api.remove("pods", "p")
    replica.deliver()
    assert offered(replica) == {"gpu 0": True}


def test_card_with_slices_of_another_mode_is_not_partitioned() -> None:
    replica, agents = cluster(("n1", MIG, 1))
    agents["n1"].make(TWO)
    bind(replica, wants("p", {"mig-2g.20gb": 1}))
    agents["n1"].made, agents["n1"].mode = {}, MPS
    relabel(agents["n1"], **{LABEL: MPS})
    agents["n1"].report()
    (pod,) = submit(replica, wants("q", {"gpu-4gb": 1}))
    assert "in use by pods" in replica.filter.filter(pod, ["n1"]).failed["n1"]
    assert offered(replica) == {"gpu 0": False}


def test_card_is_either_shared_or_partitioned() -> None:
    replica, _ = cluster(("n1", MPS, 1))
    (pod, share) = submit(replica, wants("p", {"gpu-4gb": 1}), b.share("q"))
    target = replica.state.partitions.get("n1")
    assert target
    assert isinstance(replica.decider.decide(share, "n1"), Reservation)
    assert not replica.state.partitions.add_plan(PartitionPlan("n1", 1, slices((0, 0, "4gb"))), target.version)
    refused = "insufficient slices (1 card: 1 in use by pods that request no slice)"
    assert replica.filter.filter(pod, ["n1"]).failed == {"n1": refused}
    decision = replica.state.reservation("uid-q")
    assert decision
    replica.state.reservations.cancel(decision)
    replica.filter.filter(pod, ["n1"])
    replica.planning.work()
    assert not isinstance(replica.decider.decide(share, "n1"), Reservation)


def test_node_that_is_created_again_has_no_plan(made: tuple[Replica, Agent]) -> None:
    replica, agent = made
    target = replica.state.partitions.get("n1")
    assert target
    assert replica.state.partitions.add_plan(PartitionPlan("n1", 5, (), None), target.version)
    agent.api.remove("nodes", "n1")
    replica.deliver()
    assert replica.state.partitions.get("n1") is None
    assert replica.state.partitions.plans() == ()
    agent.api.put("nodes", b.node("n1", labels={LABEL: MIG}))
    replica.deliver()
    assert offered(replica) == {}


@pytest.mark.parametrize(("theirs", "helps"), [(("uid-low",), True), ((), False)])
def test_preemption_evicts_pods_only_if_their_slices_can_be_repartitioned(
    made: tuple[Replica, Agent], theirs: tuple[str, ...], helps: bool
) -> None:
    replica, agent = made
    bind(replica, wants("low", {"mig-2g.20gb": 1}))
    agent.give("uid-low", TWO)
    raw = wants("p", {"mig-7g.80gb": 1})
    raw["spec"]["priority"] = 10
    (pod,) = submit(replica, raw)
    assert replica.filter.filter(pod, ["n1"]).failed.keys() == {"n1"}  # not hopeless
    found = replica.preemption.choose(pod, raw, {"n1": Victims(theirs)})
    assert found == ({"n1": Victims(theirs)} if helps else {})
