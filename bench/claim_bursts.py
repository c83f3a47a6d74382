"""Pods with ResourceClaims on the real kube-scheduler: bound per second, and mixed bursts that fill all cards.

kube-controller-manager creates the claims from a template, and kube-scheduler starts when all of them exist. In the
turns without mgpu no webhook is called, and kube-scheduler calls no extender, so it chooses nodes and cards itself. The
turns alternate. Nodes are only objects, each with a ResourceSlice. Each setup is measured twice: with the 50 requests
per second that kube-scheduler sends at most by default, and without this limit, so that the CPU is the limit.

A burst consists of as many pods with claims as classic pods, in random order and of different sizes, more than the
cards can hold. It is checked that no card is ever used beyond its size, and how long pods that fit wait after the last
one was created.
"""

import os
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import orjson

from bench.control_plane import CARDS, Server, add_nodes, kube_scheduler, mgpu_server, spread
from bench.rows import Options, Row, Skipped
from mgpu.model.quantities import whole_bytes
from mgpu.model.resource_claims import CORES, MEMORY, SLICES
from mgpu.model.resource_slices import PublishedCard, make_slice
from playground.cluster import ASSETS
from playground.processes import Process, free_port
from playground.realapi import feature_gates
from tests import builders
from tests.builders import cards

NODES = 12
PODS = 300
ROUNDS = 3
_BURST_NODES = 3
_BURST_CARDS = 4
"""The cards of each node of a burst."""
_BURST_PODS = 60
_SEEDS = 10
_SIZES = ((10, 6), (20, 14), (30, 20))
"""The compute in percent of a card, and the memory in GiB, of the pods of a burst. A card has 80 GiB."""
_PODS = "/api/v1/namespaces/default/pods"
_GROUP = "/apis/resource.k8s.io/v1"
_CLAIMS = f"{_GROUP}/namespaces/default/resourceclaims"
_CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
_OWN = "mgpu-claims"
"""The name of the webhook configuration for allocations."""
_OBSERVE_SECONDS = 1.5
"""The API server observes its configurations with a delay."""
_WAIT_SECONDS = 180.0
_QUIET_SECONDS = 10.0
"""A burst ends when nothing has been bound for this time."""
_PROGRAMS = ("etcd", "kube-apiserver", "kube-scheduler", "kube-controller-manager")

Raw = dict[str, Any]


class Setup(StrEnum):
    """What of mgpu takes part in a turn."""

    ALL = "webhook and extender"
    WEBHOOK = "webhook only"
    WITHOUT = "without mgpu"


@dataclass(frozen=True, slots=True)
class Burst:
    """What one burst has shown.

    Attributes:
        over: How often a card was seen that was used beyond its size.
        stranded: The pods that were not bound although they fit when the burst ended.
        late: The seconds from the last creation to the last binding.
    """

    bound: int
    over: int
    stranded: int
    late: float


def rows(options: Options) -> Iterator[Row]:
    assets = Path(os.environ.get(ASSETS, ""))
    if not os.environ.get(ASSETS) or not all((assets / name).is_file() for name in _PROGRAMS):
        raise Skipped(f"{ASSETS} names no directory with {', '.join(_PROGRAMS)}")
    with mgpu_server(assets, components=("dra",)) as (server, extender), _controllers(assets, server):
        add_nodes(server, NODES)
        _publish(server, NODES, CARDS)
        _create_templates(server)
        for limited in (True, False):
            rates: dict[Setup, list[float]] = {setup: [] for setup in Setup}
            for _ in range(options.repeats(ROUNDS)):
                for setup in Setup:
                    rates[setup].append(_rate(assets, server, extender, setup, limited))
            yield from _rate_rows(rates, limited)
    yield from _burst_rows(assets, options.repeats(_SEEDS))


def _rate_rows(rates: dict[Setup, list[float]], limited: bool) -> Iterator[Row]:
    without = rates[Setup.WITHOUT]
    limit = "kube-scheduler's default limit of requests" if limited else "no limit of requests"
    for setup in (Setup.WEBHOOK, Setup.ALL):
        yield Row(
            what=f"claims bound, {NODES} nodes, {PODS} pods, {limit}, {setup}",
            value=_median(rates[setup]),
            unit="pods/s",
            reference=_median(without),
            reference_name="without mgpu",
            more_is_better=True,
            remark=f"single turns {_listed(rates[setup])}; without {_listed(without)}",
        )


