"""Scores of the learning policies for all nodes, and their choice of cards on one node.

Everything runs in this process. Each node has 8 cards and 8 pods. Pods of 48 shapes are scored in turn, and before each
call a pod of a random node is deleted. The first call for a shape judges all nodes.
"""

import gc
import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from bench.rows import Options, Row
from bench.serving import quantiles
from mgpu.model.device_object import write_device
from mgpu.model.gpu_requests import Placement
from mgpu.model.pods import Node
from mgpu.settings import Settings, load_settings
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.forecast import LEARNING_POLICIES
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.decisions.scores import Ranking
from scheduler.engine.node_assessment import Foresight, assess
from tests import builders as b

NODES = (1_000, 5_000)
CARDS = 8
CALLS = 400
SHARES = [(core, cpu) for core in (10, 20, 25, 30, 33, 40, 50, 60, 75) for cpu in (1, 2, 4, 6, 8)]
SHAPES = [*SHARES, (100, 8), (200, 16), (400, 32)]
_INDEX = "vke.volcengine.com/gpu-index-container-c"


def rows(options: Options) -> Iterator[Row]:
    for count in options.sizes(*NODES):
        for policy in LEARNING_POLICIES:
            yield from _policy(count, policy, options.repeats(CALLS))


def _policy(count: int, policy: str, calls: int) -> Iterator[Row]:
    settings = load_settings(f"nodePolicy: {policy}\ncardPolicy: {policy}")
    state, names, chance = _filled(count, settings), [f"n{i}" for i in range(count)], random.Random(2)
    ranking = Ranking(state, settings)
    (built,) = _timed(lambda _: state.forecast.refresh(), [0])
    (warmed,) = _timed(lambda _: ranking.refresh(), [0])
    gc.collect()
    gc.freeze()  # The scheduler process does the same.
    pods = [_known(state, *shape) for shape in SHAPES]
    first = _timed(lambda pod: ranking.points(pod, names), pods)

    def prioritize(i: int) -> None:
        ranking.points(pods[i % len(pods)], names)

    def some_pod_ends(_: int) -> None:
        row = chance.randrange(count)
        state.pod_gone(_pod(f"p{row}-{chance.randrange(CARDS)}", 50, 1))

    again = _timed(prioritize, range(calls), before=some_pod_ends)
    cards = _timed(lambda i: _cards(state, settings, pods[i % len(SHARES)], names[i % count]), range(calls))
    state.pod_changed(_pod("another", 50, 1))
    what = f"{count:,} nodes, {policy}"
    for title, times in (("first call for a shape", first), ("prioritize", again), ("cards of one node", cards)):
        p50, p99 = quantiles(times)
        yield Row(
            what=f"{what}, {title}, p50", value=p50, unit="ms CPU", remark=f"p99 {p99:.2f}, longest {max(times):.2f}"
        )
    said = f"forecast {built:.0f}, ranking {warmed:.0f}"
    yield Row(what=f"{what}, preparation", value=built + warmed, unit="ms CPU", remark=said)


def _cards(state: ClusterCache, settings: Settings, known: GpuPod, name: str) -> None:
    view = state.node_snapshot(name, known.pod.uid)
    assert view.node is not None
    assert known.request is not None
    foresight = Foresight(state.forecast.judges, view.free_resources, known.pod.cpu_memory)
    found = assess(known.request, view.node, view.cards, settings, foresight)
    assert isinstance(found, Placement) or found.reason == "" or not found.hopeless


def _timed(
    call: Callable[[Any], object], over: Iterable[Any], before: Callable[[Any], object] = lambda _: None
) -> list[float]:
    """Return the CPU milliseconds of each call."""
    taken = []
    for one in over:
        before(one)
        began = time.thread_time()
        call(one)
        taken.append((time.thread_time() - began) * 1000)
    return taken


def _filled(count: int, settings: Settings) -> ClusterCache:
    state, chance = ClusterCache(settings), random.Random(1)
    for i in range(count):
        state.node_changed(b.node(f"n{i}"))
        state.device_changed(write_device(Node(f"n{i}"), "", b.cards(CARDS, node=f"n{i}")))
        for card in range(CARDS):
            state.pod_changed(_pod(f"p{i}-{card}", *chance.choice(SHARES), node=f"n{i}", card=str(card)))
    return state


def _known(state: ClusterCache, core: int, cpu: int) -> GpuPod:
    name = f"waits-{core}-{cpu}"
    state.pod_changed(_pod(name, core, cpu))
    found = state.gpu_pod(f"uid-{name}")
    assert found is not None
    return found


def _pod(name: str, core: int, cpu: int, node: str = "", card: str = "") -> dict[str, Any]:
    record = {"vke.volcengine.com/assumed": "true", _INDEX: card} if node else {}
    raw = b.pod(name, b.container("c", core, None if core >= 100 else 4096), annotations=record, node=node)
    raw["spec"]["containers"][0]["resources"]["requests"]["cpu"] = str(cpu)
    return raw
