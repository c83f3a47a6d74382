"""Which MtgpuPods of a node get a share of which card, and why the others wait.

Source: docs/design/mtgpu.md, "Meaning of a GPUID".
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mgpu.dialects.mtgpu import NAME, MtgpuPod, holding, occupy_name
from mgpu.model.cards import Card, CardState
from mgpu.model.gpu_requests import CardRefusal, ContainerRequest, RejectionKind, cards_rejection, whole_cards
from mgpu.model.ledger import Holding, Ledger
from scheduler.cluster.gpuids import Used
from scheduler.engine import nvidia_plugin
from scheduler.engine.refusals import refusal
from scheduler.mtgpupods.observed_node import Seen
from scheduler.mtgpupods.outcome import FALSE, Said

_WHOLE = whole_cards("", 1)


def account(seen: Seen) -> Ledger:
    """What is held on the node without the MtgpuPods that have no card yet: those may be decided anew."""
    ledger = Ledger()
    ledger.set_cards(seen.node, seen.cards)
    for held in seen.held:
        ledger.hold(held)
    for pod in seen.pods:
        ledger.release(pod.uid)
        if seen.holds(pod):
            ledger.hold(holding(pod, seen.card_of(pod)))
    return ledger


def strangers(seen: Seen, ledger: Ledger, gpuid: str, card: Card) -> tuple[Holding, ...]:
    """Return those that are on the card of a GPUID and must not be there.

    An MtgpuPod that cannot be read may well be of it. A deleted Pod of this GPUID that still runs is no stranger:
    otherwise one user of a GPUID could stop its users of other namespaces, by deleting a Pod by force.
    """
    held = (h for h in ledger.holdings(seen.node) if h.gpuid != gpuid and (h.gpuid or h.dialect != NAME))
    return tuple(h for h in held if h.is_known_on(card) and seen.remnants.get(h.uid) != gpuid)


class Admission:
    """admitted: by uid, what those hold that have no BoundDeviceID yet. waiting: why the others have no card.

    pending: the GPUIDs whose occupy pod has a card that nobody has told yet, which is waited for.
    limited: the namespaces that use as many GPUIDs as they may, and of which MtgpuPods wait for that reason.
    It holds in `ledger` (by `account`) what it admits. degraded: the GPUIDs that are not in order.
    """

    def __init__(self, seen: Seen, ledger: Ledger, degraded: Mapping[str, Said]) -> None:
        self._seen, self._ledger, self._degraded = seen, ledger, degraded
        self.admitted: dict[str, Holding] = {}
        self.waiting: dict[str, Said] = {}
        self.pending: set[str] = set()
        self.limited: set[str] = set()
        self._used = Used(ledger.holdings(seen.node))
        self._first: dict[tuple[str, str], MtgpuPod] = {}
        for pod in _in_turn(seen):
            found = self._barred(pod) or self._found(pod)
            if isinstance(found, Said):
                self.waiting[pod.uid] = found
            else:
                self.admitted[pod.uid] = found
                ledger.hold(found)
                self._used.put(pod.uid, found)

    def _barred(self, pod: MtgpuPod) -> Said | None:
        """What has nothing to do with cards."""
        seen, occupy = self._seen, self._seen.occupies.get(pod.gpuid)
        if not seen.present:
            return Said(FALSE, "NodeNotFound", f"there is no node {seen.node}")
        if seen.unschedulable:
            return Said(FALSE, "NodeUnschedulable", f"node {seen.node} is cordoned")
        if pod.uid in seen.untolerated:
            return tainted(seen, pod)
        if pod.uid in seen.conflicts:
            return conflict(pod)
        if occupy and not occupy.ours:
            return name_taken(seen.node, pod.gpuid)
        if pod.gpuid in self._degraded:
            return Said(FALSE, "Degraded", f"nobody joins GPUID {pod.gpuid}: {self._degraded[pod.gpuid].message}")
        if occupy and not occupy.alive and not self._users(pod.gpuid):
            return Said(FALSE, "Retiring", f"GPUID {pod.gpuid} is being retired; it gets a new card then")
        if pod.namespace in seen.held_up and pod.uid not in seen.admitted:
            return held_up()
        return self._one_too_many(pod)

    def _one_too_many(self, pod: MtgpuPod) -> Said | None:
        """Return why its namespace may not use one more GPUID; None where it may, or uses this one already."""
        bound, name = self._seen.bound, pod.namespace
        if bound is None or self._used.uses(pod) or self._used.count(name) + bound.elsewhere.get(name, 0) < bound.most:
            return None
        self.limited.add(name)
        # Without the number in use, which changes while this one waits: each change would be a write of its status.
        rule = f"namespace {name} uses as many GPUIDs as it may (dialects.mtgpu.maxGPUIDsPerNamespace: {bound.most})"
        remedy = f"name a GPUID that it uses on node {pod.node}, or delete the MtgpuPods of another GPUID"
        return Said(FALSE, "TooManyGPUIDs", f"{rule}; {remedy}")

    def _found(self, pod: MtgpuPod) -> Holding | Said:
        """First come first served among those of a GPUID and namespace, except for one that will never fit.

        One that waits holds up no other namespace: anybody may create an MtgpuPod that names any GPUID.
        """
        line = pod.gpuid, pod.namespace
        first = self._first.get(line)
        if first is not None and first.turn < pod.turn:
            # Without the name of the first one: it would change the status of all of them each time that one goes.
            return _exceeded(f"MtgpuPods of its namespace that came before it wait for GPUID {pod.gpuid} too")
        states = self._ledger.cards(self._seen.node)
        its = [state for state in states if state.gpuid == pod.gpuid]
        found = self._joined(pod, its) if its else self._started(pod, states)
        if isinstance(found, Said) and any(_never(pod, state.card) is None for state in its or states):
            self._first[line] = pod if first is None else min(first, pod, key=lambda pod: pod.turn)
        return found

    def _users(self, gpuid: str) -> list[Holding]:
        return [h for h in self._ledger.holdings(self._seen.node) if h.gpuid == gpuid and not h.occupies]

    def _joined(self, pod: MtgpuPod, its: Sequence[CardState]) -> Holding | Said:
        card = its[0].card
        if len(its) > 1 or strangers(self._seen, self._ledger, pod.gpuid, card):
            return Said(FALSE, "Degraded", f"GPUID {pod.gpuid} has no card of its own: look at {card.uuid}")
        refused = _never(pod, card)
        if refused is None:
            refused = refusal(replace(its[0], gpuid=""), _share(pod), 0)
            if refused is not None and self._of_others(pod):
                text = "less of it is free than this MtgpuPod asks for; MtgpuPods of other namespaces hold shares of it"
                refused = replace(refused, reason=text)
        if refused is not None:
            return _exceeded(f"card {card.index}, which is GPUID {pod.gpuid}'s: {refused.reason}")
        return holding(pod, card.uuid, bound=False)

    def _of_others(self, pod: MtgpuPod) -> bool:
        """Return whether the GPUID's users are all of other namespaces: whoever guesses it must not learn more."""
        users = self._users(pod.gpuid)
        return bool(users) and all(user.namespace != pod.namespace for user in users)

    def _started(self, pod: MtgpuPod, states: Sequence[CardState]) -> Holding | Said:
        """A card for a GPUID that has none as far as anybody can tell."""
        seen, occupy, before = self._seen, self._seen.occupies.get(pod.gpuid), self._seen.admitted.get(pod.uid)
        if occupy and occupy.card:
            return Said(FALSE, "Degraded", f"the occupy pod of GPUID {pod.gpuid} has no card of its own: {occupy.card}")
        if occupy and self._ledger.holding(occupy.uid):
            self.pending.add(pod.gpuid)
            return before or Said(FALSE, "CardNotKnown", f"which card GPUID {pod.gpuid} has is not known yet")
        if self._users(pod.gpuid):
            return Said(FALSE, "CardNotKnown", f"which card GPUID {pod.gpuid} gets is not known yet")
        if seen.stock:
            return self._stock(pod, states)
        again = [state for state in states if before and before.is_known_on(state.card)]
        chosen = _chosen(pod, [*again, *states])
        return holding(pod, chosen.uuid, bound=False) if chosen else _exceeded(_none(pod, states))

    def _stock(self, pod: MtgpuPod, states: Sequence[CardState]) -> Holding | Said:
        """NVIDIA's plugin may take any free card: all must do, and none may be one that mgpu has shared out."""
        ours = nvidia_plugin.given_by_mgpu(self._ledger, self._seen.node)
        if ours:
            listed = ", ".join(map(str, ours))
            return _exceeded(f"NVIDIA's plugin could give out a card where pods of mgpu are ({listed})")
        idle = [state.card for state in states if state.idle and state.card.healthy]
        small = next((f"card {card.index}: {found.reason}" for card in idle if (found := _never(pod, card))), "")
        if small or not idle:
            return _exceeded(f"NVIDIA's plugin could give out {small}" if small else _none(pod, states))
        return holding(pod, None, bound=False)


