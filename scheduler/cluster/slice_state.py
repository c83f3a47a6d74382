"""What the nodes say of their slices, and what has been decided here and does not stand there yet."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mgpu.kube.events import node_reference
from mgpu.model import node_slices
from mgpu.model.errors import BadObject
from mgpu.model.ledger import Share
from mgpu.model.node_slices import NO_SLICES, NodeSlices, held, read_slices
from mgpu.model.pods import Node
from mgpu.model.slice_names import MIG, MPS, Slice, counts

_KEYS = (node_slices.ANNOTATION, node_slices.MADE, node_slices.PLANNED)
_MOST_MESSAGE = 1024
"""Characters that are kept of why annotations are invalid: they may quote a whole annotation."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a node shall be cut into: `slices` is all of it, by places. id: as annotations have it.

    before: the id of the plan that it follows, None where it is the node's first. standing: those of `slices` that no
    plan of mgpu's has made.
    """

    node: str
    id: int
    slices: tuple[Slice, ...]
    before: int | None = None
    standing: frozenset[Slice] = frozenset()

    def over(self, found: NodeSlices) -> NodeSlices:
        """What the node will say once this is written."""
        spec = replace(found.partitioning, spec=counts(self.slices), plan=self.id)
        return replace(found, partitioning=spec, planned=self.slices, standing=self.standing)


@dataclass(frozen=True, slots=True)
class _Known:
    """said: label and annotations, as they were read. found: the last that could be read. problem: of a later one.

    held: by the pod's UID, the slices that `found` says were given to it.
    """

    said: tuple[str | None, ...]
    found: NodeSlices
    held: Mapping[str, tuple[Share, ...]]
    problem: str = ""


class KnownSlices:
    """Not thread-safe. Nodes without the label take no room here.

    warn: told of what cannot be read, which leaves what could be in force, and of plans that a node refuses.
    """

    def __init__(self, warn: Callable[[dict[str, Any], str, str], None]) -> None:
        self._warn = warn
        self._known: dict[str, _Known] = {}
        self._plans: dict[str, Plan] = {}

    def node_changed(self, node: Node) -> None:
        label = node.labels.get(node_slices.LABEL)
        if not label:
            self.node_gone(node.name)
            return
        said = (label, *(node.annotations.get(key) for key in _KEYS))
        before = self._known.get(node.name)
        if before is not None and before.said == said:
            return
        last = before.found if before else NodeSlices(label) if label in (MIG, MPS) else NO_SLICES
        try:
            found = read_slices(node)
        except BadObject as error:
            self._known[node.name] = _Known(said, last, held(last), str(error)[:_MOST_MESSAGE])
            self._tell(node.name, "BadSlices", f"Ignoring invalid annotations of slices: {error}")
            return
        self._known[node.name] = _Known(said, found, held(found))
        if found.refused and found.refused != last.refused:
            plan, why = found.refused
            self._tell(node.name, "PlanRefused", f"plan {plan} of its slices was refused: {why}")
        self._see(node.name, found)

    def node_gone(self, name: str) -> None:
        self._known.pop(name, None)
        self._plans.pop(name, None)

    def names(self) -> tuple[str, ...]:
        """The nodes with the label, in order."""
        return tuple(sorted(self._known))

    def of(self, name: str) -> NodeSlices:
        """With the plan that was decided here, where the node does not say so yet."""
        known = self._known.get(name)
        if known is None:
            return NO_SLICES
        plan = self._plans.get(name)
        return plan.over(known.found) if plan else known.found

    def held(self, name: str) -> Mapping[str, tuple[Share, ...]]:
        """By the pod's UID, the slices that the node gave out."""
        known = self._known.get(name)
        return known.held if known else {}

    def problem(self, name: str) -> str:
        """Why what the node says now is not in force; "": it is."""
        known = self._known.get(name)
        return known.problem if known else ""

    def untold(self, name: str) -> bool:
        """Whether the node has the label and has never said anything that could be read: nobody knows its cards."""
        known = self._known.get(name)
        return bool(known and known.problem and known.found in (NodeSlices(MIG), NodeSlices(MPS)))

    # What is decided here.

    def plan(self, plan: Plan) -> None:
        """It stands until the node shows it, or a later one, or until it is dropped."""
        if plan.node in self._known:
            self._plans[plan.node] = plan

    def drop(self, plan: Plan) -> None:
        """Its write has failed."""
        if self._plans.get(plan.node) == plan:
            del self._plans[plan.node]

    def plans(self) -> Mapping[str, Plan]:
        """By node, those that their nodes do not show yet."""
        return self._plans

    def _see(self, name: str, found: NodeSlices) -> None:
        plan = self._plans.get(name)
        if plan is not None and found.partitioning.plan is not None and found.partitioning.plan >= plan.id:
            del self._plans[name]

    def _tell(self, name: str, reason: str, message: str) -> None:
        self._warn(node_reference(name), reason, message[:_MOST_MESSAGE])
