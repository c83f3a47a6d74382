"""The gunicorn worker, in which a peer that may not call an endpoint (a stranger) cannot delay one that may (a caller).

`mgpu.serving.server` starts gunicorn with this worker. Each listening address has two lanes with threads of their own,
one for callers and one for strangers. The address of the peer determines the lane. If clients authenticate with
certificates, every connection starts in the strangers' lane, and a handshake with a valid certificate moves it to the
callers' lane. A connection that waits for its next request may occupy a thread only while no request waits for one.

The class overrides methods of gunicorn's gthread worker, some of which are private, so the version of gunicorn is
locked. CONTRIBUTING.md says why no other server is used.
"""

import ctypes
import logging
import os
import select
import selectors
import signal
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, TypeVar

from gunicorn.sock import ssl_wrap_socket
from gunicorn.util import close, close_graceful
from gunicorn.workers import gthread

from mgpu.model.addresses import LOOPBACK, Block, is_within
from mgpu.serving import patience
from mgpu.serving.connection_limit import ConnectionLimit
from mgpu.serving.logs import RateLimit
from mgpu.serving.patience import PatientSocket
from mgpu.serving.request_head import Parser

_log = logging.getLogger(__name__)
T = TypeVar("T")
CONNECTIONS = 1000
"""The most connections of a worker to all addresses together."""
STRANGERS = 32
"""The most connections of strangers to one address of a worker, and the number of threads for their requests. Strangers
get a reply with status 403 instead of a closed connection, because the message tells an operator which address to
allow."""
HANDSHAKES = 256
"""The most connections of strangers to an address of a worker where only the certificate tells callers from strangers.
A busy API server may open this many connections at once, and each counts as one of a stranger until its handshake is
done."""
LINGER_SECONDS = 0.05
"""How long a thread waits for the next request of a connection before the event loop waits instead. Under load, the
next request comes within milliseconds, and moving the connection between the event loop and a thread costs about as
much as a short request. No thread waits while a request waits for a thread."""
_LONG_LINGER_SECONDS = 0.5
"""The same for a lane with at most `_LINGERING` connections, each of which may keep its thread. A worker that ends
waits for these threads."""
_LINGERING = 8
"""How many threads of a lane may stay with their connections at a time. With many more, the event loop would wait long
for Python's lock, and with it all other connections."""
_MOST_SERVED = 16
"""How many requests of a connection a thread serves in succession if there are more connections, so that these get
their turn."""
# Few threads do the cryptography of strangers' handshakes, so that callers keep most of the CPU.
_HANDSHAKE_THREADS = 4
# The TLS alerts of clients that do not trust the serving certificate. Go's client always sends bad_certificate.
_DISTRUST = frozenset(
    {
        "SSLV3_ALERT_BAD_CERTIFICATE",
        "SSLV3_ALERT_CERTIFICATE_EXPIRED",
        "SSLV3_ALERT_CERTIFICATE_UNKNOWN",
        "TLSV1_ALERT_UNKNOWN_CA",
    }
)

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class _Pool(ThreadPoolExecutor):
    """An executor that tells whether calls wait for a thread: `waiting` has an item for each of them."""

    def __init__(self, threads: int, name: str = "") -> None:
        super().__init__(threads, name)
        self.waiting: deque[None] = deque()

    def submit(self, call: Callable[..., T], /, *arguments: Any, **options: Any) -> "Future[T]":
        self.waiting.append(None)
        return super().submit(self._start, call, *arguments, **options)

    def _start(self, call: Callable[..., T], *arguments: Any, **options: Any) -> T:
        self.waiting.pop()
        return call(*arguments, **options)


@dataclass(frozen=True, slots=True, eq=False)
class _Lane:
    """The connections of callers or strangers to an address, and their threads.

    Attributes:
        lingering: Limits the number of threads that stay with a connection.
    """

    connections: ConnectionLimit[Any]
    handshakes: ThreadPoolExecutor
    requests: _Pool
    closing: ThreadPoolExecutor
    lingering: threading.Semaphore


