"""Prints the output of the commands: tables and pictures with the library `rich`, and JSON.

Text from the cluster must never be interpreted, neither as markup of `rich` nor as terminal control sequences.
"""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import click
import orjson
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment, Segments
from rich.text import Text

from mgpu.presentation.plain_text import printable

_LETTERS = 1 << 14
"""The number of letters that `show` prints at once."""
_BEYOND_ASCII = re.compile(r"[^\n -~]")


class Terminal(Console):
    """A console of `rich` that does not interpret text, and replaces characters that are not printable."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Replace characters that are not printable, and render.

        `rich` calls this method for the cells of tables and panels too.
        """
        if isinstance(renderable, Text) and printable(renderable.plain) != renderable.plain:
            renderable = renderable.copy()
            renderable.plain = printable(renderable.plain)
        return super().render(printable(renderable) if isinstance(renderable, str) else renderable, options)


def show(renderable: RenderableType) -> None:
    """Print a renderable in parts, each as soon as it is rendered.

    Rendering thousands of nodes takes time. `mgpu inspect | head` need not wait for all of them.
    """
    terminal = Terminal()
    for part in _parts(terminal.render(renderable)):
        # Everything is rendered for the width of the terminal, and the card map must not be cropped.
        terminal.print(Segments(part), end="", crop=False)


def _parts(segments: Iterable[Segment]) -> Iterator[list[Segment]]:
    part: list[Segment] = []
    letters = 0
    for segment in segments:
        part.append(segment)
        letters += len(segment.text)
        if letters > _LETTERS:
            yield part
            part = []
            letters = 0
    yield part


def show_json(value: Any) -> None:
    """Print a value as indented JSON. All characters that are not printable are escaped, even if JSON allows them."""
    text = orjson.dumps(value, option=orjson.OPT_INDENT_2)
    if text.isascii() and b"\x7f" not in text:  # orjson escapes all other control characters.
        click.echo(text)
    else:
        click.echo(_BEYOND_ASCII.sub(_escape, text.decode()))


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    return character if character.isprintable() else json.dumps(character)[1:-1]
