"""Preemption by cards: which pods to evict for a pod on each node that kube-scheduler considers.

kube-scheduler chooses victims itself and then calls `/preempt` of the extender. It knows the GPUs of a node only as a
sum, so its victims make room for everything except, perhaps, the cards. This module adds the victims that the cards
need. It drops kube-scheduler's own only where nothing but cards, cpu and memory can have been the reason for them
(`_only_cards_can_be_short`). docs/preemption.md describes the result for users.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from mgpu.dialects.registry import vocabulary_of
from mgpu.model.cards import CardState
from mgpu.model.gpu_requests import GpuRequest, Placement
from mgpu.model.ledger import Holding
from mgpu.model.pod_constraints import PREFIX
from mgpu.model.pods import Pod
from mgpu.model.raw_objects import table_at
from mgpu.settings import Settings
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.cluster.node_snapshots import NodeSnapshot
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

_NODE = 400_000
"""Steps of the engine's effort for one node: the search for victims, and each test whether the pod then fits."""

# Volumes that every node can provide, so that they are no reason for an eviction.
# Volumes that every node can provide, so that they are no reason for an eviction.
_HARMLESS_VOLUMES = frozenset({"configMap", "downwardAPI", "emptyDir", "hostPath", "projected", "secret"})


@dataclass(frozen=True, slots=True)
class Victims:
    """The uids of the pods to evict from a node, and how many of these evictions violate a disruption budget."""

    uids: tuple[str, ...]
    violations: int = 0


