"""The command `mgpu doctor`: checks an installation, and prints each finding with its remedy.

Scripts read the names of the checks, the levels and the keys of the JSON, so these must not change.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from mgpu.cli import completion
from mgpu.cli.cluster_objects import paused_garbage_collection
from mgpu.cli.connection import Connection, read_installed_settings, report_api_errors
from mgpu.cli.doctor.admission import check_admission, check_bindings
from mgpu.cli.doctor.agents import check_nodes
from mgpu.cli.doctor.callers import check_callers
from mgpu.cli.doctor.cards import check_capacity
from mgpu.cli.doctor.claims import check_claims
from mgpu.cli.doctor.collection import read_installation
from mgpu.cli.doctor.commands import check_commands
from mgpu.cli.doctor.components import check_custom_resources, check_installed, check_single_scheduler, check_versions
from mgpu.cli.doctor.installation import Finding, Installation, Level
from mgpu.cli.doctor.kueue import check_kueue
from mgpu.cli.doctor.records import check_records
from mgpu.cli.kubectl_options import cluster_options
from mgpu.cli.sources import installation_option, output_option
from mgpu.cli.watching import JSON, TABLE, YAML
from mgpu.kube import Api
from mgpu.model.errors import BadObject, Problem
from mgpu.presentation.plain_text import one_line
from mgpu.presentation.terminal import Terminal, show_json, show_yaml
from mgpu.settings import Settings, load_settings

_STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.FAILED: "bold red"}

EXAMPLES = """
\b
Examples:
  kubectl mgpu doctor
  kubectl mgpu doctor --mgpu-namespace gpu-sharing --try-in team-a
  kubectl mgpu doctor -o json | jq '.checks[] | select(.status != "ok")'
"""


@click.command(epilog=EXAMPLES)
@installation_option("-n", "--namespace")
@click.option(
    "--try-in",
    default="default",
    show_default=True,
    shell_complete=completion.namespaces,
    help="The namespace for dry runs.",
)
@cluster_options
@click.option("--config", type=click.Path(path_type=Path), help="Settings file (YAML).  [default: the cluster's]")
@output_option(TABLE, JSON, YAML)
def command(installation: str, try_in: str, connection: Connection, config: Path | None, output: str) -> None:
    """Check an installation, and print each finding with its remedy.

    Nothing is written: a Pod and a Binding that must be denied are created as dry runs, and everything else is read.
    Apart from Secrets, what you may not read is reported, but is not a failure. The exit code is 1 if a check fails or
    the cluster cannot be read, and 2 if an option, the kubeconfig or the --config file is invalid.
    """
    if try_in == installation:
        text = f"must be another namespace than {installation}, which mgpu's webhooks exempt"
        raise BadObject([Problem("--try-in", text)])
    with report_api_errors(), paused_garbage_collection():
        api = connection.connect(20.0, Api)
        settings, finding = _read_settings(api, config, installation)
        findings = [finding, *diagnose(read_installation(api, installation, settings, try_in))]
    failed = any(finding.level is Level.FAILED for finding in findings)
    if output in (JSON, YAML):
        rows = [{"check": f.check, "status": f.level, "message": f.message, "remedy": f.remedy} for f in findings]
        show_data = show_json if output == JSON else show_yaml
        show_data({"ok": not failed, "checks": rows})
    else:
        _print(findings)
    sys.exit(1 if failed else 0)


def _read_settings(api: Api, config: Path | None, namespace: str) -> tuple[Settings, Finding]:
    """Return the settings for the checks, and the finding about them. Raises BadObject for an invalid --config file."""
    try:
        settings, source = read_installed_settings(api, config, namespace)
    except BadObject as error:
        if config:
            raise
        text = f"no process starts with these settings; the checks below use the defaults: {error}"
        remedy = "correct mgpu.yaml in your overlay, and apply it again"
        return load_settings(), Finding("settings", Level.FAILED, text, remedy)
    return settings, Finding("settings", Level.OK, source)


def diagnose(installation: Installation) -> list[Finding]:
    """Return the findings of all checks. If mgpu is not installed in the namespace, no further check runs."""
    found = list(check_installed(installation))
    if not found:
        found = [
            *check_custom_resources(installation),
            *check_admission(installation),
            *check_callers(installation),
            *check_records(installation),
            *check_single_scheduler(installation),
        ]
        failed = {finding.check for finding in found if finding.level is Level.FAILED}
        found += [
            *check_bindings(installation, failed),
            *check_claims(installation),
            *check_commands(installation),
            *check_capacity(installation),
            *check_nodes(installation),
            *check_versions(installation),
            *check_kueue(installation),
        ]
    hidden = sorted(what for what in installation.hidden if not what.startswith("secret"))
    if hidden:
        text = f"you may not read {', '.join(hidden)}, so some checks are incomplete"
        found.append(Finding("rights", Level.WARNING, text, "run doctor as an administrator"))
    return found


def _print(findings: Sequence[Finding]) -> None:
    console = Terminal()
    if not console.is_terminal:  # Print one line for each finding, for programs such as grep.
        for f in findings:
            line = f"{f.check}: {f.message}{f'; do: {f.remedy}' if f.remedy else ''}"
            click.echo(f"{f.level:<8} {one_line(line)}")
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for f in findings:
        text = Text(one_line(f.message))
        if f.remedy:
            text.append(f"\n→ {one_line(f.remedy)}", style="grey50")
        table.add_row(Text(f.level, style=_STYLES[f.level]), f.check, text)
    console.print(table)
