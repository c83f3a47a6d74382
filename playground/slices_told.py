"""What happened to a pod that asked for slices, in words: pure."""

from collections.abc import Mapping, Sequence

from mgpu.model.cards import Card
from mgpu.model.ledger import Share
from mgpu.model.partitioning import NodeSlices
from mgpu.model.slices import MIG, RESOURCE_PREFIX, Slice, is_slice, mode_of, place_of, slice_named

VISIBLE = "NVIDIA_VISIBLE_DEVICES"
LIMITS = ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
_TIMES = "×"


def given(shares: Sequence[Share]) -> str:
    """`train on 2g.20gb at 4 of card 0`; "": none of them is a slice."""
    return "; ".join(
        f"{container} on {', '.join(map(_placed, places))}" for container, places in by_container(shares).items()
    )


def _placed(place: Slice) -> str:
    """Shares under MPS lie nowhere."""
    return f"{place.name}{f' at {place.start}' if mode_of(place.name) == MIG else ''} of card {place.card}"


def planned(before: NodeSlices, after: NodeSlices) -> str:
    """`5: card 0, not cut before, into 5 × 1g.10gb and 2g.20gb`."""
    if after.partitioning.plan in (None, before.partitioning.plan):
        return "none: there were free slices"
    cards = sorted({*before.partitioning.spec, *after.partitioning.spec})
    changed = [c for c in cards if before.partitioning.spec.get(c) != after.partitioning.spec.get(c)]
    told = "; ".join(_cut(card, before.partitioning.spec.get(card, {}), after.partitioning.spec) for card in changed)
    return f"{after.partitioning.plan}: {told}"


def visible(shares: Sequence[Share], devices: Mapping[Slice, str], gpus: Sequence[Card], mode: str) -> dict[str, str]:
    """Container → what its NVIDIA_VISIBLE_DEVICES must be: its MIG devices, or under MPS the cards of its shares.

    devices: the MIG devices that there are, by place.
    """
    uuids = {gpu.index: gpu.uuid for gpu in gpus}
    found = {}
    for container, places in by_container(shares).items():
        seen = [devices.get(s, "one that is not there") if mode == MIG else uuids.get(s.card, "") for s in places]
        found[container] = ",".join(dict.fromkeys(seen))
    return found


def by_container(shares: Sequence[Share]) -> dict[str, list[Slice]]:
    """Container → the places of its slices, in the order in which it sees them."""
    found: dict[str, list[Slice]] = {}
    for share in sorted((s for s in shares if is_slice(s.type)), key=lambda s: (s.type, str(s.card).zfill(9))):
        name = slice_named(RESOURCE_PREFIX + share.type)
        if name and isinstance(share.card, int):
            found.setdefault(share.container, []).append(Slice(*place_of(share.card), name))
    return found


def _cut(card: int, before: Mapping[str, int], after: Mapping[int, Mapping[str, int]]) -> str:
    was = f"{_listed(before)} before" if before else "not cut before"
    return f"card {card}, {was}, into {_listed(after.get(card, {})) or 'nothing'}"


def _listed(names: Mapping[str, int]) -> str:
    """`5 × 1g.10gb and 2g.20gb`."""
    return " and ".join(name if count == 1 else f"{count} {_TIMES} {name}" for name, count in sorted(names.items()))
