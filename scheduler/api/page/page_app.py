"""The HTTP side of the web page: its files, and two JSON endpoints. All of it is read-only.

docs/security.md says who can reach it: there is no authentication, so it listens on loopback by default.
"""

import gzip
import hashlib
import ipaddress
import mimetypes
from collections.abc import Callable, Iterable, Mapping
from importlib.resources import files
from typing import Any

import orjson
from flask import Flask, Response, request

from mgpu.serving.app import new_app
from mgpu.serving.review import BadRequest
from mgpu.settings import Settings
from scheduler.api.extender import Gate
from scheduler.api.page.feed import Board
from scheduler.api.page.waiting_list import Waiting
from scheduler.background import Pace
from scheduler.cluster.cache import ClusterCache
from scheduler.decisions.effort_budgets import EffortBudgets
from scheduler.decisions.filter import Filter

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_INDEX = "index.html"


def make_board(
    state: ClusterCache, settings: Settings, mtgpupods: Callable[[], Iterable[Mapping[str, Any]]] = tuple
) -> Board:
    """Build the page's feed. mtgpupods: returns all MtgpuPods that are known, as the API has them."""
    pace = Pace(rests=1)
    # A filter of its own: it makes no full searches, uses none of the namespaces' allowances, and plans nothing.
    filter_ = Filter(state, settings, pace=pace, budgets=EffortBudgets(allowance=0))
    return Board(state, Waiting(state, filter_, mtgpupods, pace))


def make_app(board: Board, gate: Gate, host: str = "127.0.0.1") -> Flask:
    """Return the app with `/`, the static files, `/api/cluster?since=VERSION` and `/api/nodes/NAME`.

    Replicas that do not lead answer too, since their caches are in sync; the answer is 503 before they are.

    Args:
        host: The address on which the app is served. On loopback it answers only requests for an address or for
            `localhost`. A page of another site whose name resolves to 127.0.0.1 (DNS rebinding) could read it
            otherwise.
    """
    app = new_app()
    served = {path.name: path.read_bytes() for path in (files(__package__) / "static").iterdir() if path.is_file()}
    local = _is_loopback(host)

    def check_host() -> None:
        if local and not _names_an_address(request.host):
            raise BadRequest(421, "the page is served on loopback; open it by that address or as localhost")

    def file(name: str = _INDEX) -> Response:
        if name not in served:
            raise BadRequest(404, "there is no such page")
        reply = Response(served[name], mimetype=mimetypes.guess_type(name)[0])
        reply.set_etag(hashlib.sha256(served[name]).hexdigest()[:16])
        reply.cache_control.no_cache = True
        reply.make_conditional(request)
        return reply

    def cluster() -> Response:
        gate.may_answer()
        return _packed(board.since(request.args.get("since", ""), gate.not_deciding_reason() or ""))

    def node(name: str) -> Response:
        gate.may_answer()
        found = board.node(name)
        if found is None:
            raise BadRequest(404, f"there is no node {name[:253]}")
        return _fresh(Response(orjson.dumps(found), mimetype="application/json"))

    def secured(reply: Response) -> Response:
        reply.headers.update(_HEADERS)
        return reply

    app.before_request(check_host)
    app.after_request(secured)
    app.add_url_rule("/", "page", file)
    app.add_url_rule("/<name>", "file", file)
    app.add_url_rule("/api/cluster", "cluster", cluster)
    app.add_url_rule("/api/nodes/<name>", "node", node)
    return app


def _packed(body: bytes) -> Response:
    packed = request.accept_encodings.quality("gzip") > 0
    reply = Response(body if packed else gzip.decompress(body), mimetype="application/json")
    if packed:
        reply.content_encoding = "gzip"
    reply.vary.add("Accept-Encoding")
    return _fresh(reply)


def _fresh(reply: Response) -> Response:
    reply.cache_control.no_store = True
    return reply


def _is_loopback(host: str) -> bool:
    address = _address(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def _names_an_address(host: str) -> bool:
    """Tell whether a Host header is an address or localhost, with or without a port: names in no DNS zone."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    return name == "localhost" or _address(name.strip("[]")) is not None


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
