"""What shall happen to the MtgpuPods of one node: pure, for the scheduler's controller and `mgpu simulate` alike.

It follows from what is seen alone, whatever was planned before: so a new leader goes on where the old one ended.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from mgpu.dialects.mtgpu import MtgpuPod
from mgpu.model.ledger import Holding, Ledger
from scheduler.mtgpupods.card_assignment import Admission, account, conflict, held_up, name_taken, strangers, tainted
from scheduler.mtgpupods.observed_node import Seen
from scheduler.mtgpupods.occupy_pods import Create, Delete, Occupy
from scheduler.mtgpupods.outcome import FALSE, TRUE, UNKNOWN, Said, Verdict
from scheduler.mtgpupods.owned_pods import Made


@dataclass(frozen=True, slots=True)
class Plan:
    """holdings: of those that are admitted and have no BoundDeviceID yet, in the order of their turn.

    verdicts: by uid. occupy: what shall happen to occupy pods, by GPUID. limited: the namespaces of which MtgpuPods
    wait until they use fewer GPUIDs, on whichever node.
    """

    holdings: tuple[Holding, ...]
    verdicts: Mapping[str, Verdict]
    occupy: tuple[Create | Delete, ...]
    limited: frozenset[str]


def plan(seen: Seen) -> Plan:
    seen = replace(seen, pods=tuple(sorted(seen.pods, key=lambda pod: pod.turn)))
    ledger = account(seen)
    degraded = _degraded(seen, ledger)
    of_gpuid = {pod.gpuid: _to_others(degraded[pod.uid]) for pod in seen.pods if pod.uid in degraded}
    admission = Admission(seen, ledger, of_gpuid)
    verdicts = {pod.uid: _verdict(seen, pod, admission, degraded.get(pod.uid)) for pod in seen.pods}
    for broken in seen.broken:
        said = None if broken.deleting else Said(FALSE, "Invalid", broken.problems)
        verdicts[broken.uid] = _with_deletion(Verdict(said), seen, broken.uid, deleting=broken.deleting)
    holdings = tuple(admission.admitted[pod.uid] for pod in seen.pods if pod.uid in admission.admitted)
    return Plan(holdings, verdicts, tuple(_occupy(seen, ledger, admission.pending)), frozenset(admission.limited))


def _degraded(seen: Seen, ledger: Ledger) -> dict[str, Said]:
    """What is wrong with the cards of those that have one, by uid. Nobody is moved for it."""
    found: dict[str, Said] = {}
    cards: dict[str, str] = {}
    for pod in filter(seen.holds, seen.pods):
        uuid = seen.card_of(pod)
        why = _wrong(seen, ledger, pod, cards.setdefault(pod.gpuid, uuid)) if seen.present else None
        if why is not None:
            found[pod.uid] = why
    return found


def _to_others(said: Said) -> Said:
    """Return what is said of it to MtgpuPods of other namespaces, which must not learn the names of its pods."""
    return replace(said, message="another pod is on its card") if said.reason == "CardShared" else said


def _wrong(seen: Seen, ledger: Ledger, pod: MtgpuPod, first: str) -> Said | None:
    """first: the card of whoever of its GPUID came first."""
    uuid, occupy = seen.card_of(pod), seen.occupies.get(pod.gpuid)
    card = seen.card(uuid)
    if occupy and not occupy.ours:
        return replace(name_taken(seen.node, pod.gpuid), status=TRUE)
    if card is None:
        return Said(TRUE, "CardMissing", f"its card {uuid} is not among those of node {seen.node}")
    if uuid != first:
        return Said(TRUE, "OtherCard", f"others of GPUID {pod.gpuid} are on card {first}, it is on {uuid}")
    if occupy and occupy.alive and occupy.card not in ("", uuid):
        return Said(TRUE, "OtherCard", f"the occupy pod of GPUID {pod.gpuid} has card {occupy.card}, not {uuid}")
    others = strangers(seen, ledger, pod.gpuid, card)
    if others:
        own = [other.key for other in others if other.namespace == pod.namespace]
        return Said(TRUE, "CardShared", f"{own[0] if own else 'a pod of another namespace'} is on its card {uuid} too")
    if not card.healthy:
        return Said(TRUE, "CardUnhealthy", f"its card {card.index} ({uuid}) is unhealthy")
    return None


def _verdict(seen: Seen, pod: MtgpuPod, admission: Admission, degraded: Said | None) -> Verdict:
    if pod.deleting:
        verdict = Verdict()
    elif seen.holds(pod):
        verdict = _bound(seen, pod, degraded)
    elif pod.ended:
        verdict = Verdict(Said(FALSE, "Ended", f"it has ended ({pod.phase}) and its share is free again"))
    elif pod.uid in admission.admitted:
        verdict = _admitted(seen, pod, admission.admitted[pod.uid])
    else:
        verdict = Verdict(admission.waiting[pod.uid])
    return _with_deletion(verdict, seen, pod.uid, deleting=pod.deleting)


def _bound(seen: Seen, pod: MtgpuPod, degraded: Said | None) -> Verdict:
    uuid = seen.card_of(pod)
    card = seen.card(uuid)
    bound = Said(TRUE, "Bound", f"it has card {card.index} ({uuid})" if card else f"it has card {uuid}")
    if not seen.present:
        bound = Said(UNKNOWN, "NodeNotFound", f"there is no node {seen.node}")
    made = seen.made.get(pod.uid)
    created = _created(seen, pod, made, degraded)
    wrong = degraded or (Said(FALSE, "AsBound", "its GPUID has the card that it was given") if seen.present else None)
    return Verdict(bound, created, wrong, "" if pod.bound else uuid, make=created is None, card=card)


def _created(seen: Seen, pod: MtgpuPod, made: Made | None, degraded: Said | None) -> Said | None:
    """What is to be said of the Pod of one that has its card; None: the Pod shall be made."""
    occupy = seen.occupies.get(pod.gpuid)
    if made is not None:
        if made.deleting and not pod.ended:
            return Said(FALSE, "PodTerminating", "its Pod is being deleted; it is made again")
        return Said(TRUE, "PodCreated", f"its Pod was made (uid {made.uid})")
    if not seen.present:
        return Said(FALSE, "NodeNotFound", f"there is no node {seen.node}")
    if pod.uid in seen.conflicts:
        return conflict(pod)
    if seen.unschedulable:
        return Said(FALSE, "NodeUnschedulable", f"node {seen.node} is cordoned")
    if pod.uid in seen.untolerated:
        return tainted(seen, pod)
    if pod.namespace in seen.held_up:
        return held_up()
    if degraded:
        return Said(FALSE, "Degraded", degraded.message)
    if not (occupy and occupy.running and occupy.card == seen.card_of(pod)):
        return Said(FALSE, "OccupyPodNotRunning", _awaited(pod, occupy))
    return None


def _admitted(seen: Seen, pod: MtgpuPod, held: Holding) -> Verdict:
    """With a share of a card: it is bound as soon as the GPUID's occupy pod runs on that card."""
    occupy = seen.occupies.get(pod.gpuid)
    card = seen.card(occupy.card) if occupy and occupy.running and occupy.card else None
    if card is None or not held.is_known_on(card):
        return Verdict(Said(FALSE, "Occupying", _awaited(pod, occupy)))
    return replace(_bound(seen, replace(pod, bound=card.uuid), None), bind=card.uuid)


