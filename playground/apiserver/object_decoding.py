"""Decodes built-in kinds in the same way as kube-apiserver, which decodes them into Go structs.

Unknown fields are dropped and reported, and values of wrong types are refused. Quantities and times are written in
their canonical form: `1024Mi` becomes `1Gi`, and `6000` becomes `6k`. The fields and types come from the models of the
Kubernetes Python client, which are generated from the OpenAPI document of Kubernetes. `objects` and `subresources` call
`decode`, and `writes` calls `check_unknown`.
"""

import re
from collections.abc import Callable
from datetime import UTC, datetime
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any

import kubernetes.client as client

from mgpu.model.quantities import QuantityError, parse_quantity
from playground.apiserver.api_errors import bad_request
from playground.apiserver.kinds import Kind
from playground.apiserver.storage import Object

_DECIMAL = ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k"), (0, ""), (-3, "m"), (-6, "u"), (-9, "n"))
_BINARY = ((60, "Ei"), (50, "Pi"), (40, "Ti"), (30, "Gi"), (20, "Mi"), (10, "Ki"), (0, ""))
_FORM_ERROR = "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
_EXPONENT = re.compile(r"[eE][+-]?\d+$")


def canonical(value: object) -> str:
    """Return the canonical form of a quantity.

    Raises ValueError with kube-apiserver's message if the quantity is malformed.
    """
    try:
        parse_quantity(value)
    except QuantityError as problem:
        raise ValueError(_FORM_ERROR) from problem
    return _canonical(str(value))


