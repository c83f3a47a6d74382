"""The web page of 5,000 nodes × 8 cards × 8 pods: creating it, explaining waiting pods, and filter with viewers.

Everything runs in this process. During the calls of filter up to 100 pods are bound each second, and 100 pods wait with
different requests. Rounds with different numbers of viewers take turns, so that other work of the machine affects all
of them.
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
from bench.rows import Options, Row
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
ROUNDS, SECONDS = 4, 3.0
NAMES = [f"node-{i}" for i in range(NODES)]


def rows(options: Options) -> Iterator[Row]:
    settings = load_settings()
    state = ClusterCache(settings)
    fill(state, NODES)
    for i in range(WAITING):
        state.pod_changed(b.share(f"waits-{i}", 99, 79 * 1024 + i))
    filter_, board = Filter(state, settings), make_board(state, settings)
    filter_.refresh()
    sys.setswitchinterval(SWITCH_SECONDS)
    yield from _first(board)
    yield _reasons(board)
    yield from _viewed(state, board, filter_, options.repeats(ROUNDS))


def _viewed(state: ClusterCache, board: Board, filter_: Filter, rounds: int) -> Iterator[Row]:
    found: dict[int, list[float]] = {viewers: [] for viewers in VIEWERS}
    own: dict[int, float] = dict.fromkeys(VIEWERS, 0.0)
    serial, version = count(), ""
    for _ in range(rounds):
        # The viewers of a round begin with the current version, so that they do not pay for earlier changes.
        for viewers, times in found.items():
            version = _version(board, version)
            with _busy(state, board, viewers, version, serial) as spent:
                times += _filters(filter_)
            own[viewers] += sum(spent) * 1000 / (rounds * SECONDS)
    idle50, idle99 = quantiles(found[0])
    for viewers, times in found.items():
        what, (p50, p99) = f"{viewers} viewers", quantiles(times)
        reference = (None, None) if viewers == 0 else (idle50, idle99)
        for name, value, base in (("p50", p50, reference[0]), ("p99", p99, reference[1])):
            yield Row(
                what=f"filter with {what}, {name}", value=value, unit="ms", reference=base, reference_name="without"
            )
        yield Row(what=f"answers to {what}, CPU per second", value=own[viewers], unit="ms CPU")


def _first(board: Board) -> Iterator[Row]:
    began, cpu = time.perf_counter(), time.thread_time()
    version, sent, first = "", 0, 0.0
    while True:
        packed = board.since(version, "")
        answer, sent = orjson.loads(gzip.decompress(packed)), sent + len(packed)
        version, first = answer["version"], first or time.perf_counter() - began
        if not answer["todo"]:
            break
    took, cpu = time.perf_counter() - began, time.thread_time() - cpu
    yield Row(what="first view, some nodes", value=first, unit="s")
    yield Row(what="first view, all nodes", value=took, unit="s")
    yield Row(what="first view, CPU", value=cpu, unit="s CPU")
    whole = board.since("", "")
    said = f"{len(gzip.decompress(whole)) >> 10:,} KiB of JSON"
    yield Row(what="the whole page, sent", value=len(whole) / 1024, unit="KiB", remark=said)


def _reasons(board: Board) -> Row:
    began, cpu = time.perf_counter(), time.process_time()
    while True:
        pods = orjson.loads(gzip.decompress(board.since("", "")))["pending"]["pods"]
        if all(pod["why"] >= 0 for pod in pods):
            break
    took, cpu = time.perf_counter() - began, time.process_time() - cpu
    said = f"known after {took:.2f} s; includes the answers"
    return Row(what=f"why {len(pods)} pods wait, CPU", value=cpu, unit="s CPU", remark=said)


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
