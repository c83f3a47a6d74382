"""The kubectl plugin `kubectl mgpu`, with the commands of `mgpu` that only read a cluster.

`pyproject.toml` installs it as the program `kubectl-mgpu`, which kubectl finds on the PATH. To add a command of `mgpu`
to the plugin, add its name to `NAMES`.
"""

import sys

import click

from mgpu.cli.completion_command import complete, completion_variable
from mgpu.cli.main import Commands
from mgpu.cli.version_option import version_option

NAMES = ("inspect", "explain", "top", "doctor", "completion")


class Plugin(Commands):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in super().list_commands(ctx) if name in NAMES]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, cmd_name) if cmd_name in NAMES else None


@click.command(cls=Plugin, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@version_option
def plugin() -> None:
    """Show the GPUs of a cluster by the card. Nothing is written.

    \b
    Examples:
      kubectl mgpu inspect                    which pod holds which card
      kubectl mgpu explain train-0 -n team    why a pod waits, or where its cards are
      kubectl mgpu top --sort memory          how full the cards are, which pods hold most
      kubectl mgpu doctor                     check the installation; exit code 1 if a check fails
    """


def main() -> None:
    if sys.argv[1:2] == ["__complete"]:  # As in programs that are built with Cobra, which kubectl's users know.
        complete(plugin, sys.argv[2:])
        return
    arguments = sys.argv[1:] or ["--help"]  # As kubectl, which then ends with code 0.
    plugin(arguments, prog_name="kubectl mgpu", complete_var=completion_variable("kubectl-mgpu"))


if __name__ == "__main__":
    main()
