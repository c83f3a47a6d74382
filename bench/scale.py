"""The cost of filter and prioritize for each policy, and memory, by the number of nodes and of pods.

`docs/pictures/performance.py` draws the figures. Each cluster is built in a process of its own, whose memory is
measured: `python -m bench.scale NODES PODS_EACH`. The calls are those of `Filter`, without HTTP and JSON. All nodes
have 8 cards. The shares of all pods differ, so hardly two nodes are in the same state. Before each call a pod of a
random node ends or comes back.
"""

import gc
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import orjson

from bench.clusters import CARDS, PODS
from bench.node import rss_mib
from bench.rows import Options, Row
from mgpu.model.device_object import write_device
from mgpu.model.pods import Node
from mgpu.settings import Settings, load_settings
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.gpu_pods import GpuPod, read_gpu_pod
from scheduler.decisions.filter import Filter
from tests import builders as b

NODES = (100, 500, 1_000, 2_000, 5_000, 10_000, 20_000)
PODS_EACH = (0, 2, 4, 16, 32)
"""How many pods each of `PODS_NODES` nodes has. `NODES` are measured with `bench.clusters.PODS`."""
PODS_NODES = 5_000
LEARNING = "fragmentation"
POLICIES = ("binpack", "spread", LEARNING)
KNOWN, NEW, MEMORY = "a kind of pod that came before", "a new kind of pod", "memory (RSS)"
CALLS, NEW_CALLS = 60, 5
_CHANGING = 100


@cache
def _settings(policy: str = LEARNING) -> Settings:
    """Return the settings of a scheduler with this policy. The cache has those of the one that learns."""
    return load_settings(f"nodePolicy: {policy}\ncardPolicy: {policy}")


def what(nodes: int, pods_each: int, figure: str, policy: str = "") -> str:
    """Return the name of a row."""
    return ", ".join(filter(None, (f"{nodes:,} nodes × {pods_each} pods", policy, figure)))


def clusters(options: Options) -> list[tuple[int, int]]:
    """Return the numbers of nodes and of pods on each node to measure with."""
    by_nodes = [(nodes, PODS) for nodes in options.sizes(*NODES)]
    return by_nodes if options.nodes else [*by_nodes, *((PODS_NODES, pods) for pods in PODS_EACH)]


def rows(options: Options) -> Iterator[Row]:
    for nodes, pods_each in clusters(options):
        command = [sys.executable, "-m", "bench.scale", str(nodes), str(pods_each)]
        printed = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
        found: Mapping[str, float] = orjson.loads(printed)
        for policy in POLICIES:
            for figure in (KNOWN, NEW):
                name = what(nodes, pods_each, figure, policy)
                base = found[what(nodes, pods_each, figure, POLICIES[0])] if policy != POLICIES[0] else None
                yield Row(what=name, value=found[name], unit="ms CPU", reference=base, reference_name=POLICIES[0])
        name = what(nodes, pods_each, MEMORY)
        yield Row(what=name, value=found[name], unit="MiB")


def _measure(nodes: int, pods_each: int) -> dict[str, float]:
    """Build a cluster, and return its figures by the names of their rows."""
    state = ClusterCache(_settings())
    pods = _fill(state, nodes, pods_each)
    state.forecast.refresh()
    filters = {policy: Filter(state, _settings(policy)) for policy in POLICIES}
    # Only one filter of a cache can learn, because it takes the changed nodes from the cache.
    filters[LEARNING].refresh()
    gc.collect()
    gc.freeze()  # The scheduler process does the same.
    found = {what(nodes, pods_each, MEMORY): rss_mib(os.getpid())}
    chance = random.Random(2)
    for policy, one in filters.items():
        for figure, calls, first in ((KNOWN, CALLS, 0), (NEW, NEW_CALLS, 1)):
            times = []
            for i in range(calls):
                if pods:
                    _end_or_return(state, chance.choice(pods))
                times.append(_call(one, nodes, 20 + first * (1 + i)))
            # The first call for the known kind is that of a new one.
            found[what(nodes, pods_each, figure, policy)] = statistics.median(times[1 - first :])
    return found


def _call(one: Filter, nodes: int, core: int) -> float:
    """Filter and rate all nodes for a pod. Return the CPU milliseconds."""
    names, pod = [f"node-{i}" for i in range(nodes)], _waiting(core)
    began = time.thread_time()
    one.scores(pod, one.filter(pod, names).passed)
    return 1000 * (time.thread_time() - began)


def _waiting(core: int) -> GpuPod:
    known = read_gpu_pod(_pod("waits", core, 4096, 2), _settings())
    assert known
    return known


def _fill(state: ClusterCache, nodes: int, pods_each: int) -> list[dict[str, Any]]:
    """Add nodes with pods whose shares fit beside one another. Return the pods of `_CHANGING` nodes."""
    chance, pods = random.Random(1), list[dict[str, Any]]()
    most = 60 // max(1, pods_each // CARDS)
    for i in range(nodes):
        name = f"node-{i}"
        state.node_changed(b.node(name))
        state.device_changed(write_device(Node(name), "", b.cards(CARDS, node=name)))
        for j in range(pods_each):
            core, mib, cpu = chance.randrange(5, most), 512 * chance.randrange(1, most), chance.randrange(1, 9)
            pod = _pod(f"{i}-{j}", core, mib, cpu, name, str(j % CARDS))
            state.pod_changed(pod)
            # More would count as memory of the cache.
            if i % max(1, nodes // _CHANGING) == 0:
                pods.append(pod)
    return pods


def _pod(name: str, core: int, mib: int, cpu: int, node: str = "", card: str = "") -> dict[str, Any]:
    record = {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": card} if node else {}
    raw = b.pod(name, b.container("c", core, mib), annotations=record, node=node)
    raw["spec"]["containers"][0]["resources"]["requests"]["cpu"] = str(cpu)
    return raw


def _end_or_return(state: ClusterCache, pod: dict[str, Any]) -> None:
    if state.gpu_pod(pod["metadata"]["uid"]):
        state.pod_gone(pod)
    else:
        state.pod_changed(pod)


if __name__ == "__main__":
    sys.stdout.buffer.write(orjson.dumps(_measure(int(sys.argv[1]), int(sys.argv[2]))))
