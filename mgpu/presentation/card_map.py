"""Draws the card map, a picture of nodes and their cards for the terminal.

`mgpu inspect`, `mgpu demo` and `mgpu simulate` print it. Each card has two bars, one for core and one for memory, which
are divided among the pods that hold the card. On a card with slices, the bar for memory shows the slices, with their
names below. Each pod has a letter, which the legend of the node explains, so that the picture is complete without
color. The picture may change, because no program reads it.

This module draws the box of each node, with its title and rows. `mgpu.presentation.card_bars` draws the
cards, and `mgpu.presentation.card_legend` the legend.
Only rare parts are left to `rich`, which is slow: notes, and devices that are not GPUs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich.box import ROUNDED, Box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from mgpu.model.isolation import NONE
from mgpu.model.quantities import format_core
from mgpu.presentation.card_bars import IDLE, WARNING, CardBars, Label, block, least_head_width, short_bytes
from mgpu.presentation.card_legend import GAP, Legend, label_pods, uses_by_pod
from mgpu.presentation.card_views import CardView, NodeView
from mgpu.presentation.measured_use import MeasuredUse, NodeUse, UseOfCards, describe_unknown, use_of_cards
from mgpu.presentation.plain_text import join_names
from mgpu.presentation.styled_lines import Line, Painted, Pen

# In characters: the column with the names of the rows, and the least and most width of a bar.
_GUTTER, _NARROWEST, _WIDEST = 7, 15, 34
_MOST_BARE = 20  # names of nodes
_NOTE = "yellow"
_EMPTY = Painted("", 0)


@dataclass(frozen=True, slots=True)
class card_map:  # noqa: N801 (callers use it like a function)
    """A renderable of `rich` that draws nodes. It needs at least 60 columns. Nodes without devices share one line.

    The segments contain the codes of their styles, which `rich` would count as letters. So callers print the map with
    `crop=False`. No line is wider than the terminal.

    Attributes:
        use: what the pods of each node use of what they hold, by node. Nodes that were not asked are missing.
    """

    nodes: Sequence[NodeView]
    use: Mapping[str, MeasuredUse] = field(default_factory=dict)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        pen = Pen(console, options)
        served = [node for node in self.nodes if node.devices]
        boxes = _Boxes(pen, ROUNDED.substitute(options, safe=console.safe_box), options.max_width - 4)
        for node in served:
            yield Segment(boxes.draw(node, self.use.get(node.name)))
        bare = [node.name for node in self.nodes if not node.devices]
        if bare:
            yield Text(f"Without cards: {join_names(bare, _MOST_BARE)}", style=IDLE)
        if served:
            yield _total(served, pen)


class _Boxes:
    """Draws each node in a box, as a `Panel` of `rich` would be drawn.

    Attributes:
        width: the width between the sides of the box and a blank on each side.
    """

    def __init__(self, pen: Pen, box: Box, width: int) -> None:
        self._pen = pen
        self._box = box
        self._width = width
        self._cards = CardBars(pen)
        self._legend = Legend(pen, width)
        self._left = f"{pen.paint(box.mid_left, IDLE)} "
        self._right = f" {pen.paint(box.mid_right, IDLE)}\n"
        self._gap = " " * GAP
        self._names = {name: pen.paint(name.ljust(_GUTTER - GAP), IDLE) for name in ("core", "mem", "cut", "used")}
        self._names[""] = " " * (_GUTTER - GAP)

    def draw(self, node: NodeView, use: MeasuredUse | None = None) -> str:
        box, width, paint = self._box, self._width, self._pen.paint
        dot = f" {self._pen.signs.dot} "
        isolation = [f"limits by {node.isolation}"] if node.isolation not in ("", NONE) else []
        models = f"{dot}{dot.join([*_models(node), *isolation])} "
        title = Line((" ", IDLE), (node.name, f"bold {IDLE}"), (models, IDLE)).cut(width, "crop")
        shares = f" core {_share(node, 'core')}{dot}memory {_share(node, 'memory')} "
        subtitle = Line((shares, IDLE)).cut(width, "crop")
        parts = [
            paint(box.top_left + box.top, IDLE),
            self._pen.paint_line(title).text,
            paint(f"{box.top * (width - title.width)}{box.top}{box.top_right}", IDLE),
            "\n",
        ]
        for line in self._body(node, use):
            parts += (self._left, line.text, " " * (width - line.width), self._right)
        parts += (
            paint(f"{box.bottom_left}{box.bottom}{box.bottom * (width - subtitle.width)}", IDLE),
            self._pen.paint_line(subtitle).text,
            paint(f"{box.bottom}{box.bottom_right}", IDLE),
            "\n",
        )
        return "".join(parts)

    def _body(self, node: NodeView, use: MeasuredUse | None) -> Iterator[Painted]:
        uses = uses_by_pod(node)
        labels = label_pods(uses)
        used = use_of_cards(node, use) if isinstance(use, NodeUse) else None
        if node.cards:
            yield from self._rows(node.cards, labels, used)
        if node.others:
            yield _EMPTY
            yield from self._pen.render(_others(node, labels, self._pen), self._width)
        if labels:
            yield _EMPTY
            yield from self._legend.draw(node, uses, labels, used)
        if use is not None and (unknown := describe_unknown(use)):
            yield _EMPTY
            yield self._pen.paint_line(Line((unknown, _NOTE)).cut(self._width))
        if node.note:
            yield _EMPTY
            yield from self._pen.render(Text(node.note, style=_NOTE), self._width)

    def _rows(
        self, cards: Sequence[CardView], labels: Mapping[str, Label], used: UseOfCards | None
    ) -> Iterator[Painted]:
        """Draw the cards in as few rows as possible, with about the same number of cards in each row."""
        narrowest = max(_NARROWEST, *map(least_head_width, cards))
        room = self._width - _GUTTER + GAP
        rows = -(-len(cards) // max(1, room // (narrowest + GAP)))
        per_row = -(-len(cards) // rows)
        bar = min(_WIDEST, room // per_row - GAP)
        for start in range(0, len(cards), per_row):
            shown = cards[start : start + per_row]
            if start:
                yield _EMPTY
            columns = [self._cards.column(card, labels, bar, used) for card in shown]
            yield self._row("", [column.head for column in columns], bar)
            yield self._row("core", [column.core for column in columns], bar)
            yield self._row("mem", [column.memory for column in columns], bar)
            if any(card.slices for card in shown):
                yield self._row("cut", [self._cards.slices(card, bar) for card in shown], bar)
            if used is not None:
                yield self._row("used", [self._cards.used(card, used, bar) for card in shown], bar)

    def _row(self, name: str, cells: Sequence[str], width: int) -> Painted:
        return Painted(self._gap.join([self._names[name], *cells]), _GUTTER - GAP + len(cells) * (GAP + width))


def _others(node: NodeView, labels: Mapping[str, Label], pen: Pen) -> Table:
    """Draw a row for each type of device, such as `rdma  0 50% A   1 idle`."""
    table = Table.grid(padding=(0, GAP, 0, 0), pad_edge=False)
    table.add_column(style=IDLE)
    table.add_column()
    by_type: dict[str, list[CardView]] = {}
    for device in node.others:
        by_type.setdefault(device.state.card.type, []).append(device)
    for type, devices in by_type.items():
        row = Line()
        for i, device in enumerate(devices):
            row.add(" " * GAP if i else "").extend(_device(device, labels, pen))
        table.add_row(type, Text.assemble(*row.runs))
    return table


def _device(device: CardView, labels: Mapping[str, Label], pen: Pen) -> Line:
    state = device.state
    line = Line((str(state.card.index), "bold"))
    if not state.card.healthy:
        line.add(f" {pen.signs.cross} unhealthy", WARNING)
    elif state.idle:
        line.add(" idle", IDLE)
    if not state.idle:
        line.add(f" {format_core(state.core_used)} ", WARNING if state.core_used > state.card.core else "")
        for use in device.uses:
            line.add(*block(labels[use.pod], 1, pen))
    return line


def _models(node: NodeView) -> Iterator[str]:
    """Yield a text such as `7 × A100-SXM4-80GB 80 GiB` for each kind of card, in the order of the first index."""
    kinds: dict[tuple[str, int], int] = {}
    for card in node.cards:
        kind = card.state.card.model, card.state.card.memory
        kinds[kind] = kinds.get(kind, 0) + 1
    texts: dict[str, int] = {}
    for (model, memory), count in kinds.items():
        text = " ".join(filter(None, (model, short_bytes(memory))))
        texts[text] = texts.get(text, 0) + count
    return (f"{count} × {text}" for text, count in texts.items())


def _share(node: NodeView, what: str) -> str:
    """Return how much of the node's cards pods hold, in percent. Unhealthy cards are included."""
    states = [card.state for card in node.cards]
    used = sum([s.core_used if what == "core" else s.memory_used for s in states])
    total = sum([s.card.core if what == "core" else s.card.memory for s in states])
    return f"{100 * used / total:.0f}%" if total else "0%"


def _total(nodes: Sequence[NodeView], pen: Pen) -> Text:
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
