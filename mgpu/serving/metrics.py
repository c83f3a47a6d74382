"""Defines the Prometheus metrics that several processes share: version, histogram buckets, and metrics of admission.

No label may have an unlimited number of values, such as the names of pods or anything that a stranger sends. The module
must not import Flask: the node agent uses the module, and the memory of the agent is limited.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from mgpu.serving.review import Reply, Review
from mgpu.version import own_version

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
"""The upper bounds of the buckets of histograms, in seconds. A decision takes 0.2 ms, and a filter over 5,000 nodes 5
ms. By default no client waits longer than 10 s."""
CONTENT_TYPE = CONTENT_TYPE_LATEST

# Leave out the creation time of each counter. It would be one more series for each counter, and Prometheus recognizes
# a restarted counter without it.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Watch(Protocol):
    """The part of `mgpu.kube.reflector.Reflector` that metrics report."""

    restarts: int

    @property
    def synced(self) -> bool: ...

    @property
    def broken_for(self) -> float: ...


def render_metrics(*registries: CollectorRegistry) -> bytes:
    """Return these registries in the Prometheus text format. No metric may be in two of them."""
    return b"".join(map(generate_latest, registries))


def add_version_metric(registry: CollectorRegistry, part: str) -> None:
    """Add `mgpu_build_info` for a part of mgpu: `webhook`, `scheduler` or `deviceplugin`."""
    labels = ["part", "version"]
    text = "Always 1; the labels name the part of mgpu and its version."
    info = Gauge("mgpu_build_info", text, labels, registry=registry, multiprocess_mode="max")
    info.labels(part, own_version()).set(1)


class Admissions:
    """Counts admission reviews. An instance is the argument `observe` of `mgpu.serving.app.serve_reviews`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            "mgpu_admission_seconds",
            "Duration of the review of one object, by path.",
            ["path"],
            registry=registry,
            buckets=SECONDS,
        )
        self._reviews = Counter(
            "mgpu_admission_reviews",
            "Reviews by result: allowed unchanged, changed, denied, or unavailable (answered with an error, so "
            "failurePolicy applies).",
            ["path", "kind", "result"],
            registry=registry,
        )
        self._denials = Counter(
            "mgpu_admission_denials",
            "Admission rules that objects broke. A review counts each rule once (docs/metrics.md lists the rules).",
            ["path", "rule"],
            registry=registry,
        )

    def __call__(self, path: str, review: Review, reply: Reply | None, seconds: float) -> None:
        """Count one review.

        Args:
            reply: the answer; None if the review was not decided.
        """
        self._seconds.labels(path).observe(seconds)
        response: Mapping[str, Any] = reply.body.get("response", {}) if reply else {}
        self._reviews.labels(path, review.kind, _result(reply, response)).inc()
        if reply and not reply.allowed:
            for rule in sorted(reply.broken_rules):
                self._denials.labels(path, rule).inc()


def _result(reply: Reply | None, response: Mapping[str, Any]) -> str:
    if reply is None:
        return "unavailable"
    if not reply.allowed:
        return "denied"
    return "changed" if "patch" in response else "allowed"
