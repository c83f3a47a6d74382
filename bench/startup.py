"""The start of `mgpu scheduler` in a cluster full of GPU pods, and its memory and CPU after the start and under load.

It also measures how much CPU time a ClusterCache of the same size takes for an event of a pod, including the parsing
of JSON.
"""

import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson

from bench.clusters import CARDS, PODS, fill, running
from bench.node import cpu_seconds, rss_mib, workers
from bench.rows import Options, Row
from bench.serving import Client, quantiles
from mgpu.settings import load_settings
from playground.apiserver import write_kubeconfig
from scheduler.cluster.cache import ClusterCache
from tests import builders as b
from tests.mgpu.serving.process import Server
from tests.waiting import until

NODES, CALLS, EVENTS, IDLE_SECONDS = 5_000, 300, 20_000, 5.0


def rows(options: Options) -> Iterator[Row]:
    for nodes in options.sizes(NODES):
        what = f"{nodes:,} nodes × {CARDS} cards, {nodes * PODS:,} GPU pods"
        with _api(nodes) as url, tempfile.TemporaryDirectory() as folder:
            write_kubeconfig(Path(folder) / "kubeconfig", url, b"", "admin")
            yield from _process(what, nodes, folder, options)
        events = options.repeats(EVENTS)
        yield Row(what=f"{what}, an event of a pod", value=_event(nodes, events), unit="ms CPU")


def _process(what: str, nodes: int, folder: str, options: Options) -> Iterator[Row]:
    """Measure a scheduler process from its start."""
    began = time.perf_counter()
    run = ("-c", "from mgpu.cli.main import main; main()", "scheduler", "--no-leader-elect")
    ports = ("--host", "127.0.0.1", "--port", "0", "--extender-port", "0", "--self-signed-dir", f"{folder}/tls")
    with Server(*run, *ports, "--kubeconfig", f"{folder}/kubeconfig", addresses=2) as server:
        until(lambda: _ready(server.ports[1]), 300)
        took, parent = time.perf_counter() - began, server.process.pid
        (worker,) = workers(parent)
        yield Row(what=f"{what}, start to ready, CPU", value=cpu_seconds(worker), unit="s CPU", remark=f"{took:.1f} s")
        said = f"its parent process {rss_mib(parent):.0f}"
        yield Row(what=f"{what}, memory (RSS)", value=rss_mib(worker), unit="MiB", remark=said)
        before, seconds = cpu_seconds(worker), options.seconds(IDLE_SECONDS)
        time.sleep(seconds)
        idle = 1000 * (cpu_seconds(worker) - before) / seconds
        yield Row(what=f"{what}, idle, CPU per second", value=idle, unit="ms CPU")
        before = cpu_seconds(worker)
        times = _asked(Client(server.ports[1], worker), nodes, options.repeats(CALLS))
        cpu = 1000 * (cpu_seconds(worker) - before) / len(times)
        p50, p99 = quantiles(times)
        yield Row(what=f"{what}, filter, p50", value=p50, unit="ms", remark=f"p99 {p99:.2f}; each with a new request")
        yield Row(what=f"{what}, filter, CPU", value=cpu, unit="ms CPU")
        yield Row(what=f"{what}, memory under load", value=rss_mib(worker), unit="MiB")


@contextmanager
def _api(nodes: int) -> Iterator[str]:
    command = [sys.executable, "-m", "bench.apistub", str(nodes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.terminate()


def _ready(port: int) -> bool:
    try:
        return "ok" in Client(port, 0).get("/leads")
    except RuntimeError:
        return False


def _asked(client: Client, nodes: int, calls: int) -> list[float]:
    names = [f"node-{i}" for i in range(nodes)]
    requests = ((core, 4096 + i) for i in range(calls) for core in (20, 80))
    return [client.timed("/filter", {"Pod": b.share("p", core, mib), "NodeNames": names})[0] for core, mib in requests]


def _event(nodes: int, count: int) -> float:
    """Return the CPU milliseconds of one event."""
    state, pick = ClusterCache(load_settings()), random.Random(1)
    fill(state, nodes)
    state.refresh()
    pods = [running(f"e-{i}", pick.randrange(nodes), i) for i in range(count // 2)]
    ended = [{**pod, "status": {"phase": "Succeeded"}} for pod in pods]
    events = [orjson.dumps(pod) for pod in (*pods, *ended)]
    began = time.process_time()
    for i, event in enumerate(events):
        state.pod_changed(orjson.loads(event))
        if i % 100 == 0:
            state.refresh()
    return 1000 * (time.process_time() - began) / len(events)
