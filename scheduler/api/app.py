"""The HTTP side: binding admission, the extender, metrics and the web page, each on its own address and nowhere else.

All must be one process, since they share the reservations, and gunicorn serves them in one worker. The extender's
`/bind` has no authentication but that its address is loopback, or that its clients have certificates
(`extenderClientCa`).
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flask import Response
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from mgpu.kube import Api
from mgpu.serving.app import exposing, new_app, probe, probes, reviewing
from mgpu.serving.callers import api_servers
from mgpu.serving.deadlines import gone
from mgpu.serving.metrics import CONTENT_TYPE, page
from mgpu.serving.server import Listen
from mgpu.settings import Settings
from scheduler import metrics as counted
from scheduler.api.binding_webhook import BindingAdmission, binding_users
from scheduler.api.extender import Extender, Gate
from scheduler.api.extender import make_app as make_extender_app
from scheduler.api.gpushare_compat import gpushare_routes
from scheduler.api.page.page_app import make_app as make_web_app
from scheduler.api.page.page_app import make_board
from scheduler.cluster.cache import ClusterCache
from scheduler.decisions.decider import Decider
from scheduler.decisions.filter import Filter
from scheduler.decisions.preemption import Preemption

_ADMISSION_SECONDS = 30.0
"""The longest that the API server waits for a webhook; it says how long it does wait."""


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
    """Each app, with `/healthz`, `/readyz` and `/leads`, on its address: admission, extender, metrics, web page.

    mtgpupods: all that are known, as the API has them. cluster: the metrics of its present state.
    """
    own = settings.scheduler
    admission = new_app()
    binding = BindingAdmission(decider, gate.may_decide, binding_users(own), lambda: gone(_ADMISSION_SECONDS))
    reviewing(admission, "/bind-admission", binding, kinds=("Binding",), told=counted.ADMISSIONS)
    verbs = Extender(filter_, decider, preemption, api, gate)
    extender = make_extender_app(verbs, own.extender_timeout_seconds)
    gpushare_routes(extender, verbs, state, settings, gate)
    extender.after_request(lambda response: _closing(response, gate))
    metrics, web = new_app(), make_web_app(make_board(state, settings, mtgpupods), gate, own.web_host)
    present = CollectorRegistry()
    if cluster is not None:
        present.register(cluster)
    exposing(metrics, lambda: page(counted.REGISTRY, present), CONTENT_TYPE)
    for app in (admission, extender, metrics, web):
        probes(app, gate.not_ready_reason)
        probe(app, "/leads", gate.not_deciding_reason)
    client_ca = own.extender_client_ca
    return [
        Listen(own.host, own.port, admission.wsgi_app, client_ca=own.client_ca, callers=api_servers(own, "scheduler")),
        Listen(own.extender_host, own.extender_port, extender.wsgi_app, tls=bool(client_ca), client_ca=client_ca),
        *([Listen(own.metrics_host, own.metrics_port, metrics.wsgi_app, tls=False)] if own.metrics_port >= 0 else []),
        *([Listen(own.web_host, own.web_port, web.wsgi_app, tls=False)] if own.web_port >= 0 else []),
    ]


def _closing(response: Response, gate: Gate) -> Response:
    """Of a replica that does not lead. A connection that is kept alive would never go where the Service leads now: the
    pods that wait for slices are known only to who was asked about them.
    """
    if gate.not_deciding_reason() is not None:
        response.headers["Connection"] = "close"
    return response
