"""Decoding of built-in kinds, as Go structs do it: unknown fields are found and dropped, wrong types refused,
quantities written in their one canonical form (`1024Mi` becomes `1Gi`, `6000` becomes `6k`).

The shapes come from the models of the Kubernetes Python client, which are generated from the API's own description.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import kubernetes.client as client

from playground.apiserver.errors import bad_request
from playground.apiserver.kinds import Kind
from playground.apiserver.quantities import canonical
from playground.apiserver.storage import Object
from playground.apiserver.times import read_time

_QUANTITIES = frozenset(
    (
        "requests", "limits", "capacity", "allocatable", "overhead", "pod_fixed", "hard", "used", "allocated_resources",
        "default", "default_request", "max", "min", "max_limit_request_ratio", "consumed_capacity", "divisor",
        "size_limit",
    )
)  # fmt: skip
_NESTED = re.compile(r"(List|Dict)\[(?:str, )?(.+)\]")
_INDEX = re.compile(r"\[[^]]*\]")
_GO = {"str": "string", "int": "int", "bool": "bool", "float": "float64", "datetime": "string", "bytes": "string"}
_JSON = {str: "string", bool: "bool", int: "number", float: "number", list: "array", dict: "object"}
_PYTHON: dict[str, tuple[type, ...]] = {
    "str": (str,), "int": (int,), "bool": (bool,), "float": (int, float), "datetime": (str,), "bytes": (str,)
}  # fmt: skip


@dataclass
class Decoded:
    """What a body turned out to be: `unknown` are the paths of fields that no such object has."""

    obj: Object = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)


class _WrongType(Exception):
    pass


@cache
def _fields(model: str) -> dict[str, tuple[str, bool]]:
    """JSON name → (type, is a quantity) of a model of the client."""
    cls = getattr(client, model)
    return {
        json: (cls.openapi_types[name], name in _QUANTITIES and cls.openapi_types[name] in ("str", "Dict[str, str]"))
        for name, json in cls.attribute_map.items()
    }


@cache
def _nested(type_name: str) -> tuple[str, str]:
    found = _NESTED.fullmatch(type_name)
    return (found[1], found[2]) if found else ("", type_name)


def _go(type_name: str) -> str:
    """A type of the client by its name in Go."""
    return _GO.get(type_name) or f"v1.{type_name.removeprefix('V1')}"


def _refuse(value: object, go_type: str, where: str) -> _WrongType:
    return _WrongType(f"json: cannot unmarshal {_JSON[type(value)]} into Go struct field {where} of type {go_type}")


def _decode(value: Any, type_name: str, path: str, where: str, unknown: list[str], *, quantity: bool) -> Any:
    if value is None or type_name == "object":
        return value
    outer, inner = _nested(type_name)
    if outer == "List":
        if not isinstance(value, list):
            raise _refuse(value, f"[]{_go(inner)}", where)
        return [_decode(v, inner, f"{path}[{i}]", where, unknown, quantity=False) for i, v in enumerate(value)]
    if outer == "Dict":
        if not isinstance(value, dict):
            raise _refuse(value, f"map[string]{_go(inner)}", where)
        return {k: _decode(v, inner, f"{path}[{k}]", where, unknown, quantity=quantity) for k, v in value.items()}
    if type_name in _PYTHON:
        return _scalar(value, type_name, where, quantity=quantity)
    if not isinstance(value, dict):
        raise _refuse(value, _go(type_name), where)
    return _struct(value, type_name, path, unknown)


def _scalar(value: Any, type_name: str, where: str, *, quantity: bool) -> Any:
    if quantity:
        return canonical(value)
    if type_name == "datetime" and isinstance(value, str):
        return read_time(value, where.rpartition(".")[2])
    fits = isinstance(value, _PYTHON[type_name]) and (type_name == "bool") == isinstance(value, bool)
    if not fits:
        raise _refuse(value, _GO[type_name], where)
    return value


def _struct(value: Object, model: str, path: str, unknown: list[str]) -> Object:
    fields, result = _fields(model), {}
    for name, inner in value.items():
        known = fields.get(name)
        inner_path = f"{path}.{name}" if path else name
        if known is None:
            unknown.append(inner_path)
            continue
        # Go names the innermost struct and the JSON path below the top object.
        inner_where = f"{model.removeprefix('V1')}.{_INDEX.sub('', inner_path)}"
        result[name] = _decode(inner, known[0], inner_path, inner_where, unknown, quantity=known[1])
    return result


def decode(obj: Object, kind: Kind, model: str = "") -> Decoded:
    """A body as an object of a built-in kind (or of another model, such as `V1Binding`). Raises a 400."""
    decoded = Decoded()
    try:
        decoded.obj = _struct(obj, model or kind.model, "", decoded.unknown)
    except (_WrongType, ValueError) as problem:
        version, name = obj.get("apiVersion") or kind.api_version, obj.get("kind") or kind.kind
        raise bad_request(
            f'{name} in version "{version.rpartition("/")[2]}" cannot be handled as a {name}: {problem}'
        ) from problem
    return decoded


def field_validation(mode: str, kind: str, version: str, unknown: list[str], warn: Callable[[str], None]) -> None:
    """As `fieldValidation` asks: Strict refuses unknown fields, Warn (the default) names them, Ignore is silent."""
    if not unknown or mode == "Ignore":
        return
    named = [f'unknown field "{path}"' for path in unknown]
    if mode == "Strict":
        raise bad_request(
            f'{kind} in version "{version}" cannot be handled as a {kind}: strict decoding error: {", ".join(named)}'
        )
    for text in named:
        warn(text)
