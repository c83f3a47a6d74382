"""Draws one card of the card map (`mgpu.presentation.card_map`): its head, and the bars for core, memory and slices.

Each of these parts is as wide as its column. The cards of a large cluster are much alike, so the parts are remembered.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from mgpu.model.quantities import format_bytes, format_core
from mgpu.presentation.card_views import CardView
from mgpu.presentation.measured_use import NOT_MEASURED, Used, UseOfCards
from mgpu.presentation.slice_bars import divide_bar, label_section
from mgpu.presentation.styled_lines import Line, Pen

_SHORTEST_GPUID = 5  # characters
_REMEMBERED = 16_384
"""The most parts of one kind that are remembered. Users choose the amounts, so their number has no limit."""
IDLE, WARNING = "grey50", "bold red"
_NAME, _BROKEN = "italic", "red"


class Label(NamedTuple):
    """The sign of a pod on its node.

    Attributes:
        rest: the style of the part of its share that the pod does not use.
    """

    letter: str
    style: str
    rest: str


class Held(NamedTuple):
    """What a pod holds of a card, and what it uses of that.

    Attributes:
        used: None if the node was not asked what its pods use.
    """

    label: Label
    core: int
    memory: int
    used: Used | None = None


_HeadKey = tuple[int, str, str, bool, bool, int, int]
"""What the line above the bars shows: the parameters of `CardBars._draw_head` up to `memory_used`."""


class Column(NamedTuple):
    """What the card map shows of a card, except for the names of its slices."""

    head: str
    core: str
    memory: str


class _Part(NamedTuple):
    """The part of a bar that a pod holds. `used` is None if it is not measured, and `measured` says if it could be."""

    label: Label
    held: int
    used: int | None = None
    measured: bool = False


class CardBars:
    """Draws the parts of cards with a pen. Each is a painted text of `width` cells."""

    def __init__(self, pen: Pen) -> None:
        self._pen = pen
        self._column = lru_cache(_REMEMBERED)(self._draw_column)
        self._bar = lru_cache(_REMEMBERED)(self._draw_bar)

    def column(self, card: CardView, labels: Mapping[str, Label], width: int, used: UseOfCards | None = None) -> Column:
        """Draw a card. With `used`, the part of each share that is used is drawn within it."""
        state = card.state
        gpu = state.card
        index = gpu.index
        pods = [use.pod for use in card.uses]
        held = [Held(labels[use.pod], use.core, use.memory) for use in card.uses]
        if used is not None:
            held = [row._replace(used=used.of_pod(index, pod)) for row, pod in zip(held, pods, strict=True)]
        column = self._column(
            (index, card.mode, state.gpuid, gpu.healthy, state.shares == 0, state.core_used, state.memory_used),
            gpu.core,
            gpu.memory,
            tuple(held),
            width,
        )
        if not card.slices:
            return column
        return column._replace(memory=self._sliced_memory(card, labels, dict(zip(pods, held, strict=True)), width))

    def used(self, card: CardView, used: UseOfCards, width: int) -> str:
        """Return the line that says what all processes use of the card."""
        state = card.state
        found = used.of_card(state.card.index)
        if found == NOT_MEASURED:
            return self._finished(Line(("unknown", IDLE)), width)
        core = "?" if found.core is None else format_core(found.core)
        memory = "?" if found.memory is None else short_bytes(found.memory)
        over = found.memory is not None and found.memory > state.memory_used
        return self._finished(Line((f"{core} {memory}", WARNING if over and not state.idle else "")), width)

    def slices(self, card: CardView, width: int) -> str:
        """Return the names of the slices, each below its section of the bar for memory."""
        names = "".join(label_section(section, self._pen.signs.edge) for section in divide_bar(card, width))
        return self._finished(Line((names, IDLE)), width)

    def _finished(self, line: Line, width: int) -> str:
        return self._pen.paint_line(line.cut(width)).padded(width)

    def _draw_column(self, head: _HeadKey, core: int, memory: int, held: Sequence[Held], width: int) -> Column:
        """Draw a card with this core and memory."""
        healthy = head[3]
        return Column(
            self._draw_head(*head, core, memory, width),
            self._bar(tuple([_core_part(row) for row in held]), core, healthy, width),
            self._bar(tuple([_memory_part(row) for row in held]), memory, healthy, width),
        )

    def _draw_head(
        self,
        index: int,
        mode: str,
        gpuid: str,
        healthy: bool,
        idle: bool,
        core_used: int,
        memory_used: int,
        core: int,
        memory: int,
        width: int,
    ) -> str:
        """Draw the line above the bars of a card with this core and memory."""
        used = _used(core_used, memory_used)
        line = Line((str(index), "bold"), (f" {mode.upper()}" if mode else "", ""))
        if gpuid:
            left = width - line.width - len(used) - 2
            line.add(" ").extend(Line((gpuid, _NAME)).cut(max(_SHORTEST_GPUID, left)))
        if not healthy:
            line.add(f" {self._pen.signs.cross} unhealthy", WARNING)
        elif idle:
            line.add(" idle", IDLE)
        # The note "unhealthy" is more important than the amounts, which the bars show too.
        if not idle and (healthy or line.width + len(used) < width):
            line.add(f" {used}", WARNING if core_used > core or memory_used > memory else "")
        return self._finished(line, width)

    def _draw_bar(self, parts: Sequence[_Part], total: int, healthy: bool, width: int) -> str:
        """Draw a bar of `total`.

        Args:
            healthy: whether pods can get what is free.
        """
        line = Line()
        for part, cells in zip(parts, divide_cells([part.held for part in parts], total, width), strict=True):
            self._add_part(line, part, cells)
        return self._finished(line.add(*self._free(width - line.width, healthy=healthy)), width)

    def _add_part(self, line: Line, part: _Part, cells: int) -> None:
        """Add the part of a bar that a pod holds, with what it uses of it, if that was asked, in full colour."""
        if not part.measured:
            line.add(*block(part.label, cells, self._pen))
            return
        full = _used_cells(part, cells)
        rest = self._pen.signs.unknown if part.used is None else self._pen.signs.unused
        # The letter must be visible even if the pod uses nothing.
        if full or not cells:
            line.add(*block(part.label, full, self._pen))
        else:
            line.add(part.label.letter, part.label.rest)
        line.add(rest * (cells - max(full, min(cells, 1))), part.label.rest)

    def _sliced_memory(self, card: CardView, labels: Mapping[str, Label], held: Mapping[str, Held], width: int) -> str:
        """Draw the bar for memory.

        Args:
            held: what each pod holds of all its slices of the card.
        """
        line = Line()
        for section in divide_bar(card, width):
            use = next((u for u in section.slice.uses if u.pod in labels), None) if section.slice else None
            if use and use.pod in held:
                self._add_part(line, _memory_part(held[use.pod]), section.cells)
            elif use:
                line.add(*block(labels[use.pod], section.cells, self._pen))
            else:
                line.add(*self._free(section.cells, healthy=card.state.card.healthy))
        return self._finished(line, width)

    def _free(self, cells: int, *, healthy: bool) -> tuple[str, str]:
        return (self._pen.signs.free * cells, IDLE) if healthy else (self._pen.signs.broken * cells, _BROKEN)


def least_head_width(card: CardView) -> int:
    """Return the width that the head of a card with a GPUID needs at least; 0 for other cards."""
    state = card.state
    if not state.gpuid:
        return 0
    used = _used(state.core_used, state.memory_used)
    return len(f"{state.card.index} {state.gpuid[:_SHORTEST_GPUID]} {used}")


def block(label: Label, cells: int, pen: Pen) -> tuple[str, str]:
    """Return the text and the style of a pod's part of a bar. Without color the letter fills it."""
    return (label.letter.center(cells)[:cells] if pen.coloured else label.letter * cells), label.style


