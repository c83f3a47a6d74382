"""A cluster without threads, whose kube-scheduler schedules gangs with mgpu's extender."""

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from mgpu.model.gangs import COSCHEDULING, GANG, GANG_SIZE, KUBERNETES
from playground.scheduling.gang_session import GangScheduling, Group
from tests import builders as b
from tests.scheduler.fake import Replica, admitted, bind_all, clients, cluster

Raw = dict[str, Any]


def wanting(name: str, core: int = 60, gang: str = "", **spec: Any) -> Raw:
    """Return a pod that requests a share of a card, or a whole one for 100. gang: the name of its PodGroup."""
    pod = b.pod(name, b.container("c", core, None if core == 100 else 1024))
    if gang:
        pod["spec"]["schedulingGroup"] = {"podGroupName": gang}
    pod["spec"].update(spec)
    return pod


def pod_group(name: str, count: int) -> Raw:
    return {
        "metadata": {"namespace": "default", "name": name},
        "spec": {"schedulingPolicy": {"gang": {"minCount": count}}},
    }


def labelled(pod: Raw, **labels: str) -> Raw:
    pod["metadata"].setdefault("labels", {}).update(labels)
    return pod


class GangCluster:
    """A cluster, one replica of mgpu's scheduler, and a kube-scheduler that schedules groups."""

    def __init__(self, *cards: tuple[str, int]) -> None:
        self.api = cluster(*cards)
        for (_, count), raw in zip(cards, self.api.nodes.values(), strict=True):
            raw["status"]["allocatable"] |= {b.CORE: str(100 * count), b.MEMORY: str(81920 * count)}
        self.replica = Replica(self.api)
        self.replica.deliver()
        self.api.admit = admitted(self.replica)
        self.client = clients(self.replica)[1]
        self.gangs: dict[str, list[str]] = {}
        self.groups: dict[str, Group] = {}
        self.scheduling = GangScheduling(self.api.nodes.values(), (), self.filter)
        self.calls = 0

    def gang(self, name: str, count: int, core: int = 60, minimum: int | None = None) -> list[str]:
        """Create a PodGroup and its pods. Return the names of the pods."""
        least = count if minimum is None else minimum
        self.replica.state.gangs.pod_group_changed(KUBERNETES, pod_group(name, least))
        self.groups[name] = Group(least)
        self.gangs[name] = [self.create(wanting(f"{name}-{i}", core, name)) for i in range(count)]
        return self.gangs[name]

    def create(self, pod: Raw) -> str:
        name = str(self.api.put("pods", pod)["metadata"]["name"])
        self.replica.deliver()
        return name

    def answer(self, pod: Raw, names: Sequence[str]) -> Any:
        self.calls += 1
        reply = self.client.post("/filter", json={"Pod": pod, "NodeNames": list(names)})
        assert reply.status_code == 200
        return orjson.loads(reply.data)

    def filter(self, pod: Any, names: list[str]) -> list[str]:
        passed: list[str] = self.answer(pod, names)["NodeNames"]
        return passed

    def passed(self, pod: str, *names: str) -> list[str]:
        """Return the nodes that the filter answers, of these or all."""
        return self.filter(self.api.pod(pod), list(names) or list(self.api.nodes))

    def why(self, pod: str, node: str) -> str:
        reply = self.answer(self.api.pod(pod), [node])
        reasons: dict[str, str] = {**reply["FailedNodes"], **reply["FailedAndUnresolvableNodes"]}
        return reasons[node]

    def waiting(self, gang: str) -> list[Raw]:
        return [raw for pod in self.gangs[gang] if not (raw := self.api.pod(pod))["spec"].get("nodeName")]

    def cycle(self, *gangs: str) -> list[str]:
        """Run the cycles of groups, and bind. Return the bindings that were refused."""
        refused = []
        for gang in gangs:
            refused += bind_all(self.replica, self.scheduling.group_cycle(self.groups[gang], self.waiting(gang)))
        return refused

    def bound(self, gang: str) -> int:
        return len(self.gangs[gang]) - len(self.waiting(gang))

    def held(self) -> set[str]:
        """Return the names of the pods that hold cards or have reserved some."""
        return {holding.name for holding in self.replica.state.holdings()}

    def used(self, node: str) -> list[int]:
        """Return the core of each card that pods hold, in percent."""
        return [state.core_used // 10 for state in self.replica.state.node_snapshot(node, "").cards]


def coscheduled(cluster: GangCluster, name: str, count: int) -> Callable[[Raw], Raw]:
    """Create a PodGroup of the coscheduling plugin. Return a function that makes a pod its member."""
    group = {"metadata": {"namespace": "default", "name": name}, "spec": {"minMember": count}}
    cluster.replica.state.gangs.pod_group_changed(COSCHEDULING, group)
    return lambda pod: labelled(pod, **{"scheduling.x-k8s.io/pod-group": name})


def in_own_gang(pod: Raw, name: str, size: int) -> Raw:
    return labelled(pod, **{GANG: name, GANG_SIZE: str(size)})
