"""Shows the cards of a cluster and the pods that hold them for `mgpu inspect` (`scheduler.inspect_command`).

A terminal gets a card map (`render_overview`), and a pipe a table (`overview_lines`).

Scripts read the JSON, so its keys must not change. The text may change. `mgpu top` reads the same overview.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mgpu.cli import cluster_objects
from mgpu.model.cards import GPU
from mgpu.model.groups import format_group_cards
from mgpu.model.pod_constraints import NO_CONSTRAINTS, Constraints
from mgpu.model.quantities import format_bytes, format_core
from mgpu.presentation.card_map import card_map
from mgpu.presentation.card_views import CardView, NodeView, nodes_json
from mgpu.presentation.claim_views import read_claims
from mgpu.presentation.gang_views import GangView, describe_gang, gang_json
from mgpu.presentation.measured_use import NOT_MEASURED, ClusterUse, NodeUse, Used, describe_unknown, use_of_cards
from mgpu.presentation.mtgpupod_tables import NodeAccount, account_nodes, accounting_json, mtgpupods_json
from mgpu.presentation.overview import GroupView, Overview, make_overview
from mgpu.presentation.plain_tables import core_cell, memory_cell, table_lines
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
        "constraints": {pod: constraints.texts() for pod, constraints in cluster.constraints.items()},
        "groups": [
            {
                "constraint": view.group.constraint,
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


NO_NODES = "There are no nodes."


def render_overview(
    cluster: Overview, gangs: Sequence[GangView] = (), use: ClusterUse | None = None, *, empty: str = NO_NODES
) -> Group:
    """Return the card map, and below it the table of GPUIDs, the waiting pods, the groups and the problems.

    Args:
        gangs: the gangs that are not complete.
        use: what is used of the cards, which the card map then shows within what pods hold.
        empty: what takes the place of the card map if there is no node.
    """
    parts: list[RenderableType] = [card_map(cluster.nodes, use or {}) if cluster.nodes else Text(empty)]
    accounts = account_nodes(cluster.nodes)
    if cluster.mtgpupods or any(account.gpuids for account in accounts):
        parts += [Text(), _table(accounts), Text()]
    return Group(*parts, *_notes(cluster, gangs, _MOST_PODS))


def overview_lines(
    cluster: Overview, gangs: Sequence[GangView] = (), use: ClusterUse | None = None, *, is_wide: bool = False
) -> Iterator[str]:
    """Yield a table with a line for each card, and below it what `render_overview` shows below the card map.

    Args:
        is_wide: whether the table has all columns.
    """
    rows = [
        _card_row(node, view, used, is_wide=is_wide, has_use=use is not None)
        for node in cluster.nodes
        for view, used in _with_use(node, use or {})
    ]
    names = ["NODE", "CARD", "MODEL", "STATUS", "HELD-CORE", "FREE-CORE", "HELD-MEMORY", "FREE-MEMORY"]
    names += [] if use is None else ["USED-CORE", "USED-MEMORY"]
    names += ["UUID", "GPUID", "SLICES", "ISOLATION", "REQUESTED-AS"] if is_wide else []
    if rows:
        yield from table_lines([*names, "HELD-BY"], rows)
    notes = [text.plain for text in _notes(cluster, gangs, None)]
    bare = [node.name for node in cluster.nodes if not node.devices]
    notes[:0] = [one_line(f"{node}: {text}") for node, row in (use or {}).items() if (text := describe_unknown(row))]
    if bare:
        notes.insert(0, f"Without cards: {join_names(bare, _MOST_PODS)}")
    if notes:
        yield from (["", *notes] if rows else notes)


def _with_use(node: NodeView, use: ClusterUse) -> Iterator[tuple[CardView, Used]]:
    found = use.get(node.name)
    cards = use_of_cards(node, found) if isinstance(found, NodeUse) else None
    for view in node.devices:
        is_measured = cards is not None and view in node.cards
        yield view, cards.of_card(view.state.card.index) if is_measured and cards else NOT_MEASURED


def _card_row(node: NodeView, view: CardView, used: Used, *, is_wide: bool, has_use: bool) -> list[str]:
    state = view.state
    status = "Healthy" if state.card.healthy else "Unhealthy"
    return [
        node.name,
        str(state.card.index),
        state.card.model or ("" if state.card.type == GPU else state.card.type),
        f"{status},{view.mode}" if view.mode else status,
        core_cell(state.core_used),
        core_cell(state.core_left),
        memory_cell(state.memory_used),
        memory_cell(state.memory_left),
        *([core_cell(used.core), memory_cell(used.memory)] if has_use else []),
        *([state.card.uuid, state.gpuid, _slices(view), node.isolation, _dialects(view)] if is_wide else []),
        ",".join(use.pod if use.certain else f"{use.pod}?" for use in view.uses),
    ]


def _dialects(view: CardView) -> str:
    return ",".join(sorted({use.dialect for use in view.uses if use.dialect}))


def _slices(view: CardView) -> str:
    """Return a text such as `1g.10gb=2,2g.20gb=1`: the number of slices of each profile."""
    counts = Counter(part.slice.name for part in view.slices)
    return ",".join(f"{name}={count}" for name, count in sorted(counts.items()))


def _notes(cluster: Overview, gangs: Sequence[GangView], most: int | None) -> list[Text]:
    """Return lines about the waiting pods, the gangs, the groups and the problems.

    Args:
        most: the most pods of a line and lines of a kind; None for all.
    """
    parts: list[Text] = []
    if cluster.pending:
        reasons = {v.pod.key: ": ".join(filter(None, (f"GPUID {v.pod.gpuid}", v.reason))) for v in cluster.mtgpupods}
        waiting = [
            _with_constraints(pod, cluster.constraints.get(pod, NO_CONSTRAINTS), reasons.get(pod, ""))
            for pod in cluster.pending
            if pod not in cluster.gated
        ]
        parts += _names("Waiting for cards", waiting, most)
        parts += _names(
            "Waiting for scheduling gates",
            [f"{pod} ({describe_gates(gates)})" for pod, gates in cluster.gated.items()],
            most,
        )
    parts += _lines((f"Gang {view.name}: {describe_gang(view)}" for view in gangs), "yellow", most)
    parts += _lines(map(_group, cluster.groups), "", most)
    degraded = (f"MtgpuPod {view.pod.key}: degraded: {view.degraded}" for view in cluster.mtgpupods if view.degraded)
    parts += _lines(degraded, "bold red", most)
    silent = (f"{node}: its mgpu agent is not ready ({pod.problem})" for node, pod in cluster.agents_not_ready.items())
    parts += _lines(silent, "bold red", most)
    parts += _lines((f"{what}: {why}" for what, why in cluster.unclear.items()), "bold red", most)
    return parts


def _names(title: str, pods: Sequence[str], most: int | None) -> Iterator[Text]:
    """Yield a line with at most `most` of the pods; nothing if there are none."""
    if pods:
        yield Text(one_line(f"{title}: {join_names(pods, len(pods) if most is None else most)}"), style="yellow")


def _lines(texts: Iterable[str], style: str, most: int | None) -> Iterator[Text]:
    """Yield at most `most` lines, and one more line with the number of the others, if any."""
    lines = list(texts)
    yield from (Text(one_line(line), style=style) for line in lines[:most])
    if most is not None and len(lines) > most:
        yield Text(f"… and {len(lines) - most:,} more (-o json has all)", style=style)


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
