"""MIG: creates the planned instances and keeps those in use; goes back where a plan cannot be applied.

A plan holds as a whole or not at all: if a card refuses its part, all cards go back. `MigPartitioner.reconcile` is
called by the partition worker every few seconds and after every change, so each call starts from what NVML reports and
may be the first after a crash in the middle of another one. The changes themselves are made by
`deviceplugin.mig.instance_changes`, which undoes what fails half way.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from deviceplugin.mig.instance_changes import apply
from deviceplugin.mig.mig_driver import MigCard, MigDriver, MigRefused, complete, existing
from deviceplugin.mig.mode_manager import ModeManager
from deviceplugin.partitioning.desired_slices import Impossible, placeable, planned_instances
from deviceplugin.partitioning.partitioner import ObservedPartitions
from deviceplugin.pods.slice_usage import Users
from mgpu.model.cards import Card
from mgpu.model.errors import RetryLater
from mgpu.model.mig import Instance, invalid_reason
from mgpu.model.node_slices import NodeSlices
from mgpu.model.slice_names import MPS, Slice, mode_of, read_name

Cards = Mapping[int, MigCard]
"""The cards that answer and can be cut, by the index that the node has for them."""
Instances = dict[int, frozenset[Instance]]
"""Card index → MIG instances."""


@dataclass(frozen=True, slots=True)
class _Circumstances:
    """Everything that decides whether a plan can be applied. A refused plan is tried again only where this changes."""

    plan: int | None
    spec: object
    planned: object
    cards: object
    in_use: Instances


class MigPartitioner:
    """Used by the partition worker's thread alone.

    Args:
        driver: reads and changes the cards.
        manager: switches the cards' MIG mode; None: the administrator does.
    """

    def __init__(self, driver: MigDriver, manager: ModeManager | None) -> None:
        self._driver = driver
        self._manager = manager
        # What a failed plan goes back to; None before the first reconciliation.
        self._last_good: Instances | None = None
        self._refused: tuple[int, str] | None = None
        self._refused_in: _Circumstances | None = None
        # Of one reconciliation:
        self._problems: list[str] = []
        self._retry: list[str] = []
        self._touched = False

    def leave(self) -> None:
        self._last_good = None
        self._refused = None
        self._refused_in = None

    def reconcile(
        self,
        found: NodeSlices,
        gpus: Sequence[Card],
        users: Callable[[Collection[Slice]], Users],
        held: Collection[int],
    ) -> ObservedPartitions:
        self._problems = []
        self._retry = []
        cards = self._settle(gpus, self._read(gpus), {*held, *_shared(users(()))})
        if self._last_good is None:
            self._last_good = _initial_state(found, cards)
        in_use = _in_use(found, cards, users(_made(cards)))
        desired = self._desired(found, gpus, cards, in_use)
        if desired is not None:
            applied = self._apply(found, gpus, cards, desired, in_use)
            desired, cards = desired if applied else None, self._read_again(gpus, cards)
        if desired is None:
            # Some cards may be as planned already: a plan holds as a whole or not at all.
            self._apply(found, gpus, cards, self._as_before(cards, in_use), in_use, is_rollback=True)
            cards = self._read_again(gpus, cards)
            self._refused_in = _circumstances(found, cards, in_use)
            return self._observed(found, gpus, cards, done=False)
        self._refused = None
        self._last_good = {**self._last_good, **desired}
        done = not self._retry and all(desired.get(i) == complete(card) for i, card in cards.items())
        return self._observed(found, gpus, cards, done=done)

    def _settle(self, gpus: Sequence[Card], cards: Cards, held: Collection[int]) -> Cards:
        """Put every card into MIG mode, except for those that pods in other vocabularies hold.

        A slice in use needs MIG mode itself, so it is not in the way.
        """
        if self._manager is None or all(card.current and card.pending for card in cards.values()):
            return cards
        try:
            in_the_way = {gpu.uuid for gpu in gpus if gpu.index in held}
            problems = self._manager.settle({gpu.uuid: True for gpu in gpus}, in_the_way)
        except MigRefused as error:
            raise RetryLater(str(error)) from error
        self._problems += problems.values()
        return self._read(gpus)

    def _read(self, gpus: Sequence[Card]) -> Cards:
        try:
            found = {card.uuid: card for card in self._driver.read() if card.capable}
        except MigRefused as error:
            raise RetryLater(str(error)) from error
        return {gpu.index: found[gpu.uuid] for gpu in gpus if gpu.uuid in found}

    def _read_again(self, gpus: Sequence[Card], cards: Cards) -> Cards:
        """Read the cards again where anything was changed."""
        changed, self._touched = self._touched, False
        return self._read(gpus) if changed else cards

    def _desired(self, found: NodeSlices, gpus: Sequence[Card], cards: Cards, in_use: Instances) -> Instances | None:
        """Return the desired instances, or None: the last good state.

        Without a plan an administrator's instances are left as they are. A refused plan is tried again only where the
        circumstances have changed and the Node no longer reports the refusal: the scheduler may have written another
        plan meanwhile.
        """
        plan = found.partitioning.plan
        if plan is None:
            return {index: existing(card) | in_use[index] for index, card in cards.items()}
        if self._refused and (self._refused[0] != plan or self._refused_in != _circumstances(found, cards, in_use)):
            self._refused = None
        silent = {gpu.index for gpu in gpus if gpu.index not in cards and gpu.healthy} & _planned_cards(found)
        if silent:
            self._retry.append(f"card {min(silent)} does not answer about MIG")
        if silent or self._refused or (found.refused and found.refused[0] == plan):
            return None
        # A card whose MIG mode is still pending has no instances yet, and a plan for it is impossible until then.
        layouts = {index: card.layout for index, card in cards.items() if card.current and card.layout}
        made = {index: existing(card) for index, card in cards.items()}
        try:
            desired = planned_instances(found, layouts, made, self._last_good or {}, in_use)
        except Impossible as error:
            self._refuse(found, str(error))
            return None
        return {index: desired.get(index, frozenset()) for index in cards}

    def _apply(
        self,
        found: NodeSlices,
        gpus: Sequence[Card],
        cards: Cards,
        desired: Instances,
        in_use: Instances,
        *,
        is_rollback: bool = False,
    ) -> bool:
        """Change the cards, and return False where one refused, so that the plan is refused."""
        healthy = {gpu.index for gpu in gpus if gpu.healthy}
        for index, card in sorted(cards.items()):
            if desired[index] == complete(card) == existing(card):
                continue
            try:
                self._change(index, card, desired[index], in_use.get(index, frozenset()), healthy=index in healthy)
            except RetryLater as error:
                self._retry.append(str(error))
            except MigRefused as error:
                if not is_rollback and _pending(found):
                    self._refuse(found, str(error))
                    return False
                self._problems.append(str(error))
        return True

    def _change(
        self, index: int, card: MigCard, desired: frozenset[Instance], in_use: frozenset[Instance], *, healthy: bool
    ) -> None:
        if not healthy:
            raise MigRefused(f"card {index} is unhealthy")
        self._touched = True
        apply(self._driver, card.uuid, desired, in_use)

    def _refuse(self, found: NodeSlices, reason: str) -> None:
        """Refuse the plan. One that was applied before is not refused for what came later: that is a problem."""
        plan = found.partitioning.plan
        if plan is not None and _pending(found):
            self._refused = plan, reason
        else:
            self._problems.append(reason)

    def _as_before(self, cards: Cards, in_use: Instances) -> Instances:
        """Return what is in use, and what fits beside it of the last good state, or else of what exists."""
        good = self._last_good or {}
        return {
            index: placeable(card.layout, [*in_use.get(index, ()), *sorted(good.get(index, existing(card)))])
            if card.layout
            else frozenset()
            for index, card in cards.items()
        }

    def _observed(self, found: NodeSlices, gpus: Sequence[Card], cards: Cards, *, done: bool) -> ObservedPartitions:
        """Return the observed state. A card that does not answer keeps its slices, and none of them is given out."""
        lost = {s.place for s in found.made if s.card not in cards and any(gpu.index == s.card for gpu in gpus)}
        return ObservedPartitions(
            made=tuple(sorted((*_made(cards), *(s for s in found.made if s.place in lost)))),
            busy=frozenset(s.place for i, card in cards.items() for s in _slices(i, card, busy=True)),
            cards=frozenset(index for index, card in cards.items() if card.current) | {s.card for s in lost},
            unwell=frozenset(s.card for s in lost),
            refused=self._refused,
            done=found.partitioning.plan if done else None,
            problems=tuple(self._problems),
            retry="; ".join(self._retry) or None,
        )


def _shared(users: Users) -> set[int]:
    """Return the cards that pods have MPS shares of, where the node's label was changed while they run."""
    return {place.card for place in users if mode_of(place.name) == MPS}


