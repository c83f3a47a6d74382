"""Gangs whose members request slices: partitions are created for the whole gang, and all members are bound, or none."""

from typing import Any

import orjson
import pytest

from mgpu.model.gangs import KUBERNETES
from mgpu.model.node_slices import LABEL
from tests.scheduler.fake import admitted, bind_all, clients
from tests.scheduler.gangs import pod_group
from tests.scheduler.partitioning.cluster import MIG, MPS, cluster, slices, turn, wants

Raw = dict[str, Any]
WHOLE = slices((0, 0, "1g.10gb"), (0, 1, "1g.10gb"), (0, 2, "2g.20gb"), (0, 4, "2g.20gb"), (0, 6, "1g.10gb"))


class SliceGangs:
    """Partitionable nodes with one card each, their agents, and a kube-scheduler that binds a whole gang or nothing."""

    def __init__(self, *modes: str) -> None:
        self.replica, self.agents = cluster(*((f"n{i}", mode, 1) for i, mode in enumerate(modes, 1)))
        self.replica.api.admit = admitted(self.replica)
        self.client = clients(self.replica)[1]
        self.gangs: dict[str, list[str]] = {}

    def gang(self, name: str, *wanted: str) -> list[str]:
        """Create a PodGroup whose pods request a slice of these names each, and all are needed."""
        self.replica.state.gangs.pod_group_changed(KUBERNETES, pod_group(name, len(wanted)))
        self.gangs[name] = [f"{name}-{i}" for i in range(len(wanted))]
        for pod, slice_name in zip(self.gangs[name], wanted, strict=True):
            raw = wants(pod, {slice_name: 1})
            raw["spec"]["schedulingGroup"] = {"podGroupName": name}
            self.replica.api.put("pods", raw)
        self.replica.deliver()
        return self.gangs[name]

    def filter(self, pod: str) -> Any:
        body = {"Pod": self.replica.api.pod(pod), "NodeNames": list(self.agents)}
        reply = self.client.post("/filter", json=body)
        assert reply.status_code == 200
        return orjson.loads(reply.data)

    def passed(self, pod: str) -> list[str]:
        found: list[str] = self.filter(pod)["NodeNames"]
        return found

    def waiting(self, gang: str) -> list[str]:
        return [pod for pod in self.gangs[gang] if not self.replica.api.pod(pod)["spec"].get("nodeName")]

    def cycle(self, gang: str) -> None:
        """Filter all waiting members, and bind them if all pass."""
        chosen = {f"uid-{pod}": found for pod in self.waiting(gang) if (found := self.passed(pod))}
        if len(chosen) == len(self.gangs[gang]):
            assert bind_all(self.replica, {uid: node for uid, (node, *_) in chosen.items()}) == []

    def rounds(self, *gangs: str, count: int = 6) -> None:
        """Let kube-scheduler, the partition controller and the agents take turns."""
        for _ in range(count):
            for gang in gangs:
                self.cycle(gang)
            turn(self.replica, self.agents.values())
            self.replica.clock.now += 1

    def bound(self, gang: str) -> int:
        return len(self.gangs[gang]) - len(self.waiting(gang))

    def held(self) -> set[str]:
        return {holding.name for holding in self.replica.state.holdings()}

    def plans(self) -> int:
        return sum((agent.found.partitioning.plan or 999) - 999 for agent in self.agents.values())


def test_members_get_different_slices_that_exist() -> None:
    scene = SliceGangs(MIG)
    scene.agents["n1"].make(*WHOLE)
    scene.replica.deliver()
    first, second = scene.gang("a", "mig-2g.20gb", "mig-2g.20gb")
    assert scene.passed(first) == ["n1"]
    assert scene.held() == set()
    assert scene.passed(second) == ["n1"]
    assert scene.held() == {first, second}
    assert bind_all(scene.replica, {f"uid-{pod}": "n1" for pod in (first, second)}) == []
    assert scene.bound("a") == 2
    assert not scene.plans()


def test_gang_that_no_partitions_can_serve_is_not_bound_and_holds_nothing() -> None:
    scene = SliceGangs(MIG)
    scene.agents["n1"].make(*WHOLE)
    scene.replica.deliver()
    scene.gang("a", *["mig-2g.20gb"] * 4)
    scene.rounds("a")
    assert scene.bound("a") == 0
    assert scene.held() == set()


