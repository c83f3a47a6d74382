"""Serves the extender with a synthetic cluster. `bench.serving.cluster` runs `serve_cluster` in a new process."""

import gc
import sys
import time
from typing import Any

import orjson
from flask import Flask, Response, request

from bench.clusters import fill, fill_but
from mgpu.model.gpu_requests import Rejection
from mgpu.serving.server import Listen, serve
from mgpu.settings import Settings, load_settings
from scheduler.api.extender import Extender, make_app
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.reservations import Reservation
from scheduler.decisions.decider import Decider
from scheduler.decisions.effort_budgets import CallerGone, EffortBudgets
from scheduler.runtime import SWITCH_SECONDS, Process


class _NoOp:
    """Wraps the extender, and remembers its last answer to `filter` and to `prioritize`.

    `answer` decides nothing: it parses the names of the nodes and repeats the remembered answer. So its duration is
    that of the HTTP call and the JSON alone.
    """

    def __init__(self, real: Extender) -> None:
        self._real, self._said = real, dict[str, Any]()

    def filter(self, body: bytes, gone: CallerGone) -> Any:
        return self._remembered("filter", self._real.filter(body, gone))

    def prioritize(self, body: bytes, gone: CallerGone) -> Any:
        return self._remembered("prioritize", self._real.prioritize(body, gone))

    def preempt(self, body: bytes, gone: CallerGone) -> Any:
        return self._real.preempt(body, gone)

    def bind(self, body: bytes, gone: CallerGone) -> Any:
        return self._real.bind(body, gone)

    def _remembered(self, verb: str, answer: Any) -> Any:
        self._said[verb] = answer
        return answer

    def answer(self, verb: str) -> Response:
        names = orjson.loads(request.get_data())["NodeNames"]
        if not all(isinstance(name, str) for name in names):
            raise TypeError("NodeNames must be a list of strings")
        return Response(orjson.dumps(self._said[verb]), mimetype="application/json")


class _Pods:
    """A stub of the decider's API client, which stores the waiting pods. A Binding reaches the cache at once."""

    state: ClusterCache

    def __init__(self) -> None:
        self._known = dict[str, dict[str, Any]]()

    def changed(self) -> Response:
        raw = orjson.loads(request.get_data())["pod"]
        if not raw["spec"].get("nodeName"):
            self._known[raw["metadata"]["name"]] = raw
        self.state.pod_changed(raw)
        return Response("{}")

    def get(self, path: str) -> dict[str, Any] | None:
        return self._known.get(path.rpartition("/")[2])

    def create(self, path: str, binding: dict[str, Any]) -> None:
        raw = self._known.pop(path.split("/")[-2])
        meta = {**raw["metadata"], "annotations": binding["metadata"]["annotations"]}
        node = binding["target"]["name"]
        self.state.pod_changed({**raw, "metadata": meta, "spec": {**raw["spec"], "nodeName": node}})


class _Timed(Decider):
    """A decider that records how many milliseconds each decision took."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._took: list[float] = []

    def decide(self, *arguments: Any, **options: Any) -> Reservation | Rejection:
        began = time.perf_counter()
        found = super().decide(*arguments, **options)
        self._took.append((time.perf_counter() - began) * 1000)
        return found

    def took(self) -> Response:
        took, self._took = self._took, []
        return Response(orjson.dumps(took), mimetype="application/json")


class _Replica(Process):
    """A scheduler process without threads, which always leads."""

    def __init__(self, settings: Settings, api: Any) -> None:
        super().__init__(settings, api, "bench")
        self.timed = _Timed(self.state, api, settings, EffortBudgets())
        self.decider = self.timed

    def may_answer(self) -> None:
        """Return, because the cache is complete."""

    def may_decide(self) -> None:
        """Return, because this replica leads."""


def cluster_app(nodes: int, spare: int, policy: str = "binpack") -> Flask:
    """Return the real app of the extender.

    Further endpoints are `/noop/<verb>`, which repeats the last answer to the verb, `/changed`, which adds a pod like
    an event of the watch, `/took`, which returns the durations of the decisions since the last call, and `/cpu`, which
    returns the CPU milliseconds that this process has used.

    Args:
        spare: The number of idle cards; pods hold all others whole (`fill_but`). If it is 0, each card has a pod with a
            share of it (`fill`).
        policy: The policy for nodes and cards. One that learns has learnt from all pods.
    """
    pods: Any = _Pods()
    replica = _Replica(load_settings(f"nodePolicy: {policy}\ncardPolicy: {policy}"), pods)
    state = pods.state = replica.state
    if spare:
        fill_but(state, nodes, spare)
    else:
        fill(state, nodes)
    noop: Any = _NoOp(Extender(replica))
    app = make_app(noop)
    for rule, answer in (("noop/<verb>", noop.answer), ("changed", pods.changed), ("took", replica.timed.took)):
        app.add_url_rule(f"/{rule}", rule, answer, methods=["POST"])
    app.add_url_rule("/cpu", "cpu", lambda: Response(str(1000 * time.process_time())))
    state.forecast.refresh()
    replica.filter.refresh()
    return app


def serve_cluster(nodes: int, spare: int, policy: str) -> None:
    """Serve `cluster_app`."""
    app = cluster_app(nodes, spare, policy)
    gc.collect()
    gc.freeze()  # `scheduler.runtime` does the same.
    sys.setswitchinterval(SWITCH_SECONDS)
    serve([Listen("127.0.0.1", 0, app.wsgi_app, tls=False)], workers=1)
