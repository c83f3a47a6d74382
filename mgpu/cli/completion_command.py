"""The command `mgpu completion`, and how `kubectl mgpu` completes.

click completes the commands of this project, and has the scripts for the shells. kubectl completes `kubectl mgpu …` by
the program `kubectl_complete-mgpu` on the PATH. It gets the words after `kubectl mgpu`, and answers as programs do that
are built with the library Cobra: a line for each word, with a tab before its description, and a last line with a colon
and a number, which says what the shell does with the words.
"""

import sys
from collections.abc import Sequence

import click
from click.shell_completion import CompletionItem, ShellComplete, get_completion_class

from mgpu.presentation.plain_text import one_line

_NO_FILES = 4
"""The number by which a program that is built with Cobra says that the word is no file name."""
_FILES = 0
_KUBECTL = "kubectl"
_SCRIPT = """#!/bin/sh
# kubectl calls this program to complete the words after `kubectl mgpu`. Install it on the PATH as
# kubectl_complete-mgpu, and make it executable.
exec kubectl-mgpu __complete "$@"
"""

EXAMPLES = """
\b
Examples:
  source <(mgpu completion bash)                                            # ~/.bashrc
  source <(mgpu completion zsh)                                             # ~/.zshrc, after compinit
  mgpu completion fish | source                                             # ~/.config/fish/config.fish
  kubectl mgpu completion kubectl > ~/.local/bin/kubectl_complete-mgpu      # and chmod +x
"""


@click.command(epilog=EXAMPLES)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish", _KUBECTL]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print a script that completes the words of this program, for a shell or for kubectl.

    The scripts for bash, zsh and fish complete the words after `mgpu` or `kubectl-mgpu`. The words after `kubectl mgpu`
    are completed by kubectl itself, which asks the program kubectl_complete-mgpu on the PATH. pip, pipx and uv install
    that program; after an installation by Krew, write it yourself, as in the last example.
    """
    if shell == _KUBECTL:
        click.echo(_SCRIPT, nl=False)
        return
    root = ctx.find_root()
    program = (root.info_name or "mgpu").replace(" ", "-")
    maker = get_completion_class(shell)
    assert maker is not None
    click.echo(maker(root.command, {}, program, completion_variable(program)).source())


def completion_variable(program: str) -> str:
    """Return the variable by which a shell asks a program for its completions, as click names it."""
    return f"_{program}_COMPLETE".replace("-", "_").replace(".", "_").upper()


def complete(group: click.Command, words: Sequence[str]) -> None:
    """Print the completions of the last word as programs do that are built with Cobra."""
    *before, incomplete = words or ("",)
    found = ShellComplete(group, {}, "kubectl mgpu", "").get_completions(list(before), incomplete)
    names = [item for item in found if item.type == "plain"]
    for item in names:
        click.echo(_line(item))
    is_file = any(item.type in ("file", "dir") for item in found)
    click.echo(f":{_FILES if is_file else _NO_FILES}")


def _line(item: CompletionItem) -> str:
    return f"{item.value}\t{one_line(item.help)}" if item.help else str(item.value)


def main() -> None:
    """The program `kubectl_complete-mgpu`."""
    from mgpu.cli.kubectl import plugin

    complete(plugin, sys.argv[1:])
