"""Positions the slices of a card in a bar of text cells.

The card map and the scheduler's web page call `divide_bar`.
"""

from collections.abc import Iterator
from typing import NamedTuple

from mgpu.model.mig import layout_of
from mgpu.model.slice_names import MIG
from mgpu.presentation.card_views import CardView, SliceView


class Section(NamedTuple):
    """A section of a bar.

    Attributes:
        slice: the slice that the section shows; None if it shows free memory.
        cells: the width of the section.
    """

    slice: SliceView | None
    cells: int


def divide_bar(card: CardView, width: int) -> Iterator[Section]:
    """Yield the sections of a bar of `width` cells, from left to right.

    MIG instances are shown at their position in memory. MPS shares have no position, so they follow one another.
    """
    position = 0
    for view, start, end in _positions(card, width):
        if start > position:
            yield Section(None, start - position)
        yield Section(view, end - max(start, position))
        position = end
    if width > position:
        yield Section(None, width - position)


def _positions(card: CardView, width: int) -> Iterator[tuple[SliceView, int, int]]:
    gpu = card.state.card
    taken = 0
    layout = layout_of(gpu.model, gpu.memory) if card.mode == MIG else None
    for view in card.slices:
        profile = layout.profile(view.slice.name) if layout else None
        if layout and profile:
            start, end, of = view.slice.start, view.slice.start + profile.size, layout.slices
        else:
            start, end, of = taken, taken + view.state.card.memory, gpu.memory
            taken = end
        yield view, min(width, start * width // of), min(width, end * width // of)


def label_section(section: Section, edge: str) -> str:
    """Return the text of a section: `edge` and the slice's name, shortened to fit, or blanks for free memory."""
    if section.slice is None or not section.cells:
        return " " * section.cells
    name = section.slice.slice.name
    width = section.cells - len(edge)
    label = next((text for text in (name, name.partition(".")[0], "") if len(text) <= width), "")
    return f"{edge}{label}".ljust(section.cells)
