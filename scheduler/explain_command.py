"""Runs `mgpu explain`, which explains why a pod waits, node by node and card by card, or which cards it has.

The command reads the cluster with the user's rights into a `ClusterCache` and runs the scheduler's own code
(`decisions.explanation`). It writes nothing and needs no running scheduler. The keys of its JSON must not change,
because scripts rely on them (docs/kubectl.md).
"""

import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mgpu.cli import cluster_objects
from mgpu.cli.connection import cluster_options, current_namespace, read_installed_settings, report_api_errors
from mgpu.dialects import mtgpu
from mgpu.kube import Api, ApiError
from mgpu.model.cards import CardState
from mgpu.model.errors import BadObject, Problem
from mgpu.model.gangs import POD_GROUP_APIS, gang_name
from mgpu.model.pods import read_pod
from mgpu.model.quantities import format_bytes, format_core
from mgpu.presentation.card_views import percent
from mgpu.presentation.gang_views import gang_json
from mgpu.presentation.plain_text import one_line
from mgpu.presentation.terminal import show, show_json
from mgpu.settings import Settings
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.forecast import LEARNING_POLICIES
from scheduler.cluster.gpu_pods import read_gpu_pod
from scheduler.decisions.explanation import CardRow, Explainer, Explanation, NodeRow, Raw
from scheduler.listed_cluster import fill_cache

_KINDS = {"pod": "Pod", "pods": "Pod", "po": "Pod", "mtgpupod": mtgpu.KIND, "mtgpupods": mtgpu.KIND}
_SIMPLE = re.compile(r"[-a-z0-9.]*")
"""Matches the names that need no escaping in a field selector. All valid names of nodes are among them."""
_MAX_DETAILED_NODES = 8
"""If at most this many nodes have cards, the cards of all nodes are listed."""
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
  kubectl mgpu explain train-0 -o json | jq '.nodes[] | select(.reason == null)'