def _awaited(pod: MtgpuPod, occupy: Occupy | None) -> str:
    if occupy and occupy.running:
        return f"the occupy pod of GPUID {pod.gpuid} runs; on which card, the node has not told yet"
    text = f"the occupy pod of GPUID {pod.gpuid} does not run yet"
    return f"{text}: {occupy.message}" if occupy and occupy.message else text


def _with_deletion(verdict: Verdict, seen: Seen, uid: str, *, deleting: bool) -> Verdict:
    made = seen.made.get(uid)
    if made is None:
        return replace(verdict, finish=deleting)
    lost = not seen.present and (deleting or not made.ended)
    return replace(verdict, delete=lost or (deleting and not made.deleting), force=lost)


def _occupy(seen: Seen, ledger: Ledger, pending: set[str]) -> Iterator[Create | Delete]:
    """Each GPUID in use has an occupy pod, and none else has: one that nobody needs is swept."""
    users = [h for h in ledger.holdings(seen.node) if h.gpuid and not h.occupies]
    needed = {h.gpuid for h in users} | pending
    going = {pod.uid for pod in seen.pods if pod.deleting} | {broken.uid for broken in seen.broken if broken.deleting}
    wanted = {h.gpuid for h in users if h.uid not in going and _can_come(seen, h)}
    for gpuid in sorted(needed | set(seen.occupies)):
        occupy = seen.occupies.get(gpuid)
        if occupy is None:
            if gpuid in wanted and seen.present and not seen.unschedulable:
                yield Create(gpuid)
        elif occupy.ours and not seen.present:
            yield Delete(gpuid, occupy.uid, force=True)
        elif occupy.ours and not occupy.deleting and (occupy.ended or gpuid not in needed):
            yield Delete(gpuid, occupy.uid)


def _can_come(seen: Seen, user: Holding) -> bool:
    """Whether the occupy pod could get its user's card: without that it would take another one."""
    return all(s.card is None for s in user.shares) or any(user.is_known_on(c) and c.healthy for c in seen.cards)
