"""A WSGI app under gunicorn, started from code: TLS that follows rotated files, one segment per reply, quiet.

gunicorn sends a reply's headers and body in two writes. Corked, they leave as one segment: two cost a client that
waits between them, and 40 ms where its acknowledgement is delayed (kubernetes.md, "kube-scheduler's extender").
"""

import gc
import logging
import resource
import signal
import socket
import ssl
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gunicorn.app.base import BaseApplication
from gunicorn.glogging import Logger
from gunicorn.util import close, close_graceful
from gunicorn.workers.gthread import ThreadWorker
from werkzeug.wsgi import ClosingIterator

from mgpu.model.errors import BadObject, Problem
from mgpu.serving.callers import Callers, guarded, warn_where_open
from mgpu.serving.heap import return_memory
from mgpu.serving.patience import PatientSocket, PatientTLS

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

_log = logging.getLogger(__name__)
# Longer than the 90 s for which the API server's client keeps an idle connection: the side that sends closes first.
KEEPALIVE_SECONDS = 120
CONNECTIONS = 1000  # of all addresses together
# For peers that may not call an address. Their connections get a 403 after the TLS handshake, because the message is
# what tells an operator which address to allow; few at a time, so that a flood of them costs the API server nothing.
STRANGERS = 32
_STRANGER_THREADS = 4
_DRAIN_SECONDS = 20
_END_SECONDS = 15
# TLS alerts by which a client says that it does not trust our certificate; Go's sends bad_certificate for all of them.
_DISTRUST = frozenset(
    {
        "SSLV3_ALERT_BAD_CERTIFICATE",
        "SSLV3_ALERT_CERTIFICATE_EXPIRED",
        "SSLV3_ALERT_CERTIFICATE_UNKNOWN",
        "TLSV1_ALERT_UNKNOWN_CA",
    }
)
_DISTRUST_LOG_SECONDS = 60.0
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