@lru_cache(_REMEMBERED)
def short_bytes(amount: int) -> str:
    """Return `80 GiB` instead of `80.0 GiB`, because the width is limited."""
    return format_bytes(amount).replace(".0 ", " ")


def _core_part(row: Held) -> _Part:
    return _Part(row.label, row.core, row.used.core, measured=True) if row.used else _Part(row.label, row.core)


def _memory_part(row: Held) -> _Part:
    return _Part(row.label, row.memory, row.used.memory, measured=True) if row.used else _Part(row.label, row.memory)


def _used_cells(part: _Part, cells: int) -> int:
    """Return how many of a pod's cells show what it uses.

    What is used gets at least one cell, and what is not used gets at least one if there are two cells.
    """
    if not part.used:
        return 0
    if part.used >= part.held:
        return cells
    return min(max(_rounded(part.used * cells, part.held), 1), max(cells - 1, 1))


def _used(core: int, memory: int) -> str:
    return f"{format_core(core)} {short_bytes(memory)}"


def divide_cells(amounts: Sequence[int], total: int, width: int) -> list[int]:
    """Divide `width` cells among the amounts, by the largest remainder method.

    An amount above 0 gets at least one cell, so that every pod is visible. If no cell is left for it, the widest amount
    gives one up, unless it has only one cell itself. If less than `total` is held and `width` is at least 2, at least
    one cell remains free.
    """
    held = sum(amounts)
    whole = max(total, held, 1)
    cells = [amount * width // whole for amount in amounts]
    remaining = (width if held >= total else min(_rounded(held * width, whole), max(width - 1, 1))) - sum(cells)
    if remaining:
        for i in sorted(range(len(cells)), key=lambda i: (-(amounts[i] * width % whole), i))[:remaining]:
            cells[i] += 1
    for i in (i for i, amount in enumerate(amounts) if amount and not cells[i]):
        widest = max(range(len(cells)), key=lambda j: (cells[j], -j))
        if sum(cells) >= width - (held < total):
            if cells[widest] < 2:
                break
            cells[widest] -= 1
        cells[i] = 1
    return cells


def _rounded(number: int, divisor: int) -> int:
    """Return the quotient, rounded to the nearest integer, and a half to the even one. A Fraction takes far longer."""
    quotient, rest = divmod(number, divisor)
    return quotient + (2 * rest > divisor or (2 * rest == divisor and quotient % 2))
