"""Draws the card map, a picture of nodes and their cards for the terminal.

`mgpu inspect`, `mgpu demo` and `mgpu simulate` print it. Each card has two bars, one for core and one for memory, which
are divided among the pods that hold the card. On a card with slices, the bar for memory shows the slices, with their
names below. Each pod has a letter, which the legend of the node explains, so that the picture is complete without
color. The picture may change, because no program reads it.

A large cluster has 70,000 lines. The classes `Text` and `Panel` of `rich` need 3 ms for each node, so this module
composes lines of runs, each in one style, and yields their segments. It leaves only rare parts to `rich`: notes,
devices that are not GPUs, and lines that are too long. The cards of a large cluster are much alike, so the parts that
show a card are remembered.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal, NamedTuple

from rich.box import ROUNDED
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from mgpu.dialects.mtgpu import KIND
from mgpu.dialects.mtgpu import NAME as MTGPU
from mgpu.model.cards import GPU, Card
from mgpu.model.pod_constraints import NO_CONSTRAINTS
from mgpu.model.quantities import format_bytes, format_core
from mgpu.presentation.card_views import CardUse, CardView, NodeView
from mgpu.presentation.plain_text import join_names, printable
from mgpu.presentation.slice_bars import divide_bar, label_section

_COLOURS = (
    "#7aa6da",
    "#e7c547",
    "#70c0b1",
    "#d98cb3",
    "#b9ca4a",
    "#e78c45",
    "#a08cd0",
    "#7fc97f",
    "#c9a27a",
    "#8fb8c9",
)
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_UNKNOWN, _MORE = "?", "+"
_LONGEST_CONSTRAINTS = 60  # characters
# In characters: the column with the names of the rows, the gap between columns, and the least and most width of a bar.
_GUTTER, _GAP, _NARROWEST, _WIDEST = 7, 3, 15, 34
_SHORTEST_GPUID = 5  # characters
_MOST_BARE = 20  # names of nodes
_REMEMBERED = 4096
"""The most parts of lines of one kind that are remembered. Users choose the amounts, so their number has no limit."""
_IDLE, _WARNING, _NOTE, _NAME, _BROKEN = "grey50", "bold red", "yellow", "italic", "red"


class _Signs(NamedTuple):
    free: str = "·"
    broken: str = "╱"
    cross: str = "✗"
    dot: str = "·"
    edge: str = "▏"


_ASCII = _Signs(".", "/", "x", "-", "|")


@dataclass(frozen=True, slots=True)
class card_map:  # noqa: N801 (callers use it like a function)
    """A renderable of `rich` that draws nodes. It needs at least 60 columns. Nodes without devices share one line."""

    nodes: Sequence[NodeView]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        coloured = console.color_system is not None and not console.no_color
        pen = _Pen(console, options, _ASCII if options.ascii_only else _Signs(), coloured=coloured)
        served = [node for node in self.nodes if node.devices]
        for node in served:
            yield from _panel(node, pen)
        bare = [node.name for node in self.nodes if not node.devices]
        if bare:
            yield Text(f"Without cards: {join_names(bare, _MOST_BARE)}", style=_IDLE)
        if served:
            yield _total(served, pen)


@dataclass(frozen=True, slots=True)
class _Pen:
    """How to draw: where, with which signs, and whether in color."""

    console: Console
    options: ConsoleOptions
    signs: _Signs
    coloured: bool


class _Line:
    """A line of text.

    Attributes:
        runs: the texts of the line, each with the name of its style, which is "" for none.
        width: the width in cells.
    """

    __slots__ = ("runs", "width")

    def __init__(self, *runs: tuple[str, str]) -> None:
        self.runs: list[tuple[str, str]] = []
        self.width = 0
        for run in runs:
            self.add(*run)

    def add(self, text: str, style: str = "") -> "_Line":
        """Append a text. Characters that a terminal would interpret are replaced."""
        if text:
            if not text.isprintable():
                text = printable(text).replace("\n", " ")
            self.append(text, style, len(text) if text.isascii() else cell_len(text))
        return self

    def append(self, text: str, style: str, width: int) -> None:
        """Append a text of mgpu's own, whose width is known."""
        self.runs.append((text, style))
        self.width += width

    def extend(self, other: "_Line") -> "_Line":
        self.runs += other.runs
        self.width += other.width
        return self

    def cut(self, width: int, overflow: Literal["ellipsis", "crop"] = "ellipsis") -> "_Line":
        """Return the line, or as much of it as `width` allows."""
        if self.width <= width:
            return self
        text = Text("".join(run for run, _ in self.runs))
        text.truncate(width, overflow=overflow)
        found = _Line()
        start = 0
        for run, style in self.runs:
            found.add(text.plain[start : start + len(run)], style)
            start += len(run)
        return found

    def segments(self) -> list[Segment]:
        return [Segment(text, _style(style)) for text, style in self.runs]


