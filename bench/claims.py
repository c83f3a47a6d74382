"""Compares the placement of classic pods with that of pods with ResourceClaims: `python -m bench.claims FOLDER`.

FOLDER contains the CSV files of the openb trace (`bench.openb`), so `make bench` does not run this module. The pods
arrive one after the other, and none ends. Each goes through the decision functions of the scheduler process: filter and
scores for the node, of which kube-scheduler takes the best, and then the decision on the cards of the pod or of its
claim, for which kube-scheduler has proposed the first cards. In the second run of each policy, every second pod with
GPUs uses a claim. Nothing is sent over HTTP, and every event is delivered at once.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, cast

import numpy as np

from bench.openb import NODES
from mgpu.kube import Api
from mgpu.model.cards import Card
from mgpu.model.claim_object import read_claim
from mgpu.model.device_object import write_device
from mgpu.model.pods import read_node
from mgpu.model.resource_claims import DRIVER, device_name
from mgpu.settings import CARD_POLICIES, Settings, load_settings
from playground.simulate.openb.experiment import arrivals
from playground.simulate.openb.experiment_policies import shuffled
from playground.simulate.openb.trace import Trace, demand, read_trace
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.gpu_pods import GpuPod, read_gpu_pod
from scheduler.cluster.reservations import Reservation
from scheduler.decisions.claim_decider import ClaimDecider
from scheduler.decisions.decider import Decider
from scheduler.decisions.filter import Filter
from scheduler.decisions.open_claims import OpenClaims
from scheduler.engine.learning.shapes import CARD, NodeClass, Shape
from tests import builders as b

Raw = dict[str, Any]
POLICIES = ("binpack", "fgd", "fragmentation")
SEEDS = (42,)
REPORTED = (100, 130)
LOAD = max(REPORTED) / 100
_GIB = 1 << 30
_REFRESH = 16
"""The number of pods after which learned policies are updated. The process does that each second."""


class Replay:
    """One run: the cluster, and what is free of cpu and memory, which kube-scheduler checks before mgpu."""

    def __init__(self, nodes: list[NodeClass], policy: str) -> None:
        self._settings: Settings = load_settings(f"nodePolicy: {policy}\ncardPolicy: {policy}\ndra: {{enabled: true}}")
        self._state = ClusterCache(self._settings)
        # Nothing is read from an API server: all decisions find what they need in the cache.
        api = cast(Api, None)
        self._filter = Filter(self._state, self._settings)
        self._decider = Decider(self._state, api, self._settings)
        self._claim_decider = ClaimDecider(self._state, api, self._settings)
        self._open_claims = OpenClaims(self._state, self._claim_decider)
        self._names = np.array([f"node-{i:04}" for i in range(len(nodes))])
        self._rows = {str(name): i for i, name in enumerate(self._names)}
        self._cpu = np.array([node.cpu for node in nodes])
        self._memory = np.array([node.memory for node in nodes])
        expression = f'device.driver == "{DRIVER}"'
        self._state.claims.class_changed(
            {"metadata": {"name": "mgpu"}, "spec": {"selectors": [{"cel": {"expression": expression}}]}}
        )
        for name, node in zip(map(str, self._names), nodes, strict=True):
            self._add_node(name, node)

    def _add_node(self, name: str, node: NodeClass) -> None:
        raw = b.node(name)
        raw["status"]["allocatable"] = {"cpu": f"{node.cpu}m", "memory": str(node.memory), "pods": "1000"}
        self._state.node_changed(raw)
        cards = [Card(i, f"GPU-{name}-{i}", node.model, 80 * _GIB) for i in range(node.cards)]
        if cards:
            self._state.device_changed(write_device(read_node(raw), raw["metadata"]["uid"], cards))

    def refresh(self) -> None:
        self._state.forecast.refresh()
        self._filter.refresh()

    def place(self, number: int, shape: Shape, *, claims: bool) -> bool:
        """Place a pod, and return whether it fits."""
        raw = _pod(number, shape)
        if not shape.cards:
            return self._place_without_cards(shape)
        if claims:
            self._state.claims.claim_changed(_claim(number, shape))
            raw["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimName": f"claim-{number}"}]
        else:
            raw["spec"]["containers"][0]["resources"] |= {"limits": _amounts(shape), "requests": _amounts(shape)}
            raw["metadata"]["annotations"] |= _models(shape)
        raw["spec"]["containers"][0]["resources"].setdefault("requests", {}).update(
            {"cpu": f"{shape.cpu}m", "memory": str(shape.memory)}
        )
        self._state.pod_changed(raw)
        gpu_pod = self._open_claims.read(raw) if claims else read_gpu_pod(raw, self._settings)
        assert gpu_pod is not None
        node = self._choose_node(gpu_pod, shape)
        if node is None:
            self._state.pod_gone(raw)
            return False
        annotations = self._allocate(number, shape, node, raw) if claims else self._bind(gpu_pod, node)
        self._take(node, shape)
        raw["spec"]["nodeName"] = node
        raw["metadata"]["annotations"] |= annotations
        self._state.pod_changed(raw)
        return True

    def _place_without_cards(self, shape: Shape) -> bool:
        fits = np.flatnonzero((self._cpu >= shape.cpu) & (self._memory >= shape.memory))
        if not len(fits):
            return False
        # kube-scheduler would spread these pods. Here they take the node on which the least cpu is left.
        self._take(str(self._names[fits[np.argmin(self._cpu[fits])]]), shape)
        return True

    def _choose_node(self, gpu_pod: GpuPod, shape: Shape) -> str | None:
        names = self._names[(self._cpu >= shape.cpu) & (self._memory >= shape.memory)].tolist()
        found = self._filter.filter(gpu_pod, names)
        if not found.passed:
            return None
        scores = self._filter.scores_of_passed(gpu_pod, found)
        return min(zip(found.passed, scores, strict=True), key=lambda row: (-row[1], row[0]))[0]

    def _bind(self, gpu_pod: GpuPod, node: str) -> dict[str, str]:
        decision = self._decider.decide(gpu_pod, node)
        assert isinstance(decision, Reservation), f"{gpu_pod.pod.key} has passed the filter on {node}: {decision}"
        return dict(decision.annotations)

    def _allocate(self, number: int, shape: Shape, node: str, pod: Raw) -> dict[str, str]:
        raw = _claim(number, shape)
        results = [_result(shape, node, i) for i in range(shape.cards)]
        consumer = {"resource": "pods", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}
        raw["status"] = {"allocation": {"devices": {"results": results}}, "reservedFor": [consumer]}
        decision = self._claim_decider.decide(read_claim(raw, CARD_POLICIES))
        assert isinstance(decision, Reservation), f"claim-{number} has passed the filter on {node}: {decision}"
        for result, index in zip(results, decision.placement.cards("gpu"), strict=True):
            result["device"] = device_name(index)
        raw["metadata"]["resourceVersion"] = "2"
        self._state.claims.claim_changed(raw)
        return {}

    def _take(self, node: str, shape: Shape) -> None:
        row = self._rows[node]
        self._cpu[row] -= shape.cpu
        self._memory[row] -= shape.memory


def _pod(number: int, shape: Shape) -> Raw:
    raw = b.pod(f"pod-{number}", {"name": "c", "image": "cuda", "resources": {}}, annotations={})
    raw["metadata"]["creationTimestamp"] = f"2026-01-01T00:00:{number:05}Z"
    raw["spec"]["containers"][0]["resources"]["requests"] = {"cpu": f"{shape.cpu}m", "memory": str(shape.memory)}
    return raw


def _amounts(shape: Shape) -> dict[str, str]:
    if shape.core == CARD:
        return {"nvidia.com/gpu": str(shape.cards)}
    return {b.CORE: str(shape.core // 10), b.MEMORY: "1024"}


def _models(shape: Shape) -> dict[str, str]:
    return {"mgpu.io/card-models": ",".join(shape.models)} if shape.models else {}


def _claim(number: int, shape: Shape) -> Raw:
    request: Raw = {"deviceClassName": "mgpu", "count": shape.cards}
    if shape.core != CARD:
        request["capacity"] = {"requests": {"cores": str(shape.core // 10), "memory": "1Gi"}}
    meta = {"name": f"claim-{number}", "namespace": "default", "uid": f"uid-claim-{number}", "resourceVersion": "1"}
    return {
        "metadata": {**meta, "annotations": _models(shape)},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": request}]}},
    }


def _result(shape: Shape, node: str, index: int) -> Raw:
    result: Raw = {"request": "gpu", "driver": DRIVER, "pool": node, "device": device_name(index)}
    if shape.core != CARD:
        result["consumedCapacity"] = {"cores": str(shape.core // 10), "memory": "1Gi"}
    return result


def run(trace: Trace, policy: str, seed: int, *, claims: bool) -> dict[int, float]:
    """Return the allocated percentage of the cluster's GPUs, by the percentage that the arrived pods request."""
    random = Random(seed)
    pods = arrivals(trace, random, LOAD)
    replay = Replay(shuffled(trace.nodes, random), policy)
    asked = 0
    allocated = 0
    reached: dict[int, float] = {}
    with_cards = 0
    for number, shape in enumerate(pods):
        if number % _REFRESH == 0:
            replay.refresh()
        asked += demand(shape)
        with_cards += 1 if shape.cards else 0
        if replay.place(number, shape, claims=claims and with_cards % 2 == 0):
            allocated += demand(shape)
        reached[100 * asked // trace.capacity] = 100 * allocated / trace.capacity
    return reached


def _lines(trace: Trace) -> Iterator[str]:
    for policy in POLICIES:
        for seed in SEEDS:
            began = time.monotonic()
            classic = run(trace, policy, seed, claims=False)
            mixed = run(trace, policy, seed, claims=True)
            for percent in REPORTED:
                at = max(reached for reached in classic if reached <= percent)
                change = f"{mixed[at] - classic[at]:+.2f}"
                yield f"  {policy:13} seed {seed}  {percent:4} %  {classic[at]:6.2f}  {mixed[at]:6.2f}  {change}"
            yield f"  ({time.monotonic() - began:.0f} s)"


def main(folder: Path) -> None:
    trace = read_trace(folder / NODES, folder / "openb_pod_list_default.csv")
    print(
        "Percent of the GPUs allocated: policy, arrived demand, all classic, half of the pods with claims, difference"
    )
    for line in _lines(trace):
        print(line, flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m bench.claims FOLDER")
    main(Path(sys.argv[1]))
