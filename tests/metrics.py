"""All metrics of the three processes, as their registries have them."""

import re
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Metric

import deviceplugin.metrics
import scheduler.metrics
import webhook.admission_metrics
from deviceplugin.metrics import NodeCards
from deviceplugin.usage.usage_metrics import UsageMetrics
from mgpu.settings import load_settings
from scheduler.api.collector import ClusterCollector
from scheduler.cluster.cache import ClusterCache

_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
_NAME = re.compile(r"\bmgpu_\w+")


def metrics(process: str) -> Iterator[Metric]:
    """process: webhook, scheduler or deviceplugin. Those of the process itself, of the client library, are left out."""
    nothing: Any = None
    replica: Any = SimpleNamespace(
        state=ClusterCache(load_settings()),
        leading=True,
        labelled=True,
        not_ready_reason=lambda: None,
        not_deciding_reason=lambda: None,
        watches=dict,
    )
    of_agent = (*NodeCards(nothing).describe(), *UsageMetrics(nothing, 0).describe())
    sources: Mapping[str, tuple[CollectorRegistry, Any]] = {
        "webhook": (webhook.admission_metrics.REGISTRY, ()),
        "scheduler": (scheduler.metrics.REGISTRY, ClusterCollector(replica).collect()),
        "deviceplugin": (deviceplugin.metrics.REGISTRY, of_agent),
    }
    registry, described = sources[process]
    for metric in (*registry.collect(), *described):
        if metric.name.startswith("mgpu_"):
            yield metric


def series() -> set[str]:
    """The names under which Prometheus has them."""
    found = (metric for process in ("webhook", "scheduler", "deviceplugin") for metric in metrics(process))
    return {metric.name + suffix for metric in found for suffix in _SUFFIXES[metric.type]}


def named_in(expression: str) -> set[str]:
    return set(_NAME.findall(expression))
