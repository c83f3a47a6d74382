"""Computes the metrics of the cluster's current state when Prometheus scrapes them.

The metrics of events (decisions, rejections) are in `scheduler.metrics`. `api.app` registers the collector. A scrape
must not delay decisions, so the collector reads one node at a time, pauses in between, and reads only the nodes that
have changed since the last scrape. docs/metrics.md repeats the names, labels and help texts.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from mgpu.model.card_use import card_uses, held_amounts
from mgpu.model.ledger import Ledger
from mgpu.presentation.card_views import list_allocatable
from mgpu.serving.metrics import Watch
from scheduler.api.replica import Replica
from scheduler.background import Pace
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.node_snapshots import NodeContents

_MILLI = 1000


class Figure(Enum):
    """A quantity that is summed over all nodes.

    Core is in thousandths of a card and memory in bytes, so that the sums are exact.
    """

    # These are counted for each model of cards.
    HEALTHY = "healthy cards"
    UNHEALTHY = "unhealthy cards"
    IDLE = "idle cards"
    CORE = "core"
    CORE_USED = "core used"
    MEMORY = "memory"
    MEMORY_USED = "memory used"
    # These are counted for each dialect of pods.
    PODS = "pods"
    HELD_CORE = "core held"
    HELD_MEMORY = "memory held"
    # These are counted for all nodes together; the second part of the key is "".
    NODES = "nodes"
    BARRIERS = "nodes whose partition plan is not in force yet"
    FREE = "free core"
    STRANDED = "free core on cards in use"


Figures = Counter[tuple[Figure, str]]
"""The amounts, by figure and by the model or the dialect for which the figure is counted."""


def figures_of(node: NodeContents) -> Figures:
    """Return the figures of one node, without those that are 0."""
    counts: Figures = Counter()
    ledger = Ledger()
    name = node.node.name
    devices = list_allocatable(node.slices, (*node.cards, *node.other_devices))
    ledger.set_cards(name, devices)
    for holding in node.held:
        ledger.hold(holding)
    for use in card_uses(node.cards, (*ledger.cards(name), *ledger.others(name))):
        card = use.card
        counts[Figure.HEALTHY if card.healthy else Figure.UNHEALTHY, card.model] += 1
        counts[Figure.CORE, card.model] += card.core
        counts[Figure.CORE_USED, card.model] += use.core
        counts[Figure.MEMORY, card.model] += card.memory
        counts[Figure.MEMORY_USED, card.model] += use.memory
        counts[Figure.IDLE, card.model] += card.healthy and use.idle
        if card.healthy and use.shared:
            free = max(0, card.core - use.core)
            counts[Figure.FREE, ""] += free
            counts[Figure.STRANDED, ""] += 0 if use.idle else free
    for holding in node.held:
        if not holding.occupies:  # An occupy pod holds its card for MtgpuPods, which are counted themselves.
            core, memory = held_amounts(holding, devices)
            counts[Figure.PODS, holding.dialect] += 1
            counts[Figure.HELD_CORE, holding.dialect] += core
            counts[Figure.HELD_MEMORY, holding.dialect] += memory
    counts[Figure.NODES, ""] += bool(node.cards)
    counts[Figure.BARRIERS, ""] += node.slices.has_pending_plan
    return +counts


class Totals:
    """The sums of the figures over all nodes. The class is thread-safe.

    Args:
        pace: A function that is called after each node that was read, and may sleep.
    """

    def __init__(self, cache: ClusterCache, pace: Callable[[], object]) -> None:
        self._cache = cache
        self._pace = pace
        self._lock = threading.Lock()
        self._of_nodes: dict[str, tuple[int, Figures]] = {}  # By node, its version and the figures of that version.
        self._sums: Figures = Counter()

    def sums(self) -> Figures:
        """Return the sums, after reading the nodes that have changed since the last call."""
        with self._lock:
            versions = self._cache.node_versions()
            for name in self._of_nodes.keys() - versions.keys():
                self._sums.subtract(self._of_nodes.pop(name)[1])
            for name, version in versions.items():
                before = self._of_nodes.get(name)
                if before is not None and before[0] == version:
                    continue
                node = self._cache.node_contents(name)
                figures: Figures = figures_of(node) if node else Counter()
                self._sums.subtract(before[1] if before else {})
                self._sums.update(figures)
                self._of_nodes[name] = version, figures
                self._pace()
            return self._sums.copy()


class ClusterCollector(Collector):
    """Collects the metrics of the cluster and of this replica."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._totals = Totals(replica.state, Pace(pause_ratio=1))

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, after reading the nodes that have changed."""
        sums = self._totals.sums()
        yield from _gauges(self._replica, sums)
        yield from _of_models(sums)
        yield from _of_dialects(sums)
        yield from _of_watches(self._replica.watches())
        yield from _of_mtgpupods(self._replica.state.mtgpupods.objects())


def _gauges(replica: Replica, sums: Figures) -> Iterator[Metric]:
    """Yield the metrics without labels."""
    free = sums[Figure.FREE, ""]
    is_ready = replica.not_ready_reason() is None
    decides = replica.not_deciding_reason() is None
    for name, value, text in (
        (
            "mgpu_fragmentation_ratio",
            sums[Figure.STRANDED, ""] / free if free else 0.0,
            "Fraction of the free compute of healthy cards that is on cards in use, and so not part of a free whole "
            "card; 0 if nothing is free. Partitioned cards and cards with a GPUID do not count.",
        ),
        ("mgpu_nodes", sums[Figure.NODES, ""], "Nodes with cards."),
        (
            "mgpu_plan_barriers",
            sums[Figure.BARRIERS, ""],
            "Nodes with a partition plan that their agent has neither applied nor refused yet.",
        ),
        ("mgpu_leader", replica.leading, "1 if this replica leads, else 0."),
        ("mgpu_ready", is_ready, "1 if this replica is in sync (/readyz), else 0."),
        (
            "mgpu_decides",
            decides,
            "1 if this replica decides (/leads): it leads, is in sync, and has read the last leader's writes; else 0.",
        ),
        (
            "mgpu_labelled",
            replica.labelled,
            "1 if this replica decides and its pod has the label that the Service selects, else 0.",
        ),
        (
            "mgpu_undecided_pods",
            len(replica.state.undecided_pods()),
            "Pods that are bound without cards and wait for a late binding decision.",
        ),
        (
            "mgpu_nodes_without_agent",
            replica.state.nodes_without_agent(),
            "Nodes that get no new GPU pods because the Pod of their mgpu agent is not ready.",
        ),
    ):
        yield GaugeMetricFamily(name, text, value=value)


def _of_models(sums: Figures) -> Iterator[Metric]:
    models = sorted({key for figure, key in sums if figure in (Figure.HEALTHY, Figure.UNHEALTHY)})
    cards = GaugeMetricFamily("mgpu_cards", "Cards (GPUs) by model and health.", labels=["model", "health"])
    for model in models:
        cards.add_metric([model, "healthy"], sums[Figure.HEALTHY, model])
        cards.add_metric([model, "unhealthy"], sums[Figure.UNHEALTHY, model])
    yield cards
    for name, figure, unit, text in (
        ("mgpu_cards_idle", Figure.IDLE, 1, "Healthy cards of which no pod holds a share."),
        ("mgpu_core_capacity_cards", Figure.CORE, _MILLI, "Compute of all cards; one card counts as 1."),
        ("mgpu_core_used_cards", Figure.CORE_USED, _MILLI, "Compute that pods hold; a whole card counts as 1."),
        ("mgpu_memory_capacity_bytes", Figure.MEMORY, 1, "Memory of all cards."),
        ("mgpu_memory_used_bytes", Figure.MEMORY_USED, 1, "Memory of cards that pods hold."),
    ):
        yield _family(name, text, "model", {model: sums[figure, model] / unit for model in models})


def _of_dialects(sums: Figures) -> Iterator[Metric]:
    dialects = sorted({key for figure, key in sums if figure == Figure.PODS})
    for name, figure, unit, text in (
        (
            "mgpu_dialect_pods",
            Figure.PODS,
            1,
            "Pods that hold cards or slices, by vocabulary. ResourceClaims count as dra.",
        ),
        ("mgpu_dialect_core_cards", Figure.HELD_CORE, _MILLI, "Compute that pods hold, in cards, by vocabulary."),
        ("mgpu_dialect_memory_bytes", Figure.HELD_MEMORY, 1, "Memory of cards that pods hold, by vocabulary."),
    ):
        yield _family(name, text, "dialect", {dialect: sums[figure, dialect] / unit for dialect in dialects})


def _of_watches(watches: Mapping[str, Watch]) -> Iterator[Metric]:
    synced = {name: watch.synced for name, watch in watches.items()}
    broken = {name: watch.broken_for for name, watch in watches.items()}
    yield _family("mgpu_watch_synced", "1 once this watch has listed its objects, else 0.", "watch", synced)
    text = "Seconds since the API server last answered on this watch; 0 while the watch runs."
    yield _family("mgpu_watch_broken_seconds", text, "watch", broken)
    text = "How often this watch was interrupted and listed its objects again."
    restarts = CounterMetricFamily("mgpu_watch_restarts", text, labels=["watch"])
    for name, watch in watches.items():
        restarts.add_metric([name], watch.restarts)
    yield restarts


def _family(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


_PHASES = ("Pending", "Running", "Succeeded", "Failed", "Unknown")
_CONDITIONS = 60
"""The most series of `mgpu_mtgpupod_conditions`. mgpu causes fewer, but users who may write a status can add any number
of conditions."""


def _of_mtgpupods(items: Iterable[Mapping[str, Any]]) -> Iterator[Metric]:
    phases, reasons = Counter[str](), Counter[tuple[str, str, str]]()
    for item in items:
        status = item.get("status") or {}
        phase = str(status.get("phase"))
        phases[phase if phase in _PHASES else "Pending"] += 1
        for row in status.get("conditions") or ():
            reasons[str(row.get("type")), str(row.get("status")), str(row.get("reason"))] += 1
    yield _family("mgpu_mtgpupods", "MtgpuPods by phase.", "phase", {phase: phases[phase] for phase in _PHASES})
    text = "Conditions of MtgpuPods by type, status and reason (docs/mtgpu.md)."
    by_reason = GaugeMetricFamily("mgpu_mtgpupod_conditions", text, labels=["type", "status", "reason"])
    for labels, count in sorted(reasons.most_common(_CONDITIONS)):
        by_reason.add_metric(labels, count)
    yield by_reason
