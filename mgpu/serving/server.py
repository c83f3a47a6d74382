"""Runs WSGI apps under gunicorn, with TLS and several listening addresses.

The webhook, the scheduler and the servers of the benchmarks call `serve`. gunicorn sends the headers and the body of a
reply in two writes. A client that delays its acknowledgements would get the second TCP segment 40 ms later
(docs/design/kubernetes.md, "kube-scheduler's extender"). So the socket collects both writes and sends them together.
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
from mgpu.serving.patience import PatientSocket
from mgpu.serving.tls_context import ReloadingContext

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

KEEPALIVE_SECONDS = 120
"""The time for which the server keeps an idle connection. It is longer than the 90 s for which the API server's client
keeps one: if the server closed the connection first, a request that is sent at the same moment would fail."""
_DRAIN_SECONDS = 20
"""How long the server, when it ends, waits for requests in progress to finish."""
_END_SECONDS = 15
"""How long the server, when it ends, waits for the function `end` to return."""
_PORT_SECONDS = 5.0
"""The time for which the server waits at the start for a port that another process holds."""
_PORT_RETRY_SECONDS = 0.1
_request = threading.local()


@dataclass(frozen=True, slots=True)
class Listen:
    """A listening address and its app.

    Attributes:
        port: the port; 0 selects a free port, which the line `serving …` on stdout names.
        client_ca: the path of a file of CA certificates (PEM), if clients need a certificate that one of these CAs has
            signed; "" if they need none. It requires TLS.
        callers: the peers that may call; None if all may call. Probes of all peers are answered.
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

    The apps are built before the workers are forked, so that the workers share the memory of the apps. An app gets only
    the requests to its own addresses, whatever their Host header says. As soon as all addresses accept connections, the
    function prints a line such as `serving https on 127.0.0.1:8443` on stdout for each of them.

    Args:
        certificate: the paths of the certificate chain and of the key, in PEM; None without TLS. If the files change,
            new connections get the new certificate.
        threads: the number of threads for each address of each worker. Most of them wait for clients or for the API
            server.
        start: the function that is called in every worker before its first request. Start threads in this function and
            not before the call of `serve`, because the workers are forked and a fork does not copy threads.
        end: the function that is called on a thread in every worker that SIGTERM ends. It may take 15 s. Until it
            returns, the worker accepts connections as before.
        stop: the function that is called in every worker after its last request.

    Raises:
        BadObject: if it is not possible to listen on an address, or if a `client_ca` is not a file of certificates.
        ValueError: if an address needs TLS and `certificate` is None.
    """
    for address in listen:
        _check(address)
    warn_if_open(address.callers for address in listen if address.callers and not address.client_ca)
    # Raise the soft limit of open files to the hard limit, as Go programs do. The soft limit exists for programs that
    # use select(), and gunicorn's workers exit when they reach it.
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    configure_heap()
    _Server(listen, certificate, workers, threads, start, end, stop).run()


def _check(address: Listen) -> None:
    """Raise BadObject if gunicorn could not listen on the address, or could not read its `client_ca`.

    If the port is in use, the function tries again for a few seconds, because a process that is ending may still hold
    it. gunicorn would retry too, but would log several lines.
    """
    until = time.monotonic() + _PORT_SECONDS
    while (error := _listen_error(address)) is not None:
        if error.errno != errno.EADDRINUSE or time.monotonic() > until:
            problem = Problem(str(address), f"cannot listen: {error.strerror or error}")
            raise BadObject([problem]) from error
        time.sleep(_PORT_RETRY_SECONDS)
    if address.client_ca:
        try:
            ssl.create_default_context(cafile=address.client_ca)
        except (OSError, ssl.SSLError) as error:
            raise BadObject([Problem(address.client_ca, f"is not a file of certificates: {error}")]) from error


def _listen_error(address: Listen) -> OSError | None:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        with socket.create_server((address.host, address.port), family=family):
            return None
    except OSError as error:
        return error


def _send_in_one_segment(app: "WSGIApplication") -> "WSGIApplication":
    """Return an app that sends the headers and the body of each reply of `app` together.

    It also closes the connection if a reply has the header `Connection: close`, or if `app` has not read the whole body
    of the request. gunicorn ignores this header in the replies of an app, so the connection is closed through
    gunicorn's request object.
    """

    def served(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        connection: PatientSocket = environ["gunicorn.socket"]

        def start(status: str, headers: list[tuple[str, str]], exc_info: Any = None, /) -> Any:
            closes = any(name.lower() == "connection" and value.lower() == "close" for name, value in headers)
            if closes or _is_unread(environ["wsgi.input"]):
                _request.current.force_close()
            connection.hold()
            return start_response(status, headers, exc_info)

        try:
            return ClosingIterator(app(environ, start), connection.release)
        except BaseException:
            connection.release()
            raise

    return served


def _is_unread(body: Any) -> bool:
    """Return whether the app answers without having read the body to its end.

    gunicorn would read up to 64 KiB of the rest before the next request, at the speed at which the client sends it.
    """
    return bool(getattr(body.reader, "length", 0) or getattr(body.reader, "parser", None))


class _Logger(Logger):  # type: ignore[misc]
    """A logger that passes gunicorn's messages of level WARNING and higher to the logging of this process."""

    def setup(self, cfg: Any) -> None:
        super().setup(cfg)
        self.error_log.handlers.clear()
        self.error_log.propagate = True
        self.error_log.setLevel(logging.WARNING)
        self.error_log.addFilter(RateLimitFilter())  # gunicorn logs the text of each request that it cannot parse


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
        self._listen = listen
        self._certificate = certificate
        self.end = end
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
            # gunicorn sets both variables from the listening socket, so a request cannot choose another app.
            return self._apps[environ["SERVER_NAME"], environ["SERVER_PORT"]](environ, start_response)

        return _send_in_one_segment(app)

    def find_listener(self, server: object, sockets: Sequence[socket.socket]) -> tuple[Listen, Any]:
        """Return the Listen of a listening socket, and gunicorn's configuration for it. The worker calls this."""
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
        # The workers share the memory pages of these objects. The garbage collector writes to the objects that it
        # examines, so each worker would get copies of their pages. The collector does not examine frozen objects.
        gc.freeze()
        for bound, address in zip(arbiter.LISTENERS, self._listen, strict=True):
            host, port = bound.getsockname()[:2]
            self._apps[host, str(port)] = (
                restrict_callers(address.app, address.callers) if address.callers else address.app
            )
            actual = replace(address, host=host, port=port)
            print(f"serving {'https' if address.tls else 'http'} on {actual}", flush=True)


def _remember(_worker: Any, request: Any) -> None:
    _request.current = request
