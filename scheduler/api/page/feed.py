"""Keeps the JSON of all nodes for the web page, and sends each viewer what has changed.

Each open page polls about once a second, and `page_app` answers with `Board.since`. The JSON of a node is made once for
all viewers. Polling occupies no thread of the process between two requests, unlike a stream, and works with any replica
and through `kubectl port-forward`. A refresh must be short and must pause often, because the same process answers
kube-scheduler, and Python runs one thread at a time.
"""

import gzip
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import orjson

from scheduler.api.page.page_data import Json, detail_json, node_json
from scheduler.api.page.waiting_list import Waiting
from scheduler.background import Pace
from scheduler.cluster.cache import ClusterCache

EVERY_SECONDS = 1.0
"""The shortest time from a refresh that had time for all nodes to the next one. Only the polls of open pages cause
refreshes."""
MAX_DELETED = 1000
"""The most deleted nodes that are remembered. A page that has missed more deletions gets all nodes again."""
REFRESH_SECONDS = 0.4
"""The time after which a refresh renders no further node. If nodes are missing, the page polls again sooner."""
MAX_ANSWERS = 64
"""The most answers that are cached. Pages poll each second, so nearly all pages have one of the latest versions."""


class Board:
    """The JSON of all nodes, each with the number of the refresh that changed it last. The class is thread-safe.

    `_refreshing` is held while one caller refreshes, and `_answering` while an answer is made. Inside each of them,
    `_lock` is held only for the short time in which the dictionaries are read or replaced.
    """

    def __init__(
        self,
        state: ClusterCache,
        waiting: Waiting,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._waiting = waiting
        self._clock = clock
        # Distinguishes the versions of this process from those of other replicas, and from those before a restart.
        self._epoch = secrets.token_hex(4)
        self._number = 0  # The number of the last refresh that changed anything.
        self._nodes_number = 0  # The number of the last refresh that changed a node.
        self._oldest_number = 0  # The number of the last refresh whose deletions are forgotten.
        self._versions: dict[str, int] = {}  # For each node in `_nodes`, the `ClusterCache` version that it shows.
        self._nodes: dict[str, tuple[int, bytes]] = {}  # The JSON of each node, with the number of its last change.
        self._deleted: deque[tuple[int, str]] = deque()  # Deleted nodes, each with the number of the refresh.
        self._pending: tuple[int, bytes] = (0, b"null")  # The JSON of the waiting pods, with its number.
        self._answers: dict[tuple[int, int | None, str], bytes] = {}
        self._refreshed_at = -EVERY_SECONDS
        self._missing = 0  # How many nodes the last refresh had no time for.
        self._refreshing = threading.Lock()
        self._answering = threading.Lock()
        self._lock = threading.Lock()

    def since(self, version: str, replica: str) -> bytes:
        """Return what has changed since a version, as JSON compressed with gzip.

        The object has the keys `version`, `replica`, `whole` (whether it is everything), `nodes`, `gone` (names of
        deleted nodes), `todo` (how many changed nodes are still to come) and `pending` (the pods without cards; null if
        they have not changed).

        Args:
            version: The version in the caller's last answer. The result contains everything if it is "", if it comes
                from another replica, or if it is too old.
            replica: The reason why this replica does not decide, which the page shows; "" if it decides.
        """
        self._refresh()
        # One answer is made at a time, since an answer with all nodes takes megabytes of memory. Callers that pass
        # equal versions share an answer.
        with self._answering:
            with self._lock:
                number = self._number_of(version)
                key = (self._number, number, replica)
                if key not in self._answers:
                    answer = self._answer(number, replica)
            if key not in self._answers:
                if len(self._answers) >= MAX_ANSWERS or any(cached[0] != key[0] for cached in self._answers):
                    self._answers.clear()
                self._answers[key] = gzip.compress(orjson.dumps(answer), compresslevel=1, mtime=0)
            return self._answers[key]

    def _answer(self, number: int | None, replica: str) -> Json:
        nodes = [part for at, part in self._nodes.values() if number is None or at > number]
        pending = self._pending[1] if number is None or self._pending[0] > number else b"null"
        return {
            "version": f"{self._epoch}.{self._number}",
            "replica": replica,
            "whole": number is None,
            "nodes": [orjson.Fragment(part) for part in nodes],
            "gone": [name for at, name in self._deleted if number is not None and at > number],
            "todo": self._missing,
            "pending": orjson.Fragment(pending),
        }

    def node(self, name: str) -> Json | None:
        """Return all details of a node, or None if there is no such node."""
        contents = self._state.node_contents(name)
        return detail_json(contents) if contents else None

    def _number_of(self, version: str) -> int | None:
        """Return the number in a version, or None if the caller must get everything."""
        epoch, _, number = version.partition(".")
        is_known = epoch == self._epoch and number.isdecimal() and self._oldest_number <= int(number) <= self._number
        return int(number) if is_known else None

    def _refresh(self) -> None:
        """Refresh if EVERY_SECONDS have passed since the last refresh, or if that one had no time for some nodes.

        Only one caller refreshes. The others do not wait for it, except before the first refresh has ended.
        """
        if self._refreshing.acquire(blocking=not self._number):
            try:
                if self._missing or self._clock() - self._refreshed_at >= EVERY_SECONDS:
                    self._read_nodes()
                    self._refreshed_at = self._clock()
            finally:
                self._refreshing.release()

    def _read_nodes(self) -> None:
        number = self._number + 1
        versions = self._state.node_versions()
        outdated = [name for name, version in versions.items() if self._versions.get(name) != version]
        rendered = self._render(outdated)
        rendered |= dict.fromkeys(name for name in self._nodes if name not in versions)
        with self._lock:
            for name, part in rendered.items():
                before = self._nodes.get(name)
                if part is None:
                    self._nodes.pop(name, None)
                    if before:
                        self._deleted.append((number, name))
                elif before is None or before[1] != part:
                    self._nodes[name] = (number, part)
            self._versions |= {name: versions[name] for name in rendered if name in versions}
            self._versions = {name: version for name, version in self._versions.items() if name in versions}
            while len(self._deleted) > MAX_DELETED:
                self._oldest_number = self._deleted.popleft()[0]
            self._missing = len(outdated) - sum(name in versions for name in rendered)
            if rendered:
                self._nodes_number = number
            # The reasons why pods wait count all nodes that exist, including those that are not rendered yet.
            names = [name for name in versions if name in self._nodes or name not in self._versions]
        pending = orjson.dumps(self._waiting.json(names, self._nodes_number))
        with self._lock:
            if pending != self._pending[1]:
                self._pending = (number, pending)
            if rendered or self._pending[0] == number:
                self._number = number

    def _render(self, names: Sequence[str]) -> dict[str, bytes | None]:
        """Return the JSON of as many of these nodes as REFRESH_SECONDS allow, and None for deleted nodes."""
        rendered: dict[str, bytes | None] = {}
        until = time.monotonic() + REFRESH_SECONDS
        pace = Pace(pause_ratio=1)
        for name in names:
            snapshot = self._state.node_contents(name)
            rendered[name] = orjson.dumps(node_json(snapshot)) if snapshot else None
            if time.monotonic() > until:
                break
            pace()
        return rendered
