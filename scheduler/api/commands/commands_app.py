"""Serves `/commands/cluster`, `/commands/explanation` and `/commands/use`, read-only, for `mgpu.cli.scheduler_source`.

They are on the port of the binding admission, since the API server reaches this port already, and only the addresses of
API servers may call it. `readers` checks each request in addition. All replicas answer; one that does not decide says
so, since it knows no reservations.
"""

import gzip
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from flask import Flask, Response, request

from mgpu.dialects import mtgpu
from mgpu.kube import ApiError, Unreachable
from mgpu.model.errors import RetryLater
from mgpu.model.object_names import LONGEST_NAME, is_namespace_name, is_object_name
from mgpu.model.resource_claims import API as RESOURCE_API
from mgpu.presentation.answers import (
    CLUSTER_PATH,
    EXPLANATION_PATH,
    MOST_NODES,
    TOKEN_HEADER,
    USE_PATH,
    VERSION_HEADER,
    ExplanationAnswer,
    encode_explanation,
    encode_use,
)
from mgpu.serving.review import BadRequest
from mgpu.version import own_version
from scheduler.api.commands.agent_pages import AgentPages
from scheduler.api.commands.live_overview import LiveOverview
from scheduler.api.commands.readers import Readers
from scheduler.api.replica import Replica
from scheduler.background import Pace
from scheduler.cluster.forecast import LEARNING_POLICIES
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.decisions.claim_decider import ClaimDecider
from scheduler.decisions.effort_budgets import CallerGone, EffortBudgets, never
from scheduler.decisions.explanation import Explainer, NoSuchNode, NotCached
from scheduler.decisions.filter import Filter
from scheduler.decisions.gang_outlook import GangOutlooks
from scheduler.engine import LEAST, SHORT

