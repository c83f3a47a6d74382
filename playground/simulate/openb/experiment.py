"""The experiment of docs/design/fragmentation.md: pods arrive until they request more GPUs than the cluster has.

`run` runs one policy with one seed, and `run_all` runs several policies and seeds in parallel. `mgpu simulate openb`
and `bench.openb` call `run_all`. The same seed must give the same curve.
"""

import multiprocessing
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from random import Random
from time import perf_counter

import numpy as np

from playground.simulate.openb.experiment_policies import POLICIES, PolicyInput, endless, shuffled
from playground.simulate.openb.trace import Trace, demand
from scheduler.engine.learning.node_board import NodeBoard
from scheduler.engine.learning.shapes import CARD, NodeClass, Shape, milli_per_card

REPORTED = (90, 95, 100, 110, 120, 130)
"""The output reports the allocation when the arrived pods request these percentages of the cluster's GPUs."""


class ExperimentNodes:
    """The nodes and their free resources. Their order matters: most policies choose the first of several equal nodes.

    Attributes:
        board: The nodes in the form in which policies read them.
    """

    def __init__(self, nodes: Sequence[NodeClass]) -> None:
        self.board = NodeBoard()
        self._nodes = tuple(nodes)
        self._cpu = [node.cpu for node in nodes]
        self._memory = [node.memory for node in nodes]
        self._free = [[CARD] * node.cards for node in nodes]
        for row in range(len(self._nodes)):
            self._update(row)

    def take(self, pod: Shape, row: int, cards: Sequence[int]) -> None:
        """Place a pod. Raises ValueError if it does not fit, which is an error of the policy.

        Args:
            row: The position of the node in the list of nodes.
            cards: The positions of the cards on the node.
        """
        node, free = self._nodes[row], self._free[row]
        milli = milli_per_card(pod, node)
        if milli is None or len(set(cards)) != pod.cards or any(free[card] < milli for card in cards):
            raise ValueError(f"{pod} does not fit on the cards {cards} of {node}, free {free}")
        if self._cpu[row] < pod.cpu or self._memory[row] < pod.memory:
            raise ValueError(f"{pod} needs more than {self._cpu[row]} m cpu or {self._memory[row]} bytes of {node}")
        for card in cards:
            free[card] -= milli
        self._cpu[row] -= pod.cpu
        self._memory[row] -= pod.memory
        self._update(row)

    def _update(self, row: int) -> None:
        self.board.put(row, self._nodes[row], self._cpu[row], self._memory[row], self._free[row])


@dataclass(frozen=True, slots=True)
class Run:
    """The result of one policy with one seed.

    Attributes:
        policy: The name of the policy.
        seed: The seed of the random numbers.
        curve: The allocated percentage of the cluster's GPUs, by the percentage that the arrived pods request, rounded
            to an integer. The value is the mean over the arrivals with the same rounded percentage.
        placements_per_second: The number of arrived pods divided by the run time in seconds.
    """

    policy: str
    seed: int
    curve: Mapping[int, float]
    placements_per_second: float


def arrivals(trace: Trace, random: Random, load: float) -> list[Shape]:
    """Return pods of the trace that together request at least `load` times the cards of the cluster.

    The pods of the trace come in random order. If there are too few, further pods are drawn from the trace with
    replacement.
    """
    asked = 0
    found: list[Shape] = []
    source = endless(trace.pods, random)
    while asked < load * trace.capacity:
        found.append(next(source))
        asked += demand(found[-1])
    return found


def run(trace: Trace, policy: str, seed: int, load: float) -> Run:
    """Run the experiment once. A pod that does not fit when it arrives is not tried again, and no pod ends."""
    random = Random(seed)
    pods = arrivals(trace, random, load)
    nodes = ExperimentNodes(shuffled(trace.nodes, random))
    place = POLICIES[policy](PolicyInput(trace, nodes.board, random))
    asked = 0
    allocated = 0
    heights: defaultdict[int, list[int]] = defaultdict(list)
    started = perf_counter()
    for pod in pods:
        asked += demand(pod)
        spot = place(pod)
        if spot is not None:
            nodes.take(pod, *spot)
            allocated += demand(pod)
        heights[round(100 * asked / trace.capacity)].append(allocated)
    rate = len(pods) / (perf_counter() - started)
    curve = {percent: 100 * float(np.mean(found)) / trace.capacity for percent, found in heights.items()}
    return Run(policy, seed, curve, rate)


def run_all(trace: Trace, wanted: Sequence[tuple[str, int]], load: float, done: Callable[[], None]) -> list[Run]:
    """Run the experiment for every policy and seed in `wanted`, and return the results in this order.

    Several runs are distributed over at most one process per CPU core. A single run happens in this process.

    Args:
        trace: The nodes and the pods.
        wanted: The names of policies, each with a seed.
        load: The argument of `arrivals`.
        done: A function that is called after each run, unless there is only one.
    """
    workers = min(len(wanted), os.cpu_count() or 1)
    if len(wanted) == 1:
        return [run(trace, *wanted[0], load)]
    # The processes are spawned, because a fork could copy a lock while the thread of the progress bar holds it.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(run, trace, policy, seed, load) for policy, seed in wanted]
        try:
            for _ in as_completed(futures):
                done()
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return [future.result() for future in futures]
