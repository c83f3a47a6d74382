"""Measures `bind` of the extender over HTTP with 100, 1,000 and 5,000 nodes, and then a burst of pods.

`make bench` and `python -m bench.binding` run it.

In the burst several clients with a connection each fill the last free cards of a cluster, as several schedulers would.
Each client takes one of the best nodes at random. It retries a pod if no node passes the filter or the binding is
refused. The API server is a stub that takes no time, so the figures are those of mgpu.
"""

import random
import threading
import time
from collections import Counter, deque

import orjson

from bench.serving import Client, cluster, quantiles
from tests import builders as b

NODES, BINDS = (100, 1_000, 5_000), 400
BURST_NODES, BURST_PODS, CLIENTS = 1_000, 1_000, 4


def main() -> None:
    print(f"bind over HTTP, one connection, {BINDS} pods onto nodes picked at random")
    for nodes in NODES:
        with cluster(nodes) as client:
            print(f"  {nodes:5,} nodes  {_binds(client, nodes)}", flush=True)
    print(f"A burst of {BURST_PODS:,} pods by {CLIENTS} clients onto the last free cards of {BURST_NODES:,} nodes")
    with cluster(BURST_NODES, BURST_PODS // 2) as client:
        print(f"  {_burst(client)}")


def _binds(client: Client, nodes: int) -> str:
    times, pick = [], random.Random(3)
    for i in range(BINDS):
        _create(client, f"b{i}")
        took, answer = client.timed("/bind", _binding(f"b{i}", f"node-{2 * pick.randrange(nodes // 2)}"))
        if orjson.loads(answer)["Error"]:
            raise RuntimeError(answer.decode())
        times.append(took)
    (p50, p99), (decided50, decided99) = quantiles(times), quantiles(orjson.loads(client.post("/took", {})))
    rate = 1000 * len(times) / sum(times)
    return f"p50 {p50:.2f}  p99 {p99:.2f} ms  {rate:.0f}/s   decision p50 {decided50:.2f}  p99 {decided99:.2f} ms"


def _burst(client: Client) -> str:
    waiting = deque(f"p{i}" for i in range(BURST_PODS))
    for name in waiting:
        _create(client, name, core=50)
    counts: Counter[str] = Counter()
    clients = [
        threading.Thread(target=_schedule, args=(Client(client.port, client.pid), waiting, counts, seed))
        for seed in range(CLIENTS)
    ]
    began = time.perf_counter()
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    took = time.perf_counter() - began
    _, decided99 = quantiles(orjson.loads(client.post("/took", {})))
    refused = f"{counts['refused']} bindings refused ({100 * counts['refused'] / counts['bound']:.1f} %)"
    return f"{counts['bound']:,} bound, {BURST_PODS / took:.0f}/s, {refused}, p99 of the decisions {decided99:.2f} ms"


def _schedule(client: Client, waiting: deque[str], counts: Counter[str], seed: int) -> None:
    names, pick = [f"node-{i}" for i in range(BURST_NODES)], random.Random(seed)
    while waiting:
        try:
            name = waiting.popleft()
        except IndexError:
            return
        pod = b.share(name, 50)
        passed = orjson.loads(client.post("/filter", {"Pod": pod, "NodeNames": names}))["NodeNames"]
        if passed:
            scores = orjson.loads(client.post("/prioritize", {"Pod": pod, "NodeNames": passed}))
            best = max(row["Score"] for row in scores)
            node = pick.choice([row["Host"] for row in scores if row["Score"] == best])
            refused = orjson.loads(client.post("/bind", _binding(name, node)))["Error"]
            counts["refused" if refused else "bound"] += 1
            if not refused:
                continue
        waiting.append(name)


def _create(client: Client, name: str, core: int = 20) -> None:
    raw = b.share(name, core)
    raw["metadata"]["resourceVersion"] = "1"
    client.post("/changed", {"pod": raw})


def _binding(name: str, node: str) -> dict[str, str]:
    return {"PodName": name, "PodNamespace": "default", "PodUID": f"uid-{name}", "Node": node}


if __name__ == "__main__":
    main()