def _in_turn(seen: Seen) -> list[MtgpuPod]:
    """Return those that have no card yet, in the order in which they are given one.

    Those with a reservation keep it. Of the others the namespaces take turns, beginning with those that have the fewest
    MtgpuPods with a card of this node; within a namespace, those that came first are first. So any number of MtgpuPods
    of one namespace does not take all the room that becomes free.
    """
    waiting = [pod for pod in sorted(seen.pods, key=lambda pod: pod.turn) if _has_none(seen, pod)]
    served = Counter(pod.namespace for pod in seen.pods if seen.holds(pod) or pod.uid in seen.admitted)
    rounds: dict[str, int] = {}
    for pod in waiting:
        if pod.uid not in seen.admitted:
            rounds[pod.uid] = served[pod.namespace]
            served[pod.namespace] += 1
    return sorted(waiting, key=lambda pod: (pod.uid in rounds, rounds.get(pod.uid, 0), pod.turn))


def _has_none(seen: Seen, pod: MtgpuPod) -> bool:
    return not (pod.deleting or pod.ended or seen.card_of(pod))


def _chosen(pod: MtgpuPod, states: Sequence[CardState]) -> Card | None:
    """The idle card that a new GPUID gets: the lowest that is large enough.

    Not by the placement engine: a whole ask has no size, and to every card policy each idle card taken is worth the
    same, so it would take the lowest too.
    """
    free = (s.card for s in states if not (_never(pod, s.card) or refusal(s, _WHOLE, 0)))
    return next(free, None)


