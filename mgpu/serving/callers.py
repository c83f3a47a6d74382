"""Limits the callers of an admission endpoint to the addresses of the API servers.

An AdmissionReview does not prove who sent it. Its body names the user, so any client that reaches the endpoint could
act as any user. Only the address of the connection counts, because the sender writes headers such as X-Forwarded-For.
The webhook and the scheduler read their callers here, `mgpu.serving.server` refuses all other peers, and `mgpu doctor`
reports endpoints that too many addresses may call.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mgpu.model.addresses import LOOPBACK, Block, cover_everything, is_within
from mgpu.serving.logs import RateLimit
from mgpu.settings import SchedulerSettings, WebhookSettings

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

_log = logging.getLogger(__name__)
REFUSES = "does not accept calls from"
"""A part of the answer to a stranger. `mgpu doctor` and manifests/deploy.sh recognize the answer by this text."""
_PROBES = frozenset({"/healthz", "/readyz", "/leads"})

_LISTED_BLOCKS = 8  # in the answer to a stranger


@dataclass(frozen=True, slots=True)
class Callers:
    """The peers that may call an endpoint.

    Attributes:
        setting: the key of the setting that lists the blocks, for messages.
        blocks: the blocks of addresses whose peers may call.
    """

    setting: str
    blocks: tuple[Block, ...] = LOOPBACK

    def admits(self, peer: str) -> bool:
        """Return whether a peer with this address may call. `::ffff:192.0.2.1` counts as the IPv4 address."""
        return is_within(peer, self.blocks)

    def is_open(self) -> bool:
        """Return whether all IPv4 addresses, or all IPv6 addresses, may call."""
        return cover_everything(self.blocks)

    def refusal(self, peer: str) -> str:
        """Return the answer to a stranger. The API server shows it to the user whose request it reviews."""
        address = peer if len(peer) <= 45 else "this peer"
        more = ", …" if len(self.blocks) > _LISTED_BLOCKS else ""
        blocks = ", ".join(map(str, self.blocks[:_LISTED_BLOCKS])) + more
        return (
            f"mgpu {REFUSES} {address}: the setting {self.setting} lists only {blocks or 'nothing'}. If "
            f"this is the API server's address, add its block to {self.setting} (docs/install.md, API servers)"
        )


def read_callers(own: WebhookSettings | SchedulerSettings, key: str) -> Callers | None:
    """Return the callers of the admission endpoint of a process, or None if every address may call.

    Every address may call if `clientCa` is set and `apiServers` is not. If neither is set, only loopback addresses may.

    Args:
        key: the name of the settings block, `webhook` or `scheduler`.
    """
    setting = f"{key}.apiServers"
    if own.api_servers is not None:
        return Callers(setting, own.api_servers)
    return None if own.client_ca else Callers(setting)


def restrict_callers(app: "WSGIApplication", callers: Callers) -> "WSGIApplication":
    """Return an app that answers strangers with 403 before it reads their body, and passes other requests to `app`.

    Probes of all peers are passed to `app`, since they take no input and reveal only the state of the process. The
    answer to a stranger is plain text, because the API server copies it into its own error.
    """
    limit = RateLimit()  # It limits the log lines, since strangers choose how many requests they send.

    def served(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        peer = _peer_of(environ)
        is_probe = environ["REQUEST_METHOD"] in ("GET", "HEAD") and environ.get("PATH_INFO") in _PROBES
        if is_probe or callers.admits(peer):
            return app(environ, start_response)
        suppressed = limit.try_pass()
        if suppressed is not None:
            _log.warning(
                "Refused calls from an address that is not among the API servers",
                extra={"client": peer, "setting": callers.setting, "refused": suppressed + 1},
            )
        text = f"{callers.refusal(peer)}\n".encode()
        headers = [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(text)))]
        start_response("403 Forbidden", [*headers, ("Connection", "close")])
        return [text]

    return served


def _peer_of(environ: "WSGIEnvironment") -> str:
    """Return the address of the peer from its socket.

    A peer could forge REMOTE_ADDR if gunicorn's PROXY protocol were enabled.
    """
    try:
        return str(environ["gunicorn.socket"].getpeername()[0])
    except OSError:
        return "a closed connection"


def warn_if_open(callers: Iterable[Callers]) -> None:
    for endpoint in callers:
        if endpoint.is_open():
            _log.warning(
                "%s lets every address call this endpoint: any pod can pose as the API server",
                endpoint.setting,
                extra={"setting": endpoint.setting},
            )
