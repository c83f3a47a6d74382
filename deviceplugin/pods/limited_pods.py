"""The Pods of MtgpuPods, as far as whoever holds them to their limits has to know them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mgpu.dialects import mtgpu
from mgpu.model.errors import BadObject


@dataclass(frozen=True, slots=True, order=True)
class Limited:
    """The Pod of an MtgpuPod. card: its UUID. request, limit: milli of the card. memory: bytes."""

    namespace: str
    name: str
    uid: str
    card: str
    request: int
    limit: int
    memory: int


def read_limited(raw: Mapping[str, Any]) -> Limited | None:
    """None: the pod is no MtgpuPod's, or does not say which card it has and how much of it.

    It is known by its controller, or by its seal once its controller was taken off. The caller checks the seal; without
    seals only admission keeps others from writing such annotations.
    """
    meta = raw["metadata"]
    if not mtgpu.mtgpupod_of(raw):
        return None
    try:
        share = mtgpu.read_share(meta.get("annotations") or {})
    except BadObject:
        return None
    card = mtgpu.card_of(raw)
    return Limited(meta.get("namespace", "default"), meta["name"], meta["uid"], card, *share) if card else None
