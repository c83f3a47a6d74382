"""`mgpu webhook` under a flood of large reviews."""

import re
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
import yaml

from mgpu.model.quantities import whole_bytes
from tests.builders import pod
from tests.fuzz.hostile import asking
from tests.mgpu.serving.process import Client, Server
from tests.mgpu.serving.reviews import review

MIB = 1 << 20
SENT = 64 * MIB
"""Bytes of all bodies of a flood. Without limits, as many of the smallest of these bodies take more than the limit."""
DEPLOYMENT = Path(__file__).parents[2] / "manifests/base/webhook-deployment.yaml"
SLICES = pod("p", *(asking(f"c{i}", "nvidia.com/mig-1g.10gb") for i in range(20_000)))
BODIES: dict[str, Callable[[], bytes]] = {
    "2 MiB of empty objects": lambda: orjson.dumps(review({"spec": {"containers": [{}] * (2 * MIB // 3)}})),
    "8 MiB of empty objects": lambda: orjson.dumps(review({"spec": {"containers": [{}] * (8 * MIB // 3 - 200)}})),
    "8 MiB of text that decodes to 32": lambda: orjson.dumps(review({"a": "x" * (8 * MIB - 500) + "\U0001f600"})),
    "1.4 MiB of containers": lambda: orjson.dumps(review(SLICES)),
}


def memory_limit() -> int:
    containers = yaml.safe_load(DEPLOYMENT.read_text())["spec"]["template"]["spec"]["containers"]
    return whole_bytes(containers[0]["resources"]["limits"]["memory"])


@pytest.fixture(scope="module")
def processes(server: Server) -> list[int]:
    """Return the numbers of the process and its workers."""
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(server.process.pid)], capture_output=True, text=True)
    return [server.process.pid, *map(int, children.stdout.split())]


def memory(processes: list[int]) -> int:
    """Return the bytes of memory of these processes. Shared pages count once."""
    found = 0
    for pid in processes:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        match = re.search(r"^Pss: +(\d+) kB", text, re.MULTILINE)
        assert match
        found += int(match[1]) << 10
    return found


@pytest.mark.parametrize("make", BODIES.values(), ids=BODIES)
def test_flood_of_large_reviews_stays_within_the_memory_limit_and_delays_ordinary_reviews_little(
    server: Server, processes: list[int], folder: Path, make: Callable[[], bytes]
) -> None:
    body, answers, longest = make(), Counter[int](), 0
    clients = min(32, SENT // len(body) + 2)

    def post() -> None:
        nonlocal longest
        with Client(server.ports[0], folder / "ca.crt") as client:
            client.send(body, "/validate")
            status, _, answer = client.receive()
        answers[status] += 1
        longest = max(longest, len(answer))

    threads = [threading.Thread(target=post) for _ in range(clients)]
    for thread in threads:
        thread.start()
    peak, ordinary = memory(processes), []
    while running := [thread for thread in threads if thread.is_alive()]:
        began = time.monotonic()
        with Client(server.ports[0], folder / "ca.crt") as client:
            assert client.request(review(pod("p", asking("c", "nvidia.com/mig-1g.10gb"))), "/validate")[0] == 200
        ordinary.append(time.monotonic() - began)
        peak = max(peak, memory(processes))
        running[-1].join(0.02)
    assert sum(answers.values()) == clients
    assert answers.keys() <= {200, 413, 503}
    assert longest < 64 << 10
    assert peak < memory_limit()
    assert max(ordinary) < 5, "the API server waits for 5 s"


def test_body_of_unknown_length_is_read_up_to_the_limit(server: Server, folder: Path) -> None:
    chunk = b"x" * MIB
    with Client(server.ports[0], folder / "ca.crt") as client:
        head = (
            "POST /validate HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        client.wire.sendall(head.encode())
        for _ in range(10):
            client.wire.sendall(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
        client.wire.sendall(b"0\r\n\r\n")
        status, _, answer = client.receive()
    assert (status, orjson.loads(answer)) == (413, {"error": "the body is larger than 8388608 bytes"})
