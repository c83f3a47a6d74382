"""Chooses which of the nodes on which a pod fits the filter names to kube-scheduler: those with the best scores.

`api.extender` calls it. kube-scheduler scores every node that the extender names, and sends their names back for
`prioritize`, which costs it several times as much as mgpu's own decision. Without an extender it also chooses among a
sample only: in a large cluster it stops looking once 100 nodes or a few percent fit (schedule_one.go,
numFeasibleNodesToFind). The shortlist has the best nodes for the cards instead of the first ones.

A pod with preferences of its own gets all nodes, because the node that it prefers may have a bad score.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mgpu.model.raw_objects import table_at

_AFFINITIES = ("nodeAffinity", "podAffinity", "podAntiAffinity")
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def has_preferences(raw: Mapping[str, Any]) -> bool:
    """Return whether a pod prefers some nodes to others: by affinity, or by a soft topology spread constraint."""
    affinity = table_at(raw, "spec", "affinity")
    if any(table_at(affinity, kind).get(_PREFERRED) for kind in _AFFINITIES):
        return True
    constraints = table_at(raw, "spec").get("topologySpreadConstraints")
    return any(_is_soft(constraint) for constraint in constraints) if isinstance(constraints, list) else False


def _is_soft(constraint: object) -> bool:
    return isinstance(constraint, dict) and constraint.get("whenUnsatisfiable") == "ScheduleAnyway"


def best(names: Sequence[str], scores: Iterable[int], count: int) -> list[str]:
    """Return the `count` names with the highest scores, in their order. Of equal scores the first names are chosen."""
    order = np.argsort(-np.fromiter(scores, np.int64, len(names)), kind="stable")
    return [names[i] for i in sorted(order[:count].tolist())]
