"""Chooses the MIG instances of a ResourceClaim on the cards of a node (`place_instances`).

`decisions.mig_decisions` says which instances each allocation result may get: on admission those of the profile that
kube-scheduler has chosen, elsewhere all that the selectors allow. Two instances of a card must not overlap, and a card
has at most one with media engines (`mgpu.model.mig`).

Which instance is best. As for partition plans (`partitioning.geometry`), the measure of a card is how many instances
could still be created on it, each by itself. An instance costs what its creation takes from this number, so it goes to
a card that is partitioned already rather than to an empty one, and there to the place that leaves the most choice. Of
equal ones it is on the card with the lowest index, and there at the highest start. For a claim with one instance the
result is therefore the best one, and does not depend on the order of the cards or on kube-scheduler's choice.

A claim with several instances gets them one after the other, those with the most memory first, each at its best place.
If a later one has no place then, earlier ones get their next best places, until all combinations were tried. Equal sets
of instances are examined once, so the search ends soon even if nothing fits; the caller's budget ends it otherwise.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from mgpu.model.mig import Instance
from mgpu.model.mig_devices import MigCardState, MigDevice, offers_of
from scheduler.engine.effort import Budget, Exhausted, full_budget

_STEPS_PER_CARD = 30
"""The steps of a budget for each set of instances and each card. A set on eight empty cards takes 60 µs."""
_STEPS_PER_RESULT = 10
"""The steps for each set and each result of the claim, which takes 110 µs for 32 results."""


@dataclass(frozen=True, slots=True)
class WantedInstance:
    """One allocation result that gets a MIG instance.

    Attributes:
        request: The name of its request.
        allowed: The instances that it may get, of any profile.
    """

    request: str
    allowed: frozenset[MigDevice]


@dataclass(frozen=True, slots=True)
class InstanceRelation:
    """A constraint between the instances of a claim.

    Attributes:
        concerned: The positions of the results that it concerns.
        value: A function that returns the value of an instance that is compared; None for no value.
        distinct: Whether the values must be different and not equal.
    """

    concerned: frozenset[int]
    value: Callable[[MigDevice], Hashable]
    distinct: bool = False

    def allows(self, chosen: Mapping[int, MigDevice], position: int, device: MigDevice) -> bool:
        """Return whether a result may get an instance beside those that other results have."""
        if position not in self.concerned:
            return True
        value = self.value(device)
        others = [self.value(other) for at, other in chosen.items() if at in self.concerned]
        if value is None:
            return False
        return value not in others if self.distinct else all(other == value for other in others)


@dataclass(frozen=True, slots=True)
class InstancePlacement:
    """The outcome of the search.

    Attributes:
        devices: The instance of each result in the order of the results; None if no combination was found.
        proven: Whether it is proven that there is none.
    """

    devices: tuple[MigDevice, ...] | None
    proven: bool = True


@dataclass(slots=True)
class _Search:
    """A search in progress.

    Attributes:
        order: The positions of the results in the order in which they get instances.
        kinds: For each result, a number that is equal for results that may get the same instances by the same
            relations.
        failed: The sets of instances with which the remaining results have no places.
    """

    wanted: Sequence[WantedInstance]
    relations: Sequence[InstanceRelation]
    order: Sequence[int]
    kinds: Sequence[int]
    budget: Budget
    failed: set[Hashable] = field(default_factory=set)

    def solve(
        self, depth: int, states: Mapping[int, MigCardState], chosen: Mapping[int, MigDevice]
    ) -> Mapping[int, MigDevice] | None:
        """Return the instances of all results by position, or None. Raises Exhausted."""
        if depth == len(self.order):
            return chosen
        key = (depth, frozenset((self.kinds[at], device) for at, device in chosen.items()))
        if key in self.failed:
            return None
        self.budget.take(_STEPS_PER_CARD * len(states) + _STEPS_PER_RESULT * len(self.order))
        position = self.order[depth]
        for device in _best_first(states, self.wanted[position].allowed):
            if not all(relation.allows(chosen, position, device) for relation in self.relations):
                continue
            changed = {**states, device.card: states[device.card].with_instance(device.instance)}
            found = self.solve(depth + 1, changed, {**chosen, position: device})
            if found is not None:
                return found
        self.failed.add(key)
        return None


def place_instances(
    cards: Sequence[MigCardState],
    wanted: Sequence[WantedInstance],
    relations: Sequence[InstanceRelation] = (),
    budget: Budget | None = None,
) -> InstancePlacement:
    """Return an instance for each result, or that there is no combination.

    Args:
        cards: The cards of the node without what the claim itself holds, in any order.
        budget: The effort that the search may take; by default that of one full search.
    """
    states = {state.card.index: state for state in cards}
    sizes = {offer.device: offer.profile.size for state in cards for offer in offers_of(state.card)}
    smallest = [min((sizes.get(device, 0) for device in one.allowed), default=0) for one in wanted]
    order = sorted(range(len(wanted)), key=lambda at: (-smallest[at], len(wanted[at].allowed), at))
    kinds = [(one.allowed, tuple(at in relation.concerned for relation in relations)) for at, one in enumerate(wanted)]
    search = _Search(wanted, relations, order, [kinds.index(kind) for kind in kinds], budget or full_budget())
    try:
        found = search.solve(0, states, {})
    except Exhausted:
        return InstancePlacement(None, proven=False)
    if found is None:
        return InstancePlacement(None)
    return InstancePlacement(tuple(found[position] for position in range(len(wanted))))


def fit_together(cards: Sequence[MigCardState], devices: Sequence[MigDevice]) -> bool:
    """Return whether all of these instances can be created beside those in use."""
    states = {state.card.index: state for state in cards}
    for device in devices:
        state = states.get(device.card)
        if state is None or not state.has(device.instance):
            return False
        states[device.card] = state.with_instance(device.instance)
    return True


def cost_of(cards: Sequence[MigCardState], devices: Sequence[MigDevice]) -> int:
    """Return how many instances can no longer be created on these cards once these instances exist."""
    after = {state.card.index: state for state in cards}
    for device in devices:
        after[device.card] = after[device.card].with_instance(device.instance)
    return sum(len(state.possible()) - len(after[state.card.index].possible()) for state in cards)


def _best_first(states: Mapping[int, MigCardState], allowed: frozenset[MigDevice]) -> list[MigDevice]:
    """Return the allowed instances that can be created, the best one first."""
    rated = [
        (_cost(state, instance, len(possible)), index, -instance.start, instance.profile)
        for index, state in states.items()
        for possible in [state.possible()]
        for instance in possible
        if MigDevice(index, instance) in allowed
    ]
    return [MigDevice(index, Instance(-start, profile)) for _, index, start, profile in sorted(rated)]


def _cost(state: MigCardState, instance: Instance, possible: int) -> int:
    """Return how many instances can no longer be created once this one exists."""
    return possible - len(state.with_instance(instance).possible())