def test_partitions_are_created_for_all_members() -> None:
    scene = SliceGangs(MIG)
    scene.gang("a", *["mig-2g.20gb"] * 3)
    scene.rounds("a")
    assert scene.bound("a") == 3
    assert scene.plans() == 1


def test_partition_for_one_member_leaves_the_places_of_the_others() -> None:
    """The slice that exists is the first member's place, so it is no slice for the second one."""
    scene = SliceGangs(MIG)
    scene.agents["n1"].make(*slices((0, 0, "1g.10gb"), (0, 4, "2g.20gb")))
    scene.replica.deliver()
    scene.gang("a", "mig-2g.20gb", "mig-2g.20gb")
    scene.rounds("a")
    assert scene.bound("a") == 2
    assert slices((0, 4, "2g.20gb"))[0] in scene.agents["n1"].made


def test_partition_is_created_on_another_node_than_the_places() -> None:
    scene = SliceGangs(MIG, MIG)
    scene.agents["n1"].make(*slices((0, 0, "7g.80gb")))
    scene.replica.deliver()
    scene.gang("a", "mig-7g.80gb", "mig-7g.80gb")
    scene.rounds("a")
    assert scene.bound("a") == 2


def test_shares_under_mps_are_created_for_all_members() -> None:
    scene = SliceGangs(MPS)
    scene.gang("a", "gpu-40gb")
    scene.gang("b", "gpu-30gb", "gpu-4gb")
    scene.rounds("a", "b")
    assert (scene.bound("a"), scene.bound("b")) == (1, 2)


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_of_two_gangs_for_the_same_partitions_one_is_bound_whole(order: str) -> None:
    scene = SliceGangs(MIG, MIG)
    scene.gang("a", "mig-7g.80gb", "mig-7g.80gb")
    scene.gang("b", "mig-7g.80gb", "mig-7g.80gb")
    scene.rounds(*order, count=8)
    assert sorted((scene.bound("a"), scene.bound("b"))) == [0, 2]
    assert len(scene.held()) == 2


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_of_two_gangs_that_need_different_partitions_one_is_bound_whole_and_then_the_other(order: str) -> None:
    scene = SliceGangs(MIG)
    scene.gang("a", *["mig-3g.40gb"] * 2)
    scene.gang("b", *["mig-2g.20gb"] * 3)
    scene.rounds(*order, count=8)
    first, second = ("a", "b") if scene.bound("a") else ("b", "a")
    assert (scene.bound(first), scene.bound(second)) == (len(scene.gangs[first]), 0)
    for pod in scene.gangs[first]:
        scene.replica.api.remove("pods", pod)
    for agent in scene.agents.values():
        for pod in scene.gangs[first]:
            agent.give(f"uid-{pod}")
    scene.replica.deliver()
    scene.rounds(second, count=8)
    assert scene.bound(second) == len(scene.gangs[second])


def test_plan_for_a_gang_does_not_touch_nodes_without_the_label() -> None:
    scene = SliceGangs(MIG)
    scene.replica.api.nodes["n1"]["metadata"]["labels"].pop(LABEL)
    scene.replica.api.put("nodes", scene.replica.api.nodes["n1"])
    scene.gang("a", "mig-2g.20gb", "mig-2g.20gb")
    scene.rounds("a", count=3)
    assert (scene.bound("a"), scene.plans()) == (0, 0)


def test_members_on_several_nodes_get_partitions_before_pods_of_other_gangs() -> None:
    """Two of the four fit on a card. The slices of the other gang would leave room for one."""
    scene = SliceGangs(MIG, MIG)
    scene.gang("a", *["mig-3g.40gb"] * 4)
    scene.gang("b", *["mig-2g.20gb"] * 3)
    scene.rounds("a", "b", count=10)
    assert (scene.bound("a"), scene.bound("b")) == (4, 0)


def test_member_that_fits_nowhere_beside_the_others_is_told_why() -> None:
    scene = SliceGangs(MIG)
    scene.agents["n1"].make(*slices((0, 0, "7g.80gb")))
    scene.replica.deliver()
    first, second = scene.gang("a", "mig-7g.80gb", "mig-7g.80gb")
    assert scene.passed(first) == ["n1"]
    assert scene.filter(second)["FailedNodes"] == {
        "n1": "insufficient slices (1 card: 1 7g.80gb in use at 0: no room for 7g.80gb)"
    }
