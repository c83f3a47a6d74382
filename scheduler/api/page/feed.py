"""What the page is sent: made once however many look, and to each only what has changed since it last asked.

The page asks again every second (`since`). A stream would be no livelier and hold one of the process's threads
for each viewer; a question holds none, and is the same to every replica and through `kubectl port-forward`.
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
"""How often the state is looked at, at most; and only while somebody looks at the page."""
GONE_KEPT = 1000
LOOK_SECONDS = 0.4
"""One look makes as many nodes as it can in so long; the page asks for the others at once."""
ANSWERS_KEPT = 64
"""Those who look ask each second, so nearly all of them have one of the last few versions."""


class Board:
    """Thread-safe."""

    def __init__(
        self,
        state: ClusterCache,
        waiting: Waiting,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state, self._waiting, self._clock = state, waiting, clock
        self._epoch = secrets.token_hex(4)
        self._number = self._floor = self._nodes_number = 0
        self._versions: dict[str, int] = {}
        self._nodes: dict[str, tuple[int, bytes]] = {}
        self._gone: deque[tuple[int, str]] = deque()
        self._pending: tuple[int, bytes] = (0, b"null")
        self._answers: dict[tuple[int, int | None, str], bytes] = {}
        self._looked, self._todo = -EVERY_SECONDS, 0
        self._refreshing, self._answering, self._lock = threading.Lock(), threading.Lock(), threading.Lock()

    def since(self, version: str, replica: str) -> bytes:
        """What has changed, as JSON, compressed by gzip: `{"version", "replica", "whole": whether it is everything,
        "nodes", "gone": names, "todo": how many nodes are still to come, "pending": null where nothing of it has
        changed}`.

        version: of the answer before; of another replica, too old or "": everything. replica: what is said of it.
        """
        self._refresh()
        with self._answering:  # each answer is made once, and of those with all nodes no two at the same time
            with self._lock:
                number, now = self._number_of(version), self._number
                key = now, number, replica
                if key not in self._answers:
                    answer = self._answer(number, replica)
            if key not in self._answers:
                if len(self._answers) >= ANSWERS_KEPT or any(known[0] != now for known in self._answers):
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
            "gone": [name for at, name in self._gone if number is not None and at > number],
            "todo": self._todo,
            "pending": orjson.Fragment(pending),
        }

    def node(self, name: str) -> Json | None:
        """All that is known of one; None: it is not there."""
        found = self._state.contents(name)
        return detail_json(found) if found else None

    def _number_of(self, version: str) -> int | None:
        epoch, _, number = version.partition(".")
        known = epoch == self._epoch and number.isdecimal() and self._floor <= int(number) <= self._number
        return int(number) if known else None

    def _refresh(self) -> None:
        """By one of those who ask; the others take what there is, but for the first time."""
        if self._refreshing.acquire(blocking=not self._number):
            try:
                if self._todo or self._clock() - self._looked >= EVERY_SECONDS:
                    self._look()
                    self._looked = self._clock()
            finally:
                self._refreshing.release()

    def _look(self) -> None:
        number = self._number + 1
        versions = self._state.versions()
        wanted = [name for name, version in versions.items() if self._versions.get(name) != version]
        made = self._make(wanted)
        made |= dict.fromkeys(name for name in self._nodes if name not in versions)
        with self._lock:
            for name, part in made.items():
                before = self._nodes.get(name)
                if part is None:
                    self._nodes.pop(name, None)
                    self._gone += [(number, name)] if before else []
                elif before is None or before[1] != part:
                    self._nodes[name] = number, part
            self._versions |= {name: versions[name] for name in made if name in versions}
            self._versions = {name: at for name, at in self._versions.items() if name in versions}
            while len(self._gone) > GONE_KEPT:
                self._floor = self._gone.popleft()[0]
            self._todo = len(wanted) - sum(name in versions for name in made)
            self._nodes_number = number if made else self._nodes_number
            # Reasons are of all nodes that are there, made or not.
            names = [name for name in versions if name in self._nodes or name not in self._versions]
        pending = orjson.dumps(self._waiting.json(names, self._nodes_number))
        with self._lock:
            if pending != self._pending[1]:
                self._pending = number, pending
            if made or self._pending[0] == number:
                self._number = number

    def _make(self, names: Sequence[str]) -> dict[str, bytes | None]:
        """As many of these as there is time for; None: it is gone."""
        found: dict[str, bytes | None] = {}
        until, pace = time.monotonic() + LOOK_SECONDS, Pace(rests=1)
        for name in names:
            snapshot = self._state.contents(name)
            found[name] = orjson.dumps(node_json(snapshot)) if snapshot else None
            if time.monotonic() > until:
                break
            pace()
        return found
