"""Keeps what is really used of the cards of the nodes that somebody looks at, for the web page.

A page asks for the nodes that are visible in its window, which are few, and `NodeUses` asks the agents of these nodes
in the background. So the cost does not grow with the cluster, and an unused page costs nothing. Answers are never
waited for: a page that asks again a second later gets what has arrived meanwhile.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mgpu.model.agent_pods import AgentPod
from mgpu.presentation.measured_use import MeasuredUse, UnknownUse, use_of_cards
from scheduler.api.page.agent_client import ask, find
from scheduler.api.page.page_data import Json, view_of
from scheduler.api.page.waiting_list import in_a_thread
from scheduler.cluster.cache import ClusterCache

log = logging.getLogger(__name__)

MOST_NODES = 64
"""The most nodes of one request. A large screen shows fewer."""
EVERY_SECONDS = 3.0
"""How long what an agent has answered is given again before the agent is asked again."""
FORGET_SECONDS = 20.0
"""How long what was answered last is kept while nobody asks for the node."""
_AT_ONCE = 4
"""How many agents are asked at the same time, for all viewers together."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of a node.

    Attributes:
        json: None until the agent has answered for the first time.
        asked_at: when the agent was asked last.
        wanted_at: when a page asked for the node last.
    """

    json: Json | None
    asked_at: float
    wanted_at: float


class NodeUses:
    """What is used on nodes. Thread-safe; `_lock` guards the fields and is held only briefly.

    Args:
        ask_agent: asks one agent, and raises no error for what the agent does.
        in_background: runs a function without waiting for it.
    """

    def __init__(
        self,
        state: ClusterCache,
        ask_agent: Callable[[AgentPod], MeasuredUse] = ask,
        in_background: Callable[[Callable[[], None]], None] = in_a_thread,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._ask = ask_agent
        self._in_background = in_background
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, _Known] = {}
        self._due: dict[str, None] = {}  # The nodes whose agents must be asked, in this order.
        self._threads = 0

    def json(self, names: Sequence[str]) -> Json:
        """Return what is known of each of these nodes, and have the agents asked for what is missing or old.

        A node is `{"cards": [[index, core, memory]], "pods": [[index, pod, core, memory]]}`, with core in thousandths
        of a card and memory in bytes, each null if it is not measured; or `{"unknown": reason}`. `problem` says why the
        use of pods is not known, if it is not. Nodes whose agents have not answered yet are left out.
        """
        now = self._clock()
        wanted = [name for name in dict.fromkeys(names[:MOST_NODES]) if self._state.node_contents(name) is not None]
        with self._lock:
            self._known = {name: row for name, row in self._known.items() if now - row.wanted_at < FORGET_SECONDS}
            for name in wanted:
                row = self._known.get(name)
                if row is None or now - row.asked_at >= EVERY_SECONDS:
                    self._known[name] = _Known(row.json if row else None, now, now)
                    self._due[name] = None
                else:
                    self._known[name] = _Known(row.json, row.asked_at, now)
            start = min(_AT_ONCE - self._threads, len(self._due))
            self._threads += start
            found = {name: row.json for name in wanted if (row := self._known[name]).json is not None}
        for _ in range(start):
            self._in_background(self._work)
        return found

    def _work(self) -> None:
        """Ask agents until none is due."""
        while True:
            with self._lock:
                if not self._due:
                    self._threads -= 1
                    return
                name = next(iter(self._due))
                del self._due[name]
            try:
                found = self._read(name)
            except Exception:
                # This is the outermost handler of the thread. An error with one node must not hide all others.
                log.exception("cannot read what is used of the cards", extra={"node": name})
                found = {"unknown": "an internal error occurred; the scheduler's log has the details"}
            with self._lock:
                row = self._known.get(name)
                if row is not None:
                    self._known[name] = _Known(found, row.asked_at, row.wanted_at)

    def _read(self, name: str) -> Json:
        pod = find(self._state.agents_on(name))
        use = pod if isinstance(pod, UnknownUse) else self._ask(pod)
        contents = self._state.node_contents(name)
        if isinstance(use, UnknownUse) or contents is None:
            return {"unknown": use.reason if isinstance(use, UnknownUse) else "the node is gone"}
        view = view_of(contents)
        found = use_of_cards(view, use)
        # A hostile agent may name any pods and cards. Those that the node does not have are left out.
        held = {(view.state.card.index, use.pod) for view in view.cards for use in view.uses}
        return {
            "cards": [[card.state.card.index, *found.of_card(card.state.card.index)] for card in view.cards],
            "pods": [[index, pod, *used] for (index, pod), used in sorted(found.pods.items()) if (index, pod) in held],
            **({"problem": use.problem} if use.problem else {}),
        }
