"""The webhook's metrics, summed over its workers: each writes its own into files of a folder that they share."""

from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from mgpu.serving import metrics
from mgpu.serving.metrics import CONTENT_TYPE, Admissions, say_version

__all__ = ["ADMISSIONS", "CONTENT_TYPE", "REGISTRY", "page"]

REGISTRY = CollectorRegistry()
ADMISSIONS = Admissions(REGISTRY)
say_version(REGISTRY, "webhook")


def page(folder: str) -> bytes:
    """What all workers have counted, those too that are gone. folder: `sharing.folder`'s."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, folder)  # type: ignore[no-untyped-call]
    return metrics.page(registry)
