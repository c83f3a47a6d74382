"""Draws the legend of a node of the card map (`mgpu.presentation.card_map`): its pods, and what each of them holds.

What pods hold is much alike in a large cluster, so the texts about it are remembered.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, reduce
from typing import NamedTuple

from mgpu.dialects.mtgpu import KIND
from mgpu.dialects.mtgpu import NAME as MTGPU
from mgpu.model.cards import GPU
from mgpu.model.pod_constraints import NO_CONSTRAINTS, Constraints
from mgpu.model.quantities import format_core
from mgpu.presentation.card_bars import IDLE, WARNING, Label, short_bytes
from mgpu.presentation.card_views import CardUse, CardView, NodeView
from mgpu.presentation.measured_use import NOT_MEASURED, Used, UseOfCards, add, core_text, memory_text
from mgpu.presentation.styled_lines import Line, Painted, Pen, safe, width_of

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
_REMEMBERED = 16_384
"""The most texts that are remembered. Users choose the amounts, so their number has no limit."""
GAP = 3  # blanks between columns

Uses = Mapping[str, Sequence[tuple[CardView, CardUse]]]
"""What the pods of a node hold of each device, by pod, in the order of the devices."""


def uses_by_pod(node: NodeView) -> Uses:
    uses: dict[str, list[tuple[CardView, CardUse]]] = {}
    for device in node.devices:
        for use in device.uses:
            uses.setdefault(use.pod, []).append((device, use))
    return uses


def label_pods(uses: Uses) -> dict[str, Label]:
    """Return the letter and the color of each pod on the node, in the order of the cards.

    The letter of a pod whose cards are unknown is `?`. If there are more pods than letters, the others have `+`.
    """
    labels: dict[str, Label] = {}
    letters = iter(_LETTERS)
    for pod, ((_, use), *_) in uses.items():
        letter = next(letters, _MORE) if use.certain else _UNKNOWN
        colour = _COLOURS[len(labels) % len(_COLOURS)] if use.certain else "red3"
        labels[pod] = Label(letter, f"{'black' if use.certain else 'white'} on {colour}", colour)
    return labels


class _Held(NamedTuple):
    """What the legend says about a pod besides its name.

    Attributes:
        containers: their names if there are several.
        dialect: the vocabulary if the legend names it.
        occupies: whether it is an occupy pod that keeps its card.
        parts: the type and index of each device, and the core and memory that the pod holds of it.
        used: what the pod uses of all its GPUs together; None if the node was not asked.
        constraints: None if there are none.
    """

    containers: tuple[str, ...]
    dialect: str
    certain: bool
    occupies: bool
    slices: str
    parts: tuple[tuple[str, int, int, int], ...]
    constraints: Constraints | None
    used: Used | None


class Legend:
    """Draws legends with a pen, in lines of at most `width` cells."""

    def __init__(self, pen: Pen, width: int) -> None:
        self._pen = pen
        self._width = width
        self._dot = f" {pen.signs.dot} "
        self._described = lru_cache(_REMEMBERED)(self._describe)

    def draw(
        self, node: NodeView, uses: Uses, labels: Mapping[str, Label], used: UseOfCards | None = None
    ) -> Iterator[Painted]:
        """Yield the lines, with the pods in columns."""
        entries = list(self._entries(node, uses, labels, used))
        longest = max([entry.width for entry in entries])
        columns = max(1, min(len(entries), (self._width + GAP) // (longest + GAP)))
        rows = -(-len(entries) // columns)
        widths = [
            max([entry.width for entry in entries[start : start + rows]]) + GAP
            for start in range(0, len(entries), rows)
        ]
        for row in range(rows):
            *others, last = entries[row::rows]
            text = "".join([entry.padded(width) for entry, width in zip(others, widths, strict=False)])
            yield Painted(text + last.text, sum(widths[: len(others)]) + last.width)

    def _entries(
        self, node: NodeView, uses: Uses, labels: Mapping[str, Label], used: UseOfCards | None
    ) -> Iterator[Painted]:
        """Yield an entry for each pod, such as `A default/train (a, b) · 100% 8.0 GiB on 0,1 · card-models A100`."""
        several = len({use.dialect for on in uses.values() for _, use in on}) > 1
        sliced = [card for card in node.cards if card.slices]
        for pod, on in uses.items():
            slices = _slices_of(sliced, pod) if sliced else ""
            described, painted = self._described(_held(on, slices, _used_by(pod, on, used), several=several))
            label = labels[pod]
            letter = f" {label.letter} " if self._pen.coloured else label.letter
            name = f" {safe(pod)}"
            width = len(letter) + width_of(name) + painted.width
            if width <= self._width:
                yield Painted(f"{self._pen.paint(letter, label.style)}{name}{painted.text}", width)
            else:
                line = Line((letter, label.style), (name, "")).extend(described)
                yield self._pen.paint_line(line.cut(self._width))

    def _describe(self, held: _Held) -> tuple[Line, Painted]:
        line = self._description(held)
        return line, self._pen.paint_line(line)

    def _description(self, held: _Held) -> Line:
        dot = self._dot
        line = Line()
        if held.containers:
            line.add(f" ({', '.join(held.containers)})")
        if held.occupies and held.certain:
            return line.add(f"{dot}keeps card {','.join(str(index) for _, index, _, _ in held.parts)}", IDLE)
        if held.dialect:
            line.add(f"{dot}{KIND if held.dialect == MTGPU else held.dialect}")
        if not held.certain:
            return line.add(f"{dot}its cards are unknown", WARNING)
        if held.slices:
            line.add(f"{dot}{held.slices}", IDLE)
        for type in dict.fromkeys(type for type, _, _, _ in held.parts):
            parts = [part for part in held.parts if part[0] == type]
            core, memory = sum(core for _, _, core, _ in parts), sum(memory for _, _, _, memory in parts)
            where = "" if held.slices else f" on {','.join(str(index) for _, index, _, _ in parts)}"
            if type == GPU and held.used is not None:
                over = (held.used.core or 0) > core > 0 or (held.used.memory or 0) > memory > 0
                line.add(dot, IDLE).add(_used_amounts(core, memory, held.used), WARNING if over else IDLE)
                line.add(where, IDLE)
            else:
                line.add(f"{dot}{'' if type == GPU else f'{type} '}{_amounts(core, memory)}{where}", IDLE)
        if held.constraints is not None:
            line.extend(Line((f"{dot}{held.constraints}", IDLE)).cut(_LONGEST_CONSTRAINTS))
        return line


def _held(on: Sequence[tuple[CardView, CardUse]], slices: str, used: Used | None, *, several: bool) -> _Held:
    """Return what the legend says about the pod that holds these devices.

    Args:
        several: whether the node has pods of several vocabularies. If so, the legend names them.
    """
    use = on[0][1]
    containers: tuple[str, ...] = ()
    if len(on) > 1 or len(use.containers) > 1:
        containers = tuple(sorted({container for _, use in on for container in use.containers}))
    return _Held(
        containers if len(containers) > 1 else (),
        use.dialect if several or use.dialect == MTGPU else "",
        use.certain,
        bool(use.occupies),
        slices,
        tuple([(card.state.card.type, card.state.card.index, use.core, use.memory) for card, use in on]),
        use.constraints if use.constraints != NO_CONSTRAINTS else None,
        used,
    )


def _used_by(pod: str, on: Sequence[tuple[CardView, CardUse]], used: UseOfCards | None) -> Used | None:
    """Return what the pod uses of all these GPUs together; None if the node was not asked."""
    if used is None:
        return None
    indexes = (card.state.card.index for card, _ in on if card.state.card.type == GPU)
    return reduce(add, (used.of_pod(index, pod) for index in indexes), NOT_MEASURED)


def _used_amounts(core: int, memory: int, used: Used) -> str:
    """Return amounts such as `12/50% 1.5/8 GiB`: what is used, and what is held."""
    of_core = core_text(used.core, core)
    if not core:
        of_core = "" if used.core is None else f"{format_core(used.core)} of the SMs"
    return " ".join(filter(None, (of_core, memory_text(used.memory, memory) if memory else "")))


def _amounts(core: int, memory: int) -> str:
    """Return amounts such as `50% 8 GiB`. An amount of 0 is left out. If both are 0, the result is `0%`."""
    return " ".join(([format_core(core)] if core or not memory else []) + ([short_bytes(memory)] if memory else []))


def _slices_of(cards: Iterable[CardView], pod: str) -> str:
    """Return the slices of a pod, such as `2g.20gb and 1g.10gb of card 0`; "" if it has none."""
    parts = []
    for card in cards:
        held = [s.slice.name for s in card.slices if any(use.pod == pod for use in s.uses)]
        counts = {name: held.count(name) for name in held}
        names = (name if count == 1 else f"{count} × {name}" for name, count in counts.items())
        if held:
            parts.append(f"{' and '.join(names)} of card {card.state.card.index}")
    return ", ".join(parts)
