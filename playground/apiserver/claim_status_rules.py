"""The API server's rules for the status of a ResourceClaim.

An allocation cannot be changed, but it can be removed and written again. Whether its devices exist is not checked.
Source: pkg/apis/resource/validation and pkg/registry/resource/resourceclaim in Kubernetes.
"""

import uuid
from collections.abc import Iterable, Iterator, Mapping

from playground.apiserver.api_errors import (
    Cause,
    duplicate,
    forbidden_field,
    invalid_value,
    required,
    too_many,
    unsupported,
)
from playground.apiserver.claim_rules import MOST_CONFIGURATIONS, check_configuration, request_names, request_reference
from playground.apiserver.device_names import driver_name, pool_name, rows, toleration
from playground.apiserver.names import dns_label
from playground.apiserver.storage import Object

_MOST_CONSUMERS = 256
_MOST_RESULTS = 32
_MOST_CONDITIONS = 8
_SOURCES = ("FromClass", "FromClaim")
_Device = tuple[str, str, str, str]
"""Driver, pool, device and share of an allocation result, or of a device in the status."""


def _identity(row: Object) -> _Device:
    return row.get("driver", ""), row.get("pool", ""), row.get("device", ""), row.get("shareID") or ""


def _results(claim: Object) -> list[Object]:
    allocation = (claim.get("status") or {}).get("allocation") or {}
    return (allocation.get("devices") or {}).get("results") or []


def drop_deallocated(new: Object, old: Object) -> None:
    """Remove the devices from the new status that the old allocation has and the new one does not have."""
    gone = {_identity(row)[:3] for row in _results(old)} - {_identity(row)[:3] for row in _results(new)}
    status = new["status"]
    if status.get("devices"):
        kept = [row for row in status["devices"] if _identity(row)[:3] not in gone]
        new["status"] = {k: v for k, v in status.items() if k != "devices"} | ({"devices": kept} if kept else {})


def validate(new: Object, old: Object) -> Iterator[Cause]:
    """Yield the problems of an update of the status."""
    status = new["status"]
    was = old.get("status") or {}
    consumers = status.get("reservedFor") or []
    yield from rows(consumers, _MOST_CONSUMERS, "status.reservedFor", _check_consumer, lambda row: row.get("uid") or "")
    yield from _check_devices(status, {_identity(row) for row in _results(new)})
    if consumers and status.get("allocation") is None:
        yield forbidden_field("status.reservedFor", "may not be specified when `allocated` is not set")
    elif "deletionTimestamp" in new["metadata"] and any(c not in (was.get("reservedFor") or []) for c in consumers):
        detail = "new entries may not be added while `deallocationRequested` or `deletionTimestamp` are set"
        yield forbidden_field("status.reservedFor", detail)
    allocation = status.get("allocation")
    if allocation is None:
        return
    if was.get("allocation") is None:
        yield from _check_allocation(allocation, request_names(new["spec"]))
    elif allocation != was["allocation"]:
        yield invalid_value("status.allocation", allocation, "field is immutable")


def _check_consumer(row: Object, field: str) -> Iterator[Cause]:
    yield from (required(f"{field}.{key}") for key in ("resource", "name", "uid") if not row.get(key))


def _check_devices(status: Object, allocated: set[_Device]) -> Iterator[Cause]:
    seen = set()
    for i, row in enumerate(status.get("devices") or []):
        field = f"status.devices[{i}]"
        yield from driver_name(row.get("driver") or "", f"{field}.driver")
        yield from pool_name(row.get("pool") or "", f"{field}.pool")
        yield from dns_label(row.get("device") or "", f"{field}.device")
        device = _identity(row)
        if device not in allocated:
            shown = "/".join(filter(None, device))
            yield invalid_value(field, shown, "must be an allocated device in the claim")
        if device in seen:
            yield duplicate(field, "/".join(filter(None, device)))
        seen.add(device)
        yield from _check_conditions(row.get("conditions") or [], f"{field}.conditions")
        if row.get("data") is not None and not isinstance(row["data"], dict):
            yield invalid_value(f"{field}.data", "<value omitted>", "must be a valid JSON object")


def _check_conditions(conditions: list[Object], field: str) -> Iterator[Cause]:
    if len(conditions) > _MOST_CONDITIONS:
        yield too_many(field, len(conditions), _MOST_CONDITIONS)
    seen = set()
    for i, row in enumerate(conditions):
        for key in ("type", "status", "reason", "lastTransitionTime"):
            if not row.get(key):
                detail = "must be set" if key == "lastTransitionTime" else ""
                yield required(f"{field}[{i}].{key}", detail)
        if row.get("status") and row["status"] not in ("True", "False", "Unknown"):
            yield unsupported(f"{field}[{i}].status", row["status"], ("False", "True", "Unknown"))
        if row.get("type") in seen:
            yield duplicate(f"{field}[{i}].type", row["type"])
        seen.add(row.get("type"))


def _check_allocation(allocation: Object, names: Mapping[str, frozenset[str]]) -> Iterator[Cause]:
    def result(row: Object, field: str) -> Iterable[Cause]:
        return _check_result(row, field, names)

    def configuration(row: Object, field: str) -> Iterator[Cause]:
        source = row.get("source") or ""
        if not source:
            yield required(f"{field}.source")
        elif source not in _SOURCES:
            yield unsupported(f"{field}.source", source, _SOURCES)
        for i, name in enumerate(row.get("requests") or []):
            yield from request_reference(name, f"{field}.requests[{i}]", names)
        yield from check_configuration(row, field)

    devices = allocation["devices"]
    path = "status.allocation.devices"
    yield from rows(devices.get("results") or [], _MOST_RESULTS, f"{path}.results", result)
    yield from rows(devices.get("config") or [], 2 * MOST_CONFIGURATIONS, f"{path}.config", configuration)
    selector = allocation.get("nodeSelector")
    if selector is not None and not selector.get("nodeSelectorTerms"):
        detail = "must have at least one node selector term"
        yield required("status.allocation.nodeSelector.nodeSelectorTerms", detail)


def _check_result(row: Object, field: str, names: Mapping[str, frozenset[str]]) -> Iterator[Cause]:
    yield from request_reference(row.get("request") or "", f"{field}.request", names)
    yield from driver_name(row.get("driver") or "", f"{field}.driver")
    yield from pool_name(row.get("pool") or "", f"{field}.pool")
    yield from dns_label(row.get("device") or "", f"{field}.device")
    yield from rows(row.get("tolerations") or [], -1, f"{field}.tolerations", toleration)
    share = row.get("shareID")
    if share is not None and not _is_uid(share):
        form = "`xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx` with lowercase hexadecimal characters"
        yield invalid_value(f"{field}.shareID", share, f"uid must be in RFC 4122 normalized form, {form}")


def _is_uid(text: str) -> bool:
    try:
        return str(uuid.UUID(text)) == text
    except ValueError:
        return False
