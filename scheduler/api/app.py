"""Creates the HTTP apps of the scheduler and determines the address of each.

`scheduler.main` passes the result of `listeners` to gunicorn. There are five apps: the admission of Bindings, the
extender, Volcano's verbs, metrics, and the web page. Each has its own address, because each has other callers. In
particular, `/bind` of the extender is protected only by a loopback address or by client certificates
(`extenderClientCa`). All apps must run in one process with one worker, because they share the reservations.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from mgpu.serving.app import new_app, serve_metrics, serve_probe, serve_probes, serve_reviews
from mgpu.serving.callers import read_callers
from mgpu.serving.deadlines import watch_client
from mgpu.serving.metrics import CONTENT_TYPE, render_metrics
from mgpu.serving.server import Listen
from scheduler import metrics as event_metrics
from scheduler.api.binding_webhook import BindingAdmission, binding_users
from scheduler.api.claim_webhook import ClaimAdmission
from scheduler.api.collector import ClusterCollector
from scheduler.api.commands.commands_app import serve_commands
from scheduler.api.extender import Extender
from scheduler.api.extender import make_app as make_extender_app
from scheduler.api.gpushare_compat import gpushare_routes
from scheduler.api.page.node_use import NodeUses
from scheduler.api.page.page_app import make_app as make_page_app
from scheduler.api.page.page_app import make_board
from scheduler.api.replica import Replica
from scheduler.api.volcano import VolcanoExtender, read_token
from scheduler.api.volcano import make_app as make_volcano_app

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

_ADMISSION_SECONDS = 30.0
"""The longest timeout that Kubernetes allows for a webhook. A request may name a shorter one (`?timeout=1s`)."""
_VOLCANO_SECONDS = 10.0
"""The longest time for which work continues on a call of Volcano, which does not tell its `extender.httpTimeout`."""


def listeners(replica: Replica) -> list[Listen]:
    """Return the apps that the settings enable, each with its address. All serve `/healthz`, `/readyz` and `/leads`."""
    settings = replica.settings
    own = settings.scheduler
    admission = new_app()
    binding = BindingAdmission(
        replica.decider,
        replica.may_decide,
        binding_users(own),
        lambda: watch_client(_ADMISSION_SECONDS),
        replica.gang_filter.refusal,
    )
    serve_reviews(admission, "/bind-admission", binding, kinds=("Binding",), observe=event_metrics.ADMISSIONS)
    if settings.dra.enabled:
        claims = ClaimAdmission(
            replica.state, replica.claim_decider, replica.may_decide, lambda: watch_client(_ADMISSION_SECONDS)
        )
        serve_reviews(admission, "/claim-admission", claims, kinds=("ResourceClaim",), observe=event_metrics.ADMISSIONS)
    serve_commands(admission, replica)
    verbs = Extender(replica)
    extender = make_extender_app(verbs, own.extender_timeout_seconds)
    gpushare_routes(extender, verbs, replica)
    closing = _close_unless_deciding(extender.wsgi_app, replica)
    metrics = new_app()
    state_metrics = CollectorRegistry()
    state_metrics.register(ClusterCollector(replica))
    serve_metrics(metrics, lambda: render_metrics(event_metrics.REGISTRY, state_metrics), CONTENT_TYPE)
    web_page = make_page_app(make_board(replica.state, settings), NodeUses(replica.state), replica, own.web_host)
    for app in (admission, extender, metrics, web_page):
        serve_probes(app, replica.not_ready_reason)
        serve_probe(app, "/leads", replica.not_deciding_reason)
    client_ca = own.extender_client_ca
    result = [
        Listen(own.host, own.port, admission.wsgi_app, client_ca=own.client_ca, callers=read_callers(own, "scheduler")),
        Listen(own.extender_host, own.extender_port, closing, tls=bool(client_ca), client_ca=client_ca),
    ]
    if own.volcano_port >= 0:
        volcano = make_volcano_app(VolcanoExtender(replica), read_token(own.volcano_token_file), _VOLCANO_SECONDS)
        serve_probes(volcano, replica.not_ready_reason)
        result.append(Listen(own.volcano_host, own.volcano_port, volcano.wsgi_app, tls=False))
    if own.metrics_port >= 0:
        result.append(Listen(own.metrics_host, own.metrics_port, metrics.wsgi_app, tls=False))
    if own.web_port >= 0:
        result.append(Listen(own.web_host, own.web_port, web_page.wsgi_app, tls=False))
    return result


def _close_unless_deciding(app: "WSGIApplication", replica: Replica) -> "WSGIApplication":
    """Return an app that closes the connection after each reply of `app` while this replica does not decide.

    kube-scheduler would keep the connection to this replica open, although the Service now selects the replica that
    decides. That replica must filter the pods, because it plans partitions only for pods that its own filter rejected.
    """

    def served(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        def start(status: str, headers: list[tuple[str, str]], *exc_info: Any) -> Any:
            if replica.not_deciding_reason() is not None:
                headers = [*headers, ("Connection", "close")]
            return start_response(status, headers, *exc_info)

        return app(environ, start)

    return served
