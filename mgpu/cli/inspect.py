"""Renders the cards of a cluster and the pods that hold them for `mgpu inspect` (`scheduler.inspect_command`).

Scripts read the JSON, so its keys must not change. The text may change. `mgpu top` reads the same overview.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mgpu.cli import cluster_objects
from mgpu.model.groups import format_group_cards
from mgpu.model.pod_constraints import NO_CONSTRAINTS, Constraints
from mgpu.model.quantities import format_bytes, format_core
from mgpu.presentation.card_map import card_map
from mgpu.presentation.card_views import nodes_json
from mgpu.presentation.claim_views import read_claims
from mgpu.presentation.gang_views import GangView, describe_gang, gang_json
from mgpu.presentation.measured_use import ClusterUse
from mgpu.presentation.mtgpupod_tables import NodeAccount, account_nodes, accounting_json, mtgpupods_json
from mgpu.presentation.overview import GroupView, Overview, make_overview
from mgpu.presentation.plain_text import join_names, one_line
from mgpu.presentation.request_text import describe_gates
from mgpu.presentation.use_figures import node_use_json
from mgpu.settings import Settings

_MOST_GROUP_CARDS = 4  # The cards of a larger group are only counted.
_MOST_PODS = 20


def overview_of(lists: cluster_objects.ClusterLists, settings: Settings) -> Overview:
    claims = read_claims(lists.claims, lists.classes)
    return make_overview(lists.nodes, lists.devices, lists.pods, settings, lists.configmaps, lists.mtgpupods, claims)


def overview_json(cluster: Overview, gangs: Sequence[GangView] = (), use: ClusterUse | None = None) -> dict[str, Any]:
    """Return the JSON of `mgpu inspect`. It has the key `usage` only if agents were asked."""
    nodes = {node.name: node for node in cluster.nodes}
    usage = {name: node_use_json(nodes[name], found) for name, found in (use or {}).items()}
    return {
        **({} if use is None else {"usage": usage}),
        "nodes": nodes_json(cluster.nodes),
        "accounting": accounting_json(account_nodes(cluster.nodes)),
        "pending": list(cluster.pending),
        "gated": {pod: list(gates) for pod, gates in cluster.gated.items()},
        "gangs": [gang_json(view) for view in gangs],
        "unclear": dict(cluster.unclear),
        "dialects": {use.pod: use.dialect for node in cluster.nodes for device in node.devices for use in device.uses},
        "wishes": {pod: constraints.texts() for pod, constraints in cluster.constraints.items()},
        "groups": [
            {
                "wish": view.group.constraint,
                "namespace": view.group.namespace,
                "name": view.group.name,
                "pods": list(view.pods),
                "cards": [card._asdict() for card in view.cards],
            }
            for view in cluster.groups
        ],
        "mtgpupods": mtgpupods_json(cluster.mtgpupods),
        "agentsNotReady": {
            node: {"pod": pod.name, "reason": pod.problem, "since": pod.since}
            for node, pod in cluster.agents_not_ready.items()
        },
    }


def render_overview(cluster: Overview, gangs: Sequence[GangView] = (), use: ClusterUse | None = None) -> Group:
    """Return the card map, and below it the table of GPUIDs, the waiting pods, the groups and the problems.

    Args:
        gangs: The gangs that are not complete.
        use: What is used of the cards, which the card map then shows within what pods hold.
    """
    parts: list[RenderableType] = [card_map(cluster.nodes, use or {}) if cluster.nodes else Text("There are no nodes.")]
    accounts = account_nodes(cluster.nodes)
    if cluster.mtgpupods or any(account.gpuids for account in accounts):
        parts += [Text(), _table(accounts), Text()]
    if cluster.pending:
        reasons = {v.pod.key: ": ".join(filter(None, (f"GPUID {v.pod.gpuid}", v.reason))) for v in cluster.mtgpupods}
        waiting = [
            _with_constraints(pod, cluster.constraints.get(pod, NO_CONSTRAINTS), reasons.get(pod, ""))
            for pod in cluster.pending
            if pod not in cluster.gated
        ]
        parts += _names("Waiting for cards", waiting)
        parts += _names(
            "Waiting for scheduling gates",
            [f"{pod} ({describe_gates(gates)})" for pod, gates in cluster.gated.items()],
        )
    parts += _lines((f"Gang {view.name}: {describe_gang(view)}" for view in gangs), "yellow")
    parts += _lines(map(_group, cluster.groups), "")
    degraded = (f"MtgpuPod {view.pod.key}: degraded: {view.degraded}" for view in cluster.mtgpupods if view.degraded)
    parts += _lines(degraded, "bold red")
    silent = (f"{node}: its mgpu agent is not ready ({pod.problem})" for node, pod in cluster.agents_not_ready.items())
    parts += _lines(silent, "bold red")
    parts += _lines((f"{what}: {why}" for what, why in cluster.unclear.items()), "bold red")
    return Group(*parts)


def _names(title: str, pods: Sequence[str]) -> Iterator[Text]:
    """Yield a line with at most `_MOST_PODS` of the pods; nothing if there are none."""
    if pods:
        yield Text(one_line(f"{title}: {join_names(pods, _MOST_PODS)}"), style="yellow")


def _lines(texts: Iterable[str], style: str) -> Iterator[Text]:
    """Yield at most `_MOST_PODS` lines, and one more line with the number of the others, if any."""
    lines = list(texts)
    yield from (Text(one_line(line), style=style) for line in lines[:_MOST_PODS])
    if len(lines) > _MOST_PODS:
        yield Text(f"… and {len(lines) - _MOST_PODS:,} more (-o json has all)", style=style)


def _table(accounts: tuple[NodeAccount, ...]) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False, header_style="grey50")
    for name in ("node", "free cards", "GPUID", "card", "core left", "memory left"):
        table.add_column(name, overflow="fold", justify="left" if name in ("node", "GPUID") else "right")
    for account in accounts:
        rows = [
            (left.gpuid, str(left.card), format_core(left.core), format_bytes(left.memory)) for left in account.gpuids
        ]
        for i, row in enumerate(rows or [("", "", "", "")]):
            table.add_row(*((account.node, str(account.free)) if i == 0 else ("", "")), *row)
    return table


def _with_constraints(pod: str, constraints: Constraints, reason: str) -> str:
    note = reason or (str(constraints) if constraints != NO_CONSTRAINTS else "")
    return f"{pod} ({note})" if note else pod


def _group(view: GroupView) -> str:
    """Return a line such as `same-card-group team/pair: 2 pods on card 0 of n1`."""
    constraint, namespace, name = view.group
    pods = f"{len(view.pods)} pod{'' if len(view.pods) == 1 else 's'}"
    nodes = len({card.node for card in view.cards})
    cards = f"{len(view.cards)} cards of {nodes} nodes"
    if len(view.cards) <= _MOST_GROUP_CARDS:
        cards = format_group_cards(view.cards)
    return f"{constraint} {namespace}/{name}: {pods} on {cards}"
