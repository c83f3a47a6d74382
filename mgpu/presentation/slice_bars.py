"""The position of a card's slices in a bar of text cells, for the card map. Pure."""

from collections.abc import Iterator
from typing import NamedTuple

from mgpu.model.mig import layout_of
from mgpu.model.slice_names import MIG
from mgpu.presentation.card_views import CardView, SliceView


class Section(NamedTuple):
    """A run of cells that shows one slice, or free space (None)."""

    slice: SliceView | None
    cells: int


def divide_bar(card: CardView, width: int) -> Iterator[Section]:
    """Divide the whole bar, from left to right.

    MIG instances lie where the hardware has them. MPS shares have no position: they follow one another by memory.
    """
    done = 0
    for view, start, end in _places(card, width):
        if start > done:
            yield Section(None, start - done)
        yield Section(view, end - max(start, done))
        done = end
    if width > done:
        yield Section(None, width - done)


def _places(card: CardView, width: int) -> Iterator[tuple[SliceView, int, int]]:
    gpu, taken = card.state.card, 0
    layout = layout_of(gpu.model, gpu.memory) if card.cut == MIG else None
    for view in card.slices:
        profile = layout.profile(view.slice.name) if layout else None
        if layout and profile:
            start, end, of = view.slice.start, view.slice.start + profile.size, layout.slices
        else:
            start, end, of = taken, taken + view.state.card.memory, gpu.memory
            taken = end
        yield view, min(width, start * width // of), min(width, end * width // of)


def label_section(stretch: Section, edge: str) -> str:
    """Return the cells of a stretch: `edge` and as much of the slice's name as fits, or blanks where there is none."""
    if stretch.slice is None or not stretch.cells:
        return " " * stretch.cells
    name, room = stretch.slice.slice.name, stretch.cells - len(edge)
    shown = next((text for text in (name, name.partition(".")[0], "") if len(text) <= room), "")
    return f"{edge}{shown}".ljust(stretch.cells)
