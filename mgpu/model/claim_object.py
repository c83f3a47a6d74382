"""Reads ResourceClaims from decoded JSON.

A webhook is called with objects that the API server has not validated yet, so the functions expect any JSON.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from mgpu.model.errors import BadObject, Problem
from mgpu.model.pod_constraints import read_constraints
from mgpu.model.quantities import QuantityError, parse_quantity, whole_bytes
from mgpu.model.raw_objects import annotation_path, table_at
from mgpu.model.resource_claims import (
    CORES,
    DRIVER,
    MAX_RESULTS,
    MEMORY,
    MILLI_PER_PERCENT,
    PREPARED,
    REPAIR,
    AttributeConstraint,
    Claim,
    Consumer,
    DeviceRequest,
    Result,
)


def read_claim(raw: Mapping[str, Any], policies: Collection[str] = ()) -> Claim:
    """Return the claim in decoded JSON.

    The API server has validated the object, but a webhook is called with objects that are not stored yet.

    Args:
        policies: the names that the annotation `mgpu.io/card-policy` may have.

    Raises:
        BadObject: A field that mgpu reads is invalid. The problems name the fields.
    """
    meta = table_at(raw, "metadata")
    annotations = {k: v for k, v in table_at(meta, "annotations").items() if isinstance(v, str)}
    namespace = _text(meta, "namespace")
    constraints, problems = read_constraints(annotations, namespace, policies)
    status = table_at(raw, "status")
    devices = table_at(raw, "spec", "devices")
    requests: tuple[DeviceRequest, ...] = ()
    results: tuple[Result, ...] = ()
    try:
        requests = tuple(_requests(devices))
        results = tuple(_results(status))
    except BadObject as error:
        problems = (*problems, *error.problems)
    if problems:
        raise BadObject(problems)
    return Claim(
        uid=_text(meta, "uid"),
        namespace=namespace,
        name=_text(meta, "name"),
        version=_text(meta, "resourceVersion"),
        created=_text(meta, "creationTimestamp"),
        requests=requests,
        constraints=tuple(_constraints(devices)),
        card_constraints=constraints,
        allocated=bool(table_at(status, "allocation")),
        results=results,
        consumers=tuple(_consumers(status)),
        owner=_owner(meta),
        deleting=bool(meta.get("deletionTimestamp")),
        prepared=frozenset(_prepared(status)),
        repair=annotations.get(REPAIR, ""),
    )


def read_stored_claim(raw: Mapping[str, Any], policies: Collection[str] = ()) -> Claim:
    """Return the claim in an object of the API server. Annotations with invalid constraints count as absent.

    Users may write annotations at any time, and a claim that is allocated holds its cards all the same. Raises
    BadObject for other invalid fields, which the API server does not store.
    """
    meta = table_at(raw, "metadata")
    annotations = {k: v for k, v in table_at(meta, "annotations").items() if isinstance(v, str)}
    _, problems = read_constraints(annotations, _text(meta, "namespace"), policies)
    if not problems:
        return read_claim(raw, policies)
    invalid = {problem.field for problem in problems}
    valid = {key: text for key, text in annotations.items() if annotation_path(key) not in invalid}
    return read_claim({**raw, "metadata": {**meta, "annotations": valid}}, policies)


def has_results(raw: Mapping[str, Any] | None) -> bool:
    """Return whether a claim, in decoded JSON, has an allocation with results of mgpu's driver."""
    rows = _rows(table_at(raw, "status", "allocation", "devices"), "results")
    return any(row.get("driver") == DRIVER for row in rows)


def _requests(devices: Mapping[str, Any]) -> Iterator[DeviceRequest]:
    for i, row in enumerate(_rows(devices, "requests")):
        path = f"spec.devices.requests[{i}]"
        name = _text(row, "name")
        if table_at(row, "exactly"):
            yield _request(name, table_at(row, "exactly"), f"{path}.exactly")
        for j, alternative in enumerate(_rows(row, "firstAvailable")):
            yield _request(f"{name}/{_text(alternative, 'name')}", alternative, f"{path}.firstAvailable[{j}]")


