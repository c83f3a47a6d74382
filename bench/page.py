"""Measures the web page in-process, with 5,000 nodes × 8 cards and 8 pods each.

`make bench` and `python -m bench.page` run it.

It prints the cost of creating the page, the time until the page says why each pod waits, and the duration of a filter
call with no, one and ten viewers. During the filter calls up to 100 pods are bound each second, and 100 pods wait with
different requests. Rounds with different numbers of viewers take
turns, so that other work of the machine affects all of them. Compare only figures of the same run.
"""

import gzip
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import orjson

from bench.clusters import fill, running
from bench.serving import quantiles
from mgpu.model.pods import read_pod
from mgpu.settings import load_settings
from scheduler.api.page.feed import Board
from scheduler.api.page.page_app import make_board
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.gpu_pods import GpuPod, make_gpu_pod
from scheduler.decisions.filter import Filter
from scheduler.runtime import SWITCH_SECONDS
from tests import builders as b

NODES, WAITING = 5_000, 100
VIEWERS = (0, 1, 10)
ROUNDS, SECONDS = 8, 3.0
NAMES = [f"node-{i}" for i in range(NODES)]


def main() -> None:
    print(f"The page: {NODES:,} nodes × 8 cards, 8 pods each, {WAITING} pods that wait, 100 bindings/s")
    settings = load_settings()
    state = ClusterCache(settings)
    fill(state, NODES)
    for i in range(WAITING):
        state.pod_changed(b.share(f"waits-{i}", 99, 79 * 1024 + i))
    filter_, board = Filter(state, settings), make_board(state, settings)
    filter_.refresh()
    sys.setswitchinterval(SWITCH_SECONDS)
    version = _first(board)
    _reasons(board)
    found: dict[int, list[float]] = {viewers: [] for viewers in VIEWERS}
    own: dict[int, float] = dict.fromkeys(VIEWERS, 0.0)
    serial = count()
    for _ in range(ROUNDS):
        # The viewers of a round begin with the current version, so that they do not pay for earlier changes.
        for viewers, times in found.items():
            version = _version(board, version)
            with _busy(state, board, viewers, version, serial) as spent:
                times += _filters(filter_)
            own[viewers] += sum(spent) * 1000 / (ROUNDS * SECONDS)
    idle = quantiles(found[0])
    for viewers, times in found.items():
        p50, p99 = quantiles(times)
        print(f"  filter with {viewers:2} viewers: p50 {p50:.2f} p99 {p99:.2f} ms over {len(times)} calls", end="")
        print(f", {p50 / idle[0]:.2f} and {p99 / idle[1]:.2f} times the values without viewers", end="")
        print(f"; the answers take {own[viewers]:.0f} ms of CPU time per second")


def _first(board: Board) -> str:
    began, cpu = time.perf_counter(), time.thread_time()
    version, sent, first = "", 0, 0.0
    while True:
        packed = board.since(version, "")
        answer, sent = orjson.loads(gzip.decompress(packed)), sent + len(packed)
        version, first = answer["version"], first or time.perf_counter() - began
        if not answer["todo"]:
            break
    took, cpu = time.perf_counter() - began, time.thread_time() - cpu
    print(f"  first view: some nodes after {first:.2f} s, all after {took:.2f} s ({cpu:.2f} s of CPU time)")
    whole = board.since("", "")
    print(f"  the whole page: {len(whole) / 1024:.0f} KiB sent, {len(gzip.decompress(whole)) / 1024:.0f} KiB of JSON")
    return str(version)


def _reasons(board: Board) -> None:
    began, asked = time.perf_counter(), time.process_time()
    while True:
        pods = orjson.loads(gzip.decompress(board.since("", "")))["pending"]["pods"]
        if all(pod["why"] >= 0 for pod in pods):
            break
        time.sleep(0.1)
    took, cpu = time.perf_counter() - began, time.process_time() - asked
    print(f"  why {len(pods)} pods wait: known after {took:.2f} s ({cpu:.2f} s of CPU time, including the answers)")


def _version(board: Board, version: str) -> str:
    while True:
        answer = orjson.loads(gzip.decompress(board.since(version, "")))
        version = str(answer["version"])
        if not answer["todo"]:
            return version


@contextmanager
def _busy(
    state: ClusterCache, board: Board, viewers: int, version: str, serial: Iterator[int]
) -> Iterator[list[float]]:
    """Bind pods and run viewers in threads.

    At the end the yielded list has, for each viewer, the CPU seconds that the answers to it took.

    Args:
        version: The version that the viewers know at first, so that they do not read the whole page.
        serial: The numbers of the pods to bind.
    """
    stop, spent = threading.Event(), list[float]()

    def bind() -> None:
        while not stop.wait(0.01):
            i = next(serial)
            state.pod_changed(running(f"new-{i}", i * 7919 % NODES, i))

    def look() -> None:
        known, own = version, 0.0
        while not stop.wait(1.0):
            began = time.thread_time()
            packed = board.since(known, "")
            own += time.thread_time() - began
            known = orjson.loads(gzip.decompress(packed))["version"]
        spent.append(own)

    threads = [threading.Thread(target=target) for target in (bind, *[look] * viewers)]
    for thread in threads:
        thread.start()
    try:
        yield spent
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _filters(filter_: Filter) -> list[float]:
    times: list[float] = []
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        known = _known(len(times))
        began = time.perf_counter()
        filter_.filter(known, NAMES)
        times.append((time.perf_counter() - began) * 1000)
        time.sleep(0.01)
    return times


def _known(i: int) -> GpuPod:
    raw = b.share("p", 80, 4096 + i)
    known = make_gpu_pod(read_pod(raw), raw, load_settings())
    assert known is not None
    return known


if __name__ == "__main__":
    main()
