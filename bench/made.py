"""Clusters that are made up, and the extender as it is over one of them, in a process of its own."""

import gc
import random
import sys
import time
from typing import Any

import orjson
from flask import Response, request

from mgpu.model.asks import Rejection
from mgpu.model.inventory import write_device
from mgpu.model.pods import Node
from mgpu.serving.server import Listen, serve
from mgpu.settings import load_settings
from scheduler.deciding import Decider
from scheduler.decisions import Decision
from scheduler.extender import Extender, make_app
from scheduler.filtering import Filter
from scheduler.process import SWITCH_SECONDS
from scheduler.state import State
from tests import builders as b

CARDS = PODS = 8


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

    def preempt(self, body: bytes) -> Any:
        return self._real.preempt(body)

    def bind(self, body: bytes) -> Any:
        return self._real.bind(body)

    def _remembered(self, verb: str, answer: Any) -> Any:
        self._said[verb] = answer
        return answer

    def answer(self, verb: str) -> Response:
        names = orjson.loads(request.get_data())["NodeNames"]
        if not all(isinstance(name, str) for name in names):
            raise TypeError("NodeNames must be a list of strings")
        return Response(orjson.dumps(self._said[verb]), mimetype="application/json")


class _Pods:
    """What a decider asks of the API, for pods that wait: bindings are written at once, and their event is there."""

    def __init__(self, state: State) -> None:
        self._state, self._known = state, dict[str, dict[str, Any]]()

    def changed(self) -> Response:
        raw = orjson.loads(request.get_data())["pod"]
        if not raw["spec"].get("nodeName"):
            self._known[raw["metadata"]["name"]] = raw
        self._state.pod_changed(raw)
        return Response("{}")

    def get(self, path: str) -> dict[str, Any] | None:
        return self._known.get(path.rpartition("/")[2])

    def create(self, path: str, binding: dict[str, Any]) -> None:
        raw = self._known.pop(path.split("/")[-2])
        meta = {**raw["metadata"], "annotations": binding["metadata"]["annotations"]}
        node = binding["target"]["name"]
        self._state.pod_changed({**raw, "metadata": meta, "spec": {**raw["spec"], "nodeName": node}})


class _Timed(Decider):
    """Keeps how many milliseconds each decision took."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._took: list[float] = []

    def decide(self, *arguments: Any, **options: Any) -> Decision | Rejection:
        began = time.perf_counter()
        found = super().decide(*arguments, **options)
        self._took.append((time.perf_counter() - began) * 1000)
        return found

    def took(self) -> Response:
        took, self._took = self._took, []
        return Response(orjson.dumps(took))


def serve_cluster(nodes: int, spare: int) -> None:
    """The extender's real app and server over `fill`, or `fill_but` where spare is not 0.

    Beside it `/noop/<verb>`; `/changed`: a pod as the watch brings it; `/took`: by the decisions since the last call.
    """
    settings = load_settings()
    state = State(settings)
    if spare:
        fill_but(state, nodes, spare)
    else:
        fill(state, nodes)
    nothing: Any = None
    api: Any = _Pods(state)
    filter_, decider = Filter(state, settings), _Timed(state, api, settings)
    noop: Any = _NoOp(Extender(filter_, decider, nothing, api, settings, _Open()))
    app = make_app(noop)
    for rule, answer in (("noop/<verb>", noop.answer), ("changed", api.changed), ("took", decider.took)):
        app.add_url_rule(f"/{rule}", rule, answer, methods=["POST"])
    filter_.refresh()
    gc.collect()
    gc.freeze()  # this and the next as scheduler/process.py does
    sys.setswitchinterval(SWITCH_SECONDS)
    serve(app.wsgi_app, [Listen("127.0.0.1", 0, tls=False)], workers=1, threads=64)


def fill_but(state: State, nodes: int, spare: int) -> None:
    """Every card is held whole, but for the first `spare` of the cluster."""
    for i in range(nodes):
        name = f"node-{i}"
        state.node_changed(b.node(name))
        state.device_changed(write_device(Node(name), "", b.cards(CARDS, node=name)))
        for card in range(CARDS):
            if i * CARDS + card >= spare:
                state.pod_changed(held(f"{i}-{card}", i, card, b.container("c", 100)))


def held(name: str, node: int, card: int, container: dict[str, Any]) -> dict[str, Any]:
    record = {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": str(card)}
    raw = b.pod(name, container, annotations=record, node=f"node-{node}", phase="Running")
    return {**raw, "metadata": {**raw["metadata"], "resourceVersion": "1"}}


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
    mib = 1024 + pick.randrange(15 * 1024)
    return held(name, node, card, b.container("c", core, mib))
