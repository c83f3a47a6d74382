"""Prices of shares and values of cards, against hand-made and exhaustive results."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.engine.learning.card_tables import card_values, grains, share_prices
from tests.examples import examples

demands = st.dictionaries(st.integers(5, 100), st.floats(0.01, 1000), min_size=1, max_size=8)


def fewest_cards(demand: dict[int, int]) -> int:
    """By trying everything: each share onto each card that is open, or a new one."""
    shares = sorted((size for size, number in demand.items() for _ in range(number)), reverse=True)
    return min(
        max(cards) + 1
        for cards in product(range(len(shares)), repeat=len(shares))
        if all(sum(s for s, c in zip(shares, cards, strict=True) if c == card) <= 100 for card in cards)
    )


def test_share_prices_computed_by_hand() -> None:
    assert share_prices([50], [10]) == [0.5]  # two on a card
    assert share_prices([60], [10]) == [1.0]  # 40 are left over whatever is done
    assert share_prices([40, 60], [1, 10]) == [0.0, 1.0]  # there is room beside the large ones
    assert share_prices([40, 60], [10, 1]) == pytest.approx([0.5, 0.5])  # a large one takes the place of one small


@pytest.mark.parametrize("demand", [{50: 3, 30: 2}, {70: 2, 30: 3}, {34: 4, 60: 1}, {25: 2, 75: 2, 100: 1}])
def test_share_prices_bound_the_cards_needed(demand: dict[int, int]) -> None:
    found = share_prices(list(demand), [float(number) for number in demand.values()])
    proven = sum(a * b for a, b in zip(found, demand.values(), strict=True))
    assert proven <= fewest_cards(demand) + 1e-9
    assert proven > fewest_cards(demand) - 1


@examples(20)
@given(demands)
def test_property_card_values_are_superadditive(demand: dict[int, float]) -> None:
    values = card_values(demand).tolist()
    assert len(values) == 101
    assert values[0] == 0
    assert values[100] == pytest.approx(1)
    assert values[100] >= 1
    assert values == sorted(values)
    for a in range(101):
        for b in range(101 - a):
            assert values[a] + values[b] <= values[a + b] + 1e-9


@examples(20)
@given(demands)
def test_property_share_prices_bound_more_than_sizes(demand: dict[int, float]) -> None:
    sizes = sorted(demand)
    found = share_prices(sizes, [demand[size] for size in sizes])
    proven = sum(price * demand[size] for price, size in zip(found, sizes, strict=True))
    assert proven >= sum(size * demand[size] for size in sizes) / 100 - 1e-6


def test_card_values_without_demand_value_whole_cards_only() -> None:
    assert card_values({}).tolist() == [0.0] * 100 + [1.0]


def test_grains_fill_a_card_with_as_many_shares_as_milli() -> None:
    assert [grains(milli) for milli in (1, 10, 333, 334, 335, 470, 810, 1000)] == [1, 1, 33, 34, 34, 47, 81, 100]
    assert all(100 // grains(milli) >= 1000 // milli for milli in range(10, 1001))
