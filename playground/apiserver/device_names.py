"""Checks the names in objects of the API group resource.k8s.io, as kube-apiserver does.

The rules for claims, their statuses and ResourceSlices use these functions.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from playground.apiserver.api_errors import Cause, duplicate, invalid_value, required, too_long, too_many, unsupported
from playground.apiserver.names import dns_label, qualified_name, subdomain
from playground.apiserver.storage import Object

_MOST_DRIVER = 63
_MOST_POOL = 253
_MOST_IDENTIFIER = 32
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_IDENTIFIER_RULE = (
    "a valid C identifier must start with alphabetic character or '_', followed by a string of alphanumeric characters "
    "or '_' (e.g. 'my_name',  or 'MY_NAME',  or 'MyName', regex used for validation is '[A-Za-z_][A-Za-z0-9_]*')"
)
_EFFECTS = ("NoExecute", "NoSchedule", "None")


def driver_name(value: str, field: str) -> Iterator[Cause]:
    """Yield the problems of the name of a driver."""
    if not value:
        yield required(field)
        return
    if len(value) > _MOST_DRIVER:
        yield too_long(field, _MOST_DRIVER)
    yield from subdomain(value.lower(), field)


def pool_name(value: str, field: str) -> Iterator[Cause]:
    """Yield the problems of the name of a pool: one DNS subdomain or several, separated by slashes."""
    if not value:
        yield required(field)
        return
    if len(value) > _MOST_POOL:
        yield too_long(field, _MOST_POOL)
    for part in value.split("/"):
        yield from subdomain(part, field)


def required_label(value: str, field: str) -> list[Cause]:
    """Return the problems of a DNS label that must be there."""
    return dns_label(value, field) if value else [required(field)]


def attribute_name(value: str, field: str) -> Iterator[Cause]:
    """Yield the problems of the name of an attribute or of a capacity: `name` or `domain/name`."""
    domain, slash, identifier = value.partition("/")
    if not slash:
        yield from _identifier(value, field)
        return
    if "/" in identifier:
        return  # kube-apiserver accepts these without a check (a TODO in validateQualifiedName).
    if domain:
        yield from driver_name(domain, field)
    else:
        yield invalid_value(field, "", "the domain must not be empty")
    if identifier:
        yield from _identifier(identifier, field)
    else:
        yield invalid_value(field, "", "the name must not be empty")


def full_attribute_name(value: str, field: str) -> Iterator[Cause]:
    """Yield the problems of the name of an attribute that must have a domain."""
    yield from attribute_name(value, field)
    if "/" not in value:
        rule = "a fully qualified name must be a domain and a name separated by a slash"
        yield invalid_value(field, value, rule)


def _identifier(value: str, field: str) -> Iterator[Cause]:
    if len(value) > _MOST_IDENTIFIER:
        yield too_long(field, _MOST_IDENTIFIER)
    if not _IDENTIFIER.fullmatch(value):
        yield invalid_value(field, value, _IDENTIFIER_RULE)


def rows(
    items: Sequence[Any],
    most: int,
    field: str,
    check: Callable[[Any, str], Iterable[Cause]],
    key: Callable[[Any], str] | None = None,
) -> Iterator[Cause]:
    """Yield the problems of a list.

    Args:
        most: The highest number of items, or -1 for any number. Too many items are not checked one by one.
        check: Returns the problems of an item, given its field path.
        key: Returns the key of an item. Two items with the same key are a problem.
    """
    if 0 <= most < len(items):
        yield too_many(field, len(items), most)
        return
    seen = set()
    for i, item in enumerate(items):
        yield from check(item, f"{field}[{i}]")
    for i, item in enumerate(items if key else ()):
        name = key(item) if key else ""
        if name in seen:
            yield duplicate(f"{field}[{i}]", name)
        seen.add(name)


def toleration(row: Object, field: str) -> Iterator[Cause]:
    """Yield the problems of a device toleration."""
    operator = row.get("operator", "Equal")
    if operator not in ("Equal", "Exists"):
        yield unsupported(f"{field}.operator", operator, ("Equal", "Exists"))
    if operator == "Exists" and row.get("value"):
        yield invalid_value(f"{field}.value", row["value"], "must be empty for operator `Exists`")
    if row.get("key"):
        yield from qualified_name(row["key"], f"{field}.key")
    if row.get("effect") and row["effect"] not in _EFFECTS:
        yield unsupported(f"{field}.effect", row["effect"], _EFFECTS)


def taint(row: Object, field: str) -> Iterator[Cause]:
    """Yield the problems of a device taint."""
    yield from qualified_name(row.get("key") or "", f"{field}.key")
    if not row.get("effect"):
        yield required(f"{field}.effect")
    elif row["effect"] not in _EFFECTS:
        yield unsupported(f"{field}.effect", row["effect"], _EFFECTS)