@cache
def _style(name: str) -> Style | None:
    """Return the style of a name. This module has few names, so that all are kept."""
    return Style.parse(name) if name else None


class _Label(NamedTuple):
    letter: str
    style: str


def _panel(node: NodeView, pen: _Pen) -> Iterator[Segment]:
    """Yield a node in a box, as a `Panel` of `rich` would be drawn."""
    width = pen.options.max_width - 4
    labels = _labels(node)
    body: list[_Line | RenderableType] = [*_cards(node, labels, pen, width)] if node.cards else []
    if node.others:
        body += [_Line(), _others(node, labels, pen)]
    if labels:
        body += [_Line(), *_legend(node, labels, pen, width)]
    if node.note:
        body += [_Line(), Text(node.note, style=_NOTE)]
    dot = f" {pen.signs.dot} "
    models = f"{dot}{dot.join(_models(node))} "
    title = _Line((" ", _IDLE), (node.name, f"bold {_IDLE}"), (models, _IDLE)).cut(width, "crop")
    subtitle = _Line((f" core {_share(node, 'core')}{dot}memory {_share(node, 'memory')} ", _IDLE)).cut(width, "crop")
    box = ROUNDED.substitute(pen.options, safe=pen.console.safe_box)
    sides = Segment(box.mid_left, _style(_IDLE)), Segment(box.mid_right, _style(_IDLE))
    segments = [
        Segment(box.top_left + box.top, _style(_IDLE)),
        *title.segments(),
        Segment(f"{box.top * (width - title.width)}{box.top}{box.top_right}", _style(_IDLE)),
        Segment.line(),
        *_sides(body, pen, width, *sides),
        Segment(f"{box.bottom_left}{box.bottom}{box.bottom * (width - subtitle.width)}", _style(_IDLE)),
        *subtitle.segments(),
        Segment(f"{box.bottom}{box.bottom_right}", _style(_IDLE)),
        Segment.line(),
    ]
    if pen.console.color_system is None:  # One segment is written faster than a hundred.
        segments = [Segment("".join([segment.text for segment in segments]))]
    yield from segments


def _sides(
    body: Iterable[_Line | RenderableType], pen: _Pen, width: int, left: Segment, right: Segment
) -> Iterator[Segment]:
    """Yield the lines of the body between the sides of the box."""
    blank, end = Segment(" "), Segment.line()
    for part in body:
        if isinstance(part, _Line) and part.width <= width:
            yield from (left, blank, *part.segments(), Segment(" " * (width - part.width + 1)), right, end)
            continue
        if isinstance(part, _Line):
            part = Text.assemble(*part.runs, no_wrap=True, overflow="ellipsis")
        for line in pen.console.render_lines(part, pen.options.update(width=width, height=None)):
            yield from (left, blank, *line, blank, right, end)


def _labels(node: NodeView) -> dict[str, _Label]:
    """Return the letter and the color of each pod on the node, in the order of the cards.

    The letter of a pod whose cards are unknown is `?`. If there are more pods than letters, the others have `+`.
    """
    labels: dict[str, _Label] = {}
    letters = iter(_LETTERS)
    for use in (use for card in node.devices for use in card.uses):
        if use.pod not in labels:
            letter = next(letters, _MORE) if use.certain else _UNKNOWN
            style = f"black on {_COLOURS[len(labels) % len(_COLOURS)]}" if use.certain else "white on red3"
            labels[use.pod] = _Label(letter, style)
    return labels


