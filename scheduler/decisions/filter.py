"""Filters and scores nodes for a pod, thousands of nodes per call. It writes nothing.

`api.extender` calls this module for kube-scheduler; the web page and `mgpu explain` use a `Filter` of their own. A call
takes a snapshot of the nodes, evaluates the arrays of all of them (`decisions.array_filter`), and evaluates the
remaining nodes one by one with the engine. `decisions.slice_filter` evaluates requests for slices instead, and the
engine alone evaluates requests for devices of other types than GPU.

If a node passes, the decider must find cards on it as long as nothing changes: a refused binding costs the pod a
back-off without preemption.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import compress

import numpy as np

from mgpu.model.cards import CardState
from mgpu.model.gpu_requests import GpuRequest, Placement, Rejection, RejectionKind
from mgpu.model.groups import GroupCard
from mgpu.model.ledger import Holding
from mgpu.model.pods import GATED, Node, Pod
from mgpu.settings import Settings
from scheduler.cluster.arrays import UNKNOWN
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.decisions.array_filter import Evaluation, Members, Remaining, evaluate_nodes, filter_nodes, score_nodes
from scheduler.decisions.effort_budgets import NOT_EXAMINED, Call, CallerGone, EffortBudgets, never
from scheduler.decisions.scores import Ranking
from scheduler.decisions.slice_filter import SliceFilter
from scheduler.engine import FULL, LEAST, QUICK, Limits
from scheduler.engine.arrays.array_rejections import MAX_REASONS
from scheduler.engine.arrays.node_table import Ints, Mask
from scheduler.engine.disabled_vocabularies import disabled_resources, missing_reason
from scheduler.engine.node_assessment import assess, score
from scheduler.engine.node_fit import NodeFit
from scheduler.engine.nvidia_plugin import requests_nvidia_cards
from scheduler.engine.partitioning.partitionable_node import requested_slices

_MAX_REQUESTS = 256
"""The maximum number of requests for which answers of the engine are cached."""
_MAX_ANSWERS = 40_000
"""The maximum number of cached answers of the engine, for all requests together. They take about 40 MB."""


@dataclass(slots=True)
class Filtered:
    """The answer of the filter for the nodes of a call.

    Attributes:
        passed: The nodes on which the pod fits, in the order of the call.
        failed: The rejected nodes on which evicting pods may help, each with the reason.
        hopeless: The rejected nodes on which evicting pods cannot help, each with the reason.
        repartitionable: The rejected nodes on which the pod would fit if their cards were partitioned again.
        kinds: The kind of rejection for each reason in `failed` and `hopeless`.
        evaluation: The nodes as the arrays evaluated them, and which of these passed, for `Filter.scores_of_passed`;
            None if nodes passed that the arrays did not evaluate.
    """

    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    hopeless: dict[str, str] = field(default_factory=dict)
    repartitionable: list[str] = field(default_factory=list)
    kinds: dict[str, RejectionKind] = field(default_factory=dict)
    evaluation: tuple[Evaluation, Mask] | None = field(default=None, compare=False, repr=False)

    def reject(self, names: Iterable[str], rejection: Rejection) -> None:
        (self.hopeless if rejection.hopeless else self.failed).update(dict.fromkeys(names, rejection.reason))
        self.kinds[rejection.reason] = rejection.kind

    def leave_out(self, names: Set[str]) -> None:
        """Remove nodes that passed, without a reason."""
        self.passed = [name for name in self.passed if name not in names]
        if self.evaluation is not None:
            nodes, fits = self.evaluation
            kept = np.fromiter((name not in names for name in nodes.names), np.bool_, len(nodes.names))
            self.evaluation = nodes, fits & kept


def _all_rejected(names: Iterable[str], rejection: Rejection) -> Filtered:
    found = Filtered()
    found.reject(names, rejection)
    return found


def _of_answers(names: Sequence[str], answers: Iterable[NodeFit]) -> Filtered:
    found = Filtered()
    for name, answer in zip(names, answers, strict=True):
        if answer.rejection:
            found.reject((name,), answer.rejection)
        else:
            found.passed.append(name)
        if answer.fits_repartitioned:
            found.repartitionable.append(name)
    return found


Answers = dict[tuple[bytes, Limits], NodeFit]
"""The engine's answers by the state of a node's cards and the limits of the search. Proven answers are stored under
FULL, because higher limits cannot change them."""

_NOT_EXAMINED = Rejection(RejectionKind.NOT_PROVEN, NOT_EXAMINED, proven=False)


class _Memo:
    """The engine's answers to the latest requests. Thread-safe.

    The memo pays off because kube-scheduler filters a waiting pod many times, pods of one Deployment have equal
    requests, and most nodes are in a state that was evaluated before. The dictionaries that `answers` returns are
    shared between threads. Two threads may compute the same answer, which is harmless.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: OrderedDict[GpuRequest, Answers] = OrderedDict()

    def answers(self, request: GpuRequest) -> Answers:
        """Return the dictionary with the answers to this request. The caller adds new answers to it."""
        with self._lock:
            self._answers.setdefault(request, {})
            self._answers.move_to_end(request)
            while sum(map(len, self._answers.values())) > _MAX_ANSWERS or len(self._answers) > _MAX_REQUESTS:
                self._answers.popitem(last=False)
            return self._answers.setdefault(request, {})


