"""Parses Kubernetes quantities, and formats amounts for messages.

Values and rounding must agree with `resource.Quantity` of apimachinery. The modules that read API objects convert
quantities to integers, so that the rest of the code works with integers.
"""

import math
import re
from fractions import Fraction
from functools import lru_cache

MAX_QUANTITY = 2**63 - 1
_LONGEST = 64  # characters of a quantity

_SUFFIX = {
    "": Fraction(1),
    **{s: Fraction(1, 1000**i) for i, s in enumerate(("m", "u", "n"), 1)},
    **{s: Fraction(1000**i) for i, s in enumerate(("k", "M", "G", "T", "P", "E"), 1)},
    **{s + "i": Fraction(1024**i) for i, s in enumerate(("K", "M", "G", "T", "P", "E"), 1)},
}
_FORM = re.compile(r"([+-]?)(\d+\.?\d*|\.\d+)(?:([eE][+-]?\d{1,3})|([A-Za-z]{0,2}))", re.ASCII)


class QuantityError(ValueError):
    """The value is not a quantity, or it is not allowed. Callers add the path of the field to the message."""


def parse_quantity(value: object) -> Fraction:
    """Return the exact value of a quantity in JSON or YAML: `"500m"`, `"6k"`, `"1Gi"`, `20`.

    Raises QuantityError for other values, values beyond ±(2^63 − 1), and texts of more than 64 characters.
    """
    text = str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
    number, is_in_range = _parsed(text) if isinstance(text, str) and len(text) <= _LONGEST else (None, False)
    if number is None:
        raise QuantityError(f"{_shortened(value)} is not a quantity such as 50, 6k or 1Gi")
    if not is_in_range:
        raise QuantityError(f"{value!r} is outside the range of quantities, which is ±(2^63 - 1)")
    return number


@lru_cache(maxsize=10_000)
def _parsed(text: str) -> tuple[Fraction | None, bool]:
    """Return the number, and whether it is in the range of quantities.

    The result is cached, since the pods of a cluster repeat a few texts, and operations on a Fraction take
    microseconds. Callers limit the length of the text, so the cache stays small.
    """
    match = _FORM.fullmatch(text)
    if match is None or (match[4] or "") not in _SUFFIX:
        return None, False
    sign, digits, exponent, suffix = match.groups()
    scale = Fraction(10) ** int(exponent[1:]) if exponent else _SUFFIX[suffix or ""]
    number = Fraction(digits.rstrip(".")) * scale * (-1 if sign == "-" else 1)
    return number, abs(number) <= MAX_QUANTITY


def _shortened(value: object) -> str:
    text = repr(value) if isinstance(value, str | int | float | None) else type(value).__name__
    return text if len(text) <= _LONGEST + 2 else f"{text[:_LONGEST]}…"


def same_quantity(one: str, other: str) -> bool:
    """Return whether two quantities have the same value. A text that is not a quantity equals only itself."""
    try:
        return parse_quantity(one) == parse_quantity(other)
    except QuantityError:
        return one == other


def whole_number(value: object) -> int:
    """Return the value of a quantity. Raises QuantityError, also for a fraction such as `500m`."""
    number = parse_quantity(value)
    if number.denominator != 1:
        raise QuantityError(f"{value!r} is a fraction; only whole numbers are allowed")
    return number.numerator


def whole_bytes(value: object) -> int:
    """Return a quantity of bytes, rounded up to whole bytes as in Kubernetes. Raises QuantityError."""
    if isinstance(value, str) and len(value) <= _LONGEST:
        return _whole_bytes_of(value)
    return math.ceil(parse_quantity(value))


@lru_cache(maxsize=1024)
def _whole_bytes_of(text: str) -> int:
    """Return the result of `whole_bytes` for a text. It is cached, since each card of each node has three amounts."""
    return math.ceil(parse_quantity(text))


def format_bytes(amount: int) -> str:
    """Return a text such as `4.0 GiB`, `256 MiB` or `12 B`. GiB is the largest unit."""
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if abs(amount) >= 1 << shift:
            value = amount / (1 << shift)
            return f"{value:.1f} {unit}" if shift == 30 else f"{value:.0f} {unit}"
    return f"{amount} B"


def format_core(milli: int) -> str:
    """Return compute in percent of one card: `50%`, `12.5%`."""
    return f"{milli / 10:g}%"


def quantity_of_bytes(amount: int) -> str:
    """Return the exact Kubernetes quantity in the largest possible unit of Gi, Mi, Ki and bytes: `80Gi`, `123`."""
    for shift, suffix in ((30, "Gi"), (20, "Mi"), (10, "Ki")):
        if amount and amount % (1 << shift) == 0:
            return f"{amount >> shift}{suffix}"
    return str(amount)
