"""Admission reviews of `mgpu webhook` over TLS: how many per second, and their latency.

The webhook has 2 workers, and the client keeps its TLS connections open. Each review contains a pod with two GPU
containers. About half of the reviews go to /mutate, and the others to /validate. The no-op webhook allows every review
and runs in the same server (`bench.noop`). The client runs on the same machine, so the figures per second include its
work.
"""

import json
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from bench.node import cpu_seconds, workers
from bench.rows import Options, Row
from bench.serving import quantiles
from tests.builders import container, pod
from tests.mgpu.serving.process import Client, Server
from tests.mgpu.serving.reviews import review

SECONDS = 3.0
CONNECTIONS = (1, 4)


class Rate(NamedTuple):
    """Latencies are in milliseconds, and CPU time is that of all workers for one review."""

    per_second: float
    p50: float
    p99: float
    worst: float
    cpu: float


def rows(options: Options) -> Iterator[Row]:
    run = "from mgpu.cli.main import main; main()"
    with ExitStack() as stack:
        folder, nothing = (stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(2))
        listen = ("--host", "127.0.0.1", "--port", "0", "--workers", "2", "--self-signed-dir", folder)
        real = stack.enter_context(Server("-c", run, "webhook", *listen))
        run = "from bench.noop import serve_nothing; serve_nothing()"
        noop = stack.enter_context(Server("-c", run, "webhook", nothing, "0"))
        for connections in CONNECTIONS:
            found = _measure(real, folder, connections, options.seconds(SECONDS))
            base = _measure(noop, nothing, connections, options.seconds(SECONDS))
            what = f"{connections} connection{'s' if connections > 1 else ''}"
            said = f"p99 {found.p99:.2f}, worst {found.worst:.1f}; no-op p99 {base.p99:.2f}"
            yield Row(
                what=f"{what}, reviews",
                value=found.per_second,
                unit="reviews/s",
                reference=base.per_second,
                more_is_better=True,
            )
            yield Row(what=f"{what}, p50", value=found.p50, unit="ms", reference=base.p50, remark=said)
            yield Row(what=f"{what}, CPU per review", value=found.cpu, unit="ms CPU", reference=base.cpu)


def _measure(server: Server, folder: str, connections: int, seconds: float) -> Rate:
    taken: list[float] = []
    threads = [threading.Thread(target=_ask, args=(server, folder, seconds, taken)) for _ in range(connections)]
    pids = workers(server.process.pid)
    began, cpu = time.perf_counter(), sum(map(cpu_seconds, pids))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rate = len(taken) / (time.perf_counter() - began)
    cpu = sum(map(cpu_seconds, pids)) - cpu
    p50, p99 = quantiles(taken)
    return Rate(rate, p50 * 1000, p99 * 1000, max(taken) * 1000, 1000 * cpu / len(taken))


def _ask(server: Server, folder: str, seconds: float, taken: list[float]) -> None:
    body = json.dumps(review(pod("p", container("a", 50, 4096), container("b", 25, 1024)))).encode()
    with Client(server.ports[0], Path(folder) / "ca.crt") as client:
        for path in ("/mutate", "/validate"):
            client.send(body, path)
            if client.receive()[0] != 200:
                raise RuntimeError(f"{path} did not answer with status 200")
        ends = time.perf_counter() + seconds
        while (began := time.perf_counter()) < ends:
            client.send(body, "/mutate" if len(taken) % 2 else "/validate")
            client.receive()
            taken.append(time.perf_counter() - began)
