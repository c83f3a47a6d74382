"""The card map shows what is used within what is held, and never shows an unknown use as 0."""

from collections.abc import Mapping

import pytest
from rich.console import Console

from mgpu.model.cards import Card, CardState
from mgpu.model.slice_names import Slice
from mgpu.presentation.card_map import card_map
from mgpu.presentation.card_views import CardUse, CardView, NodeView, SliceView
from mgpu.presentation.measured_use import (
    CardInUse,
    ContainerUse,
    MeasuredUse,
    NodeUse,
    UnknownUse,
    Used,
    core_text,
    memory_text,
)
from tests.builders import GIB, card


def used(pod: str, core: int | None, gib: int | None, index: int = 0) -> ContainerUse:
    return ContainerUse(pod, "c", index, f"GPU-n1-{index}", Used(core, None if gib is None else gib * GIB))


def lines(view: CardView, use: MeasuredUse, *, width: int = 80) -> Mapping[str, str]:
    """Return the lines of a node with one card by their first word, without the frame."""
    console = Console(width=width, no_color=True, force_terminal=False)
    with console.capture() as captured:
        console.print(card_map([NodeView("n1", (view,))], {"n1": use}))
    rows = [line.strip("│ ") for line in captured.get().splitlines()]
    return {row.partition(" ")[0]: row.partition(" ")[2].strip() for row in rows}


def held(*uses: CardUse) -> CardView:
    state = CardState(card(0), sum(use.core for use in uses), sum(use.memory for use in uses), len(uses))
    return CardView(state, uses)


def test_the_used_part_of_a_share_is_drawn_within_it() -> None:
    view = held(CardUse("a", ("c",), 500, 40 * GIB), CardUse("b", ("c",), 250, 20 * GIB))
    found = lines(view, NodeUse((CardInUse(0, "", Used(300, 31 * GIB)),), (used("a", 250, 10), used("b", 250, 20))))
    assert found["core"].split("·")[0] == "AAAAAAAA░░░░░░░░░BBBBBBBBB"
    assert found["mem"].split("·")[0] == "AAAA░░░░░░░░░░░░░BBBBBBBBB"
    assert found["used"] == "30% 31 GiB"
    assert found["A"].startswith("a · 25/50% 10/40 GiB on 0")
    assert "b · 25/25% 20/20 GiB on 0" in found["A"]


@pytest.mark.parametrize(
    ("core", "bar"),
    [
        (0, "A░░░░░░░"),
        (1, "A░░░░░░░"),
        (249, "AAAAAAA░"),
        (250, "AAAAAAAA"),
        (900, "AAAAAAAA"),
        (None, "A???????"),
    ],
)
def test_a_little_use_and_a_little_rest_are_visible(core: int | None, bar: str) -> None:
    found = lines(held(CardUse("a", ("c",), 250, 40 * GIB)), NodeUse((), (used("a", core, 1),)))
    assert found["core"].split("·")[0] == bar


def test_what_is_not_measured_has_a_question_mark() -> None:
    view = held(CardUse("a", ("c",), 500, 40 * GIB), CardUse("b", ("c",), 0, 20 * GIB))
    found = lines(view, NodeUse((CardInUse(0, "", Used(None, GIB)),), (used("b", 120, None),)))
    assert found["used"] == "? 1 GiB"
    assert found["A"].startswith("a · ?/50% ?/40 GiB on 0")
    assert "b · 12% of the SMs ?/20 GiB on 0" in found["A"]
    assert lines(view, NodeUse((), (used("b", 120, None),)))["used"] == "unknown"


def test_an_unknown_use_is_said_and_the_bars_are_those_of_what_is_held() -> None:
    view = held(CardUse("a", ("c",), 500, 40 * GIB))
    found = lines(view, UnknownUse("the agent is\x1b[2J late"))
    assert set(found["core"].split("·")[0]) == {"A"}
    assert found["use"] == "unknown: the agent is\N{REPLACEMENT CHARACTER}[2J late"
    assert "used" not in found


def test_use_is_drawn_within_the_slices_of_a_card() -> None:
    part = CardUse("a", ("c",), 250, 20 * GIB)
    slices = [SliceView(Slice(0, i, "20gb"), CardState(Card(i, "", "", 20 * GIB)), (part,)) for i in range(2)]
    both = CardUse("a", ("c",), 500, 40 * GIB)
    view = CardView(CardState(card(0), 500, 40 * GIB, 2), (both,), "mps", tuple(slices))
    assert lines(view, NodeUse((), (used("a", 100, 20),)))["mem"].split("·")[0] == "AAAA░░░░AAAA░░░░░"


@pytest.mark.parametrize("width", [60, 80, 200])
def test_eight_cards_with_twenty_pods_each_fit_the_terminal(width: int) -> None:
    pods = [f"team/service-with-a-long-name-{i}" for i in range(20)]
    uses = tuple(CardUse(pod, ("c",), 50, 4 * GIB) for pod in pods)
    views = tuple(CardView(CardState(card(i), 1000, 80 * GIB, 20), uses) for i in range(8))
    rows = tuple(used(pod, 13, 1, i) for i in range(8) for pod in pods)
    console = Console(width=width, no_color=True, force_terminal=False)
    with console.capture() as captured:
        use = NodeUse(tuple(CardInUse(i, f"GPU-n1-{i}", Used(260, 21 * GIB)) for i in range(8)), rows)
        console.print(card_map([NodeView("n1", views)], {"n1": use}))
    text = captured.get()
    assert max(map(len, text.splitlines())) <= width
    assert text.count("26% 21 GiB") == 8
    assert "10/40% 8/32 GiB" in text


@pytest.mark.parametrize(
    ("amounts", "text"),
    [
        ((None, 8 * GIB), "?/8 GiB"),
        ((0, 8 * GIB), "0/8 GiB"),
        ((1 << 20, 8 * GIB), "<0.1/8 GiB"),
        ((300 << 20, 2400 << 20), "0.3/2.3 GiB"),
        ((1, 200 << 20, 700 << 20), "<0.1/200/700 MiB"),
        ((230 * GIB, 1234 * GIB, 9000 * GIB), "230/1,234/9,000 GiB"),
        ((2 << 40, 20 << 40), "2/20 TiB"),
        ((5, 0), "5/0 B"),
    ],
)
def test_memory_is_written_in_the_unit_of_the_last_amount(amounts: tuple[int | None, int], text: str) -> None:
    assert memory_text(*amounts) == text


def test_core_is_written_in_percent() -> None:
    assert core_text(None, 500) == "?/50%"
    assert core_text(34, 125, 8000) == "3.4/12.5/800%"
    assert core_text(126, 500) == "13/50%"
