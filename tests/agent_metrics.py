"""Pages of metrics as node agents serve them, with what containers use of their cards."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from mgpu.serving.metrics import render_metrics

CARD = ["node", "index", "uuid", "model"]
CONTAINER = ["node", "namespace", "pod", "container", "uuid", "index"]

Row = tuple[str, int, float | None, int | None]
"""A container as `namespace/pod/container`, the index of its card, and the SM utilization and memory that it uses."""


class _Page(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics


def page(
    *containers: Row, node: str = "n1", cards: Iterable[tuple[int, float | None, int | None]] = (), limit: int = 8 << 30
) -> bytes:
    """The page of an agent. The UUID of card 0 is `GPU-n1-0`, as in a file of simulated cards.

    Args:
        cards: the index of each card, and the SM utilization and memory in use.
    """
    families = {
        name: GaugeMetricFamily(name, "Some text with { and \\.", labels=CARD if "_card_" in name else CONTAINER)
        for name in (
            "mgpu_card_memory_capacity_bytes",
            "mgpu_card_memory_in_use_bytes",
            "mgpu_card_sm_utilization_ratio",
            "mgpu_container_memory_used_bytes",
            "mgpu_container_memory_limit_bytes",
            "mgpu_container_sm_utilization_ratio",
        )
    }

    def put(name: str, labels: list[str], value: float | None) -> None:
        if value is not None:
            families[name].add_metric(labels, value)

    for index, sm, memory in cards:
        labels = [node, str(index), f"GPU-{node}-{index}", "A100"]
        put("mgpu_card_memory_capacity_bytes", labels, 80 << 30)
        put("mgpu_card_memory_in_use_bytes", labels, memory)
        put("mgpu_card_sm_utilization_ratio", labels, sm)
    for name, index, sm, memory in containers:
        labels = [node, *name.split("/"), f"GPU-{node}-{index}", str(index)]
        put("mgpu_container_memory_used_bytes", labels, memory)
        put("mgpu_container_memory_limit_bytes", labels, limit)
        put("mgpu_container_sm_utilization_ratio", labels, sm)
    registry = CollectorRegistry()
    registry.register(_Page(families.values()))
    return render_metrics(registry)
