"""The card map in its plain form, with the `Text`, `Table` and `Panel` of `rich`: what `card_map` must look like.

`mgpu inspect`, `mgpu demo` and `mgpu simulate` print it. Each card has two bars, one for core and one for memory, which
are divided among the pods that hold the card. On a card with slices, the bar for memory shows the slices, with their
names below. Each pod has a letter, which the legend of the node explains, so that the picture is complete without
color. The picture may change, because no program reads it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mgpu.dialects.mtgpu import KIND
from mgpu.dialects.mtgpu import NAME as MTGPU
from mgpu.model.cards import GPU, Card
from mgpu.model.pod_constraints import NO_CONSTRAINTS
from mgpu.model.quantities import format_bytes, format_core
from mgpu.presentation.card_views import CardUse, CardView, NodeView
from mgpu.presentation.plain_text import join_names
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
_IDLE, _WARNING, _NOTE, _NAME = "grey50", "bold red", "yellow", "italic"


@dataclass(frozen=True, slots=True)
class _Signs:
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
        pen = _Pen(_ASCII if options.ascii_only else _Signs(), coloured=coloured)
        served = [node for node in self.nodes if node.devices]
        for node in served:
            yield _panel(node, pen, options.max_width)
        bare = [node.name for node in self.nodes if not node.devices]
        if bare:
            yield Text(f"Without cards: {join_names(bare, _MOST_BARE)}", style=_IDLE)
        if served:
            yield _total(served, pen)


@dataclass(frozen=True, slots=True)
class _Pen:
    signs: _Signs
    coloured: bool


@dataclass(frozen=True, slots=True)
class _Label:
    letter: str
    style: str


def _panel(node: NodeView, pen: _Pen, width: int) -> Panel:
    labels = _labels(node)
    body: list[RenderableType] = [_cards(node, labels, pen, width - 4)] if node.cards else []
    if node.others:
        body += ["", _others(node, labels, pen)]
    if labels:
        body += ["", _legend(node, labels, pen, width - 4)]
    if node.note:
        body += ["", Text(node.note, style=_NOTE)]
    title = Text.assemble((node.name, "bold"), f" {pen.signs.dot} ", f" {pen.signs.dot} ".join(_models(node)))
    subtitle = Text(f"core {_share(node, 'core')} {pen.signs.dot} memory {_share(node, 'memory')}")
    return Panel(
        Group(*body), title=title, title_align="left", subtitle=subtitle, subtitle_align="right", border_style=_IDLE
    )


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


def _cards(node: NodeView, labels: dict[str, _Label], pen: _Pen, width: int) -> Text:
    """Draw the cards in as few rows as possible, with about the same number of cards in each row."""
    narrowest = max(_NARROWEST, *(_least_head_width(card) for card in node.cards))
    fit = max(1, (width - _GUTTER + _GAP) // (narrowest + _GAP))
    rows = -(-len(node.cards) // fit)
    per_row = -(-len(node.cards) // rows)
    bar = min(_WIDEST, (width - _GUTTER + _GAP) // per_row - _GAP)
    lines: list[Text] = []
    for start in range(0, len(node.cards), per_row):
        shown = node.cards[start : start + per_row]
        if start:
            lines.append(Text())
        lines.append(_line("", (_head(card, pen, bar) for card in shown), bar))
        lines.append(_line("core", (_bar(card, "core", labels, pen, bar) for card in shown), bar))
        lines.append(_line("mem", (_memory(card, labels, pen, bar) for card in shown), bar))
        if any(card.slices for card in shown):
            lines.append(_line("cut", (_cut(card, pen, bar) for card in shown), bar))
    return _lines(lines)


def _line(name: str, cells: Iterable[Text], width: int) -> Text:
    line = Text().append(name.ljust(_GUTTER - _GAP), style=_IDLE if name else "")
    for cell in cells:
        cell.truncate(width, overflow="ellipsis")
        line.append(" " * _GAP).append_text(cell).append(" " * (width - cell.cell_len))
    return line


def _lines(lines: Iterable[Text]) -> Text:
    """Join lines into one text. A Table of `rich` would measure each cell, taking seconds for thousands of nodes."""
    text = Text("\n").join(lines)
    text.no_wrap = True
    text.overflow = "ellipsis"
    return text


def _others(node: NodeView, labels: dict[str, _Label], pen: _Pen) -> Table:
    """Draw a row for each type of device, such as `rdma  0 50% A   1 idle`."""
    table = Table.grid(padding=(0, _GAP, 0, 0), pad_edge=False)
    table.add_column(style=_IDLE)
    table.add_column()
    by_type: dict[str, list[CardView]] = {}
    for device in node.others:
        by_type.setdefault(device.state.card.type, []).append(device)
    for type, devices in by_type.items():
        row = Text(" " * _GAP).join(_device(device, labels, pen) for device in devices)
        table.add_row(type, row)
    return table


def _device(device: CardView, labels: dict[str, _Label], pen: _Pen) -> Text:
    state = device.state
    text = Text.assemble((str(state.card.index), "bold"))
    if not state.card.healthy:
        text.append(f" {pen.signs.cross} unhealthy", style=_WARNING)
    elif state.idle:
        text.append(" idle", style=_IDLE)
    if not state.idle:
        text.append(f" {format_core(state.core_used)} ", style=_WARNING if state.core_used > state.card.core else "")
        for use in device.uses:
            text.append_text(_block(labels[use.pod], 1, pen))
    return text


def _least_head_width(card: CardView) -> int:
    """Return the width that the head of a card with a GPUID needs at least; 0 for other cards."""
    state = card.state
    return len(f"{state.card.index} {state.gpuid[:_SHORTEST_GPUID]} {_used(card)}") if state.gpuid else 0


def _head(card: CardView, pen: _Pen, width: int) -> Text:
    state = card.state
    over = state.core_used > state.card.core or state.memory_used > state.card.memory
    text = Text.assemble((str(state.card.index), "bold"), f" {card.mode.upper()}" if card.mode else "")
    if state.gpuid:
        name = Text(state.gpuid, style=_NAME)
        name.truncate(max(_SHORTEST_GPUID, width - len(text) - len(_used(card)) - 2), overflow="ellipsis")
        text.append(" ").append_text(name)
    if not state.card.healthy:
        text.append(f" {pen.signs.cross} unhealthy", style=_WARNING)
    elif state.idle:
        text.append(" idle", style=_IDLE)
    if not state.idle:
        used = _used(card)
        # The note "unhealthy" is more important than the amounts, which the bars show too.
        if state.card.healthy or len(text) + len(used) < width:
            text.append(f" {used}", style=_WARNING if over else "")
    return text


def _used(card: CardView) -> str:
    return f"{format_core(card.state.core_used)} {_short(card.state.memory_used)}"


def _bar(card: CardView, what: str, labels: dict[str, _Label], pen: _Pen, width: int) -> Text:
    total = card.state.card.core if what == "core" else card.state.card.memory
    amounts = [use.core if what == "core" else use.memory for use in card.uses]
    text = Text()
    for use, cells in zip(card.uses, _cells(amounts, total, width), strict=True):
        text.append_text(_block(labels[use.pod], cells, pen))
    sign, style = (pen.signs.free, _IDLE) if card.state.card.healthy else (pen.signs.broken, "red")
    text.append(sign * (width - len(text)), style=style)
    return text


def _memory(card: CardView, labels: dict[str, _Label], pen: _Pen, width: int) -> Text:
    if not card.slices:
        return _bar(card, "memory", labels, pen, width)
    text = Text()
    sign, style = (pen.signs.free, _IDLE) if card.state.card.healthy else (pen.signs.broken, "red")
    for stretch in divide_bar(card, width):
        use = next((u for u in stretch.slice.uses if u.pod in labels), None) if stretch.slice else None
        text.append_text(
            _block(labels[use.pod], stretch.cells, pen) if use else Text(sign * stretch.cells, style=style)
        )
    return text


def _cut(card: CardView, pen: _Pen, width: int) -> Text:
    return Text("".join(label_section(stretch, pen.signs.edge) for stretch in divide_bar(card, width)), style=_IDLE)


def _block(label: _Label, cells: int, pen: _Pen) -> Text:
    return Text(label.letter.center(cells)[:cells] if pen.coloured else label.letter * cells, style=label.style)


def _cells(amounts: Sequence[int], total: int, width: int) -> list[int]:
    """Divide `width` cells among the amounts, by the largest remainder method.

    An amount above 0 gets at least one cell, so that every pod is visible. If no cell is left for it, the widest amount
    gives one up, unless it has only one cell itself. If less than `total` is held and `width` is at least 2, at least
    one cell remains free.
    """
    held = sum(amounts)
    scale = Fraction(width, max(total, held, 1))
    exact = [amount * scale for amount in amounts]
    cells = [int(value) for value in exact]
    remaining = (width if held >= total else min(round(held * scale), max(width - 1, 1))) - sum(cells)
    for i in sorted(range(len(cells)), key=lambda i: (cells[i] - exact[i], i))[:remaining]:
        cells[i] += 1
    for i in (i for i, amount in enumerate(amounts) if amount and not cells[i]):
        widest = max(range(len(cells)), key=lambda j: (cells[j], -j))
        if sum(cells) >= width - (held < total):
            if cells[widest] < 2:
                break
            cells[widest] -= 1
        cells[i] = 1
    return cells


def _legend(node: NodeView, labels: dict[str, _Label], pen: _Pen, width: int) -> Text:
    several = len({use.dialect for card in node.devices for use in card.uses}) > 1
    entries = [_entry(node, pod, label, pen, several=several) for pod, label in labels.items()]
    longest = max(entry.cell_len for entry in entries)
    columns = max(1, min(len(entries), (width + _GAP) // (longest + _GAP)))
    rows = -(-len(entries) // columns)
    widths = [max(entry.cell_len for entry in entries[i : i + rows]) for i in range(0, len(entries), rows)]
    lines = [Text() for _ in range(rows)]
    for i, entry in enumerate(entries):
        column, line = i // rows, lines[i % rows]
        line.append(" " * (sum(widths[:column]) + _GAP * column - line.cell_len)).append_text(entry)
    return _lines(lines)


def _entry(node: NodeView, pod: str, label: _Label, pen: _Pen, *, several: bool) -> Text:
    """Return a pod's line of the legend, such as `A default/train (a, b) · 100% 8.0 GiB on 0,1 · card-models A100`.

    Args:
        several: whether the node has pods of several vocabularies. If so, the line names the vocabulary.
    """
    on = _uses_of(node, pod)
    uses = [use for _, use in on]
    containers = sorted({container for use in uses for container in use.containers})
    text = Text.assemble((f" {label.letter} " if pen.coloured else label.letter, label.style), f" {pod}")
    if len(containers) > 1:
        text.append(f" ({', '.join(containers)})")
    if uses[0].occupies and uses[0].certain:
        text.append(f" {pen.signs.dot} keeps card {','.join(str(card.index) for card, _ in on)}", style=_IDLE)
        return text
    if uses[0].dialect == MTGPU:
        text.append(f" {pen.signs.dot} {KIND}")
    elif several and uses[0].dialect:
        text.append(f" {pen.signs.dot} {uses[0].dialect}")
    if not uses[0].certain:
        text.append(f" {pen.signs.dot} its cards are unknown", style=_WARNING)
        return text
    slices = _slices_of(node, pod)
    if slices:
        text.append(f" {pen.signs.dot} {slices}", style=_IDLE)
    for type in dict.fromkeys(card.type for card, _ in on):
        held = [(card.index, use) for card, use in on if card.type == type]
        where = "" if slices else f" on {','.join(str(index) for index, _ in held)}"
        text.append(f" {pen.signs.dot} {'' if type == GPU else f'{type} '}{_total_of(held)}{where}", style=_IDLE)
    if uses[0].constraints != NO_CONSTRAINTS:
        constraints = Text(f" {pen.signs.dot} {uses[0].constraints}", style=_IDLE)
        constraints.truncate(_LONGEST_CONSTRAINTS, overflow="ellipsis")
        text.append_text(constraints)
    return text


def _total_of(held: Sequence[tuple[int, CardUse]]) -> str:
    """Return amounts such as `50% 8 GiB`. An amount of 0 is left out. If both are 0, the result is `0%`."""
    core, memory = sum(use.core for _, use in held), sum(use.memory for _, use in held)
    return " ".join(([format_core(core)] if core or not memory else []) + ([_short(memory)] if memory else []))


def _slices_of(node: NodeView, pod: str) -> str:
    """Return the slices of a pod, such as `2g.20gb and 1g.10gb of card 0`; "" if it has none."""
    parts = []
    for card in node.cards:
        held = [s.slice.name for s in card.slices if any(use.pod == pod for use in s.uses)]
        counts = {name: held.count(name) for name in held}
        names = (name if count == 1 else f"{count} × {name}" for name, count in counts.items())
        if held:
            parts.append(f"{' and '.join(names)} of card {card.state.card.index}")
    return ", ".join(parts)


def _uses_of(node: NodeView, pod: str) -> list[tuple[Card, CardUse]]:
    return [(device.state.card, use) for device in node.devices for use in device.uses if use.pod == pod]


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


def _short(amount: int) -> str:
    """Return `80 GiB` instead of `80.0 GiB`, because the width is limited."""
    return format_bytes(amount).replace(".0 ", " ")
