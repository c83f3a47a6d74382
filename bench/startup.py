"""Measures the start of `mgpu scheduler` in a cluster full of GPU pods, and its memory after the start and under load.

`make bench` and `python -m bench.startup` run it.

It also measures how many pod events per second a ClusterCache of the same size takes in, including the parsing of JSON.
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
from bench.node import rss_mib
from bench.serving import Client, quantiles
from mgpu.settings import load_settings
from playground.apiserver import write_kubeconfig
from scheduler.cluster.cache import ClusterCache
from tests import builders as b
from tests.mgpu.serving.process import Server
from tests.waiting import until

NODES, CALLS, EVENTS = 5_000, 300, 20_000


def main() -> None:
    print(f"The scheduler process: {NODES:,} nodes x {CARDS} cards, {NODES * PODS:,} running GPU pods")
    with _api() as url, tempfile.TemporaryDirectory() as folder:
        write_kubeconfig(Path(folder) / "kubeconfig", url, b"", "admin")
        began = time.perf_counter()
        run = ("-c", "from mgpu.cli.main import main; main()", "scheduler", "--no-leader-elect")
        ports = ("--host", "127.0.0.1", "--port", "0", "--extender-port", "0", "--self-signed-dir", f"{folder}/tls")
        server = Server(*run, *ports, "--kubeconfig", f"{folder}/kubeconfig", addresses=2)
        try:
            until(lambda: _ready(server.ports[1]), 300)
            took = time.perf_counter() - began
            worker = _workers(server.process.pid)[0]
            print(f"  start to ready       {took:.1f} s")
            parent = f"its parent process {rss_mib(server.process.pid):.0f} MiB"
            print(f"  memory (RSS)         {rss_mib(worker):.0f} MiB; {parent}")
            times = _asked(Client(server.ports[1], worker))
            p50, p99 = quantiles(times)
            print(f"  filter               p50 {p50:.2f}  p99 {p99:.2f} ms, each call with a new request")
            print(f"  memory under load    {rss_mib(worker):.0f} MiB")
        finally:
            server.close()
    print(f"  events               {_events_per_second():,.0f} pod events per second, including the parsing of JSON")


@contextmanager
def _api() -> Iterator[str]:
    command = [sys.executable, "-m", "bench.apistub", str(NODES)]
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


def _workers(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def _asked(client: Client) -> list[float]:
    names = [f"node-{i}" for i in range(NODES)]
    requests = ((core, 4096 + i) for i in range(CALLS) for core in (20, 80))
    return [client.timed("/filter", {"Pod": b.share("p", core, mib), "NodeNames": names})[0] for core, mib in requests]


def _events_per_second() -> float:
    state, pick = ClusterCache(load_settings()), random.Random(1)
    fill(state, NODES)
    state.refresh()
    pods = [running(f"e-{i}", pick.randrange(NODES), i) for i in range(EVENTS // 2)]
    ended = [{**pod, "status": {"phase": "Succeeded"}} for pod in pods]
    events = [orjson.dumps(pod) for pod in (*pods, *ended)]
    began = time.perf_counter()
    for i, event in enumerate(events):
        state.pod_changed(orjson.loads(event))
        if i % 100 == 0:
            state.refresh()
    return EVENTS / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
