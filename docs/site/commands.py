"""Generates docs/commands.md from the help texts of all commands.

python docs/site/commands.py            write the page
python docs/site/commands.py --check    fail if the page differs from the generated one
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from mgpu.cli.inspect_gpushare import main as inspect_gpushare
from mgpu.cli.kubectl import plugin as kubectl_mgpu
from mgpu.cli.main import main

PAGE = Path(__file__).resolve().parents[1] / "commands.md"
HEAD = """# Commands

The help texts of all commands, as `--help` prints them. `python docs/site/commands.py` generates this page.
[kubectl.md](kubectl.md) describes the commands that read a cluster, and [settings.md](settings.md) the settings that
the options of the three processes override.
"""
WIDTH = 100


def render() -> str:
    """Return the whole page."""
    commands = {"mgpu": main, "kubectl mgpu": kubectl_mgpu, "kubectl inspect gpushare": inspect_gpushare}
    parts = [HEAD]
    for name, command in commands.items():
        # `kubectl mgpu` has the same commands as `mgpu`, but fewer.
        parts += _sections(name, command, deep=command is main)
    return "\n".join(parts)


def _sections(name: str, command: click.Command, *, deep: bool) -> Iterator[str]:
    context = click.Context(command, info_name=name, terminal_width=WIDTH, max_content_width=WIDTH)
    yield f"## {name}\n\n```text\n{command.get_help(context)}\n```\n"
    if deep and isinstance(command, click.Group):
        for word in command.list_commands(context):
            if found := command.get_command(context, word):
                yield from _sections(f"{name} {word}", found, deep=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        if not PAGE.exists() or PAGE.read_text() != render():
            sys.exit(f"error: {PAGE.name} is out of date, run `python docs/site/commands.py`")
    elif sys.argv[1:]:
        sys.exit("usage: python docs/site/commands.py [--check]")
    else:
        PAGE.write_text(render())
