"""The CEL environment of device selectors as in kube-scheduler, with the functions for quantities and versions.

`claim_selectors` imports this module when the first selector is used, because the CEL library takes about 25 MB of
memory. Source: k8s.io/dynamic-resource-allocation/cel, k8s.io/apiserver/pkg/cel/library.

A quantity or a version is a value of CEL's type `bytes` here, in a canonical form, so that two equal ones are equal for
CEL too. CEL's abstract types would be the obvious choice, but the library cannot pass them to functions in Python. With
maps, it leaks three times as much memory: it never frees the arguments and the result of such a call (337 bytes for a
comparison with a literal). No other value of a selector is of the type `bytes`, so these functions accept nothing else.

Kubernetes' functions for lists, sets, IP addresses, URLs, regular expressions (`find`) and formats are missing. An
expression with one of them does not compile.
"""

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

from cel_expr_python import cel
from cel_expr_python.ext import ext_bindings, ext_optional, ext_strings

from mgpu.model.quantities import parse_quantity

_MAX_INT = 2**63 - 1
_LONGEST_VERSION = 256
_QUANTITY = b"q"
_VERSION = b"v"

_NUMBER = r"(0|[1-9]\d*)"
_IDENTIFIER = r"(?:0|[1-9]\d*|\d*[A-Za-z-][0-9A-Za-z-]*)"
_SEMVER = re.compile(
    rf"{_NUMBER}\.{_NUMBER}\.{_NUMBER}(?:-({_IDENTIFIER}(?:\.{_IDENTIFIER})*))?(?:\+[0-9A-Za-z.-]+)?", re.ASCII
)

_Version = tuple[int, int, int, bool, tuple[tuple[int, int, str], ...]]
"""Major, minor and patch; whether it is a release; the identifiers of the pre-release. Tuples compare like versions."""


def quantity(text: str) -> bytes:
    """Return the value of a quantity for CEL."""
    return amount(parse_quantity(text))


def amount(number: Fraction | int) -> bytes:
    exact = Fraction(number)
    return _QUANTITY + f"{exact.numerator}/{exact.denominator}".encode()


@lru_cache(maxsize=1024)
def _number(value: bytes) -> Fraction:
    if value[:1] != _QUANTITY:
        raise ValueError("no such overload")
    return Fraction(value[1:].decode())


@lru_cache(maxsize=1024)
def _version_of(value: bytes) -> _Version:
    match = _SEMVER.fullmatch(value[1:].decode())
    if match is None:
        raise ValueError("no such overload")
    major, minor, patch, pre = match.groups()
    parts = tuple((0, int(p), "") if p.isdigit() else (1, 0, p) for p in (pre or "").split(".") if p)
    return int(major), int(minor), int(patch), not parts, parts


def _semver(text: str) -> bytes:
    if len(text) > _LONGEST_VERSION or not _SEMVER.fullmatch(text):
        raise ValueError("not a semantic version")
    return _VERSION + text.partition("+")[0].encode()  # Build metadata do not matter when versions are compared.


def _normalized_semver(text: str, is_normalized: bool) -> bytes:
    """Parse a version such as `v1.02`: without a prefix, minor, patch or leading zeros being required."""
    if not is_normalized:
        return _semver(text)
    parts = text[:_LONGEST_VERSION].removeprefix("v").split(".", 2)
    for i, part in enumerate(parts):
        if len(part) > 1:
            digits = part.lstrip("0")
            parts[i] = digits if digits[:1].isdigit() else f"0{digits}"
    if len(parts) < 3 and re.search(r"[+-]", parts[-1]):
        raise ValueError("a short version has no pre-release or build metadata")
    return _semver(".".join((*parts, "0", "0")[:3]))


def _compare(one: bytes, other: bytes) -> int:
    if one[:1] == _VERSION and other[:1] == _VERSION:
        left = _version_of(bytes(one))
        right = _version_of(bytes(other))
        return (left > right) - (left < right)
    difference = _number(bytes(one)) - _number(bytes(other))
    return (difference > 0) - (difference < 0)


def _is_integer(value: bytes) -> bool:
    number = _number(bytes(value))
    return number.denominator == 1 and abs(number) <= _MAX_INT


def _as_integer(value: bytes) -> int:
    if not _is_integer(value):
        raise ValueError("cannot convert value to integer")
    return int(_number(bytes(value)))


def _sign(value: bytes) -> int:
    number = _number(bytes(value))
    return (number > 0) - (number < 0)


def _part_of_version(position: int) -> Callable[[bytes], int]:
    def part(value: bytes) -> int:
        if value[:1] != _VERSION:
            raise ValueError("no such overload")
        numbers = _version_of(bytes(value))[:3]
        return numbers[position]

    return part


def _succeeds(parse: Callable[..., bytes]) -> Callable[..., bool]:
    def check(*arguments: Any) -> bool:
        try:
            parse(*arguments)
        except ValueError:  # QuantityError is one
            return False
        return True

    return check


def _function(name: str, result: Any, *overloads: tuple[Sequence[Any], Callable[..., Any]], member: bool = True) -> Any:
    rows = [
        cel.Overload(f"{name}_{i}", return_type=result, parameters=list(parameters), is_member=member, impl=run)
        for i, (parameters, run) in enumerate(overloads)
    ]
    return cel.FunctionDecl(name, rows)


def _functions() -> list[Any]:
    text = cel.Type.STRING
    number = cel.Type.INT
    flag = cel.Type.BOOL
    value = cel.Type.BYTES
    pair = [value, value]
    parse_version = ([text], _semver)
    parse_loosely = ([text, flag], _normalized_semver)
    return [
        _function("quantity", value, ([text], quantity), member=False),
        _function("isQuantity", flag, ([text], _succeeds(quantity)), member=False),
        _function("semver", value, parse_version, parse_loosely, member=False),
        _function(
            "isSemver", flag, *((kinds, _succeeds(run)) for kinds, run in (parse_version, parse_loosely)), member=False
        ),
        _function("compareTo", number, (pair, _compare)),
        _function("isGreaterThan", flag, (pair, lambda one, other: _compare(one, other) > 0)),
        _function("isLessThan", flag, (pair, lambda one, other: _compare(one, other) < 0)),
        _function(
            "add",
            value,
            (pair, lambda one, other: amount(_number(bytes(one)) + _number(bytes(other)))),
            ([value, number], lambda one, other: amount(_number(bytes(one)) + other)),
        ),
        _function(
            "sub",
            value,
            (pair, lambda one, other: amount(_number(bytes(one)) - _number(bytes(other)))),
            ([value, number], lambda one, other: amount(_number(bytes(one)) - other)),
        ),
        _function("isInteger", flag, ([value], _is_integer)),
        _function("asInteger", number, ([value], _as_integer)),
        _function("asApproximateFloat", cel.Type.DOUBLE, ([value], lambda one: float(_number(bytes(one))))),
        _function("sign", number, ([value], _sign)),
        *(
            _function(name, number, ([value], _part_of_version(i)))
            for i, name in enumerate(("major", "minor", "patch"))
        ),
    ]


def environment() -> Any:
    """Return a new environment with the variable `device`."""
    return cel.NewEnv(
        variables={"device": cel.Type.DYN},
        extensions=[ext_bindings.ExtBindings(), ext_optional.ExtOptional(), ext_strings.ExtStrings()],
        functions=_functions(),
    )


def boolean(result: Any) -> bool | None:
    """Return the result of an evaluation if it is a Boolean, or None."""
    return bool(result.value()) if result.type() == cel.Type.BOOL else None
