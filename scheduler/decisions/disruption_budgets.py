"""Counts which evictions would violate a PodDisruptionBudget, as kube-scheduler counts them.

`decisions.preemption` prefers victims whose eviction violates no budget, and reports the number of violations to
kube-scheduler. kube-scheduler compares the reported numbers with its own, so both must count in the same way.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import chain, islice
from typing import Any

from mgpu.model.pods import Pod

log = logging.getLogger(__name__)

PATH = "/apis/policy/v1/poddisruptionbudgets"

SELECTOR = 64
"""The maximum number of labels, expressions and values of a selector together. A budget with more is ignored.

The API server accepts 25,000, which take 9 MiB of memory.
"""
BUDGETS = 100
"""The maximum number of budgets that are compared with one pod.

Budgets whose `matchLabels` require a label of the pod come first. Budgets whose first required label the pod does not
have are not among them, because a namespace may have hundreds of workloads with a budget each.
"""

Raw = Mapping[str, Any]
_Table = Mapping[str, Any]
_Group = tuple[str, tuple[str, str] | None]
"""A namespace, and the first label that a budget's selector requires, or None if it requires none."""


@dataclass(frozen=True, slots=True)
class _Budget:
    """The part of a PodDisruptionBudget that is stored.

    Attributes:
        allowed: How many more of its pods may be evicted now.
        disrupted: The names of the pods whose eviction is accepted but not completed. `allowed` is already reduced by
            them.
    """

    namespace: str
    selector: _Table
    allowed: int
    disrupted: frozenset[str]

    def covers(self, pod: Pod) -> bool:
        """Return whether an eviction of the pod would use up one of the allowed evictions."""
        return pod.namespace == self.namespace and pod.name not in self.disrupted and selects(self.selector, pod.labels)


class DisruptionBudgets:
    """The budgets that the watch has delivered. Thread-safe. There are none if this process may not read budgets.

    A user of one namespace can create any number of budgets of any size. They must not use up memory, or delay
    evictions in other namespaces. So budgets beyond the limits `SELECTOR` and `BUDGETS` are ignored. That is
    acceptable, because kube-scheduler also evicts pods that a budget protects if no other eviction suffices.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_group: dict[_Group, dict[str, _Budget]] = {}
        self._group_of: dict[tuple[str, str], _Group] = {}

    def changed(self, raw: Raw) -> None:
        """Store a budget that was added or modified. It is removed if its selector is too large."""
        spec = raw.get("spec") or {}
        status = raw.get("status") or {}
        namespace = raw["metadata"]["namespace"]
        name = raw["metadata"]["name"]
        selector = spec.get("selector") or {}
        if _size(selector) > SELECTOR:
            text = "Ignoring PodDisruptionBudget: its selector has %d terms, more than %d; use fewer labels and values"
            log.info(text, _size(selector), SELECTOR, extra={"budget": f"{namespace}/{name}"})
            self.gone(raw)
            return
        allowed = int(status.get("disruptionsAllowed") or 0)
        budget = _Budget(namespace, selector, allowed, frozenset(status.get("disruptedPods") or ()))
        required = selector.get("matchLabels") or {}
        group = (namespace, min(required.items()) if required else None)
        with self._lock:
            self._drop(namespace, name)
            self._by_group.setdefault(group, {})[name] = budget
            self._group_of[namespace, name] = group

    def gone(self, raw: Raw) -> None:
        with self._lock:
            self._drop(raw["metadata"]["namespace"], raw["metadata"]["name"])

    def _drop(self, namespace: str, name: str) -> None:
        group = self._group_of.pop((namespace, name), None)
        if group is not None:
            del self._by_group[group][name]
            if not self._by_group[group]:
                del self._by_group[group]

    def violated_by(self, pods: Sequence[Pod]) -> frozenset[str]:
        """Return the UIDs of the pods whose eviction violates a budget if all pods are evicted in this order.

        The function follows kube-scheduler's filterPodsWithPDBViolation. If a budget allows two evictions, the
        evictions of all its pods except for the first two violate it. The caller passes the most important pods first.
        """
        groups = {pod.uid: _groups(pod) for pod in pods if pod.labels}
        with self._lock:
            budgets = {
                group: nsmallest(BUDGETS, self._by_group[group].items())
                for group in set(chain.from_iterable(groups.values())) & self._by_group.keys()
            }
        remaining: dict[tuple[str, str], int] = {}
        violating = set()
        for pod in pods:
            rows = chain.from_iterable(budgets.get(group, ()) for group in groups.get(pod.uid, ()))
            for name, budget in islice(rows, BUDGETS):
                if budget.covers(pod):
                    key = (pod.namespace, name)
                    remaining[key] = remaining.get(key, budget.allowed) - 1
                    if remaining[key] < 0:
                        violating.add(pod.uid)
        return frozenset(violating)


def _groups(pod: Pod) -> list[_Group]:
    """Return the groups that may contain budgets of this pod, in a fixed order."""
    return [*((pod.namespace, label) for label in sorted(pod.labels.items())), (pod.namespace, None)]


def _size(selector: _Table) -> int:
    expressions = selector.get("matchExpressions") or ()
    return len(selector.get("matchLabels") or {}) + sum(1 + len(row.get("values") or ()) for row in expressions)


def selects(selector: _Table, labels: Mapping[str, str]) -> bool:
    """Return whether a LabelSelector matches. Empty and malformed selectors match nothing, as in kube-scheduler."""
    match_labels = selector.get("matchLabels") or {}
    expressions = selector.get("matchExpressions") or ()
    if not match_labels and not expressions:
        return False
    return all(labels.get(key) == value for key, value in match_labels.items()) and all(
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