def _cards(node: NodeView, labels: dict[str, _Label], pen: _Pen, width: int) -> Iterator[_Line]:
    """Draw the cards in as few rows as possible, with about the same number of cards in each row."""
    narrowest = max(_NARROWEST, *(_least_head_width(card) for card in node.cards))
    fit = max(1, (width - _GUTTER + _GAP) // (narrowest + _GAP))
    rows = -(-len(node.cards) // fit)
    per_row = -(-len(node.cards) // rows)
    bar = min(_WIDEST, (width - _GUTTER + _GAP) // per_row - _GAP)
    for start in range(0, len(node.cards), per_row):
        shown = node.cards[start : start + per_row]
        if start:
            yield _Line()
        yield _row("", (_head(card, pen, bar) for card in shown), bar)
        yield _row("core", (_bar(card, "core", labels, pen, bar) for card in shown), bar)
        yield _row("mem", (_memory(card, labels, pen, bar) for card in shown), bar)
        if any(card.slices for card in shown):
            yield _row("cut", (_cut(card, pen, bar) for card in shown), bar)


def _row(name: str, cells: Iterable[_Line], width: int) -> _Line:
    line = _Line((name.ljust(_GUTTER - _GAP), _IDLE if name else ""))
    for cell in cells:
        shown = cell.cut(width)
        line.append(" " * _GAP, "", _GAP)
        line.extend(shown)
        if shown.width < width:
            line.append(" " * (width - shown.width), "", width - shown.width)
    return line


def _others(node: NodeView, labels: dict[str, _Label], pen: _Pen) -> Table:
    """Draw a row for each type of device, such as `rdma  0 50% A   1 idle`."""
    table = Table.grid(padding=(0, _GAP, 0, 0), pad_edge=False)
    table.add_column(style=_IDLE)
    table.add_column()
    by_type: dict[str, list[CardView]] = {}
    for device in node.others:
        by_type.setdefault(device.state.card.type, []).append(device)
    for type, devices in by_type.items():
        row = _Line()
        for i, device in enumerate(devices):
            row.add(" " * _GAP if i else "").extend(_device(device, labels, pen))
        table.add_row(type, Text.assemble(*row.runs))
    return table


def _device(device: CardView, labels: dict[str, _Label], pen: _Pen) -> _Line:
    state = device.state
    line = _Line((str(state.card.index), "bold"))
    if not state.card.healthy:
        line.add(f" {pen.signs.cross} unhealthy", _WARNING)
    elif state.idle:
        line.add(" idle", _IDLE)
    if not state.idle:
        line.add(f" {format_core(state.core_used)} ", _WARNING if state.core_used > state.card.core else "")
        for use in device.uses:
            line.add(*_block(labels[use.pod], 1, coloured=pen.coloured))
    return line


def _least_head_width(card: CardView) -> int:
    """Return the width that the head of a card with a GPUID needs at least; 0 for other cards."""
    state = card.state
    return len(f"{state.card.index} {state.gpuid[:_SHORTEST_GPUID]} {_used(card)}") if state.gpuid else 0


class _Head(NamedTuple):
    """What the line above the bars of a card shows."""

    number: int
    mode: str
    gpuid: str
    healthy: bool
    idle: bool
    over: bool
    used: str


def _head(card: CardView, pen: _Pen, width: int) -> _Line:
    state = card.state
    over = state.core_used > state.card.core or state.memory_used > state.card.memory
    head = _Head(state.card.index, card.mode, state.gpuid, state.card.healthy, state.idle, over, _used(card))
    return _draw_head(head, pen.signs.cross, width)


@lru_cache(_REMEMBERED)
def _draw_head(head: _Head, cross: str, width: int) -> _Line:
    """Return a line that is shared, so callers must not change it."""
    line = _Line((str(head.number), "bold"), (f" {head.mode.upper()}" if head.mode else "", ""))
    if head.gpuid:
        left = width - line.width - len(head.used) - 2
        line.add(" ").extend(_Line((head.gpuid, _NAME)).cut(max(_SHORTEST_GPUID, left)))
    if not head.healthy:
        line.add(f" {cross} unhealthy", _WARNING)
    elif head.idle:
        line.add(" idle", _IDLE)
    # The note "unhealthy" is more important than the amounts, which the bars show too.
    if not head.idle and (head.healthy or line.width + len(head.used) < width):
        line.add(f" {head.used}", _WARNING if head.over else "")
    return line


def _used(card: CardView) -> str:
    return f"{format_core(card.state.core_used)} {_short(card.state.memory_used)}"


def _bar(card: CardView, what: str, labels: dict[str, _Label], pen: _Pen, width: int) -> _Line:
    gpu = card.state.card
    total = gpu.core if what == "core" else gpu.memory
    amounts = tuple([use.core if what == "core" else use.memory for use in card.uses])
    holders = tuple([labels[use.pod] for use in card.uses])
    free = pen.signs.free if gpu.healthy else pen.signs.broken
    return _draw_bar(amounts, total, holders, (free, _IDLE if gpu.healthy else _BROKEN), width, coloured=pen.coloured)


@lru_cache(_REMEMBERED)
def _draw_bar(
    amounts: tuple[int, ...],
    total: int,
    holders: tuple[_Label, ...],
    free: tuple[str, str],
    width: int,
    *,
    coloured: bool,
) -> _Line:
    """Return a line that is shared, so callers must not change it.

    Args:
        holders: the pod of each amount.
        free: the sign and the style of what no pod holds.
    """
    line = _Line()
    for label, cells in zip(holders, _cells(amounts, total, width), strict=True):
        line.add(*_block(label, cells, coloured=coloured))
    sign, style = free
    return line.add(sign * (width - line.width), style)


def _free(card: CardView, cells: int, pen: _Pen) -> tuple[str, str]:
    return (pen.signs.free * cells, _IDLE) if card.state.card.healthy else (pen.signs.broken * cells, _BROKEN)


def _memory(card: CardView, labels: dict[str, _Label], pen: _Pen, width: int) -> _Line:
    if not card.slices:
        return _bar(card, "memory", labels, pen, width)
    line = _Line()
    for stretch in divide_bar(card, width):
        use = next((u for u in stretch.slice.uses if u.pod in labels), None) if stretch.slice else None
        if use:
            line.add(*_block(labels[use.pod], stretch.cells, coloured=pen.coloured))
        else:
            line.add(*_free(card, stretch.cells, pen))
    return line


def _cut(card: CardView, pen: _Pen, width: int) -> _Line:
    return _Line(("".join(label_section(stretch, pen.signs.edge) for stretch in divide_bar(card, width)), _IDLE))


def _block(label: _Label, cells: int, *, coloured: bool) -> tuple[str, str]:
    return (label.letter.center(cells)[:cells] if coloured else label.letter * cells), label.style


def _cells(amounts: Sequence[int], total: int, width: int) -> list[int]:
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


def _legend(node: NodeView, labels: dict[str, _Label], pen: _Pen, width: int) -> list[_Line]:
    held: dict[str, list[tuple[Card, CardUse]]] = {pod: [] for pod in labels}
    for device in node.devices:
        for use in device.uses:
            held[use.pod].append((device.state.card, use))
    several = len({use.dialect for on in held.values() for _, use in on}) > 1
    entries = [_entry(node, pod, held[pod], label, pen, several=several) for pod, label in labels.items()]
    longest = max(entry.width for entry in entries)
    columns = max(1, min(len(entries), (width + _GAP) // (longest + _GAP)))
    rows = -(-len(entries) // columns)
    widths = [max(entry.width for entry in entries[i : i + rows]) for i in range(0, len(entries), rows)]
    lines = [_Line() for _ in range(rows)]
    for i, entry in enumerate(entries):
        column, line = i // rows, lines[i % rows]
        line.add(" " * (sum(widths[:column]) + _GAP * column - line.width)).extend(entry)
    return lines


def _entry(
    node: NodeView, pod: str, on: Sequence[tuple[Card, CardUse]], label: _Label, pen: _Pen, *, several: bool
) -> _Line:
    """Return a pod's line of the legend, such as `A default/train (a, b) · 100% 8.0 GiB on 0,1 · card-models A100`.

    Args:
        on: the devices that the pod holds.
        several: whether the node has pods of several vocabularies. If so, the line names the vocabulary.
    """
    use = on[0][1]
    containers = sorted({container for _, use in on for container in use.containers})
    line = _Line((f" {label.letter} " if pen.coloured else label.letter, label.style), (f" {pod}", ""))
    if len(containers) > 1:
        line.add(f" ({', '.join(containers)})")
    if use.occupies and use.certain:
        return line.add(f" {pen.signs.dot} keeps card {','.join(str(card.index) for card, _ in on)}", _IDLE)
    if use.dialect == MTGPU:
        line.add(f" {pen.signs.dot} {KIND}")
    elif several and use.dialect:
        line.add(f" {pen.signs.dot} {use.dialect}")
    if not use.certain:
        return line.add(f" {pen.signs.dot} its cards are unknown", _WARNING)
    slices = _slices_of(node, pod)
    if slices:
        line.add(f" {pen.signs.dot} {slices}", _IDLE)
    for type in dict.fromkeys(card.type for card, _ in on):
        held = [(card.index, use) for card, use in on if card.type == type]
        where = "" if slices else f" on {','.join(str(index) for index, _ in held)}"
        line.add(f" {pen.signs.dot} {'' if type == GPU else f'{type} '}{_total_of(held)}{where}", _IDLE)
    if use.constraints != NO_CONSTRAINTS:
        line.extend(_Line((f" {pen.signs.dot} {use.constraints}", _IDLE)).cut(_LONGEST_CONSTRAINTS))
    return line


def _total_of(held: Sequence[tuple[int, CardUse]]) -> str:
    """Return amounts such as `50% 8 GiB`. An amount of 0 is left out. If both are 0, the result is `0%`."""
    core, memory = sum(use.core for _, use in held), sum(use.memory for _, use in held)
    return " ".join(([format_core(core)] if core or not memory else []) + ([_short(memory)] if memory else []))


def _slices_of(node: NodeView, pod: str) -> str:
    """Return the slices of a pod, such as `2g.20gb and 1g.10gb of card 0`; "" if it has none."""
    parts = []
    for card in node.cards:
        if not card.slices:
            continue
        held = [s.slice.name for s in card.slices if any(use.pod == pod for use in s.uses)]
        counts = {name: held.count(name) for name in held}
        names = (name if count == 1 else f"{count} × {name}" for name, count in counts.items())
        if held:
            parts.append(f"{' and '.join(names)} of card {card.state.card.index}")
    return ", ".join(parts)


def _models(node: NodeView) -> Iterator[str]:
    """Yield a text such as `7 × A100-SXM4-80GB 80 GiB` for each kind of card, in the order of the first index."""
    kinds: dict[str, int] = {}
    for card in node.cards:
        kind = " ".join(filter(None, (card.state.card.model, _short(card.state.card.memory))))
        kinds[kind] = kinds.get(kind, 0) + 1
    return (f"{count} × {kind}" for kind, count in kinds.items())


def _share(node: NodeView, what: str) -> str:
    """Return how much of the node's cards pods hold, in percent. Unhealthy cards are included."""
    states = [card.state for card in node.cards]
    used = sum(s.core_used if what == "core" else s.memory_used for s in states)
    total = sum(s.card.core if what == "core" else s.card.memory for s in states)
    return f"{100 * used / total:.0f}%" if total else "0%"


def _total(nodes: Sequence[NodeView], pen: _Pen) -> Text:
    cards = [card for node in nodes for card in node.cards]
    pods = {use.pod for node in nodes for card in node.devices for use in card.uses}
    broken = sum(not card.state.card.healthy for card in cards)
    parts = [
        _count(len(nodes), "node"),
        _count(len(cards), "card"),
        f"{sum(card.state.idle and card.state.card.healthy for card in cards)} idle",
        *([f"{broken} unhealthy"] if broken else []),
        _count(len(pods), "pod"),
    ]
    return Text(f" {pen.signs.dot} ".join(parts), style="bold")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


@lru_cache(_REMEMBERED)
def _short(amount: int) -> str:
    """Return `80 GiB` instead of `80.0 GiB`, because the width is limited."""
    return format_bytes(amount).replace(".0 ", " ")
