"""Which evictions would violate a PodDisruptionBudget, counted as kube-scheduler counts them."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mgpu.model.pods import Pod

log = logging.getLogger(__name__)

PATH = "/apis/policy/v1/poddisruptionbudgets"

SELECTOR = 64
"""Labels, expressions and values of a selector. The API server accepts 25,000, which take 9 MiB once decoded."""
BUDGETS = 100
"""Budgets of a namespace that are compared with its pods, the first by name. Usually there is one per workload."""

Raw = Mapping[str, Any]
_Table = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Budget:
    """allowed: how many more of its pods may be disrupted now. disrupted: names of those that are on their way."""

    namespace: str
    selector: _Table
    allowed: int
    disrupted: frozenset[str]

    def covers(self, pod: Pod) -> bool:
        return pod.namespace == self.namespace and pod.name not in self.disrupted and selects(self.selector, pod.labels)


class Budgets:
    """Thread-safe. All budgets as the watch brings them; none where it brings nothing (no right to read them).

    A user of one namespace can create any number of budgets of any size. They must cost neither memory nor the time of
    evictions elsewhere. So what is beyond `SELECTOR` and `BUDGETS` protects no pod here. kube-scheduler, too, evicts
    pods that a budget protects where nothing else makes room.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, dict[str, _Budget]] = {}

    def changed(self, raw: Raw) -> None:
        spec, status = raw.get("spec") or {}, raw.get("status") or {}
        namespace, name = raw["metadata"]["namespace"], raw["metadata"]["name"]
        selector = spec.get("selector") or {}
        if _size(selector) > SELECTOR:
            text = "the budget is ignored: its selector has %d terms, more than %d; use fewer labels and values"
            log.info(text, _size(selector), SELECTOR, extra={"budget": f"{namespace}/{name}"})
            self.gone(raw)
            return
        allowed = int(status.get("disruptionsAllowed") or 0)
        budget = _Budget(namespace, selector, allowed, frozenset(status.get("disruptedPods") or ()))
        with self._lock:
            self._known.setdefault(namespace, {})[name] = budget

    def gone(self, raw: Raw) -> None:
        namespace, name = raw["metadata"]["namespace"], raw["metadata"]["name"]
        with self._lock:
            budgets = self._known.get(namespace, {})
            budgets.pop(name, None)
            if not budgets:
                self._known.pop(namespace, None)

    def violated_by(self, pods: Sequence[Pod]) -> frozenset[str]:
        """Return the uids of the pods whose eviction violates a budget if all of them are evicted in this order.

        As kube-scheduler's filterPodsWithPDBViolation: of the pods of a budget that allows two disruptions, all but
        the first two, which are the most important.
        """
        with self._lock:
            known = {
                namespace: sorted(self._known[namespace].items())[:BUDGETS]
                for namespace in {pod.namespace for pod in pods} & self._known.keys()
            }
        left = {(namespace, name): budget.allowed for namespace, rows in known.items() for name, budget in rows}
        violating = set()
        for pod in pods:
            for name, budget in known.get(pod.namespace, ()) if pod.labels else ():
                if budget.covers(pod):
                    left[pod.namespace, name] -= 1
                    if left[pod.namespace, name] < 0:
                        violating.add(pod.uid)
        return frozenset(violating)


def _size(selector: _Table) -> int:
    """Return how many labels, expressions and values a LabelSelector has."""
    expressions = selector.get("matchExpressions") or ()
    return len(selector.get("matchLabels") or {}) + sum(1 + len(row.get("values") or ()) for row in expressions)


def selects(selector: _Table, labels: Mapping[str, str]) -> bool:
    """Whether a LabelSelector matches; an empty or malformed one matches nothing (policy/v1 in kube-scheduler)."""
    wanted, expressions = selector.get("matchLabels") or {}, selector.get("matchExpressions") or ()
    if not wanted and not expressions:
        return False
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        _OPERATORS.get(row.get("operator"), _never)(labels.get(row.get("key")), row.get("values") or ())
        for row in expressions
    )


_Operator = Callable[[str | None, Sequence[str]], bool]


def _never(_: str | None, __: Sequence[str]) -> bool:
    return False


_OPERATORS: Mapping[str | None, _Operator] = {
    "In": lambda value, values: value in values,
    "NotIn": lambda value, values: value not in values,
    "Exists": lambda value, _: value is not None,
    "DoesNotExist": lambda value, _: value is None,
}
