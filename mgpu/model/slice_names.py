"""Translates between the names, resources and device types of slices, which are MIG instances and MPS shares.

A slice has a name (`2g.20gb`, `4gb`), a resource (`nvidia.com/mig-2g.20gb`, `nvidia.com/gpu-4gb`) and a device type of
its own in the ledger and the placement engine (`mig-2g.20gb`, `gpu-4gb`). Users write the names and the resources, so
these must not change. All processes use this module.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from mgpu.model.mig import Instance, canonical

MIG, MPS = "mig", "mps"
"""The modes in which a node's cards are partitioned: values of the node label `gpu.partitioning`."""
MIG_CLAIMS = "mig-claims"
"""The third value of that label: ResourceClaims get MIG instances (`mig_devices`), and nothing is planned."""
RESOURCE_PREFIX = "nvidia.com/"
PLACES = 100
"""The device index of a slice is the index of its card times `PLACES`, plus its start (`Slice.index`). `PLACES` must be
larger than the number of slices of any card, which is at most 48 (under MPS)."""
MAX_MPS_CLIENTS = 48
"""The most clients that MPS serves on one card (Volta and later)."""

_MIG_RESOURCE = re.compile(r"nvidia\.com/mig-([1-9]\d?g\.[1-9]\d{0,3}gb)(\.me)?", re.ASCII)
_MPS_RESOURCE = re.compile(r"nvidia\.com/gpu-([1-9]\d{0,4}gb)", re.ASCII)
_MIG_NAME = re.compile(r"[1-9]\d?g\.[1-9]\d{0,3}gb(\+me)?", re.ASCII)
_MPS_NAME = re.compile(r"([1-9]\d{0,4})gb", re.ASCII)

SliceCounts = Mapping[int, Mapping[str, int]]
"""The number of slices, by the index of the card and the name of the slice (`2g.20gb`, `4gb`)."""


def slice_of_resource(resource: str) -> str | None:
    """Return the name of the slice that a resource requests (`1g.10gb+me` for `nvidia.com/mig-1g.10gb.me`), or None."""
    if match := _MIG_RESOURCE.fullmatch(resource):
        return match[1] + ("+me" if match[2] else "")
    match = _MPS_RESOURCE.fullmatch(resource)
    return match[1] if match else None


def is_slice(type: str) -> bool:
    return slice_of_resource(RESOURCE_PREFIX + type) is not None


def is_mps(type: str) -> bool:
    return _MPS_RESOURCE.fullmatch(RESOURCE_PREFIX + type) is not None


def device_type(slice_: str) -> str:
    return f"gpu-{slice_}" if _MPS_NAME.fullmatch(slice_) else f"mig-{slice_.replace('+', '.')}"


def resource_of(slice_: str) -> str:
    return RESOURCE_PREFIX + device_type(slice_)


def mode_of(slice_: str) -> str:
    return MPS if _MPS_NAME.fullmatch(slice_) else MIG


@lru_cache(maxsize=1_000)
def gigabytes(slice_: str) -> int:
    """Return the memory of an MPS share of this name, in GiB."""
    return int(slice_.removesuffix("gb"))


@dataclass(frozen=True, slots=True, order=True)
class Slice:
    """A slice on a card.

    Attributes:
        start: the first memory slice of a MIG instance, or the number of an MPS share on its card.
        name: the name in annotations (`2g.20gb`, `4gb`).
        uuid: the UUID of the MIG device; "" before it exists.
        pod: the UID of the pod that uses the slice; "" for none, and `node_slices.UNKNOWN_POD` for an unknown pod.
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
        """The slice without its UUID and its pod, which may change while it exists."""
        return Slice(self.card, self.start, self.name)

    @property
    def instance(self) -> Instance:
        return Instance(self.start, self.name)


def place_of(index: int) -> tuple[int, int]:
    """Return the card and the start of the slice with this device index."""
    return divmod(index, PLACES)


def read_name(text: str) -> str | None:
    """Return the canonical name of a slice, or None if the text is not the name of a slice.

    The spelling in resources (`1g.10gb.me`) is accepted too.
    """
    name = canonical(text.removesuffix(".me") + "+me" if text.endswith(".me") else text)
    return name if _MIG_NAME.fullmatch(name) or _MPS_NAME.fullmatch(name) else None


def count_slices(slices: Iterable[Slice]) -> dict[int, dict[str, int]]:
    found: dict[int, dict[str, int]] = {}
    for s in sorted(slices):
        card = found.setdefault(s.card, {})
        card[s.name] = card.get(s.name, 0) + 1
    return found
