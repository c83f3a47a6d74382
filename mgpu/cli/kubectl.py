"""`kubectl mgpu`: those commands of `mgpu` that look at a cluster, as a plugin of kubectl."""

import click

from mgpu.cli.main import Commands

NAMES = ("inspect", "explain", "top", "doctor")


class Plugin(Commands):
    """The same commands, those of `NAMES` alone."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in super().list_commands(ctx) if name in NAMES]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, cmd_name) if cmd_name in NAMES else None


@click.command(cls=Plugin, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="mgpu", message="mgpu %(version)s")
def plugin() -> None:
    """Look at the GPUs of a cluster by the card. Nothing is written.

    \b
    Examples:
      kubectl mgpu inspect                    who holds which card
      kubectl mgpu explain train-0 -n team    why it waits, or where its cards are
      kubectl mgpu top --sort memory          how full the cards are, who holds most
      kubectl mgpu doctor                     is the installation well; exit code 1 where not
    """


def main() -> None:
    """The entry point of the program `kubectl-mgpu`, which kubectl finds on the PATH."""
    plugin(prog_name="kubectl mgpu")


if __name__ == "__main__":
    main()