"""


@click.command(epilog=EXAMPLES)
@click.argument("name", metavar="[TYPE/]NAME")
@click.option("-n", "--namespace", default="", help="Namespace of the pod.  [default: the one that kubectl uses]")
@click.option("--node", "nodes", multiple=True, help="Evaluate only this node, and list its cards; may be repeated.")
@cluster_options
@click.option("--config", type=click.Path(path_type=Path), help="Settings file (YAML).  [default: the cluster's]")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def command(
    name: str, namespace: str, nodes: tuple[str, ...], kubeconfig: str, context: str, config: Path | None, output: str
) -> None:
    """Explain why a pod waits, node by node and card by card, or where its cards are.

    TYPE is pod (the default) or mtgpupod. The reasons are those of mgpu's engine at this moment. Other reasons (taints,
    selectors, cpu, volumes) are shown as the scheduler wrote them on the pod. The exit code is 1 if the pod, the
    MtgpuPod or a node of --node does not exist, or the cluster does not answer. It is 2 if the arguments or the
    settings are invalid.
    """
    kind, name = _kind(name)
    with report_api_errors(), cluster_objects.paused_garbage_collection():
        api = Api.connect(kubeconfig, context=context, timeout=30.0)
        settings, _ = read_installed_settings(api, config)
        raw = _read(api, kind, namespace or current_namespace(kubeconfig, context), name)
        own = raw["spec"].get("nodeName")
        if own and any(name != own for name in nodes):
            raise BadObject([Problem("--node", f"{kind} {name} is on node {own}; --node is for pods without a node")])
        state, names = _read_cluster(api, settings, _nodes_to_read(kind, raw, settings, nodes))
        if kind == "Pod":
            _read_pod_group(api, state, raw)
        explanation = _explain(state, settings, kind, raw, nodes, names)
    if output == "json":
        show_json(_json(explanation))
    else:
        show(_text(explanation))


def _kind(name: str) -> tuple[str, str]:
    """Return the kind and the name of an argument such as `mtgpupod/notebook`. Raises BadObject."""
    type_, slash, rest = name.partition("/")
    if not slash:
        return "Pod", name
    if type_.lower() not in _KINDS or not rest or "/" in rest:
        raise BadObject([Problem(name, "must be NAME, pod/NAME or mtgpupod/NAME")])
    return _KINDS[type_.lower()], rest


def _read(api: Api, kind: str, namespace: str, name: str) -> Raw:
    prefix, plural = (f"/apis/{mtgpu.API_VERSION}", "mtgpupods") if kind == mtgpu.KIND else ("/api/v1", "pods")
    try:
        return api.get(f"{prefix}/namespaces/{quote(namespace, safe='')}/{plural}/{quote(name, safe='')}")
    except ApiError as error:
        # The API server gives a reason if the object is missing, and none if its type is.
        if error.status == 404 and not error.reason:
            raise click.ClickException(f"this cluster has no {kind}s: their CRD is missing") from error
        raise


def _nodes_to_read(kind: str, raw: Raw, settings: Settings, selected: Sequence[str]) -> Sequence[str]:
    """Return the nodes to read: the node of the object, or else those that the user selects. () means all nodes.

    All nodes are read for a pod that belongs to groups or to a gang, because their pods may be on other nodes, and for
    a node policy that learns from all pods. All nodes are also read for an MtgpuPod without a node, and if a name needs
    escaping.
    """
    own = raw["spec"].get("nodeName")
    nodes = [str(own)] if own else list(dict.fromkeys(selected))
    if not all(map(_SIMPLE.fullmatch, nodes)) or not (own or kind == "Pod"):
        return ()
    gpu_pod = None if own else read_gpu_pod(raw, settings)
    if gpu_pod is None:
        return nodes
    if gpu_pod.constraints.groups or gang_name(gpu_pod.pod) or settings.node_policy in LEARNING_POLICIES:
        return ()
    return nodes


def _read_cluster(api: Api, settings: Settings, nodes: Sequence[str]) -> tuple[ClusterCache, list[str]]:
    """Return a cache that is filled as the scheduler fills its own, and the sorted names of the nodes.

    Args:
        nodes: The names of the nodes to read. Besides them, the pods on them and the pods without a node are read. If
            there are no names, all nodes and pods are read.
    """
    named = [f"metadata.name={name}" for name in nodes] or [""]
    on_them = [f"spec.nodeName={name}" for name in (*nodes, "")] if nodes else [""]
    lists = cluster_objects.ClusterLists(
        chain.from_iterable(cluster_objects.nodes(api, fields) for fields in named),
        chain.from_iterable(cluster_objects.devices(api, fields) for fields in named),
        cluster_objects.unhealthy_lists(api),
        cluster_objects.mtgpupods(api),
        chain.from_iterable(cluster_objects.whole_pods(api, fields) for fields in on_them),
    )
    state = ClusterCache(settings)
    return state, fill_cache(state, lists)


def _read_pod_group(api: Api, state: ClusterCache, raw: Raw) -> None:
    """Read the PodGroup of a waiting pod, if it names one."""
    pod = read_pod(raw)
    name = None if pod.node else gang_name(pod)
    if name is not None and name.source in POD_GROUP_APIS:
        group = cluster_objects.pod_group(api, name)
        if group is not None:
            state.gangs.pod_group_changed(name.source, group)


def _explain(
    state: ClusterCache, settings: Settings, kind: str, raw: Raw, selected: Sequence[str], names: Sequence[str]
) -> Explanation:
    """Explain the object. Raises ClickException if a selected node does not exist or the pod was deleted meanwhile.

    Args:
        selected: The names of the nodes that the user selects, if any.
        names: The names of all nodes that were read.
    """
    unknown = sorted(set(selected) - set(names))
    if unknown:
        raise click.ClickException(f"no node is named {', '.join(unknown)}")
    explainer = Explainer(state, settings)
    if kind == mtgpu.KIND:
        return explainer.mtgpupod(raw)
    meta = raw["metadata"]
    if state.uid_of(meta["namespace"], meta["name"]) != meta["uid"]:
        raise click.ClickException(
            f"pod {meta['namespace']}/{meta['name']} was deleted while the cluster was read; run the command again"
        )
    with_cards = state.nodes_with_cards()
    detailed = selected or (with_cards if len(with_cards) <= _MAX_DETAILED_NODES else ())
    return explainer.pod(raw, list(dict.fromkeys(selected)) or names, detailed, all_cards=bool(selected))


def _json(explanation: Explanation) -> dict[str, Any]:
    return {
        "of": explanation.subject,
        "stands": explanation.status,
        "dialect": explanation.dialect,
        "ask": [{"container": container, "asks": text} for container, text in explanation.request],
        "wishes": dict(explanation.constraints),
        "chosen": explanation.policy,
        "problems": list(explanation.problems),
        "gates": list(explanation.gates),
        "gang": gang_json(explanation.gang) if explanation.gang else None,
        "verdict": list(explanation.verdict),
        "nodes": [_node_json(row, explanation.cards.get(row.name, ())) for row in explanation.nodes]
        or [_node_json(NodeRow(name), rows) for name, rows in explanation.cards.items()],
        "said": [
            {"type": row.type, "status": row.status, "reason": row.reason, "message": row.message}
            for row in explanation.conditions
        ],
    }


def _node_json(row: NodeRow, cards: Sequence[CardRow]) -> dict[str, Any]:
    return {
        "name": row.name,
        "reason": row.reason,
        "hopeless": row.hopeless,
        "recut": row.repartitionable,
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


def _text(explanation: Explanation) -> Group:
    parts: list[RenderableType] = [
        Text.assemble((explanation.subject, "bold"), f": {one_line(explanation.status)}"),
        *_request_text(explanation),
    ]
    parts += (Text(one_line(f"✗ {problem}"), style="bold red") for problem in explanation.problems)
    parts += [Text(), *(Text(one_line(sentence), style="bold") for sentence in explanation.verdict)]
    listed = {row.name for row in explanation.nodes} & explanation.cards.keys()
    if explanation.nodes and not explanation.problems:
        parts += [Text(), *_nodes_text(explanation, listed)]
    for name, rows in explanation.cards.items():
        if rows and name not in listed:
            parts += [Text(), Text(f"{name}:"), _cards_table(rows)]
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


def _nodes_text(explanation: Explanation, listed: set[str]) -> Iterator[RenderableType]:
    """Yield the nodes whose cards are listed one by one, then the other nodes grouped by their reason."""
    for row in explanation.nodes:
        if row.name in listed:
            yield Text.assemble((row.name, "bold"), ": ", _answer_text(row))
            yield Padding(_cards_table(explanation.cards[row.name]), (0, 0, 0, 2))
    rest = [row for row in explanation.nodes if row.name not in listed]
    fits = [row for row in rest if row.reason is None]
    if fits:
        best = ", ".join(f"{row.name} ({row.points})" for row in fits[:_MOST_NAMES])
        yield Text(f"{_count(len(fits))} fit, best first (points of 10): {best}{_more(fits)}", style=_GOOD)
    reasons: dict[str, list[NodeRow]] = {}
    for row in rest:
        if row.reason:
            # A reason that names its node must not make a group of its own for each of thousands of nodes.
            reasons.setdefault(one_line(row.reason.replace(f"node {row.name} ", "the node ")), []).append(row)
    ordered = sorted(reasons.items(), key=lambda item: (-len(item[1]), item[0]))
    for reason, rows in ordered[:_MOST_REASONS]:
        names = ", ".join(row.name for row in rows[:_MOST_NAMES])
        yield Text.assemble((f"{_count(len(rows))}", "bold"), f": {reason}", (f"  {names}{_more(rows)}", _DIM))
    if len(ordered) > _MOST_REASONS:
        others = sum(len(rows) for _, rows in ordered[_MOST_REASONS:])
        yield Text(f"… and {_count(others)} for {len(ordered) - _MOST_REASONS} other reasons", style=_DIM)
    if len(rest) > 1 and not listed:
        yield Text("--node NAME lists the cards of one node.", style=_DIM)


def _answer_text(row: NodeRow) -> Text:
    if row.reason is None:
        return Text(f"fits ({row.points} of 10 points)", style=_GOOD)
    remedy = ""
    if row.repartitionable:
        remedy = " (fits once its cards are partitioned again)"
    elif row.hopeless:
        remedy = " (evicting pods cannot help)"
    return Text(f"{one_line(row.reason)}{remedy}", style=_BAD)


def _cards_table(rows: Sequence[CardRow]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style=_DIM)
    for name in ("card", "free core", "free memory", "", "held by"):
        table.add_column(
            name, overflow="fold", justify="right" if name in ("card", "free core", "free memory") else "left"
        )
    for row in rows:
        state = row.state
        mark = Text("✔ its own", style=_GOOD) if row.own else Text(row.reason or _card_note(state), style=_BAD)
        amounts = (format_core(state.core_left), format_bytes(state.memory_left))
        table.add_row(str(state.card.index), *amounts, mark, Text(_holders_text(row), style=_DIM))
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


def _more(rows: Sequence[NodeRow]) -> str:
    return f" and {len(rows) - _MOST_NAMES:,} more" if len(rows) > _MOST_NAMES else ""
