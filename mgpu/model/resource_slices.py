"""Builds the ResourceSlice with which the agent publishes the cards of its node for Dynamic Resource Allocation.

Each node has one pool, which has the name of the node, and each card is a device that several claims may share. The
published capacity of a card is what pods without claims leave free of it, because kube-scheduler itself subtracts what
claims consume. It is only advice: the scheduler process decides (docs/design/dra.md, "The way of a claim").

The attributes of a device come from its card alone, so that the scheduler process can compute them for any card.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mgpu.model.cards import Card
from mgpu.model.quantities import quantity_of_bytes
from mgpu.model.resource_claims import API, CORES, DRIVER, MEMORY, MILLI_PER_PERCENT, device_name

WAKE = "mgpu.io/wake"
"""The annotation of a ResourceSlice that the scheduler process changes so that kube-scheduler retries waiting pods."""

MAX_DEVICES = 64
"""The most devices of a slice that has taints, which is also the most GPUs of a node (`device_object.MAX_GPUS`)."""

_MIN_CORES = 0  # A share may hold memory without compute, as those of gpushare do.
_CORE_STEP = 1
_MEBIBYTE = 1 << 20

Attribute = str | int | bool


@dataclass(frozen=True, slots=True)
class Taint:
    """A device taint, such as for an unhealthy card.

    Attributes:
        effect: `NoSchedule` or `NoExecute`.
    """

    key: str
    value: str = ""
    effect: str = "NoSchedule"


UNHEALTHY = Taint("mgpu.io/unhealthy")
CORDONED = Taint("mgpu.io/cordoned")
PARTITIONED = Taint("mgpu.io/partitioned")
IN_USE = Taint("mgpu.io/in-use")
NOT_IN_MIG_MODE = Taint("mgpu.io/not-in-mig-mode")


@dataclass(frozen=True, slots=True)
class PublishedCard:
    """A card with what it offers to claims.

    Attributes:
        core_free: the core that pods without claims leave free, in milli.
        memory_free: the memory that they leave free, in bytes.
    """

    card: Card
    core_free: int
    memory_free: int
    taints: tuple[Taint, ...] = ()


def slice_name(node: str) -> str:
    """Return the name of the ResourceSlice of a node."""
    return f"{node}-{DRIVER}"


def attributes(card: Card) -> dict[str, Attribute]:
    """Return the attributes of the device of a card, without the prefix of the driver.

    `totalCores` and `totalMemory` are the amounts of the whole card. CEL selectors should use them, because the
    published capacity is less while pods without claims use the card.
    """
    found: dict[str, Attribute] = {
        "uuid": card.uuid,
        "index": card.index,
        "minor": card.index if card.minor is None else card.minor,
        "totalCores": card.core // MILLI_PER_PERCENT,
        "totalMemory": card.memory,
    }
    if card.model:
        found["model"] = card.model
    if card.numa is not None:
        found["numa"] = card.numa
    return found


def make_slice(
    node: str,
    node_uid: str,
    cards: Sequence[PublishedCard],
    generation: int,
    annotations: Mapping[str, str],
    slices: int = 1,
) -> dict[str, Any]:
    """Return the ResourceSlice of a node with the cards that claims can share.

    kube-scheduler takes the first device that fits, so the cards with the least free capacity come first. That agrees
    in most cases with the card that mgpu chooses, and so keeps kube-scheduler's own sums right.

    Args:
        generation: the generation of the pool.
        annotations: the annotations of the object.
        slices: the number of slices of the pool. The others have MIG instances (`mig_resource_slices`).
    """
    ordered = sorted(cards, key=lambda one: (one.core_free, one.memory_free, one.card.index))
    pool = {"name": node, "generation": generation, "resourceSliceCount": slices}
    content = {"devices": [_device(one) for one in ordered]}
    return make_object(slice_name(node), node, node_uid, pool, content, annotations)


def make_object(
    name: str,
    node: str,
    node_uid: str,
    pool: Mapping[str, Any],
    content: Mapping[str, Any],
    annotations: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return a ResourceSlice with this pool and content, which the Node owns."""
    owner = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node_uid, "controller": True}
    return {
        "apiVersion": API,
        "kind": "ResourceSlice",
        "metadata": {"name": name, "annotations": dict(annotations or {}), "ownerReferences": [owner]},
        "spec": {"driver": DRIVER, "nodeName": node, "pool": dict(pool), **content},
    }


def _device(one: PublishedCard) -> dict[str, Any]:
    card = one.card
    total_cores = card.core // MILLI_PER_PERCENT
    device: dict[str, Any] = {
        "name": device_name(card.index),
        "allowMultipleAllocations": True,
        "attributes": {name: attribute_value(value) for name, value in attributes(card).items()},
        "capacity": {
            CORES: _capacity(one.core_free // MILLI_PER_PERCENT, total_cores, _MIN_CORES, _CORE_STEP),
            MEMORY: _capacity(one.memory_free, card.memory, _MEBIBYTE, _MEBIBYTE),
        },
    }
    if one.taints:
        device["taints"] = taint_rows(one.taints)
    return device


def taint_rows(taints: Sequence[Taint]) -> list[dict[str, str]]:
    return [
        {"key": taint.key, "effect": taint.effect, **({"value": taint.value} if taint.value else {})}
        for taint in taints
    ]


def _capacity(free: int, total: int, least: int, step: int) -> dict[str, Any]:
    """Return one capacity of a device with its request policy.

    The default is always the total, so that a request without an amount gets a whole card or nothing. The API server
    requires a range to leave room for the minimum and one step. A card with less free capacity gets no range; it may
    then have any capacity, and only requests for nothing of it can be served.
    """
    policy: dict[str, Any] = {"default": _quantity(total, step)}
    if free >= least + step:
        policy["validRange"] = {"min": _quantity(least, step), "step": _quantity(step, step)}
    else:
        free = 0
    return {"value": _quantity(free, step), "requestPolicy": policy}


def _quantity(amount: int, step: int) -> str:
    return quantity_of_bytes(amount) if step == _MEBIBYTE else str(amount)


def attribute_value(value: Attribute) -> dict[str, Attribute]:
    """Return an attribute as the API has it."""
    if isinstance(value, bool):
        return {"bool": value}
    return {"int": value} if isinstance(value, int) else {"string": value[:64]}
