"""`filter` over HTTP: clusters of 1,000 and 5,000 nodes × 8 cards with 8 pods per node, one connection kept alive.

Beside it, in the same run, a reply of nothing but the same bytes: what HTTP and the machine themselves cost. Between
two calls a pod is bound somewhere, as in a cluster that is being filled.
"""

import http.client
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson
from flask import Response, request

from mgpu.model.inventory import write_device
from mgpu.model.pods import Node
from mgpu.serving.server import Listen, serve
from mgpu.settings import load_settings
from scheduler.extender import Extender, make_app
from scheduler.filtering import Filter
from scheduler.state import State
from tests import builders as b

NODES = (1_000, 5_000)
CARDS = PODS = 8
CALLS = 200


def main() -> None:
    print("filter over HTTP, 8 cards and 8 pods per node; a pod is bound somewhere before each call")
    for count in NODES:
        with _server(count) as port:
            for title, core, fresh in (
                ("fits nearly everywhere", 20, False),
                ("fits on half of the nodes", 80, False),
                ("the same, every ask a new one", 80, True),
            ):
                print(f"  {count:5,} nodes, {title:30}  {_measure(port, count, core, fresh=fresh)}", flush=True)


def _measure(port: int, count: int, core: int, *, fresh: bool) -> str:
    client = http.client.HTTPConnection("127.0.0.1", port)
    names = [f"node-{i}" for i in range(count)]
    taken: dict[str, list[float]] = {"/filter": [], "/noop": []}
    passed = size = 0
    for i in range(CALLS):
        _post(client, "/bound", {"pod": _pod(f"n{i}", random.Random(i).randrange(count), i)})
        ask = b.share("p", core, 4096 + (i if fresh else 0))
        for path in taken:
            began = time.perf_counter()
            reply = _post(client, path, {"Pod": ask, "NodeNames": names, "size": size})
            taken[path].append((time.perf_counter() - began) * 1000)
            if path == "/filter":
                size, passed = len(reply), len(orjson.loads(reply)["NodeNames"])
    figures = []
    for times in taken.values():
        times.sort()
        figures.append((times[len(times) // 2], times[len(times) * 99 // 100]))
    (p50, p99), (noop50, noop99) = figures
    noop = f"no-op {noop50:.2f} / {noop99:.2f} ms   × {p50 / noop50:.1f}"
    return f"{passed:5,} fit   p50 {p50:6.2f} ms   p99 {p99:6.2f} ms   {noop}"


def _post(client: http.client.HTTPConnection, path: str, body: Any) -> bytes:
    client.request("POST", path, orjson.dumps(body), {"Content-Type": "application/json"})
    answer = client.getresponse()
    data = answer.read()
    if answer.status != 200:
        raise RuntimeError(f"{path}: {answer.status} {data[:200]!r}")
    return data


@contextmanager
def _server(count: int) -> Iterator[int]:
    command = [sys.executable, "-c", f"from bench.filter import serve_cluster; serve_cluster({count})"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield int(server.stdout.readline().rpartition(":")[2])
        finally:
            server.terminate()


class _Open:
    """A gate that lets everything through."""

    def ready(self) -> str:
        return ""

    def may_answer(self) -> None:
        """Always."""

    may_decide = may_answer


def serve_cluster(count: int) -> None:
    """The extender's real app and server over a cluster of `count` nodes, with `/noop` and `/bound` beside it."""
    settings = load_settings()
    state = State(settings)
    _fill(state, count)
    nothing: Any = None  # neither decisions nor an API server are needed to filter
    app = make_app(Extender(Filter(state, settings), nothing, nothing, nothing, settings, _Open()))

    def noop() -> Response:
        return Response(b"x" * orjson.loads(request.get_data())["size"], mimetype="application/json")

    def bound() -> Response:
        state.pod_changed(orjson.loads(request.get_data())["pod"])
        return Response("{}")

    app.add_url_rule("/noop", "noop", noop, methods=["POST"])
    app.add_url_rule("/bound", "bound", bound, methods=["POST"])
    serve(app.wsgi_app, [Listen("127.0.0.1", 0, tls=False)], workers=1, threads=8)


def _fill(state: State, count: int) -> None:
    pick = random.Random(0)
    for i in range(count):
        name = f"node-{i}"
        state.node_changed(b.node(name))
        state.device_changed(write_device(Node(name), "", b.cards(CARDS, node=name)))
        for j in range(PODS):
            state.pod_changed(_pod(f"{i}-{j}", i, pick.randrange(1 << 30)))


def _pod(name: str, node: int, seed: int) -> dict[str, Any]:
    """A running pod with a share of one card; every second node is so full that 80 % of a card are nowhere free."""
    pick = random.Random(seed)
    core, card = (
        (30 + pick.randrange(40), int(name[-1]) % CARDS)
        if node % 2
        else (10 + pick.randrange(20), pick.randrange(CARDS))
    )
    record = {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": str(card)}
    raw = b.share(name, core, 1024 * pick.randrange(1, 16), annotations=record, node=f"node-{node}", phase="Running")
    return {**raw, "metadata": {**raw["metadata"], "resourceVersion": "1"}}


if __name__ == "__main__":
    main()