def _none(pod: MtgpuPod, states: Sequence[CardState]) -> str:
    """Why no card is idle and large enough, in a few words per card."""
    if not states:
        return "the node has no GPU cards that pods could share"
    refusals = [_never(pod, s.card) or refusal(s, _WHOLE, 0) or _free(s.card) for s in states]
    return f"GPUID {pod.gpuid} needs a card of its own: {cards_rejection(refusals)}"


def _free(card: Card) -> CardRefusal:
    return CardRefusal(card.index, RejectionKind.OTHER, "free")


def _never(pod: MtgpuPod, card: Card) -> CardRefusal | None:
    """Why it does not fit this card even alone; None: it does, whatever the card's health."""
    return refusal(CardState(replace(card, healthy=True)), _share(pod), 0)


def _share(pod: MtgpuPod) -> ContainerRequest:
    return ContainerRequest("", core=pod.request, memory=pod.memory)


def _exceeded(message: str) -> Said:
    return Said(FALSE, "ResourceExceeded", message)


def tainted(seen: Seen, pod: MtgpuPod) -> Said:
    text = f"node {seen.node} has the taint {seen.untolerated[pod.uid]}, which it does not tolerate"
    return Said(FALSE, "NodeTainted", text)


def conflict(pod: MtgpuPod) -> Said:
    return Said(FALSE, "NameConflict", f"there is a Pod {pod.key} already, which was not made for it")


def held_up() -> Said:
    """Without the names of the pods: each change of them would be a write of the status of all that wait."""
    rule = "pods of its namespace were deleted by force and still run"
    return Said(FALSE, "DeletedPodsRunning", f"{rule}; its MtgpuPods get no cards and no Pods before these have ended")


def name_taken(node: str, gpuid: str) -> Said:
    text = f"kube-system has a Pod {occupy_name(node, gpuid)}, which mgpu did not make"
    return Said(FALSE, "OccupyNameConflict", text)
