"""What pods hold, derived from records, reservations and what the kubelet itself gave out.

`Holdings` is the only one that writes the ledger. What it writes follows from what the API server says, in whatever
order that came; only reservations are this process's own.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from mgpu import dialects
from mgpu.dialects import mtgpu
from mgpu.kube.events import pod_reference
from mgpu.model.cards import GPU
from mgpu.model.device_checkpoints import OTHERS
from mgpu.model.errors import BadObject
from mgpu.model.groups import where
from mgpu.model.ledger import Holding, Ledger, Share, absent, shares_of, unknown_shares
from mgpu.model.node_slices import LABEL
from mgpu.model.pods import Pod
from mgpu.model.slice_names import RESOURCE_PREFIX, mode_of, place_of, slice_named
from scheduler.cluster.events import HoldingsChanged, ObjectWarning, PodUndecided, Publisher
from scheduler.cluster.gpu_pods import GpuPod, occupies, recorded, shares_unknown
from scheduler.cluster.nodes import Nodes
from scheduler.cluster.pods import Pods
from scheduler.cluster.remnants import Remnants
from scheduler.cluster.reservations import Reservation, Reservations
from scheduler.engine import nvidia_plugin


class _OtherPod(NamedTuple):
    """A pod without a GPU request, or one of which only the UID is known. The kubelet may have given it cards."""

    namespace: str = ""
    name: str = ""
    ended: bool = False
    gpuid: str = ""
    node: str = ""


class Holdings:
    """Part of the ClusterCache, which holds its lock around every call. It reads from `nodes`, `pods`, `reservations`.

    It publishes HoldingsChanged with every change of the ledger, and PodUndecided for each pod that is bound without
    cards and has not started.
    """

    def __init__(
        self,
        nodes: Nodes,
        pods: Pods,
        reservations: Reservations,
        events: Publisher,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nodes = nodes
        self._pods = pods
        self._reservations = reservations
        self._events = events
        self._other_pods: dict[str, _OtherPod] = {}
        self._undecided: set[str] = set()
        self.ledger = Ledger()
        self.remnants = Remnants(events, clock)

    def undecided(self) -> tuple[str, ...]:
        """Return the UIDs of the pods that are bound without cards and have not started, by the names of the pods."""
        known = filter(None, map(self._pods.get, self._undecided))
        return tuple(pod.pod.uid for pod in sorted(known, key=lambda known: (known.pod.key, known.pod.uid)))

    def is_undecided(self, uid: str) -> bool:
        """Return whether the pod is bound without cards and has not started."""
        return uid in self._undecided

    def publish_undecided_on(self, node: str) -> None:
        """Ask again for late binding decisions of the pods on this node: its cards have changed."""
        for uid in self._undecided:
            known = self._pods.get(uid)
            if known is not None and known.pod.node == node:
                self._events.publish(PodUndecided(uid))

    def has_cards(self, uid: str) -> bool:
        """Return whether the pod is bound and its cards have been decided."""
        held = self.ledger.holding(uid)
        return held is not None and held.bound and uid not in self._undecided

    def settle(self, known: GpuPod) -> None:
        """Make the ledger say of this pod what the API says of it."""
        pod, uid = known.pod, known.pod.uid
        self._undecided.discard(uid)
        if pod.ended:
            self.release(uid)
            self._hold_given(uid, pod.node)
            return
        if not pod.node:
            return  # what is reserved for it stays so: this may be an event from before the decision
        try:
            shares, unreadable = recorded(known), ""
        except BadObject as error:
            shares, unreadable = None, str(error)
        dialect, given = known.dialect, self._nodes.given(pod.node).get(uid, ())
        sliced = tuple(share for share in given if share.type != GPU)
        bare = shares is None and self._is_bare(known, unreadable)
        if shares is None and sliced:
            shares = ()
        elif (
            shares is None
            and not bare
            and (given or nvidia_plugin.chooses_cards(self._nodes.get(pod.node), known.request))
        ):
            dialect, shares = nvidia_plugin.NVIDIA, nvidia_plugin.held(known.request, given)
        if shares is None and (not dialects.has_run(pod, known.request) or (bare and self._is_late(known))):
            self._await_decision(known, unreadable)
            return
        unknown = () if bare else shares_unknown(known, recorded=bool(unreadable or known.finding))
        held = unknown if shares is None else shares
        # A slice that the node says it has is not free, whatever the record says.
        held = (*held, *(s for s in sliced if not any((s.type, s.card) == (t.type, t.card) for t in held)))
        holding = self._holding(known, dialect, held)
        if holding == self.ledger.holding(uid) and not pod.deleting:
            return  # most events; that it is being deleted matters to who is nominated there
        self.release(uid)
        self.hold(holding)
        if shares is None:
            self._warn_of_unknown(pod, unreadable, held)
        self._warn_of_split(known)
        if dialect != nvidia_plugin.NVIDIA:  # there ids of other resources' devices stand too
            self._warn_of_absent(pod, held)

    def _is_bare(self, known: GpuPod, unreadable: str) -> bool:
        """Return whether its node says that this pod, which has no record, runs without having been given anything.

        The kubelet starts a container whose resource its node does not offer (yet) without asking anybody, so that a
        pod with `nodeName` would hold cards that it does not have. Where the agent lists all pods that have cards
        without a record, one that is not listed has none; what it has all the same, the agent gives to nobody else. A
        pod that had a record, or that NVIDIA's plugin serves, counts as bare only once the agent names it.
        """
        given, node = self._nodes.given(known.pod.node), known.pod.node
        if known.pod.uid in given:
            return not given[known.pod.uid] and dialects.has_run(known.pod, known.request)
        if unreadable or known.finding or nvidia_plugin.chooses_cards(self._nodes.get(node), known.request):
            return False
        return OTHERS in given

    def _is_late(self, known: GpuPod) -> bool:
        """Return whether a pod that runs without having been given anything gets its cards now, or is failed.

        A container of it waits for its cards. Or it asks for slices alone, and its agent names it: while such a pod
        runs, the kubelet counts what it asks for, and fails pods that come for slices of that profile.
        """
        if known.request is None:
            return False
        named = known.pod.uid in self._nodes.given(known.pod.node)
        return dialects.waits(known.pod, known.request) or (named and not known.request.containers)

    def _holding(self, known: GpuPod, dialect: str, shares: tuple[Share, ...]) -> Holding:
        pod, gpuid = known.pod, occupies(known.pod, known.pod.node)
        on_cards = (*shares, *self._cards_of(shares, pod.node))
        who = (pod.uid, pod.namespace, pod.name, pod.node)
        return Holding(*who, dialect, on_cards, constraints=known.constraints, gpuid=gpuid, occupies=bool(gpuid))

    def settle_all_on(self, node: str) -> None:
        for known in self._pods.on(node):
            self.settle(known)

    def follow_given(self, uid: str, node: str) -> None:
        """Follow what the node says of the cards that the kubelet gave to this pod.

        A node is believed about pods of its own alone: with its agent's token anybody may write of the pods of others.
        """
        held = self.ledger.holding(uid)
        known = self._pods.get(uid)
        if known is not None:
            self.settle(known)
        elif held is not None and (held.node != node or held.dialect == mtgpu.NAME):
            return  # another node's, or the uid of an MtgpuPod, which no Pod has
        elif self._reservations.get(uid) is None:
            self.release(uid)
            if self._other_pods.get(uid, _OtherPod()).node in ("", node):
                self._hold_given(uid, node)

    def follow_other_pod(self, pod: Pod, uid: str) -> None:
        """A pod that asks for nothing of ours may have been given cards all the same."""
        node = sys.intern(pod.node)
        self._other_pods[uid] = _OtherPod(pod.namespace, pod.name, pod.ended, occupies(pod, node), node)
        self._hold_given(uid, pod.node)

    def gone(self, uid: str, known: GpuPod | None) -> None:
        """What the pod was given is held until its node says otherwise. known: the pod, if it asked for GPU."""
        stranger, pod = self._other_pods.pop(uid, _OtherPod()), known.pod if known else None
        if pod and pod.node and not pod.ended and not occupies(pod, pod.node):
            self.remnants.deleted(uid, pod.namespace, pod.name, pod.node)
        self._hold_given(uid, pod.node if pod else stranger.node)

    def reserve(self, decision: Reservation) -> None:
        """Hold what was decided, in place of what was reserved for the pod before."""
        request = decision.request
        dialect, shares = request.dialect, shares_of(request, decision.placement)
        if nvidia_plugin.chooses_cards(self._nodes.get(decision.node), request):
            dialect, shares = nvidia_plugin.NVIDIA, unknown_shares(request)
        who, gpuid = (decision.uid, decision.namespace, decision.name, decision.node), decision.gpuid
        self.hold(Holding(*who, dialect, shares, False, request.constraints, gpuid, bool(gpuid)))
        self._reservations.put(decision)

    def forget(self, uid: str) -> None:
        self.release(uid)
        self._undecided.discard(uid)

    def release(self, uid: str) -> None:
        self._reservations.drop(uid)
        before = self.ledger.release(uid)
        self.remnants.release(uid)
        if before is not None:
            self._events.publish(HoldingsChanged(before.node, before.constraints.same_card))

    def hold(self, holding: Holding) -> None:
        """In place of what its uid held."""
        before = self.ledger.holding(holding.uid)
        if before is not None:
            self._events.publish(HoldingsChanged(before.node, before.constraints.same_card))
        self.ledger.hold(holding)
        self._events.publish(HoldingsChanged(holding.node, holding.constraints.same_card))

    def _hold_given(self, uid: str, node: str) -> None:
        """Cards until the pod has ended, slices until the node says that they are free."""
        who = self._other_pods.get(uid, _OtherPod())
        known = self._pods.get(uid)
        if known is not None and uid not in self._other_pods:
            who = _OtherPod(known.pod.namespace, known.pod.name, known.pod.ended)
        shares = tuple(s for s in self._nodes.given(node).get(uid, ()) if not (who.ended and s.type == GPU))
        if shares:
            self.remnants.hold(uid, node)
            gpuid, nvidia = who.gpuid, nvidia_plugin.NVIDIA
            self.hold(Holding(uid, who.namespace, who.name, node, nvidia, shares, gpuid=gpuid, occupies=bool(gpuid)))

    def _await_decision(self, known: GpuPod, unreadable: str) -> None:
        """A pod that is bound without a readable record and has not started: its cards are decided late."""
        pod, uid = known.pod, known.pod.uid
        decision = self._reservations.get(uid)
        if decision is None or decision.node != pod.node:
            self.release(uid)
            if unreadable and known.request is not None:
                # Until they are decided, whoever wrote the record may rely on any of them.
                shares = unknown_shares(known.request)
                who = (uid, pod.namespace, pod.name, pod.node)
                self.hold(Holding(*who, known.request.dialect, shares, constraints=known.constraints))
        if unreadable:
            self._warn(pod, "UnreadableRecord", f"the record of its cards cannot be read: {unreadable}")
        if not pod.deleting:
            self._undecided.add(uid)
            self._events.publish(PodUndecided(uid))

    def _cards_of(self, shares: Iterable[Share], node: str) -> Iterator[Share]:
        """The cards of the slices among these where the node's cards are not cut so (any more): all of each."""
        known = self._nodes.get(node)
        mode = known.labels.get(LABEL) if known else None
        for share in shares:
            name = slice_named(RESOURCE_PREFIX + share.type)
            if name and mode_of(name) != mode:
                card = place_of(share.card)[0] if isinstance(share.card, int) else None
                yield Share(share.container, card, whole=True, stage=share.stage)

    def _warn_of_unknown(self, pod: Pod, unreadable: str, held: Sequence[Share]) -> None:
        why = f": {unreadable}" if unreadable else ""
        message = "without a readable record of its cards; its share is held on every card there"
        if not held:
            message = (
                "without a record of its cards, and was given none; it holds nothing. Make it anew, without nodeName"
            )
        self._warn(pod, "UnknownCards", f"runs on {pod.node} {message}{why}")

    def _warn_of_split(self, known: GpuPod) -> None:
        """No decision leads there, but a record can: one written by hand, or an account that was lost."""
        group = known.constraints.same_card
        seats = self.ledger.seats(group)
        if len(seats) > 1:
            message = f"{group} is on {where(seats)}; its pods may join it there, and on no further card"
            self._warn(known.pod, "GroupSplit", message)

    def _warn_of_absent(self, pod: Pod, shares: Sequence[Share]) -> None:
        """Where the node's cards are known: at the start pods may come before them."""
        cards = self.ledger.nodes().get(pod.node, ())
        names = ", ".join(absent(shares, cards)) if cards else ""
        if names:
            text = f"its record names {names}, which {pod.node} does not have; held as soon as it does"
            self._warn(pod, "UnknownCards", text)

    def _warn(self, pod: Pod, reason: str, message: str) -> None:
        self._events.publish(ObjectWarning(pod_reference(pod.namespace, pod.name, pod.uid), reason, message))
