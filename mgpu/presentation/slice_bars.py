"""Where the slices of a card lie, in cells of a bar. Pure."""

from collections.abc import Iterator
from typing import NamedTuple

from mgpu.model.mig import layout_of
from mgpu.model.slice_names import MIG
from mgpu.presentation.card_views import CardView, SliceView


class Stretch(NamedTuple):
    """So many cells of the bar are this slice; None: they are of no slice."""

    slice: SliceView | None
    cells: int


def stretches(card: CardView, width: int) -> Iterator[Stretch]:
    """The whole bar from left to right: MIG instances where they lie, shares under MPS one after another by memory."""
    done = 0
    for view, start, end in _places(card, width):
        if start > done:
            yield Stretch(None, start - done)
        yield Stretch(view, end - max(start, done))
        done = end
    if width > done:
        yield Stretch(None, width - done)


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


def name_in(stretch: Stretch, edge: str) -> str:
    """The slice's name in its cells, as much of it as they take, after `edge`; blank where there is no slice."""
    if stretch.slice is None or not stretch.cells:
        return " " * stretch.cells
    name, room = stretch.slice.slice.name, stretch.cells - len(edge)
    shown = next((text for text in (name, name.partition(".")[0], "") if len(text) <= room), "")
    return f"{edge}{shown}".ljust(stretch.cells)
