"""Serves `/commands/cluster` and `/commands/explanation`, both read-only, for `mgpu.cli.scheduler_source`.

They are on the port of the binding admission, since the API server reaches this port already, and only the addresses of
API servers may call it. `readers` checks each request in addition. All replicas answer; one that does not decide says
so, since it knows no reservations.
"""

import gzip
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import quote

from flask import Flask, Response, request

from mgpu.dialects import mtgpu
from mgpu.kube import ApiError
from mgpu.model.errors import RetryLater
from mgpu.presentation.answers import (
    CLUSTER_PATH,
    EXPLANATION_PATH,
    TOKEN_HEADER,
    VERSION_HEADER,
    ExplanationAnswer,
    encode_explanation,
)
from mgpu.serving.review import BadRequest
from mgpu.version import own_version
from scheduler.api.commands.live_overview import LiveOverview
from scheduler.api.commands.readers import Readers
from scheduler.api.replica import Replica
from scheduler.background import Pace
from scheduler.cluster.forecast import LEARNING_POLICIES
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.decisions.effort_budgets import CallerGone, EffortBudgets, never
from scheduler.decisions.explanation import Explainer, NoSuchNode
from scheduler.decisions.filter import Filter
from scheduler.decisions.gang_outlook import GangOutlooks
from scheduler.engine import LEAST

_MOST_WAITING = 16
"""The most requests of readers at the same time. The port has 64 threads, which the admission of bindings needs."""
_MOST_SELECTED = 50
"""The most nodes that `--node` may name."""
_WATCHES = ("nodes", "devices", "pods")
"""The watches whose silence makes the answers outdated."""
_PATHS = {
    "Pod": "/api/v1/namespaces/{}/pods/{}",
    mtgpu.KIND: f"/apis/{mtgpu.API_VERSION}/namespaces/{{}}/mtgpupods/{{}}",
}


class _LiveFilter(Filter):
    """A filter with allowances of its own, which scores nodes as the filter does that answers kube-scheduler.

    Only that filter may take in the changes of nodes for a policy that learns (`ClusterCache.take_changed_nodes`).
    """

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica.state, replica.settings, budgets=EffortBudgets())
        self._deciding = replica.filter if replica.settings.node_policy in LEARNING_POLICIES else None

    def scores(self, gpu_pod: GpuPod, names: Sequence[str], gone: CallerGone = never) -> list[int]:
        if self._deciding is not None:
            return self._deciding.scores(gpu_pod, names, gone)
        return super().scores(gpu_pod, names, gone)


def serve_commands(app: Flask, replica: Replica, clock: Callable[[], float] = time.monotonic) -> None:
    """Add both endpoints to the app."""
    endpoints = _Endpoints(replica, clock)
    app.add_url_rule(CLUSTER_PATH, "commands cluster", endpoints.cluster)
    app.add_url_rule(EXPLANATION_PATH, "commands explanation", endpoints.explanation)


class _Endpoints:
    def __init__(self, replica: Replica, clock: Callable[[], float]) -> None:
        pace = Pace(pause_ratio=0.5)
        filter_ = _LiveFilter(replica)
        gangs = GangOutlooks(replica.state, filter_, replica.settings, limits=LEAST, pace=pace)
        self._replica = replica
        self._clock = clock
        self._readers = Readers(replica.api, replica.settings.scheduler.namespace, clock)
        self._overview = LiveOverview(replica.state, gangs, self._not_deciding, clock, pace)
        self._explainer = Explainer(replica.state, replica.settings, filter_)
        self._explaining = threading.Lock()
        self._waiting = threading.Semaphore(_MOST_WAITING)

    def cluster(self) -> Response:
        with self._admitted():
            found = self._overview.answer()
            headers = {"ETag": f'"{found.tag}"', **self._headers(self._clock() - found.at)}
            if request.if_none_match.contains(found.tag):
                return Response(status=304, headers=headers)
            packed = request.accept_encodings.quality("gzip") > 0
            reply = Response(found.body if packed else gzip.decompress(found.body), headers=headers)
            reply.mimetype = "application/x-ndjson"
            if packed:
                reply.content_encoding = "gzip"
            return reply

    def explanation(self) -> Response:
        with self._admitted():
            kind, namespace, name = (request.args.get(key, "") for key in ("kind", "namespace", "name"))
            nodes = tuple(dict.fromkeys(filter(None, request.args.get("node", "").split(","))))
            if kind not in _PATHS or not namespace or not name or len(nodes) > _MOST_SELECTED:
                raise BadRequest(
                    400, f"name one object by kind, namespace and name, and at most {_MOST_SELECTED} nodes"
                )
            body = self._explain(kind, namespace, name, nodes)
            reply = Response(gzip.compress(body, 1, mtime=0), headers=self._headers(0.0), mimetype="application/json")
            reply.content_encoding = "gzip"
            return reply

    def _explain(self, kind: str, namespace: str, name: str, nodes: Sequence[str]) -> bytes:
        try:
            raw = self._replica.api.get(_PATHS[kind].format(quote(namespace, safe=""), quote(name, safe="")))
        except ApiError as error:
            raise BadRequest(404 if error.status == 404 else 503, error.message) from error
        names = sorted(self._replica.state.node_versions())
        # One explanation at a time: it holds the interpreter, which the answers to kube-scheduler need too.
        with self._explaining:
            self._replica.state.refresh()
            try:
                found = self._explainer.object(kind, raw, names, nodes)
            except NoSuchNode as error:
                raise BadRequest(404, str(error)) from error
            except LookupError as error:
                raise RetryLater(f"the scheduler has not seen {error} yet") from error
        return encode_explanation(ExplanationAnswer(found, self._not_deciding()))

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        """Raise an error unless the caller may read, this replica can answer, and not too many callers wait."""
        if not self._waiting.acquire(blocking=False):
            raise RetryLater("too many commands are being answered")
        try:
            self._readers.check(request.headers.get(TOKEN_HEADER, ""))
            self._replica.may_answer()
            yield
        finally:
            self._waiting.release()

    def _not_deciding(self) -> str:
        return self._replica.not_deciding_reason() or ""

    def _headers(self, age: float) -> dict[str, str]:
        """Return the headers of an answer. `Age` is for how many seconds the data may be outdated."""
        watches = self._replica.watches()
        broken = max((watches[name].broken_for for name in _WATCHES if name in watches), default=0.0)
        return {"Age": str(int(age + broken)), "Cache-Control": "no-store", VERSION_HEADER: own_version()}
