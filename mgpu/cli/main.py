"""The command `mgpu`, whose subcommands are the entry points of the group `mgpu.commands` (`pyproject.toml`).

A subcommand is imported only when it is called, so that `mgpu --help` is fast and no process imports the libraries of
another process. This module must not import the packages of the processes, so it finds the commands by their entry
points.
"""

import gc
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from mgpu.cli.version_option import version_option
from mgpu.model.errors import BadObject
from mgpu.presentation.plain_text import one_line

GROUP = "mgpu.commands"
SUMMARIES = {
    "webhook": "Serve the admission webhook: /mutate and /validate.",
    "scheduler": "Serve the scheduler: binding admission and extender.",
    "deviceplugin": "Run the node agent: kubelet device plugin and card inventory.",
    "playground": "Keep a one-machine cluster up for kubectl, until Ctrl-C.",
    "demo": "Run sample pods through the whole chain and show the cards.",
    "simulate": "Place the pods of a file without a cluster.",
    "inspect": "Show nodes, cards and the pods that hold them.",
    "explain": "Show why a pod waits, for each node and card, or where its cards are.",
    "top": "Show how full the cards are, and which pods hold the most.",
    "doctor": "Check an installation, and show how to repair it.",
    "completion": "Print a script that completes words on the command line.",
}
"""The summary of each subcommand, in the order of `mgpu --help`. The summaries are not read from the commands, because
that would import the commands."""


class BadInput(click.ClickException):
    """The input of a command is invalid. click prints the message in one line and exits with code 2."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        click.echo(one_line(self.message), file=file, err=file is None)


class Commands(click.Group):
    """A group that imports a subcommand when it is called, and converts BadObject to BadInput."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        found = _entry_points()
        return [*(name for name in SUMMARIES if name in found), *sorted(found.keys() - SUMMARIES.keys())]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        entry = _entry_points().get(cmd_name)
        return _load(entry) if entry else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, SUMMARIES.get(name, "")) for name in self.list_commands(ctx)])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete a subcommand or an option. click's own method would import all subcommands for their summaries."""
        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        found = [CompletionItem(name, help=SUMMARIES.get(name)) for name in names]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BadObject as error:
            raise BadInput(str(error)) from error


def _entry_points() -> dict[str, EntryPoint]:
    """Return the commands whose packages are installed. The production image has no `playground`."""
    found = entry_points(group=GROUP)
    present = {package for package in {_package(entry) for entry in found} if find_spec(package) is not None}
    return {entry.name: entry for entry in found if _package(entry) in present}


def _package(entry: EntryPoint) -> str:
    return entry.module.partition(".")[0]


def _load(entry: EntryPoint) -> click.Command:
    gc.disable()  # Hardly anything of what an import makes is garbage, and the collector takes a tenth of its time.
    try:
        command: click.Command = entry.load()
    except ModuleNotFoundError as error:
        _report_missing(entry, error)
    finally:
        gc.enable()
    return command


def _report_missing(entry: EntryPoint, error: ModuleNotFoundError) -> NoReturn:
    """Report in one line that a library is missing, which the extra `playground` would install.

    If a module of mgpu itself is missing, that is a bug, and the error is raised again with its traceback.
    """
    if (error.name or "").split(".")[0] in {"mgpu", entry.module.split(".")[0]}:
        raise error
    message = f"mgpu {entry.name} needs {error.name!r}, which is not installed: pip install 'mgpu[playground]'"
    raise click.ClickException(message) from error


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@version_option
def main() -> None:
    """Share GPUs by the card on Kubernetes.

    \b
    Examples:
      mgpu inspect                        which pod holds which card of the cluster
      mgpu explain my-pod                 why a pod waits, or where its cards are
      mgpu doctor                         check an installation, and show how to repair it
    """


if __name__ == "__main__":
    main()
