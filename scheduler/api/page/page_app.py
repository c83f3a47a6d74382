"""Serves the web page: its files and three JSON endpoints, all of them read-only.

`scheduler.api.app` makes the app, and browsers call it; `bench.page` measures its board. There is no authentication, so
the app listens on loopback by default (docs/security.md). Every response must have the security headers, and on
loopback every request must pass the check of the Host header.
"""

import gzip
import hashlib
import ipaddress
import mimetypes
from importlib.resources import files

import orjson
from flask import Flask, Response, request

from mgpu.serving.app import new_app
from mgpu.serving.review import BadRequest
from mgpu.settings import Settings
from scheduler.api.page.feed import Board
from scheduler.api.page.node_use import NodeUses
from scheduler.api.page.waiting_list import Waiting
from scheduler.api.replica import Replica
from scheduler.background import Pace
from scheduler.cluster.cache import ClusterCache
from scheduler.decisions.effort_budgets import EffortBudgets
from scheduler.decisions.filter import Filter
from scheduler.decisions.gang_outlook import GangOutlooks
from scheduler.engine import LEAST

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_INDEX = "index.html"


def make_board(state: ClusterCache, settings: Settings) -> Board:
    pace = Pace(pause_ratio=1)
    # This filter is not the one that answers kube-scheduler, and must not use up the namespaces' allowances of effort.
    # With an allowance of 0 it makes no full searches for pods with several containers.
    filter_ = Filter(state, settings, pace=pace, budgets=EffortBudgets(allowance=0))
    gangs = GangOutlooks(state, filter_, settings, limits=LEAST, pace=pace)
    return Board(state, Waiting(state, filter_, gangs, pace))


def make_app(board: Board, uses: NodeUses, replica: Replica, host: str = "127.0.0.1") -> Flask:
    """Return the app with `/`, the static files, `/api/cluster?since=VERSION`, `/api/nodes/NAME` and `/api/use`.

    The last has a parameter `node` for each node.

    Replicas that do not lead answer too. The JSON endpoints answer 503 until the cache is in sync.

    Args:
        host: The address on which the app is served. If it is loopback, the app answers only requests whose Host header
            is an IP address or `localhost`. Without this check, another site whose name resolves to 127.0.0.1 could
            read the page (DNS rebinding).
    """
    app = new_app()
    served = {path.name: path.read_bytes() for path in (files(__package__) / "static").iterdir() if path.is_file()}
    local = _is_loopback(host)

    def check_host() -> None:
        if local and not _names_an_address(request.host):
            raise BadRequest(421, "the page is served on loopback; open it as localhost or by its IP address")

    def file(name: str = _INDEX) -> Response:
        if name not in served:
            raise BadRequest(404, "there is no such page")
        reply = Response(served[name], mimetype=mimetypes.guess_type(name)[0])
        reply.set_etag(hashlib.sha256(served[name]).hexdigest()[:16])
        reply.cache_control.no_cache = True
        reply.make_conditional(request)
        return reply

    def cluster() -> Response:
        replica.may_answer()
        return _packed(board.since(request.args.get("since", ""), replica.not_deciding_reason() or ""))

    def node(name: str) -> Response:
        replica.may_answer()
        details = board.node(name)
        if details is None:
            raise BadRequest(404, f"there is no node {name[:253]}")
        return _uncached(Response(orjson.dumps(details), mimetype="application/json"))

    def use() -> Response:
        replica.may_answer()
        found = uses.json(request.args.getlist("node"))
        return _uncached(Response(orjson.dumps(found), mimetype="application/json"))

    def secured(reply: Response) -> Response:
        reply.headers.update(_HEADERS)
        return reply

    app.before_request(check_host)
    app.after_request(secured)
    app.add_url_rule("/", "page", file)
    app.add_url_rule("/<name>", "file", file)
    app.add_url_rule("/api/cluster", "cluster", cluster)
    app.add_url_rule("/api/nodes/<name>", "node", node)
    app.add_url_rule("/api/use", "use", use)
    return app


def _packed(body: bytes) -> Response:
    packed = request.accept_encodings.quality("gzip") > 0
    reply = Response(body if packed else gzip.decompress(body), mimetype="application/json")
    if packed:
        reply.content_encoding = "gzip"
    reply.vary.add("Accept-Encoding")
    return _uncached(reply)


def _uncached(reply: Response) -> Response:
    reply.cache_control.no_store = True
    return reply


def _is_loopback(host: str) -> bool:
    address = _address(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def _names_an_address(host: str) -> bool:
    """Return whether a Host header is an IP address or localhost, with or without a port.

    Another site cannot make a browser send such a header to this address, because browsers do not ask DNS for these.
    """
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    return name == "localhost" or _address(name.strip("[]")) is not None


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
