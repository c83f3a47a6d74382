"""Which nodes can take a pod, and how good each is: thousands of nodes per call, nothing written."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress

from mgpu.model.asks import Ask, Placement
from mgpu.model.cards import CardState
from mgpu.model.groups import Seat
from mgpu.model.pods import Node, Pod
from mgpu.settings import Settings
from scheduler.answers import Answer
from scheduler.decide import assess, score
from scheduler.gpu_pods import GpuPod
from scheduler.looking import Closely, look
from scheduler.matrix import UNKNOWN
from scheduler.ranking import Ranking
from scheduler.slices.looking import Slices
from scheduler.slices.site import wanted_by
from scheduler.state import State
from scheduler.stock import asks_stock
from scheduler.unserved import refusal, unserved
from scheduler.vector.reasons import told

_ASKS_KEPT = 256
_ANSWERS_KEPT = 40_000
"""Over all asks: some 40 MB."""


@dataclass(slots=True)
class Filtered:
    """`passed` in the order asked; the others with the reason, apart where no eviction there can help.

    recut: those of the failed ones where the pod fits once their cards are cut anew.
    """

    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    hopeless: dict[str, str] = field(default_factory=dict)
    recut: list[str] = field(default_factory=list)


class _Memo:
    """What the engine has said of an ask by the state of a node's cards; the latest asks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[Ask, dict[bytes, Answer]] = OrderedDict()

    def of(self, ask: Ask) -> dict[bytes, Answer]:
        with self._lock:
            self._known.setdefault(ask, {})
            self._known.move_to_end(ask)
            while sum(map(len, self._known.values())) > _ANSWERS_KEPT or len(self._known) > _ASKS_KEPT:
                self._known.popitem(last=False)
            return self._known.setdefault(ask, {})


