"""MIG: what the plan says is made, what is in use stays; where that cannot be, all is as it was before the plan."""

from collections.abc import Callable, Collection, Mapping, Sequence

from deviceplugin.mig.mig_agent import apply
from deviceplugin.mig.mig_driver import MigCard, MigDriver, MigRefused
from deviceplugin.mig.mode_manager import ModeManager
from deviceplugin.partitioning.desired_slices import Impossible, placeable, planned_instances
from deviceplugin.partitioning.partitioner import Cut
from deviceplugin.pods.slice_usage import Users
from mgpu.model.cards import Card
from mgpu.model.errors import RetryLater
from mgpu.model.mig import Instance, problem
from mgpu.model.node_slices import NodeSlices
from mgpu.model.slice_names import MPS, Slice, mode_of, read_name

Cards = Mapping[int, MigCard]
"""Those that answer and can be cut, by the index that the node has for them."""
Instances = dict[int, frozenset[Instance]]


class MigCutter:
    """manager: switches the cards' MIG mode; None: somebody else does. Used by one thread."""

    def __init__(self, driver: MigDriver, manager: ModeManager | None) -> None:
        self._driver, self._manager = driver, manager
        self._good: Instances | None = None
        self._refused: tuple[int, str] | None = None
        self._refused_in: object = None
        self._problems: list[str] = []
        self._retry: list[str] = []
        self._touched = False

    def leave(self) -> None:
        self._good = self._refused = self._refused_in = None

    def cut(
        self,
        found: NodeSlices,
        gpus: Sequence[Card],
        users: Callable[[Collection[Slice]], Users],
        held: Collection[int],
    ) -> Cut:
        self._problems, self._retry = [], []
        cards = self._settle(gpus, self._read(gpus), {*held, *_shared(users(()))})
        if self._good is None:
            self._good = _at_first(found, cards)
        keep = _kept(found, cards, users(_made(cards)))
        wanted = self._wanted(found, gpus, cards, keep)
        if wanted is not None:
            made = self._make(found, gpus, cards, wanted, keep)
            wanted, cards = wanted if made else None, self._read_again(gpus, cards)
        if wanted is None:
            # Some cards may be as planned already: a plan holds as a whole or not at all.
            self._make(found, gpus, cards, self._as_before(cards, keep), keep, back=True)
            cards = self._read_again(gpus, cards)
        if wanted is None:
            self._refused_in = _state(found, cards, keep)
        else:
            self._refused, self._good = None, {**self._good, **wanted}
        done = (
            wanted is not None and not self._retry and all(wanted.get(i) == _whole(card) for i, card in cards.items())
        )
        return self._told(found, gpus, cards, done=done)

    def _settle(self, gpus: Sequence[Card], cards: Cards, held: Collection[int]) -> Cards:
        """Every card is to be in MIG mode. A slice in use needs it: only other shares are in the way of that."""
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
        """Where anything was changed."""
        changed, self._touched = self._touched, False
        return self._read(gpus) if changed else cards

    def _wanted(self, found: NodeSlices, gpus: Sequence[Card], cards: Cards, keep: Instances) -> Instances | None:
        """What shall be on the cards; None: what was before.

        Without a plan that is what somebody has made. A plan that was refused is not tried again as long as everything
        is as it was then, and only after the Node no longer says so: the scheduler may have made another one meanwhile.
        """
        plan = found.partitioning.plan
        if plan is None:
            return {index: _there(card) | keep[index] for index, card in cards.items()}
        if self._refused and (self._refused[0] != plan or self._refused_in != _state(found, cards, keep)):
            self._refused = None
        silent = {gpu.index for gpu in gpus if gpu.index not in cards and gpu.healthy} & _spoken_of(found)
        if silent:
            self._retry.append(f"card {min(silent)} does not answer about MIG")
        if silent or self._refused or (found.refused and found.refused[0] == plan):
            return None
        layouts = {index: card.layout for index, card in cards.items() if card.current and card.layout}
        there = {index: _there(card) for index, card in cards.items()}
        try:
            wanted = planned_instances(found, layouts, there, self._good or {}, keep)
        except Impossible as error:
            self._refuse(found, str(error))
            return None
        return {index: wanted.get(index, frozenset()) for index in cards}

    def _make(
        self,
        found: NodeSlices,
        gpus: Sequence[Card],
        cards: Cards,
        wanted: Instances,
        keep: Instances,
        *,
        back: bool = False,
    ) -> bool:
        """Whether no card refused. back: to what was before."""
        well = {gpu.index for gpu in gpus if gpu.healthy}
        for index, card in sorted(cards.items()):
            if wanted[index] == _whole(card) == _there(card):
                continue
            try:
                self._apply(
                    card,
                    wanted[index],
                    keep.get(index, frozenset()),
                    f"card {index} is unhealthy" if index not in well else "",
                )
            except RetryLater as error:
                self._retry.append(str(error))
            except MigRefused as error:
                if not back and _pending(found):
                    self._refuse(found, str(error))
                    return False
                self._problems.append(str(error))
        return True

    def _apply(self, card: MigCard, wanted: frozenset[Instance], keep: frozenset[Instance], unwell: str) -> None:
        if unwell:
            raise MigRefused(unwell)
        self._touched = True
        apply(self._driver, card.uuid, wanted, keep)

    def _refuse(self, found: NodeSlices, why: str) -> None:
        """A plan that is in force already is not refused for what came later."""
        plan = found.partitioning.plan
        if plan is not None and _pending(found):
            self._refused = plan, why
        else:
            self._problems.append(why)

    def _as_before(self, cards: Cards, keep: Instances) -> Instances:
        """What is in use, and of what was good what can be beside it; without a word about a card what is there."""
        good = self._good or {}
        return {
            index: placeable(card.layout, [*keep.get(index, ()), *sorted(good.get(index, _there(card)))])
            if card.layout
            else frozenset()
            for index, card in cards.items()
        }

    def _told(self, found: NodeSlices, gpus: Sequence[Card], cards: Cards, *, done: bool) -> Cut:
        """A card that does not answer has what it had, and nobody can be given it."""
        lost = {s.place for s in found.made if s.card not in cards and any(gpu.index == s.card for gpu in gpus)}
        return Cut(
            made=tuple(sorted((*_made(cards), *(s for s in found.made if s.place in lost)))),
            busy=frozenset(s.place for i, card in cards.items() for s in _slices(i, card, busy=True)),
            cards=frozenset(index for index, card in cards.items() if card.current) | {s.card for s in lost},
            unwell=frozenset(s.card for s in lost),
            refused=self._refused,
            done=found.partitioning.plan if done else None,
            problems=tuple(self._problems),
            retry="; ".join(self._retry),
        )


