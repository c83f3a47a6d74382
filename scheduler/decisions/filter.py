"""Which nodes can take a pod, and how good each is: thousands of nodes per call, nothing written."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress

from mgpu.model.cards import CardState
from mgpu.model.gpu_requests import GpuRequest, Placement, Rejection, RejectionKind
from mgpu.model.groups import Seat
from mgpu.model.pods import GATED, Node, Pod
from mgpu.settings import Settings
from scheduler.cluster.arrays import UNKNOWN
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.decisions.array_filter import Members, Remaining, filter_nodes, score_nodes
from scheduler.decisions.effort_budget import NOT_LOOKED_AT, Call, Gone, Rations, never
from scheduler.decisions.scores import Ranking
from scheduler.decisions.slice_filter import Slices
from scheduler.engine import FULL, LEAST, QUICK, Limits
from scheduler.engine.assessment import assess, score
from scheduler.engine.disabled_vocabularies import refusal, unserved
from scheduler.engine.node_fit import NodeFit
from scheduler.engine.nvidia_plugin import asks_stock
from scheduler.engine.partitioning.partitionable_node import wanted_by

_ASKS_KEPT = 256
_ANSWERS_KEPT = 40_000
"""Over all asks: some 40 MB."""


@dataclass(slots=True)
class Filtered:
    """`passed` in the order asked; the others with the reason, apart where no eviction there can help.

    recut: those of the failed ones where the pod fits once their cards are cut anew.
    kinds: the kind of each of the reasons.
    """

    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    hopeless: dict[str, str] = field(default_factory=dict)
    recut: list[str] = field(default_factory=list)
    kinds: dict[str, RejectionKind] = field(default_factory=dict)

    def reject(self, names: Iterable[str], rejection: Rejection) -> None:
        """Note that these nodes are rejected, with the rejection's reason as the text."""
        (self.hopeless if rejection.hopeless else self.failed).update(dict.fromkeys(names, rejection.reason))
        self.kinds[rejection.reason] = rejection.kind


def _all_rejected(names: Iterable[str], rejection: Rejection) -> Filtered:
    found = Filtered()
    found.reject(names, rejection)
    return found


Known = dict[tuple[bytes, Limits], NodeFit]
"""By the state of a node's cards and the limits of the search. What no higher limits can change stands under FULL."""

_UNSEEN = NodeFit(Rejection(RejectionKind.NOT_PROVEN, NOT_LOOKED_AT, proven=False))


