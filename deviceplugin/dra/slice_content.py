"""Computes the content of ResourceSlices, and compares it with what the API server has. The functions are pure.

The API server writes quantities in another form, and adds fields such as the time of a taint. Such differences do not
count. If it does not know a field, because a feature gate is disabled, it drops the field.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mgpu.model.cards import Card, CardState
from mgpu.model.ledger import Holding, Ledger
from mgpu.model.quantities import QuantityError, parse_quantity
from mgpu.model.raw_objects import table_at
from mgpu.model.resource_claims import DRIVER
from mgpu.model.resource_slices import PARTITIONED, UNHEALTHY, PublishedCard, make_slice

Raw = dict[str, Any]


def published_cards(
    gpus: Sequence[Card], whole: Sequence[Card], devices: Sequence[Card], held: Sequence[Holding]
) -> tuple[PublishedCard, ...]:
    """Return what each GPU of the node offers to claims.

    Args:
        whole: The GPUs that are not reserved for slices.
        devices: The GPUs that are not partitioned, and the slices.
        held: What pods without claims hold, and remnants.
    """
    ledger = Ledger()
    ledger.set_cards("", tuple(devices))
    for holding in held:
        ledger.hold(replace(holding, node=""))
    states = {state.card.uuid: state for state in ledger.cards("")}
    offered = {card.uuid for card in whole} & states.keys()
    return tuple(_published(card, states.get(card.uuid) if card.uuid in offered else None) for card in gpus)


def _published(card: Card, state: CardState | None) -> PublishedCard:
    taints = () if card.healthy else (UNHEALTHY,)
    if state is None:
        return PublishedCard(card, 0, 0, (*taints, PARTITIONED))
    return PublishedCard(card, state.core_free, state.memory_free, taints)


def desired_slice(node: str, node_uid: str, cards: Sequence[PublishedCard], present: Raw | None) -> Raw:
    """Return the slice that a node without MIG instances for claims should have.

    A pool of one slice needs no new generation when the content changes.
    """
    return with_metadata_of(present, make_slice(node, node_uid, cards, generation_of(present) or 1, {}))


def generation_of(present: Mapping[str, Any] | None) -> int:
    """Return the generation of the pool in a slice; 0 if there is none."""
    generation = table_at(present or {}, "spec", "pool").get("generation")
    return generation if isinstance(generation, int) and generation > 0 else 0


def with_metadata_of(present: Raw | None, made: Raw) -> Raw:
    """Return a new version of a slice. Annotations and labels of the present one stay."""
    if present is None:
        return made
    meta = table_at(present, "metadata")
    own = {key: made["metadata"][key] for key in ("name", "ownerReferences")}
    _keep_times(made["spec"].get("devices", ()), _devices(present))
    return {**made, "metadata": {**meta, "annotations": dict(table_at(meta, "annotations")), **own}}


def _keep_times(devices: Sequence[Raw], before: Mapping[str, Raw]) -> None:
    """Give taints that stay the time at which they were added."""
    for device in devices:
        times = {_taint(row): row.get("timeAdded") for row in before.get(device["name"], {}).get("taints") or ()}
        for row in device.get("taints", ()):
            if time := times.get(_taint(row)):
                row["timeAdded"] = time


def is_ours(raw: Mapping[str, Any], node: str) -> bool:
    """Return whether a ResourceSlice is one of the driver's on this node."""
    spec = table_at(raw, "spec")
    return spec.get("driver") == DRIVER and spec.get("nodeName") == node


def difference(stored: Raw, desired: Raw) -> str | None:
    """Return the first difference that counts, as a phrase for the log; None if there is none."""
    owners = table_at(stored, "metadata").get("ownerReferences") or []
    uids = {row.get("uid") for row in owners if isinstance(row, dict)}
    if not uids >= {row["uid"] for row in desired["metadata"]["ownerReferences"]}:
        return "its owner"
    now, wanted = table_at(stored, "spec"), desired["spec"]
    for key in ("driver", "nodeName", "pool"):
        if now.get(key) != wanted[key]:
            return f"spec.{key}"
    if _counter_sets(now) != _counter_sets(wanted):
        return "the counters"
    before = _devices(stored)
    devices = wanted.get("devices", ())
    if [*before] != [device["name"] for device in devices]:
        return "the devices or their order"
    for device in devices:
        if _canonical(before[device["name"]]) != _canonical(device):
            return f"device {device['name']}"
    return None


def lost_fields(stored: Raw, desired: Raw) -> tuple[str, ...]:
    """Return the fields of devices that the API server has dropped, each once."""
    before = _devices(stored)
    devices = desired["spec"].get("devices", ())
    found = dict.fromkeys(name for device in devices for name in _lost(before.get(device["name"], {}), device))
    if desired["spec"].get("sharedCounters") and not table_at(stored, "spec").get("sharedCounters"):
        found["sharedCounters"] = None
    return tuple(found)


def _lost(stored: Raw, device: Raw) -> Iterator[str]:
    if device.get("allowMultipleAllocations") and not stored.get("allowMultipleAllocations"):
        yield "allowMultipleAllocations"
    for name, wanted in device["capacity"].items():
        if "requestPolicy" in wanted and "requestPolicy" not in table_at(stored, "capacity", name):
            yield "requestPolicy"
    for name in ("taints", "consumesCounters"):
        if device.get(name) and not stored.get(name):
            yield name


def _devices(raw: Mapping[str, Any]) -> dict[str, Raw]:
    rows = table_at(raw, "spec").get("devices") or []
    return {str(row.get("name")): row for row in rows if isinstance(row, dict)}


def _canonical(device: Raw) -> tuple[Any, ...]:
    capacity = device.get("capacity") or {}
    return (
        bool(device.get("allowMultipleAllocations")),
        device.get("attributes") or {},
        {name: _canonical_capacity(amount) for name, amount in capacity.items()},
        sorted(_taint(row) for row in device.get("taints") or ()),
        {row["counterSet"]: _counters(row) for row in device.get("consumesCounters") or ()},
    )


def _counter_sets(spec: Mapping[str, Any]) -> dict[str, dict[str, object]]:
    return {row["name"]: _counters(row) for row in spec.get("sharedCounters") or ()}


def _counters(row: Mapping[str, Any]) -> dict[str, object]:
    return {name: _parsed(counter.get("value")) for name, counter in table_at(row, "counters").items()}


def _canonical_capacity(amount: Mapping[str, Any]) -> tuple[Any, ...]:
    policy = table_at(amount, "requestPolicy")
    limits = table_at(policy, "validRange")
    quantities = (amount.get("value"), policy.get("default"), *(limits.get(key) for key in ("min", "max", "step")))
    return tuple(None if quantity is None else _parsed(quantity) for quantity in quantities)


def _parsed(quantity: object) -> object:
    try:
        return parse_quantity(quantity)
    except QuantityError:
        return quantity


def _taint(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return str(row.get("key")), str(row.get("value") or ""), str(row.get("effect"))
