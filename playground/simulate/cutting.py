"""Partitioned cards of one simulated node: what the node reports, and plans that take effect at once."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from mgpu.model.cards import GPU, Card
from mgpu.model.ledger import Holding, Share
from mgpu.model.mig import arrange, layout_of
from mgpu.model.partitioning import (
    ANNOTATION,
    MADE,
    PLANNED,
    NodeSlices,
    Partitioning,
    devices,
    held,
    next_plan,
    undivided,
    with_spec,
    with_status,
    write_made,
    write_planned,
)
from mgpu.model.pods import Node
from mgpu.model.slices import MIG, Counts, Slice, counts
from mgpu.presentation.card_views import Sliced
from mgpu.presentation.overview import sliced_of
from scheduler.engine.partitioning.partitionable_node import place_held


class Cutting:
    """One node with all its devices. problem: what cannot be read of what it says; then its cards stay as they are."""

    def __init__(self, node: Node, cards: Sequence[Card]) -> None:
        said, self.problem = sliced_of(node, cards)
        self.found, self.gpus = said.found, said.gpus
        self._said, self._others = said.annotations, tuple(card for card in cards if card.type != GPU)
        self._planned = False
        if self.found.mode and not self.problem:
            self._settle()

    @property
    def sliced(self) -> bool:
        return bool(self.found.mode)

    def inventory(self) -> tuple[Card, ...]:
        """What pods can be given."""
        if self.sliced and self.problem:
            return self._others  # any card may be cut, into what nobody knows
        return (*undivided(self.found, self.gpus), *devices(self.found, self.gpus), *self._others)

    def given(self) -> dict[str, tuple[Share, ...]]:
        """By UID, the slices that pods were given as the node says."""
        return held(self.found)

    def cut(self, slices: Iterable[Slice]) -> None:
        """A plan for the whole node is made and carried out."""
        wanted, plan = tuple(sorted(slices)), next_plan(self.found.partitioning.plan, 0)
        spec = counts(wanted)
        self.found = replace(
            self.found,
            partitioning=Partitioning(spec, plan, applied=plan),
            made=self._made(wanted),
            planned=wanted,
            refused=None,
        )
        self._planned = True

    def view(self, holdings: Iterable[Holding]) -> Sliced:
        """holdings: those on the node."""
        pods = {place: h.uid for h in holdings for share in h.shares if (place := place_held(share))}
        made = tuple(replace(s, pod=pods.get(s.place, s.pod)) for s in self.found.made)
        found = replace(self.found, made=made)
        return Sliced(found, self.gpus, self._said if self.problem else self._annotations(found))

    def _annotations(self, found: NodeSlices) -> Mapping[str, str]:
        text, partitioning = self._said.get(ANNOTATION), found.partitioning
        said = dict(self._said)
        if self._planned and partitioning.plan is not None:
            text = with_spec(text, partitioning.spec, partitioning.plan)
            said[PLANNED] = write_planned(found.planned or (), partitioning.plan)
        return {
            **said,
            ANNOTATION: with_status(text, found.made, partitioning.applied),
            MADE: write_made(found.made, found.cards, found.refused),
        }

    # What the node's agent would have done by now.

    def _settle(self) -> None:
        """Cards are in MIG mode, each instance has its place, and a plan that is under way is carried out."""
        if not self.found.placed:
            made = self._laid_out() if self.found.mode == MIG else self.found.made
            if made is None:
                self.problem = "its cards cannot be cut as its status says"
                return
            able = frozenset(gpu.index for gpu in self.gpus if layout_of(gpu.model, gpu.memory))
            cards = able if self.found.mode == MIG else self.found.cards
            self.found = replace(self.found, made=made, placed=True, cards=cards)
        if self.found.waiting:
            self._carry_out()

    def _laid_out(self) -> tuple[Slice, ...] | None:
        """Instances that are only counted, those in use first, each in a place; None: there is no room for them."""
        placed: list[Slice] = []
        for gpu in self.gpus:
            there = [s for s in self.found.made if s.card == gpu.index]
            free = _arranged(gpu, (), counts(there).get(gpu.index, {}), MIG)
            if free is None:
                return None
            for s in there:
                place = next(f for f in free if f.name == s.name and f not in {p.place for p in placed})
                placed.append(replace(place, uuid=self._uuid(place), pod=s.pod))
        return tuple(sorted(placed))

    def _carry_out(self) -> None:
        found, plan = self.found, self.found.partitioning.plan
        used = tuple(s.place for s in found.made if s.pod)
        wanted = found.planned if found.planned is not None else self._counted(found.partitioning.spec, used)
        if plan is None:
            return
        if wanted is None or not {*used}.issubset(wanted):
            why = "its slices in use are not among those that it wants, or those cannot all be made"
            self.found = replace(found, refused=(plan, why))
        else:
            partitioning = replace(found.partitioning, applied=plan)
            self.found = replace(found, partitioning=partitioning, made=self._made(wanted), refused=None)

    def _counted(self, spec: Counts, used: Sequence[Slice]) -> tuple[Slice, ...] | None:
        """The slices of a plan that says only how many there shall be; None: there is no room for them."""
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
        """Those that are there already are the same."""
        there = {s.place: s for s in self.found.made}
        return tuple(there.get(s.place) or replace(s, uuid=self._uuid(s)) for s in wanted)

    def _uuid(self, s: Slice) -> str:
        card = next((gpu.uuid for gpu in self.gpus if gpu.index == s.card), "")
        return f"MIG-{card}-{s.name}-{s.start}" if self.found.mode == MIG else ""


def _arranged(gpu: Card, fixed: Sequence[Slice], more: Mapping[str, int], mode: str) -> tuple[Slice, ...] | None:
    """Where these lie beside `fixed`; None: nowhere."""
    if mode == MIG:
        layout = layout_of(gpu.model, gpu.memory)
        lie = arrange(layout, [s.instance for s in fixed], more) if layout else None if any(more.values()) else ()
        return None if lie is None else tuple(Slice(gpu.index, start, name) for start, name in lie)
    taken = {s.start for s in fixed}
    names = [name for name in sorted(more) for _ in range(more[name])]
    starts = [i for i in range(len(taken) + len(names)) if i not in taken]
    return tuple(Slice(gpu.index, start, name) for start, name in zip(starts, names, strict=False))