def _pending(found: NodeSlices) -> bool:
    return found.partitioning.plan not in (None, found.partitioning.applied)


def _planned_cards(found: NodeSlices) -> set[int]:
    """Return the indexes of the cards that the plan names."""
    return {*found.partitioning.spec, *(s.card for s in found.planned or ())}


def _circumstances(found: NodeSlices, cards: Cards, in_use: Instances) -> _Circumstances:
    observed = {
        index: (card.current, card.pending, card.busy, [(made.instance, bool(made.uuid)) for made in card.instances])
        for index, card in cards.items()
    }
    return _Circumstances(found.partitioning.plan, found.partitioning.spec, found.planned, observed, in_use)


def _slices(index: int, card: MigCard, *, busy: bool = False) -> list[Slice]:
    """Return the instances that pods can request, without half made ones; with `busy` only the busy ones."""
    return [
        Slice(index, made.instance.start, made.instance.profile, made.uuid)
        for made in card.instances
        if made.uuid and read_name(made.instance.profile) == made.instance.profile and (made.busy or not busy)
    ]


def _made(cards: Cards) -> tuple[Slice, ...]:
    return tuple(s for index, card in sorted(cards.items()) for s in _slices(index, card))


def _initial_state(found: NodeSlices, cards: Cards) -> Instances:
    """Return what an agent that starts takes for the last good state: what the Node says, and what exists beside it."""
    good: Instances = {}
    for index, card in cards.items():
        reported = sorted(s.instance for s in found.made if s.card == index)
        good[index] = placeable(card.layout, [*reported, *sorted(existing(card))]) if card.layout else frozenset()
    return good


def _in_use(found: NodeSlices, cards: Cards, users: Users) -> Instances:
    """Return what must stay: where processes run, what exists and has a pod, and what a pod has that is gone.

    The last kind (after a reboot) is created again only where nothing else is in its place: what exists there may have
    been given to another pod already.
    """
    kept: Instances = {}
    for index, card in cards.items():
        made, planned = existing(card), {s.instance for s in found.planned or () if s.card == index}
        busy = {made.instance for made in card.instances if made.busy}
        used = {place.instance for place in users if place.card == index}
        order = [*sorted(busy), *sorted((used & made) - busy)]
        layout = card.layout
        if layout is not None:
            order += [i for i in sorted(used - made) if i in planned or not invalid_reason(layout, {*made, i})]
        kept[index] = placeable(layout, order) if layout else frozenset()
    return kept
