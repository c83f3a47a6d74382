"""Passes on to the commands what the node agents have measured (`mgpu inspect --usage`, `mgpu top`).

A command could ask the agents through the API server's proxy for Pods, but it would need a right that reaches more than
the agents, and NetworkPolicies would have to admit the API server. The scheduler reaches them for the web page anyway.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from mgpu.model.agent_pods import AgentPod
from mgpu.model.errors import RetryLater
from mgpu.presentation.answers import UseAnswer
from mgpu.presentation.measured_use import UnknownUse, lines_about_use
from scheduler.api.page.agent_client import fetch, find
from scheduler.cluster.cache import ClusterCache

_AT_ONCE = 16
_WAIT_SECONDS = 10.0
"""How long a request waits for another one. The agents of one request take at most this long if none answers."""


class AgentPages:
    """Asks the agents for one request at a time, so that many requests do not need more threads. Thread-safe.

    Args:
        fetch_page: asks one agent, and raises no error for what the agent does.
    """

    def __init__(self, state: ClusterCache, fetch_page: Callable[[AgentPod], bytes | UnknownUse] = fetch) -> None:
        self._state = state
        self._fetch = fetch_page
        self._asking = threading.Lock()

    def answer(self, names: Sequence[str]) -> UseAnswer:
        """Return what the agents of these nodes say. Raises RetryLater if others are being asked for too long."""
        if not self._asking.acquire(timeout=_WAIT_SECONDS):
            raise RetryLater("too many commands ask what is used")
        try:
            with ThreadPoolExecutor(_AT_ONCE, "agents") as pool:
                found = dict(zip(names, pool.map(self._read, names), strict=True))
        finally:
            self._asking.release()
        unknown = {name: row.reason for name, row in found.items() if isinstance(row, UnknownUse)}
        return UseAnswer({name: row for name, row in found.items() if isinstance(row, str)}, unknown)

    def _read(self, name: str) -> str | UnknownUse:
        pod = find(self._state.agents_on(name))
        page = pod if isinstance(pod, UnknownUse) else self._fetch(pod)
        return page if isinstance(page, UnknownUse) else lines_about_use(page)
