"""Runs `mgpu explain`, which explains why a pod waits, node by node and card by card, or which cards it has.

The scheduler makes the explanation, or this command does so from lists of the API server (`scheduler.listed_cluster`).
It writes nothing. The keys of its JSON must not change, because scripts rely on them (docs/kubectl.md).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import click
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mgpu.cli import completion
from mgpu.cli.connection import current_namespace, report_api_errors
from mgpu.cli.scheduler_source import Freshness, SchedulerSource
from mgpu.cli.sources import Reading, ReadingOptions, Sources, reading_options
from mgpu.cli.watching import JSON, TABLE, WIDE, YAML, Output, show_once_or_watch
from mgpu.dialects import mtgpu
from mgpu.kube import Api, ApiError
from mgpu.model.cards import CardState
from mgpu.model.errors import BadObject, Problem
from mgpu.model.quantities import format_bytes, format_core
from mgpu.model.resource_claims import API as RESOURCE_API
from mgpu.presentation.card_views import percent
from mgpu.presentation.explanations import CardRow, Explanation, NodeRow
from mgpu.presentation.gang_views import gang_json
from mgpu.presentation.plain_text import one_line

Raw = Mapping[str, Any]
_CLAIM = "ResourceClaim"
_KINDS = {
    **dict.fromkeys(("pod", "pods", "po"), "Pod"),
    **dict.fromkeys(("mtgpupod", "mtgpupods"), mtgpu.KIND),
    **dict.fromkeys(("claim", "claims", "resourceclaim", "resourceclaims"), _CLAIM),
}
# The text lists at most this many holders of a card, nodes with an equal answer, and different reasons.
_MOST_HOLDERS = 2
_MOST_NAMES = 4
_MOST_REASONS = 12
_DIM = "grey50"
_GOOD = "green"
_BAD = "yellow"

EXAMPLES = """
\b
Examples:
  kubectl mgpu explain train-0
  kubectl mgpu explain train-0 -n team-a --node gpu-7
  kubectl mgpu explain mtgpupod/notebook
  kubectl mgpu explain claim/train-0-gpu-x7k2p
  kubectl mgpu explain train-0 -o json | jq '.nodes[] | select(.reason == null)'
