"""The metrics of the webhook. Each worker process counts into files of a shared folder, and the page sums them up.

prometheus_client decides when it is imported whether it counts in files, by an environment variable. So nothing may
import this module before `webhook.main` has made the folder.
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
    """Return what all workers have counted, including workers that have ended.

    Args:
        folder: the shared folder.
    """
    registry = CollectorRegistry()
    MultiProcessCollector(registry, folder)  # type: ignore[no-untyped-call]
    return metrics.render_metrics(registry)