class ReloadingContext:
    """An SSLContext (TLS 1.2 and up) that follows its files; the last good one stays where they do not fit together.

    client_ca: as in `Listen`.
    """

    def __init__(self, chain: Path, key: Path, client_ca: Path | None = None) -> None:
        self._chain, self._key, self._client_ca = chain, key, client_ca
        self._lock = threading.Lock()
        self._seen = self._stamp()
        self._context = self._load()

    def current(self) -> ssl.SSLContext:
        with self._lock:
            try:
                seen = self._stamp()
                if seen != self._seen:
                    self._context = self._load()
                    self._seen = seen
                    _log.info("serving certificate reloaded", extra={"file": str(self._chain)})
            except (OSError, ssl.SSLError) as error:
                _log.warning("serving certificate not reloaded: %s", error, extra={"file": str(self._chain)})
            return self._context

    def _stamp(self) -> tuple[int, ...]:
        files = (self._chain, self._key, *([self._client_ca] if self._client_ca else []))
        return tuple(v for f in files for s in (f.stat(),) for v in (s.st_mtime_ns, s.st_ino))

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.sslsocket_class = PatientTLS
        context.load_cert_chain(self._chain, self._key)
        if self._client_ca:
            context.load_verify_locations(self._client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def _in_one_segment(app: "WSGIApplication") -> "WSGIApplication":
    """Cork the connection from the first header to the end of the body; and let an app close it with the reply.

    (A WSGI server owns the Connection header; gunicorn drops the app's, so it is told by its request object.)
    """

    def served(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        connection: socket.socket = environ["gunicorn.socket"]

        def start(status: str, headers: list[tuple[str, str]], exc_info: Any = None, /) -> Any:
            if any(name.lower() == "connection" and value.lower() == "close" for name, value in headers):
                _request.current.force_close()
            _cork(connection, on=True)
            return start_response(status, headers, exc_info)

        return ClosingIterator(app(environ, start), lambda: _cork(connection, on=False))

    return served


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


@dataclass(frozen=True, slots=True)
class _Lane:
    """What connections share with one another and with no others: threads, and room for connections.

    server: the listening socket's address. stranger: whether the peers may not call it.
    """

    server: object
    stranger: bool


class _Pools:
    """An executor for gunicorn, with a pool of so many threads for each lane: none can take another's."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._of: dict[_Lane, ThreadPoolExecutor] = {}

    def submit(self, handle: Callable[[Any], object], conn: Any) -> Future[object]:
        lane: _Lane = conn.lane
        if lane not in self._of:  # only the worker's loop submits
            self._of[lane] = ThreadPoolExecutor(_STRANGER_THREADS if lane.stranger else self._threads)
        return self._of[lane].submit(handle, conn)

    def shutdown(self, *, wait: bool) -> None:
        for pool in self._of.values():
            pool.shutdown(wait)


class _Worker(ThreadWorker):  # type: ignore[misc]
    """Threads; TLS per address (gunicorn has it for all or none): each has a configuration of its own; and a client
    that does not hang up after its last reply is waited for (2 s) aside, not in the loop of them all.

    No address keeps the others from being served: each has threads of its own, and as many connections as are left free
    at most, so that there are always some left.
    """

    def init_process(self) -> None:
        self._aside = {False: ThreadPoolExecutor(8, "close"), True: ThreadPoolExecutor(1, "close-strangers")}
        self._open: dict[_Lane, set[Any]] = defaultdict(set)
        self._ending = False
        self._distrust_told = -_DISTRUST_LOG_SECONDS
        super().init_process()

    def handle_exit(self, sig: int, frame: Any) -> None:
        """A signal comes in between whatever: the loop begins the end."""
        if not self.app.end:
            super().handle_exit(sig, frame)
        elif not self._ending:
            self._ending = True
            self.method_queue.defer(threading.Thread(target=self._end, name="end", daemon=True).start)

    def _end(self) -> None:
        try:
            self.app.end()
        finally:
            super().handle_exit(signal.SIGTERM, None)

    def get_thread_pool(self) -> _Pools:
        return _Pools(self.cfg.threads)

    def enqueue_req(self, conn: Any) -> None:
        if not hasattr(conn, "lane"):
            listen, config = self.app.listening(conn.server, self.sockets)
            conn.lane = _Lane(conn.server, bool(listen.callers and not listen.callers.admits(conn.client[0])))
            mine = self._open[conn.lane]
            most = STRANGERS if conn.lane.stranger else CONNECTIONS - sum(map(len, self._open.values()))
            if len(mine) >= most:
                self.nr_conns -= 1
                close(conn.sock)
                return
            mine.add(conn)
            conn.cfg = config
            plain = conn.sock
            conn.sock = PatientSocket(plain.family, plain.type, plain.proto, plain.detach())
            conn.close = partial(self._close, conn)
        super().enqueue_req(conn)

    def handle(self, conn: Any) -> Any:
        """A connection whose handshake is done waits for its request as one that is kept alive, which needs no thread:
        Go's client makes some for later.
        """
        if conn.initialized or not conn.cfg.is_ssl or not conn.wait_for_data(1.0):
            return super().handle(conn)
        try:
            conn.init()
        except OSError as error:
            if not conn.lane.stranger and getattr(error, "reason", "") in _DISTRUST:
                self._distrusted(conn, str(error.reason))  # type: ignore[attr-defined]
            else:
                _log.debug("handshake failed: %s", error)
            return False
        return True

    def _distrusted(self, conn: Any, reason: str) -> None:
        """Log that a permitted client refused our certificate, at most once a minute.

        This is all that a process can see of a missing or wrong CA bundle: it may not read webhook configurations.
        """
        now = time.monotonic()
        if now < self._distrust_told + _DISTRUST_LOG_SECONDS:
            return
        self._distrust_told = now
        _log.error(
            "A client does not trust the serving certificate. If it is the API server, the CA bundle of the webhook "
            "configuration is missing or wrong: run manifests/certificates.sh (make deploy does)",
            extra={"client": conn.client[0], "reason": reason},
        )

    def _cap_keepalive(self, deadline: float) -> None:
        """At the end. Those that have not asked for anything yet would be waited for until the master kills the worker:
        Go's client makes some for later.
        """
        super()._cap_keepalive(deadline)
        for conn in self.pending_conns:
            conn.timeout = min(conn.timeout, deadline)

    def _close(self, conn: Any, *, graceful: bool = False) -> None:
        def closed(_: object = None) -> None:
            self._open[conn.lane].discard(conn)

        if graceful and conn.sock.fileno() >= 0:
            patient = conn.sock
            # A plain one: who has his answer is nobody that was waited for in vain.
            ending = socket.socket(patient.family, patient.type, patient.proto, patient.detach())
            self._aside[conn.lane.stranger].submit(close_graceful, ending).add_done_callback(closed)
        else:
            close(conn.sock)
            closed()


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
            "worker_connections": CONNECTIONS,
            "worker_class": _Worker,
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