"""


@click.command(epilog=EXAMPLES)
@click.argument("names", nargs=-1, required=True, metavar="[TYPE[/]]NAME", shell_complete=completion.explained)
@click.option(
    "-n",
    "--namespace",
    default="",
    shell_complete=completion.namespaces,
    help="Namespace of the pod.  [default: the one that kubectl uses]",
)
@click.option(
    "--node",
    "nodes",
    multiple=True,
    shell_complete=completion.nodes,
    help="Evaluate only this node, and list its cards; may be repeated.",
)
@reading_options(TABLE, WIDE, JSON, YAML)
def command(
    names: tuple[str, ...],
    namespace: str,
    nodes: tuple[str, ...],
    options: ReadingOptions,
) -> None:
    """Explain why a pod waits, node by node and card by card, or where its cards are.

    TYPE is pod (the default), mtgpupod or claim (a ResourceClaim), as in `claim/NAME` or `claim NAME`. With -o wide, no
    list is shortened, and cards have their models and UUIDs. The reasons are those of mgpu's engine at this
    moment. Other reasons (taints, selectors, cpu, volumes) are shown as the scheduler wrote them on the pod. The exit
    code is 1 if the object or a node of --node does not exist, or the cluster does not answer. It is 2 if the arguments
    or the settings are invalid.
    """
    kind, name = _kind(names)
    sources = Sources(options)
    connection = options.connection
    namespace = namespace or current_namespace(connection.kubeconfig, connection.context)

    def read() -> Reading[Explanation] | None:
        with report_api_errors():
            raw = _read(sources.api, kind, namespace, name)
        own = raw["spec"].get("nodeName")
        if own and any(name != own for name in nodes):
            raise BadObject([Problem("--node", f"{kind} {name} is on node {own}; --node is for pods without a node")])
        return sources.read(
            lambda scheduler: _ask(scheduler, kind, raw, nodes), lambda: _explain(sources, kind, raw, nodes)
        )

    is_wide = options.format == WIDE
    prints = Output(_json, lambda found: _text(found, is_wide=is_wide), options.format)
    show_once_or_watch(read, prints, options.interval)


def _ask(scheduler: SchedulerSource, kind: str, raw: Raw, nodes: tuple[str, ...]) -> tuple[Explanation, Freshness]:
    meta = raw["metadata"]
    answer, freshness = scheduler.explanation(kind, meta["namespace"], meta["name"], nodes)
    return answer.explanation, freshness


def _explain(sources: Sources, kind: str, raw: Raw, nodes: tuple[str, ...]) -> Explanation:
    from scheduler.listed_cluster import explain

    return explain(sources.api, sources.settings(), kind, raw, nodes)


def _kind(names: Sequence[str]) -> tuple[str, str]:
    """Return the kind and the name of arguments such as `claim/notebook` or `claim notebook`. Raises BadObject."""
    type_, slash, rest = "/".join(names).partition("/")
    if not slash:
        return "Pod", type_
    if type_.lower() not in _KINDS or not rest or "/" in rest:
        text = "must be NAME, pod/NAME, mtgpupod/NAME or claim/NAME"
        raise BadObject([Problem(" ".join(names), text)])
    return _KINDS[type_.lower()], rest


def _collection(kind: str) -> tuple[str, str]:
    """Return the path of the API group of a kind, and the plural name of the kind."""
    if kind == mtgpu.KIND:
        return f"/apis/{mtgpu.API_VERSION}", "mtgpupods"
    return (f"/apis/{RESOURCE_API}", "resourceclaims") if kind == _CLAIM else ("/api/v1", "pods")


def _read(api: Api, kind: str, namespace: str, name: str) -> Raw:
    prefix, plural = _collection(kind)
    try:
        return api.get(f"{prefix}/namespaces/{quote(namespace, safe='')}/{plural}/{quote(name, safe='')}")
    except ApiError as error:
        # The API server gives a reason if the object is missing, and none if its type is.
        if error.status == 404 and not error.reason:
            missing = "its API is not served" if kind == _CLAIM else "their CRD is missing"
            raise click.ClickException(f"this cluster has no {kind}s: {missing}") from error
        raise


def _json(explanation: Explanation) -> dict[str, Any]:
    return {
        "object": explanation.subject,
        "status": explanation.status,
        "dialect": explanation.dialect,
        "requests": [{"container": container, "request": text} for container, text in explanation.request],
        "constraints": dict(explanation.constraints),
        "policy": explanation.policy,
        "problems": list(explanation.problems),
        "gates": list(explanation.gates),
        "gang": gang_json(explanation.gang) if explanation.gang else None,
        "verdict": list(explanation.verdict),
        "nodes": [_node_json(row, explanation.cards.get(row.name, ())) for row in explanation.nodes]
        or [_node_json(NodeRow(name), rows) for name, rows in explanation.cards.items()],
        "conditions": [
            {"type": row.type, "status": row.status, "reason": row.reason, "message": row.message}
            for row in explanation.conditions
        ],
    }


def _node_json(row: NodeRow, cards: Sequence[CardRow]) -> dict[str, Any]:
    return {
        "name": row.name,
        "reason": row.reason,
        "unresolvable": row.unresolvable,
        "repartitionable": row.repartitionable,
        "points": row.points,
        "cards": [_card_json(card) for card in cards],
    }


def _card_json(row: CardRow) -> dict[str, Any]:
    state = row.state
    return {
        "index": state.card.index,
        "uuid": state.card.uuid,
        "model": state.card.model,
        "healthy": state.card.healthy,
        "coreFree": percent(state.core_free),
        "memoryFree": state.memory_free,
        "gpuid": state.gpuid or None,
        "holders": list(row.holders),
        "reason": row.reason,
        "own": row.own,
    }


def _text(explanation: Explanation, *, is_wide: bool) -> Group:
    parts: list[RenderableType] = [
        Text.assemble((explanation.subject, "bold"), f": {one_line(explanation.status)}"),
        *_request_text(explanation),
    ]
    parts += (Text(one_line(f"✗ {problem}"), style="bold red") for problem in explanation.problems)
    parts += [Text(), *(Text(one_line(sentence), style="bold") for sentence in explanation.verdict)]
    listed = {row.name for row in explanation.nodes} & explanation.cards.keys()
    if explanation.nodes and not explanation.problems:
        parts += [Text(), *_nodes_text(explanation, listed, is_wide=is_wide)]
    for name, rows in explanation.cards.items():
        if rows and name not in listed:
            parts += [Text(), Text(f"{name}:"), _cards_table(rows, is_wide=is_wide)]
    if explanation.conditions:
        parts += [Text(), *_conditions_text(explanation)]
    return Group(*parts)


def _request_text(explanation: Explanation) -> Iterator[RenderableType]:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style=_DIM, no_wrap=True)
    grid.add_column(overflow="fold")
    for i, (container, text) in enumerate(explanation.request):
        grid.add_row("" if i else f"requests as {explanation.dialect}", f"{container}: {text}")
    if explanation.constraints:
        grid.add_row("constraints", ", ".join(f"{key} {value}" for key, value in explanation.constraints.items()))
    if explanation.policy:
        grid.add_row("cards chosen", explanation.policy)
    if grid.row_count:
        yield Padding(grid, (0, 0, 0, 2))


def _nodes_text(explanation: Explanation, listed: set[str], *, is_wide: bool) -> Iterator[RenderableType]:
    """Yield the nodes whose cards are listed one by one, then the other nodes grouped by their reason."""
    most_names = len(explanation.nodes) if is_wide else _MOST_NAMES
    most_reasons = len(explanation.nodes) if is_wide else _MOST_REASONS
    for row in explanation.nodes:
        if row.name in listed:
            yield Text.assemble((row.name, "bold"), ": ", _answer_text(row))
            yield Padding(_cards_table(explanation.cards[row.name], is_wide=is_wide), (0, 0, 0, 2))
    rest = [row for row in explanation.nodes if row.name not in listed]
    fits = [row for row in rest if row.reason is None]
    if fits:
        best = ", ".join(f"{row.name} ({row.points})" for row in fits[:most_names])
        yield Text(f"{_count(len(fits))} fit, best first (points of 10): {best}{_more(fits, most_names)}", style=_GOOD)
    reasons: dict[str, list[NodeRow]] = {}
    for row in rest:
        if row.reason:
            # A reason that names its node must not make a group of its own for each of thousands of nodes.
            reasons.setdefault(one_line(row.reason.replace(f"node {row.name} ", "the node ")), []).append(row)
    ordered = sorted(reasons.items(), key=lambda item: (-len(item[1]), item[0]))
    for reason, rows in ordered[:most_reasons]:
        names = ", ".join(row.name for row in rows[:most_names])
        more = _more(rows, most_names)
        yield Text.assemble((f"{_count(len(rows))}", "bold"), f": {reason}", (f"  {names}{more}", _DIM))
    if len(ordered) > most_reasons:
        others = sum(len(rows) for _, rows in ordered[most_reasons:])
        yield Text(f"… and {_count(others)} for {len(ordered) - most_reasons} other reasons", style=_DIM)
    if len(rest) > 1 and not listed:
        yield Text("--node NAME lists the cards of one node.", style=_DIM)


def _answer_text(row: NodeRow) -> Text:
    if row.reason is None:
        return Text(f"fits ({row.points} of 10 points)", style=_GOOD)
    remedy = ""
    if row.repartitionable:
        remedy = " (fits once its cards are partitioned again)"
    elif row.unresolvable:
        remedy = " (evicting pods cannot help)"
    return Text(f"{one_line(row.reason)}{remedy}", style=_BAD)


def _cards_table(rows: Sequence[CardRow], *, is_wide: bool) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style=_DIM)
    for name in ("card", *(("model", "uuid") if is_wide else ()), "free core", "free memory", "", "held by"):
        table.add_column(
            name, overflow="fold", justify="right" if name in ("card", "free core", "free memory") else "left"
        )
    for row in rows:
        state = row.state
        mark = Text("✔ its own", style=_GOOD) if row.own else Text(row.reason or _card_note(state), style=_BAD)
        amounts = (format_core(state.core_left), format_bytes(state.memory_left))
        identity = (state.card.model, state.card.uuid) if is_wide else ()
        held_by = ", ".join(row.holders) if is_wide else _holders_text(row)
        table.add_row(str(state.card.index), *identity, *amounts, mark, Text(held_by, style=_DIM))
    return table


def _card_note(state: CardState) -> str:
    if not state.card.healthy:
        return "unhealthy"
    return f"of GPUID {state.gpuid}" if state.gpuid else ""


def _holders_text(row: CardRow) -> str:
    more = f" and {len(row.holders) - _MOST_HOLDERS} more" if len(row.holders) > _MOST_HOLDERS else ""
    return ", ".join(row.holders[:_MOST_HOLDERS]) + more


def _conditions_text(explanation: Explanation) -> Iterator[RenderableType]:
    yield Text("Its status:", style=_DIM)
    for row in explanation.conditions:
        reason = f" ({row.reason})" if row.reason else ""
        text = f"{row.type} {row.status}{reason}{f': {row.message}' if row.message else ''}"
        yield Padding(Text(text), (0, 0, 0, 2))


def _count(number: int) -> str:
    return f"{number:,} node{'' if number == 1 else 's'}"


def _more(rows: Sequence[NodeRow], most: int) -> str:
    return f" and {len(rows) - most:,} more" if len(rows) > most else ""
