"""Which evictions would violate a PodDisruptionBudget, counted as kube-scheduler counts them."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mgpu.model.pods import Pod

PATH = "/apis/policy/v1/poddisruptionbudgets"

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
    """Thread-safe. All budgets as the watch brings them; none where it brings nothing (no right to read them)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str], _Budget] = {}

    def changed(self, raw: Raw) -> None:
        spec, status = raw.get("spec") or {}, raw.get("status") or {}
        budget = _Budget(
            raw["metadata"]["namespace"],
            spec.get("selector") or {},
            int(status.get("disruptionsAllowed") or 0),
            frozenset(status.get("disruptedPods") or ()),
        )
        with self._lock:
            self._known[budget.namespace, raw["metadata"]["name"]] = budget

    def gone(self, raw: Raw) -> None:
        with self._lock:
            self._known.pop((raw["metadata"]["namespace"], raw["metadata"]["name"]), None)

    def violated_by(self, pods: Sequence[Pod]) -> frozenset[str]:
        """The uids of those whose eviction violates a budget if all these are evicted, the most important first.

        As kube-scheduler's filterPodsWithPDBViolation: of the pods of a budget that allows two disruptions, all but
        the two most important.
        """
        with self._lock:
            known = sorted(self._known.items())
        left = {key: budget.allowed for key, budget in known}
        violating = set()
        for pod in pods:
            for key, budget in known:
                if pod.labels and budget.covers(pod):
                    left[key] -= 1
                    if left[key] < 0:
                        violating.add(pod.uid)
        return frozenset(violating)


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
