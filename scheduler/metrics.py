"""Metrics of events in the scheduler. Those of the cluster's current state are in `scheduler.api.collector`."""

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector

from mgpu.serving.metrics import SECONDS, Admissions, add_version_metric

REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)
add_version_metric(REGISTRY, "scheduler")

ADMISSIONS = Admissions(REGISTRY)
EXTENDER = Histogram(
    "mgpu_extender_seconds",
    "Time that a call of kube-scheduler took, its JSON included: filter, prioritize, preempt or bind.",
    ["verb"],
    registry=REGISTRY,
    buckets=SECONDS,
)
DECISIONS = Counter(
    "mgpu_decisions",
    "Cards decided and reserved, by the card policy that chose them and the pod's vocabulary.",
    ["policy", "dialect"],
    registry=REGISTRY,
)
REJECTIONS = Counter(
    "mgpu_rejections",
    "Refusals by the kind of the reason that most cards or nodes gave. stage filter: no node was left to the pod; "
    "stage decision: the node that was chosen had no cards for it.",
    ["stage", "reason"],
    registry=REGISTRY,
)
RELEASED = Counter(
    "mgpu_reservations_released",
    "Reservations given up because their pod was not bound in time.",
    registry=REGISTRY,
)
LATE = Counter(
    "mgpu_late_decisions",
    "Pods that were bound without cards, by what became of them: decided or failed.",
    ["result"],
    registry=REGISTRY,
)
PLANS = Counter(
    "mgpu_slice_plans",
    "Plans to cut a node's cards anew: made, written, dropped (the node had changed), refused (by its agent).",
    ["result"],
    registry=REGISTRY,
)
SEARCHES_ENDED = Counter(
    "mgpu_searches_ended",
    "Searches for cards that were ended before they had an answer: gone (their caller waits no more), busy (too many "
    "others that take long), rationed (their namespace has used up its share of effort).",
    ["reason"],
    registry=REGISTRY,
)
EVENTS = Counter(
    "mgpu_warning_events",
    "Warning Events that the scheduler has to tell of nodes and pods, by reason.",
    ["reason"],
    registry=REGISTRY,
)

for _verb in ("filter", "prioritize", "preempt", "bind"):  # from the start, so that the first of each is an increase
    EXTENDER.labels(_verb)
for _reason in ("gone", "busy", "rationed"):
    SEARCHES_ENDED.labels(_reason)
for _result in ("decided", "failed"):
    LATE.labels(_result)
for _result in ("made", "written", "dropped", "refused"):
    PLANS.labels(_result)
