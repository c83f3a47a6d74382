"""The agent's metrics: how it answers the kubelet, and what pods hold of each card.

`deviceplugin.health` serves /metrics. `NodeCards` collects the state of the agent and its cards at each scrape; the
parts of the agent update the other metrics. To add a metric, define it here and add a row to docs/metrics.md.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from mgpu.model.card_use import CardUse, card_uses
from mgpu.model.cards import Card
from mgpu.model.ledger import Holding, Ledger
from mgpu.serving.metrics import SECONDS, Watch, add_version_metric

REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)
add_version_metric(REGISTRY, "deviceplugin")

ALLOCATE = Histogram(
    "mgpu_allocate_seconds",
    "Duration of Allocate, by result. The result void means that the answer names no cards; PreStartContainer delivers "
    "them later.",
    ["result"],
    registry=REGISTRY,
    buckets=SECONDS,
)
PRESTART = Histogram(
    "mgpu_prestart_seconds",
    "Duration of PreStartContainer, including the wait for a decision.",
    ["result"],
    registry=REGISTRY,
    buckets=SECONDS,
)
CORRECTIONS = Counter(
    "mgpu_identity_corrections",
    "Containers for which the answer to Allocate named other cards than the allocation record of their pod. The label "
    "says what the agent corrected: answer (with CDI, the CDI file overrides the answer) or records (without CDI, the "
    "agent exchanges the records of two pods).",
    ["corrected"],
    registry=REGISTRY,
)

# Series exist from the start, so that `increase()` sees the first event of each.
for _result in ("granted", "void", "refused"):
    ALLOCATE.labels(_result)
for _result in ("granted", "refused"):
    PRESTART.labels(_result)
for _what in ("answer", "records"):
    CORRECTIONS.labels(_what)

_MILLI = 1000


class CardHoldings(NamedTuple):
    """The cards of a node, and what pods hold of them.

    Attributes:
        devices: The devices on which containers can start: the GPUs that are not partitioned, and the slices.
        held: The holdings of the pods, one for each pod.
    """

    gpus: Sequence[Card]
    devices: Sequence[Card]
    held: Sequence[Holding]


class Agent(Protocol):
    """The part of `deviceplugin.agent.Agent` that metrics report. It must be thread-safe."""

    @property
    def node(self) -> str: ...

    @property
    def watch(self) -> Watch: ...

    def card_holdings(self) -> CardHoldings: ...

    def not_ready_reason(self) -> str | None: ...

    def unreported_reason(self) -> str | None: ...

    def isolation_backend(self) -> str: ...


class NodeCards(Collector):
    """A collector that reads the state of the agent and its cards at each scrape."""

    def __init__(self, agent: Callable[[], Agent]) -> None:
        self._agent = agent

    def describe(self) -> Iterator[Metric]:
        """Yield the metrics without values. The registry asks for their names before the agent runs."""
        yield from _of_cards("", ())
        yield from _of_agent(None)

    def collect(self) -> Iterator[Metric]:
        agent = self._agent()
        gpus, devices, held = agent.card_holdings()
        ledger, name = Ledger(), agent.node
        ledger.set_cards(name, tuple(devices))
        for holding in held:
            ledger.hold(holding)
        uses = card_uses(gpus, (*ledger.cards(name), *ledger.others(name)))
        yield from _of_cards(name, uses)
        yield from _of_agent(agent)


def _of_cards(node: str, uses: Sequence[CardUse]) -> Iterator[Metric]:
    labels = ["node", "index", "uuid", "model"]
    healthy = GaugeMetricFamily("mgpu_card_healthy", "1 if the card is healthy, else 0.", labels=labels)
    text = "Compute capacity of the card; 1 is a whole card."
    core = GaugeMetricFamily("mgpu_card_core_capacity_ratio", text, labels=labels)
    text = "Compute of the card that pods hold; 1 is a whole card."
    core_used = GaugeMetricFamily("mgpu_card_core_used_ratio", text, labels=labels)
    memory = GaugeMetricFamily("mgpu_card_memory_capacity_bytes", "Memory capacity of the card.", labels=labels)
    memory_used = GaugeMetricFamily("mgpu_card_memory_used_bytes", "Memory of the card that pods hold.", labels=labels)
    for use in uses:
        card = use.card
        values = [node, str(card.index), card.uuid, card.model]
        healthy.add_metric(values, card.healthy)
        core.add_metric(values, card.core / _MILLI)
        core_used.add_metric(values, use.core / _MILLI)
        memory.add_metric(values, card.memory)
        memory_used.add_metric(values, use.memory)
    yield from (healthy, core, core_used, memory, memory_used)


def _of_agent(agent: Agent | None) -> Iterator[Metric]:
    ready = GaugeMetricFamily("mgpu_agent_ready", "1 if pods can start on this node (/readyz), else 0.")
    text = "1 if the API server has the present state of the node's cards, else 0."
    reported = GaugeMetricFamily("mgpu_agent_reported", text)
    synced = GaugeMetricFamily("mgpu_agent_watch_synced", "1 once the node's pods have been listed, else 0.")
    text = "Seconds since the watch of the node's pods was interrupted; 0 while it runs."
    broken = GaugeMetricFamily("mgpu_agent_watch_broken_seconds", text)
    isolation = GaugeMetricFamily(
        "mgpu_isolation_info",
        "The isolation back end that holds containers to their shares, or none.",
        labels=["backend"],
    )
    restarts = CounterMetricFamily(
        "mgpu_agent_watch_restarts", "How often the watch of the node's pods was interrupted and started again."
    )
    if agent is not None:
        ready.add_metric([], not agent.not_ready_reason())
        reported.add_metric([], agent.unreported_reason() is None)
        synced.add_metric([], agent.watch.synced)
        broken.add_metric([], agent.watch.broken_for)
        isolation.add_metric([agent.isolation_backend()], 1)
        restarts.add_metric([], agent.watch.restarts)
    yield from (ready, reported, isolation, synced, broken, restarts)
