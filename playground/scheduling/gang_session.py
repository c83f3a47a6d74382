"""Schedules the pods of groups as kube-scheduler does: in a cycle of the whole group, or with waits in Permit.

Since Kubernetes 1.36 kube-scheduler schedules a PodGroup in one cycle (`schedule_one_podgroup.go`): it filters one
member after the other, assumes those that pass, and goes on after one that does not. It binds the assumed pods if they
and the bound ones are at least `minCount`, and otherwise forgets them. The coscheduling plugin schedules each pod in a
cycle of its own. A member waits in Permit for the others, and if one of them fits nowhere, all waiting ones are
rejected. Tests use the module. Scores, preemption and back-off are not modelled.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mgpu.model.compute_resources import requests_of
from playground import fit

Raw = Mapping[str, Any]
Filter = Callable[[Raw, list[str]], Sequence[str]]
"""Calls the extender's filter for a pod with the names of nodes, and returns the names that pass."""


@dataclass(slots=True)
class Group:
    """A PodGroup, with the nodes of its assumed pods by UID.

    Attributes:
        min_count: The number of members that have to be scheduled at the same time.
        bound: How many members are bound.
    """

    min_count: int
    bound: int = 0
    assumed: dict[str, str] = field(default_factory=dict)


class GangScheduling:
    """The nodes, and the resources that bound and assumed pods request on them.

    Args:
        pods: The pods that are bound.
    """

    def __init__(self, nodes: Iterable[Raw], pods: Iterable[Raw], extender: Filter) -> None:
        self._nodes = {str(raw["metadata"]["name"]): raw for raw in nodes}
        self._used: dict[str, Counter[str]] = {name: Counter() for name in self._nodes}
        self._requests: dict[str, Counter[str]] = {}
        self._filter = extender
        for pod in pods:
            self._assume(pod, pod["spec"]["nodeName"])

    def group_cycle(self, group: Group, pods: Iterable[Raw]) -> dict[str, str]:
        """Schedule the waiting members of a group. Return the node for each pod to bind, by UID."""
        for pod in pods:
            node = self._schedule(pod)
            if node is not None:
                group.assumed[pod["metadata"]["uid"]] = node
        return self._permit(group) or self._reject(group)

    def pod_cycle(self, group: Group, pod: Raw) -> dict[str, str]:
        """Schedule one member. Return the node for each member that need not wait in Permit any longer, by UID."""
        node = self._schedule(pod)
        if node is None:
            return self._reject(group)
        group.assumed[pod["metadata"]["uid"]] = node
        return self._permit(group)

    def _schedule(self, pod: Raw) -> str | None:
        """Return the node for the pod, which is then assumed there."""
        possible = [name for name, raw in self._nodes.items() if not fit.fits(pod, raw, dict(self._used[name]))]
        passed = self._filter(pod, possible) if possible else ()
        if not passed:
            return None
        self._assume(pod, passed[0])
        return passed[0]

    def _assume(self, pod: Raw, node: str) -> None:
        requests = self._requests[pod["metadata"]["uid"]] = Counter({**requests_of(pod), "pods": 1})
        self._used[node].update(requests)

    def _permit(self, group: Group) -> dict[str, str]:
        """Return the assumed pods if the group is complete with them."""
        if group.bound + len(group.assumed) < group.min_count:
            return {}
        permitted = group.assumed
        group.bound += len(permitted)
        group.assumed = {}
        return permitted

    def _reject(self, group: Group) -> dict[str, str]:
        """Forget the assumed pods of the group."""
        for uid, node in group.assumed.items():
            self._used[node].subtract(self._requests.pop(uid))
        group.assumed = {}
        return {}
