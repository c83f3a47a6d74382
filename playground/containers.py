"""Describes the cards that the containers of a pod were given, and checks that each container sees exactly its cards.

`mgpu demo` prints the descriptions and the differences. The functions must have no side effects.
"""

from collections.abc import Iterable, Mapping, Sequence

from mgpu.model.cards import GPU, Card, CardState
from mgpu.model.errors import BadObject, Problem
from mgpu.model.gpu_requests import cards_by_index
from mgpu.model.ledger import Share
from mgpu.model.node_slices import NodeSlices
from mgpu.model.quantities import format_bytes, format_core
from mgpu.model.slice_names import MIG, RESOURCE_PREFIX, Slice, is_slice, mode_of, place_of, slice_of_resource

VISIBLE = "NVIDIA_VISIBLE_DEVICES"
LIMITS = ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")


def describe_cards(shares: Sequence[Share], cards: Sequence[CardState]) -> str:
    """Return a description such as `train on card 0 (40% and 8.0 GiB free before)`.

    Args:
        shares: The shares of the pod.
        cards: The states of the node's cards before the placement.
    """
    states = {state.card.index: state for state in cards}
    return "; ".join(
        f"{container} on card{'s' if len(indexes) > 1 else ''} {', '.join(_before(states[i]) for i in indexes)}"
        for container, indexes in _cards_of(shares, [state.card for state in cards]).items()
    )


def describe_slices(shares: Sequence[Share]) -> str:
    """Return a description such as `train on 2g.20gb at 4 of card 0`, or "" if the pod has no slices."""
    return "; ".join(f"{c} on {', '.join(map(_position, slices))}" for c, slices in _slices_of(shares).items())


def describe_plan(before: NodeSlices, after: NodeSlices) -> str:
    """Return a description of the new partition plan of a node, with the number of the plan and the changed cards.

    An example is `5: card 0, not partitioned before, into 5 × 1g.10gb and 2g.20gb`. If the node has no new plan, the
    description says that there were free slices.
    """
    if after.partitioning.plan in (None, before.partitioning.plan):
        return "none: there were free slices"
    old, new = before.partitioning.spec, after.partitioning.spec
    changes = [_change(card, old.get(card, {}), new.get(card, {})) for card in sorted({*old, *new})]
    return f"{after.partitioning.plan}: {'; '.join(filter(None, changes))}"


def expected_cards(shares: Sequence[Share], cards: Sequence[Card]) -> dict[str, str]:
    """Return the expected NVIDIA_VISIBLE_DEVICES of each container: the UUIDs of its cards in the order of the indexes.

    Raises BadObject if a share is on a card that does not exist.
    """
    known = cards_by_index(cards)
    return {c: ",".join(known[i].uuid for i in indexes) for c, indexes in _cards_of(shares, cards).items()}


def expected_slices(shares: Sequence[Share], uuids: Mapping[Slice, str], cards: Sequence[Card]) -> dict[str, str]:
    """Return the expected NVIDIA_VISIBLE_DEVICES of each container: its MIG devices, or the cards of its MPS shares.

    Args:
        shares: The shares of the pod.
        uuids: The UUIDs of the node's MIG devices, by their slices.
        cards: The cards of the node.
    """
    of_cards = {card.index: card.uuid for card in cards}
    found = {}
    for container, slices in _slices_of(shares).items():
        visible = [uuids.get(s, "missing") if mode_of(s.name) == MIG else of_cards.get(s.card, "") for s in slices]
        found[container] = ",".join(dict.fromkeys(visible))
    return found


def differences(expected: Mapping[str, str], environments: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return a sentence for each container whose NVIDIA_VISIBLE_DEVICES is not the expected one."""
    problems = []
    for container, value in expected.items():
        actual = environments[container].get(VISIBLE) if container in environments else None
        if actual != value:
            problems.append(f"container {container} must see {VISIBLE}={value}, and sees {actual}")
    return problems


def _cards_of(shares: Sequence[Share], cards: Sequence[Card]) -> dict[str, list[int]]:
    """Return the indexes of each container's GPUs. Raises BadObject if a share is on a card that does not exist.

    A container that uses several requests of a ResourceClaim may have several shares of one card.
    """
    found: dict[str, list[int]] = {}
    for share in (share for share in shares if share.type == GPU):
        card = next((card for card in cards if share.is_on(card)), None)
        if card is None:
            problem = f"names card {share.card}, which does not exist"
            raise BadObject([Problem(f"record of {share.container}", problem)])
        found.setdefault(share.container, []).append(card.index)
    return {container: sorted(set(indexes)) for container, indexes in found.items()}


def _slices_of(shares: Iterable[Share]) -> dict[str, list[Slice]]:
    """Return the slices of each container in the order in which its NVIDIA_VISIBLE_DEVICES lists them."""
    found: dict[str, list[Slice]] = {}
    for share in sorted((s for s in shares if is_slice(s.type)), key=lambda s: (s.type, str(s.card).zfill(9))):
        name = slice_of_resource(RESOURCE_PREFIX + share.type)
        if name and isinstance(share.card, int):
            found.setdefault(share.container, []).append(Slice(*place_of(share.card), name))
    return found


def _before(state: CardState) -> str:
    """Return a description of a card before the placement: its index and its free capacity."""
    if state.idle:
        return f"{state.card.index} (idle before)"
    return f"{state.card.index} ({format_core(state.core_free)} and {format_bytes(state.memory_free)} free before)"


def _position(place: Slice) -> str:
    """Return a description such as `2g.20gb at 4 of card 0`, or `8gb of card 0` for an MPS share."""
    return f"{place.name}{f' at {place.start}' if mode_of(place.name) == MIG else ''} of card {place.card}"


def _change(card: int, old: Mapping[str, int], new: Mapping[str, int]) -> str:
    """Return a description of how the plan changes a card, or "" if it does not."""
    if old == new:
        return ""
    before = f"{_listed(old)} before" if old else "not partitioned before"
    return f"card {card}, {before}, into {_listed(new) or 'nothing'}"


def _listed(counts: Mapping[str, int]) -> str:
    """Return a description such as `5 × 1g.10gb and 2g.20gb`."""
    return " and ".join(name if count == 1 else f"{count} × {name}" for name, count in sorted(counts.items()))