def _request(name: str, row: Mapping[str, Any], path: str) -> DeviceRequest:
    amounts = table_at(row, "capacity", "requests")
    count = row.get("count", 1)
    if row.get("allocationMode") == "All":
        count = 0
    if not isinstance(count, int) or isinstance(count, bool):
        raise BadObject([Problem(f"{path}.count", "must be an integer")])
    return DeviceRequest(
        name,
        _text(row, "deviceClassName"),
        min(count, MAX_RESULTS + 1),
        _core(amounts, f"{path}.capacity.requests"),
        _memory(amounts, f"{path}.capacity.requests"),
        tuple(_text(table_at(selector, "cel"), "expression") for selector in _rows(row, "selectors")),
        row.get("adminAccess") is True,
    )


def _core(amounts: Mapping[str, Any], path: str) -> int | None:
    """Return the amount of `cores` in milli, rounded up to whole milli; None if there is none."""
    if CORES not in amounts:
        return None
    try:
        core = parse_quantity(amounts[CORES]) * MILLI_PER_PERCENT
    except QuantityError as error:
        raise BadObject([Problem(f"{path}[{CORES}]", str(error))]) from error
    return _not_negative(-(-core.numerator // core.denominator), f"{path}[{CORES}]")


def _memory(amounts: Mapping[str, Any], path: str) -> int | None:
    if MEMORY not in amounts:
        return None
    try:
        memory = whole_bytes(amounts[MEMORY])
    except QuantityError as error:
        raise BadObject([Problem(f"{path}[{MEMORY}]", str(error))]) from error
    return _not_negative(memory, f"{path}[{MEMORY}]")


def _not_negative(amount: int, path: str) -> int:
    """Return the amount. The API server does not check its sign, and a negative one would give others a full card."""
    if amount < 0:
        raise BadObject([Problem(path, "must not be negative")])
    return amount


def _constraints(devices: Mapping[str, Any]) -> Iterator[AttributeConstraint]:
    for row in _rows(devices, "constraints"):
        names = row.get("requests")
        requests = tuple(name for name in names if isinstance(name, str)) if isinstance(names, list) else ()
        for key, distinct in (("matchAttribute", False), ("distinctAttribute", True)):
            if _text(row, key):
                yield AttributeConstraint(requests, _text(row, key), distinct)


def _results(status: Mapping[str, Any]) -> Iterator[Result]:
    for i, row in enumerate(_rows(table_at(status, "allocation", "devices"), "results")):
        if row.get("driver") != DRIVER:
            continue
        path = f"status.allocation.devices.results[{i}].consumedCapacity"
        consumed = table_at(row, "consumedCapacity")
        yield Result(
            i,
            _text(row, "request"),
            _text(row, "pool"),
            _text(row, "device"),
            _text(row, "shareID"),
            _core(consumed, path),
            _memory(consumed, path),
            row.get("adminAccess") is True,
        )


def _consumers(status: Mapping[str, Any]) -> Iterator[Consumer]:
    for row in _rows(status, "reservedFor"):
        yield Consumer(_text(row, "resource"), _text(row, "name"), _text(row, "uid"))


def _owner(meta: Mapping[str, Any]) -> str:
    for row in _rows(meta, "ownerReferences"):
        if row.get("kind") == "Pod" and row.get("controller") is True:
            return _text(row, "uid")
    return ""


def _prepared(status: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for row in _rows(status, "devices"):
        conditions = _rows(row, "conditions")
        is_prepared = any(c.get("type") == PREPARED and c.get("status") == "True" for c in conditions)
        if row.get("driver") == DRIVER and is_prepared:
            yield _text(row, "pool"), _text(row, "device"), _text(row, "shareID")


def _rows(table: Mapping[str, Any], key: str) -> Sequence[Mapping[str, Any]]:
    rows = table.get(key)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _text(table: Mapping[str, Any], key: str) -> str:
    value = table.get(key)
    return value if isinstance(value, str) else ""
