"""Serves what containers use of the cards as metrics.

Pods come and go, so the number of series is limited: of the pairs of a container and a card, the first ones by
namespace, pod and container are served, and of those of a claim and a card the first ones by namespace and claim.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from deviceplugin.usage.claim_use import ClaimUse, claim_uses
from deviceplugin.usage.container_use import CardUsage, ContainerUse, Usage

_OF_CARD = ("node", "index", "uuid", "model")
_OF_CLAIM = ("node", "namespace", "claim", "uuid", "index")
_OF_CONTAINER = ("node", "namespace", "pod", "container", "uuid", "index")


class Agent(Protocol):
    """The part of `deviceplugin.agent.Agent` that these metrics report. It must be thread-safe."""

    @property
    def node(self) -> str: ...

    def usage(self) -> Usage: ...


class UsageMetrics(Collector):
    """A collector that reads the last measurement at each scrape.

    Args:
        most: The most pairs of a container and a card, and the most of a claim and a card.
    """

    def __init__(self, agent: Callable[[], Agent], most: int) -> None:
        self._agent = agent
        self._most = most

    def describe(self) -> Iterator[Metric]:
        """Yield the metrics without values. The registry asks for their names before the agent runs."""
        return _families("", Usage(), 0)

    def collect(self) -> Iterator[Metric]:
        agent = self._agent()
        return _families(agent.node, agent.usage(), self._most)


def _families(node: str, usage: Usage, most: int) -> Iterator[Metric]:
    yield from _of_cards(node, usage.cards)
    yield from _of_containers(node, usage.containers[:most])
    claims = claim_uses(usage.containers)
    yield from _of_claims(node, claims[:most])
    text = "1 for the reason why what containers use is not known, or not all of it (docs/usage.md)."
    problem = GaugeMetricFamily("mgpu_usage_problem", text, labels=["reason"])
    if usage.problem:
        problem.add_metric([usage.problem.value], 1)
    yield problem
    text = "Pairs of a container or claim and a card whose use is not served, because there are more than usageSeries."
    left_out = sum(max(0, len(rows) - most) for rows in (usage.containers, claims))
    yield GaugeMetricFamily("mgpu_usage_series_left_out", text, value=left_out)


def _of_cards(node: str, cards: Sequence[CardUsage]) -> Iterator[Metric]:
    text = "Memory of the card that is in use, whoever uses it, with what the driver itself uses."
    memory = GaugeMetricFamily("mgpu_card_memory_in_use_bytes", text, labels=_OF_CARD)
    text = "Part of the last seconds in which at least one kernel ran on the card."
    sm = GaugeMetricFamily("mgpu_card_sm_utilization_ratio", text, labels=_OF_CARD)
    text = "Processes on the card that belong to no container with a share of it; the server of MPS is one."
    foreign = GaugeMetricFamily("mgpu_card_foreign_processes", text, labels=_OF_CARD)
    text = "Memory of the card that processes use which belong to no container with a share of it."
    foreign_memory = GaugeMetricFamily("mgpu_card_foreign_memory_bytes", text, labels=_OF_CARD)
    for one in cards:
        values = [node, str(one.card.index), one.card.uuid, one.card.model]
        _add(memory, values, one.memory)
        _add(sm, values, one.sm)
        _add(foreign, values, one.foreign)
        _add(foreign_memory, values, one.foreign_memory)
    yield from (memory, sm, foreign, foreign_memory)


def _of_containers(node: str, containers: Sequence[ContainerUse]) -> Iterator[Metric]:
    text = "Memory of the card that the container uses."
    memory = GaugeMetricFamily("mgpu_container_memory_used_bytes", text, labels=_OF_CONTAINER)
    text = "Memory of the container's share of the card."
    limit = GaugeMetricFamily("mgpu_container_memory_limit_bytes", text, labels=_OF_CONTAINER)
    text = "Use of the card's SMs by the container since the last measurement; 1 is the whole card."
    sm = GaugeMetricFamily("mgpu_container_sm_utilization_ratio", text, labels=_OF_CONTAINER)
    for one in containers:
        values = [node, one.namespace, one.pod, one.container, one.card.uuid, str(one.card.index)]
        _add(memory, values, one.memory)
        _add(limit, values, one.limit)
        _add(sm, values, one.sm)
    yield from (memory, limit, sm)


def _of_claims(node: str, claims: Sequence[ClaimUse]) -> Iterator[Metric]:
    text = "Memory of the card that the containers of the ResourceClaim use."
    memory = GaugeMetricFamily("mgpu_claim_memory_used_bytes", text, labels=_OF_CLAIM)
    text = "Use of the card's SMs by the containers of the ResourceClaim since the last measurement; 1 is the card."
    sm = GaugeMetricFamily("mgpu_claim_sm_utilization_ratio", text, labels=_OF_CLAIM)
    for one in claims:
        values = [node, one.namespace, one.claim, one.card.uuid, str(one.card.index)]
        _add(memory, values, one.memory)
        _add(sm, values, one.sm)
    yield from (memory, sm)


def _add(family: GaugeMetricFamily, values: Sequence[str], value: float | None) -> None:
    """Add a value that is known. A value that is not known has no series, so that it is not taken for 0."""
    if value is not None:
        family.add_metric(values, value)
