"""Chooses victims for a preemption by the cards that they free, on each node that kube-scheduler considers.

kube-scheduler chooses victims itself and then calls `/preempt` of `api.extender`, which calls `Preemption.choose`.
Volcano asks which of the tasks that it may evict must go, and `api.volcano` calls `Preemption.choose_among`.
kube-scheduler knows the GPUs of a node only as a sum, so its victims free everything that the pod needs except,
perhaps, the cards. This module adds the victims that free the cards. It drops kube-scheduler's own victims only if
nothing but cards, cpu and memory can be the reason for them (`_only_cards_can_be_short`). No pod may be evicted unless
mgpu has found that the preempting pod fits afterwards. docs/preemption.md describes the result for users.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from mgpu.dialects.registry import vocabulary_of
from mgpu.model.cards import CardState
from mgpu.model.gpu_requests import GpuRequest, Placement
from mgpu.model.ledger import Holding, shares_of
from mgpu.model.pod_constraints import PREFIX
from mgpu.model.pods import Node, Pod
from mgpu.model.raw_objects import table_at
from mgpu.settings import Settings
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.cluster.node_snapshots import NodeSnapshot
from scheduler.cluster.nominations import with_holdings
from scheduler.decisions.disruption_budgets import DisruptionBudgets
from scheduler.decisions.effort_budgets import FREE, CallerGone, EffortBudgets, never
from scheduler.engine import BRIEF, Effort, nvidia_plugin
from scheduler.engine.effort import Budget, Exhausted
from scheduler.engine.evictions import (
    LOWEST_PRIORITY,
    EvictablePod,
    by_importance,
    choose_victims,
    without_pods,
    without_usage,
)
from scheduler.engine.node_assessment import assess
from scheduler.engine.partitioning.partitionable_node import requested_slices
from scheduler.engine.partitioning.slice_choice import assess_slices

_STEPS_PER_NODE = 400_000
"""The maximum number of steps for one node. They include the searches that tell whether the pod fits."""

_HARMLESS_VOLUMES = frozenset({"configMap", "downwardAPI", "emptyDir", "hostPath", "projected", "secret"})
"""The types of volumes that every node can provide. They cannot be the reason for an eviction."""


@dataclass(frozen=True, slots=True)
class Victims:
    """The pods to evict from a node.

    Attributes:
        uids: The UIDs of the pods, the most important first.
        violations: How many of the evictions violate a disruption budget.
    """

    uids: tuple[str, ...]
    violations: int = 0


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a scheduler has decided about a node in a session, and has not carried out yet (Volcano).

    Attributes:
        leaving: The UIDs of the pods that leave the node.
        coming: The pods that get the node once these have left.
    """

    leaving: frozenset[str] = frozenset()
    coming: tuple[GpuPod, ...] = ()


