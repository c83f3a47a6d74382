"""The experiment of docs/design/fragmentation.md: pods arrive until they ask for 130 % of the cluster's GPUs."""

import multiprocessing
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass
from random import Random
from time import perf_counter
from typing import Any

import numpy as np

from playground.simulate.openb.policies import POLICIES, Setting, endless, shuffled
from playground.simulate.openb.trace import Trace, demand
from scheduler.engine.fragmentation.board import Board
from scheduler.engine.fragmentation.shapes import CARD, NodeClass, Shape, milli_on


class Cluster:
    """Rows are the nodes in the order given, in which ties are broken."""

    def __init__(self, nodes: Sequence[NodeClass]) -> None:
        self.board = Board()
        self._nodes = tuple(nodes)
        self._cpu, self._memory = [node.cpu for node in nodes], [node.memory for node in nodes]
        self._free = [[CARD] * node.cards for node in nodes]
        for row in range(len(self._nodes)):
            self._show(row)

    def take(self, pod: Shape, row: int, cards: Sequence[int]) -> None:
        """Raises ValueError where the pod does not fit there: no policy may give more than there is."""
        node, free = self._nodes[row], self._free[row]
        milli = milli_on(pod, node)
        if milli is None or len(set(cards)) != pod.cards or any(free[card] < milli for card in cards):
            raise ValueError(f"{pod} does not fit on the cards {cards} of {node}, free {free}")
        if self._cpu[row] < pod.cpu or self._memory[row] < pod.memory:
            raise ValueError(f"{pod} needs more than {self._cpu[row]} m cpu or {self._memory[row]} bytes of {node}")
        for card in cards:
            free[card] -= milli
        self._cpu[row] -= pod.cpu
        self._memory[row] -= pod.memory
        self._show(row)

    def _show(self, row: int) -> None:
        self.board.put(row, self._nodes[row], self._cpu[row], self._memory[row], self._free[row])


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


_POLL_SECONDS = 0.2

_done: Any = None
"""In a worker: the counter of arrivals that all of them share with their parent."""


def run_all(trace: Trace, wanted: Sequence[tuple[str, int]], load: float, progress: Callable[[int], None]) -> list[Run]:
    """The runs of (policy, seed), in that order. progress: told how many more arrivals are done, now and then."""
    workers = min(len(wanted), os.cpu_count() or 1)
    if workers == 1:
        return [run(trace, policy, seed, load, progress) for policy, seed in wanted]
    context = multiprocessing.get_context("spawn")  # a fork would copy the thread that draws the progress bar
    counter = context.Value("q", 0)
    with ProcessPoolExecutor(workers, context, _share, (counter,)) as pool:
        futures = [pool.submit(_run, trace, policy, seed, load) for policy, seed in wanted]
        told, waiting = 0, True
        try:
            while waiting:
                waiting = bool(wait(futures, _POLL_SECONDS).not_done)
                now = counter.value
                progress(now - told)
                told = now
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return [future.result() for future in futures]


def _share(counter: Any) -> None:
    global _done
    _done = counter


def _run(trace: Trace, policy: str, seed: int, load: float) -> Run:
    return run(trace, policy, seed, load, _count)


def _count(arrivals: int) -> None:
    with _done.get_lock():
        _done.value += arrivals
