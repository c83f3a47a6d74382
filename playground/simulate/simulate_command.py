"""The command line of `mgpu simulate` and its output as text."""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import orjson
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from mgpu.cli.process_settings import read_settings
from mgpu.presentation.card_map import card_map
from mgpu.settings import CARD_POLICIES, NODE_POLICIES
from playground.simulate.documents import read
from playground.simulate.outcomes import Outcome, Result, result_json
from playground.simulate.pipeline import simulate
from playground.simulate.world import read_world

EXAMPLES = """
\b
Examples:
  mgpu simulate nodes.yaml pods.yaml
  mgpu simulate cluster.yaml --card-policy spread -o json
  kubectl get nodes,devices,pods -A -o yaml | mgpu simulate - --fail-on-pending
  mgpu simulate openb --help
  mgpu simulate right-sizing --help
"""


_COMMANDS = {
    "openb": "Measure what share of the GPUs a policy allocates while the pods of a trace arrive.",
    "right-sizing": "Report what would fit if shares were as large as what pods have used.",
}


class CommandWithOthers(click.Command):
    """The command `mgpu simulate`, which runs another command if its first argument is the name of one.

    A file with such a name has to be given as `./openb`.
    """

    def other(self, name: str) -> click.Command | None:
        """Return the command with this name, or None. It is imported here, since a simulation of files needs none."""
        if name == "openb":
            from playground.simulate.openb.openb_command import command as openb

            return openb
        if name == "right-sizing":
            from playground.simulate.right_sizing.right_sizing_command import command as right_sizing

            return right_sizing
        return None

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        other = self.other(args[0]) if args else None
        if other is not None:
            return other.make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        return super().invoke(ctx) if ctx.command is self else ctx.command.invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.command(cls=CommandWithOthers, epilog=EXAMPLES)
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--config", type=click.Path(path_type=Path), help="Settings file (YAML).")
@click.option("--card-policy", type=click.Choice(CARD_POLICIES), help="Overrides cardPolicy of the settings.")
@click.option("--node-policy", type=click.Choice(NODE_POLICIES), help="Overrides nodePolicy of the settings.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
@click.option("--fail-on-pending", is_flag=True, help="The exit code is 1 if a pod finds no node.")
def command(
    files: tuple[str, ...],
    config: Path | None,
    card_policy: str | None,
    node_policy: str | None,
    output: str,
    *,
    fail_on_pending: bool,
) -> None:
    """Show, without a cluster, on which nodes of the FILEs their pods would be placed, or why they would not fit.

    Files hold Kubernetes objects (Node, Device, Pod, MtgpuPod, Deployment, StatefulSet, Job, ResourceClaim,
    ResourceClaimTemplate, DeviceClass, List) in YAML or JSON; `-` is standard input. Pods with spec.nodeName, MtgpuPods
    with status.BoundDeviceID and claims with status.allocation have their cards already; the other pods are submitted
    in order. The exit code is 2 if the input cannot be read. Otherwise it is 0, unless --fail-on-pending is given.
    """
    settings = read_settings(config, os.environ, {"card_policy": card_policy, "node_policy": node_policy})
    world = read_world(read(files, sys.stdin), _note, settings)
    result = simulate(world, settings, _note)
    if output == "json":
        click.echo(orjson.dumps(result_json(result), option=orjson.OPT_INDENT_2).decode())
    else:
        Console(highlight=False).print(_render(result), crop=False)
    if fail_on_pending and any(outcome.pending for outcome in result.outcomes):
        raise SystemExit(1)


def _note(line: str) -> None:
    click.echo(line, err=True)


def _render(result: Result) -> Group:
    widest = max((len(_name(outcome)) for outcome in result.outcomes), default=0)
    lines = [line for outcome in result.outcomes for line in _lines(outcome, widest)]
    return Group(*lines, Text(), card_map(result.nodes))


def _lines(outcome: Outcome, width: int) -> Iterator[RenderableType]:
    """Yield a line with the pod and its node. If the pod is denied or pending, a line for each reason follows."""
    pod = _name(outcome).ljust(width)
    if outcome.denied:
        yield Text.assemble(f"{pod}   ", ("denied", "red"))
        yield from _reasons(map(str, outcome.denied))
    elif outcome.pending:
        yield Text.assemble(f"{pod}   ", (outcome.phase.lower() or "pending", "yellow"))
        prefix = f"{outcome.reason}: " if outcome.reason else ""
        reasons = [f"{node}: {prefix}{reason}" for node, reason in outcome.rejections.items()]
        yield from _reasons(reasons or ["there are no nodes"])
    else:
        given = (f"{name} on {_devices(given)}" for name, given in outcome.containers.items())
        where = "; ".join(given) if outcome.dialect else "requests no GPU"
        yield Text.assemble(f"{pod}   ", (outcome.node, "green"), f"   {where}")
        yield from _reasons(_claim_lines(outcome))


def _name(outcome: Outcome) -> str:
    return " ".join(filter(None, (outcome.kind, outcome.pod.key)))


def _reasons(reasons: Iterable[str]) -> Iterator[Padding]:
    return (Padding(Text(reason), (0, 0, 0, 4)) for reason in reasons)


def _claim_lines(outcome: Outcome) -> Iterator[str]:
    """Yield a line for each claim of a pod with its results, and one for the environment of each of its containers."""
    for claim in outcome.claims:
        results = ", ".join(_result(row) for row in claim["results"])
        yield f"claim {claim['name']}: {results or 'no device of mgpu'}"
    for name, given in outcome.containers.items() if outcome.claims else ():
        yield f"{name} sees {' '.join(f'{key}={value}' for key, value in given['env'].items())}"


def _result(row: Mapping[str, Any]) -> str:
    consumed = ", ".join(f"{name} {amount}" for name, amount in row["consumedCapacity"].items())
    return f"{row['request']} on {row['device']} ({consumed})"


def _devices(given: Mapping[str, Any]) -> str:
    """Return a description of a container's devices, such as `cards 0,1 and rdma 0` or `2g.20gb of card 0`."""
    cards = given["cards"]
    if "profile" in given:
        on = sorted({*cards})
        several = f"{len(cards)} × " if len(cards) > 1 else ""
        return f"{several}{given['profile']} of {'card' if len(on) == 1 else 'cards'} {','.join(map(str, on))}"
    kinds = {"card" if len(cards) == 1 else "cards": cards, **given.get("others", {})}
    return " and ".join(f"{kind} {','.join(map(str, indexes))}" for kind, indexes in kinds.items() if indexes)
