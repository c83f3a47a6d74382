"""`mgpu doctor`: looks, checks, and says what to do; one line for each finding."""

import sys
from collections.abc import Sequence
from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from mgpu.cli.connecting import NAMESPACE, answering, connecting, settings_of
from mgpu.cli.doctor.admission import admission, bindings
from mgpu.cli.doctor.agents import of_nodes
from mgpu.cli.doctor.callers import callers
from mgpu.cli.doctor.cards import given_out
from mgpu.cli.doctor.looking import look
from mgpu.cli.doctor.parts import custom_resources, installed, one_decides, versions
from mgpu.cli.doctor.records import proven
from mgpu.cli.doctor.seen import Finding, Level, Seen
from mgpu.cli.reading import uncollected
from mgpu.kube import Api
from mgpu.model.errors import BadObject, Problem
from mgpu.presentation.plain_text import one_line
from mgpu.presentation.terminal import Terminal, show_json
from mgpu.settings import Settings, load_settings

_STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.FAILED: "bold red"}

EXAMPLES = """
\b
Examples:
  kubectl mgpu doctor
  kubectl mgpu doctor -n gpu-sharing --try-in team-a
  kubectl mgpu doctor -o json | jq '.checks[] | select(.status != "ok")'
"""


@click.command(epilog=EXAMPLES)
@click.option("-n", "--namespace", default=NAMESPACE, show_default=True, help="Where the suite is installed.")
@click.option("--try-in", default="default", show_default=True, help="Namespace of what is tried (dry runs).")
@connecting
@click.option("--config", type=click.Path(path_type=Path), help="Settings file (YAML).  [default: the cluster's]")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def command(namespace: str, try_in: str, kubeconfig: str, context: str, config: Path | None, output: str) -> None:
    """Check an installation: one line for each finding, and what to do.

    Nothing is written: a Pod and a Binding that must be denied are created as dry runs, all else is read. What you may
    not read is said, and not taken for a fault. Exit code 1 where a check failed, or the cluster does not answer.
    """
    if try_in == namespace:
        text = f"must be another namespace than {namespace}, which the suite's webhooks leave alone"
        raise BadObject([Problem("--try-in", text)])
    with answering(), uncollected():
        api = Api.connect(kubeconfig, context=context, timeout=20.0)
        settings, first = _settings(api, config, namespace)
        findings = [first, *diagnose(look(api, namespace, settings, try_in))]
    failed = any(finding.level is Level.FAILED for finding in findings)
    if output == "json":
        rows = [{"check": f.check, "status": f.level, "message": f.message, "remedy": f.remedy} for f in findings]
        show_json({"ok": not failed, "checks": rows})
    else:
        _print(findings)
    sys.exit(1 if failed else 0)


def _settings(api: Api, config: Path | None, namespace: str) -> tuple[Settings, Finding]:
    """Those that the checks go by. Raises BadObject for a file that was named."""
    try:
        settings, source = settings_of(api, config, namespace)
    except BadObject as error:
        if config:
            raise
        text = f"no process starts with these, and the checks below go by the defaults: {error}"
        remedy = "mend mgpu.yaml in your overlay, and apply it again"
        return load_settings(), Finding("settings", Level.FAILED, text, remedy)
    return settings, Finding("settings", Level.OK, source)


def diagnose(seen: Seen) -> list[Finding]:
    """All findings: at least one of each check, as far as it could be looked at."""
    found = list(installed(seen))
    if not found:
        found = [*custom_resources(seen), *admission(seen), *callers(seen), *proven(seen), *one_decides(seen)]
        told = {finding.check for finding in found if finding.level is Level.FAILED}
        found += [*bindings(seen, told), *given_out(seen), *of_nodes(seen), *versions(seen)]
    hidden = sorted(what for what in seen.hidden if not what.startswith("secret"))
    if hidden:
        text = f"you may not look at {', '.join(hidden)}, so not all of this is known"
        found.append(Finding("rights", Level.WARNING, text, "ask somebody who may (an administrator)"))
    return found


def _print(findings: Sequence[Finding]) -> None:
    console = Terminal()
    if not console.is_terminal:  # for grep: one line is one finding
        for f in findings:
            said = f"{f.check}: {f.message}{f'; do: {f.remedy}' if f.remedy else ''}"
            click.echo(f"{f.level:<8} {one_line(said)}")
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
