"""Lines of text in several styles, and the codes that make a terminal show the styles.

The card map draws with them (`mgpu.presentation.card_map`, `mgpu.presentation.card_bars`). A large cluster has 70,000
lines, for which the classes `Text` and `Panel` of `rich` and a `Segment` for each style take many times as long. So a
`Pen` paints a text at once with the codes that `rich` would write, and painted texts are joined.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from rich.cells import cell_len
from rich.color import ColorSystem
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from mgpu.presentation.plain_text import printable

_SYSTEMS = {
    "standard": ColorSystem.STANDARD,
    "256": ColorSystem.EIGHT_BIT,
    "truecolor": ColorSystem.TRUECOLOR,
    "windows": ColorSystem.WINDOWS,
}


def safe(text: str) -> str:
    """Return a text for one line, in which characters that a terminal would interpret are replaced."""
    return text if text.isprintable() else printable(text).replace("\n", " ")


def width_of(text: str) -> int:
    """Return the width in cells."""
    return len(text) if text.isascii() else cell_len(text)


class Line:
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

    def add(self, text: str, style: str = "") -> "Line":
        """Append a text. Characters that a terminal would interpret are replaced."""
        if text:
            text = safe(text)
            self.runs.append((text, style))
            self.width += width_of(text)
        return self

    def extend(self, other: "Line") -> "Line":
        self.runs += other.runs
        self.width += other.width
        return self

    def cut(self, width: int, overflow: Literal["ellipsis", "crop"] = "ellipsis") -> "Line":
        """Return the line, or as much of it as `width` allows."""
        if self.width <= width:
            return self
        text = Text("".join(run for run, _ in self.runs))
        text.truncate(width, overflow=overflow)
        found = Line()
        start = 0
        for run, style in self.runs:
            found.add(text.plain[start : start + len(run)], style)
            start += len(run)
        return found


class Painted(NamedTuple):
    """A text with the codes of its styles.

    Attributes:
        width: the width in cells, which the codes do not count for.
    """

    text: str
    width: int

    def padded(self, width: int) -> str:
        return self.text + " " * (width - self.width)


class Signs(NamedTuple):
    free: str = "·"
    broken: str = "╱"
    cross: str = "✗"
    dot: str = "·"
    edge: str = "▏"
    unused: str = "░"
    unknown: str = "?"


_ASCII = Signs(".", "/", "x", "-", "|", "-")


class Pen:
    """How to draw on a console: with which signs, and with which codes for a style.

    Attributes:
        coloured: whether the console shows colors.
    """

    def __init__(self, console: Console, options: ConsoleOptions) -> None:
        self.signs = _ASCII if options.ascii_only else Signs()
        self.coloured = console.color_system is not None and not console.no_color
        self.options = options
        self._console = console
        self._system = _SYSTEMS.get(console.color_system or "")
        self._codes: dict[str, tuple[str, str]] = {"": ("", "")}  # Before and after a text, by style.

    def paint(self, text: str, style: str) -> str:
        if self._system is None or not text:
            return text
        before, after = self._codes.get(style) or self._codes_of(style)
        return f"{before}{text}{after}"

    def paint_line(self, line: Line) -> Painted:
        if self._system is None:
            return Painted("".join([text for text, _ in line.runs]), line.width)
        return Painted("".join([self.paint(text, style) for text, style in line.runs]), line.width)

    def render(self, part: RenderableType, width: int) -> Iterable[Painted]:
        """Yield the lines of a renderable of `rich`, each of this width. This is slow."""
        for line in self._console.render_lines(part, self.options.update(width=width, height=None)):
            yield Painted("".join(self._paint_segment(segment) for segment in line), width)

    def _paint_segment(self, segment: Segment) -> str:
        return self._render(segment.style, segment.text) if segment.style else segment.text

    def _codes_of(self, style: str) -> tuple[str, str]:
        before, _, after = self._render(Style.parse(style), "\0").partition("\0")
        self._codes[style] = before, after
        return before, after

    def _render(self, style: Style, text: str) -> str:
        return (style.without_color if self._console.no_color else style).render(text, color_system=self._system)
