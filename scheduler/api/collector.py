"""Computes the metrics of the cluster's current state when Prometheus scrapes them.

`scheduler.api.app` registers `ClusterCollector` for `/metrics`. Metrics of events (decisions, rejections) are counters
in `scheduler.metrics`. A scrape must not delay decisions, so the collector reads one node at a time, pauses in between,
and reads only the nodes that have changed since the last scrape. docs/metrics.md lists names, labels and help texts; a
test compares it with this module.
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
from scheduler.api.replica import Replica
from scheduler.background import Pace
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.node_snapshots import NodeContents

_MILLI = 1000


class Figure(Enum):
    """A quantity that is summed over all nodes. Core is in milli, memory in bytes, so that sums stay exact."""

    # By model of the card.
    HEALTHY = "healthy cards"
    UNHEALTHY = "unhealthy cards"
    IDLE = "idle cards"
    CORE = "core"
    CORE_USED = "core used"
    MEMORY = "memory"
    MEMORY_USED = "memory used"
    # By dialect of the pod.
    PODS = "pods"
    HELD_CORE = "core held"
    HELD_MEMORY = "memory held"
    # Of all nodes together; the second part of the key is "".
    NODES = "nodes"
    BARRIERS = "nodes whose partition plan is not in force yet"
    FREE = "free core"
    STRANDED = "free core on cards in use"


Figures = Counter[tuple[Figure, str]]
"""A figure, and the model or dialect of which it is."""


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
        if not holding.occupies:  # an occupy pod holds the card for MtgpuPods, which are counted themselves
            core, memory = held_amounts(holding, devices)
            counts[Figure.PODS, holding.dialect] += 1
            counts[Figure.HELD_CORE, holding.dialect] += core
            counts[Figure.HELD_MEMORY, holding.dialect] += memory
    counts[Figure.NODES, ""] += bool(node.cards)
    counts[Figure.BARRIERS, ""] += node.slices.has_pending_plan
    return +counts


class Totals:
    """The sums of the figures over all nodes. Thread-safe.

    Args:
        pace: Called after each node that was read; may sleep.
    """

    def __init__(self, cache: ClusterCache, pace: Callable[[], object]) -> None:
        self._cache = cache
        self._pace = pace
        self._lock = threading.Lock()
        self._of_nodes: dict[str, tuple[int, Figures]] = {}
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

    def describe(self) -> Iterator[Metric]:
        """Yield the metrics without values. The registry and the test of docs/metrics.md take the names from them."""
        yield from _of_cards(Counter())
        yield from _of_replica(None)
        yield from _of_mtgpupods(())
        yield _undecided(0)
        yield _without_agent(0)

    def collect(self) -> Iterator[Metric]:
        cache = self._replica.state
        yield from _of_cards(self._totals.sums())
        yield from _of_replica(self._replica)
        yield from _of_mtgpupods(cache.mtgpupods.objects())
        yield _undecided(len(cache.undecided_pods()))
        yield _without_agent(cache.nodes_without_agent())


def _undecided(count: int) -> Metric:
    text = "Pods that are bound without cards and wait for a late binding decision."
    return GaugeMetricFamily("mgpu_undecided_pods", text, value=count)


def _without_agent(count: int) -> Metric:
    text = "Nodes that get no new GPU pods because the Pod of their mgpu agent is not ready."
    return GaugeMetricFamily("mgpu_nodes_without_agent", text, value=count)


def _of_cards(sums: Figures) -> Iterator[Metric]:
    yield from _by_model(sums)
    yield from _by_dialect(sums)
    free = sums[Figure.FREE, ""]
    text = (
        "Fraction of the free compute of healthy cards that is on cards in use, and so in no whole card; 0 if nothing "
        "is free. Partitioned cards and cards with a GPUID do not count."
    )
    ratio = sums[Figure.STRANDED, ""] / free if free else 0.0
    yield GaugeMetricFamily("mgpu_fragmentation_ratio", text, value=ratio)
    yield GaugeMetricFamily("mgpu_nodes", "Nodes with cards.", value=sums[Figure.NODES, ""])
    text = "Nodes whose cards are being partitioned: a plan is made and not in force yet."
    yield GaugeMetricFamily("mgpu_plan_barriers", text, value=sums[Figure.BARRIERS, ""])


def _by_model(sums: Figures) -> Iterator[Metric]:
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
        family = GaugeMetricFamily(name, text, labels=["model"])
        for model in models:
            family.add_metric([model], sums[figure, model] / unit)
        yield family


def _by_dialect(sums: Figures) -> Iterator[Metric]:
    dialects = sorted({key for figure, key in sums if figure == Figure.PODS})
    for name, figure, unit, text in (
        ("mgpu_dialect_pods", Figure.PODS, 1, "Pods that hold cards or slices, by vocabulary."),
        (
            "mgpu_dialect_core_cards",
            Figure.HELD_CORE,
            _MILLI,
            "Compute that pods hold; a whole card counts as 1.",
        ),
        ("mgpu_dialect_memory_bytes", Figure.HELD_MEMORY, 1, "Memory of cards that pods hold."),
    ):
        family = GaugeMetricFamily(name, text, labels=["dialect"])
        for dialect in dialects:
            family.add_metric([dialect], sums[figure, dialect] / unit)
        yield family


def _of_replica(replica: Replica | None) -> Iterator[Metric]:
    leader = GaugeMetricFamily("mgpu_leader", "1 if this replica leads, else 0.")
    ready = GaugeMetricFamily("mgpu_ready", "1 if this replica is in sync (/readyz), else 0.")
    decides = GaugeMetricFamily("mgpu_decides", "1 if this replica leads and decides (/leads), else 0.")
    text = "1 if this replica decides and its pod has the label that the Service selects, else 0."
    labelled = GaugeMetricFamily("mgpu_labelled", text)
    synced = GaugeMetricFamily("mgpu_watch_synced", "1 once the first list has been read.", labels=["watch"])
    text = "Seconds since the API server last answered on this watch; 0 while the watch runs."
    broken = GaugeMetricFamily("mgpu_watch_broken_seconds", text, labels=["watch"])
    text = "How often the watch broke and everything was listed again."
    restarts = CounterMetricFamily("mgpu_watch_restarts", text, labels=["watch"])
    if replica is not None:
        leader.add_metric([], replica.leading)
        ready.add_metric([], replica.not_ready_reason() is None)
        decides.add_metric([], replica.not_deciding_reason() is None)
        labelled.add_metric([], replica.labelled)
        for name, watch in replica.watches().items():
            synced.add_metric([name], watch.synced)
            broken.add_metric([name], watch.broken_for)
            restarts.add_metric([name], watch.restarts)
    yield from (leader, ready, decides, labelled, synced, broken, restarts)


_PHASES = ("Pending", "Running", "Succeeded", "Failed", "Unknown")
_CONDITIONS = 60
"""The most label sets of conditions. mgpu writes fewer, but a user who may write a status can add any number."""


def _of_mtgpupods(items: Iterable[Mapping[str, Any]]) -> Iterator[Metric]:
    phases, reasons = Counter[str](), Counter[tuple[str, str, str]]()
    for item in items:
        status = item.get("status") or {}
        phase = str(status.get("phase"))
        phases[phase if phase in _PHASES else "Pending"] += 1
        for row in status.get("conditions") or ():
            reasons[str(row.get("type")), str(row.get("status")), str(row.get("reason"))] += 1
    by_phase = GaugeMetricFamily("mgpu_mtgpupods", "MtgpuPods by phase.", labels=["phase"])
    for phase in _PHASES:
        by_phase.add_metric([phase], phases[phase])
    text = "Conditions of MtgpuPods by type, status and reason (docs/mtgpu.md)."
    by_reason = GaugeMetricFamily("mgpu_mtgpupod_conditions", text, labels=["type", "status", "reason"])
    for labels, count in sorted(reasons.most_common(_CONDITIONS)):
        by_reason.add_metric(labels, count)
    yield from (by_phase, by_reason)
