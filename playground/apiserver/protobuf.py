"""Bodies in Kubernetes' protobuf envelope, for the few kinds that kubectl writes so (`kubectl create namespace`).

Field numbers as in the API's public .proto files; fields that are not named here are passed over.
"""

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from playground.apiserver.storage import Object

_MAGIC = b"k8s\x00"


class NotReadable(Exception):
    """Not in the envelope, cut off, or of a kind that is not read from protobuf."""


@dataclass(frozen=True)
class _Field:
    """`type`: text, int, bool, bytes (base64 in JSON), map, bytes map, or the table of a message."""

    name: str
    type: Any = "text"
    repeated: bool = False


_Table = dict[int, _Field]
_META: _Table = {
    1: _Field("name"), 2: _Field("generateName"), 3: _Field("namespace"), 5: _Field("uid"),
    6: _Field("resourceVersion"), 11: _Field("labels", "map"),
    12: _Field("annotations", "map"), 14: _Field("finalizers", repeated=True),
}  # fmt: skip
_METADATA = _Field("metadata", _META)
_DELETE: _Table = {
    1: _Field("gracePeriodSeconds", "int"),
    2: _Field("preconditions", {1: _Field("uid"), 2: _Field("resourceVersion")}),
    4: _Field("propagationPolicy"), 5: _Field("dryRun", repeated=True),
}  # fmt: skip
_ATTRIBUTES: _Table = {
    1: _Field("namespace"), 2: _Field("verb"), 3: _Field("group"), 4: _Field("version"), 5: _Field("resource"),
    6: _Field("subresource"), 7: _Field("name"),
}  # fmt: skip
_KINDS: dict[str, _Table] = {
    "Namespace": {1: _METADATA},
    "ServiceAccount": {1: _METADATA},
    "ConfigMap": {
        1: _METADATA, 2: _Field("data", "map"), 3: _Field("binaryData", "bytes map"), 4: _Field("immutable", "bool"),
    },
    "Secret": {1: _METADATA, 2: _Field("data", "bytes map"), 3: _Field("type"), 4: _Field("stringData", "map")},
    "PriorityClass": {
        1: _METADATA, 2: _Field("value", "int"), 3: _Field("globalDefault", "bool"), 4: _Field("description"),
        5: _Field("preemptionPolicy"),
    },
    "DeleteOptions": _DELETE,
    "Eviction": {1: _METADATA, 2: _Field("deleteOptions", _DELETE)},
    "SelfSubjectAccessReview": {1: _METADATA, 2: _Field("spec", {1: _Field("resourceAttributes", _ATTRIBUTES)})},
    "SelfSubjectReview": {1: _METADATA},
}  # fmt: skip


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(value, where it ends)."""
    value = shift = 0
    while True:
        byte = data[at]
        value, shift, at = value | (byte & 0x7F) << shift, shift + 7, at + 1
        if byte < 0x80:
            return value, at


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of each field of a message: an int, or the bytes of what is delimited by its length."""
    at = 0
    try:
        while at < len(data):
            tag, at = _varint(data, at)
            number, at = _varint(data, at)
            if tag & 7 == 2:
                yield tag >> 3, data[at : at + number]
                at += number
            elif tag & 7 == 0:
                yield tag >> 3, number
            else:
                raise NotReadable(f"wire type {tag & 7}")
    except IndexError as problem:
        raise NotReadable("cut off") from problem


def _value(kind: Any, value: Any) -> Any:
    if isinstance(kind, dict):
        return _message(kind, value)
    if kind == "int":
        return value - (1 << 64) if value >> 63 else value
    if kind == "bool":
        return bool(value)
    return value.decode() if kind == "text" else base64.b64encode(value).decode()


def _message(table: _Table, data: bytes) -> Object:
    result: Object = {}
    for number, value in _fields(data):
        field = table.get(number)
        if field is None:
            continue
        if field.type in ("map", "bytes map"):
            entry = dict(_fields(value))
            text = _value("text" if field.type == "map" else "bytes", entry.get(2, b""))
            result.setdefault(field.name, {})[entry.get(1, b"").decode()] = text
        elif field.repeated:
            result.setdefault(field.name, []).append(_value(field.type, value))
        elif value != b"" or isinstance(field.type, dict):
            # An empty text is how Go writes a text that is not there.
            result[field.name] = _value(field.type, value)
    return result


def read(body: bytes) -> Object:
    """The object of a body. Raises NotReadable."""
    if not body.startswith(_MAGIC):
        raise NotReadable("no envelope")
    envelope = dict(_fields(body[len(_MAGIC) :]))
    about = _message({1: _Field("apiVersion"), 2: _Field("kind")}, envelope.get(1, b""))
    table = _KINDS.get(about.get("kind", ""))
    if table is None:
        raise NotReadable(f"kind {about.get('kind')}")
    return about | _message(table, envelope.get(2, b""))
