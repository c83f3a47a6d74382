"""A client of an extender with a synthetic cluster, for the benchmarks that measure calls over HTTP.

Most sections use `quantiles`.
"""

import http.client
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import orjson


class Client:
    """One connection that is kept alive, for one thread at a time. `pid` is the process ID of the server."""

    def __init__(self, port: int, pid: int) -> None:
        self.port, self.pid = port, pid
        self._connection = http.client.HTTPConnection("127.0.0.1", port)
        self._cpu_of_asking: float | None = None

    def close(self) -> None:
        """Close the connection. The next call opens another one."""
        self._connection.close()

    def post(self, path: str, body: Any) -> bytes:
        self._connection.request("POST", path, orjson.dumps(body), {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        data = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status} {data[:200]!r}")
        return data

    def get(self, path: str) -> str:
        self._connection.request("GET", path)
        answer = self._connection.getresponse()
        text = answer.read().decode()
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status} {text[:200]}")
        return text

    def timed(self, path: str, body: Any) -> tuple[float, bytes]:
        """Return the duration of the POST in milliseconds, and the answer."""
        began = time.perf_counter()
        answer = self.post(path, body)
        return (time.perf_counter() - began) * 1000, answer

    def cpu(self) -> float:
        """Return the CPU milliseconds that the process of the extender has used (`bench.made`)."""
        return float(self.get("/cpu"))

    def cpu_of_asking(self) -> float:
        """Return the CPU milliseconds of the server between two calls of `cpu` with nothing between them."""
        if self._cpu_of_asking is None:
            read = [self.cpu() for _ in range(101)]
            self._cpu_of_asking = quantiles([after - before for before, after in pairwise(read)])[0]
        return self._cpu_of_asking


def quantiles(times: list[float]) -> tuple[float, float]:
    """Return the median and the 99th percentile."""
    times = sorted(times)
    return times[len(times) // 2], times[len(times) * 99 // 100]


@contextmanager
def cluster(nodes: int, spare: int = 0, policy: str = "binpack") -> Iterator[Client]:
    """Yield a client of a new process that runs `bench.made.serve_cluster` with these arguments."""
    arguments = f"{nodes}, {spare}, {policy!r}"
    command = [sys.executable, "-c", f"from bench.made import serve_cluster; serve_cluster({arguments})"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield Client(int(server.stdout.readline().rpartition(":")[2]), server.pid)
        finally:
            server.terminate()
