"""Pods per second from create to bound: with mgpu's extender, without it, and with an admission and extender of no use.

The playground's API server and scheduling loop do the rest, both in one Python process, so only the ratios say
something: what mgpu's deciding costs beside the same calls that decide nothing. The three take turns.
"""

import statistics
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flask import Flask, Response, jsonify, request

from bench.node import cpu_seconds
from mgpu.kube import Api
from mgpu.kube.reflector import Reflector
from mgpu.model.inventory import DEVICE_API, write_device
from mgpu.model.pods import Node
from mgpu.serving.app import new_app, probes, reviewing
from mgpu.serving.certificates import CA, ensure
from mgpu.serving.folder import Folder
from mgpu.serving.review import allow
from mgpu.serving.server import Listen, serve
from mgpu.serving.trust import publish
from playground.cluster import CORE, MEMORY, Cluster
from tests.builders import cards, share

NODES, CARDS, PODS, ROUNDS, CREATORS = 20, 8, 120, 5, 4
_PATH = "/api/v1/namespaces/default/pods"
_SECONDS = 60.0


class NoOp(Cluster):
    """The same calls to the same number of processes and threads, and nothing is decided."""

    def commands(self, ports: Mapping[str, int]) -> dict[str, list[str]]:
        run = [sys.executable, "-c", "from bench.endtoend import serve_nothing; serve_nothing()"]
        kubeconfig = str(self.kubeconfig_of("admin"))
        return {
            "webhook": [*run, "mgpu-webhook", kubeconfig, str(ports["webhook"])],
            "scheduler": [*run, "mgpu-scheduler", kubeconfig, str(ports["scheduler"]), str(ports["extender"])],
        }


def main() -> None:
    print(
        f"Create to bound: {PODS} pods on {NODES} nodes x {CARDS} cards, {CREATORS} creators, medians of {ROUNDS} turns"
    )
    clusters = {
        "with the extender": Cluster([], assets=""),
        "without the extender": Cluster([], extender=False, assets=""),
        "no-op webhook and extender": NoOp([], assets=""),
    }
    rates: dict[str, list[float]] = {name: [] for name in clusters}
    used: dict[str, float] = dict.fromkeys(clusters, 0.0)
    with ExitStack() as stack:
        for cluster in clusters.values():
            stack.enter_context(cluster)
            _add_nodes(cluster.api)
        for turn in range(ROUNDS):
            for name, cluster in clusters.items():
                before = _cpu(cluster)
                rates[name].append(_turn(cluster, turn))
                used[name] += _cpu(cluster) - before
    noop = rates["no-op webhook and extender"]
    for name, found in rates.items():
        ratio = statistics.median(rate / base for rate, base in zip(found, noop, strict=True))
        rate, cpu = statistics.median(found), 1000 * used[name] / (PODS * ROUNDS)
        spread = f"({min(found):.0f}..{max(found):.0f})"
        print(
            f"  {name:<28} {rate:6.0f} pods/s {spread:<12} {ratio:4.2f} of no-op   {cpu:4.1f} ms CPU of its scheduler per pod"
        )


def _cpu(cluster: Cluster) -> float:
    """Seconds that the scheduler process and its workers have used."""
    parent = cluster.processes["scheduler"].pid
    workers = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return sum(cpu_seconds(int(pid)) for pid in (parent, *workers))


def _add_nodes(api: Api) -> None:
    """Nodes and Devices without kubelets and agents: nothing but the way to the binding is measured."""
    capacity = {"cpu": "640", "memory": "2Ti", "pods": "1000", CORE: str(100 * CARDS), MEMORY: str(CARDS * 80 << 10)}
    for i in range(NODES):
        name = f"n{i}"
        labels = {"vke.node.gpu.schedule": "mgpu"}
        made = api.create("/api/v1/nodes", {"metadata": {"name": name, "labels": labels}})
        api.patch(f"/api/v1/nodes/{name}/status", {"status": {"capacity": capacity, "allocatable": capacity}})
        device = write_device(Node(name), made["metadata"]["uid"], cards(CARDS, node=name))
        api.create(f"/apis/{DEVICE_API}/devices", device)


def _turn(cluster: Cluster, turn: int) -> float:
    """Pods per second; the pods are gone afterwards."""
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


def serve_nothing() -> None:
    """`<configuration> <kubeconfig> <port> [<extender port>]`: the webhook's or the scheduler's calls, answered yes."""
    configuration, kubeconfig, port, *extender_port = sys.argv[1:]
    app = new_app()
    probes(app, str)
    for path, kind in (("/mutate", "Pod"), ("/validate", "Pod"), ("/bind-admission", "Binding")):
        reviewing(app, path, allow, kinds=(kind,))
    _add_extender(app)
    folder = Folder(Path(kubeconfig).parent / configuration)
    folder.path.mkdir()
    files = ensure(folder, {"127.0.0.1"}, datetime.now(UTC))
    api = Api.connect(kubeconfig)
    kinds = ["mutatingwebhookconfigurations"] + (["validatingwebhookconfigurations"] if not extender_port else [])
    for kind in kinds:
        publish(api, kind, configuration, files[CA])
    api.close()
    listen = [Listen("127.0.0.1", int(port)), *(Listen("127.0.0.1", int(p), tls=False) for p in extender_port)]
    workers, threads = (1, 64) if extender_port else (2, 8)  # as the real ones
    serve(app.wsgi_app, listen, certificate=(folder.chain, folder.key), workers=workers, threads=threads)


def _add_extender(app: Flask) -> None:
    def filter_all() -> Response:
        return jsonify({"NodeNames": request.get_json()["NodeNames"], "FailedNodes": {}})

    def score_none() -> Response:
        return jsonify([{"Host": name, "Score": 0} for name in request.get_json()["NodeNames"]])

    app.add_url_rule("/filter", "filter", filter_all, methods=["POST"])
    app.add_url_rule("/prioritize", "prioritize", score_none, methods=["POST"])


if __name__ == "__main__":
    main()
