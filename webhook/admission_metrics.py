"""The metrics of the webhook. Each worker process counts in files of a shared folder, and `page` adds them up.

prometheus_client reads the environment variable that names the folder when it is imported. So `webhook.main` creates
the folder before it imports this module, and no other module may import this module.
"""

from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from mgpu.serving import metrics
from mgpu.serving.metrics import CONTENT_TYPE, Admissions, add_version_metric

__all__ = ["ADMISSIONS", "CONTENT_TYPE", "REGISTRY", "page"]

REGISTRY = CollectorRegistry()
ADMISSIONS = Admissions(REGISTRY)
add_version_metric(REGISTRY, "webhook")


def page(folder: str) -> bytes:
    """Return the metrics of all workers, including workers that have ended, in the Prometheus text format."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, folder)  # type: ignore[no-untyped-call]
    return metrics.render_metrics(registry)
