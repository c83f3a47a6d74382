"""Scores many nodes at once, for `scheduler.decisions.array_filter`.

The module scores only nodes on which the score does not depend on the cards that the pod gets. `node_assessment.score`
scores the other nodes one by one. The scores must be exactly those of `scheduler.engine.node_score`.
"""

from functools import lru_cache
from typing import Any

import numpy as np

from mgpu.model.gpu_requests import GpuRequest
from mgpu.model.pods import Stage
from scheduler.engine.arrays.node_fits import taken_amounts
from scheduler.engine.arrays.node_table import (
    ALL_CORE,
    ALL_CORE_USED,
    ALL_MEMORY,
    ALL_MEMORY_USED,
    Mask,
    NodeArrays,
    Places,
)
from scheduler.engine.node_fit import HIGHEST
from scheduler.engine.node_score import score_by_fullness
from scheduler.engine.policies import NODE_POLICIES

_DOUBT = 1e-9
"""A score that is this close to a whole number is computed again in integers. The errors of floats are about 1e-15."""


def same_on_any_cards(rows: NodeArrays, request: GpuRequest) -> Mask:
    """Return on which nodes every placement takes the same total amounts, [n]."""
    if len(request.containers) > 1 and any(c.whole or c.stage is Stage.INIT for c in request.containers):
        return np.zeros(len(rows), np.bool_)
    by_size = any(c.whole or (c.ratio and not c.memory) for c in request.containers)
    return rows.one_size() if by_size else np.ones(len(rows), np.bool_)


def scores(rows: NodeArrays, request: GpuRequest, places: Places, node_policy: str, weight_of_core: int) -> list[int]:
    """Return the score of each of these nodes. The pod must fit on them, and `same_on_any_cards` must be true there."""
    if not len(places):
        return []
    totals = (rows.totals[field].take(places) for field in (ALL_CORE_USED, ALL_MEMORY_USED, ALL_CORE, ALL_MEMORY))
    core_used, memory_used, core, memory = totals
    first_cards = rows.data[:, places, 0]
    for container in request.containers:
        of_core, of_memory, _ = taken_amounts(first_cards, container)
        core_used += container.cards * of_core
        memory_used += container.cards * of_memory
    used = (weight_of_core * (core_used / core) + (100 - weight_of_core) * (memory_used / memory)) / 100
    of_fraction: Any = NODE_POLICIES[node_policy]
    found: list[int] = of_fraction(np.minimum(used, 1.0), 1.0).astype(np.int64).tolist()
    doubtful = np.flatnonzero(np.abs(HIGHEST * used - np.rint(HIGHEST * used)) < _DOUBT).tolist()
    in_integers = lru_cache(maxsize=None)(score_by_fullness)
    sums = (array[doubtful].tolist() for array in (core_used, memory_used, core, memory))
    for i, *of_node in zip(doubtful, *sums, strict=True):
        found[i] = in_integers(*of_node, node_policy, weight_of_core)
    return found
