"""`mgpu explain`: why a pod waits, per node and card, or where its cards are; read from the cluster's lists."""

import re
from collections.abc import Collection, Sequence
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from mgpu.cli import cluster_objects
from mgpu.cli.connection import answering, connecting, namespace_of, settings_of
from mgpu.dialects import mtgpu
from mgpu.kube import Api, ApiError
from mgpu.model.errors import BadObject, Problem
from mgpu.presentation.card_views import percent
from mgpu.presentation.terminal import show, show_json
from mgpu.settings import Settings
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.forecast import LEARNT
from scheduler.cluster.gpu_pods import read_gpu_pod
from scheduler.decisions.explanation import CardRow, Explainer, Explanation, NodeRow, Raw
from scheduler.explain_text import shown

_KINDS = {"pod": "Pod", "pods": "Pod", "po": "Pod", "mtgpupod": mtgpu.KIND, "mtgpupods": mtgpu.KIND}
_SIMPLE = re.compile(r"[-a-z0-9.]*")
"""What stands for itself in a field selector, as all names of nodes do."""
_FEW = 8
"""Nodes whose cards are shown one by one."""

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
@click.option("-n", "--namespace", default="", help="The pod's.  [default: as kubectl chooses it]")
@click.option("--node", "nodes", multiple=True, help="Ask about this node alone, and show its cards; may be repeated.")
@connecting
@click.option("--config", type=click.Path(path_type=Path), help="Settings file (YAML).  [default: the cluster's]")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def command(
    name: str, namespace: str, nodes: tuple[str, ...], kubeconfig: str, context: str, config: Path | None, output: str
) -> None:
    """Say why a pod waits, node by node and card by card, or where its cards are.

    TYPE is pod (the default) or mtgpupod. The reasons are those of mgpu's own engine, asked now; whatever else keeps a
    pod waiting (taints, selectors, cpu, volumes) is told as the scheduler wrote it on the pod. Exit code 1 where there
    is no such pod or the cluster does not answer.
    """
    kind, name = _kind(name)
    with answering(), cluster_objects.uncollected():
        api = Api.connect(kubeconfig, context=context, timeout=30.0)
        settings, _ = settings_of(api, config)
        raw = _read(api, kind, namespace or namespace_of(kubeconfig, context), name)
        own = str(raw["spec"].get("nodeName") or "")
        _check_nodes(f"{kind} {name}", own, nodes)
        state, names = _state(api, settings, _enough(kind, raw, settings, nodes))
        found = _explained(state, settings, kind, raw, nodes, names)
    if output == "json":
        show_json(_json(found))
    else:
        show(shown(found))


def _check_nodes(of: str, own: str, asked: Collection[str]) -> None:
    """own: the node that it has, "" where it waits for one. Raises BadObject."""
    others = [name for name in asked if own and name != own]
    if others:
        raise BadObject([Problem("--node", f"{of} has its node, {own}; only one that waits for a node may be asked")])


def _kind(name: str) -> tuple[str, str]:
    """Raises BadObject."""
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
        if error.status == 404 and not error.reason:  # of an object that is not there it says what it looked for
            raise click.ClickException(f"this cluster has no {kind}s: their CRD is missing") from error
        raise


def _enough(kind: str, raw: Raw, settings: Settings, asked: Sequence[str]) -> Sequence[str]:
    """The nodes to read, where nothing on another one makes a difference: its own, else those asked about; () for all.

    Elsewhere are the other pods of its groups, and what a policy that learns has learnt from.
    """
    own = str(raw["spec"].get("nodeName") or "")
    nodes = [own] if own else list(dict.fromkeys(asked))
    if not all(map(_SIMPLE.fullmatch, nodes)) or not (own or kind == "Pod"):
        return ()
    known = None if own else read_gpu_pod(raw, settings)
    return () if known and (known.constraints.groups or settings.node_policy in LEARNT) else nodes


def _state(api: Api, settings: Settings, nodes: Sequence[str]) -> tuple[ClusterCache, list[str]]:
    """What the scheduler would know, and the names of the nodes. nodes: of these alone, and of what is on no node."""
    state, names = ClusterCache(settings), []
    named = [f"metadata.name={name}" for name in nodes] or [""]
    on_them = [f"spec.nodeName={name}" for name in (*nodes, "")] if nodes else [""]
    for raw in chain.from_iterable(cluster_objects.nodes(api, fields) for fields in named):
        state.node_changed(raw)
        names.append(str(raw["metadata"]["name"]))
    for rows, take in (
        (chain.from_iterable(cluster_objects.devices(api, fields) for fields in named), state.device_changed),
        (cluster_objects.unhealthy_lists(api), state.configmap_changed),
        (cluster_objects.mtgpupods(api), state.mtgpupod_changed),
        (chain.from_iterable(cluster_objects.whole_pods(api, fields) for fields in on_them), state.pod_changed),
    ):
        for raw in rows:
            take(raw)
    return state, sorted(names)


def _explained(
    state: ClusterCache, settings: Settings, kind: str, raw: Raw, asked: Sequence[str], names: Sequence[str]
) -> Explanation:
    """asked: the nodes that the user names, if any. names: all that there are."""
    unknown = sorted(set(asked) - set(names))
    if unknown:
        raise click.ClickException(f"no node is named {', '.join(unknown)}")
    explainer = Explainer(state, settings)
    if kind == mtgpu.KIND:
        return explainer.mtgpupod(raw)
    meta = raw["metadata"]
    if state.uid_of(meta["namespace"], meta["name"]) != meta["uid"]:
        raise click.ClickException(f"pod {meta['namespace']}/{meta['name']} went while the cluster was read; ask again")
    with_cards = state.nodes_with_cards()
    few = with_cards if len(with_cards) <= _FEW else ()
    return explainer.pod(raw, list(dict.fromkeys(asked)) or names, asked or few, all_cards=bool(asked))


def _json(found: Explanation) -> dict[str, Any]:
    return {
        "of": found.of,
        "stands": found.stands,
        "dialect": found.dialect or None,
        "ask": [{"container": container, "asks": text} for container, text in found.request],
        "wishes": dict(found.constraints),
        "chosen": found.chosen or None,
        "problems": list(found.problems),
        "verdict": list(found.verdict),
        "nodes": [_node_json(row, found.cards.get(row.name, ())) for row in found.nodes]
        or [_node_json(NodeRow(name), rows) for name, rows in found.cards.items()],
        "said": [
            {"type": row.type, "status": row.status, "reason": row.reason, "message": row.message} for row in found.said
        ],
    }


def _node_json(row: NodeRow, cards: Sequence[CardRow]) -> dict[str, Any]:
    return {
        "name": row.name,
        "reason": row.reason or None,
        "hopeless": row.hopeless,
        "recut": row.recut,
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
        "reason": row.reason or None,
        "own": row.own,
    }