@dataclass(frozen=True, slots=True, eq=False)
class _Address:
    """A listening address with its two lanes.

    Attributes:
        config: gunicorn's configuration for this address.
        blocks: the blocks of the callers' addresses; None if clients authenticate with certificates instead.
    """

    config: Any
    blocks: tuple[Block, ...] | None
    callers: _Lane
    strangers: _Lane

    def lane_of(self, peer: str) -> _Lane:
        return self.callers if is_within(peer, self.blocks or ()) else self.strangers


class _Threads:
    """The executor to which gunicorn submits requests. It passes each request to the lane of its connection."""

    def __init__(self, addresses: Sequence[_Address]) -> None:
        self._addresses = addresses

    def submit(self, handle: Callable[[Any], object], conn: Any) -> Future[object]:
        lane: _Lane = conn.lane
        return lane.requests.submit(handle, conn)

    def shutdown(self, *, wait: bool) -> None:
        for address in self._addresses:
            for lane in (address.callers, address.strangers):
                lane.requests.shutdown(wait)
                lane.handshakes.shutdown(wait)


class Worker(gthread.ThreadWorker):  # type: ignore[misc]
    """A threaded worker with TLS, threads and limits for each address.

    gunicorn has TLS for all addresses or for none, but here each address has a configuration of its own. gunicorn also
    waits up to 2 s in the event loop for a client that does not close its connection after the last reply. Here a
    thread waits for that client.

    One address cannot block another: its callers may use at most half of the connections that all others leave free,
    and its strangers have a limit of their own.
    """

    def init_process(self) -> None:
        _end_with_parent(self.ppid)
        self._addresses = {s.getsockname(): self._make_address(s.getsockname()) for s in self.sockets}
        self._is_ending = False
        self._distrust_limit = RateLimit()
        super().init_process()

    def _make_address(self, server: tuple[Any, ...]) -> _Address:
        listen, config = self.app.find_listener(server, self.sockets)
        by_certificate = bool(listen.client_ca) and not listen.callers
        blocks: tuple[Block, ...] | None = ()
        if by_certificate:
            blocks = None
        elif listen.callers:
            blocks = listen.callers.blocks
        elif is_within(server[0], LOOPBACK):
            blocks = LOOPBACK  # every peer is in the same pod, such as kube-scheduler next to its extender
        requests = _Pool(self.cfg.threads)
        lingering = threading.Semaphore(_LINGERING)
        callers = _Lane(ConnectionLimit(CONNECTIONS), requests, requests, ThreadPoolExecutor(8, "close"), lingering)
        strangers = _Lane(
            ConnectionLimit(HANDSHAKES if by_certificate else STRANGERS),
            ThreadPoolExecutor(_HANDSHAKE_THREADS, "strangers-handshakes"),
            _Pool(STRANGERS, "strangers"),
            ThreadPoolExecutor(_HANDSHAKE_THREADS, "strangers-close"),
            threading.Semaphore(_LINGERING),
        )
        return _Address(config, blocks, callers, strangers)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """End the worker. If there is a function `end`, a thread calls it first, and then ends the worker.

        The event loop starts the thread, because a signal handler interrupts arbitrary code.
        """
        if not self.app.end:
            super().handle_exit(sig, frame)
        elif not self._is_ending:
            self._is_ending = True
            self.method_queue.defer(threading.Thread(target=self._end, name="end", daemon=True).start)

    def _end(self) -> None:
        try:
            self.app.end()
        finally:
            super().handle_exit(signal.SIGTERM, None)

    def get_thread_pool(self) -> _Threads:
        return _Threads(list(self._addresses.values()))

    def enqueue_req(self, conn: Any) -> None:
        """Move a connection on by one step: accept it, continue its handshake, or give its request to a thread.

        An accepted connection waits in the event loop until the client sends something.
        """
        if not hasattr(conn, "lane"):
            self._accept(conn)
        elif conn.cfg.is_ssl and not conn.initialized:
            future = conn.lane.handshakes.submit(_handshake, conn)
            future.add_done_callback(lambda done: self.method_queue.defer(self._after_handshake, conn, done))
        else:
            super().enqueue_req(conn)

    def _accept(self, conn: Any) -> None:
        address = self._addresses[conn.server]
        conn.cfg = address.config
        conn.close = partial(self._close, conn)
        plain = conn.sock
        conn.sock = PatientSocket(plain.family, plain.type, plain.proto, plain.detach())
        if not conn.cfg.is_ssl:
            conn.parser = Parser(conn.cfg, conn.sock, conn.client)
        conn.timeout = time.monotonic() + (patience.PATIENCE_SECONDS if conn.cfg.is_ssl else conn.cfg.keepalive)
        if self._join(conn, address.lane_of(conn.client[0])):
            self._wait(conn, selectors.EVENT_READ)

    def _join(self, conn: Any, lane: _Lane) -> bool:
        """Add a connection to a lane and return True, or close the connection and return False.

        Only the callers' lane refuses connections. In a full strangers' lane, an older connection is closed instead.
        """
        conn.lane = lane
        address = self._addresses[conn.server]
        if lane is address.callers:
            taken = sum(len(a.callers.connections) + len(a.strangers.connections) for a in self._addresses.values())
            if len(lane.connections) >= CONNECTIONS - taken:
                self.nr_conns -= 1
                conn.close()
                return False
        replaced = lane.connections.add(conn, conn.client[0])
        if replaced is not None:
            self._disconnect(replaced)
        return True

    def _wait(self, conn: Any, events: int) -> None:
        conn.sock.setblocking(False)
        if not self.alive:
            conn.timeout = min(conn.timeout, time.monotonic() + gthread.STOP_KEEPALIVE_LINGER)
        self.pending_conns.append(conn)
        self.poller.register(conn.sock, events, partial(self.on_pending_socket_readable, conn))

    def _after_handshake(self, conn: Any, done: "Future[int | None]") -> None:
        """Continue in the event loop after a step of a handshake.

        When the handshake is done, the connection waits like an idle connection that is kept alive, because Go's client
        opens connections in advance.
        """
        try:
            events = done.result()
        except (OSError, ValueError) as error:
            self._log_failed_handshake(conn, error)
            self.nr_conns -= 1
            conn.close(graceful=True)
            return
        if conn not in conn.lane.connections:  # another stranger has taken its place
            self.nr_conns -= 1
            conn.close()
        elif events is not None:
            self._wait(conn, events)
        else:
            address = self._addresses[conn.server]
            if address.blocks is None:
                conn.lane.connections.discard(conn)
                if not self._join(conn, address.callers):
                    return
            waiting: Future[bool] = Future()
            waiting.set_result(True)
            super().finish_request(conn, waiting)

    def handle(self, conn: Any) -> Any:
        """Serve the request of a connection, and those that follow soon. Runs in a thread of the lane."""
        result = conn in conn.lane.connections and super().handle(conn)
        if result is not True or not conn.lane.lingering.acquire(blocking=False):
            return result
        try:
            for served in count():
                few = len(conn.lane.connections) <= _LINGERING
                seconds = _LONG_LINGER_SECONDS if few else LINGER_SECONDS
                if (
                    result is not True
                    or not (few or served < _MOST_SERVED)
                    or not self._has_next_request(conn, seconds)
                ):
                    break
                result = super().handle(conn)
        finally:
            conn.lane.lingering.release()
        return conn in conn.lane.connections if result is True else result

    def _has_next_request(self, conn: Any, seconds: float) -> bool:
        """Wait for at most so many seconds, and return whether the connection has a request that can be read.

        Do not wait, and leave the thread, if other requests wait for one.
        """
        if conn.parser.unreader.buf.getvalue() or not self.alive:
            return False
        if _has_decrypted_bytes(conn.sock):
            return True  # The socket need not become readable again, so the event loop would wait in vain.
        if conn.lane.requests.waiting:
            return False
        poll = select.poll()
        poll.register(conn.sock, select.POLLIN)
        is_readable = bool(poll.poll(seconds * 1000))
        is_usable = self.alive and conn in conn.lane.connections
        return is_readable and is_usable and not conn.lane.requests.waiting

    def on_pending_socket_readable(self, conn: Any, client: socket.socket) -> None:
        if client.fileno() >= 0:  # otherwise an earlier event of the same poll closed it
            super().on_pending_socket_readable(conn, client)

    def on_client_socket_readable(self, conn: Any, client: socket.socket) -> None:
        if client.fileno() >= 0:
            super().on_client_socket_readable(conn, client)

    def murder_pending(self) -> None:
        """Close the connections that have timed out.

        gunicorn stops at the first connection that has not timed out. Here that is wrong, because the timeouts differ.
        """
        now = time.monotonic()
        for conn in [conn for conn in self.pending_conns if conn.timeout <= now]:
            self._disconnect(conn)

    def _disconnect(self, conn: Any) -> None:
        """Close a connection that waits in the event loop.

        A connection that a thread is reading is shut down instead, so that the thread sees the end of the input.
        """
        try:
            self.poller.unregister(conn.sock)
        except (KeyError, ValueError):
            with suppress(OSError):
                # Do not use the TLS socket's own method, which would remove the TLS state that the thread is using.
                socket.socket.shutdown(conn.sock, socket.SHUT_RDWR)
            return
        for waiting in (self.pending_conns, self.keepalived_conns):
            with suppress(ValueError):
                waiting.remove(conn)
        self.nr_conns -= 1
        conn.close()

    def _log_failed_handshake(self, conn: Any, error: Exception) -> None:
        """Log, at most once a minute, that a possible caller has rejected the serving certificate.

        The process may not read webhook configurations, so it has no other way to notice a missing or wrong CA bundle.
        Other failures are logged at level DEBUG.
        """
        address = self._addresses[conn.server]
        reason = getattr(error, "reason", "")
        may_call = conn.lane is address.callers or address.blocks is None
        if not may_call or reason not in _DISTRUST or self._distrust_limit.try_pass() is None:
            _log.debug("handshake failed: %s", error)
            return
        _log.error(
            "A client does not trust the serving certificate. If it is the API server, the CA bundle of the webhook "
            "configuration is missing or wrong: run manifests/certificates.sh (make deploy runs it)",
            extra={"client": conn.client[0], "reason": reason},
        )

    def _cap_keepalive(self, deadline: float) -> None:
        """Shorten the timeouts of all waiting connections when the worker ends.

        gunicorn shortens only those of connections that it keeps alive. The worker would wait for the others until the
        parent kills it. There are such connections, because Go's client opens connections in advance.
        """
        super()._cap_keepalive(deadline)
        for conn in self.pending_conns:
            conn.timeout = min(conn.timeout, deadline)

    def _close(self, conn: Any, *, graceful: bool = False) -> None:
        lane: _Lane = conn.lane
        if graceful and conn in lane.connections and conn.sock.fileno() >= 0:
            patient = conn.sock
            # Use a plain socket, because `close_graceful` limits the time itself. A PatientSocket would log the timeout
            # as that of a request. Store the plain socket in `conn.sock`, which `_disconnect` uses too.
            conn.sock = socket.socket(patient.family, patient.type, patient.proto, patient.detach())
            closed = lane.closing.submit(close_graceful, conn.sock)
            closed.add_done_callback(lambda _: lane.connections.discard(conn))
        else:
            close(conn.sock)
            lane.connections.discard(conn)


