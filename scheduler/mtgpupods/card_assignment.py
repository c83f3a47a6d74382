"""Assigns shares of cards to the MtgpuPods of a node, or gives the reason why an MtgpuPod waits.

The rules are those of docs/design/mtgpu.md, "Meaning of a GPUID". MtgpuPods are considered one by one, in an order that
is fair between namespaces, and what one of them gets is not free for those after it. The functions have no side effects
except on their arguments. `node_plan` calls them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mgpu.dialects.mtgpu import NAME, MtgpuPod, holding, occupy_name
from mgpu.model.cards import Card, CardState
from mgpu.model.gpu_requests import CardRefusal, ContainerRequest, RejectionKind, cards_rejection, whole_cards
from mgpu.model.ledger import Holding, Ledger
from scheduler.cluster.gpuids import UsedGpuids
from scheduler.engine import nvidia_plugin
from scheduler.engine.rejections import card_refusal
from scheduler.mtgpupods.mtgpupod_status import FALSE, Condition
from scheduler.mtgpupods.observed_node import ObservedNode

_WHOLE_CARD = whole_cards("", 1)


@dataclass(slots=True)
class CardAssignments:
    """The result of `assign_cards`.

    Attributes:
        reservations: By UID, the holdings of MtgpuPods that are assigned a card and have no BoundDeviceID yet.
        waiting: By UID, the condition Bound of MtgpuPods that get no card now.
        awaited_gpuids: The GPUIDs with waiting MtgpuPods whose occupy pod has a card that is not known yet.
        limited_namespaces: The namespaces with MtgpuPods that wait because of the limit on GPUIDs.
    """

    reservations: dict[str, Holding] = field(default_factory=dict)
    waiting: dict[str, Condition] = field(default_factory=dict)
    awaited_gpuids: set[str] = field(default_factory=set)
    limited_namespaces: set[str] = field(default_factory=set)


def ledger_of(node: ObservedNode) -> Ledger:
    """Return a ledger of the node. It omits the reservations of MtgpuPods, because each plan decides them again."""
    ledger = Ledger()
    ledger.set_cards(node.name, node.cards)
    for held in node.held:
        ledger.hold(held)
    for pod in node.pods:
        ledger.release(pod.uid)
        if node.holds(pod):
            ledger.hold(holding(pod, node.card_of(pod)))
    return ledger


def foreign_holdings(node: ObservedNode, ledger: Ledger, gpuid: str, card: Card) -> tuple[Holding, ...]:
    """Return the holdings on this card that do not belong to this GPUID.

    The holding of an invalid MtgpuPod has no GPUID. It is not foreign, because it may belong to this GPUID. Nor are
    remnants of this GPUID foreign. Otherwise one user of a GPUID could block its users in other namespaces by deleting
    a Pod by force.
    """
    held = (h for h in ledger.holdings(node.name) if h.gpuid != gpuid and (h.gpuid or h.dialect != NAME))
    return tuple(h for h in held if h.is_known_on(card) and node.remnant_gpuids.get(h.uid) != gpuid)


def assign_cards(node: ObservedNode, ledger: Ledger, degraded: Mapping[str, Condition]) -> CardAssignments:
    """Assign cards to the MtgpuPods that have none.

    Args:
        ledger: The result of `ledger_of`. The function adds the new reservations to it.
        degraded: By GPUID, a condition that says why no further MtgpuPod gets a share of the card of the GPUID.
    """
    assigner = _CardAssigner(node, ledger, degraded)
    for pod in _in_order(node):
        assigner.assign(pod)
    return assigner.result


def _in_order(node: ObservedNode) -> list[MtgpuPod]:
    """Return the MtgpuPods that need a card, in the order in which they are considered.

    MtgpuPods with a reservation come first. For the others the namespaces take turns, beginning with those that have
    the fewest MtgpuPods with a card or a reservation on this node. Within a namespace the oldest comes first. So a
    namespace with many MtgpuPods does not take all cards that become free.
    """
    waiting = [pod for pod in sorted(node.pods, key=lambda pod: pod.queue_key) if _needs_card(node, pod)]
    served = Counter(pod.namespace for pod in node.pods if node.holds(pod) or pod.uid in node.reservations)
    rounds: dict[str, int] = {}
    for pod in waiting:
        if pod.uid not in node.reservations:
            rounds[pod.uid] = served[pod.namespace]
            served[pod.namespace] += 1
    return sorted(waiting, key=lambda pod: (pod.uid in rounds, rounds.get(pod.uid, 0), pod.queue_key))


def _needs_card(node: ObservedNode, pod: MtgpuPod) -> bool:
    return not (pod.deleting or pod.ended or node.card_of(pod))


class _CardAssigner:
    def __init__(self, node: ObservedNode, ledger: Ledger, degraded: Mapping[str, Condition]) -> None:
        self._node = node
        self._ledger = ledger
        self._degraded = degraded
        self._used = UsedGpuids(ledger.holdings(node.name))
        # By GPUID and namespace, the oldest MtgpuPod that has to wait although it would fit on an empty card.
        self._first_waiting: dict[tuple[str, str], MtgpuPod] = {}
        self.result = CardAssignments()

    def assign(self, pod: MtgpuPod) -> None:
        found = self._barred(pod) or self._found(pod)
        if isinstance(found, Condition):
            self.result.waiting[pod.uid] = found
        else:
            self.result.reservations[pod.uid] = found
            self._ledger.hold(found)
            self._used.put(pod.uid, found)

    def _barred(self, pod: MtgpuPod) -> Condition | None:
        """Return the reason why the MtgpuPod gets no card regardless of free capacity, or None."""
        node = self._node
        occupy_pod = node.occupy_pods.get(pod.gpuid)
        if not node.exists:
            return Condition(FALSE, "NodeNotFound", f"node {node.name} does not exist")
        if node.unschedulable:
            return Condition(FALSE, "NodeUnschedulable", f"node {node.name} is cordoned")
        if pod.uid in node.untolerated:
            return tainted(node, pod)
        if pod.uid in node.name_conflicts:
            return name_conflict(pod)
        if occupy_pod and not occupy_pod.ours:
            return occupy_name_conflict(node.name, pod.gpuid)
        if pod.gpuid in self._degraded:
            message = f"GPUID {pod.gpuid} takes no further MtgpuPods: {self._degraded[pod.gpuid].message}"
            return Condition(FALSE, "Degraded", message)
        if occupy_pod and not occupy_pod.alive and not self._users(pod.gpuid):
            message = f"GPUID {pod.gpuid} is being retired; it gets a new card after that"
            return Condition(FALSE, "Retiring", message)
        if pod.namespace in node.held_up and pod.uid not in node.reservations:
            return deleted_pods_running()
        return self._over_limit(pod)

    def _over_limit(self, pod: MtgpuPod) -> Condition | None:
        """Return the reason why the namespace may not use this GPUID, or None if it may.

        A namespace that has reached the limit may still use the GPUIDs that it uses already.
        """
        limit, name = self._node.gpuid_limit, pod.namespace
        if limit is None or self._used.uses(pod):
            return None
        if self._used.count(name) + limit.elsewhere.get(name, 0) < limit.maximum:
            return None
        self.result.limited_namespaces.add(name)
        # The message omits the number of GPUIDs in use. Otherwise each change of the number would cause a status write
        # for every waiting MtgpuPod.
        rule = f"namespace {name} uses as many GPUIDs as it may (dialects.mtgpu.maxGPUIDsPerNamespace: {limit.maximum})"
        remedy = f"name a GPUID that it uses on node {pod.node}, or delete the MtgpuPods of another GPUID"
        return Condition(FALSE, "TooManyGPUIDs", f"{rule}; {remedy}")

    def _found(self, pod: MtgpuPod) -> Holding | Condition:
        """Return the share of a card for the MtgpuPod, or the condition that says why it waits.

        A waiting MtgpuPod blocks the younger ones of its GPUID and namespace, unless it does not fit even on an empty
        card. It does not block MtgpuPods of other namespaces, because any user may create an MtgpuPod with any GPUID.
        """
        line = pod.gpuid, pod.namespace
        first = self._first_waiting.get(line)
        if first is not None and first.queue_key < pod.queue_key:
            # The message does not name the waiting MtgpuPod. Otherwise its deletion would cause a status write for
            # each MtgpuPod that it blocks.
            return _exceeded(f"older MtgpuPods of its namespace wait for GPUID {pod.gpuid} too")
        states = self._ledger.cards(self._node.name)
        of_gpuid = [state for state in states if state.gpuid == pod.gpuid]
        found = self._join(pod, of_gpuid) if of_gpuid else self._start(pod, states)
        fits_alone = any(_never_fits(pod, state.card) is None for state in of_gpuid or states)
        if isinstance(found, Condition) and fits_alone:
            self._first_waiting[line] = pod if first is None else min(first, pod, key=lambda pod: pod.queue_key)
        return found

    def _users(self, gpuid: str) -> list[Holding]:
        return [h for h in self._ledger.holdings(self._node.name) if h.gpuid == gpuid and not h.occupies]

    def _join(self, pod: MtgpuPod, of_gpuid: Sequence[CardState]) -> Holding | Condition:
        """Return a share of the card that the GPUID has, or the condition that says why there is none."""
        card = of_gpuid[0].card
        if len(of_gpuid) > 1 or foreign_holdings(self._node, self._ledger, pod.gpuid, card):
            message = f"GPUID {pod.gpuid} has several cards, or shares card {card.uuid} with other pods"
            return Condition(FALSE, "Degraded", message)
        refused = _never_fits(pod, card)
        if refused is None:
            refused = card_refusal(replace(of_gpuid[0], gpuid=""), _share(pod), 0)
            if refused is not None and self._all_users_elsewhere(pod):
                # A user who guesses a GPUID must not see how much of its card is in use.
                text = "less of it is free than this MtgpuPod requests; MtgpuPods of other namespaces share it"
                refused = replace(refused, reason=text)
        if refused is not None:
            return _exceeded(f"card {card.index}, the card of GPUID {pod.gpuid}: {refused.reason}")
        return holding(pod, card.uuid, bound=False)

    def _all_users_elsewhere(self, pod: MtgpuPod) -> bool:
        """Return whether the GPUID has users, and none of them is in the namespace of the MtgpuPod."""
        users = self._users(pod.gpuid)
        return bool(users) and all(user.namespace != pod.namespace for user in users)

    def _start(self, pod: MtgpuPod, states: Sequence[CardState]) -> Holding | Condition:
        """Return a holding of a card for a GPUID that is not known to have one, or why the MtgpuPod waits."""
        node = self._node
        occupy_pod = node.occupy_pods.get(pod.gpuid)
        reservation = node.reservations.get(pod.uid)
        if occupy_pod and occupy_pod.card:
            message = f"the occupy pod of GPUID {pod.gpuid} has no card of its own: {occupy_pod.card}"
            return Condition(FALSE, "Degraded", message)
        if occupy_pod and self._ledger.holding(occupy_pod.uid):
            self.result.awaited_gpuids.add(pod.gpuid)
            message = f"it is not known yet which card GPUID {pod.gpuid} has"
            return reservation or Condition(FALSE, "CardNotKnown", message)
        if self._users(pod.gpuid):
            return Condition(FALSE, "CardNotKnown", f"it is not known yet which card GPUID {pod.gpuid} gets")
        if node.nvidia_plugin:
            return self._start_by_nvidia_plugin(pod, states)
        reserved = [state for state in states if reservation and reservation.is_known_on(state.card)]
        chosen = _chosen(pod, [*reserved, *states])
        return holding(pod, chosen.uuid, bound=False) if chosen else _exceeded(_no_card(pod, states))

    def _start_by_nvidia_plugin(self, pod: MtgpuPod, states: Sequence[CardState]) -> Holding | Condition:
        """Return a holding of an unknown card if every card that the NVIDIA device plugin could choose is suitable.

        The plugin may choose any card that it has not given out. So every idle card must be large enough, and mgpu must
        not have given a card of the node to other pods, because the plugin does not know these pods.
        """
        given = nvidia_plugin.indexes_used_by_mgpu(self._ledger, self._node.name)
        if given:
            listed = ", ".join(map(str, given))
            return _exceeded(f"NVIDIA's plugin could choose a card that mgpu has given to pods ({listed})")
        idle = [state.card for state in states if state.idle and state.card.healthy]
        too_small = next(filter(None, (_never_fits(pod, card) for card in idle)), None)
        if too_small is not None:
            return _exceeded(f"NVIDIA's plugin could choose card {too_small.index}: {too_small.reason}")
        return holding(pod, None, bound=False) if idle else _exceeded(_no_card(pod, states))


def _chosen(pod: MtgpuPod, states: Sequence[CardState]) -> Card | None:
    """Return the first card in `states` that is idle and large enough, or None.

    The placement engine is not needed, because every card policy rates all idle cards equally.
    """
    free = (s.card for s in states if not (_never_fits(pod, s.card) or card_refusal(s, _WHOLE_CARD, 0)))
    return next(free, None)


def _no_card(pod: MtgpuPod, states: Sequence[CardState]) -> str:
    if not states:
        return "the node has no GPU cards that pods could share"
    refusals = [_never_fits(pod, s.card) or card_refusal(s, _WHOLE_CARD, 0) or _free(s.card) for s in states]
    return f"GPUID {pod.gpuid} needs a card of its own: {cards_rejection(refusals)}"


def _free(card: Card) -> CardRefusal:
    return CardRefusal(card.index, RejectionKind.OTHER, "free")


def _never_fits(pod: MtgpuPod, card: Card) -> CardRefusal | None:
    """Return the reason why the MtgpuPod would not fit on the card if the card were empty and healthy, or None."""
    return card_refusal(CardState(replace(card, healthy=True)), _share(pod), 0)


def _share(pod: MtgpuPod) -> ContainerRequest:
    return ContainerRequest("", core=pod.request, memory=pod.memory)


def _exceeded(message: str) -> Condition:
    return Condition(FALSE, "ResourceExceeded", message)


def tainted(node: ObservedNode, pod: MtgpuPod) -> Condition:
    text = f"node {node.name} has the taint {node.untolerated[pod.uid]}, which the MtgpuPod does not tolerate"
    return Condition(FALSE, "NodeTainted", text)


def name_conflict(pod: MtgpuPod) -> Condition:
    return Condition(FALSE, "NameConflict", f"Pod {pod.key} exists already and was not created for this MtgpuPod")


def deleted_pods_running() -> Condition:
    # The message does not name the pods. Otherwise each change of them would cause a status write for every waiting
    # MtgpuPod.
    rule = "pods of its namespace were deleted by force and still run"
    remedy = "the MtgpuPods of the namespace get no cards and no Pods until the deleted pods have ended"
    return Condition(FALSE, "DeletedPodsRunning", f"{rule}; {remedy}")


def occupy_name_conflict(node: str, gpuid: str) -> Condition:
    text = f"kube-system has a Pod {occupy_name(node, gpuid)}, which mgpu did not create"
    return Condition(FALSE, "OccupyNameConflict", text)
