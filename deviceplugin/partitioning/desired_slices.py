"""The desired state of a node's cards: which slices the plan asks for, given what exists and what is in use. Pure.

The partitioners call `planned_instances` (MIG) and `configured_slices` (MPS). A slice in use is never removed: a plan
that lacks it is refused. Where a plan gives counts but no placements, existing slices stay as far as the counts allow,
so that no instance is destroyed only to be created again in the same place.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from mgpu.model.cards import Card
from mgpu.model.mig import Instance, Layout, arrange, invalid_reason
from mgpu.model.node_slices import ANNOTATION, NodeSlices
from mgpu.model.slice_names import MOST_CLIENTS, Counts, Slice, counts, gigabytes

_GIB = 1 << 30

Instances = Mapping[int, frozenset[Instance]]
"""Card index → MIG instances."""


class Impossible(Exception):
    """The plan or configuration cannot be applied now. The message names the path of the value."""


def named(slices: Iterable[Slice]) -> str:
    """Return the slices as people read them: `2g.20gb at 4 of card 0`."""
    return ", ".join(f"{s.name} at {s.start} of card {s.card}" for s in sorted(slices))


# MIG


def planned_instances(
    found: NodeSlices, layouts: Mapping[int, Layout], made: Instances, before: Instances, in_use: Instances
) -> dict[int, frozenset[Instance]]:
    """Return the desired instances of every card that can be cut, as the plan says.

    Args:
        found: the plan and the slices as the annotations of the Node describe them.
        layouts: the layouts of the cards that can be partitioned, by card index.
        made: the instances that exist.
        before: the instances of the last plan that was applied, or those that the Node reports.
        in_use: the instances that must stay because pods use them.

    Raises Impossible if the plan lacks an instance that is in use, or does not fit on the cards.
    """
    spec = {card: {name: n for name, n in names.items() if n} for card, names in found.partitioning.spec.items()}
    _check_spec(spec, layouts)
    planned = found.planned if found.planned is not None and counts(found.planned) == spec else None
    wanted: dict[int, frozenset[Instance]] = {}
    for card, layout in sorted(layouts.items()):
        kept, path = in_use.get(card, frozenset()), f"metadata.annotations[{ANNOTATION}][spec-gpu-{card}-…]"
        if planned is not None:
            wanted[card] = frozenset(s.instance for s in planned if s.card == card)
        else:
            states = (before.get(card, frozenset()), made.get(card, frozenset()))
            wanted[card] = _arranged(layout, spec.get(card, {}), kept, states, path)
        if why := invalid_reason(layout, wanted[card]):
            raise Impossible(f"{path}: {why}")
        if lost := kept - wanted[card]:
            raise Impossible(f"{path}: {named(Slice(card, *i) for i in lost)} in use and not in the plan")
    return wanted


def _check_spec(spec: Counts, layouts: Mapping[int, Layout]) -> None:
    for card, names in sorted(spec.items()):
        path = f"metadata.annotations[{ANNOTATION}][spec-gpu-{card}-{min(names, default='')}]"
        if names and card not in layouts:
            raise Impossible(f"{path}: the node has no card {card} that is in MIG mode and answers")
        for name in sorted(names):
            if layouts[card].profile(name) is None:
                why = invalid_reason(layouts[card], [Instance(0, name)])
                raise Impossible(f"metadata.annotations[{ANNOTATION}][spec-gpu-{card}-{name}]: {why}")


def _arranged(
    layout: Layout,
    names: Mapping[str, int],
    kept: frozenset[Instance],
    states: Sequence[frozenset[Instance]],
    path: str,
) -> frozenset[Instance]:
    """Return placements for the given number of instances of each profile.

    A state that already has exactly these counts is returned unchanged. Otherwise the instances in use stay, together
    with those of the last state that fit beside them, and the missing ones are arranged around both. If both leave no
    room, the missing ones are arranged around the instances in use alone.
    """
    for state in states:
        if _counted(state) == names and kept <= state and not invalid_reason(layout, state):
            return state
    stay, left = set(kept), dict(names)
    for instance in kept:
        left[instance.profile] = left.get(instance.profile, 0) - 1
    if lost := sorted(name for name, n in left.items() if n < 0):
        raise Impossible(f"{path}: the plan has fewer of {', '.join(lost)} than are in use")
    rest = dict(left)
    for instance in sorted(states[-1] - kept):
        if rest.get(instance.profile, 0) > 0 and not invalid_reason(layout, {*stay, instance}):
            stay.add(instance)
            rest[instance.profile] -= 1
    beside_all, beside_kept = arrange(layout, stay, rest), arrange(layout, kept, left)
    if beside_all is not None:
        return frozenset((*stay, *beside_all))
    if beside_kept is None:
        raise Impossible(f"{path}: {_listed(names)} cannot lie on a {layout.name} beside what is in use")
    return kept.union(beside_kept)


def _counted(instances: Iterable[Instance]) -> dict[str, int]:
    found: dict[str, int] = {}
    for instance in instances:
        found[instance.profile] = found.get(instance.profile, 0) + 1
    return found


def _listed(names: Mapping[str, int]) -> str:
    return ", ".join(f"{n} of {name}" for name, n in sorted(names.items()))


def placeable(layout: Layout, instances: Sequence[Instance]) -> frozenset[Instance]:
    """Return those of `instances` that can exist together; earlier ones take precedence."""
    found: set[Instance] = set()
    for instance in instances:
        if not invalid_reason(layout, {*found, instance}):
            found.add(instance)
    return frozenset(found)


# MPS


def configured_slices(
    config: Counts,
    planned: tuple[Slice, ...] | None,
    before: Iterable[Slice],
    used: Collection[Slice],
    gpus: Sequence[Card],
    held: Collection[int],
    source: str,
) -> tuple[Slice, ...]:
    """Return the slices of a configuration. They have the numbers of the plan if the plan has exactly the same counts.

    Args:
        before: the last slices. They keep their numbers, those in use first; new ones get the lowest free numbers.
        used: the slices that pods hold.
        held: the indexes of the cards of which pods of other dialects hold shares.
        source: the path of the configuration, for errors.

    Raises Impossible.
    """
    config = {card: {name: n for name, n in names.items() if n} for card, names in config.items()}
    config = {card: names for card, names in config.items() if names}
    by_index = {card.index: card for card in gpus}
    for card, names in sorted(config.items()):
        _check_card(card, names, by_index, held, source)
    if planned is not None and counts(planned) == config:
        found = tuple(sorted(s.place for s in planned))
    else:
        found = _numbered(config, before, used)
    if lost := {s.place for s in used} - {*found}:
        raise Impossible(f"{source}: {named(lost)} in use and not in the configuration")
    return found


def _check_card(
    card: int, names: Mapping[str, int], gpus: Mapping[int, Card], held: Collection[int], source: str
) -> None:
    if card not in gpus:
        raise Impossible(f"{source}: the node has no card {card}")
    room, size = gpus[card].memory // _GIB, sum(gigabytes(name) * n for name, n in names.items())
    if size > room:
        raise Impossible(f"{source}: {size} GiB of card {card}, which has {room}")
    if sum(names.values()) > MOST_CLIENTS:
        raise Impossible(
            f"{source}: {sum(names.values())} slices of card {card}, MPS has at most {MOST_CLIENTS} clients"
        )
    if card in held:
        raise Impossible(f"{source}: pods in other vocabularies have shares of card {card}")


def _numbered(config: Counts, before: Iterable[Slice], used: Collection[Slice]) -> tuple[Slice, ...]:
    left = {(card, name): n for card, names in config.items() for name, n in names.items()}
    used = {s.place for s in used}
    found: set[Slice] = set()
    taken: set[tuple[int, int]] = set()
    for place in sorted({*used, *(s.place for s in before)}, key=lambda place: (place not in used, place)):
        if left.get((place.card, place.name), 0) > 0 and (place.card, place.start) not in taken:
            left[place.card, place.name] -= 1
            found.add(place)
            taken.add((place.card, place.start))
    for (card, name), n in sorted(left.items(), key=lambda row: (row[0][0], gigabytes(row[0][1]))):
        for _ in range(n):
            start = next(i for i in range(MOST_CLIENTS + len(taken)) if (card, i) not in taken)
            found.add(Slice(card, start, name))
            taken.add((card, start))
    return tuple(sorted(found))