def _burst_rows(assets: Path, seeds: int) -> Iterator[Row]:
    with mgpu_server(assets, components=("dra",)) as (server, extender), _controllers(assets, server):
        add_nodes(server, _BURST_NODES, _BURST_CARDS)
        _publish(server, _BURST_NODES, _BURST_CARDS)
        _create_templates(server)
        with kube_scheduler(assets, server, extender, 0):
            bursts = [_burst(server, seed) for seed in range(seeds)]
    what = (
        f"{seeds} bursts of {_BURST_PODS} claims and {_BURST_PODS} classic pods on {_BURST_NODES * _BURST_CARDS} cards"
    )
    bound = ", ".join(str(burst.bound) for burst in bursts)
    yield Row(
        what=f"{what}: cards over their size", value=sum(b.over for b in bursts), unit="", remark=f"bound {bound}"
    )
    yield Row(what=f"{what}: pods stranded", value=sum(b.stranded for b in bursts), unit="")
    late = max(burst.late for burst in bursts)
    yield Row(what=f"{what}: last binding after the last creation, slowest burst", value=late, unit="s")


def _rate(assets: Path, server: Server, extender: str, setup: Setup, limited: bool) -> float:
    """Return how many pods with claims are bound per second."""
    configurations = {one["metadata"]["name"]: one for one in _items(server, _CONFIGURATIONS)}
    kept = {Setup.ALL: configurations.keys(), Setup.WEBHOOK: {_OWN}, Setup.WITHOUT: set[str]()}[setup]
    removed = [one for name, one in configurations.items() if name not in kept]
    with _without_webhooks(server, removed):
        bodies = [orjson.dumps(_claiming(f"r-{i}", 10)) for i in range(PODS)]
        spread(server, PODS, lambda client, i: client.call("POST", _PODS, bodies[i]))
        _wait(lambda: len(_items(server, _CLAIMS)) == PODS)
        with kube_scheduler(assets, server, extender if setup is Setup.ALL else None, 0, limited=limited):
            began = time.monotonic()
            _wait(lambda: len(_items(server, f"{_PODS}?fieldSelector=spec.nodeName%21%3D")) == PODS)
            took = time.monotonic() - began
        _clear(server)
    return PODS / took


def _burst(server: Server, seed: int) -> Burst:
    chance = random.Random(seed)
    bodies = []
    for i in range(2 * _BURST_PODS):
        core, gib = chance.choice(_SIZES)
        raw = _claiming(f"c{seed}-{i}", core) if i % 2 else builders.share(f"p{seed}-{i}", core, gib << 10)
        raw["metadata"].pop("uid", None)
        bodies.append(orjson.dumps(raw))
    chance.shuffle(bodies)
    spread(server, len(bodies), lambda client, i: client.call("POST", _PODS, bodies[i]))
    created = last = time.monotonic()
    bound = over = 0
    while time.monotonic() - last < _QUIET_SECONDS:
        count = len(_items(server, f"{_PODS}?fieldSelector=spec.nodeName%21%3D"))
        over += sum(core > 100 or memory > 80 << 30 for core, memory in _used(server).values())
        if count != bound:
            bound = count
            last = time.monotonic()
        time.sleep(0.2)
    stranded = _stranded(server)
    _clear(server)
    return Burst(bound, over, stranded, max(0.0, last - created))


def _used(server: Server) -> dict[tuple[str, str], tuple[int, int]]:
    """Return the used core in percent and memory in bytes of each card, by its node and device, from API objects."""
    used: defaultdict[tuple[str, str], tuple[int, int]] = defaultdict(lambda: (0, 0))
    for claim in _items(server, _CLAIMS):
        for result in claim.get("status", {}).get("allocation", {}).get("devices", {}).get("results", ()):
            consumed = result["consumedCapacity"]
            core, memory = used[result["pool"], result["device"]]
            used[result["pool"], result["device"]] = core + int(consumed[CORES]), memory + whole_bytes(consumed[MEMORY])
    for pod in _items(server, f"{_PODS}?fieldSelector=spec.nodeName%21%3D"):
        index = pod["metadata"].get("annotations", {}).get("vke.volcengine.com/gpu-index-container-c")
        if index is not None:
            limits = pod["spec"]["containers"][0]["resources"]["limits"]
            key = pod["spec"]["nodeName"], f"card-{index}"
            core, memory = used[key]
            used[key] = core + int(limits[builders.CORE]), memory + (int(limits[builders.MEMORY]) << 20)
    return dict(used)


