"""Shows the output of a command once, or again whenever it changes (`--watch`).

On a terminal each output replaces the previous one, as far as it fits on the screen. Otherwise the outputs follow one
another, in full: JSON and YAML as one document after the other, and text with a line before each that says when it was
read.

A program that reads the output of a pipe gets tables without colours, boxes and bars, one row per line however long it
is, as from kubectl.
"""

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Generic, TypeVar

import click
from rich.console import RenderableType
from rich.control import Control
from rich.segment import Segment, Segments
from rich.text import Text

from mgpu.cli.cluster_objects import paused_garbage_collection
from mgpu.cli.connection import ServerError
from mgpu.cli.sources import Reading
from mgpu.presentation.plain_text import one_line
from mgpu.presentation.terminal import Terminal, show, show_json, show_plain, show_yaml

TABLE, WIDE, JSON, YAML, NAME = "table", "wide", "json", "yaml", "name"
"""The formats of the output. `yaml` has the same data as `json`, and `name` has only the names of the objects."""
FORMATS = (TABLE, WIDE, JSON, YAML, NAME)
T = TypeVar("T")
_QUIET, _ERROR = "grey50", "bold red"
_LINES = 1000
"""The number of lines that are written at once, which is faster than one by one."""
_LEAST_REST = 4.0
"""The pause after a look is at least this many times as long as the look, so that a command that lists a large cluster
does not occupy the API server."""


@dataclass(frozen=True, slots=True)
class Output(Generic[T]):
    """How a command prints what it reads.

    Attributes:
        json: returns the value that is printed with `-o json`.
        render: returns a renderable of `rich` for a terminal.
        format: one of `FORMATS`.
        plain: returns the lines for a pipe, and for `-o wide` on a terminal; None to print what `render` returns,
            without colours and line breaks.
        names: returns the lines of `-o name`.
    """

    json: Callable[[T], Any]
    render: Callable[[T], RenderableType]
    format: str = TABLE
    plain: Callable[[T], Iterable[str]] | None = None
    names: Callable[[T], Iterable[str]] = lambda _: ()

    @property
    def is_data(self) -> bool:
        """Whether only programs read the output, which then has nothing but the data."""
        return self.format in (JSON, YAML, NAME)

    def print(self, value: T, *, is_first: bool = True) -> None:
        if self.format == JSON:
            show_json(self.json(value))
        elif self.format == YAML:
            if not is_first:
                click.echo("---")
            show_yaml(self.json(value))
        elif self.format == NAME:
            for name in self.names(value):
                click.echo(one_line(name))
        elif self.plain is not None and (self.format == WIDE or not Terminal().is_terminal):
            lines = iter(self.plain(value))
            while part := list(islice(lines, _LINES)):
                click.echo("\n".join(part))
        elif Terminal().is_terminal:
            show(self.render(value))
        else:
            show_plain(self.render(value))

    def screen(self, value: T) -> RenderableType:
        """Return what `--watch` shows on a terminal."""
        if self.plain is not None and self.format == WIDE:
            return Text("\n".join(self.plain(value)), no_wrap=True, overflow="ellipsis")
        return self.render(value)


def show_once_or_watch(
    read: Callable[[], Reading[T] | None],
    output: Output[T],
    interval: float | None,
    sleep: Callable[[float], object] = time.sleep,
) -> None:
    """Print what `read` returns, once or until Ctrl-C.

    Args:
        read: returns what is printed next; None if it has not changed. If it raises ClickException in the first call,
            the command ends with this error. Later errors are shown, and the last output stays.
        interval: the seconds between two calls of `read`; None to print only once.
    """
    if interval is None:
        found = read()
        assert found is not None, "the first output cannot be unchanged"
        with paused_garbage_collection():
            output.print(found.value)
        return
    terminal = Terminal()
    try:
        if terminal.is_terminal and not output.is_data:
            with terminal.screen():
                for found, error in _changes(read, interval, sleep):
                    _redraw(terminal, output.screen(found.value), found.origin, error)
            return
        is_first = True
        for found, error in _changes(read, interval, sleep):
            if error:
                click.echo(error, err=True)
                continue
            if not output.is_data:
                click.echo(_headline(found.origin))
            output.print(found.value, is_first=is_first)
            is_first = False
    except KeyboardInterrupt:
        return


def _changes(
    read: Callable[[], Reading[T] | None], interval: float, sleep: Callable[[float], object]
) -> Iterator[tuple[Reading[T], str]]:
    """Yield each new reading, and the last one again with each new error."""
    last = read()
    assert last is not None, "the first output cannot be unchanged"
    yield last, ""
    error = ""
    rest = interval
    while True:
        sleep(rest)
        began = time.monotonic()
        message = ""
        found = None
        try:
            found = read()
        except click.ClickException as problem:
            message = problem.format_message()
            if not isinstance(problem, ServerError):
                message = f"Error: {message}"
        rest = max(interval, _LEAST_REST * (time.monotonic() - began))
        if found is not None and (error or found.value != last.value):
            last = found
            yield last, ""
            # What was read is frozen (`paused_garbage_collection`), for commands that end soon. This one does not.
            gc.unfreeze()
            gc.collect()
        elif message != error:
            yield last, message
        error = message


def _headline(origin: str) -> str:
    return f"# {datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {origin}"


def _redraw(terminal: Terminal, content: RenderableType, origin: str, error: str) -> None:
    terminal.control(Control.home(), Control.clear())
    headline = error or f"{_headline(origin)[2:]} (Ctrl-C ends)"
    terminal.print(headline, style=_ERROR if error else _QUIET, no_wrap=True, overflow="ellipsis")
    # Everything is rendered for the width of the terminal, and the card map must not be cropped.
    terminal.print(_first_lines(terminal, content, terminal.height - 2), end="", crop=False)


def _first_lines(terminal: Terminal, content: RenderableType, most: int) -> Segments:
    """Return the lines that fit on the screen. The rest is not rendered, which would take long for a large cluster."""
    found: list[Segment] = []
    lines = 0
    for segment in terminal.render(content):
        count = segment.text.count("\n")
        if lines + count >= most:
            kept = "".join(segment.text.splitlines(keepends=True)[: most - lines])
            found += [Segment(kept, segment.style), Segment("…", None)]
            break
        found.append(segment)
        lines += count
    return Segments(found)