class Preemption:
    """Chooses victims by the cards that they free. Thread-safe; it evicts nothing itself."""

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
        self, known: GpuPod, raw: Mapping[str, Any], proposed: Mapping[str, Victims], gone: CallerGone = never
    ) -> dict[str, Victims]:
        """Return the victims on each node, the most important first.

        Nodes where no eviction makes room are left out. So are nodes where the search for victims takes too long,
        because no pod is evicted on a guess.

        Args:
            raw: The pod that needs the cards, as the API has it.
            proposed: By node the victims that kube-scheduler has chosen.
            gone: Tells whether the caller has given up.
        """
        found: dict[str, Victims] = {}
        if known.request is None:
            return found
        only_cards = _only_cards_can_be_short(known.pod, raw)
        with self._budgets.call(known.pod.namespace, known.request, gone, charge_single=True) as call:
            for name, theirs in proposed.items():
                if call.next_limits() is None:
                    break
                budget = Budget(call.effort, max(FREE, min(_NODE, call.remaining)))
                with suppress(Exhausted):
                    chosen = self._on(name, known, known.request, theirs, budget, only_cards=only_cards)
                    if chosen is not None:
                        found[name] = chosen
        return found

    def _on(
        self, name: str, known: GpuPod, request: GpuRequest, theirs: Victims, budget: Budget, *, only_cards: bool
    ) -> Victims | None:
        """Return the victims on one node, or None where no eviction makes room. Raises Exhausted."""
        view, occupants = self._state.node_snapshot_with_pods(name, known.pod.uid)
        node, seats = view.node, self._state.seats(request, known.pod.uid)
        if node is None or any(h.occupies and h.uid in theirs.uids for h, _ in occupants):
            return None  # the MtgpuPod controller would create the occupy pod again; only MtgpuPods free its card
        if nvidia_plugin.chooses_cards(node, request):
            return None if nvidia_plugin.refusal(request, node, view.cards, view.mgpu_cards) else theirs
        if self._state.agent_problem(name) is not None:
            return None  # the pod could not start there once its victims are gone

        def fits(cards: Sequence[CardState]) -> bool:
            asked = Effort()
            answer = assess(request, node, cards, self._settings, seats=seats, limits=BRIEF, effort=asked)
            budget.take(asked.spent)
            return isinstance(answer, Placement)

        wanted = requested_slices(request)
        if wanted:
            # kube-scheduler counts slices like any resource, so its victims suffice, if what they free can be
            # partitioned as the pod needs it.
            target = (
                None if request.unmet(node) else self._state.partitions.get_without(name, known.pod.uid, theirs.uids)
            )
            serves = (
                target
                and not target.found.waiting
                and (target.fits(wanted) or assess_slices(target, wanted, budget).fits_repartitioned)
            )
            return theirs if serves else None
        if request.others:
            # Devices of other types: kube-scheduler's victims suffice or the node is left out. No others are searched.
            gone = [h for h, _ in occupants if h.uid in theirs.uids]
            left = [_without(state, gone) for state in (*view.available_cards, *view.available_other_devices)]
            return theirs if fits(left) else None
        exact = budget.part(budget.left // 2)
        lower = [(h, p.pod) for h, p in occupants if _may_go(h, p.pod, known.pod)]
        tenants = self._tenants(view, lower)
        if only_cards and all(state.card.healthy for state in view.available_cards):
            found = choose_victims(request, view.available_cards, tenants, fits, exact=exact, budget=budget)
            if found is None:
                return None
            going = {t.uid for t in found[0]}
            if going and _has_room(view, known.pod, (pod for _, pod in lower if pod.uid in going)):
                return _merged(theirs, tenants, found[0])
        must = [t for t in tenants if t.uid in theirs.uids]
        others = [t for t in tenants if t.uid not in theirs.uids]
        highest = max((t.priority for t in must), default=LOWEST_PRIORITY)
        found = choose_victims(
            request, without_pods(view.available_cards, must), others, fits, highest=highest, exact=exact, budget=budget
        )
        return None if found is None else _merged(theirs, tenants, [*must, *found[0]])

    def _tenants(self, view: NodeSnapshot, lower: Sequence[tuple[Holding, Pod]]) -> list[EvictablePod]:
        """Return the pods of lower priority that hold a part of the node's cards."""
        cards, pods = [state.card for state in view.available_cards], {pod.uid: pod for _, pod in lower}
        found = []
        for holding, pod in lower:
            uses = {card.index: used for card in cards if (used := holding.uses(card)).shares}
            if uses:
                found.append(EvictablePod(pod.uid, pod.priority, uses, pod.start_time, leaving=pod.deleting))
        violating = self._disruption_budgets.violated_by([pods[t.uid] for t in by_importance(found)])
        return [replace(t, violates=t.uid in violating) for t in found]


def _without(state: CardState, gone: Iterable[Holding]) -> CardState:
    return without_usage(state, [{state.card.index: holding.uses(state.card)} for holding in gone])


def _may_go(held: Holding, pod: Pod, wanting: Pod) -> bool:
    return held.bound and not held.occupies and pod.priority < wanting.priority


def _has_room(view: NodeSnapshot, pod: Pod, going: Iterable[Pod]) -> bool:
    """Tell whether the node has the cpu and memory for the pod once these pods are gone."""
    rooms = [view.free_resources, *(p.needs for p in going)]
    return sum(r.cpu for r in rooms) >= pod.needs.cpu and sum(r.memory for r in rooms) >= pod.needs.memory


def _merged(theirs: Victims, tenants: Iterable[EvictablePod], chosen: Sequence[EvictablePod]) -> Victims:
    """Return the chosen pods with those victims of kube-scheduler that hold no cards, the most important first.

    Of the latter only kube-scheduler's order is known here, not the priority: each is at least as important as the
    next victim after it that holds cards.
    """
    known = {t.uid: t for t in tenants}
    at_least = LOWEST_PRIORITY
    rows = [(-t.priority, i, t.uid) for i, t in enumerate(by_importance(chosen))]
    for i, uid in reversed(list(enumerate(theirs.uids))):
        if uid in known:
            at_least = known[uid].priority
        else:
            rows.append((-at_least, i - len(theirs.uids), uid))
    counted = sum(known[uid].violates for uid in theirs.uids if uid in known)
    violations = max(0, theirs.violations - counted) + sum(t.violates for t in chosen)
    return Victims(tuple(uid for *_, uid in sorted(rows)), violations)


def _plain(resource: str) -> bool:
    return resource in ("cpu", "memory") or resource.startswith(PREFIX)


def _only_cards_can_be_short(pod: Pod, raw: Mapping[str, Any]) -> bool:
    """Tell whether only cards, cpu and memory held by other pods can keep this pod away, by its specification.

    Anti-affinity of other pods is not considered. Such a pod is evicted in the next round, when the cards are free.
    """
    spec = raw.get("spec") or {}
    if spec.get("resourceClaims"):
        return False
    of_pod = (name for kind in ("requests", "limits") for name in table_at(spec, "resources", kind))
    if any(vocabulary_of(name) is None and not _plain(name) for name in (*of_pod, *(n for _, n in pod.resources()))):
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