@lru_cache(maxsize=10_000)
def _canonical(text: str) -> str:
    """Return the canonical form of a valid quantity.

    The results are cached, because many objects contain the same quantities, and computing with fractions is slow.
    """
    amount = parse_quantity(text)
    if text.endswith("i") and abs(amount) >= 1024:
        whole = -(-amount // 1)
        return next(f"{whole >> shift}{unit}" for shift, unit in _BINARY if whole % (1 << shift) == 0)
    nano = -(-amount * 10**9 // 1)
    if nano == 0:
        return "0"
    for power, unit in _DECIMAL:
        scaled = Fraction(nano, 10**9) / Fraction(10) ** power
        if scaled.denominator == 1:
            suffix = (f"e{power}" if power else "") if _EXPONENT.search(text) else unit
            return f"{scaled.numerator}{suffix}"
    raise AssertionError("nano is the smallest unit")


_MICRO_FIELDS = ("acquireTime", "renewTime", "eventTime", "lastObservedTime")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")
_MICRO_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}(Z|[+-]\d\d:\d\d)")


@lru_cache(maxsize=10_000)
def read_time(text: str, field: str) -> str:
    """Return a time in UTC as Go writes it: with six decimals if the field is a MicroTime, else with whole seconds.

    Raises ValueError if the time is malformed. A MicroTime, such as `renewTime` of a Lease, must have six decimals.
    """
    micro = field in _MICRO_FIELDS
    layout = "2006-01-02T15:04:05.000000Z07:00" if micro else "2006-01-02T15:04:05Z07:00"
    wrong = ValueError(f'parsing time "{text}" as "{layout}": cannot parse "{text}" as "2006"')
    if not (_MICRO_TIME if micro else _TIME).fullmatch(text):
        raise wrong
    try:
        at = datetime.fromisoformat(text).astimezone(UTC)
    except ValueError as problem:
        raise wrong from problem
    return at.strftime("%Y-%m-%dT%H:%M:%S.%fZ" if micro else "%Y-%m-%dT%H:%M:%SZ")


# The attributes of the models that are quantities, or maps of quantities. In the models their type is only text.
_QUANTITIES = frozenset(
    (
        "requests", "limits", "capacity", "allocatable", "overhead", "pod_fixed", "hard", "used", "allocated_resources",
        "default", "default_request", "max", "min", "max_limit_request_ratio", "consumed_capacity", "divisor",
        "size_limit",
    )
)  # fmt: skip
# The same for names that are quantities only in some models. These fields may also be lists of quantities.
_MODEL_QUANTITIES = {
    "V1CapacityRequestPolicy": ("valid_values",),
    "V1CapacityRequestPolicyRange": ("step",),
    "V1Counter": ("value",),
    "V1DeviceCapacity": ("value",),
}
_NESTED = re.compile(r"(List|Dict)\[(?:str, )?(.+)\]")
_INDEX = re.compile(r"\[[^]]*\]")
_GO = {"str": "string", "int": "int", "bool": "bool", "float": "float64", "datetime": "string", "bytes": "string"}
_JSON = {str: "string", bool: "bool", int: "number", float: "number", list: "array", dict: "object"}
_TEXT = ("str", False)
_PYTHON: dict[str, tuple[type, ...]] = {
    "str": (str,), "int": (int,), "bool": (bool,), "float": (int, float), "datetime": (str,), "bytes": (str,)
}  # fmt: skip


class _WrongType(Exception):
    pass


@cache
def _fields(model: str) -> dict[str, tuple[str, bool]]:
    """Return, by the JSON name of each field of a model, the type of the field and whether it is a quantity."""
    cls = getattr(client, model)
    own = _MODEL_QUANTITIES.get(model, ())
    return {
        json: (
            cls.openapi_types[name],
            name in own or (name in _QUANTITIES and cls.openapi_types[name] in ("str", "Dict[str, str]")),
        )
        for name, json in cls.attribute_map.items()
    }


@cache
def _nested(type_name: str) -> tuple[str, str]:
    """Return the container type and the item type of a type: ("List", "str") for `List[str]`, ("", "str") for `str`."""
    found = _NESTED.fullmatch(type_name)
    return (found[1], found[2]) if found else ("", type_name)


def _go(type_name: str) -> str:
    return _GO.get(type_name) or f"v1.{type_name.removeprefix('V1')}"


def _refuse(value: object, go_type: str, field: tuple[str, str]) -> _WrongType:
    # Go names the innermost struct and the JSON path below the top object.
    model, path = field
    where = f"{model.removeprefix('V1')}.{_INDEX.sub('', path)}"
    return _WrongType(f"json: cannot unmarshal {_JSON[type(value)]} into Go struct field {where} of type {go_type}")


def _decode(
    value: Any, type_name: str, path: str, field: tuple[str, str], unknown: list[str], *, quantity: bool
) -> Any:
    """Decode the value at `path`.

    Args:
        field: The field of the innermost struct that contains the value, as the model of the struct and the path of the
            field. Errors name it.
        unknown: The list to which the paths of unknown fields are added.
    """
    if value is None or type_name == "object":
        return value
    outer, inner = _nested(type_name)
    if outer == "List":
        if not isinstance(value, list):
            raise _refuse(value, f"[]{_go(inner)}", field)
        return [_decode(v, inner, f"{path}[{i}]", field, unknown, quantity=quantity) for i, v in enumerate(value)]
    if outer == "Dict":
        if not isinstance(value, dict):
            raise _refuse(value, f"map[string]{_go(inner)}", field)
        return {k: _decode(v, inner, f"{path}[{k}]", field, unknown, quantity=quantity) for k, v in value.items()}
    if type_name in _PYTHON:
        return _scalar(value, type_name, field, quantity=quantity)
    if not isinstance(value, dict):
        raise _refuse(value, _go(type_name), field)
    return _struct(value, type_name, path, unknown)


def _scalar(value: Any, type_name: str, field: tuple[str, str], *, quantity: bool) -> Any:
    if quantity:
        return canonical(value)
    if type_name == "datetime" and isinstance(value, str):
        return read_time(value, field[1].rpartition(".")[2])
    fits = isinstance(value, _PYTHON[type_name]) and (type_name == "bool") == isinstance(value, bool)
    if not fits:
        raise _refuse(value, _GO[type_name], field)
    return value


def _struct(value: Object, model: str, path: str, unknown: list[str]) -> Object:
    fields, result = _fields(model), {}
    for name, inner in value.items():
        known = fields.get(name)
        if known == _TEXT and isinstance(inner, str):
            result[name] = inner  # Most fields are texts. The paths of the others are computed below.
            continue
        inner_path = f"{path}.{name}" if path else name
        if known is None:
            unknown.append(inner_path)
            continue
        field = model, inner_path
        result[name] = _decode(inner, known[0], inner_path, field, unknown, quantity=known[1])
    return result


def decode(obj: Object, kind: Kind, model: str = "") -> tuple[Object, list[str]]:
    """Decode a body as an object of a built-in kind, or as another model such as `V1Binding`.

    Raises a 400 if the type of a field is wrong, or if a quantity or a time is malformed.

    Returns:
        The object, and the paths of the unknown fields.
    """
    unknown: list[str] = []
    try:
        return _struct(obj, model or kind.model, "", unknown), unknown
    except (_WrongType, ValueError) as problem:
        name = obj.get("kind") or kind.kind
        version = (obj.get("apiVersion") or kind.api_version).rpartition("/")[2]
        raise bad_request(f'{name} in version "{version}" cannot be handled as a {name}: {problem}') from problem


def check_unknown(mode: str, kind: str, version: str, unknown: list[str], warn: Callable[[str], None]) -> None:
    """Apply the query parameter `fieldValidation` to the unknown fields of an object.

    "Strict" raises a 400 for unknown fields, "Warn" passes one warning for each field to `warn`, and "Ignore" does
    nothing.
    """
    named = [f'unknown field "{path}"' for path in unknown]
    if named and mode == "Strict":
        strict = f"strict decoding error: {', '.join(named)}"
        raise bad_request(f'{kind} in version "{version}" cannot be handled as a {kind}: {strict}')
    for text in named if mode == "Warn" else ():
        warn(text)