def _stranded(server: Server) -> int:
    """Return how many of the waiting pods fit on some card, counted one by one."""
    used = _used(server)
    names = [(f"node-{i}", f"card-{card}") for i in range(_BURST_NODES) for card in range(_BURST_CARDS)]
    waiting = [pod for pod in _items(server, _PODS) if not pod["spec"].get("nodeName")]
    return sum(
        any(
            used.get(name, (0, 0))[0] + core <= 100 and used.get(name, (0, 0))[1] + memory <= 80 << 30 for name in names
        )
        for core, memory in map(_size, waiting)
    )


def _size(pod: Raw) -> tuple[int, int]:
    claims = pod["spec"].get("resourceClaims")
    limits = pod["spec"]["containers"][0]["resources"].get("limits", {})
    core = int(claims[0]["resourceClaimTemplateName"].rpartition("-")[2]) if claims else int(limits[builders.CORE])
    return core, dict(_SIZES)[core] << 30


def _claiming(name: str, core: int) -> Raw:
    raw = builders.pod(name, {"name": "c", "image": "cuda", "resources": {"claims": [{"name": "gpu"}]}})
    raw["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimTemplateName": f"share-{core}"}]
    del raw["metadata"]["uid"]
    return raw


def _create_templates(server: Server) -> None:
    for core, gib in _SIZES:
        exactly = {"deviceClassName": "mgpu", "capacity": {"requests": {CORES: str(core), MEMORY: f"{gib}Gi"}}}
        template = {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaimTemplate",
            "metadata": {"name": f"share-{core}"},
            "spec": {"spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}},
        }
        path = f"{_GROUP}/namespaces/default/resourceclaimtemplates"
        server.client().call("POST", path, orjson.dumps(template))


def _publish(server: Server, nodes: int, count: int) -> None:
    for i in range(nodes):
        name = f"node-{i}"
        uid = orjson.loads(server.client().call("GET", f"/api/v1/nodes/{name}"))["metadata"]["uid"]
        published = [PublishedCard(card, card.core, card.memory) for card in cards(count, node=name)]
        server.client().call("POST", SLICES, orjson.dumps(make_slice(name, uid, published, 1, {})))


@contextmanager
def _controllers(assets: Path, server: Server) -> Iterator[None]:
    """Run kube-controller-manager with the controllers that create and delete claims."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        flags = {
            "kubeconfig": server.kubeconfig,
            "controllers": "resourceclaim-controller,garbage-collector-controller",
            "leader-elect": "false",
            "bind-address": "127.0.0.1",
            "secure-port": free_port(),
            "cert-dir": name,
            "kube-api-qps": 500,
            "kube-api-burst": 1000,
            **feature_gates(),
        }
        command = [str(assets / "kube-controller-manager"), *(f"--{key}={value}" for key, value in flags.items())]
        process = Process("kube-controller-manager", command, Path(name) / "log", os.environ)
        process.start()
        try:
            yield
        finally:
            process.stop()


@contextmanager
def _without_webhooks(server: Server, removed: list[Raw]) -> Iterator[None]:
    """Delete these webhook configurations inside the context."""
    for one in removed:
        server.client().call("DELETE", f"{_CONFIGURATIONS}/{one['metadata']['name']}")
    time.sleep(_OBSERVE_SECONDS)
    try:
        yield
    finally:
        for one in removed:
            meta = {"name": one["metadata"]["name"], "labels": one["metadata"].get("labels", {})}
            server.client().call("POST", _CONFIGURATIONS, orjson.dumps({**one, "metadata": meta}))
        time.sleep(_OBSERVE_SECONDS)


def _clear(server: Server) -> None:
    server.client().call("DELETE", f"{_PODS}?gracePeriodSeconds=0")
    _wait(lambda: not _items(server, _PODS) and not _items(server, _CLAIMS))


def _items(server: Server, path: str) -> list[Raw]:
    found: list[Raw] = orjson.loads(server.client().call("GET", path))["items"]
    return found


def _wait(is_done: Any) -> None:
    until = time.monotonic() + _WAIT_SECONDS
    while not is_done():
        if time.monotonic() > until:
            raise RuntimeError(f"not done after {_WAIT_SECONDS:.0f} s")
        time.sleep(0.1)


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _listed(values: list[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in values)
