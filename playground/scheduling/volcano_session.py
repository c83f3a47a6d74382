"""Places the pods of jobs as a session of Volcano's scheduler does, with its plugins gang, binpack and extender.

Volcano counts the resources of a node as sums. For each pod of a job it asks `predicate` of the extender for every node
with enough of them, chooses the best node, and calls `allocate`. The node to which the pod is nominated comes first. At
the end of the job it binds the pods if at least `min_member` of them have a node. Otherwise it takes the allocations
back, the last one first, and calls `deallocate` (volcano.sh, pkg/scheduler/framework/statement.go and
pkg/scheduler/plugins/{gang,binpack,extender}). Tests use the module. Pipelined tasks, queues, preemption and the order
of jobs by share are not modelled.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mgpu.model.compute_resources import allocatable, requests_of
from playground import fit

Raw = Mapping[str, Any]
Call = Callable[[str, dict[str, Any]], Mapping[str, Any]]
"""Calls a verb of the extender with a request, and returns the reply."""

_PENDING, _ALLOCATED, _RUNNING = 1, 2, 32


@dataclass(frozen=True, slots=True)
class Job:
    """The pods of a PodGroup. Those with `spec.nodeName` are bound already."""

    name: str
    min_member: int
    pods: Sequence[Raw]


@dataclass(slots=True)
class _Node:
    """A node of the session, with the pods on it and the sum of their requests."""

    raw: Raw
    used: Counter[str] = field(default_factory=Counter)
    pods: dict[str, Raw] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.raw["metadata"]["name"])

    def add(self, pod: Raw) -> None:
        self.pods[pod["metadata"]["uid"]] = pod
        self.used.update({**requests_of(pod), "pods": 1})

    def remove(self, pod: Raw) -> None:
        del self.pods[pod["metadata"]["uid"]]
        self.used.subtract({**requests_of(pod), "pods": 1})


class Session:
    """One session. Create a new one for the next session.

    Args:
        pods: The pods that are bound.
        call: The extender.
        binpack: The resource of which a node should have the least left; "" to prefer the last node by name.
        predicate: Whether the configuration has `extender.predicateVerb`.
        prefer: A node that is chosen among equal ones. Volcano chooses at random.
    """

    def __init__(
        self,
        nodes: Iterable[Raw],
        pods: Iterable[Raw],
        call: Call,
        binpack: str = "",
        *,
        predicate: bool = True,
        prefer: str = "",
    ) -> None:
        self._nodes = {str(raw["metadata"]["name"]): _Node(raw) for raw in nodes}
        self._call = call
        self._binpack = binpack
        self._has_predicate = predicate
        self._prefer = prefer
        self.refused: list[str] = []
        for pod in pods:
            self._nodes[pod["spec"]["nodeName"]].add(pod)

    def place(self, job: Job) -> dict[str, str]:
        """Return the node for each pod to bind, by UID. The result is empty if the gang does not fit."""
        placed: dict[str, str] = {}
        waiting = [pod for pod in job.pods if not pod["spec"].get("nodeName")]
        for pod in waiting:
            node = self._choose(pod, job)
            if node is not None and self._allocate(pod, node, job):
                placed[pod["metadata"]["uid"]] = node.name
        if len(job.pods) - len(waiting) + len(placed) >= job.min_member:
            return placed
        by_uid = {pod["metadata"]["uid"]: pod for pod in waiting}
        for uid, name in reversed(placed.items()):
            self._deallocate(by_uid[uid], self._nodes[name], job)
        return {}

    def _choose(self, pod: Raw, job: Job) -> _Node | None:
        nominated = self._nodes.get((pod.get("status") or {}).get("nominatedNodeName", ""))
        possible = self._possible([nominated], pod, job) if nominated else []
        possible = possible or self._possible(self._nodes.values(), pod, job)
        return max(possible, key=lambda node: (self._score(node), node.name == self._prefer, node.name), default=None)

    def _possible(self, nodes: Iterable[_Node], pod: Raw, job: Job) -> list[_Node]:
        possible = [node for node in nodes if not fit.fits(pod, node.raw, dict(node.used))]
        return [node for node in possible if not (self._has_predicate and self._predicate(pod, node, job))]

    def _score(self, node: _Node) -> float:
        total = allocatable(node.raw).get(self._binpack, 0)
        return node.used[self._binpack] / total if total else 0.0

    def _predicate(self, pod: Raw, node: _Node, job: Job) -> bool:
        """Return whether the extender rejects the node."""
        tasks = {uid: _task(other, "", node.name, _RUNNING) for uid, other in node.pods.items()}
        request = {"task": _task(pod, job.name, "", _PENDING), "node": {"Name": node.name, "Tasks": tasks}}
        return bool(self._call("predicate", request).get("status"))

    def _allocate(self, pod: Raw, node: _Node, job: Job) -> bool:
        node.add(pod)
        reply = self._call("allocate", {"task": _task(pod, job.name, node.name, _ALLOCATED)})
        if reply.get("errorMessage"):
            self.refused.append(reply["errorMessage"])
            self._deallocate(pod, node, job)
        return not reply.get("errorMessage")

    def _deallocate(self, pod: Raw, node: _Node, job: Job) -> None:
        node.remove(pod)
        self._call("deallocate", {"task": _task(pod, job.name, node.name, _PENDING)})


def _task(pod: Raw, job: str, node: str, status: int) -> dict[str, Any]:
    """Return a TaskInfo as Go encodes it, with the fields that mgpu reads and those that name the task."""
    meta = pod["metadata"]
    # Volcano sets the node of the pod itself when it places the task, and never clears it.
    placed = {**pod, "spec": {**pod["spec"], "nodeName": node}} if node else dict(pod)
    return {
        "UID": meta["uid"],
        "Job": f"{meta['namespace']}/{job}",
        "Name": meta["name"],
        "Namespace": meta["namespace"],
        "NodeName": node,
        "Status": status,
        "Pod": placed,
    }
