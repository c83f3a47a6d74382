"""A WSGI app under gunicorn, started from code: TLS that follows rotated files, one segment per reply, quiet.

gunicorn sends a reply's headers and body in two writes. Corked, they leave as one segment: two cost a client that
waits between them, and 40 ms where its acknowledgement is delayed. Source:
docs/design/kubernetes.md, "kube-scheduler's extender".
"""

import gc
import logging
import resource
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gunicorn.app.base import BaseApplication
from gunicorn.glogging import Logger
from werkzeug.wsgi import ClosingIterator

from mgpu.model.errors import BadObject, Problem
from mgpu.serving import worker
from mgpu.serving.callers import Callers, guarded, warn_where_open
from mgpu.serving.context import ReloadingContext
from mgpu.serving.heap import return_memory
from mgpu.serving.logs import Seldom

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

# Longer than the 90 s for which the API server's client keeps an idle connection: the side that sends closes first.
KEEPALIVE_SECONDS = 120
_DRAIN_SECONDS = 20
_END_SECONDS = 15
_request = threading.local()


@dataclass(frozen=True, slots=True)
class Listen:
    """Where to listen, and for which app; port 0: any free one, which the ready line names.

    client_ca: with TLS, a file of certificates (PEM); only clients whose certificate one of them has signed are heard.
    callers: the peers that may call; None: every peer. Probes are answered for all.
    """

    host: str
    port: int
    app: "WSGIApplication"
    tls: bool = True
    client_ca: str = ""
    callers: Callers | None = None

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def serve(
    listen: Sequence[Listen],
    *,
    certificate: tuple[Path, Path] | None = None,
    workers: int = 1,
    threads: int = 64,
    start: Callable[[], None] | None = None,
    end: Callable[[], None] | None = None,
    stop: Callable[[], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; then requests under way are finished, and SystemExit is raised.

    The apps are made before the workers fork, so that they share their memory. Each is asked over its own addresses and
    no others, whatever a request says.
    certificate: (chain, key) in PEM; both are watched, and new connections get the new one.
    threads: of each worker for each address. Most of them wait, for clients or for the API server, if for anything.
    start, stop: run in every worker, before its first request and after its last; threads belong there, not before.
    end: run in every worker that SIGTERM ends, in a thread of its own, within 15 s: until it returns the worker serves
    as before, new connections too. `stop` comes later, when those that there are have been finished.
    Prints `serving https on 127.0.0.1:8443` on stdout, one line per address, once connections are accepted.
    Raises BadObject for an address that cannot be had.
    """
    for address in listen:
        _check(address)
    warn_where_open(address.callers for address in listen if address.callers and not address.client_ca)
    # As Go's programs do: where the limit for those that still use select() is met, gunicorn's workers end.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return_memory()
    _Server(listen, certificate, workers, threads, start, end, stop).run()


def _check(address: Listen) -> None:
    """gunicorn would try for five seconds, and then say so in several lines."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        with socket.create_server((address.host, address.port), family=family):
            pass
    except OSError as error:
        raise BadObject([Problem(str(address), f"cannot be listened on: {error.strerror or error}")]) from error
    if address.client_ca:
        try:
            ssl.create_default_context(cafile=address.client_ca)
        except (OSError, ssl.SSLError) as error:
            raise BadObject([Problem(address.client_ca, f"is no file of certificates: {error}")]) from error


def _in_one_segment(app: "WSGIApplication") -> "WSGIApplication":
    """Cork the connection from the first header to the end of the body; and let an app close it with the reply.

    (A WSGI server owns the Connection header; gunicorn drops the app's, so it is told by its request object.)
    """

    def served(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        connection: socket.socket = environ["gunicorn.socket"]

        def start(status: str, headers: list[tuple[str, str]], exc_info: Any = None, /) -> Any:
            closes = any(name.lower() == "connection" and value.lower() == "close" for name, value in headers)
            if closes or _is_unread(environ["wsgi.input"]):
                _request.current.force_close()
            _cork(connection, on=True)
            return start_response(status, headers, exc_info)

        return ClosingIterator(app(environ, start), lambda: _cork(connection, on=False))

    return served


def _is_unread(body: Any) -> bool:
    """Whether the app answers without having read the body to its end.

    gunicorn would read up to 64 KiB of the rest before the next request, byte by byte where it comes so.
    """
    return bool(getattr(body.reader, "length", 0) or getattr(body.reader, "parser", None))


def _cork(connection: socket.socket, *, on: bool) -> None:
    if connection.fileno() >= 0:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, on)


class _Logger(Logger):  # type: ignore[misc]
    """gunicorn's messages through this process's own logging, without its chatter about workers."""

    def setup(self, cfg: Any) -> None:
        super().setup(cfg)
        self.error_log.handlers.clear()
        self.error_log.propagate = True
        self.error_log.setLevel(logging.WARNING)
        self.error_log.addFilter(Seldom())  # a warning for each request that cannot be parsed, in the sender's words


class _Server(BaseApplication):  # type: ignore[misc]
    def __init__(
        self,
        listen: Sequence[Listen],
        certificate: tuple[Path, Path] | None,
        workers: int,
        threads: int,
        start: Callable[[], None] | None,
        end: Callable[[], None] | None,
        stop: Callable[[], None] | None,
    ) -> None:
        if not certificate and any(address.tls for address in listen):
            raise ValueError("an address with TLS needs a certificate")
        self._listen, self._certificate, self.end = listen, certificate, end
        self._apps: dict[tuple[str, str], WSGIApplication] = {}
        self._options: dict[str, Any] = {
            "bind": [str(address) for address in listen],
            "workers": workers,
            "threads": threads,
            "worker_connections": worker.CONNECTIONS,
            "worker_class": worker.Worker,
            "logger_class": _Logger,
            "keepalive": KEEPALIVE_SECONDS,
            "graceful_timeout": _DRAIN_SECONDS + (_END_SECONDS if end else 0),
            "preload_app": True,
            "errorlog": None,
            "control_socket_disable": True,
            "when_ready": self._announce,
            "pre_request": _remember,
            "post_worker_init": lambda _: start() if start else None,
            "worker_exit": lambda _, __: stop() if stop else None,
        }
        super().__init__()

    def load_config(self) -> None:
        for name, value in self._options.items():
            self.cfg.set(name, value)
        self._configs = [self._config(address) for address in self._listen]

    def load(self) -> "WSGIApplication":
        def app(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
            # These two are the listening socket's, and nothing in a request changes them.
            return self._apps[environ["SERVER_NAME"], environ["SERVER_PORT"]](environ, start_response)

        return _in_one_segment(app)

    def listening(self, server: object, sockets: Sequence[socket.socket]) -> tuple[Listen, Any]:
        """What is served at one of the listening sockets, by its address, and gunicorn's configuration of it."""
        index = [s.getsockname() for s in sockets].index(server)
        return self._listen[index], self._configs[index]

    def _config(self, address: Listen) -> Any:
        config = type(self.cfg)()
        for name, value in (self._options | self._tls(address)).items():
            config.set(name, value)
        return config

    def _tls(self, address: Listen) -> dict[str, Any]:
        if not address.tls or not self._certificate:
            return {}
        context = ReloadingContext(*self._certificate, Path(address.client_ca) if address.client_ca else None)
        chain, key = map(str, self._certificate)
        return {"certfile": chain, "keyfile": key, "ssl_context": lambda _, __: context.current()}

    def _announce(self, arbiter: Any) -> None:
        gc.collect()
        gc.freeze()  # what exists now is shared with the workers; their collectors must not touch (copy) its pages
        for bound, address in zip(arbiter.LISTENERS, self._listen, strict=True):
            host, port = bound.getsockname()[:2]
            self._apps[host, str(port)] = guarded(address.app, address.callers) if address.callers else address.app
            shown = replace(address, host=host, port=port)
            print(f"serving {'https' if address.tls else 'http'} on {shown}", flush=True)


def _remember(_worker: Any, request: Any) -> None:
    _request.current = request
