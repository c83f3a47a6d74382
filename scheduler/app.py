"""The HTTP side: binding admission over TLS, the extender in plain HTTP, each on its own address and nowhere else.

Both must be one process, since they share the reservations, and gunicorn serves both in one worker. What came over
TLS never reaches the extender: `/bind` has no authentication but that its address is loopback.
"""

import ssl
from collections.abc import Iterable
from typing import TYPE_CHECKING

from flask import Flask

from mgpu.kube import Api
from mgpu.serving.app import new_app, probes, reviewing
from mgpu.settings import Settings
from scheduler.admission import BindingAdmission
from scheduler.deciding import Decider
from scheduler.extender import Extender, Gate
from scheduler.extender import make_app as make_extender_app
from scheduler.filtering import Filter
from scheduler.gpushare_routes import gpushare_routes
from scheduler.preempting import Preemption
from scheduler.state import State

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment


def make_apps(
    state: State, decider: Decider, filter_: Filter, preemption: Preemption, api: Api, settings: Settings, gate: Gate
) -> tuple[Flask, Flask]:
    """(admission, extender), each with `/healthz` and `/readyz`."""
    admission = new_app()
    binding = BindingAdmission(decider, gate.may_decide, settings.scheduler.binding_users)
    reviewing(admission, "/bind-admission", binding, kinds=("Binding",))
    verbs = Extender(filter_, decider, preemption, api, gate)
    extender = make_extender_app(verbs)
    gpushare_routes(extender, verbs, state, settings, gate)
    for app in (admission, extender):
        probes(app, gate.ready)
    return admission, extender


def by_listener(admission: Flask, extender: Flask) -> "WSGIApplication":
    """One WSGI app of both: which one answers depends on the connection alone, not on what the request says."""

    def app(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        chosen = admission if isinstance(environ["gunicorn.socket"], ssl.SSLSocket) else extender
        return chosen.wsgi_app(environ, start_response)

    return app
