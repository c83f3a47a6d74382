"""Counts events in the scheduler, such as decisions and rejections, as Prometheus metrics.

`scheduler.api.app` serves `REGISTRY` at `/metrics`. Metrics of the cluster's current state are in
`scheduler.api.collector`. docs/metrics.md repeats the names, labels and help texts, so change both together.
"""

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector

from mgpu.serving.metrics import SECONDS, Admissions, add_version_metric

REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)
add_version_metric(REGISTRY, "scheduler")

ADMISSIONS = Admissions(REGISTRY)
EXTENDER = Histogram(
    "mgpu_extender_seconds",
    "Duration of kube-scheduler's and Volcano's calls of the extender, including their JSON: filter, predicate, bind …",
    ["verb"],
    registry=REGISTRY,
    buckets=SECONDS,
)
DECISIONS = Counter(
    "mgpu_decisions",
    "Decisions that reserved cards, by the card policy that chose them and the pod's vocabulary.",
    ["policy", "dialect"],
    registry=REGISTRY,
)
REJECTIONS = Counter(
    "mgpu_rejections",
    "Rejections of pods, by stage and by the kind of the most frequent reason. The stage is filter if the pod fits on "
    "no node, and decision if it gets no cards on the node that a scheduler has chosen.",
    ["stage", "reason"],
    registry=REGISTRY,
)
RELEASED = Counter(
    "mgpu_reservations_released",
    "Reservations that were released because their pod was not bound in time.",
    registry=REGISTRY,
)
CLAIM_REPAIRS = Counter(
    "mgpu_claim_repairs",
    "Allocations of ResourceClaims that were replaced, because they did not fit and were written without a decision.",
    registry=REGISTRY,
)
CLAIM_WAKES = Counter(
    "mgpu_claim_wakes",
    "Changes of a ResourceSlice that made kube-scheduler retry pods whose claims fit.",
    registry=REGISTRY,
)
LATE = Counter(
    "mgpu_late_decisions",
    "Late binding decisions for pods that were bound without cards, by result: decided or failed.",
    ["result"],
    registry=REGISTRY,
)
PLANS = Counter(
    "mgpu_slice_plans",
    "Partition plans, by result: made, written (to the Node), dropped (the Node had changed), or refused (by its "
    "agent). A plan can count under several results.",
    ["result"],
    registry=REGISTRY,
)
SEARCHES_ENDED = Counter(
    "mgpu_searches_ended",
    "Searches for cards that ended early: gone (the caller gave up), busy (too many other long searches), rationed "
    "(the namespace has used up its share of effort).",
    ["reason"],
    registry=REGISTRY,
)
EVENTS = Counter(
    "mgpu_warning_events",
    "Warning Events that the scheduler recorded for nodes and pods, by reason.",
    ["reason"],
    registry=REGISTRY,
)

# Each series starts at 0, so that Prometheus sees its first event as an increase.
for _verb in ("filter", "prioritize", "preempt", "bind"):
    EXTENDER.labels(_verb)
for _reason in ("gone", "busy", "rationed"):
    SEARCHES_ENDED.labels(_reason)
for _result in ("decided", "failed"):
    LATE.labels(_result)
for _result in ("made", "written", "dropped", "refused"):
    PLANS.labels(_result)
