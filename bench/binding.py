"""`bind` of the extender over HTTP, and a burst of pods onto the last free cards.

In the burst several clients with a connection each fill the last free cards of a cluster, as several schedulers would.
Each client takes one of the best nodes at random. It retries a pod if no node passes the filter or the binding is
refused. The API server is a stub that takes no time, so the figures are those of mgpu.
"""

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator

import orjson

from bench.rows import Options, Row
from bench.serving import Client, cluster, quantiles
from tests import builders as b

NODES, BINDS = (100, 1_000, 5_000), 400
BURST_NODES, BURST_PODS, CLIENTS = 1_000, 1_000, 4


def rows(options: Options) -> Iterator[Row]:
    for nodes in options.sizes(*NODES):
        with cluster(nodes) as client:
            yield from _binds(client, nodes, options.repeats(BINDS))
    with cluster(BURST_NODES, BURST_PODS // 2) as client:
        yield from _burst(client)


def _binds(client: Client, nodes: int, binds: int) -> Iterator[Row]:
    times, cpu, pick = [], 0.0, random.Random(3)
    for i in range(binds):
        _create(client, f"b{i}")
        before = client.cpu()
        took, answer = client.timed("/bind", _binding(f"b{i}", f"node-{2 * pick.randrange(nodes // 2)}"))
        cpu += client.cpu() - before
        if orjson.loads(answer)["Error"]:
            raise RuntimeError(answer.decode())
        times.append(took)
    (p50, p99), (decided50, decided99) = quantiles(times), quantiles(orjson.loads(client.post("/took", {})))
    what = f"{nodes:,} nodes, bind"
    yield Row(what=f"{what}, p50", value=p50, unit="ms", remark=f"p99 {p99:.2f}")
    yield Row(what=f"{what}, CPU", value=cpu / binds - client.cpu_of_asking(), unit="ms CPU")
    yield Row(what=f"{what}, decision, p50", value=decided50, unit="ms", remark=f"p99 {decided99:.2f}")


def _burst(client: Client) -> Iterator[Row]:
    waiting = deque(f"p{i}" for i in range(BURST_PODS))
    for name in waiting:
        _create(client, name, core=50)
    counts: Counter[str] = Counter()
    clients = [
        threading.Thread(target=_schedule, args=(Client(client.port, client.pid), waiting, counts, seed))
        for seed in range(CLIENTS)
    ]
    began, cpu = time.perf_counter(), client.cpu()
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    took, cpu = time.perf_counter() - began, client.cpu() - cpu
    _, decided99 = quantiles(orjson.loads(client.post("/took", {})))
    what = f"burst of {BURST_PODS:,} pods by {CLIENTS} clients, {BURST_NODES:,} nodes"
    refused = 100 * counts["refused"] / counts["bound"]
    yield Row(what=f"{what}, bound", value=BURST_PODS / took, unit="pods/s", more_is_better=True)
    yield Row(what=f"{what}, refused bindings", value=refused, unit="%", remark=f"{counts['refused']} refused")
    yield Row(what=f"{what}, CPU per pod", value=cpu / BURST_PODS, unit="ms CPU")
    yield Row(what=f"{what}, decisions, p99", value=decided99, unit="ms")


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
