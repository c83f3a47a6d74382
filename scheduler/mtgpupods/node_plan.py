"""Computes the node plan: the desired state of each MtgpuPod of a node, given the observed state.

The MtgpuPod controller carries the plans out, and `mgpu simulate` shows their results. A plan depends only on the
observed state, and not on earlier plans. So a new leader continues where the old one ended, and nothing is lost if the
process crashes between two writes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from mgpu.dialects.mtgpu import MtgpuPod
from mgpu.model.ledger import Holding, Ledger
from scheduler.mtgpupods.card_assignment import (
    CardAssignments,
    assign_cards,
    deleted_pods_running,
    foreign_holdings,
    ledger_of,
    name_conflict,
    occupy_name_conflict,
    tainted,
)
from scheduler.mtgpupods.mtgpupod_status import FALSE, TRUE, UNKNOWN, Condition, DesiredMtgpuPod
from scheduler.mtgpupods.observed_node import ObservedNode, OwnedPod
from scheduler.mtgpupods.occupy_pods import CreateOccupyPod, DeleteOccupyPod, OccupyPod


@dataclass(frozen=True, slots=True)
class NodePlan:
    """The decisions about the MtgpuPods of a node.

    Attributes:
        reservations: The holdings of the MtgpuPods that are assigned a card by this plan and have no BoundDeviceID
            yet, the oldest MtgpuPod first.
        desired: By UID, the desired state of every MtgpuPod.
        occupy_pod_steps: The occupy pods to create or delete, in the order of their GPUIDs.
        limited_namespaces: The namespaces with MtgpuPods that wait because of the limit on GPUIDs. The limit counts the
            GPUIDs of a namespace on all nodes.
    """

    reservations: tuple[Holding, ...]
    desired: Mapping[str, DesiredMtgpuPod]
    occupy_pod_steps: tuple[CreateOccupyPod | DeleteOccupyPod, ...]
    limited_namespaces: frozenset[str]


def plan_node(node: ObservedNode) -> NodePlan:
    node = replace(node, pods=tuple(sorted(node.pods, key=lambda pod: pod.queue_key)))
    ledger = ledger_of(node)
    degraded = _degraded(node, ledger)
    by_gpuid = {pod.gpuid: _for_other_namespaces(degraded[pod.uid]) for pod in node.pods if pod.uid in degraded}
    assigned = assign_cards(node, ledger, by_gpuid)
    desired = {pod.uid: _desired(node, pod, assigned, degraded.get(pod.uid)) for pod in node.pods}
    for broken in node.unreadable:
        condition = None if broken.deleting else Condition(FALSE, "Invalid", broken.problems)
        desired[broken.uid] = _with_deletion(DesiredMtgpuPod(condition), node, broken.uid, deleting=broken.deleting)
    reservations = tuple(assigned.reservations[pod.uid] for pod in node.pods if pod.uid in assigned.reservations)
    steps = tuple(_occupy_pod_steps(node, ledger, assigned.awaited_gpuids))
    return NodePlan(reservations, desired, steps, frozenset(assigned.limited_namespaces))


def _degraded(node: ObservedNode, ledger: Ledger) -> dict[str, Condition]:
    """Return, by UID, the condition Degraded of the MtgpuPods whose card has a problem. They keep their card."""
    found: dict[str, Condition] = {}
    card_of_gpuid: dict[str, str | None] = {}
    for pod in filter(node.holds, node.pods):
        first = card_of_gpuid.setdefault(pod.gpuid, node.card_of(pod))
        problem = _card_problem(node, ledger, pod, first) if node.exists else None
        if problem is not None:
            found[pod.uid] = problem
    return found


def _for_other_namespaces(condition: Condition) -> Condition:
    """Return the condition without names of pods, because users of other namespaces must not see them."""
    if condition.reason == "CardShared":
        return replace(condition, message="another pod is on its card")
    return condition


def _card_problem(node: ObservedNode, ledger: Ledger, pod: MtgpuPod, first: str | None) -> Condition | None:
    """Return the condition Degraded of an MtgpuPod whose card has a problem, or None.

    Args:
        first: The UUID of the card of the oldest MtgpuPod of its GPUID.
    """
    uuid = node.card_of(pod)
    card = node.card(uuid)
    occupy_pod = node.occupy_pods.get(pod.gpuid)
    if occupy_pod and not occupy_pod.ours:
        return replace(occupy_name_conflict(node.name, pod.gpuid), status=TRUE)
    if card is None:
        return Condition(TRUE, "CardMissing", f"node {node.name} has no card {uuid} that pods could share")
    if uuid != first:
        return Condition(
            TRUE, "OtherCard", f"other MtgpuPods of GPUID {pod.gpuid} are on card {first}, but it is on {uuid}"
        )
    if occupy_pod and occupy_pod.alive and occupy_pod.card not in (None, uuid):
        return Condition(
            TRUE, "OtherCard", f"the occupy pod of GPUID {pod.gpuid} has card {occupy_pod.card}, not {uuid}"
        )
    foreign = foreign_holdings(node, ledger, pod.gpuid, card)
    if foreign:
        named = [held.key for held in foreign if held.namespace == pod.namespace]
        name = named[0] if named else "a pod of another namespace"
        return Condition(TRUE, "CardShared", f"{name} is on its card {uuid} too")
    if not card.healthy:
        return Condition(TRUE, "CardUnhealthy", f"its card {card.index} ({uuid}) is unhealthy")
    return None


def _desired(
    node: ObservedNode, pod: MtgpuPod, assigned: CardAssignments, degraded: Condition | None
) -> DesiredMtgpuPod:
    if pod.deleting:
        desired = DesiredMtgpuPod()
    elif node.holds(pod):
        desired = _with_card(node, pod, degraded)
    elif pod.ended:
        desired = DesiredMtgpuPod(Condition(FALSE, "Ended", f"it has ended ({pod.phase}), and its share is free again"))
    elif pod.uid in assigned.reservations:
        desired = _with_reservation(node, pod, assigned.reservations[pod.uid])
    else:
        desired = DesiredMtgpuPod(assigned.waiting[pod.uid])
    return _with_deletion(desired, node, pod.uid, deleting=pod.deleting)


def _with_card(node: ObservedNode, pod: MtgpuPod, degraded: Condition | None) -> DesiredMtgpuPod:
    uuid = node.card_of(pod)
    card = node.card(uuid)
    bound = Condition(TRUE, "Bound", f"it has card {card.index} ({uuid})" if card else f"it has card {uuid}")
    if not node.exists:
        bound = Condition(UNKNOWN, "NodeNotFound", f"node {node.name} does not exist")
    elif degraded is None:
        degraded = Condition(FALSE, "AsBound", "its GPUID has the card that it was given")
    created = _pod_created(node, pod, degraded)
    return DesiredMtgpuPod(
        bound, created, degraded, bind=None if pod.card_uuid else uuid, create_pod=created is None, card=card
    )


def _pod_created(node: ObservedNode, pod: MtgpuPod, degraded: Condition | None) -> Condition | None:
    """Return the condition PodCreated of an MtgpuPod that has its card, or None if its Pod can be created now."""
    owned = node.owned_pods.get(pod.uid)
    occupy_pod = node.occupy_pods.get(pod.gpuid)
    if owned is not None:
        if owned.deleting and not pod.ended:
            return Condition(FALSE, "PodTerminating", "its Pod is being deleted and will be created again")
        return Condition(TRUE, "PodCreated", f"its Pod was created (uid {owned.uid})")
    if not node.exists:
        return Condition(FALSE, "NodeNotFound", f"node {node.name} does not exist")
    if pod.uid in node.name_conflicts:
        return name_conflict(pod)
    if node.unschedulable:
        return Condition(FALSE, "NodeUnschedulable", f"node {node.name} is cordoned")
    if pod.uid in node.untolerated:
        return tainted(node, pod)
    if pod.namespace in node.held_up:
        return deleted_pods_running()
    if degraded is not None and degraded.status == TRUE:
        return Condition(FALSE, "Degraded", degraded.message)
    if not (occupy_pod and occupy_pod.running and occupy_pod.card == node.card_of(pod)):
        return Condition(FALSE, "OccupyPodNotRunning", _awaited(pod, occupy_pod))
    return None


def _with_reservation(node: ObservedNode, pod: MtgpuPod, reservation: Holding) -> DesiredMtgpuPod:
    """Bind the MtgpuPod as soon as the occupy pod of its GPUID runs on the reserved card. Until then it waits."""
    occupy_pod = node.occupy_pods.get(pod.gpuid)
    card = node.card(occupy_pod.card) if occupy_pod and occupy_pod.running else None
    if card is None or not reservation.is_known_on(card):
        return DesiredMtgpuPod(Condition(FALSE, "Occupying", _awaited(pod, occupy_pod)))
    return replace(_with_card(node, replace(pod, card_uuid=card.uuid), None), bind=card.uuid)


def _awaited(pod: MtgpuPod, occupy_pod: OccupyPod | None) -> str:
    if occupy_pod and occupy_pod.running:
        return f"the occupy pod of GPUID {pod.gpuid} runs; the node has not reported its card yet"
    text = f"the occupy pod of GPUID {pod.gpuid} does not run yet"
    return f"{text}: {occupy_pod.message}" if occupy_pod and occupy_pod.message else text


def _with_deletion(desired: DesiredMtgpuPod, node: ObservedNode, uid: str, *, deleting: bool) -> DesiredMtgpuPod:
    """Add the decisions whether to delete the Pod and whether to remove the finalizer."""
    owned: OwnedPod | None = node.owned_pods.get(uid)
    if owned is None:
        return replace(desired, remove_finalizer=deleting)
    lost = not node.exists and (deleting or not owned.ended)
    return replace(desired, delete_pod=lost or (deleting and not owned.deleting), force=lost)


def _occupy_pod_steps(
    node: ObservedNode, ledger: Ledger, awaited_gpuids: set[str]
) -> Iterator[CreateOccupyPod | DeleteOccupyPod]:
    """Yield the steps that create the missing occupy pods and delete those that have ended or are not needed."""
    users = [h for h in ledger.holdings(node.name) if h.gpuid and not h.occupies]
    needed = {h.gpuid for h in users} | awaited_gpuids
    deleting = {pod.uid for pod in node.pods if pod.deleting} | {b.uid for b in node.unreadable if b.deleting}
    # An MtgpuPod that is being deleted still needs its occupy pod, but no new one is created for it.
    wanted = {h.gpuid for h in users if h.uid not in deleting and _can_get_its_card(node, h)}
    for gpuid in sorted(needed | set(node.occupy_pods)):
        occupy_pod = node.occupy_pods.get(gpuid)
        if occupy_pod is None:
            if gpuid in wanted and node.exists and not node.unschedulable:
                yield CreateOccupyPod(gpuid)
        elif occupy_pod.ours and not node.exists:
            yield DeleteOccupyPod(gpuid, occupy_pod.uid, force=True)
        elif occupy_pod.ours and not occupy_pod.deleting and (occupy_pod.ended or gpuid not in needed):
            yield DeleteOccupyPod(gpuid, occupy_pod.uid)


def _can_get_its_card(node: ObservedNode, user: Holding) -> bool:
    """Return whether a new occupy pod can get the card of this holding, which may be unknown."""
    is_any_card = all(share.card is None for share in user.shares)
    return is_any_card or any(user.is_known_on(card) and card.healthy for card in node.cards)
