"""A gunicorn worker in which an unauthenticated peer (a stranger) cannot delay a caller.

Each listening address has two lanes with threads of their own. A peer whose address may call is in the callers' lane at
once; all others are strangers. Only a handshake with a valid client certificate moves a connection from the strangers'
lane to the callers'. A connection has no thread before there is something to read, nor while its TLS handshake waits
for the client.

This module overrides methods of gunicorn's gthread worker, some of them private; `requirements/` pins the version, and
tests/mgpu/serving has a test for each property. The reasons to override instead of using another server are in
CONTRIBUTING.md.
"""

import ctypes
import logging
import os
import selectors
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from gunicorn.sock import ssl_wrap_socket
from gunicorn.util import close, close_graceful
from gunicorn.workers import gthread

from mgpu.model.addresses import LOOPBACK, Block, is_within
from mgpu.serving import patience
from mgpu.serving.connection_limit import ConnectionLimit
from mgpu.serving.patience import PatientSocket
from mgpu.serving.request_head import Parser

_log = logging.getLogger(__name__)
CONNECTIONS = 1000  # of all addresses together
# Connections of strangers to one address. Each can hold a thread for its request. There are as many threads, so that
# the room is the only limit. Peers outside the callers' blocks get a 403 after the TLS handshake, because the message
# tells an operator which address to allow.
STRANGERS = 32
# The same where clients need certificates. No stranger gets as far as a request there, so these connections need no
# threads. A busy API server can open this many at once, and all of them are strangers' until their handshakes are done.
HANDSHAKES = 256
# For the cryptography of strangers' handshakes: few, so that callers keep most of the CPU.
_HANDSHAKE_THREADS = 4
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
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True, slots=True, eq=False)
class _Lane:
    """The threads and the room that the connections of one lane share.

    handshakes, requests, closing: executors for each of these. Threads start when they are first needed.
    """

    open: ConnectionLimit[Any]
    handshakes: ThreadPoolExecutor
    requests: ThreadPoolExecutor
    closing: ThreadPoolExecutor


@dataclass(frozen=True, slots=True, eq=False)
class _Door:
    """The two lanes of a listening address.

    blocks: the addresses that may call; None if clients authenticate with certificates instead.
    """

    config: Any
    blocks: tuple[Block, ...] | None
    known: _Lane
    strangers: _Lane

    def lane_of(self, peer: str) -> _Lane:
        return self.known if is_within(peer, self.blocks or ()) else self.strangers


class _Threads:
    """The executor that gunicorn submits requests to: each runs in the lane of its connection."""

    def __init__(self, doors: Sequence[_Door]) -> None:
        self._doors = doors

    def submit(self, handle: Callable[[Any], object], conn: Any) -> Future[object]:
        lane: _Lane = conn.lane
        return lane.requests.submit(handle, conn)

    def shutdown(self, *, wait: bool) -> None:
        for door in self._doors:
            for lane in (door.known, door.strangers):
                lane.requests.shutdown(wait)
                lane.handshakes.shutdown(wait)