_MOST_ANSWERED = 16
"""The most requests of readers at the same time. Each occupies a thread until its reply has been sent. The port has 64
threads, which the admission of bindings needs."""
_MOST_SELECTED = 50
"""The most nodes that `--node` may name."""
_WATCHES = ("nodes", "devices", "pods")
"""The watches whose silence makes the answers outdated."""
_PATHS = {
    "Pod": "/api/v1/namespaces/{}/pods/{}",
    mtgpu.KIND: f"/apis/{mtgpu.API_VERSION}/namespaces/{{}}/mtgpupods/{{}}",
    "ResourceClaim": f"/apis/{RESOURCE_API}/namespaces/{{}}/resourceclaims/{{}}",
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
    """Add the endpoints to the app."""
    endpoints = _Endpoints(replica, clock)
    app.add_url_rule(CLUSTER_PATH, "commands cluster", endpoints.cluster)
    app.add_url_rule(EXPLANATION_PATH, "commands explanation", endpoints.explanation)
    app.add_url_rule(USE_PATH, "commands use", endpoints.use)


class _Endpoints:
    def __init__(self, replica: Replica, clock: Callable[[], float]) -> None:
        pace = Pace(pause_ratio=0.5)
        filter_ = _LiveFilter(replica)
        gangs = GangOutlooks(replica.state, filter_, replica.settings, limits=LEAST, pace=pace)
        self._replica = replica
        self._clock = clock
        self._readers = Readers(replica.api, replica.settings.scheduler.namespace, clock)
        self._overview = LiveOverview(replica.state, gangs, self._not_deciding, clock, pace)
        # One Pace is for one thread at a time. `_explaining` is held while this one is used.
        pace = Pace(pause_ratio=0.5)
        gangs = GangOutlooks(replica.state, filter_, replica.settings, limits=LEAST, pace=pace)
        claims = ClaimDecider(replica.state, replica.api, replica.settings, EffortBudgets())
        self._explainer = Explainer(
            replica.state, replica.settings, filter_, gangs, limits=SHORT, pace=pace, claims=claims
        )
        self._explaining = threading.Lock()
        self._agents = AgentPages(replica.state)
        self._places = threading.Semaphore(_MOST_ANSWERED)

    def cluster(self) -> Response:
        return self._answer(self._cluster)

    def explanation(self) -> Response:
        return self._answer(self._explanation)

    def use(self) -> Response:
        return self._answer(self._use)

    def _answer(self, view: Callable[[], Response]) -> Response:
        """Return the reply of the view if the caller may read, this replica can answer, and few enough callers wait."""
        if not self._places.acquire(blocking=False):
            raise RetryLater("too many commands are being answered")
        with ExitStack() as place:
            place.callback(self._places.release)
            self._readers.check(request.headers.get(TOKEN_HEADER, ""))
            self._replica.may_answer()
            reply = view()
            # A client that reads slowly occupies the thread, so its place is free only when the reply has been sent.
            reply.call_on_close(place.pop_all().close)
            return reply

    def _cluster(self) -> Response:
        found = self._overview.answer()
        headers = {"ETag": f'"{found.tag}"', **self._headers(self._clock() - found.at)}
        if request.if_none_match.contains(found.tag):
            return Response(status=304, headers=headers)
        return _packed(found.body, "application/x-ndjson", headers)

    def _explanation(self) -> Response:
        kind, namespace, name = (request.args.get(key, "") for key in ("kind", "namespace", "name"))
        nodes = tuple(dict.fromkeys(filter(None, request.args.get("node", "").split(","))))
        _check_names(kind, namespace, name, nodes)
        body = self._explain(kind, namespace, name, nodes)
        return _packed(gzip.compress(body, 1, mtime=0), "application/json", self._headers(0.0))

    def _use(self) -> Response:
        nodes = tuple(dict.fromkeys(filter(None, request.args.get("node", "").split(","))))
        if len(nodes) > MOST_NODES:
            raise BadRequest(400, f"node must name at most {MOST_NODES} nodes")
        body = encode_use(self._agents.answer(nodes))
        return _packed(gzip.compress(body, 1, mtime=0), "application/json", self._headers(0.0))

    def _explain(self, kind: str, namespace: str, name: str, nodes: Sequence[str]) -> bytes:
        try:
            raw = self._replica.api.get(_PATHS[kind].format(namespace, name))
        except ApiError as error:
            raise BadRequest(404 if error.status == 404 else 503, error.message) from error
        except Unreachable as error:
            raise RetryLater(f"the API server does not answer: {error}") from error
        names = sorted(self._replica.state.node_versions())
        # One explanation at a time: it holds the interpreter, which the answers to kube-scheduler need too.
        with self._explaining:
            self._replica.state.refresh()
            try:
                found = self._explainer.object(kind, raw, names, nodes)
            except NoSuchNode as error:
                raise BadRequest(404, str(error)) from error
            except NotCached as error:
                raise RetryLater(f"the scheduler has not seen {error} yet") from error
        return encode_explanation(ExplanationAnswer(found, self._not_deciding()))

    def _not_deciding(self) -> str:
        return self._replica.not_deciding_reason() or ""

    def _headers(self, age: float) -> dict[str, str]:
        """Return the headers of an answer. `Age` is for how many seconds the data may be outdated."""
        watches = self._replica.watches()
        broken = max((watches[name].broken_for for name in _WATCHES if name in watches), default=0.0)
        return {"Age": str(int(age + broken)), "Cache-Control": "no-store", VERSION_HEADER: own_version()}


def _check_names(kind: str, namespace: str, name: str, nodes: Sequence[str]) -> None:
    """Raise BadRequest unless the parameters name an object. The names become parts of a path of the API server."""
    if kind not in _PATHS:
        raise BadRequest(400, f"kind must be {' or '.join(_PATHS)}")
    if not is_namespace_name(namespace):
        raise BadRequest(400, "namespace must be a DNS label: at most 63 lower-case letters, digits and '-'")
    if not is_object_name(name):
        text = f"name must be a DNS subdomain: at most {LONGEST_NAME} lower-case letters, digits, '-' and '.'"
        raise BadRequest(400, text)
    if len(nodes) > _MOST_SELECTED:
        raise BadRequest(400, f"node must name at most {_MOST_SELECTED} nodes")


def _packed(body: bytes, mimetype: str, headers: Mapping[str, str]) -> Response:
    """Return a reply whose body is already in the format of gzip.

    It is sent as it is to every client. Unpacked for each of several clients, the view of a large cluster would take
    more memory than the process has.
    """
    return Response(body, headers={**headers, "Content-Encoding": "gzip"}, mimetype=mimetype)
