"""Several runs, one process per core, with progress."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from typing import Any

from playground.simulate.openb.experiment import Run, run
from playground.simulate.openb.trace import Trace

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