def _has_decrypted_bytes(connection: socket.socket) -> bool:
    """Return whether a part of the next request was decrypted already, so that the socket need not become readable."""
    return isinstance(connection, ssl.SSLSocket) and connection.pending() > 0


def _end_with_parent(parent: int) -> None:
    """Make the kernel kill this worker when its parent is killed, for example for lack of memory.

    gunicorn's worker would notice the end of its parent, but would then finish its requests for up to 35 s. In that
    time it would hold the port, so that a new process could not listen, and it would make decisions that the new
    process does not know. On SIGTERM the parent waits for its workers, so they are not killed. The kernel watches the
    thread that forked the worker, which in gunicorn is the main thread.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # the parent ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def _handshake(conn: Any) -> int | None:
    """Continue the TLS handshake without waiting.

    Returns `EVENT_READ` or `EVENT_WRITE` of `selectors`, for which the handshake waits, or None when it is done. Raises
    OSError if the handshake fails.
    """
    if conn not in conn.lane.connections:
        raise ConnectionAbortedError("another stranger's connection has taken its place")
    if not isinstance(conn.sock, ssl.SSLSocket):
        conn.sock = ssl_wrap_socket(conn.sock, conn.cfg)
    try:
        conn.sock.do_handshake()
    except ssl.SSLWantReadError:
        return selectors.EVENT_READ
    except ssl.SSLWantWriteError:
        return selectors.EVENT_WRITE
    conn.initialized = True
    conn.parser = Parser(conn.cfg, conn.sock, conn.client)
    return None