class Preemption:
    """Chooses victims, but does not evict them. Thread-safe."""

    def __init__(
        self,
        state: ClusterCache,
        disruption_budgets: DisruptionBudgets,
        settings: Settings,
        budgets: EffortBudgets | None = None,
    ) -> None:
        self._state = state
        self._disruption_budgets = disruption_budgets
        self._settings = settings
        self._budgets = budgets or EffortBudgets()

    def choose(
        self,
        gpu_pod: GpuPod,
        raw: Mapping[str, Any],
        proposed: Mapping[str, Victims],
        gone: CallerGone = never,
        beside: Sequence[Holding] = (),
    ) -> dict[str, Victims]:
        """Return the victims by node.

        The result does not contain nodes on which no eviction helps. Nor does it contain nodes for which the search
        takes too long, because no pod may be evicted in vain.

        Args:
            raw: The preempting pod as JSON.
            proposed: The victims that kube-scheduler has chosen, by node.
            gone: Returns whether the caller has given up.
            beside: What other members of the pod's gang hold tentatively. No eviction frees it.

        Raises:
            RetryLater: The caller has given up, or too many other long calls wait.
        """
        result: dict[str, Victims] = {}
        if gpu_pod.request is None:
            return result
        only_cards = _only_cards_can_be_short(gpu_pod.pod, raw)
        with self._budgets.call(gpu_pod.pod.namespace, gpu_pod.request, gone, charge_single=True) as call:
            for name, victims in proposed.items():
                if call.next_limits() is None:
                    break
                budget = Budget(call.effort, max(FREE, min(_STEPS_PER_NODE, call.remaining)))
                with suppress(Exhausted):
                    chosen = self._victims_on_node(
                        name, gpu_pod, gpu_pod.request, victims, budget, beside, only_cards=only_cards
                    )
                    if chosen is not None:
                        result[name] = chosen
        return result

    def choose_among(
        self,
        gpu_pod: GpuPod,
        node: str,
        uids: Collection[str],
        gone: CallerGone = never,
        outlook: Outlook | None = None,
    ) -> frozenset[str] | None:
        """Return which of these pods on a node to evict, for a scheduler that evicts no other ones (Volcano).

        Whether a pod may be evicted is the scheduler's decision, so priorities do not matter. The result is None if the
        evictions do not help, or if that is not known yet. It is empty if the pod fits once those pods have gone that
        are leaving already. Pods without cards are in the result if the evicted pods with cards do not free enough cpu
        and memory, because the scheduler evicts only until these suffice.

        Raises:
            RetryLater: The caller has given up, or too many other long calls wait.
        """
        request = gpu_pod.request
        if request is None:
            return None
        with (
            suppress(Exhausted),
            self._budgets.call(gpu_pod.pod.namespace, request, gone, charge_single=True) as call,
        ):
            if call.next_limits() is not None:
                budget = Budget(call.effort, max(FREE, min(_STEPS_PER_NODE, call.remaining)))
                return self._among(node, gpu_pod, request, frozenset(uids), outlook or Outlook(), budget)
        return None

    def _among(
        self, name: str, gpu_pod: GpuPod, request: GpuRequest, uids: frozenset[str], outlook: Outlook, budget: Budget
    ) -> frozenset[str] | None:
        snapshot, occupants = self._state.node_snapshot_with_pods(name, gpu_pod.pod.uid)
        node = snapshot.node
        if node is None or self._state.agent_problem(name) is not None:
            return None
        bound = [(h, p.pod) for h, p in occupants if h.bound and not h.occupies]
        leaving = [(h, pod) for h, pod in bound if h.uid in outlook.leaving or pod.deleting]
        gone = {holding.uid for holding, _ in leaving}
        holders = [(h, pod) for h, pod in bound if h.uid in uids - gone]
        without_cards = uids - {holding.uid for holding, _ in occupants}
        everyone = without_cards | {holding.uid for holding, _ in holders}
        if requested_slices(request):
            return everyone if self._slices_fit(name, node, gpu_pod, request, everyone | gone, budget) else None
        if nvidia_plugin.chooses_cards(node, request):
            rejection = nvidia_plugin.rejection(request, node, snapshot.cards, snapshot.mgpu_cards)
            return None if rejection else everyone
        devices = (*snapshot.available_cards, *(snapshot.available_other_devices if request.others else ()))
        cards = self._after(name, node, devices, [holding for holding, _ in leaving], outlook.coming, budget)
        if cards is None:
            return None
        fits_on = self._fit_test(gpu_pod, request, node, budget)
        if request.others:
            return everyone if fits_on(_without(cards, [holding for holding, _ in holders])) else None
        exact = budget.part(budget.left // 2)
        evictable = self._evictable_pods(snapshot, holders)
        found = choose_victims(request, cards, evictable, fits_on, exact=exact, budget=budget)
        if found is None:
            return None
        chosen = frozenset(pod.uid for pod in found[0])
        evicted = (pod for _, pod in (*leaving, *holders) if pod.uid in gone | chosen)
        arriving = (gpu_pod.pod, *(other.pod for other in outlook.coming))
        return chosen if _has_cpu_and_memory(snapshot, arriving, evicted) else chosen | without_cards

    def _after(
        self,
        name: str,
        node: Node,
        devices: Sequence[CardState],
        leaving: Sequence[Holding],
        coming: Sequence[GpuPod],
        budget: Budget,
    ) -> Sequence[CardState] | None:
        """Return the devices once some pods have left the node and others have come, or None if these do not fit.

        Pods that come and are nominated to the node are in `devices` already, and so are those with a reservation.
        """
        left: Sequence[CardState] = _without(devices, leaving)
        for other in coming:
            pod, request = other.pod, other.request
            if request is None or pod.nominated_node == name or self._state.reservation(pod.uid) is not None:
                continue
            effort = Effort()
            groups = self._state.group_cards(request, pod.uid)
            found = assess(request, node, left, self._settings, group_cards=groups, limits=BRIEF, effort=effort)
            budget.take(effort.spent)
            if not isinstance(found, Placement):
                return None
            owner = (pod.uid, pod.namespace, pod.name, name)
            shares = shares_of(request, found)
            held = Holding(*owner, request.dialect, shares, bound=False, constraints=request.constraints)
            left = with_holdings(left, [held])
        return left

    def _fit_test(
        self, gpu_pod: GpuPod, request: GpuRequest, node: Node, budget: Budget
    ) -> Callable[[Sequence[CardState]], bool]:
        """Return a function that tells whether the pod fits on cards in given states. It uses up the budget."""
        group_cards = self._state.group_cards(request, gpu_pod.pod.uid)

        def fits(cards: Sequence[CardState]) -> bool:
            effort = Effort()
            answer = assess(request, node, cards, self._settings, group_cards=group_cards, limits=BRIEF, effort=effort)
            budget.take(effort.spent)
            return isinstance(answer, Placement)

        return fits

    def _victims_on_node(
        self,
        name: str,
        gpu_pod: GpuPod,
        request: GpuRequest,
        proposed: Victims,
        budget: Budget,
        beside: Sequence[Holding],
        *,
        only_cards: bool,
    ) -> Victims | None:
        """Return the victims on one node, or None if no eviction helps.

        Raises Exhausted if the search takes too long.
        """
        snapshot, occupants = self._state.node_snapshot_with_pods(name, gpu_pod.pod.uid)
        snapshot = snapshot.beside(name, beside)
        node = snapshot.node
        proposed_holdings = [holding for holding, _ in occupants if holding.uid in proposed.uids]
        if node is None or any(holding.occupies for holding in proposed_holdings):
            # The MtgpuPod controller would create the occupy pod again. Its card becomes free once its MtgpuPods end.
            return None
        if nvidia_plugin.chooses_cards(node, request):
            return None if nvidia_plugin.rejection(request, node, snapshot.cards, snapshot.mgpu_cards) else proposed
        if self._state.agent_problem(name) is not None:
            return None  # The pod could not start there after the evictions.
        if requested_slices(request):
            fits = self._slices_fit(name, node, gpu_pod, request, proposed.uids, budget)
            return proposed if fits else None

        fits_on = self._fit_test(gpu_pod, request, node, budget)
        if request.others:
            # The search for victims knows only GPUs. So for other devices only kube-scheduler's victims are considered.
            devices = (*snapshot.available_cards, *snapshot.available_other_devices)
            return proposed if fits_on(_without(devices, proposed_holdings)) else None
        exact = budget.part(budget.left // 2)
        lower = [(holding, p.pod) for holding, p in occupants if _is_evictable(holding, p.pod, gpu_pod.pod)]
        evictable = self._evictable_pods(snapshot, lower)
        if only_cards and all(state.card.healthy for state in snapshot.available_cards):
            found = choose_victims(request, snapshot.available_cards, evictable, fits_on, exact=exact, budget=budget)
            if found is None:
                return None
            evicted = {pod.uid for pod in found[0]}
            if evicted and _has_cpu_and_memory(snapshot, [gpu_pod.pod], (p for _, p in lower if p.uid in evicted)):
                return _merge(proposed, evictable, found[0])
        required = [pod for pod in evictable if pod.uid in proposed.uids]
        others = [pod for pod in evictable if pod.uid not in proposed.uids]
        highest = max((pod.priority for pod in required), default=LOWEST_PRIORITY)
        cards = without_pods(snapshot.available_cards, required)
        found = choose_victims(request, cards, others, fits_on, highest=highest, exact=exact, budget=budget)
        return None if found is None else _merge(proposed, evictable, [*required, *found[0]])

    def _slices_fit(
        self, name: str, node: Node, gpu_pod: GpuPod, request: GpuRequest, evicted: Collection[str], budget: Budget
    ) -> bool:
        """Return whether a pod that requests slices fits once these pods are evicted, which the scheduler has chosen.

        kube-scheduler counts slices like any other resource. So its victims suffice, provided that the cards which they
        free can be partitioned for the pod.
        """
        if request.unmet_requirement(node):
            return False
        target = self._state.partitions.get(name, gpu_pod.pod.uid, without=evicted)
        if target is None or target.observed.has_pending_plan:
            return False
        slices = requested_slices(request)
        return target.fits(slices) or assess_slices(target, slices, budget).fits_repartitioned

    def _evictable_pods(self, snapshot: NodeSnapshot, lower: Sequence[tuple[Holding, Pod]]) -> list[EvictablePod]:
        """Return those of the pods in `lower` that hold a share of the node's GPUs."""
        cards = [state.card for state in snapshot.available_cards]
        pods = {pod.uid: pod for _, pod in lower}
        result = []
        for holding, pod in lower:
            uses = {card.index: used for card in cards if (used := holding.uses(card)).shares}
            if uses:
                result.append(EvictablePod(pod.uid, pod.priority, uses, pod.start_time, leaving=pod.deleting))
        violating = self._disruption_budgets.violated_by([pods[t.uid] for t in by_importance(result)])
        return [replace(pod, violates=pod.uid in violating) for pod in result]


def _without(devices: Iterable[CardState], evicted: Sequence[Holding]) -> list[CardState]:
    """Return the devices without what these holdings use of them."""
    return [
        without_usage(state, [{state.card.index: holding.uses(state.card)} for holding in evicted]) for state in devices
    ]


def _is_evictable(holding: Holding, pod: Pod, preemptor: Pod) -> bool:
    return holding.bound and not holding.occupies and pod.priority < preemptor.priority


def _has_cpu_and_memory(snapshot: NodeSnapshot, arriving: Sequence[Pod], evicted: Iterable[Pod]) -> bool:
    """Return whether the node has enough cpu and memory for the arriving pods once the others are evicted."""
    free = [snapshot.free_resources, *(pod.cpu_memory for pod in evicted)]
    needed = [pod.cpu_memory for pod in arriving]
    enough_cpu = sum(f.cpu for f in free) >= sum(n.cpu for n in needed)
    return enough_cpu and sum(f.memory for f in free) >= sum(n.memory for n in needed)


def _merge(proposed: Victims, evictable: Iterable[EvictablePod], chosen: Sequence[EvictablePod]) -> Victims:
    """Return the chosen pods and those victims of kube-scheduler that hold no cards, the most important first.

    For victims without cards only kube-scheduler's order is known, and not the priority. Each of them is at least as
    important as the next victim with cards in that order.
    """
    by_uid = {pod.uid: pod for pod in evictable}
    at_least = LOWEST_PRIORITY
    rows = [(-pod.priority, i, pod.uid) for i, pod in enumerate(by_importance(chosen))]
    for i, uid in reversed(list(enumerate(proposed.uids))):
        if uid in by_uid:
            at_least = by_uid[uid].priority
        else:
            rows.append((-at_least, i - len(proposed.uids), uid))
    counted = sum(by_uid[uid].violates for uid in proposed.uids if uid in by_uid)
    violations = max(0, proposed.violations - counted) + sum(pod.violates for pod in chosen)
    return Victims(tuple(uid for *_, uid in sorted(rows)), violations)


def _is_no_device(resource: str) -> bool:
    return resource in ("cpu", "memory") or resource.startswith(PREFIX)


def _only_cards_can_be_short(pod: Pod, raw: Mapping[str, Any]) -> bool:
    """Return whether, according to its specification, a pod can lack only cards, cpu and memory on a node.

    The anti-affinity of other pods is not considered. If it keeps the pod away, kube-scheduler evicts those pods in its
    next attempt.
    """
    spec = raw.get("spec") or {}
    if spec.get("resourceClaims"):
        return False
    resources = {name for kind in ("requests", "limits") for name in table_at(spec, "resources", kind)}
    resources |= {name for _, name in pod.resources()}
    if any(vocabulary_of(name) is None and not _is_no_device(name) for name in resources):
        return False
    containers = [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]
    if any(port.get("hostPort") for container in containers for port in container.get("ports") or ()):
        return False
    if any(set(volume) - {"name"} - _HARMLESS_VOLUMES for volume in spec.get("volumes") or ()):
        return False
    affinity = spec.get("affinity") or {}
    kinds = [affinity.get(kind) or {} for kind in ("podAffinity", "podAntiAffinity")]
    if any(kind.get("requiredDuringSchedulingIgnoredDuringExecution") for kind in kinds):
        return False
    return all(
        spread.get("whenUnsatisfiable") == "ScheduleAnyway" for spread in spec.get("topologySpreadConstraints") or ()
    )
