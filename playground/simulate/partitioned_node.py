"""The slices of a node of `mgpu simulate`, where every partition plan takes effect at once.

`SimulatedCluster` has a `PartitionedNode` for each node, even if the node has no slices. A `PartitionedNode` does the
work of the node agent: it applies a pending plan with the agent's own functions, and writes the annotations. If the
annotations state only the number of MIG instances, it chooses their positions.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from deviceplugin.partitioning.desired_slices import PlanNotApplicable, configured_slices, planned_instances
from mgpu.model.cards import GPU, Card
from mgpu.model.ledger import Holding, Share
from mgpu.model.mig import Instance, arrange, layout_of
from mgpu.model.node_slices import (
    ANNOTATION,
    EXISTING,
    PLANNED,
    NodeSlices,
    Partitioning,
    next_plan,
    shares_by_pod,
    slice_devices,
    unpartitioned_cards,
    with_spec,
    with_status,
    write_existing,
    write_planned,
)
from mgpu.model.pods import Node
from mgpu.model.slice_names import MIG, MPS, Slice, count_slices
from mgpu.presentation.card_views import NodePartitions
from mgpu.presentation.overview import read_partitioning
from scheduler.engine.partitioning.partitionable_node import slice_of_share


class PartitionedNode:
    """The devices of a node.

    Attributes:
        slices: The existing slices of the node, and its partition plan.
        gpus: All GPUs of the node, whether they are partitioned or not.
        problem: Why the partitioning annotations cannot be used, or "". The cards of a node with a problem are not
            partitioned again.
    """

    def __init__(self, node: Node, cards: Sequence[Card]) -> None:
        reported, self.problem = read_partitioning(node, cards)
        self.slices = reported.slices
        self.gpus = reported.gpus
        self._annotations = reported.annotations
        self._others = tuple(card for card in cards if card.type != GPU)
        self._layouts = {gpu.index: layout for gpu in self.gpus if (layout := layout_of(gpu.model, gpu.memory))}
        self._planned = False
        if self.slices.mode in (MIG, MPS) and not self.problem:
            self._complete()

    @property
    def is_partitioned(self) -> bool:
        """Whether pods get slices of the node's cards."""
        return bool(self.slices.mode)

    def available_devices(self) -> tuple[Card, ...]:
        """Return the devices that pods can get: cards that are not partitioned, slices, and devices of other types."""
        if self.is_partitioned and self.problem:
            return self._others  # it is unknown how the GPUs are partitioned
        return (*unpartitioned_cards(self.slices, self.gpus), *slice_devices(self.slices, self.gpus), *self._others)

    def reported_shares(self) -> dict[str, tuple[Share, ...]]:
        """Return the slices that the annotations assign to pods, by the UIDs of the pods."""
        return shares_by_pod(self.slices)

    def partition(self, slices: Iterable[Slice]) -> None:
        """Make a partition plan with the given slices for the whole node, and apply it."""
        desired = tuple(sorted(slices))
        plan = next_plan(self.slices.partitioning.plan, 0)
        partitioning = Partitioning(count_slices(desired), plan, applied=plan)
        existing = self._create(desired)
        self.slices = replace(self.slices, partitioning=partitioning, existing=existing, planned=desired, refused=None)
        self._planned = True

    def view(self, holdings: Iterable[Holding]) -> NodePartitions:
        """Return the node's slices with the pods that hold them, and its annotations.

        Args:
            holdings: The holdings of the pods on the node.
        """
        pods = {place: h.uid for h in holdings for share in h.shares if (place := slice_of_share(share))}
        existing = tuple(replace(s, pod=pods.get(s.place, s.pod)) for s in self.slices.existing)
        slices = replace(self.slices, existing=existing)
        return NodePartitions(slices, self.gpus, self._annotations if self.problem else self._write(slices))

    def _write(self, slices: NodeSlices) -> Mapping[str, str]:
        """Return the annotations that the scheduler and the node agent would have written."""
        annotations = dict(self._annotations)
        text, partitioning = annotations.get(ANNOTATION), slices.partitioning
        if self._planned and partitioning.plan is not None:
            text = with_spec(text, partitioning.spec, partitioning.plan)
            annotations[PLANNED] = write_planned(slices.planned or (), partitioning.plan)
        return {
            **annotations,
            ANNOTATION: with_status(text, slices.existing, partitioning.applied),
            EXISTING: write_existing(slices.existing, slices.cards, slices.refused),
        }

    def _complete(self) -> None:
        """Give each MIG instance a position, and apply a pending plan.

        Set `problem` instead if the instances do not fit on their cards.
        """
        if not self.slices.has_positions and self.slices.mode == MIG:
            existing = self._place_counted()
            if existing is None:
                self.problem = "its cards cannot be partitioned as its status says"
                return
            self.slices = replace(self.slices, existing=existing, cards=frozenset(self._layouts))
        self.slices = replace(self.slices, has_positions=True)
        plan = self.slices.partitioning.plan
        if plan is not None and self.slices.has_pending_plan:
            self._apply(plan)

    def _place_counted(self) -> tuple[Slice, ...] | None:
        """Return the existing MIG instances with chosen positions, or None if they do not fit on their cards."""
        placed: list[Slice] = []
        for card, counts in count_slices(self.slices.existing).items():
            instances = arrange(self._layouts[card], (), counts) if card in self._layouts else None
            if instances is None:
                return None
            free = list(instances)
            for counted in (s for s in self.slices.existing if s.card == card):
                instance = next(i for i in free if i.profile == counted.name)
                free.remove(instance)
                placed.append(self._with_uuid(Slice(card, *instance, pod=counted.pod)))
        return tuple(sorted(placed))

    def _apply(self, plan: int) -> None:
        """Apply the pending plan, or record why it cannot be applied."""
        try:
            existing = self._create(self._desired_slices())
        except PlanNotApplicable as error:
            self.slices = replace(self.slices, refused=(plan, str(error)))
        else:
            partitioning = replace(self.slices.partitioning, applied=plan)
            self.slices = replace(self.slices, partitioning=partitioning, existing=existing, refused=None)

    def _desired_slices(self) -> tuple[Slice, ...]:
        """Return the slices of the pending plan. Raises PlanNotApplicable if the plan cannot be applied."""
        slices = self.slices
        used = [s.place for s in slices.existing if s.pod]
        if slices.mode != MIG:
            spec, source = slices.partitioning.spec, f"metadata.annotations[{ANNOTATION}]"
            return configured_slices(spec, slices.planned, slices.existing, used, self.gpus, (), source)
        existing = _by_card(slices.existing)
        desired = planned_instances(slices, self._layouts, existing, existing, _by_card(used))
        return tuple(sorted(Slice(card, *instance) for card, found in desired.items() for instance in found))

    def _create(self, desired: Iterable[Slice]) -> tuple[Slice, ...]:
        """Return the desired slices. Slices that exist already keep their UUIDs and pods."""
        existing = {s.place: s for s in self.slices.existing}
        return tuple(existing.get(s.place) or self._with_uuid(s) for s in desired)

    def _with_uuid(self, s: Slice) -> Slice:
        """Return a MIG instance with a made-up UUID. An MPS share is returned unchanged."""
        if self.slices.mode != MIG:
            return s
        card = next((gpu.uuid for gpu in self.gpus if gpu.index == s.card), "")
        return replace(s, uuid=f"MIG-{card}-{s.name}-{s.start}")


def _by_card(slices: Iterable[Slice]) -> dict[int, frozenset[Instance]]:
    instances: dict[int, set[Instance]] = {}
    for s in slices:
        instances.setdefault(s.card, set()).add(s.instance)
    return {card: frozenset(found) for card, found in instances.items()}
