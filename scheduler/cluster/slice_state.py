"""Stores the partitioning of nodes: the state in their annotations, and plans that are not in the annotations yet.

`Nodes` stores the annotations here, and `PartitionableNodes` the plans. Annotations that cannot be read must never free
a slice: the last valid annotations stay in force.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mgpu.kube.events import node_reference
from mgpu.model import node_slices
from mgpu.model.errors import BadObject
from mgpu.model.ledger import Share
from mgpu.model.node_slices import MODES, NO_SLICES, NodeSlices, read_slices, shares_by_pod
from mgpu.model.pods import Node
from mgpu.model.slice_names import MIG, MPS, Slice, count_slices
from scheduler.cluster.events import ObjectWarning, Publisher

_KEYS = (node_slices.ANNOTATION, node_slices.EXISTING, node_slices.PLANNED)
_MAX_MESSAGE = 1024
"""The maximum length of a message, in characters. A message about invalid annotations may quote a whole annotation."""


@dataclass(frozen=True, slots=True)
class PartitionPlan:
    """A partition plan for a node.

    Attributes:
        id: The id in the annotations. The ids of a node increase.
        slices: All slices that the node is to have, sorted by place.
        previous_id: The id of the previous plan, or None for the node's first plan.
        preexisting: The slices that existed before the node's first plan.
    """

    node: str
    id: int
    slices: tuple[Slice, ...]
    previous_id: int | None = None
    preexisting: frozenset[Slice] = frozenset()

    def applied_to(self, slices: NodeSlices) -> NodeSlices:
        """Return the partitioning of the node as its annotations will describe it with this plan."""
        spec = replace(slices.partitioning, spec=count_slices(self.slices), plan=self.id)
        return replace(slices, partitioning=spec, planned=self.slices, preexisting=self.preexisting)


@dataclass(frozen=True, slots=True)
class _Observed:
    """A node with the partitioning label.

    Attributes:
        annotations: The label and the annotations that were read. Events that change none of them are ignored.
        slices: The last partitioning that could be read.
        held: By pod UID, the slices that the node gave to the pod, according to `slices`.
        problem: Why the present annotations cannot be read, or None if `slices` is read from them.
    """

    annotations: tuple[str | None, ...]
    slices: NodeSlices
    held: Mapping[str, tuple[Share, ...]]
    problem: str | None = None


_UNLABELLED = _Observed((), NO_SLICES, {})


class SliceStates:
    """Part of the ClusterCache, which holds its lock around every call. Nodes without the label are not stored.

    It publishes a warning for invalid annotations and for a plan that the agent refused.
    """

    def __init__(self, events: Publisher) -> None:
        self._events = events
        self._nodes: dict[str, _Observed] = {}
        self._plans: dict[str, PartitionPlan] = {}

    def node_changed(self, node: Node) -> None:
        """Store the label and annotations of a Node."""
        label = node.labels.get(node_slices.LABEL)
        if not label:
            self.node_gone(node.name)
            return
        annotations = (label, *(node.annotations.get(key) for key in _KEYS))
        before = self._nodes.get(node.name)
        if before is not None and before.annotations == annotations:
            return
        last = _last(before, label)
        try:
            slices = read_slices(node)
        except BadObject as error:
            self._nodes[node.name] = _Observed(annotations, last, shares_by_pod(last), str(error)[:_MAX_MESSAGE])
            self._warn(node.name, "BadSlices", f"Ignoring invalid annotations about slices: {error}")
            return
        self._nodes[node.name] = _Observed(annotations, slices, shares_by_pod(slices))
        if slices.refused and slices.refused != last.refused:
            plan, reason = slices.refused
            self._warn(node.name, "PlanRefused", f"the agent refused partition plan {plan}: {reason}")
        self._drop_observed_plan(node.name, slices)

    def node_gone(self, name: str) -> None:
        """Remove a node that was deleted or has lost its label."""
        self._nodes.pop(name, None)
        self._plans.pop(name, None)

    def names(self) -> tuple[str, ...]:
        """Return the names of the nodes with the label, sorted."""
        return tuple(sorted(self._nodes))

    def of(self, name: str) -> NodeSlices:
        """Return the partitioning of a node, with the plan that its annotations do not have yet, if there is one."""
        slices = self._nodes.get(name, _UNLABELLED).slices
        plan = self._plans.get(name)
        return plan.applied_to(slices) if plan else slices

    def held(self, name: str) -> Mapping[str, tuple[Share, ...]]:
        """Return by pod UID the slices that the node gave to the pod."""
        return self._nodes.get(name, _UNLABELLED).held

    def problem(self, name: str) -> str | None:
        """Return the reason why the present annotations of the node cannot be read and are not in force, or None."""
        return self._nodes.get(name, _UNLABELLED).problem

    def is_unreadable(self, name: str) -> bool:
        """Return whether the slices of a labelled node are unknown.

        They are unknown if its annotations cannot be read, and if no earlier annotations described any slices.
        """
        observed = self._nodes.get(name, _UNLABELLED)
        return observed.problem is not None and observed.slices in (NodeSlices(MIG), NodeSlices(MPS))

    def add_plan(self, plan: PartitionPlan) -> None:
        """Apply a plan until the node's annotations have it or a later one, or until it is dropped."""
        if plan.node in self._nodes:
            self._plans[plan.node] = plan

    def drop_plan(self, plan: PartitionPlan) -> None:
        """Stop applying a plan. A later plan of the same node stays."""
        if self._plans.get(plan.node) == plan:
            del self._plans[plan.node]

    def plans(self) -> tuple[PartitionPlan, ...]:
        """Return the plans that the annotations of their nodes do not have yet, sorted by node."""
        return tuple(plan for _, plan in sorted(self._plans.items()))

    def _drop_observed_plan(self, name: str, slices: NodeSlices) -> None:
        plan = self._plans.get(name)
        if plan is not None and slices.partitioning.plan is not None and slices.partitioning.plan >= plan.id:
            del self._plans[name]

    def _warn(self, name: str, reason: str, message: str) -> None:
        self._events.publish(ObjectWarning(node_reference(name), reason, message[:_MAX_MESSAGE]))


def _last(before: _Observed | None, label: str) -> NodeSlices:
    """Return the partitioning that was read last; for a new node, one with only the mode of its label."""
    if before is not None:
        return before.slices
    return NodeSlices(label) if label in MODES else NO_SLICES
