"""Pods that are created and bound per second, with mgpu's extender, without it, and with no-op processes.

`bench.hostile` uses `add_nodes`. Without the extender, mgpu still decides the cards when it admits the Binding.

The playground's API server and scheduling loop share one Python process. So only the ratios to the no-op processes are
meaningful: they show what mgpu's decisions cost compared with the same calls without decisions. The three clusters take
turns.
"""

import statistics
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from bench.node import cpu_seconds, workers
from bench.noop import NoOp
from bench.rows import Options, Row
from mgpu.kube import Api
from mgpu.kube.reflector import Reflector
from mgpu.model.device_object import DEVICE_API, write_device
from mgpu.model.pods import Node
from playground.cluster import Cluster
from playground.managed_resources import CORE, MEMORY
from tests.builders import cards, share

NODES, CARDS, PODS, ROUNDS, CREATORS = 20, 8, 120, 5, 4
_PATH = "/api/v1/namespaces/default/pods"
_SECONDS = 60.0


def rows(options: Options) -> Iterator[Row]:
    clusters = {
        "with the extender": Cluster([], assets=""),
        "without the extender": Cluster([], extender=False, assets=""),
        "no-op": NoOp([], assets=""),
    }
    turns = options.repeats(ROUNDS)
    rates: dict[str, list[float]] = {name: [] for name in clusters}
    used: dict[str, float] = dict.fromkeys(clusters, 0.0)
    with ExitStack() as stack:
        for cluster in clusters.values():
            stack.enter_context(cluster)
            add_nodes(cluster.api, NODES, CARDS)
        for turn in range(turns):
            for name, cluster in clusters.items():
                before = _cpu(cluster)
                rates[name].append(_turn(cluster, turn))
                used[name] += _cpu(cluster) - before
    cpu = {name: 1000 * seconds / (PODS * turns) for name, seconds in used.items()}
    noop = rates.pop("no-op")
    for name, found in rates.items():
        said = f"{min(found):.0f} to {max(found):.0f} in {turns} turns"
        rate, reference = statistics.median(found), statistics.median(noop)
        yield Row(what=name, value=rate, unit="pods/s", reference=reference, more_is_better=True, remark=said)
        yield Row(what=f"{name}, scheduler, CPU per pod", value=cpu[name], unit="ms CPU", reference=cpu["no-op"])


def _cpu(cluster: Cluster) -> float:
    """Return the CPU seconds that the scheduler process and its workers have used."""
    parent = cluster.processes["scheduler"].pid
    return sum(map(cpu_seconds, (parent, *workers(parent))))


def add_nodes(api: Api, nodes: int, cards_each: int) -> None:
    """Create Nodes and Devices without kubelets and agents, because only the time up to the binding is measured."""
    amounts = {CORE: str(100 * cards_each), MEMORY: str(cards_each * 80 << 10)}
    capacity = {"cpu": "640", "memory": "2Ti", "pods": "1000", **amounts}
    for i in range(nodes):
        name = f"n{i}"
        labels = {"vke.node.gpu.schedule": "mgpu"}
        made = api.create("/api/v1/nodes", {"metadata": {"name": name, "labels": labels}})
        api.patch(f"/api/v1/nodes/{name}/status", {"status": {"capacity": capacity, "allocatable": capacity}})
        device = write_device(Node(name), made["metadata"]["uid"], cards(cards_each, node=name))
        api.create(f"/apis/{DEVICE_API}/devices", device)


def _turn(cluster: Cluster, turn: int) -> float:
    """Return how many pods per second are created and bound. The pods are deleted afterwards."""
    bound, all_bound = set(), threading.Event()

    def seen(pod: Mapping[str, Any]) -> None:
        if pod["spec"].get("nodeName"):
            bound.add(pod["metadata"]["uid"])
            if len(bound) == PODS:
                all_bound.set()

    watch = Reflector(cluster.api, _PATH, seen, lambda _: None)
    watch.start()
    watch.wait_synced(_SECONDS)
    names = [f"p{turn}-{i}" for i in range(PODS)]
    with ThreadPoolExecutor(CREATORS) as creators:
        began = time.perf_counter()
        for _ in creators.map(lambda name: cluster.api.create(_PATH, _pod(name)), names):
            pass
        if not all_bound.wait(_SECONDS):
            raise RuntimeError(f"{PODS - len(bound)} pods were not bound within {_SECONDS:.0f} s")
        took = time.perf_counter() - began
        watch.stop()
        for _ in creators.map(lambda name: cluster.api.delete(f"{_PATH}/{name}", {"gracePeriodSeconds": 0}), names):
            pass
    return PODS / took


def _pod(name: str) -> dict[str, Any]:
    pod = share(name, core=20, mib=4096)
    return {"metadata": {"name": name}, "spec": pod["spec"]}
