"""Reads bodies in Kubernetes' protobuf envelope, for the few kinds that kubectl sends as protobuf.

`kubectl create namespace` is an example. The field numbers come from the .proto files of Kubernetes. Fields that the
tables below do not contain are skipped. To read another kind or field, add it to the tables. `objects` calls `read`.
"""

import base64
from dataclasses import dataclass
from typing import Any

from google.protobuf import empty_pb2
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from playground.apiserver.storage import Object

_MAGIC = b"k8s\x00"


class NotReadable(Exception):
    """The body has no envelope, is malformed, or contains a kind that the tables do not contain."""


@dataclass(frozen=True)
class _Field:
    """One field of a message.

    Attributes:
        name: The name of the field in JSON.
        type: "text", "int", "bool", "bytes" (base64 in JSON), "map" (of text), "bytes map", or the table of a message.
        repeated: Whether the field is a list.
    """

    name: str
    type: Any = "text"
    repeated: bool = False


# The fields of a message by their numbers.
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


def _fields(data: bytes) -> list[tuple[int, Any]]:
    """Return the number and the value of each field of a message. Raises NotReadable for a malformed message.

    The value is an int, or the bytes of a length-delimited field. The message is parsed as the message type Empty: all
    its fields are then unknown fields, which protobuf reads without a schema.
    """
    message = empty_pb2.Empty()
    try:
        message.ParseFromString(data)
    except DecodeError as problem:
        raise NotReadable(str(problem)) from problem
    fields = UnknownFieldSet(message)
    return [(fields[i].field_number, fields[i].data) for i in range(len(fields))]


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
            # Go writes an empty text for a field that is not set, so empty texts are left out.
            result[field.name] = _value(field.type, value)
    return result


def read(body: bytes) -> Object:
    """Return the object in a body. Raises NotReadable if the body is malformed or its kind is not in the tables."""
    if not body.startswith(_MAGIC):
        raise NotReadable("no envelope")
    envelope = dict(_fields(body[len(_MAGIC) :]))
    about = _message({1: _Field("apiVersion"), 2: _Field("kind")}, envelope.get(1, b""))
    table = _KINDS.get(about.get("kind", ""))
    if table is None:
        raise NotReadable(f"kind {about.get('kind')}")
    return about | _message(table, envelope.get(2, b""))
