"""A node of `mgpu simulate` and its slices: what its annotations report, and plans that take effect at once.

It does what the node agent would have done: it lays out instances that are only counted, carries out a plan that is
under way, and writes the annotations. `SimulatedCluster` has one per node, also for nodes without slices.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from mgpu.model.cards import GPU, Card
from mgpu.model.ledger import Holding, Share
from mgpu.model.mig import arrange, layout_of
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
from mgpu.model.slice_names import MIG, Slice, SliceCounts, count_slices
from mgpu.presentation.card_views import NodePartitions
from mgpu.presentation.overview import read_partitioning
from scheduler.engine.partitioning.partitionable_node import slice_of_share


class PartitionedNode:
    """One node with all its devices.

    found: the node's slices as they are now.
    gpus: all cards, partitioned or not.
    problem: why the annotations cannot be used, "" where they can; such a node keeps its cards as they are.
    """

    def __init__(self, node: Node, cards: Sequence[Card]) -> None:
        reported, self.problem = read_partitioning(node, cards)
        self.found = reported.slices
        self.gpus = reported.gpus
        self._annotations = reported.annotations
        self._others = tuple(card for card in cards if card.type != GPU)
        self._planned = False
        if self.found.mode and not self.problem:
            self._settle()

    @property
    def sliced(self) -> bool:
        """Whether the node's cards are given out in slices."""
        return bool(self.found.mode)

    def inventory(self) -> tuple[Card, ...]:
        """Return the devices that pods can get."""
        if self.sliced and self.problem:
            return self._others  # any card may be partitioned, in an unknown way
        return (*unpartitioned_cards(self.found, self.gpus), *slice_devices(self.found, self.gpus), *self._others)

    def given(self) -> dict[str, tuple[Share, ...]]:
        """Return UID → the slices that the annotations assign to the pod."""
        return shares_by_pod(self.found)

    def partition(self, slices: Iterable[Slice]) -> None:
        """Make a partition plan for the whole node and carry it out."""
        wanted, plan = tuple(sorted(slices)), next_plan(self.found.partitioning.plan, 0)
        spec = count_slices(wanted)
        self.found = replace(
            self.found,
            partitioning=Partitioning(spec, plan, applied=plan),
            existing=self._made(wanted),
            planned=wanted,
            refused=None,
        )
        self._planned = True

    def view(self, holdings: Iterable[Holding]) -> NodePartitions:
        """Return the node's slices with their pods; `holdings` are those on the node."""
        pods = {place: h.uid for h in holdings for share in h.shares if (place := slice_of_share(share))}
        made = tuple(replace(s, pod=pods.get(s.place, s.pod)) for s in self.found.existing)
        found = replace(self.found, existing=made)
        return NodePartitions(found, self.gpus, self._annotations if self.problem else self._written(found))

    def _written(self, found: NodeSlices) -> Mapping[str, str]:
        """Return the annotations that scheduler and node agent would have written."""
        annotations = dict(self._annotations)
        text, partitioning = annotations.get(ANNOTATION), found.partitioning
        if self._planned and partitioning.plan is not None:
            text = with_spec(text, partitioning.spec, partitioning.plan)
            annotations[PLANNED] = write_planned(found.planned or (), partitioning.plan)
        return {
            **annotations,
            ANNOTATION: with_status(text, found.existing, partitioning.applied),
            EXISTING: write_existing(found.existing, found.cards, found.refused),
        }

    def _settle(self) -> None:
        """Bring the node to rest: MIG mode is on, each instance has its place, a plan under way is carried out."""
        if not self.found.has_positions:
            made = self._laid_out() if self.found.mode == MIG else self.found.existing
            if made is None:
                self.problem = "its cards cannot be partitioned as its status says"
                return
            able = frozenset(gpu.index for gpu in self.gpus if layout_of(gpu.model, gpu.memory))
            cards = able if self.found.mode == MIG else self.found.cards
            self.found = replace(self.found, existing=made, has_positions=True, cards=cards)
        if self.found.has_pending_plan:
            self._carry_out()

    def _laid_out(self) -> tuple[Slice, ...] | None:
        """Give instances that are only counted a place each, those in use first. Return None where they do not fit."""
        placed: list[Slice] = []
        for gpu in self.gpus:
            there = [s for s in self.found.existing if s.card == gpu.index]
            free = _arranged(gpu, (), count_slices(there).get(gpu.index, {}), MIG)
            if free is None:
                return None
            for s in there:
                place = next(f for f in free if f.name == s.name and f not in {p.place for p in placed})
                placed.append(replace(place, uuid=self._uuid(place), pod=s.pod))
        return tuple(sorted(placed))

    def _carry_out(self) -> None:
        found, plan = self.found, self.found.partitioning.plan
        used = tuple(s.place for s in found.existing if s.pod)
        wanted = found.planned if found.planned is not None else self._counted(found.partitioning.spec, used)
        if plan is None:
            return
        if wanted is None or not {*used}.issubset(wanted):
            reason = "its slices in use are not among those that it wants, or those cannot all be made"
            self.found = replace(found, refused=(plan, reason))
        else:
            partitioning = replace(found.partitioning, applied=plan)
            self.found = replace(found, partitioning=partitioning, existing=self._made(wanted), refused=None)

    def _counted(self, spec: SliceCounts, used: Sequence[Slice]) -> tuple[Slice, ...] | None:
        """Place the slices of a plan that only counts them. Return None where they do not fit."""
        slices: list[Slice] = []
        for gpu in self.gpus:
            fixed = tuple(s for s in used if s.card == gpu.index)
            more = {**spec.get(gpu.index, {})}
            for s in fixed:
                more[s.name] = more.get(s.name, 0) - 1
            free = _arranged(gpu, fixed, more, self.found.mode)
            if free is None:
                return None
            slices += (*fixed, *free)
        return tuple(sorted(slices))

    def _made(self, wanted: Iterable[Slice]) -> tuple[Slice, ...]:
        """Make the wanted slices; those that exist already stay the same."""
        there = {s.place: s for s in self.found.existing}
        return tuple(there.get(s.place) or replace(s, uuid=self._uuid(s)) for s in wanted)

    def _uuid(self, s: Slice) -> str:
        card = next((gpu.uuid for gpu in self.gpus if gpu.index == s.card), "")
        return f"MIG-{card}-{s.name}-{s.start}" if self.found.mode == MIG else ""


def _arranged(gpu: Card, fixed: Sequence[Slice], more: Mapping[str, int], mode: str) -> tuple[Slice, ...] | None:
    """Place `more` slices, name → count, beside `fixed` on a card. Return None where they do not fit."""
    if mode == MIG:
        layout = layout_of(gpu.model, gpu.memory)
        if layout is None:
            return None if any(more.values()) else ()
        places = arrange(layout, [s.instance for s in fixed], more)
        return None if places is None else tuple(Slice(gpu.index, start, name) for start, name in places)
    taken = {s.start for s in fixed}
    names = [name for name in sorted(more) for _ in range(more[name])]
    starts = [i for i in range(len(taken) + len(names)) if i not in taken]
    return tuple(Slice(gpu.index, start, name) for start, name in zip(starts, names, strict=False))
