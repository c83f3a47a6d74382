"""The option `--version` of the commands `mgpu` and `kubectl mgpu`: the version and the git commit."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from mgpu.version import own_version

F = TypeVar("F", bound=Callable[..., Any])


def version_option(command: F) -> F:
    return click.option(
        "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show, help="Show the version and exit."
    )(command)


def _show(context: click.Context, _parameter: click.Parameter, given: bool) -> None:
    if given and not context.resilient_parsing:
        from mgpu.commit import describe_build  # it starts git in a checkout, and no other command needs it

        click.echo(f"mgpu {own_version()} ({describe_build()})")
        context.exit()
