"""Reads the metrics of a node agent from the address of its Pod, for the web page and the commands.

A node may be hostile: it chooses the address in the status of its Pods, and what it answers. So this process connects
to no address of its own host, sends no credentials, follows no redirection, and limits the bytes and the seconds of the
whole answer. `urllib3` and `http.client` limit the seconds only for each part of an answer.
"""

import socket
import time
from collections.abc import Callable, Collection
from http.client import HTTPException, HTTPResponse
from io import BufferedReader, RawIOBase
from typing import Any

from mgpu.model.addresses import is_global_unicast, read_peer
from mgpu.model.agent_pods import AgentPod, find_ready_agent, find_unready_agent
from mgpu.presentation.measured_use import LARGEST_PAGE, NO_AGENT, MeasuredUse, UnknownUse, read_use

SECONDS = 2.0
"""How long an agent may take for its whole answer."""
_HEAD_BYTES = 16 << 10
"""The most bytes of the head of an answer."""


def ask(pod: AgentPod, allows: Callable[[str], bool] | None = None) -> MeasuredUse:
    """Return what the agent in a Pod has measured on its node. The arguments are those of `fetch`."""
    page = fetch(pod, allows)
    return page if isinstance(page, UnknownUse) else read_use(page)


def find(agents: Collection[AgentPod]) -> AgentPod | UnknownUse:
    """Return which of the agents on a node to ask, or why none can be asked."""
    unready = find_unready_agent(agents)
    if unready is not None:
        return UnknownUse(f"the agent is not ready ({unready.problem})")
    return find_ready_agent(agents) or NO_AGENT


def fetch(pod: AgentPod, allows: Callable[[str], bool] | None = None) -> bytes | UnknownUse:
    """Return the page `/metrics` of the agent in a Pod, or why it cannot be read.

    Args:
        allows: returns whether this process may connect to an address. By default, it must be one of a network.
    """
    if pod.ip is None or pod.port is None:
        return UnknownUse(f"Pod {pod.name} has no address or no port for metrics")
    if not (allows or _is_of_a_network)(pod.ip):
        return UnknownUse(f"the address of Pod {pod.name} is not allowed")
    try:
        status, body = _get(pod.ip, pod.port)
    except (OSError, HTTPException) as error:
        return UnknownUse(f"the agent does not answer: {str(error)[:200] or type(error).__name__}")
    return body if status == 200 else UnknownUse(f"the agent answers with the status {status}")


def _is_of_a_network(ip: str) -> bool:
    address = read_peer(ip)
    return address is not None and is_global_unicast(address)


def _get(host: str, port: int) -> tuple[int, bytes]:
    """Return the status and the body of /metrics. Raises OSError or HTTPException."""
    until = time.monotonic() + SECONDS
    with socket.create_connection((host, port), SECONDS) as connection:
        name = f"[{host}]" if ":" in host else host
        # With HTTP/1.0 the agent sends the page in one part, not compressed, and closes the connection.
        connection.sendall(f"GET /metrics HTTP/1.0\r\nHost: {name}:{port}\r\n\r\n".encode())
        answer: Any = _Answer(connection, until)
        with HTTPResponse(answer) as response:
            response.begin()
            return response.status, response.read(LARGEST_PAGE + 1)


class _Answer(RawIOBase):
    """The stream of one answer, which ends with an error at the deadline or after too many bytes."""

    def __init__(self, connection: socket.socket, until: float) -> None:
        self._connection = connection
        self._until = until
        self._left = LARGEST_PAGE + _HEAD_BYTES

    def makefile(self, _: str) -> BufferedReader:
        """Return the stream, as `http.client` wants it of a socket."""
        return BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        seconds = self._until - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("timed out")
        if not self._left:
            raise ConnectionAbortedError("the answer is too long")
        self._connection.settimeout(seconds)
        read = self._connection.recv_into(buffer, min(len(buffer), self._left))
        self._left -= read
        return read
