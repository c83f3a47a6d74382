"""Computes which slices the cards of a node should have, from the plan, the existing slices and the slices in use.

The functions are pure. The two partitioners and `mgpu simulate` call them. A slice in use is never removed: a plan that
lacks one raises PlanNotApplicable. If a plan contains counts but no placements, existing slices stay as far as the
counts allow, so that no instance is destroyed and then created again in the same place.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from mgpu.model.cards import Card
from mgpu.model.mig import Instance, Layout, arrange, invalid_reason
from mgpu.model.node_slices import ANNOTATION, NodeSlices
from mgpu.model.slice_names import MAX_MPS_CLIENTS, Slice, SliceCounts, count_slices, gigabytes

_GIB = 1 << 30

Instances = Mapping[int, frozenset[Instance]]
"""The MIG instances of each card, by the index of the card."""


class PlanNotApplicable(Exception):
    """The plan or the configuration cannot be applied now. The message begins with the path of the wrong value."""


def without_zeros(amounts: SliceCounts) -> dict[int, dict[str, int]]:
    """Return the counts without those that are 0, and without cards that then have none."""
    nonzero = {card: {name: n for name, n in names.items() if n} for card, names in amounts.items()}
    return {card: names for card, names in nonzero.items() if names}


def _listing(slices: Iterable[Slice]) -> str:
    return ", ".join(f"{s.instance} of card {s.card}" for s in sorted(slices))


# MIG


def planned_instances(
    node: NodeSlices, layouts: Mapping[int, Layout], current: Instances, previous: Instances, in_use: Instances
) -> dict[int, frozenset[Instance]]:
    """Return the desired instances of every card that can be partitioned.

    Args:
        node: The content of the Node's annotations, with the plan.
        layouts: The layouts of the cards that can be partitioned, by card index.
        current: The existing instances.
        previous: The instances of the last applied plan, or those that the Node reports.
        in_use: The instances that must stay because pods use them or processes run on them.

    Raises:
        PlanNotApplicable: The plan lacks an instance that is in use, or a card cannot have the planned instances.
    """
    spec = without_zeros(node.partitioning.spec)
    _check_spec(spec, layouts)
    planned = node.planned if node.planned is not None and count_slices(node.planned) == spec else None
    desired: dict[int, frozenset[Instance]] = {}
    for card, layout in sorted(layouts.items()):
        used, path = in_use.get(card, frozenset()), f"metadata.annotations[{ANNOTATION}][spec-gpu-{card}-…]"
        if planned is not None:
            desired[card] = frozenset(s.instance for s in planned if s.card == card)
        else:
            states = (previous.get(card, frozenset()), current.get(card, frozenset()))
            desired[card] = _arrange(layout, spec.get(card, {}), used, states, path)
        if reason := invalid_reason(layout, desired[card]):
            raise PlanNotApplicable(f"{path}: {reason}")
        if lost := used - desired[card]:
            raise PlanNotApplicable(f"{path}: {_listing(Slice(card, *i) for i in lost)} in use, but not in the plan")
    return desired


def _check_spec(spec: SliceCounts, layouts: Mapping[int, Layout]) -> None:
    for card, names in sorted(spec.items()):
        if card not in layouts:
            path = f"metadata.annotations[{ANNOTATION}][spec-gpu-{card}-{min(names)}]"
            raise PlanNotApplicable(f"{path}: the node has no card {card} that is in MIG mode and answers")
        for name in sorted(names):
            if layouts[card].profile(name) is None:
                reason = invalid_reason(layouts[card], [Instance(0, name)])
                raise PlanNotApplicable(f"metadata.annotations[{ANNOTATION}][spec-gpu-{card}-{name}]: {reason}")


def _arrange(
    layout: Layout,
    amounts: Mapping[str, int],
    in_use: frozenset[Instance],
    states: Sequence[frozenset[Instance]],
    path: str,
) -> frozenset[Instance]:
    """Return placements for the given number of instances of each profile.

    A state that has exactly these counts and all instances in use is returned unchanged. Otherwise the instances in use
    stay, together with current instances that fit beside them, and the missing instances are arranged around both. If
    that is not possible, the missing instances are arranged around the instances in use alone.

    Args:
        states: The previous instances of the card, and then its current ones.
        path: The path of the plan, for errors.
    """
    for state in states:
        if Counter(i.profile for i in state) == amounts and in_use <= state and not invalid_reason(layout, state):
            return state
    missing = Counter(amounts)
    missing.subtract(i.profile for i in in_use)
    if lost := sorted(name for name, n in missing.items() if n < 0):
        raise PlanNotApplicable(f"{path}: the plan has fewer of {', '.join(lost)} than are in use")
    staying, beside_staying = set(in_use), Counter(missing)
    for instance in sorted(states[-1] - in_use):
        if beside_staying[instance.profile] > 0 and not invalid_reason(layout, {*staying, instance}):
            staying.add(instance)
            beside_staying[instance.profile] -= 1
    new = arrange(layout, staying, beside_staying)
    if new is not None:
        return frozenset((*staying, *new))
    new = arrange(layout, in_use, missing)
    if new is None:
        texts = ", ".join(f"{n} of {name}" for name, n in sorted(amounts.items()))
        raise PlanNotApplicable(f"{path}: {texts} do not fit on a {layout.name} beside the instances in use")
    return in_use.union(new)


def placeable_instances(layout: Layout | None, instances: Sequence[Instance]) -> frozenset[Instance]:
    """Return those of `instances` that can exist together; earlier ones take precedence.

    The result is empty if the card has no layout, because it does not support MIG.
    """
    if layout is None:
        return frozenset()
    placed: set[Instance] = set()
    for instance in instances:
        if not invalid_reason(layout, {*placed, instance}):
            placed.add(instance)
    return frozenset(placed)


# MPS


def configured_slices(
    config: SliceCounts,
    planned: tuple[Slice, ...] | None,
    previous: Iterable[Slice],
    used: Collection[Slice],
    gpus: Sequence[Card],
    held: Collection[int],
    source: str,
) -> tuple[Slice, ...]:
    """Return the MPS shares of a configuration, each with its number on the card (`Slice.start`).

    They have the numbers of the plan if the plan has exactly the same counts.

    Args:
        planned: The slices of the plan; None if the plan contains only counts.
        previous: The last slices. Those that the configuration still contains keep their numbers; slices in use take
            precedence. New slices get the lowest free numbers.
        used: The slices that pods hold.
        held: The indexes of the cards of which pods in other vocabularies hold shares.
        source: The path of the configuration, for errors.

    Raises:
        PlanNotApplicable: The configuration lacks a slice that is in use, or a card cannot have the slices.
    """
    config = without_zeros(config)
    by_index = {card.index: card for card in gpus}
    for card, names in sorted(config.items()):
        _check_card(card, names, by_index, held, source)
    if planned is not None and count_slices(planned) == config:
        slices = tuple(sorted(s.place for s in planned))
    else:
        slices = _assign_numbers(config, previous, used)
    if lost := {s.place for s in used} - {*slices}:
        raise PlanNotApplicable(f"{source}: {_listing(lost)} in use, but not in the configuration")
    return slices


def _check_card(
    card: int, names: Mapping[str, int], gpus: Mapping[int, Card], held: Collection[int], source: str
) -> None:
    if card not in gpus:
        raise PlanNotApplicable(f"{source}: the node has no card {card}")
    capacity = gpus[card].memory // _GIB
    size = sum(gigabytes(name) * n for name, n in names.items())
    number = sum(names.values())
    if size > capacity:
        raise PlanNotApplicable(
            f"{source}: the slices of card {card} have {size} GiB in total, but the card has {capacity} GiB"
        )
    if number > MAX_MPS_CLIENTS:
        raise PlanNotApplicable(
            f"{source}: {number} slices of card {card}, but an MPS daemon has at most {MAX_MPS_CLIENTS} clients"
        )
    if card in held:
        raise PlanNotApplicable(f"{source}: pods in other vocabularies have shares of card {card}")


def _assign_numbers(config: SliceCounts, previous: Iterable[Slice], used: Collection[Slice]) -> tuple[Slice, ...]:
    missing = {(card, name): n for card, names in config.items() for name, n in names.items()}
    used = {s.place for s in used}
    slices: set[Slice] = set()
    taken: set[tuple[int, int]] = set()
    for place in sorted({*used, *(s.place for s in previous)}, key=lambda place: (place not in used, place)):
        if missing.get((place.card, place.name), 0) > 0 and (place.card, place.start) not in taken:
            missing[place.card, place.name] -= 1
            slices.add(place)
            taken.add((place.card, place.start))
    for (card, name), n in sorted(missing.items(), key=lambda row: (row[0][0], gigabytes(row[0][1]))):
        for _ in range(n):
            start = next(i for i in range(MAX_MPS_CLIENTS + len(taken)) if (card, i) not in taken)
            slices.add(Slice(card, start, name))
            taken.add((card, start))
    return tuple(sorted(slices))
