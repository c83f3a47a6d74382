"""Tests of the output of `--watch` after a change, when reading fails, and when the user presses Ctrl-C.

The readings are given, so that no test waits or needs a cluster.
"""

from collections.abc import Callable, Iterable
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from rich.text import Text

from mgpu.cli.sources import Reading
from mgpu.cli.watching import JSON, NAME, Output, show_once_or_watch
from mgpu.presentation.terminal import Terminal

OUTPUT: Output[str] = Output(lambda value: {"value": value}, Text)
AS_JSON: Output[str] = Output(lambda value: {"value": value}, Text, JSON)


def watched(steps: Iterable[object], output: Output[str] = OUTPUT, interval: float | None = 1.0) -> Result:
    """Run the readings one after the other, and then press Ctrl-C. An exception is raised, None is no change."""
    left = iter(steps)

    def read() -> Reading[str] | None:
        step: Any = next(left, KeyboardInterrupt())
        if isinstance(step, BaseException):
            raise step
        return None if step is None else Reading(step, "from a test")

    @click.command()
    def command() -> None:
        show_once_or_watch(read, output, interval, sleep=lambda _: None)

    return CliRunner().invoke(command)


def lines(result: Result) -> list[str]:
    return [line for line in result.stdout.splitlines() if not line.startswith("# ")]


def test_without_watch_the_output_is_printed_once() -> None:
    assert watched(["a", "b"], interval=None).stdout == "a\n"


def test_changes_are_printed_one_after_the_other_where_there_is_no_terminal() -> None:
    result = watched(["a", "a", None, "b"])
    assert (result.exit_code, lines(result)) == (0, ["a", "b"])
    assert result.stdout.splitlines()[0].endswith("Z from a test")


def test_json_is_one_document_after_the_other() -> None:
    assert watched(["a", "b"], AS_JSON).stdout == '{\n  "value": "a"\n}\n{\n  "value": "b"\n}\n'


def test_names_are_printed_without_control_characters() -> None:
    """A scheduler whose token was stolen chooses the names of nodes and pods."""
    names: Output[str] = Output(lambda _: None, Text, NAME, names=lambda value: [f"node/{value}"])
    assert watched(["a\x1b]0;owned\x07\x9b2J\nb"], names, None).stdout == "node/a\ufffd]0;owned\ufffd\ufffd2J b\n"


def test_an_error_is_printed_once_and_the_output_again_when_it_is_gone() -> None:
    error = click.ClickException("nobody answers")
    result = watched(["a", error, error, "a"])
    assert (lines(result), result.stderr) == (["a", "a"], "Error: nobody answers\n")


def test_an_error_of_the_first_reading_ends_the_command() -> None:
    result = watched([click.ClickException("nobody answers")])
    assert (result.exit_code, result.stderr) == (1, "Error: nobody answers\n")


def test_ctrl_c_during_the_first_reading_ends_quietly() -> None:
    result = watched([])
    assert (result.exit_code, result.output) == (0, "")


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Give the commands a terminal of 10 lines, and return what is written to it."""
    terminal = Terminal(force_terminal=True, width=60, height=10, record=True, color_system=None)
    monkeypatch.setattr("mgpu.cli.watching.Terminal", lambda: terminal)
    return lambda: terminal.export_text()


def test_on_a_terminal_the_output_is_cut_at_the_end_of_the_screen(screen: Callable[[], str]) -> None:
    result = watched(["\n".join(map(str, range(100)))])
    assert result.exit_code == 0
    shown = screen().splitlines()
    assert shown[1:] == [*map(str, range(8)), "…"]
    assert "Ctrl-C ends" in shown[0]


def test_on_a_terminal_an_error_is_shown_above_the_last_output(screen: Callable[[], str]) -> None:
    watched(["a", click.ClickException("nobody answers")])
    assert screen().splitlines()[-2:] == ["Error: nobody answers", "a"]


def test_a_look_that_takes_long_is_followed_by_a_long_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    now = iter(range(0, 1000, 5))
    monkeypatch.setattr("mgpu.cli.watching.time.monotonic", lambda: float(next(now)))
    left = iter(["a", "b"])

    def read() -> Reading[str]:
        value = next(left, None)
        if value is None:
            raise KeyboardInterrupt
        return Reading(value, "")

    show_once_or_watch(read, OUTPUT, 1.0, slept.append)
    assert slept == [1.0, 20.0]
