"""`mgpu`: one command whose sub-commands are the entry points of the group `mgpu.commands`.

They are imported only when they run, so that help is immediate and no process loads another's libraries; and they are
found by name, so that this module imports nothing of the layers above it.
"""

from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any, NoReturn

import click

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
    "inspect": "Show nodes, cards and who holds what.",
    "explain": "Why a pod waits, node by node and card by card, or where its cards are.",
    "top": "Show how full the cards are, and who holds most.",
    "doctor": "Check an installation, and say what to do where it is not well.",
}
"""In the order of the help text. The text is here because reading it from the commands would import all of them."""


class BadInput(click.ClickException):
    """Wrong input: exit code 2, and the message as it is, on one line."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        click.echo(one_line(self.message), file=file, err=file is None)


class Commands(click.Group):
    """Loads a sub-command when it is called, and turns BadObject from any of them into BadInput."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        found = _entry_points()
        return [*(name for name in SUMMARIES if name in found), *sorted(found.keys() - SUMMARIES.keys())]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        entry = _entry_points().get(cmd_name)
        return _load(entry) if entry else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, SUMMARIES.get(name, "")) for name in self.list_commands(ctx)])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BadObject as error:
            raise BadInput(str(error)) from error


def _entry_points() -> dict[str, EntryPoint]:
    """Return the commands whose packages are installed: the production image has no `playground`."""
    found = entry_points(group=GROUP)
    present = {package for package in {_package(entry) for entry in found} if find_spec(package) is not None}
    return {entry.name: entry for entry in found if _package(entry) in present}


def _package(entry: EntryPoint) -> str:
    return entry.module.partition(".")[0]


def _load(entry: EntryPoint) -> click.Command:
    try:
        command: click.Command = entry.load()
    except ModuleNotFoundError as error:
        _explain(entry, error)
    return command


def _explain(entry: EntryPoint, error: ModuleNotFoundError) -> NoReturn:
    """A library of an extra is not installed: say so in one line. One of our own modules missing is a bug: raise."""
    if (error.name or "").split(".")[0] in {"mgpu", entry.module.split(".")[0]}:
        raise error
    message = f"mgpu {entry.name} needs {error.name!r}, which is not installed: pip install 'mgpu[playground]'"
    raise click.ClickException(message) from error


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="mgpu", message="mgpu %(version)s")
def main() -> None:
    """Share GPUs by the card on Kubernetes.

    \b
    Examples:
      mgpu inspect                        who holds which card of the cluster
      mgpu explain my-pod                 why a pod waits, or where its cards are
      mgpu doctor                         what is wrong with an installation, and what to do
    """


if __name__ == "__main__":
    main()
