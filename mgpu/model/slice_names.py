"""Names and places of slices, which are MIG instances and MPS shares. Pure.

A slice has a name (`2g.20gb`, `4gb`), a resource (`nvidia.com/mig-2g.20gb`, `nvidia.com/gpu-4gb`), and is a device of
its own type (`mig-2g.20gb`, `gpu-4gb`) for the ledger and the placement engine. These functions translate between them.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mgpu.model.mig import Instance, canonical

MIG, MPS = "mig", "mps"
"""The modes in which a node's cards are partitioned: values of the node label `gpu.partitioning`."""
RESOURCE_PREFIX = "nvidia.com/"
PLACES = 100
"""A number above the slices of any card, which has at most 48 (under MPS). The index of a slice is made with it."""
MAX_MPS_CLIENTS = 48
"""Clients of MPS per card (Volta and later)."""

_MIG_RESOURCE = re.compile(r"nvidia\.com/mig-([1-9]\d?g\.[1-9]\d{0,3}gb)(\.me)?", re.ASCII)
_MPS_RESOURCE = re.compile(r"nvidia\.com/gpu-([1-9]\d{0,4}gb)", re.ASCII)
_MIG_NAME = re.compile(r"[1-9]\d?g\.[1-9]\d{0,3}gb(\+me)?", re.ASCII)
_MPS_NAME = re.compile(r"([1-9]\d{0,4})gb", re.ASCII)

SliceCounts = Mapping[int, Mapping[str, int]]
"""Card index → slice (`2g.20gb`, `4gb`) → how many."""


def slice_of_resource(resource: str) -> str | None:
    """Return the slice of an extended resource (`1g.10gb+me` for `nvidia.com/mig-1g.10gb.me`), or None."""
    if match := _MIG_RESOURCE.fullmatch(resource):
        return match[1] + ("+me" if match[2] else "")
    match = _MPS_RESOURCE.fullmatch(resource)
    return match[1] if match else None


def is_slice(type: str) -> bool:
    """Return whether devices of this type are slices."""
    return slice_of_resource(RESOURCE_PREFIX + type) is not None


def is_mps(type: str) -> bool:
    """Return whether devices of this type are MPS shares."""
    return _MPS_RESOURCE.fullmatch(RESOURCE_PREFIX + type) is not None


def device_type(slice_: str) -> str:
    """Return the type of the devices that slices of this name are."""
    return f"gpu-{slice_}" if _MPS_NAME.fullmatch(slice_) else f"mig-{slice_.replace('+', '.')}"


def resource_of(slice_: str) -> str:
    """Return the extended resource of a slice."""
    return RESOURCE_PREFIX + device_type(slice_)


def mode_of(slice_: str) -> str:
    """Return the mode of a slice: `MIG` or `MPS`."""
    return MPS if _MPS_NAME.fullmatch(slice_) else MIG


def gigabytes(slice_: str) -> int:
    """Return the GiB of an MPS share."""
    return int(slice_.removesuffix("gb"))


@dataclass(frozen=True, slots=True, order=True)
class Slice:
    """A slice on a card.

    Attributes:
        card: the index of the card.
        start: the first memory slice of a MIG instance; MPS shares of a card are numbered.
        name: as in annotations (`2g.20gb`, `4gb`).
        uuid: of the MIG device; "" before there is one.
        pod: the UID of the pod that the node handed it to; "" for none.
    """

    card: int
    start: int
    name: str
    uuid: str = ""
    pod: str = ""

    @property
    def index(self) -> int:
        """The index of the slice as a device."""
        return self.card * PLACES + self.start

    @property
    def place(self) -> "Slice":
        """The slice without what changes: uuid and pod."""
        return Slice(self.card, self.start, self.name)

    @property
    def instance(self) -> Instance:
        return Instance(self.start, self.name)


def place_of(index: int) -> tuple[int, int]:
    """Return (card, start) of the slice with this device index."""
    return divmod(index, PLACES)


def read_name(text: str) -> str | None:
    """Return the name in mgpu's spelling, or None. The spelling of resources is accepted too: `1g.10gb.me`."""
    name = canonical(text.removesuffix(".me") + "+me" if text.endswith(".me") else text)
    return name if _MIG_NAME.fullmatch(name) or _MPS_NAME.fullmatch(name) else None


def count_slices(slices: Iterable[Slice]) -> dict[int, dict[str, int]]:
    """Return the number of slices of each name, by card."""
    found: dict[int, dict[str, int]] = {}
    for s in sorted(slices):
        card = found.setdefault(s.card, {})
        card[s.name] = card.get(s.name, 0) + 1
    return found