class _Memo:
    """What the engine has said of an ask by the state of a node's cards; the latest asks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[GpuRequest, Known] = OrderedDict()

    def of(self, request: GpuRequest) -> Known:
        with self._lock:
            self._known.setdefault(request, {})
            self._known.move_to_end(request)
            while sum(map(len, self._known.values())) > _ANSWERS_KEPT or len(self._known) > _ASKS_KEPT:
                self._known.popitem(last=False)
            return self._known.setdefault(request, {})


class Filter:
    """Thread-safe. What the arrays can tell they tell of all nodes at once; the rest is the engine's, node by node.

    recut: told of each pod that asks for slices, with the nodes that could be cut for it and those where it fits now.
    nowhere: told of each that fits nowhere. Both must return at once. pace: called after each node that was judged by
    itself.
    """

    def __init__(
        self,
        state: ClusterCache,
        settings: Settings,
        recut: Callable[[GpuPod, Sequence[str], Sequence[str]], None] = lambda *_: None,
        pace: Callable[[], object] = lambda: None,
        nowhere: Callable[[], None] = lambda: None,
        rations: Rations | None = None,
    ) -> None:
        self._state, self._settings, self._tell_recut, self._pace = state, settings, recut, pace
        self._tell_nowhere = nowhere
        self._rations = rations or Rations()
        self._memo = _Memo()
        self._ranking = Ranking(state, settings)
        self._slices = Slices(state, settings)

    def refresh(self) -> None:
        """Take in all nodes and what was learnt, now and not in a call's time."""
        self._state.refresh()
        self._state.sites.refresh()
        self._ranking.refresh()

    def filter(self, known: GpuPod, names: Sequence[str], gone: Gone = never) -> Filtered:
        """A malformed ask fits nowhere, and its problems are the reason.

        gone: whether the caller waits no more. Raises RetryLater then, and where others that take long are waiting.
        """
        if known.request is None:
            text = "; ".join(map(str, known.problems))
            return _all_rejected(names, Rejection(RejectionKind.MALFORMED, text, hopeless=True))
        if (
            known.pod.ended
        ):  # of what it asked for, the cache keeps nothing; kube-scheduler may not know yet that it ended
            text = f"the pod has {known.pod.phase.lower()}"
            return _all_rejected(names, Rejection(RejectionKind.BOUND_ALREADY, text, hopeless=True))
        if known.pod.gated:  # its plans for slices would be carried out for a pod that nobody binds
            return _all_rejected(names, Rejection(RejectionKind.GATED, GATED, hopeless=True))
        if problem := self._state.remnant_problem(known.pod):
            return _all_rejected(names, Rejection(RejectionKind.OTHER, problem, hopeless=True))
        with self._rations.call(known.pod.namespace, known.request, gone) as call:
            found = self._of_all(known, known.request, names, call)
        if not found.passed:
            self._tell_nowhere()
        return found

    def _of_all(self, known: GpuPod, request: GpuRequest, names: Sequence[str], call: Call) -> Filtered:
        theirs = self._state.chosen_by_nvidia(names, known.pod, request) if asks_stock(request) else {}
        if not theirs:
            return self._of_ours(known, request, names, call)
        found = self._of_ours(known, request, [name for name in names if name not in theirs], call)
        for name, refused in theirs.items():
            if refused is not None:
                found.reject((name,), refused)
        found.passed = [name for name in names if name not in found.failed and name not in found.hopeless]
        return found

    def pass_on(self, pod: Pod, names: Sequence[str]) -> Filtered:
        """Of a pod that is none of ours: all nodes, but where it asks for what was disabled and nobody serves."""
        resources = unserved(pod, self._settings)
        nodes = self._state.nodes(names) if resources else []
        refused = {name: why for name, node in zip(names, nodes, strict=False) if (why := refusal(resources, node))}
        return Filtered(passed=[name for name in names if name not in refused], hopeless=refused)

    def _of_ours(self, known: GpuPod, request: GpuRequest, names: Sequence[str], call: Call) -> Filtered:
        silent = self._state.without_agent(names)
        if not silent:
            return self._of_served(known, request, names, call)
        found = self._of_served(known, request, [name for name in names if name not in silent], call)
        for name, problem in silent.items():  # hopeless: evicting pods there does not bring the agent back
            found.reject((name,), Rejection(RejectionKind.AGENT, problem, hopeless=True))
        return found

    def _of_served(self, known: GpuPod, request: GpuRequest, names: Sequence[str], call: Call) -> Filtered:
        if wanted_by(request):
            found = _sorted(names, self._paced(self._slices.answers(known, request, names, call)))
            self._tell_recut(known, found.recut, found.passed)
            return found
        if request.others:
            return _sorted(names, self._paced(self._answers(known, request, names, call)))
        steps = _steps_to_look(request, names)
        if not call.allows(steps):
            return _all_rejected(names, Rejection(RejectionKind.NOT_PROVEN, NOT_LOOKED_AT, proven=False))
        members = self._members(known, request)
        seen = filter_nodes(self._state.table(names, known.pod, request), names, request, members)
        call.effort.spend(steps)
        found = Filtered(hopeless={names[i]: rejection.reason for i, rejection in seen.unmet.items()})
        found.kinds.update({rejection.reason: rejection.kind for rejection in seen.unmet.values()})
        for i, answer in self._by_engine(request, seen.remaining, members.seats, call):
            if answer.rejection:
                found.reject((names[i],), answer.rejection)
            else:
                seen.fits[i] = True
        for nodes, rejection in seen.rejected:
            found.reject(map(names.__getitem__, nodes.tolist()), rejection)
        found.passed = list(compress(names, seen.fits.tolist()))
        return found

    def _answers(self, known: GpuPod, request: GpuRequest, names: Sequence[str], call: Call) -> Iterator[NodeFit]:
        """For asks that the arrays do not hold: those for devices of other types than GPU."""
        seats = self._state.seats(request, known.pod.uid)
        for name in names:
            view = self._state.view(name, known.pod.uid)
            if view.node is None:
                yield NodeFit(UNKNOWN)
            else:
                cards = (*view.unkept, *view.unkept_others)
                limits = call.next_limits()
                yield self._assess(request, view.node, cards, seats, limits, call) if limits else _UNSEEN

    def scores(self, known: GpuPod, names: Sequence[str], gone: Gone = never) -> list[int]:
        """0..10 for each node; 0 where the pod does not fit (any more), or where nobody has looked.

        gone: as for `filter`.
        """
        if known.request is None or known.pod.ended:
            return [0] * len(names)
        with self._rations.call(known.pod.namespace, known.request, gone) as call:
            ranked = self._ranking.points(known, names, call)
            return self._scores(known, known.request, names, call) if ranked is None else ranked

    def _scores(self, known: GpuPod, request: GpuRequest, names: Sequence[str], call: Call) -> list[int]:
        if wanted_by(request):
            return [answer.score for answer in self._slices.answers(known, request, names, call, scoring=True)]
        if request.others:
            return [answer.score for answer in self._answers(known, request, names, call)]
        steps = _steps_to_look(request, names)
        if not call.allows(steps):
            return [0] * len(names)
        members = self._members(known, request)
        table, weight = self._state.table(names, known.pod, request), self._settings.dialects.mgpu.weight_of_core
        seen = score_nodes(table, names, request, members, self._settings.node_policy, weight)
        call.effort.spend(steps)
        for i, answer in self._by_engine(request, seen.remaining, members.seats, call):
            seen.points[i] = answer.score
        points: list[int] = seen.points.tolist()
        return points

    def _members(self, known: GpuPod, request: GpuRequest) -> Members:
        # Pods of a same-card group are where its card is; nominations of others do not matter to it.
        seats = self._state.seats(request, known.pod.uid)
        return Members(seats, {seat.node for seat in seats} or self._state.group_nodes(request))

    def _by_engine(
        self, request: GpuRequest, remaining: Remaining, seats: Sequence[Seat], call: Call
    ) -> Iterator[tuple[int, NodeFit]]:
        """Yield the engine's answer for each remaining node by its position; nodes in an equal state share an answer.

        What a search with less than the full limits could not find is remembered apart, so that a pod that comes again
        costs nothing until there is effort for a full one.
        """
        if not len(remaining.positions):
            return  # and no answer that is known is dropped for it
        memo = self._memo.of(request)
        for i, position in enumerate(remaining.positions.tolist()):
            key = b"" if remaining.unique[i] else remaining.rows.key(i)
            answer = memo.get((key, FULL))
            limits = call.next_limits() if answer is None else FULL
            if limits is None:
                answer = _UNSEEN
            elif answer is None:
                answer = memo.get((key, limits))
            if answer is None and limits is not None:
                answer = self._assess(request, remaining.nodes[i], remaining.cards[i], seats, limits, call)
                if key:
                    memo[key, FULL if answer.proven else limits] = answer
                self._pace()
            assert answer is not None
            yield position, answer

    def _paced(self, answers: Iterable[NodeFit]) -> Iterator[NodeFit]:
        for answer in answers:
            yield answer
            self._pace()

    def _assess(
        self,
        request: GpuRequest,
        node: Node,
        cards: Sequence[CardState],
        seats: Sequence[Seat],
        limits: Limits,
        call: Call,
    ) -> NodeFit:
        found = None
        for some in (QUICK, limits) if call.hard and limits is not LEAST else (limits,):
            found = assess(request, node, cards, self._settings, seats=seats, limits=some, effort=call.effort)
            if isinstance(found, Placement) or found.proven:
                break
        assert found is not None
        call.hard |= not found.proven
        if isinstance(found, Placement):
            return NodeFit(score=score(request, found, cards, self._settings))
        return NodeFit(found.summary())


def _steps_to_look(request: GpuRequest, names: Sequence[str]) -> int:
    """What it takes to compare the containers with all nodes at once, in steps of the engine."""
    return len(request.containers) * len(names) // 2


def _sorted(names: Sequence[str], answers: Iterable[NodeFit]) -> Filtered:
    found = Filtered()
    for name, answer in zip(names, answers, strict=True):
        if answer.rejection:
            found.reject((name,), answer.rejection)
        else:
            found.passed.append(name)
        if answer.fits_repartitioned:
            found.recut.append(name)
    return found
