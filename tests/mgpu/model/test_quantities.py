"""Quantities are read exactly, as apimachinery reads them, and amounts are written so that they read back the same."""

from contextlib import suppress
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu.model.quantities import (
    MAX_QUANTITY,
    QuantityError,
    format_bytes,
    format_core,
    parse_quantity,
    quantity_of_bytes,
    whole_bytes,
    whole_number,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("50", 50),
        ("6k", 6000),
        ("1Ki", 1024),
        ("1E", 10**18),
        ("1Ei", 1 << 60),
        ("1e3", 1000),
        ("1E3", 1000),
        ("2e-3", Fraction(2, 1000)),
        ("500m", Fraction(1, 2)),
        ("100n", Fraction(1, 10**7)),
        (".5", Fraction(1, 2)),
        ("5.", 5),
        ("+5", 5),
        ("-20", -20),
        ("0.1", Fraction(1, 10)),
        (20, 20),
        (0.5, Fraction(1, 2)),
        (1e-07, Fraction(1, 10**7)),
    ],
)
def test_reads_what_kubernetes_reads(text: object, value: Fraction) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize(
    "text",
    ["", " ", "1 ", "x", "1K", "1kk", "1e", "--1", "1,5", "0x10", "٣", "1_000", "nan", "inf", ".", "-", "9" * 5000,
     float("nan"), float("inf"), True, None, [], {}, "8E1000", str(MAX_QUANTITY + 1), "-9223372036854775808", "16Ei"],
)  # fmt: skip
def test_refuses_everything_else(text: object) -> None:
    with pytest.raises(QuantityError):
        parse_quantity(text)


def test_a_long_text_is_cut_in_the_message() -> None:
    with pytest.raises(QuantityError) as error:
        parse_quantity("9" * 5000)
    assert len(str(error.value)) < 150


@pytest.mark.parametrize("text", ["500m", "0.1", "1.5", "1e-1"])
def test_a_fraction_is_no_whole_number(text: str) -> None:
    with pytest.raises(QuantityError, match="fraction"):
        whole_number(text)


def test_whole_numbers_may_be_spelled_as_fractions_of_units() -> None:
    assert whole_number("1.5k") == whole_number("1500000m") == 1500


def test_bytes_are_rounded_up() -> None:
    assert [whole_bytes(text) for text in ("1n", "1.5", "1Gi", "0")] == [1, 2, 1 << 30, 0]


@given(st.integers(0, MAX_QUANTITY))
def test_property_bytes_round_trip(amount: int) -> None:
    assert whole_bytes(quantity_of_bytes(amount)) == amount


@given(st.integers(-(10**9), 10**9), st.sampled_from(["", "m", "u", "n", "k", "Ki", "M", "Mi", "G", "Gi"]))
def test_property_a_suffix_scales_exactly(number: int, suffix: str) -> None:
    assert parse_quantity(f"{number}{suffix}") == number * parse_quantity(f"1{suffix}")


@given(st.text(max_size=8))
def test_property_any_text_is_a_quantity_or_refused_as_one(text: str) -> None:
    with suppress(QuantityError):
        assert abs(parse_quantity(text)) <= MAX_QUANTITY


@pytest.mark.parametrize(
    ("amount", "text"),
    [(0, "0"), (123, "123"), (80 << 30, "80Gi"), (4069 << 20, "4069Mi"), (15472384 << 10, "15472384Ki")],
)
def test_writes_the_shortest_exact_quantity(amount: int, text: str) -> None:
    assert quantity_of_bytes(amount) == text


@pytest.mark.parametrize(
    ("amount", "text"),
    [(0, "0 B"), (12, "12 B"), (256 << 20, "256 MiB"), (4 << 30, "4.0 GiB"), (-(1 << 30), "-1.0 GiB")],
)
def test_bytes_for_people(amount: int, text: str) -> None:
    assert format_bytes(amount) == text


def test_core_for_people() -> None:
    assert [format_core(milli) for milli in (0, 500, 125, 1000)] == ["0%", "50%", "12.5%", "100%"]
