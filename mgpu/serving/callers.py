"""Limits the callers of an admission endpoint to the addresses of the API servers.

An AdmissionReview proves nothing about its sender: its body names the user, so any client that reaches the endpoint
could act as any user. The peer's address is that of the connection; headers such as X-Forwarded-For are ignored,
because the sender writes them.
"""

import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mgpu.model.addresses import LOOPBACK, Block, cover_everything, is_within
from mgpu.settings import SchedulerSettings, WebhookSettings

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

_log = logging.getLogger(__name__)
REFUSES = "does not accept calls from"
"""A part of each refusal, by which `mgpu doctor` and manifests/deploy.sh recognize it."""
_PROBES = frozenset({"/healthz", "/readyz", "/leads"})
_LOG_EVERY_SECONDS = 60.0
_SHOWN_BLOCKS = 8


@dataclass(frozen=True, slots=True)
class Callers:
    """The address blocks whose peers may call. setting: the key that names them, for messages."""

    setting: str
    blocks: tuple[Block, ...] = LOOPBACK

    def admits(self, peer: str) -> bool:
        """Whether this peer may call. An IPv4 peer of an IPv6 socket (`::ffff:192.0.2.1`) counts as IPv4."""
        return is_within(peer, self.blocks)

    def is_open(self) -> bool:
        """Whether every IPv4 or every IPv6 address may call."""
        return cover_everything(self.blocks)

    def refusal(self, peer: str) -> str:
        """The answer to a peer that may not call. The API server shows it to the user whose request it reviews."""
        shown = peer if len(peer) <= 45 else "this peer"
        known = ", ".join(map(str, self.blocks[:_SHOWN_BLOCKS])) + (", …" if len(self.blocks) > _SHOWN_BLOCKS else "")
        return (
            f"mgpu {REFUSES} {shown}: the setting {self.setting} lists only {known or 'nothing'}. If "
            f"this is the API server's address, add its block to {self.setting} (docs/install.md, API servers)"
        )


def read_callers(own: WebhookSettings | SchedulerSettings, key: str) -> Callers | None:
    """Return who may call the admission endpoint of a process, or None for peers with a certificate of `clientCa`.

    key: the settings block, `webhook` or `scheduler`.
    """
    setting = f"{key}.apiServers"
    if own.api_servers is not None:
        return Callers(setting, own.api_servers)
    return None if own.client_ca else Callers(setting)


def restrict_callers(app: "WSGIApplication", callers: Callers) -> "WSGIApplication":
    """Wrap `app` so that other peers get 403 before any of their body is read.

    Probes are answered for all peers: they take no input and reveal only that the process runs. The refusal is plain
    text because the API server copies it into its own error.
    """
    log = _RefusalLog(callers)

    def served(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        peer = _peer_of(environ)
        is_probe = environ["REQUEST_METHOD"] in ("GET", "HEAD") and environ.get("PATH_INFO") in _PROBES
        if is_probe or callers.admits(peer):
            return app(environ, start_response)
        log.add(peer)
        text = f"{callers.refusal(peer)}\n".encode()
        headers = [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(text)))]
        start_response("403 Forbidden", [*headers, ("Connection", "close")])
        return [text]

    return served


def _peer_of(environ: "WSGIEnvironment") -> str:
    """Return the peer of the connection. REMOTE_ADDR could be forged if gunicorn's PROXY protocol were on."""
    try:
        return str(environ["gunicorn.socket"].getpeername()[0])
    except OSError:
        return "a closed connection"


class _RefusalLog:
    """Logs at most one line a minute: strangers can send requests faster than a log is read."""

    def __init__(self, callers: Callers) -> None:
        self._callers = callers
        self._lock = threading.Lock()
        self._next = 0.0
        self._since = 0

    def add(self, peer: str) -> None:
        with self._lock:
            self._since += 1
            now = time.monotonic()
            if now < self._next:
                return
            count, self._since, self._next = self._since, 0, now + _LOG_EVERY_SECONDS
        _log.warning(
            "Refused calls from an address that is not among the API servers",
            extra={"client": peer, "setting": self._callers.setting, "refused": count},
        )


def warn_if_open(callers: Iterable[Callers]) -> None:
    """Log each endpoint that every address may call."""
    for one in callers:
        if one.is_open():
            _log.warning(
                "%s lets every address call this endpoint: any pod can pose as the API server",
                one.setting,
                extra={"setting": one.setting},
            )
