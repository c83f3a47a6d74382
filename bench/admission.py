"""Measures how many admission reviews `mgpu webhook` answers per second, and their latency.

`make bench` and `python -m bench.admission` run it.

The webhook has 2 workers, and the client keeps its TLS connections open. Each review contains a pod with two GPU
containers. About half of the reviews go to /mutate, and the others to /validate. The client runs on the same machine,
so the figures include its work.
"""

import json
import tempfile
import threading
import time
from pathlib import Path

from tests.builders import container, pod
from tests.mgpu.serving.process import Client, Server
from tests.mgpu.serving.reviews import review

SECONDS = 3.0
CONNECTIONS = (1, 4)


def main() -> None:
    print("Admission: reviews over TLS, 2 workers, keep-alive")
    with tempfile.TemporaryDirectory() as folder:
        run = "from mgpu.cli.main import main; main()"
        options = ("--host", "127.0.0.1", "--port", "0", "--workers", "2", "--self-signed-dir", folder)
        server = Server("-c", run, "webhook", *options)
        try:
            for connections in CONNECTIONS:
                figures = _measure(server, folder, connections)
                print(f"  {connections} connection{'s' if connections > 1 else ' '}  {figures}")
        finally:
            server.close()


def _measure(server: Server, folder: str, connections: int) -> str:
    taken: list[float] = []
    threads = [threading.Thread(target=_ask, args=(server, folder, taken)) for _ in range(connections)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rate = len(taken) / (time.perf_counter() - began)
    taken.sort()
    p50, p99 = (taken[int(len(taken) * part)] * 1000 for part in (0.50, 0.99))
    return f"{rate:7,.0f} reviews/s   p50 {p50:.2f} ms   p99 {p99:.2f} ms   worst {taken[-1] * 1000:.1f} ms"


def _ask(server: Server, folder: str, taken: list[float]) -> None:
    body = json.dumps(review(pod("p", container("a", 50, 4096), container("b", 25, 1024)))).encode()
    with Client(server.ports[0], Path(folder) / "ca.crt") as client:
        for path in ("/mutate", "/validate"):
            client.send(body, path)
            if client.receive()[0] != 200:
                raise RuntimeError(f"{path} did not answer with status 200")
        ends = time.perf_counter() + SECONDS
        while (began := time.perf_counter()) < ends:
            client.send(body, "/mutate" if len(taken) % 2 else "/validate")
            client.receive()
            taken.append(time.perf_counter() - began)


if __name__ == "__main__":
    main()
