"""What the scheduler tells of the cluster's present state, worked out when it is asked.

No decision waits for it: nodes are read one by one, with rests, and only those where something has changed since the
last time.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from mgpu.serving.metrics import Watch
from scheduler.api import card_figures
from scheduler.api.card_figures import Figures, figures_of
from scheduler.background import Pace
from scheduler.cluster.cache import ClusterCache

_MILLI = 1000


class Process(Protocol):
    """The part of `scheduler.runtime.Process` that is told of."""

    @property
    def leading(self) -> bool: ...

    @property
    def labelled(self) -> bool: ...

    def not_ready_reason(self) -> str | None: ...

    def not_deciding_reason(self) -> str | None: ...

    def watches(self) -> Mapping[str, Watch]: ...


class Totals:
    """The sums over all nodes. Thread-safe. pace: called after each node that was read."""

    def __init__(self, state: ClusterCache, pace: Callable[[], object]) -> None:
        self._state, self._pace, self._lock = state, pace, threading.Lock()
        self._known: dict[str, tuple[int, Figures]] = {}
        self._sums: Figures = Counter()

    def sums(self) -> Figures:
        with self._lock:
            versions = self._state.versions()
            for name in self._known.keys() - versions.keys():
                self._sums.subtract(self._known.pop(name)[1])
            for name, version in versions.items():
                before = self._known.get(name)
                if before is not None and before[0] == version:
                    continue
                found = self._state.contents(name)
                now: Figures = figures_of(found) if found else Counter()
                self._sums.subtract(before[1] if before else {})
                self._sums.update(now)
                self._known[name] = version, now
                self._pace()
            return self._sums.copy()


class Cluster(Collector):
    """mtgpupods: all that are known, as the API has them."""

    def __init__(
        self, state: ClusterCache, process: Process, mtgpupods: Callable[[], Iterable[Mapping[str, Any]]]
    ) -> None:
        self._state, self._process, self._mtgpupods = state, process, mtgpupods
        self._totals = Totals(state, Pace(rests=1))

    def describe(self) -> Iterator[Metric]:
        """Without asking anything: only for their names."""
        yield from _of_cards(Counter())
        yield from _of_process(None)
        yield from _of_mtgpupods(())
        yield _undecided(0)
        yield _without_agent(0)

    def collect(self) -> Iterator[Metric]:
        yield from _of_cards(self._totals.sums())
        yield from _of_process(self._process)
        yield from _of_mtgpupods(self._mtgpupods())
        yield _undecided(len(self._state.undecided()))
        yield _without_agent(self._state.nodes_without_agent())


def _undecided(count: int) -> Metric:
    text = "Pods that are bound without cards and wait for a late decision."
    return GaugeMetricFamily("mgpu_undecided_pods", text, value=count)


def _without_agent(count: int) -> Metric:
    text = "Nodes that get no new GPU pods, since the Pod of their mgpu agent is not ready."
    return GaugeMetricFamily("mgpu_nodes_without_agent", text, value=count)


def _of_cards(sums: Figures) -> Iterator[Metric]:
    models = sorted({who for what, who in sums if what in (card_figures.HEALTHY, card_figures.UNHEALTHY)})
    cards = GaugeMetricFamily("mgpu_cards", "Cards (GPUs) by model and health.", labels=["model", "health"])
    for model in models:
        for health in (card_figures.HEALTHY, card_figures.UNHEALTHY):
            cards.add_metric([model, health], sums[health, model])
    yield cards
    for name, what, unit, text in (
        ("mgpu_cards_idle", card_figures.IDLE, 1, "Healthy cards of which nobody holds anything."),
        ("mgpu_core_capacity_cards", card_figures.CORE, _MILLI, "Compute of all cards; one card has 1."),
        ("mgpu_core_used_cards", card_figures.CORE_USED, _MILLI, "Compute that pods hold; all of a card is 1."),
        ("mgpu_memory_capacity_bytes", card_figures.MEMORY, 1, "Memory of all cards."),
        ("mgpu_memory_used_bytes", card_figures.MEMORY_USED, 1, "Memory of cards that pods hold."),
    ):
        family = GaugeMetricFamily(name, text, labels=["model"])
        for model in models:
            family.add_metric([model], sums[what, model] / unit)
        yield family
    dialects = sorted({who for what, who in sums if what == card_figures.PODS})
    for name, what, unit, text in (
        ("mgpu_dialect_pods", card_figures.PODS, 1, "Pods that hold cards or slices, by vocabulary."),
        ("mgpu_dialect_core_cards", card_figures.HELD_CORE, _MILLI, "Compute that they hold; all of a card is 1."),
        ("mgpu_dialect_memory_bytes", card_figures.HELD_MEMORY, 1, "Memory of cards that they hold."),
    ):
        family = GaugeMetricFamily(name, text, labels=["dialect"])
        for dialect in dialects:
            family.add_metric([dialect], sums[what, dialect] / unit)
        yield family
    free, stranded = sums[card_figures.FREE, ""], sums[card_figures.STRANDED, ""]
    text = (
        "Of the compute that is free on healthy cards the share that lies on cards which are in use, so that no whole "
        "card can be had of it; 0 where nothing is free. Cards that are cut into slices or have a GPUID do not count."
    )
    yield GaugeMetricFamily("mgpu_fragmentation_ratio", text, value=stranded / free if free else 0.0)
    yield GaugeMetricFamily("mgpu_nodes", "Nodes with cards.", value=sums[card_figures.NODES, ""])
    text = "Nodes whose cards are being cut anew: a plan is made and not in force yet."
    yield GaugeMetricFamily("mgpu_plan_barriers", text, value=sums[card_figures.BARRIERS, ""])


def _of_process(process: Process | None) -> Iterator[Metric]:
    leader = GaugeMetricFamily("mgpu_leader", "1 where this replica leads, else 0.")
    ready = GaugeMetricFamily("mgpu_ready", "1 where this replica is in sync (/readyz), else 0.")
    decides = GaugeMetricFamily("mgpu_decides", "1 where this replica leads and decides (/leads), else 0.")
    text = "1 where this replica decides and its pod has the label by which the Service leads there, else 0."
    labelled = GaugeMetricFamily("mgpu_labelled", text)
    synced = GaugeMetricFamily("mgpu_watch_synced", "1 once the first list has been taken in.", labels=["watch"])
    text = "Seconds since the API server was last heard on this watch; 0 while it runs."
    broken = GaugeMetricFamily("mgpu_watch_broken_seconds", text, labels=["watch"])
    text = "Times that the watch broke and everything was listed again."
    restarts = CounterMetricFamily("mgpu_watch_restarts", text, labels=["watch"])
    if process is not None:
        leader.add_metric([], process.leading)
        ready.add_metric([], process.not_ready_reason() is None)
        decides.add_metric([], process.not_deciding_reason() is None)
        labelled.add_metric([], process.labelled)
        for name, watch in process.watches().items():
            synced.add_metric([name], watch.synced)
            broken.add_metric([name], watch.broken_for)
            restarts.add_metric([name], watch.restarts)
    yield from (leader, ready, decides, labelled, synced, broken, restarts)


_PHASES = ("Pending", "Running", "Succeeded", "Failed", "Unknown")
_MOST = 60
"""Kinds of conditions: ours are fewer, but whoever may write a status can make up some."""


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
    for labels, count in sorted(reasons.most_common(_MOST)):
        by_reason.add_metric(labels, count)
    yield from (by_phase, by_reason)
