"""Output of commands: tables and pictures with rich, and JSON.

Text from the cluster is never interpreted: neither as rich markup nor as terminal control sequences. Print through
`show` and `show_json` only.
"""

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

from mgpu.presentation.plain_text import printable

_SOME = 2_000
_BEYOND_ASCII = re.compile(r"[^\n -~]")


class Terminal(Console):
    """A rich console that prints text as it is, without markup, emoji codes or control characters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Sanitize text before it is rendered. rich calls this for the contents of tables and panels too."""
        if isinstance(renderable, Text) and printable(renderable.plain) != renderable.plain:
            renderable = renderable.copy()
            renderable.plain = printable(renderable.plain)
        return super().render(printable(renderable) if isinstance(renderable, str) else renderable, options)


def show(renderable: RenderableType) -> None:
    """Print while rendering: the picture of thousands of nodes takes seconds, and `mgpu inspect | head` must not."""
    terminal = Terminal()
    segments = iter(terminal.render(renderable))
    while some := list(islice(segments, _SOME)):
        terminal.print(Segments(some), end="")


def show_json(answer: Any) -> None:
    """Print indented JSON. Control characters beyond ASCII are escaped too, although JSON allows them."""
    text = orjson.dumps(answer, option=orjson.OPT_INDENT_2).decode()
    click.echo(_BEYOND_ASCII.sub(_escaped, text))


def _escaped(found: re.Match[str]) -> str:
    letter = found[0]
    return letter if letter.isprintable() else json.dumps(letter)[1:-1]