class Worker(gthread.ThreadWorker):  # type: ignore[misc]
    """A threaded worker with TLS, threads and limits for each address.

    gunicorn has TLS for all addresses or none; here each address has its own configuration. A client that does not
    hang up after its last reply is waited for (2 s) on a closing thread, not in the event loop.

    Addresses do not block one another. Callers of one address may take at most as many connections as are still free,
    so that some always are for the others; strangers have room of their own.
    """

    def init_process(self) -> None:
        _end_with_parent(self.ppid)
        self._doors = {s.getsockname(): self._door(s.getsockname()) for s in self.sockets}
        self._ending = False
        self._distrust_told = -_DISTRUST_LOG_SECONDS
        super().init_process()

    def _door(self, server: tuple[Any, ...]) -> _Door:
        listen, config = self.app.listening(server, self.sockets)
        by_certificate = bool(listen.client_ca) and not listen.callers
        # On loopback every peer is in the pod itself: kube-scheduler beside its extender, for example.
        local = LOOPBACK if is_within(server[0], LOOPBACK) else ()
        blocks = None if by_certificate else listen.callers.blocks if listen.callers else local
        requests = ThreadPoolExecutor(self.cfg.threads)
        known = _Lane(ConnectionLimit(CONNECTIONS), requests, requests, ThreadPoolExecutor(8, "close"))
        strangers = _Lane(
            ConnectionLimit(HANDSHAKES if by_certificate else STRANGERS),
            ThreadPoolExecutor(_HANDSHAKE_THREADS, "strangers-handshakes"),
            ThreadPoolExecutor(STRANGERS, "strangers"),
            ThreadPoolExecutor(_HANDSHAKE_THREADS, "strangers-close"),
        )
        return _Door(config, blocks, known, strangers)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Begin the end from the event loop: a signal interrupts arbitrary code."""
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

    def get_thread_pool(self) -> _Threads:
        return _Threads(list(self._doors.values()))

    def enqueue_req(self, conn: Any) -> None:
        """Leave a new connection to the event loop until its client sends something; then give it a thread."""
        if not hasattr(conn, "lane"):
            self._take(conn)
        elif conn.cfg.is_ssl and not conn.initialized:
            future = conn.lane.handshakes.submit(_handshake, conn)
            future.add_done_callback(lambda done: self.method_queue.defer(self._after_handshake, conn, done))
        else:
            super().enqueue_req(conn)

    def _take(self, conn: Any) -> None:
        door = self._doors[conn.server]
        conn.cfg = door.config
        conn.close = partial(self._close, conn)
        plain = conn.sock
        conn.sock = PatientSocket(plain.family, plain.type, plain.proto, plain.detach())
        if not conn.cfg.is_ssl:
            conn.parser = Parser(conn.cfg, conn.sock, conn.client)
        conn.timeout = time.monotonic() + (patience.PATIENCE_SECONDS if conn.cfg.is_ssl else conn.cfg.keepalive)
        if self._enter(conn, door.lane_of(conn.client[0])):
            self._await(conn, selectors.EVENT_READ)

    def _enter(self, conn: Any, lane: _Lane) -> bool:
        """Put a connection into a lane. Returns False, and closes it, if the lane is full."""
        conn.lane = lane
        door = self._doors[conn.server]
        if lane is door.known:
            taken = sum(len(d.known.open) + len(d.strangers.open) for d in self._doors.values())
            if len(lane.open) >= CONNECTIONS - taken:
                self.nr_conns -= 1
                conn.close()
                return False
        replaced = lane.open.add(conn, conn.client[0])
        if replaced is not None:
            self._hang_up(replaced)
        return True

    def _await(self, conn: Any, events: int) -> None:
        """Leave a connection to the event loop until it is readable, or writable."""
        conn.sock.setblocking(False)
        if not self.alive:
            conn.timeout = min(conn.timeout, time.monotonic() + gthread.STOP_KEEPALIVE_LINGER)
        self.pending_conns.append(conn)
        self.poller.register(conn.sock, events, partial(self.on_pending_socket_readable, conn))

    def _after_handshake(self, conn: Any, done: "Future[int | None]") -> None:
        """Continue after a handshake, in the event loop.

        The connection then waits like one that is kept alive: Go's client opens connections in advance.
        """
        try:
            events = done.result()
        except (OSError, ValueError) as error:
            self._explain(conn, error)
            self.nr_conns -= 1
            conn.close(graceful=True)
            return
        if conn not in conn.lane.open:  # another stranger has taken its place
            self.nr_conns -= 1
            conn.close()
        elif events is not None:
            self._await(conn, events)
        else:
            door = self._doors[conn.server]
            if door.blocks is None:
                conn.lane.open.discard(conn)
                if not self._enter(conn, door.known):
                    return
            waiting: Future[bool] = Future()
            waiting.set_result(True)
            super().finish_request(conn, waiting)

    def handle(self, conn: Any) -> Any:
        return conn in conn.lane.open and super().handle(conn)

    def on_pending_socket_readable(self, conn: Any, client: socket.socket) -> None:
        if client.fileno() >= 0:  # otherwise an earlier event of the same round closed it
            super().on_pending_socket_readable(conn, client)

    def on_client_socket_readable(self, conn: Any, client: socket.socket) -> None:
        if client.fileno() >= 0:
            super().on_client_socket_readable(conn, client)

    def murder_pending(self) -> None:
        """Close connections whose time to send something is over. gunicorn checks only the first; here times differ."""
        now = time.monotonic()
        for conn in [conn for conn in self.pending_conns if conn.timeout <= now]:
            self._hang_up(conn)

    def _hang_up(self, conn: Any) -> None:
        """Close a connection of the event loop at once; one that a thread reads gets an end of input instead."""
        try:
            self.poller.unregister(conn.sock)
        except (KeyError, ValueError):
            with suppress(OSError):
                # Not the TLS socket's own method, which removes the TLS state that the thread is using.
                socket.socket.shutdown(conn.sock, socket.SHUT_RDWR)
            return
        for waiting in (self.pending_conns, self.keepalived_conns):
            with suppress(ValueError):
                waiting.remove(conn)
        self.nr_conns -= 1
        conn.close()

    def _explain(self, conn: Any, error: Exception) -> None:
        """Log that a peer that may call refused our certificate, at most once a minute.

        Only this shows a missing or wrong CA bundle to the process: it may not read webhook configurations.
        """
        door, reason = self._doors[conn.server], getattr(error, "reason", "")
        may_call = conn.lane is door.known or door.blocks is None
        now = time.monotonic()
        if not may_call or reason not in _DISTRUST or now < self._distrust_told + _DISTRUST_LOG_SECONDS:
            _log.debug("handshake failed: %s", error)
            return
        self._distrust_told = now
        _log.error(
            "A client does not trust the serving certificate. If it is the API server, the CA bundle of the webhook "
            "configuration is missing or wrong: run manifests/certificates.sh (make deploy does)",
            extra={"client": conn.client[0], "reason": reason},
        )

    def _cap_keepalive(self, deadline: float) -> None:
        """Limit the time of idle connections when the worker ends.

        The worker would wait for connections that have not sent a request until the master kills it; Go's client opens
        some in advance.
        """
        super()._cap_keepalive(deadline)
        for conn in self.pending_conns:
            conn.timeout = min(conn.timeout, deadline)

    def _close(self, conn: Any, *, graceful: bool = False) -> None:
        lane: _Lane = conn.lane
        if graceful and conn in lane.open and conn.sock.fileno() >= 0:
            patient = conn.sock
            # A plain socket: the client has its answer, so the patience no longer applies. `_hang_up` finds it there.
            conn.sock = socket.socket(patient.family, patient.type, patient.proto, patient.detach())
            closed = lane.closing.submit(close_graceful, conn.sock)
            closed.add_done_callback(lambda _: lane.open.discard(conn))
        else:
            close(conn.sock)
            lane.open.discard(conn)


def _end_with_parent(parent: int) -> None:
    """Make the kernel kill this worker when its parent ends, for example by SIGKILL or for lack of memory.

    gunicorn's worker notices that too, but then finishes its requests for up to 35 s. Meanwhile it would hold the port,
    which the next process could not listen on, and make decisions that the next process does not know of. A parent that
    is told to end waits for its workers. The kernel watches the thread that forked the worker; gunicorn forks from the
    parent's main thread.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # the parent ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def _handshake(conn: Any) -> int | None:
    """Continue the TLS handshake without waiting. Returns None when it is done, or the event that it needs.

    Raises OSError if it fails.
    """
    if conn not in conn.lane.open:
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
