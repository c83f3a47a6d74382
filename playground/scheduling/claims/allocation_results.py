"""Builds the allocation that the scheduling loop writes to the status of a ResourceClaim."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from playground.scheduling.claims.device_requests import Alternative
from playground.scheduling.claims.pools import Device

Raw = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Chosen:
    """A device that is chosen for a request.

    Attributes:
        share: The identifier of the share of a shared device, or "".
        consumed: The consumed capacity of a shared device.
    """

    wanted: Alternative
    device: Device
    share: str
    consumed: Mapping[str, str]


def allocation_of(claim: Raw, chosen: Sequence[Chosen], classes: Mapping[str, Raw], node: str) -> dict[str, Any]:
    """Return the allocation of a claim on a node."""
    devices: dict[str, Any] = {"results": [_result(one) for one in chosen]}
    if config := _configuration(claim, chosen, classes):
        devices["config"] = config
    selector = _node_selector(chosen, node)
    return {"devices": devices} | ({"nodeSelector": selector} if selector else {})


def _result(chosen: Chosen) -> dict[str, Any]:
    wanted = chosen.wanted
    identity = chosen.device.id
    result: dict[str, Any] = {
        "request": wanted.name,
        "driver": identity.driver,
        "pool": identity.pool,
        "device": identity.device,
    }
    if wanted.admin:
        result["adminAccess"] = True
    if wanted.tolerations:
        result["tolerations"] = [dict(row) for row in wanted.tolerations]
    if chosen.share:
        result["shareID"] = chosen.share
    if chosen.consumed:
        result["consumedCapacity"] = dict(chosen.consumed)
    return result


def _configuration(claim: Raw, chosen: Sequence[Chosen], classes: Mapping[str, Raw]) -> list[dict[str, Any]]:
    """Return the configurations of the classes and then those of the claim that concern the chosen requests.

    A configuration for all requests of the claim names none.
    """
    wanted = list({one.wanted.request: one.wanted for one in chosen}.values())
    found: list[dict[str, Any]] = []
    for name in dict.fromkeys(one.device_class for one in wanted):
        names = [one.name for one in wanted if one.device_class == name]
        rows = (classes[name].get("spec") or {}).get("config") or ()
        found += [{"source": "FromClass", "requests": names, **row} for row in rows]
    for row in claim["spec"]["devices"].get("config") or ():
        named = row.get("requests") or ()
        if not named or any({one.name, one.request} & {*named} for one in wanted):
            found.append({"source": "FromClaim", **row})
    for row in found:
        if all({one.name, one.request} & {*(row.get("requests") or ())} for one in wanted):
            row.pop("requests", None)
    return found


def _node_selector(chosen: Sequence[Chosen], node: str) -> dict[str, Any] | None:
    """Return the selector of the nodes on which the devices are available, or None if they are so on every node."""
    places = [one.device.place for one in chosen]
    if any(place.get("nodeName") for place in places) or any(one.device.raw.get("bindsToNode") for one in chosen):
        fields = [{"key": "metadata.name", "operator": "In", "values": [node]}]
        return {"nodeSelectorTerms": [{"matchFields": fields}]}
    term: dict[str, list[Any]] = {}
    for place in places:
        for row in (place.get("nodeSelector") or {}).get("nodeSelectorTerms") or ():
            for key in ("matchExpressions", "matchFields"):
                added = [one for one in row.get(key) or () if one not in term.get(key, ())]
                if added:
                    term[key] = [*term.get(key, ()), *added]
    return {"nodeSelectorTerms": [term]} if term else None