class Filter:
    """Filters and scores nodes for pods. Thread-safe.

    Args:
        pace: A function that is called after the engine has evaluated a node. Background work sleeps in it.
        reasons_if_passing: The most different reasons with amounts for one container if the pod fits on any node. Each
            takes 0.1 ms.
    """

    def __init__(
        self,
        state: ClusterCache,
        settings: Settings,
        pace: Callable[[], object] = lambda: None,
        budgets: EffortBudgets | None = None,
        reasons_if_passing: int = MAX_REASONS,
    ) -> None:
        self._cache = state
        self._reasons_if_passing = reasons_if_passing
        self._settings = settings
        self._pace = pace
        self._budgets = budgets or EffortBudgets()
        self._memo = _Memo()
        self._ranking = Ranking(state, settings)
        self._slices = SliceFilter(state, settings)

    def refresh(self) -> None:
        """Update arrays, partitionable nodes and learned policies, so that calls need not. Call it regularly."""
        self._cache.refresh()
        self._cache.partitions.refresh()
        self._ranking.refresh()

    def filter(
        self, gpu_pod: GpuPod, names: Sequence[str], gone: CallerGone = never, beside: Sequence[Holding] = ()
    ) -> Filtered:
        """Return on which of these nodes the pod fits.

        Args:
            gone: Returns whether the caller has given up.
            beside: The slices that other pods hold tentatively. They count as held. Cards do not.

        Raises:
            RetryLater: The caller has given up, or too many other long calls wait.
        """
        rejection = self._rejection_everywhere(gpu_pod)
        if rejection is not None:
            return _all_rejected(names, rejection)
        request = gpu_pod.request
        assert request is not None, "malformed requests are rejected above"
        with self._budgets.call(gpu_pod.pod.namespace, request, gone) as call:
            return self._filter(gpu_pod, request, names, call, beside)

    def filter_without_request(self, pod: Pod, names: Sequence[str]) -> Filtered:
        """Filter for a pod that requests no GPU in an enabled vocabulary.

        A node fails only if the pod requests a resource of a disabled vocabulary that the node does not have.
        """
        resources = disabled_resources(pod, self._settings)
        nodes = self._cache.nodes(names) if resources else []
        reasons = ((name, missing_reason(resources, node)) for name, node in zip(names, nodes, strict=False))
        rejected = {name: reason for name, reason in reasons if reason}
        return Filtered(passed=[name for name in names if name not in rejected], hopeless=rejected)

    def scores(self, gpu_pod: GpuPod, names: Sequence[str], gone: CallerGone = never) -> list[int]:
        """Return a score from 0 to 10 for each node. A node where the pod does not fit or that was not examined has 0.

        The arguments and errors are those of `filter`.
        """
        if gpu_pod.request is None or gpu_pod.pod.ended:
            return [0] * len(names)
        with self._budgets.call(gpu_pod.pod.namespace, gpu_pod.request, gone) as call:
            ranked = self._ranking.points(gpu_pod, names, call)
            return self._scores(gpu_pod, gpu_pod.request, names, call) if ranked is None else ranked

    def scores_of_passed(self, gpu_pod: GpuPod, found: Filtered, gone: CallerGone = never) -> list[int]:
        """Return what `scores` returns for the nodes that have just passed, without evaluating the arrays again."""
        if found.evaluation is None or gpu_pod.request is None:
            return self.scores(gpu_pod, found.passed, gone)
        with self._budgets.call(gpu_pod.pod.namespace, gpu_pod.request, gone) as call:
            ranked = self._ranking.points(gpu_pod, found.passed, call)
            if ranked is not None:
                return ranked
            nodes, passed = found.evaluation
            points: list[int] = self._points(nodes, passed, call)[passed].tolist()
            return points

    def _rejection_everywhere(self, gpu_pod: GpuPod) -> Rejection | None:
        """Return why the pod fits on no node regardless of free capacity, or None."""
        pod = gpu_pod.pod
        if gpu_pod.request is None:
            text = "; ".join(map(str, gpu_pod.problems))
            return Rejection(RejectionKind.MALFORMED, text, hopeless=True)
        if pod.ended:
            # kube-scheduler may still have an older version of the pod.
            return Rejection(RejectionKind.BOUND_ALREADY, f"the pod has {pod.phase.lower()}", hopeless=True)
        if pod.gated:
            # If nodes were evaluated, a partition plan could be carried out for a pod that no scheduler binds.
            return Rejection(RejectionKind.GATED, GATED, hopeless=True)
        problem = self._cache.remnant_problem(pod)
        return Rejection(RejectionKind.OTHER, problem, hopeless=True) if problem else None

    def _filter(
        self, gpu_pod: GpuPod, request: GpuRequest, names: Sequence[str], call: Call, beside: Sequence[Holding]
    ) -> Filtered:
        """Return the answer for all nodes, of a pod that is not rejected everywhere.

        Nodes whose agent is not ready are rejected. `ClusterCache.chosen_by_nvidia` decides about the nodes where
        NVIDIA's plugin chooses the cards of the pod. The others are evaluated.
        """
        by_nvidia = self._cache.chosen_by_nvidia(names, gpu_pod.pod, request) if requests_nvidia_cards(request) else {}
        served = [name for name in names if name not in by_nvidia] if by_nvidia else names
        agentless = self._cache.agent_problems(served)
        if agentless:
            served = [name for name in served if name not in agentless]
        found = self._evaluate(gpu_pod, request, served, call, beside)
        for name, problem in agentless.items():
            # Evicting pods from the node would not make its agent ready.
            found.reject((name,), Rejection(RejectionKind.AGENT, problem, hopeless=True))
        for name, rejection in by_nvidia.items():
            if rejection is not None:
                found.reject((name,), rejection)
        if by_nvidia:
            found.passed = [name for name in names if name not in found.failed and name not in found.hopeless]
            found.evaluation = None  # It lacks the nodes of NVIDIA's plugin.
        return found

    def _evaluate(
        self, gpu_pod: GpuPod, request: GpuRequest, names: Sequence[str], call: Call, beside: Sequence[Holding]
    ) -> Filtered:
        if requested_slices(request):
            return _of_answers(names, self._paced(self._slices.answers(gpu_pod, request, names, call, beside)))
        if request.others:
            return _of_answers(names, self._paced(self._one_by_one(gpu_pod, request, names, call)))
        steps = _steps_of_arrays(request, names)
        if not call.allows(steps):
            return _all_rejected(names, _NOT_EXAMINED)
        members = self._members(gpu_pod, request)
        table = self._cache.node_table(names, gpu_pod.pod, request)
        nodes = evaluate_nodes(table, names, request, members)
        verdict = filter_nodes(nodes, self._reasons_if_passing)
        call.effort.spend(steps)
        found = Filtered(hopeless={names[i]: rejection.reason for i, rejection in verdict.unmet.items()})
        found.kinds.update({rejection.reason: rejection.kind for rejection in verdict.unmet.values()})
        for i, answer in self._by_engine(request, verdict.remaining, members.group_cards, call):
            if answer.rejection:
                found.reject((names[i],), answer.rejection)
            else:
                verdict.fits[i] = True
        for positions, rejection in verdict.rejected:
            found.reject(map(names.__getitem__, positions.tolist()), rejection)
        found.passed = list(compress(names, verdict.fits.tolist()))
        found.evaluation = nodes, verdict.fits
        return found

    def _scores(self, gpu_pod: GpuPod, request: GpuRequest, names: Sequence[str], call: Call) -> list[int]:
        if requested_slices(request):
            return [answer.score for answer in self._slices.answers(gpu_pod, request, names, call, scoring=True)]
        if request.others:
            return [answer.score for answer in self._one_by_one(gpu_pod, request, names, call)]
        steps = _steps_of_arrays(request, names)
        if not call.allows(steps):
            return [0] * len(names)
        members = self._members(gpu_pod, request)
        table = self._cache.node_table(names, gpu_pod.pod, request)
        nodes = evaluate_nodes(table, names, request, members)
        call.effort.spend(steps)
        points: list[int] = self._points(nodes, np.ones(len(names), np.bool_), call).tolist()
        return points

    def _points(self, nodes: Evaluation, chosen: Mask, call: Call) -> Ints:
        """Return the score of each of the nodes, 0 for those that are not chosen."""
        weight_of_core = self._settings.dialects.mgpu.weight_of_core
        scored = score_nodes(nodes, chosen, self._settings.node_policy, weight_of_core)
        for i, answer in self._by_engine(nodes.request, scored.remaining, nodes.members.group_cards, call):
            scored.points[i] = answer.score
        return scored.points

    def _members(self, gpu_pod: GpuPod, request: GpuRequest) -> Members:
        # Once a same-card group has a card, only that card matters. Until then, the nodes to which pods of the groups
        # are nominated matter too.
        group_cards = self._cache.group_cards(request, gpu_pod.pod.uid)
        return Members(group_cards, {group_card.node for group_card in group_cards} or self._cache.group_nodes(request))

    def _one_by_one(self, gpu_pod: GpuPod, request: GpuRequest, names: Sequence[str], call: Call) -> Iterator[NodeFit]:
        """Evaluate all nodes with the engine, for requests for devices of other types than GPU."""
        group_cards = self._cache.group_cards(request, gpu_pod.pod.uid)
        for name in names:
            snapshot = self._cache.node_snapshot(name, gpu_pod.pod.uid)
            limits = call.next_limits() if snapshot.node is not None else None
            if snapshot.node is None:
                yield NodeFit(UNKNOWN)
            elif limits is None:
                yield NodeFit(_NOT_EXAMINED)
            else:
                cards = (*snapshot.available_cards, *snapshot.available_other_devices)
                yield self._assess(request, snapshot.node, cards, group_cards, limits, call)

    def _by_engine(
        self, request: GpuRequest, remaining: Remaining, group_cards: Sequence[GroupCard], call: Call
    ) -> Iterator[tuple[int, NodeFit]]:
        """Yield the position of each remaining node and the engine's answer. Nodes in an equal state share an answer.

        An unproven answer is stored under the limits of its search. So retries of the pod cost nothing until its
        namespace has the allowance for a full search.
        """
        if not len(remaining.positions):
            return  # No answers are needed, and a new entry in the memo would displace another request.
        memo = self._memo.answers(request)
        for i, position in enumerate(remaining.positions.tolist()):
            key = b"" if remaining.unique[i] else remaining.rows.key(i)
            answer = memo.get((key, FULL))
            limits = call.next_limits() if answer is None else FULL
            if limits is None:
                answer = NodeFit(_NOT_EXAMINED)
            elif answer is None:
                answer = memo.get((key, limits))
            if answer is None and limits is not None:
                answer = self._assess(request, remaining.nodes[i], remaining.cards[i], group_cards, limits, call)
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
        group_cards: Sequence[GroupCard],
        limits: Limits,
        call: Call,
    ) -> NodeFit:
        """Evaluate one node with the engine, first by a quick search if the call demands it (`Call.quick_first`)."""
        result = None
        for tried in (QUICK, limits) if call.quick_first and limits is not LEAST else (limits,):
            result = assess(
                request, node, cards, self._settings, group_cards=group_cards, limits=tried, effort=call.effort
            )
            if isinstance(result, Placement) or result.proven:
                break
        assert result is not None
        call.quick_first |= not result.proven
        if isinstance(result, Placement):
            return NodeFit(score=score(request, result, cards, self._settings))
        return NodeFit(result.summary())


def _steps_of_arrays(request: GpuRequest, names: Sequence[str]) -> int:
    """Return the cost of evaluating the arrays, in steps of the engine."""
    return len(request.containers) * len(names) // 2
