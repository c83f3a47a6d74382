"""The partitioning of nodes: what their annotations say, and plans that were decided here and are not there yet."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mgpu.kube.events import node_reference
from mgpu.model import node_slices
from mgpu.model.errors import BadObject
from mgpu.model.ledger import Share
from mgpu.model.node_slices import NO_SLICES, NodeSlices, held, read_slices
from mgpu.model.pods import Node
from mgpu.model.slice_names import MIG, MPS, Slice, counts
from scheduler.cluster.events import ObjectWarning, Publisher

_KEYS = (node_slices.ANNOTATION, node_slices.MADE, node_slices.PLANNED)
_MESSAGE_CHARACTERS = 1024
"""The reason why annotations are invalid may quote a whole annotation."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A partition plan for a node.

    Attributes:
        id: As the annotations have it; ids of a node grow.
        slices: All slices that the node shall have, by place.
        before: The id of the plan that it follows, None where it is the node's first.
        standing: Those of `slices` that were there without a plan of mgpu's.
    """

    node: str
    id: int
    slices: tuple[Slice, ...]
    before: int | None = None
    standing: frozenset[Slice] = frozenset()

    def over(self, found: NodeSlices) -> NodeSlices:
        """Return what the node will say once this plan is written."""
        spec = replace(found.partitioning, spec=counts(self.slices), plan=self.id)
        return replace(found, partitioning=spec, planned=self.slices, standing=self.standing)


@dataclass(frozen=True, slots=True)
class _Observed:
    """One node with the partitioning label.

    Attributes:
        annotations: Label and annotations as they were read, to recognize an event that changes nothing here.
        slices: The last partitioning that could be read.
        held: By the UID of a pod, the slices that `slices` says were given to it.
        problem: Why the present annotations cannot be read; None where `slices` is what they say.
    """

    annotations: tuple[str | None, ...]
    slices: NodeSlices
    held: Mapping[str, tuple[Share, ...]]
    problem: str | None = None


class KnownSlices:
    """Part of the ClusterCache, which holds its lock around every call. Nodes without the label take no memory here.

    Annotations that cannot be read leave the last good ones in force and raise a warning.
    """

    def __init__(self, events: Publisher) -> None:
        self._events = events
        self._nodes: dict[str, _Observed] = {}
        self._plans: dict[str, Plan] = {}

    def node_changed(self, node: Node) -> None:
        """Take in label and annotations of a Node."""
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
            found = read_slices(node)
        except BadObject as error:
            self._nodes[node.name] = _Observed(annotations, last, held(last), str(error)[:_MESSAGE_CHARACTERS])
            self._warn(node.name, "BadSlices", f"Ignoring invalid annotations of slices: {error}")
            return
        self._nodes[node.name] = _Observed(annotations, found, held(found))
        if found.refused and found.refused != last.refused:
            plan, reason = found.refused
            self._warn(node.name, "PlanRefused", f"plan {plan} of its slices was refused: {reason}")
        self._drop_observed_plan(node.name, found)

    def node_gone(self, name: str) -> None:
        """Forget a node that was deleted or has lost its label."""
        self._nodes.pop(name, None)
        self._plans.pop(name, None)

    def names(self) -> tuple[str, ...]:
        """Return the names of the nodes with the label, sorted."""
        return tuple(sorted(self._nodes))

    def of(self, name: str) -> NodeSlices:
        """Return the partitioning of a node, as it will be once the plan that was decided here is written."""
        known = self._nodes.get(name)
        if known is None:
            return NO_SLICES
        plan = self._plans.get(name)
        return plan.over(known.slices) if plan else known.slices

    def held(self, name: str) -> Mapping[str, tuple[Share, ...]]:
        """Return by the UID of a pod the slices that the node gave to it."""
        known = self._nodes.get(name)
        return known.held if known else {}

    def problem(self, name: str) -> str | None:
        """Return the reason why the present annotations of the node are not in force, or None where they are."""
        known = self._nodes.get(name)
        return known.problem if known else None

    def is_unreadable(self, name: str) -> bool:
        """Return whether the node has the label and no annotations that could ever be read: its cards are unknown."""
        known = self._nodes.get(name)
        return bool(known and known.problem and known.slices in (NodeSlices(MIG), NodeSlices(MPS)))

    def plan(self, plan: Plan) -> None:
        """Let a plan stand until the node shows it or a later one, or until it is dropped."""
        if plan.node in self._nodes:
            self._plans[plan.node] = plan

    def drop(self, plan: Plan) -> None:
        """Drop a plan whose write has failed. A later plan of the same node stays."""
        if self._plans.get(plan.node) == plan:
            del self._plans[plan.node]

    def plans(self) -> tuple[Plan, ...]:
        """Return the plans that their nodes do not show yet, by the names of the nodes."""
        return tuple(plan for _, plan in sorted(self._plans.items()))

    def _drop_observed_plan(self, name: str, found: NodeSlices) -> None:
        plan = self._plans.get(name)
        if plan is not None and found.partitioning.plan is not None and found.partitioning.plan >= plan.id:
            del self._plans[name]

    def _warn(self, name: str, reason: str, message: str) -> None:
        self._events.publish(ObjectWarning(node_reference(name), reason, message[:_MESSAGE_CHARACTERS]))


def _last(before: _Observed | None, label: str) -> NodeSlices:
    """Return what holds until the annotations can be read; of a new node, only the mode that its label names."""
    if before is not None:
        return before.slices
    return NodeSlices(label) if label in (MIG, MPS) else NO_SLICES
