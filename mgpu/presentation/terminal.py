"""How commands write to a terminal: tables and pictures by rich, in which all text is plain and no markup; and JSON."""

import json
import re
from collections.abc import Iterable
from itertools import islice
from typing import Any

import click
import orjson
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment, Segments
from rich.text import Text

from mgpu.presentation.plain_text import plain

_SOME = 2_000
_BEYOND_ASCII = re.compile(r"[^\n -~]")


class Terminal(Console):
    """A console to which every text is plain, and no markup."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Everything comes by here, what is in tables and panels too."""
        if isinstance(renderable, Text) and plain(renderable.plain) != renderable.plain:
            renderable = renderable.copy()
            renderable.plain = plain(renderable.plain)
        return super().render(plain(renderable) if isinstance(renderable, str) else renderable, options)


def show(renderable: RenderableType) -> None:
    """Some pages at a time, as they are made: pictures of thousands of nodes take seconds, and `head` is quick."""
    terminal = Terminal()
    segments = iter(terminal.render(renderable))
    while some := list(islice(segments, _SOME)):
        terminal.print(Segments(some), end="")


def show_json(answer: Any) -> None:
    """Indented; control characters are escaped all, those beyond ASCII too, which JSON need not escape."""
    text = orjson.dumps(answer, option=orjson.OPT_INDENT_2).decode()
    click.echo(_BEYOND_ASCII.sub(_escaped, text))


def _escaped(found: re.Match[str]) -> str:
    letter = found[0]
    return letter if letter.isprintable() else json.dumps(letter)[1:-1]
