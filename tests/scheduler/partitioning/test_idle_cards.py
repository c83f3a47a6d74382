"""Cards that MPS slices have cut become whole again when no pod uses the slices."""

from typing import Any

import pytest

from mgpu.model.errors import BadObject
from mgpu.model.node_slices import ANNOTATION, unpartitioned_cards, with_spec
from mgpu.settings import load_settings
from scheduler.cluster.reservations import Reservation
from tests import builders as b
from tests.scheduler.fake import SETTINGS, Replica
from tests.scheduler.partitioning.cluster import MIG, MPS, Agent, cluster, known, slices, submit, turn, wants

IDLE = SETTINGS.dialects.slices.mps_idle_seconds


def mps(cards: int = 2, settings: Any = SETTINGS) -> tuple[Replica, Agent]:
    replica, agents = cluster(("n1", MPS, cards), settings=settings)
    return replica, agents["n1"]


def run(replica: Replica, agent: Agent, seconds: float) -> None:
    for _ in range(int(seconds)):
        turn(replica, [agent])
        replica.clock.now += 1
    turn(replica, [agent])


def use(replica: Replica, agent: Agent, name: str, request: dict[str, int]) -> None:
    """A Pod comes, gets its slices and is bound."""
    (pod,) = submit(replica, wants(name, request))
    replica.filter.filter(pod, ["n1"])
    run(replica, agent, 2)
    decision = replica.decider.decide(known(replica, name), "n1")
    assert isinstance(decision, Reservation)
    submit(replica, wants(name, request, node="n1", annotations=dict(decision.annotations)))


def end(replica: Replica, name: str) -> None:
    replica.api.remove("pods", name)
    replica.deliver()


def whole(agent: Agent, cards: int = 2) -> set[int]:
    return {card.index for card in unpartitioned_cards(agent.found, b.cards(cards, 80, node="n1"))}


def test_the_cards_of_short_pods_are_whole_again_after_the_idle_time() -> None:
    replica, agent = mps()
    for name in "ab":
        use(replica, agent, name, {"gpu-80gb": 1})
    assert whole(agent) == set()
    end(replica, "a")
    end(replica, "b")
    run(replica, agent, IDLE - 2)
    assert whole(agent) == set()
    run(replica, agent, 4)
    assert whole(agent) == {0, 1}
    assert "gpu-80gb" not in replica.api.configmaps["mps-configmap"]["data"]["n1"]
    assert agent.found.partitioning.applied == agent.found.partitioning.plan


def test_a_card_with_a_slice_in_use_stays_as_it_is() -> None:
    replica, agent = mps(1)
    use(replica, agent, "a", {"gpu-10gb": 1})
    use(replica, agent, "b", {"gpu-20gb": 1})
    end(replica, "a")
    plan = agent.found.partitioning.plan
    run(replica, agent, 3 * IDLE)
    assert {s.name for s in agent.made} == {"10gb", "20gb"}
    assert agent.found.partitioning.plan == plan


def test_slices_for_which_pods_wait_that_never_come_do_not_keep_a_card() -> None:
    """Each new Pod has slices of another size cut on the card."""
    replica, agent = mps(1)
    found = []
    for i in range(int(3 * IDLE)):
        (pod,) = submit(replica, wants(f"p{i}", {f"gpu-{1 + i % 40}gb": 1}))
        replica.filter.filter(pod, ["n1"])
        run(replica, agent, 1)
        if i >= 3:
            end(replica, f"p{i - 3}")
        found.append(bool(whole(agent, 1)))
    assert not found[5]
    assert sum(found) >= IDLE  # at least a third of the time


def test_a_pod_that_passed_the_filter_keeps_its_slice() -> None:
    replica, agent = mps(1)
    use(replica, agent, "a", {"gpu-10gb": 1})
    end(replica, "a")
    run(replica, agent, IDLE - 4)
    (pod,) = submit(replica, wants("b", {"gpu-10gb": 1}))
    for _ in range(8):
        assert replica.filter.filter(pod, ["n1"]).passed == ["n1"]
        run(replica, agent, 1)
    assert isinstance(replica.decider.decide(pod, "n1"), Reservation)
    run(replica, agent, 2 * IDLE)
    assert whole(agent, 1) == set()


def test_a_decision_that_comes_between_keeps_its_slice() -> None:
    replica, agent = mps(1)
    use(replica, agent, "a", {"gpu-10gb": 1})
    end(replica, "a")
    run(replica, agent, 1)
    (pod,) = submit(replica, wants("b", {"gpu-10gb": 1}))
    replica.clock.now += IDLE
    assert isinstance(replica.decider.decide(pod, "n1"), Reservation)
    turn(replica, [agent])
    assert {s.name for s in agent.made} == {"10gb"}


def test_a_scheduler_that_begins_gives_the_slices_their_whole_time_again() -> None:
    replica, agent = mps(1)
    use(replica, agent, "a", {"gpu-10gb": 1})
    end(replica, "a")
    run(replica, agent, IDLE - 2)
    replica.api.watchers.clear()
    after = Replica(replica.api, replica.clock)
    after.planning.begin()
    run(after, agent, IDLE - 2)
    assert whole(agent, 1) == set()
    run(after, agent, 4)
    assert whole(agent, 1) == {0}


def test_slices_that_were_there_before_mgpu_planned_stay() -> None:
    """An administrator made them, by the ConfigMap or by the seed's annotation."""
    replica, agent = mps(1)
    agent.make(*slices((0, 0, "40gb")))
    replica.deliver()
    use(replica, agent, "a", {"gpu-30gb": 1})
    end(replica, "a")
    run(replica, agent, 2 * IDLE)
    assert slices((0, 0, "40gb"))[0] in agent.made
    use(replica, agent, "b", {"gpu-35gb": 1})  # further plans know it still
    end(replica, "b")
    run(replica, agent, 2 * IDLE)
    assert slices((0, 0, "40gb"))[0] in agent.made


def test_a_spec_that_somebody_else_wrote_stays() -> None:
    replica, agent = mps(1)
    agent.make(*slices((0, 0, "40gb")))
    replica.api.annotate("n1", **{ANNOTATION: with_spec(agent.said, {0: {"40gb": 1}}, 900)})
    agent.report(900)
    run(replica, agent, 3 * IDLE)
    assert agent.found.partitioning.plan == 900


def test_mig_instances_stay() -> None:
    replica, agents = cluster(("n1", MIG, 1))
    agent = agents["n1"]
    use(replica, agent, "a", {"mig-7g.80gb": 1})
    end(replica, "a")
    run(replica, agent, 3 * IDLE)
    assert {s.name for s in agent.made} == {"7g.80gb"}


def test_idle_seconds_of_0_keep_slices() -> None:
    replica, agent = mps(1, load_settings("dialects: {slices: {mpsIdleSeconds: 0}}"))
    use(replica, agent, "a", {"gpu-10gb": 1})
    end(replica, "a")
    run(replica, agent, 300)
    assert whole(agent, 1) == set()


@pytest.mark.parametrize("value", ["-1", "soon", ".inf", ".nan"])
def test_idle_seconds_that_are_no_time_are_refused(value: str) -> None:
    with pytest.raises(BadObject, match="mpsIdleSeconds"):
        load_settings(f"dialects: {{slices: {{mpsIdleSeconds: {value}}}}}")
