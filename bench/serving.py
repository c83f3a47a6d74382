"""The extender as a process over a cluster that is made up, and a client of it: for the sections that measure it."""

import gc
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

CARDS = PODS = 8


class Client:
    """One connection, kept alive. pid: the server's."""

    def __init__(self, port: int, pid: int) -> None:
        self._connection, self.pid = http.client.HTTPConnection("127.0.0.1", port), pid

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
        """Milliseconds, and the answer."""
        began = time.perf_counter()
        answer = self.post(path, body)
        return (time.perf_counter() - began) * 1000, answer


def quantiles(times: list[float]) -> tuple[float, float]:
    """The median and the 99th percentile."""
    times = sorted(times)
    return times[len(times) // 2], times[len(times) * 99 // 100]


@contextmanager
def cluster(nodes: int) -> Iterator[Client]:
    """A process that serves the extender over so many nodes of 8 cards with 8 pods each."""
    command = [sys.executable, "-c", f"from bench.serving import serve_cluster; serve_cluster({nodes})"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield Client(int(server.stdout.readline().rpartition(":")[2]), server.pid)
        finally:
            server.terminate()


class _Open:
    """A gate that lets everything through."""

    def ready(self) -> str:
        return ""

    def may_answer(self) -> None:
        """Always."""

    may_decide = may_answer


class _NoOp:
    """An extender of no use: it reads the request and says what the real one said last, so as much as that."""

    def __init__(self, real: Extender) -> None:
        self._real, self._said = real, dict[str, Any]()

    def filter(self, body: bytes) -> Any:
        return self._remembered("filter", self._real.filter(body))

    def prioritize(self, body: bytes) -> Any:
        return self._remembered("prioritize", self._real.prioritize(body))

    def _remembered(self, verb: str, answer: Any) -> Any:
        self._said[verb] = answer
        return answer

    def answer(self, verb: str) -> Response:
        names = orjson.loads(request.get_data())["NodeNames"]
        if not all(isinstance(name, str) for name in names):
            raise TypeError("NodeNames must be a list of strings")
        return Response(orjson.dumps(self._said[verb]), mimetype="application/json")


def serve_cluster(nodes: int) -> None:
    """The extender's real app and server; beside it `/noop/<verb>`, and `/changed`: a pod as the watch brings it."""
    settings = load_settings()
    state = State(settings)
    fill(state, nodes)
    nothing: Any = None  # neither decisions nor an API server are needed to filter
    filter_ = Filter(state, settings)
    real = Extender(filter_, nothing, nothing, nothing, settings, _Open())
    noop: Any = _NoOp(real)
    noop.preempt, noop.bind = real.preempt, real.bind
    app = make_app(noop)

    def changed() -> Response:
        state.pod_changed(orjson.loads(request.get_data())["pod"])
        return Response("{}")

    app.add_url_rule("/noop/<verb>", "noop", noop.answer, methods=["POST"])
    app.add_url_rule("/changed", "changed", changed, methods=["POST"])
    filter_.refresh()
    gc.collect()
    gc.freeze()  # as scheduler/process.py does
    serve(app.wsgi_app, [Listen("127.0.0.1", 0, tls=False)], workers=1, threads=64)


def fill(state: State, nodes: int) -> None:
    """A pod on each card; every second node is so full that 80 % of a card are nowhere free."""
    pick = random.Random(0)
    for i in range(nodes):
        name = f"node-{i}"
        state.node_changed(b.node(name))
        state.device_changed(write_device(Node(name), "", b.cards(CARDS, node=name)))
        for j in range(PODS):
            state.pod_changed(running(f"{i}-{j}", i, pick.randrange(1 << 30)))


def running(name: str, node: int, seed: int) -> dict[str, Any]:
    """A running pod with a share of one card."""
    pick = random.Random(seed)
    full = node % 2
    core = 30 + pick.randrange(40) if full else 10 + pick.randrange(20)
    card = int(name[-1]) % CARDS
    record = {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": str(card)}
    mib = 1024 + pick.randrange(15 * 1024)
    raw = b.share(name, core, mib, annotations=record, node=f"node-{node}", phase="Running")
    return {**raw, "metadata": {**raw["metadata"], "resourceVersion": "1"}}
