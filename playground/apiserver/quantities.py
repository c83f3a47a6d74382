"""The one form in which the API writes a quantity back: `1024Mi` → `1Gi`, `0.5` → `500m`, `6000` → `6k`."""

import re
from fractions import Fraction

from mgpu.model.quantities import QuantityError, parse_quantity

_DECIMAL = ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k"), (0, ""), (-3, "m"), (-6, "u"), (-9, "n"))
_BINARY = ((60, "Ei"), (50, "Pi"), (40, "Ti"), (30, "Gi"), (20, "Mi"), (10, "Ki"), (0, ""))
_FORM_ERROR = "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
_EXPONENT = re.compile(r"[eE][+-]?\d+$")


def canonical(value: object) -> str:
    """Raises ValueError with the API's own sentence."""
    try:
        amount = parse_quantity(value)
    except QuantityError as problem:
        raise ValueError(_FORM_ERROR) from problem
    text = str(value)
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