class Filter:
    """Thread-safe. What the arrays can tell they tell of all nodes at once; the rest is the engine's, node by node.

    recut: told of each pod that asks for slices, with the nodes that could be cut for it and those where it fits now.
    nowhere: told of each that fits nowhere. Both must return at once. pace: called after each node that was judged by
    itself.
    """

    def __init__(
        self,
        state: State,
        settings: Settings,
        recut: Callable[[GpuPod, Sequence[str], Sequence[str]], None] = lambda *_: None,
        pace: Callable[[], object] = lambda: None,
        nowhere: Callable[[], None] = lambda: None,
    ) -> None:
        self._state, self._settings, self._tell_recut, self._pace = state, settings, recut, pace
        self._tell_nowhere = nowhere
        self._memo = _Memo()
        self._ranking = Ranking(state, settings)
        self._slices = Slices(state, settings)

    def refresh(self) -> None:
        """Take in all nodes and what was learnt, now and not in a call's time."""
        self._state.refresh()
        self._state.sites.refresh()
        self._ranking.refresh()

    def filter(self, known: GpuPod, names: Sequence[str]) -> Filtered:
        """A malformed ask fits nowhere, and its problems are the reason."""
        if known.ask is None:
            return Filtered(hopeless=dict.fromkeys(names, "; ".join(map(str, known.problems))))
        found = self._of_all(known, known.ask, names)
        if not found.passed:
            self._tell_nowhere()
        return found

    def _of_all(self, known: GpuPod, ask: Ask, names: Sequence[str]) -> Filtered:
        theirs = self._state.chosen_by_nvidia(names, known.pod, ask) if asks_stock(ask) else {}
        if not theirs:
            return self._of_ours(known, ask, names)
        found = self._of_ours(known, ask, [name for name in names if name not in theirs])
        for name, refused in theirs.items():
            if refused is not None:
                (found.hopeless if refused.hopeless else found.failed)[name] = str(refused)
        found.passed = [name for name in names if name not in found.failed and name not in found.hopeless]
        return found

    def pass_on(self, pod: Pod, names: Sequence[str]) -> Filtered:
        """Of a pod that is none of ours: all nodes, but where it asks for what was disabled and nobody serves."""
        resources = unserved(pod, self._settings)
        nodes = self._state.nodes(names) if resources else []
        refused = {name: why for name, node in zip(names, nodes, strict=False) if (why := refusal(resources, node))}
        return Filtered(passed=[name for name in names if name not in refused], hopeless=refused)

    def _of_ours(self, known: GpuPod, ask: Ask, names: Sequence[str]) -> Filtered:
        silent = self._state.without_agent(names)
        if not silent:
            return self._of_served(known, ask, names)
        found = self._of_served(known, ask, [name for name in names if name not in silent])
        found.hopeless.update(silent)  # evicting pods there does not bring the agent back
        return found

    def _of_served(self, known: GpuPod, ask: Ask, names: Sequence[str]) -> Filtered:
        if wanted_by(ask):
            found = _sorted(names, self._paced(self._slices.answers(known, ask, names)))
            self._tell_recut(known, found.recut, found.passed)
            return found
        if ask.others:
            return _sorted(names, self._paced(self._answers(known, ask, names)))
        seen = look(self._state, self._settings, known, ask, names)
        found = Filtered(hopeless={names[i]: reason for i, reason in seen.unmet.items()})
        for i, answer in self._by_engine(ask, seen.closely, seen.seats):
            if answer.reason:
                (found.hopeless if answer.hopeless else found.failed)[names[i]] = answer.reason
            else:
                seen.fits[i] = True
        for nodes, text, hopeless in seen.refused:
            told_of = dict.fromkeys(map(names.__getitem__, nodes.tolist()), text)
            (found.hopeless if hopeless else found.failed).update(told_of)
        found.passed = list(compress(names, seen.fits.tolist()))
        return found

    def _answers(self, known: GpuPod, ask: Ask, names: Sequence[str]) -> Iterator[Answer]:
        """For asks that the arrays do not hold: those for devices of other types than GPU."""
        seats = self._state.seats(ask, known.pod.uid)
        for name in names:
            view = self._state.view(name, known.pod.uid)
            if view.node is None:
                yield Answer(UNKNOWN, hopeless=True)
            else:
                yield self._assess(ask, view.node, (*view.unkept, *view.unkept_others), seats)

    def scores(self, known: GpuPod, names: Sequence[str]) -> list[int]:
        """0..10 for each node; 0 where the pod does not fit (any more)."""
        ranked = self._ranking.points(known, names)
        if ranked is not None:
            return ranked
        if known.ask is None:
            return [0] * len(names)
        if wanted_by(known.ask):
            return [answer.points for answer in self._slices.answers(known, known.ask, names, scoring=True)]
        if known.ask.others:
            return [answer.points for answer in self._answers(known, known.ask, names)]
        seen = look(self._state, self._settings, known, known.ask, names, scoring=True)
        for i, answer in self._by_engine(known.ask, seen.closely, seen.seats):
            seen.points[i] = answer.points
        points: list[int] = seen.points.tolist()
        return points

    def _by_engine(self, ask: Ask, closely: Closely, seats: Sequence[Seat]) -> Iterator[tuple[int, Answer]]:
        """The answers for the nodes looked at closely; those in an equal state get the same."""
        if not len(closely.at):
            return  # and no answer that is known is dropped for it
        memo = self._memo.of(ask)
        for i, position in enumerate(closely.at.tolist()):
            key = b"" if closely.apart[i] else closely.rows.key(i)
            answer = memo.get(key)
            if answer is None:
                answer = self._assess(ask, closely.nodes[i], closely.cards[i], seats)
                if key:
                    memo[key] = answer
                self._pace()
            yield position, answer

    def _paced(self, answers: Iterable[Answer]) -> Iterator[Answer]:
        for answer in answers:
            yield answer
            self._pace()

    def _assess(self, ask: Ask, node: Node, cards: Sequence[CardState], seats: Sequence[Seat]) -> Answer:
        found = assess(ask, node, cards, self._settings, seats=seats)
        if isinstance(found, Placement):
            return Answer(points=score(ask, found, cards, self._settings))
        return Answer(told(found), found.hopeless)


def _sorted(names: Sequence[str], answers: Iterable[Answer]) -> Filtered:
    found = Filtered()
    for name, answer in zip(names, answers, strict=True):
        if not answer.reason:
            found.passed.append(name)
        else:
            (found.hopeless if answer.hopeless else found.failed)[name] = answer.reason
        if answer.recut:
            found.recut.append(name)
    return found
