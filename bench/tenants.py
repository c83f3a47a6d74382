"""How much longer pods of one tenant take while another tenant has pods that are hard to place.

The cluster has 200 nodes × 8 cards, and the extender is called over HTTP. Ordinary pods are filtered, scored and bound
one after the other on one connection. Meanwhile 16 hard pods of another namespace, with 30 different containers each,
are filtered again and again. They come either in turn with the ordinary pods, or on connections of their own, as if
several schedulers sent them. In the first case each comes at most once a second, because kube-scheduler waits at least
that long before it retries a pod. In the second case they are scored too.
"""

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson

from bench.rows import Options, Row
from bench.serving import Client, cluster, quantiles
from tests import builders as b

NODES, SECONDS, PODS, CONTAINERS = 200, 12.0, 16, 30
NAMES = [f"node-{i}" for i in range(NODES)]


def hard(number: int) -> dict[str, Any]:
    """Return a pod that nearly fills the cards of a node, so that it is hard to find out whether it fits."""
    pick = random.Random(number)
    containers = (
        b.container(f"c{i}", 8 + pick.randrange(24), 1024 + pick.randrange(30_000)) for i in range(CONTAINERS)
    )
    return b.pod(f"hard-{number}", *containers, namespace="tenant")


def rows(options: Options) -> Iterator[Row]:
    alone: float | None = None
    for title, connections, in_turn in (
        ("alone", 0, False),
        ("beside hard pods in the same queue", 0, True),
        ("beside hard pods on 4 connections", 4, False),
    ):
        with cluster(NODES) as client:
            with _hard_pods(client, connections) as hard_calls:
                times = _ordinary(client, options.seconds(SECONDS), in_turn=in_turn)
            (p50, p99), peak = quantiles(times), _peak(client.pid)
        what = f"filter, prioritize and bind {title}"
        said = f"p99 {p99:.2f}, longest {max(times):.0f}; {len(times)} pods, {sum(hard_calls)} hard ones elsewhere"
        yield Row(what=f"{what}, p50", value=p50, unit="ms", reference=alone, reference_name="alone", remark=said)
        yield Row(what=f"peak memory {title}", value=peak, unit="MiB")
        alone = alone or p50


def _ordinary(client: Client, seconds: float, *, in_turn: bool) -> list[float]:
    times: list[float] = []
    due = dict.fromkeys(range(PODS), 0.0) if in_turn else {}
    until, pick, count = time.monotonic() + seconds, random.Random(1), 0
    while time.monotonic() < until:
        began = time.perf_counter()
        for number in [n for n, when in due.items() if when <= time.monotonic()][:1]:
            client.post("/filter", {"Pod": hard(number), "NodeNames": NAMES})
            due[number] = time.monotonic() + 1
        count += 1
        _schedule(client, f"o{count}", pick)
        times.append((time.perf_counter() - began) * 1000)
        time.sleep(0.02)
    return times


def _schedule(client: Client, name: str, pick: random.Random) -> None:
    """Filter, score and bind an ordinary pod, and let it end."""
    raw = b.pod(name, b.container("a", 5, 512 + pick.randrange(100)), b.container("b", 3, 300))
    raw["metadata"]["resourceVersion"] = "1"
    client.post("/changed", {"pod": raw})
    passed = orjson.loads(client.post("/filter", {"Pod": raw, "NodeNames": NAMES}))["NodeNames"]
    client.post("/prioritize", {"Pod": raw, "NodeNames": passed})
    binding = {"PodName": name, "PodNamespace": "default", "PodUID": f"uid-{name}", "Node": pick.choice(passed)}
    if error := orjson.loads(client.post("/bind", binding))["Error"]:
        raise RuntimeError(error)
    ended = {**raw, "spec": {**raw["spec"], "nodeName": binding["Node"]}, "status": {"phase": "Succeeded"}}
    client.post("/changed", {"pod": ended})


@contextmanager
def _hard_pods(client: Client, connections: int) -> Iterator[list[int]]:
    """Send calls for hard pods without pauses. Yield a list that counts the hard pods sent on each connection."""
    stop, calls = threading.Event(), [0] * connections
    threads = [threading.Thread(target=_ask, args=(client, i, stop, calls)) for i in range(connections)]
    for thread in threads:
        thread.start()
    try:
        yield calls
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _ask(client: Client, i: int, stop: threading.Event, calls: list[int]) -> None:
    mine = Client(client.port, client.pid)
    while not stop.is_set():
        raw = hard((i + len(calls) * calls[i]) % PODS)
        try:
            passed = orjson.loads(mine.post("/filter", {"Pod": raw, "NodeNames": NAMES}))["NodeNames"]
            mine.post("/prioritize", {"Pod": raw, "NodeNames": passed})
        except RuntimeError:  # The extender refuses a call if too many long calls wait.
            mine = Client(client.port, client.pid)
        calls[i] += 1


def _peak(pid: int) -> int:
    """Return the peak memory in MiB of the server or of its worker, whichever is larger."""
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as children:
        pids = [pid, *map(int, children.read().split())]
    found = 0
    for one in pids:
        with open(f"/proc/{one}/status", encoding="utf-8") as lines:
            found = max(found, *(int(line.split()[1]) for line in lines if line.startswith("VmHWM")))
    return found >> 10