def _shared(users: Users) -> set[int]:
    """The cards that pods have shares of by MPS: the node's label has been changed since."""
    return {place.card for place in users if mode_of(place.name) == MPS}


def _pending(found: NodeSlices) -> bool:
    return found.partitioning.plan not in (None, found.partitioning.applied)


def _spoken_of(found: NodeSlices) -> set[int]:
    """The cards that the plan is about."""
    return {*found.partitioning.spec, *(s.card for s in found.planned or ())}


def _state(found: NodeSlices, cards: Cards, keep: Instances) -> object:
    """All that decides about a plan."""
    seen = {
        index: (card.current, card.pending, card.busy, [(made.instance, bool(made.uuid)) for made in card.instances])
        for index, card in cards.items()
    }
    return found.partitioning.plan, found.partitioning.spec, found.planned, seen, keep


def _slices(index: int, card: MigCard, *, busy: bool = False) -> list[Slice]:
    """Those that pods can ask for, and of them, where asked, the busy ones; half made ones are none yet."""
    return [
        Slice(index, made.instance.start, made.instance.profile, made.uuid)
        for made in card.instances
        if made.uuid and read_name(made.instance.profile) == made.instance.profile and (made.busy or not busy)
    ]


def _made(cards: Cards) -> tuple[Slice, ...]:
    return tuple(s for index, card in sorted(cards.items()) for s in _slices(index, card))


def _there(card: MigCard) -> frozenset[Instance]:
    return frozenset(made.instance for made in card.instances)


def _whole(card: MigCard) -> frozenset[Instance]:
    return frozenset(made.instance for made in card.instances if made.uuid)


def _at_first(found: NodeSlices, cards: Cards) -> Instances:
    """What an agent that starts takes for good: what the Node says, and what is there beside it."""
    good: Instances = {}
    for index, card in cards.items():
        said = sorted(s.instance for s in found.made if s.card == index)
        good[index] = placeable(card.layout, [*said, *sorted(_there(card))]) if card.layout else frozenset()
    return good


def _kept(found: NodeSlices, cards: Cards, users: Users) -> Instances:
    """What is in use: where processes run, what is there and has a pod, and what its pod will find gone.

    That is made again where it is in the way of nothing: what is there instead may have just been given to another pod.
    """
    kept: Instances = {}
    for index, card in cards.items():
        there, planned = _there(card), {s.instance for s in found.planned or () if s.card == index}
        busy = {made.instance for made in card.instances if made.busy}
        used = {place.instance for place in users if place.card == index}
        order = [*sorted(busy), *sorted((used & there) - busy)]
        layout = card.layout
        if layout is not None:
            order += [i for i in sorted(used - there) if i in planned or not problem(layout, {*there, i})]
        kept[index] = placeable(layout, order) if layout else frozenset()
    return kept
