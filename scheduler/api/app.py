"""The HTTP side of the scheduler: which app is served on which address.

There are four apps: the admission of Bindings, the extender, metrics, and the web page. Each listens on an address of
its own, because different callers may reach them. `/bind` of the extender, for one, has no authentication but that its
address is loopback, or that its clients have certificates (`extenderClientCa`).

All apps must run in one process with one worker, since they share the reservations. `scheduler/main.py` passes the
result of `listeners` to gunicorn.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flask import Response
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from mgpu.kube import Api
from mgpu.serving.app import new_app, serve_metrics, serve_probe, serve_probes, serve_reviews
from mgpu.serving.callers import read_callers
from mgpu.serving.deadlines import watch_client
from mgpu.serving.metrics import CONTENT_TYPE, render_metrics
from mgpu.serving.server import Listen
from mgpu.settings import Settings
from scheduler import metrics as event_metrics
from scheduler.api.binding_webhook import BindingAdmission, binding_users
from scheduler.api.extender import Extender, Gate
from scheduler.api.extender import make_app as make_extender_app
from scheduler.api.gpushare_compat import gpushare_routes
from scheduler.api.page.page_app import make_app as make_page_app
from scheduler.api.page.page_app import make_board
from scheduler.cluster.cache import ClusterCache
from scheduler.decisions.decider import Decider
from scheduler.decisions.filter import Filter
from scheduler.decisions.preemption import Preemption

_ADMISSION_SECONDS = 30.0
"""The longest timeout that the API server allows for a webhook. Each request says its own, which may be shorter."""


def listeners(
    state: ClusterCache,
    decider: Decider,
    filter_: Filter,
    preemption: Preemption,
    api: Api,
    settings: Settings,
    gate: Gate,
    mtgpupods: Callable[[], Iterable[Mapping[str, Any]]] = tuple,
    cluster: Collector | None = None,
) -> list[Listen]:
    """Return each app with its address; `/healthz`, `/readyz` and `/leads` are served on all of them.

    Args:
        mtgpupods: Returns all MtgpuPods that are known, as the API has them.
        cluster: Collects the metrics of the cluster's current state.
    """
    own = settings.scheduler
    admission = new_app()
    binding = BindingAdmission(decider, gate.may_decide, binding_users(own), lambda: watch_client(_ADMISSION_SECONDS))
    serve_reviews(admission, "/bind-admission", binding, kinds=("Binding",), observe=event_metrics.ADMISSIONS)
    verbs = Extender(filter_, decider, preemption, api, gate)
    extender = make_extender_app(verbs, own.extender_timeout_seconds)
    gpushare_routes(extender, verbs, state, settings, gate)
    extender.after_request(lambda response: _close_unless_leading(response, gate))
    metrics = new_app()
    web_page = make_page_app(make_board(state, settings, mtgpupods), gate, own.web_host)
    state_metrics = CollectorRegistry()
    if cluster is not None:
        state_metrics.register(cluster)
    serve_metrics(metrics, lambda: render_metrics(event_metrics.REGISTRY, state_metrics), CONTENT_TYPE)
    for app in (admission, extender, metrics, web_page):
        serve_probes(app, gate.not_ready_reason)
        serve_probe(app, "/leads", gate.not_deciding_reason)
    client_ca = own.extender_client_ca
    found = [
        Listen(own.host, own.port, admission.wsgi_app, client_ca=own.client_ca, callers=read_callers(own, "scheduler")),
        Listen(own.extender_host, own.extender_port, extender.wsgi_app, tls=bool(client_ca), client_ca=client_ca),
    ]
    if own.metrics_port >= 0:
        found.append(Listen(own.metrics_host, own.metrics_port, metrics.wsgi_app, tls=False))
    if own.web_port >= 0:
        found.append(Listen(own.web_host, own.web_port, web_page.wsgi_app, tls=False))
    return found


def _close_unless_leading(response: Response, gate: Gate) -> Response:
    """Close the connection after the reply of a replica that does not decide.

    A connection that kube-scheduler keeps alive would stay with this replica, although the Service leads to the one
    that decides. Pods that wait for a partition plan are known only to the replica whose filter saw them.
    """
    if gate.not_deciding_reason() is not None:
        response.headers["Connection"] = "close"
    return response
