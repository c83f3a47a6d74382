"""Prints the output of the commands: tables and pictures with the library `rich`, JSON and YAML.

Text from the cluster must never be interpreted, neither as markup of `rich` nor as terminal control sequences.
"""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import click
import orjson
import yaml
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment, Segments
from rich.text import Text

from mgpu.presentation.plain_text import printable

_LETTERS = 1 << 14
"""The number of letters that `show` prints at once."""
_WIDE = 1 << 16
"""The width for a pipe. No line of the output is so long, so none is broken."""
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


def show_plain(renderable: RenderableType) -> None:
    """Print a renderable for a program: without colours, without line breaks for a width, and no blanks at the end."""
    terminal = Terminal(width=_WIDE, color_system=None)
    line = ""
    for segment in terminal.render(renderable, terminal.options):
        *ended, rest = segment.text.split("\n")
        for text in ended:
            click.echo((line + text).rstrip())
            line = ""
        line += rest
    if line.strip():
        click.echo(line.rstrip())


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


class _Dumper(yaml.CSafeDumper):
    """A dumper that quotes each text that the YAML library of Go would take for a number, such as the node `1e3`."""


_NUMBER = re.compile(r"[-+]?(\.\d+|\d[\d_]*\.?[\d_]*)([eE][-+]?\d+)?|[-+]?0[oOxXbB][\da-fA-F_]+", re.ASCII)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:number", re.compile(rf"(?:{_NUMBER.pattern})$"), list("-+.0123456789"))


def show_yaml(value: Any) -> None:
    """Print a value as YAML, with the same data as `show_json`. Characters that are not printable are escaped."""
    data = orjson.loads(orjson.dumps(value))
    text = _yaml(data, allow_unicode=True)
    if not text.replace("\n", "").isprintable():
        text = _yaml(data, allow_unicode=False)
    click.echo(text, nl=False)


def _yaml(data: Any, *, allow_unicode: bool) -> str:
    text: str = yaml.dump(data, Dumper=_Dumper, allow_unicode=allow_unicode, sort_keys=False, width=_WIDE)
    return text
