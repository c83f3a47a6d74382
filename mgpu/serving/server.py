"""Runs WSGI apps under gunicorn: TLS with rotated files, several addresses, one TCP segment per reply.

`mgpu webhook` and `mgpu scheduler` call `serve`.

gunicorn sends headers and body in two writes. With TCP_CORK they leave as one segment. Two segments make the client
wait between them, 40 ms if it delays its acknowledgement (docs/design/kubernetes.md, "kube-scheduler's extender").
"""

import errno
import gc
import logging
import resource
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gunicorn.app.base import BaseApplication
from gunicorn.glogging import Logger
from werkzeug.wsgi import ClosingIterator

from mgpu.model.errors import BadObject, Problem
from mgpu.serving import worker
from mgpu.serving.callers import Callers, restrict_callers, warn_if_open
from mgpu.serving.heap import configure_heap
from mgpu.serving.logs import RateLimitFilter
from mgpu.serving.tls_context import ReloadingContext

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

# Longer than the 90 s for which the API server's client keeps an idle connection: the side that sends closes first.
KEEPALIVE_SECONDS = 120
_DRAIN_SECONDS = 20
_END_SECONDS = 15
_PORT_SECONDS = 5.0
"""How long to wait for a port that another process holds."""
_PORT_RETRY_SECONDS = 0.1
_request = threading.local()


@dataclass(frozen=True, slots=True)
class Listen:
    """A listening address and its app.

    Attributes:
        port: 0 for any free one, which the ready line names.
        client_ca: with TLS, a file of CA certificates (PEM); clients need a certificate of one of them.
        callers: the peers that may call, None for all. Probes are answered for all peers.
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
    """Serve until SIGTERM or SIGINT; then finish the requests in progress and raise SystemExit.

    Apps are built before the workers fork, so that workers share their memory. An app gets requests of its own
    addresses only, whatever their Host header says. Prints `serving https on 127.0.0.1:8443` on stdout, one line per
    address, once connections are accepted.

    Args:
        certificate: (chain, key) in PEM. Both files are watched; new connections get the new certificate.
        threads: for each address of each worker. Most of them wait for clients or for the API server.
        start, stop: run in every worker, before its first request and after its last. Start threads here: those of the
            parent do not survive the fork.
        end: run on a thread in every worker that SIGTERM ends, for at most 15 s. Until it returns, the worker accepts
            connections as before; `stop` runs later, after the last request.

    Raises:
        BadObject: an address cannot be listened on.
    """
    for address in listen:
        _check(address)
    warn_if_open(address.callers for address in listen if address.callers and not address.client_ca)
    # As Go programs do. The soft limit exists for programs with select(); at the limit gunicorn's workers would end.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    configure_heap()
    _Server(listen, certificate, workers, threads, start, end, stop).run()


def _check(address: Listen) -> None:
    """Raise BadObject if gunicorn could not listen on the address.

    A process that is just ending may still hold the port, so a port in use is tried again for a while. gunicorn would
    try again too, but log several lines.
    """
    until = time.monotonic() + _PORT_SECONDS
    while (error := _listen_error(address)) is not None:
        if error.errno != errno.EADDRINUSE or time.monotonic() > until:
            problem = Problem(str(address), f"cannot be listened on: {error.strerror or error}")
            raise BadObject([problem]) from error
        time.sleep(_PORT_RETRY_SECONDS)
    if address.client_ca:
        try:
            ssl.create_default_context(cafile=address.client_ca)
        except (OSError, ssl.SSLError) as error:
            raise BadObject([Problem(address.client_ca, f"is no file of certificates: {error}")]) from error


def _listen_error(address: Listen) -> OSError | None:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        with socket.create_server((address.host, address.port), family=family):
            return None
    except OSError as error:
        return error


def _in_one_segment(app: "WSGIApplication") -> "WSGIApplication":
    """Cork the connection from the first header to the end of the body, and let an app close it with the reply.

    A WSGI server owns the Connection header and gunicorn drops the app's, so this goes through its request object.
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
    """Sends gunicorn's messages from WARNING on through the logging of this process."""

    def setup(self, cfg: Any) -> None:
        super().setup(cfg)
        self.error_log.handlers.clear()
        self.error_log.propagate = True
        self.error_log.setLevel(logging.WARNING)
        self.error_log.addFilter(RateLimitFilter())  # one warning for each request that cannot be parsed, with its text


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
            # gunicorn sets both from the listening socket; nothing in a request changes them.
            return self._apps[environ["SERVER_NAME"], environ["SERVER_PORT"]](environ, start_response)

        return _in_one_segment(app)

    def listening(self, server: object, sockets: Sequence[socket.socket]) -> tuple[Listen, Any]:
        """Return the Listen of a listening socket's address, and gunicorn's configuration of it."""
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
        gc.freeze()  # workers share these pages as long as their garbage collectors do not write to them
        for bound, address in zip(arbiter.LISTENERS, self._listen, strict=True):
            host, port = bound.getsockname()[:2]
            self._apps[host, str(port)] = (
                restrict_callers(address.app, address.callers) if address.callers else address.app
            )
            shown = replace(address, host=host, port=port)
            print(f"serving {'https' if address.tls else 'http'} on {shown}", flush=True)


def _remember(_worker: Any, request: Any) -> None:
    _request.current = request
