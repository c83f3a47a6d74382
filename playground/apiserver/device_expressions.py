"""Compiles and evaluates the CEL expressions with which DeviceClasses and ResourceClaims select devices.

The API server checks the expressions when an object is written, and the scheduling loop evaluates them. The environment
is that of kube-scheduler: the variable `device`, and the functions for quantities and versions. It has these
differences:

- A quantity and a version are maps for CEL, so two of them can also be compared with `==`.
- The costs of an expression are not limited.

Source: k8s.io/dynamic-resource-allocation/cel.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from cel_expr_python import cel
from cel_expr_python.ext import ext_bindings, ext_math, ext_optional, ext_strings

from mgpu.model.quantities import QuantityError, parse_quantity

MOST_CHARACTERS = 10 * 1024
_QUANTITY = "quantity"
_VERSION = "version"
_SEMVER = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(?:-([0-9A-Za-z.-]+))?(?:\+[0-9A-Za-z.-]+)?", re.ASCII)
_LITERAL = re.compile(r"\"([^\"]+)\"|'([^']+)'")

Box = Mapping[str, Any]
"""A quantity or a version as CEL sees it: a map with one entry."""


class ExpressionError(Exception):
    """An expression does not compile, or fails for a device."""


def _quantity(text: str) -> Box:
    parse_quantity(text)
    return {_QUANTITY: text}


def _is_quantity(text: str) -> bool:
    try:
        parse_quantity(text)
    except QuantityError:
        return False
    return True


def _version(text: str) -> Box:
    if not _SEMVER.fullmatch(text):
        raise ValueError(f"Invalid semantic version {text!r}")
    return {_VERSION: text}


def _order(box: Box) -> Any:
    """Return a key by which quantities, or versions, are ordered."""
    if _QUANTITY in box:
        return parse_quantity(box[_QUANTITY])
    match = _SEMVER.fullmatch(str(box.get(_VERSION, "")))
    if match is None:
        raise ValueError("no such overload")
    parts = tuple((0, int(p), "") if p.isdigit() else (1, 0, p) for p in (match[4] or "").split(".") if p)
    return (int(match[1]), int(match[2]), int(match[3])), not parts, parts


def _compare(one: Box, other: Box) -> int:
    left = _order(one)
    right = _order(other)
    return int(left > right) - int(left < right)


def _functions() -> list[cel.FunctionDecl]:
    kinds = cel.Type

    def function(name: str, result: cel.Type, parameters: list[cel.Type], run: Any, *, member: bool = True) -> Any:
        overload = cel.Overload(name, return_type=result, parameters=parameters, is_member=member, impl=run)
        return cel.FunctionDecl(name, [overload])

    pair = [kinds.MAP, kinds.MAP]
    text = [kinds.STRING]
    return [
        function("quantity", kinds.MAP, text, _quantity, member=False),
        function("isQuantity", kinds.BOOL, text, _is_quantity, member=False),
        function("semver", kinds.MAP, text, _version, member=False),
        function("compareTo", kinds.INT, pair, _compare),
        function("isGreaterThan", kinds.BOOL, pair, lambda one, other: _compare(one, other) > 0),
        function("isLessThan", kinds.BOOL, pair, lambda one, other: _compare(one, other) < 0),
        function("isInteger", kinds.BOOL, [kinds.MAP], lambda one: parse_quantity(one[_QUANTITY]).denominator == 1),
        function("asInteger", kinds.INT, [kinds.MAP], lambda one: int(parse_quantity(one[_QUANTITY]))),
        function("asApproximateFloat", kinds.DOUBLE, [kinds.MAP], lambda one: float(parse_quantity(one[_QUANTITY]))),
        function("sign", kinds.INT, [kinds.MAP], lambda one: _compare(one, {_QUANTITY: "0"})),
    ]


_ENVIRONMENT = cel.NewEnv(
    variables={"device": cel.Type.DYN},
    extensions=[ext_bindings.ExtBindings(), ext_math.ExtMath(), ext_optional.ExtOptional(), ext_strings.ExtStrings()],
    functions=_functions(),
)


@lru_cache(maxsize=1024)
def _compiled(expression: str) -> tuple[cel.Expression | None, str]:
    """Return the compiled expression and "", or None and what is wrong."""
    try:
        found = _ENVIRONMENT.compile(expression)
    except RuntimeError as problem:
        return None, f"compilation failed: {problem}"
    if found.return_type() not in (cel.Type.BOOL, cel.Type.DYN):
        return None, f"must evaluate to bool or the unknown type, not {found.return_type().name().lower()}"
    return found, ""


def expression_problem(expression: str) -> str | None:
    """Return what is wrong with an expression, or None if it compiles and may result in a Boolean."""
    return _compiled(expression)[1] or None


def device_matches(expression: str, driver: str, device: Mapping[str, Any]) -> bool:
    """Return whether an expression is true for a device of a ResourceSlice. Raises ExpressionError if it fails."""
    compiled, problem = _compiled(expression)
    if compiled is None:
        raise ExpressionError(f"CEL compile error: {problem}")
    # A domain without attributes is an empty map. CEL maps have no default, so the domains that the expression may
    # name are added.
    domains = {one or other for one, other in _LITERAL.findall(expression)}
    attributes = _by_domain({k: _attribute(v) for k, v in (device.get("attributes") or {}).items()}, driver, domains)
    amounts = {k: {_QUANTITY: str(v["value"])} for k, v in (device.get("capacity") or {}).items()}
    variable = {
        "driver": driver,
        "allowMultipleAllocations": bool(device.get("allowMultipleAllocations")),
        "attributes": attributes,
        "capacity": _by_domain(amounts, driver, domains),
    }
    result = compiled.eval(data={"device": variable})
    if result.type() != cel.Type.BOOL:
        raise ExpressionError(f"CEL runtime error: {result}")
    return bool(result.value())


def _by_domain(values: Mapping[str, Any], driver: str, domains: set[str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {domain: {} for domain in domains}
    for name, value in values.items():
        domain, _, identifier = name.rpartition("/")
        found.setdefault(domain or driver, {})[identifier] = value
    return found


def _attribute(value: Mapping[str, Any]) -> Any:
    for kind in ("int", "bool", "string", "ints", "bools", "strings"):
        if value.get(kind) is not None:
            return value[kind]
    return {_VERSION: value.get("version") or ""}
