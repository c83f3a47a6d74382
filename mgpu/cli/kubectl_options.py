"""The options of kubectl that say to which cluster a command connects, and with whose rights.

They have the names and the meaning that they have in kubectl.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import click

from mgpu.cli import completion
from mgpu.cli.connection import Connection

_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)", re.ASCII)
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


class Duration(click.ParamType[float]):
    """A duration as kubectl reads it: `90`, `90s`, `1m30s`. The value is in seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        text = str(value)
        if re.fullmatch(r"\d+", text, re.ASCII):
            return float(text)
        if not text or _DURATION.sub("", text):
            self.fail(f"{value!r} is not a number of seconds, or numbers with a unit such as 1s, 2m or 3h", param, ctx)
        return sum(float(number) * _UNITS[unit] for number, unit in _DURATION.findall(text))


_OPTIONS = (
    click.option(
        "--kubeconfig",
        default="",
        type=click.Path(),
        help="The kubeconfig file to use.  [default: as kubectl chooses it]",
    ),
    click.option(
        "--context",
        default="",
        shell_complete=completion.contexts,
        help="The kubeconfig context to use.  [default: the current one]",
    ),
    click.option(
        "--as", "user", default="", metavar="USER", help="The user whose rights the requests have, for administrators."
    ),
    click.option("--as-group", "groups", multiple=True, metavar="GROUP", help="A group of that user; may be repeated."),
    click.option(
        "--request-timeout",
        type=Duration(),
        help="How long to wait for an answer of the API server, such as 5s; 0 is without limit.",
    ),
)


def cluster_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add kubectl's options that connect to a cluster. The command gets them as the argument `connection`."""

    @functools.wraps(command)
    def with_connection(
        kubeconfig: str,
        context: str,
        user: str,
        groups: tuple[str, ...],
        request_timeout: float | None,
        **own: object,
    ) -> None:
        if groups and not user:
            raise click.UsageError("--as-group needs --as")
        command(connection=Connection(kubeconfig, context, user, groups, request_timeout), **own)

    decorated: Callable[..., None] = with_connection
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated
