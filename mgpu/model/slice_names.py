"""Slices of cards, MIG instances and MPS shares: their names and places. Pure.

A slice is a device of its own type, `mig-2g.20gb` or `gpu-4gb`, in the ledger as in the placement engine.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mgpu.model.mig import Instance, canonical

MIG, MPS = "mig", "mps"
"""How a node's cards are cut."""
RESOURCE_PREFIX = "nvidia.com/"
PLACES = 100
"""More than a card has slices: 48 under MPS."""
MOST_CLIENTS = 48
"""Of MPS, per card (Volta and later)."""

_MIG_RESOURCE = re.compile(r"nvidia\.com/mig-([1-9]\d?g\.[1-9]\d{0,3}gb)(\.me)?", re.ASCII)
_MPS_RESOURCE = re.compile(r"nvidia\.com/gpu-([1-9]\d{0,4}gb)", re.ASCII)
_MIG_NAME = re.compile(r"[1-9]\d?g\.[1-9]\d{0,3}gb(\+me)?", re.ASCII)
_MPS_NAME = re.compile(r"([1-9]\d{0,4})gb", re.ASCII)

Counts = Mapping[int, Mapping[str, int]]
"""Card index → slice (`2g.20gb`, `4gb`) → how many."""


def slice_named(resource: str) -> str | None:
    """The slice that an extended resource stands for; None: it is none. `nvidia.com/mig-1g.10gb.me` is `1g.10gb+me`."""
    if match := _MIG_RESOURCE.fullmatch(resource):
        return match[1] + ("+me" if match[2] else "")
    match = _MPS_RESOURCE.fullmatch(resource)
    return match[1] if match else None


def is_slice(type: str) -> bool:
    """Whether devices of this type are slices."""
    return slice_named(RESOURCE_PREFIX + type) is not None


def is_mps(type: str) -> bool:
    """Whether devices of this type are slices under MPS."""
    return _MPS_RESOURCE.fullmatch(RESOURCE_PREFIX + type) is not None


def type_of(slice_: str) -> str:
    """The type of the devices that such slices are."""
    return f"gpu-{slice_}" if _MPS_NAME.fullmatch(slice_) else f"mig-{slice_.replace('+', '.')}"


def resource_of(slice_: str) -> str:
    return RESOURCE_PREFIX + type_of(slice_)


def mode_of(slice_: str) -> str:
    """MIG or MPS."""
    return MPS if _MPS_NAME.fullmatch(slice_) else MIG


def gigabytes(slice_: str) -> int:
    """The GiB of an MPS slice."""
    return int(slice_.removesuffix("gb"))


@dataclass(frozen=True, slots=True, order=True)
class Slice:
    """A slice of card `card`. start: of a MIG instance its first memory slice; MPS slices of a card are numbered.

    name: as in annotations (`2g.20gb`, `4gb`). uuid: of the MIG device, once there is one. pod: the UID of the pod that
    it was given to, as the node knows, "" where to none.
    """

    card: int
    start: int
    name: str
    uuid: str = ""
    pod: str = ""

    @property
    def index(self) -> int:
        """Of the device that it is."""
        return self.card * PLACES + self.start

    @property
    def place(self) -> "Slice":
        """The same without what changes."""
        return Slice(self.card, self.start, self.name)

    @property
    def instance(self) -> Instance:
        return Instance(self.start, self.name)


def place_of(index: int) -> tuple[int, int]:
    """(card, start) of the device with this index."""
    return divmod(index, PLACES)


def read_name(text: str) -> str | None:
    """The name as ours; `1g.10gb.me` is read too, as resources spell it."""
    name = canonical(text.removesuffix(".me") + "+me" if text.endswith(".me") else text)
    return name if _MIG_NAME.fullmatch(name) or _MPS_NAME.fullmatch(name) else None


def counts(slices: Iterable[Slice]) -> dict[int, dict[str, int]]:
    """How many of each there are, by card."""
    found: dict[int, dict[str, int]] = {}
    for s in sorted(slices):
        card = found.setdefault(s.card, {})
        card[s.name] = card.get(s.name, 0) + 1
    return found
