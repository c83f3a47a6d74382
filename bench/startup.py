"""The start of `mgpu scheduler` in a cluster full of GPU pods, and its memory and CPU after the start and under load.

It also measures how much CPU time a ClusterCache of the same size takes for an event of a pod, including the parsing
of JSON. The pods are as large as real ones, and their records are sealed (`bench.apistub`).
"""

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from bench.apistub import SINCE
from bench.clusters import CARDS, PODS, fill, running
from bench.node import cpu_seconds, rss_mib, workers
from bench.rows import Options, Row
from bench.serving import Client, quantiles
from mgpu.settings import load_settings
from playground.apiserver import write_kubeconfig
from scheduler.cluster.cache import ClusterCache
from tests import builders as b

NODES, CALLS, EVENTS, IDLE_SECONDS = 5_000, 300, 20_000, 5.0
_POLL_SECONDS = 0.5
READY, MEMORY = "start to ready, CPU", "memory (RSS)"


def what(nodes: int, figure: str) -> str:
    """Return the name of a row."""
    return f"{nodes:,} nodes × {CARDS} cards, {nodes * PODS:,} GPU pods, {figure}"


def rows(options: Options) -> Iterator[Row]:
    for nodes in options.sizes(NODES):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            with _api(nodes, _write_keys(folder)) as url, _scheduler(folder, url) as (port, parent):
                yield from _process(nodes, port, parent, options)
        events = options.repeats(EVENTS)
        yield Row(what=what(nodes, "an event of a pod"), value=_event(nodes, events), unit="ms CPU")


def _process(nodes: int, port: int, parent: int, options: Options) -> Iterator[Row]:
    """Measure a scheduler process from its start.

    Args:
        port: The port of the extender.
        parent: The process ID of the parent process.
    """
    while not _ready(port):
        time.sleep(_POLL_SECONDS)  # Each request takes some milliseconds of the process that is measured.
    (worker,) = workers(parent)
    took, cpu, own = _age(parent), cpu_seconds(worker), cpu_seconds(parent)
    said = f"{took:.1f} s; its parent process {own:.1f} s CPU"
    yield Row(what=what(nodes, READY), value=cpu, unit="s CPU", remark=said)
    said = f"at most {_peak_mib(worker):.0f}; its parent process {rss_mib(parent):.0f}"
    yield Row(what=what(nodes, MEMORY), value=rss_mib(worker), unit="MiB", remark=said)
    before, seconds = cpu_seconds(worker), options.seconds(IDLE_SECONDS)
    time.sleep(seconds)
    idle = 1000 * (cpu_seconds(worker) - before) / seconds
    yield Row(what=what(nodes, "idle, CPU per second"), value=idle, unit="ms CPU")
    before = cpu_seconds(worker)
    times = _asked(Client(port, worker), nodes, options.repeats(CALLS))
    cpu = 1000 * (cpu_seconds(worker) - before) / len(times)
    p50, p99 = quantiles(times)
    yield Row(what=what(nodes, "filter, p50"), value=p50, unit="ms", remark=f"p99 {p99:.2f}; each with a new request")
    yield Row(what=what(nodes, "filter, CPU"), value=cpu, unit="ms CPU")
    said = f"at most {_peak_mib(worker):.0f}; its parent process {rss_mib(parent):.0f}"
    yield Row(what=what(nodes, "memory under load"), value=rss_mib(worker), unit="MiB", remark=said)


def _write_keys(folder: Path) -> Path:
    """Write the keys with which records are sealed, as an installation has them, and return the private one."""
    key = Ed25519PrivateKey.generate()
    public = folder / "public"
    public.mkdir()
    private = folder / "signing.pem"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (public / "key.pem").write_bytes(pem)
    (public / "since").write_text(SINCE)
    return private


@contextmanager
def _api(nodes: int, key: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "bench.apistub", str(nodes), str(key)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.terminate()


@contextmanager
def _scheduler(folder: Path, url: str) -> Iterator[tuple[int, int]]:
    """Yield the port of the extender and the process ID of the parent process.

    The process is not forked from another one with the modules, since their import is part of a start.
    """
    write_kubeconfig(folder / "kubeconfig", url, b"", "admin")
    run = [sys.executable, "-m", "mgpu.cli.main", "scheduler", "--no-leader-elect"]
    ports = ["--host", "127.0.0.1", "--port", "0", "--extender-port", "0", "--self-signed-dir", f"{folder}/tls"]
    command = [*run, *ports, "--kubeconfig", f"{folder}/kubeconfig"]
    keys = {"MGPU_RECORDS__SIGNINGKEY": f"{folder}/signing.pem", "MGPU_RECORDS__PUBLICKEYS": f"{folder}/public"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **keys}) as server:
        assert server.stdout is not None
        try:
            lines = [server.stdout.readline() for _ in range(2)]
            yield int(lines[1].rpartition(":")[2]), server.pid
        finally:
            server.terminate()


def _age(pid: int) -> float:
    """Return the seconds since the process began."""
    began = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return float(Path("/proc/uptime").read_text().split()[0]) - began


def _peak_mib(pid: int) -> float:
    """Return the most resident memory that the process had."""
    return int(Path(f"/proc/{pid}/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024


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
