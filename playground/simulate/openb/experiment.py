"""The experiment of the spec page fragmentation.md: pods arrive until they ask for 130 % of the cluster's GPUs."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from time import perf_counter

import numpy as np

from playground.simulate.openb.chance import endless, shuffled
from playground.simulate.openb.cluster import Cluster
from playground.simulate.openb.policies import POLICIES, Setting
from playground.simulate.openb.trace import Trace, demand
from scheduler.fragmentation.shapes import Shape

SHOWN = (90, 95, 100, 110, 120, 130)
"""Arrived percentages that are reported."""

_STEP = 100  # arrivals between two notes of progress


@dataclass(frozen=True, slots=True)
class Run:
    """One policy and seed. curve: arrived percentage, rounded → allocated percentage, the mean over its arrivals."""

    policy: str
    seed: int
    curve: Mapping[int, float]
    placements_per_second: float


def arrivals(trace: Trace, random: Random, load: float) -> list[Shape]:
    """The trace's pods in random order, then drawn with replacement, until `load` (1.3) of all cards is asked for."""
    wanted, asked = load * trace.capacity, 0
    coming, found = endless(trace.pods, random), list[Shape]()
    while asked < wanted:
        found.append(next(coming))
        asked += demand(found[-1])
    return found


def run(trace: Trace, policy: str, seed: int, load: float, progress: Callable[[int], None]) -> Run:
    """Place every arrival or refuse it, for good. progress: told how many arrivals are done, now and then."""
    random = Random(seed)
    pods = arrivals(trace, random, load)
    cluster = Cluster(shuffled(trace.nodes, random))
    place = POLICIES[policy](Setting(trace, cluster.board, random))
    asked, given, capacity = 0, 0, trace.capacity
    heights: defaultdict[int, list[int]] = defaultdict(list)
    started = perf_counter()
    for done, pod in enumerate(pods, 1):
        asked += demand(pod)
        where = place(pod)
        if where is not None:
            cluster.take(pod, *where)
            given += demand(pod)
        heights[round(100 * asked / capacity)].append(given)
        if done % _STEP == 0:
            progress(_STEP)
    rate = len(pods) / (perf_counter() - started)
    progress(len(pods) % _STEP)
    curve = {percent: 100 * float(np.mean(found)) / capacity for percent, found in heights.items()}
    return Run(policy, seed, curve, rate)
