"""What MtgpuPods hold: the bound ones as the API says it, those on their way to a card as the controller decided.

A bound one holds always, whatever the card's capacity. What the controller admits is in memory only, until the watch
shows it bound; whoever leads next decides it again (docs/design/mtgpu.md, "Controller").
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mgpu.dialects import mtgpu
from mgpu.dialects.record_verification import Finding, RecordVerifier
from mgpu.kube.events import pod_reference
from mgpu.model.cards import CardState
from mgpu.model.errors import BadObject
from mgpu.model.ledger import Holding, Share
from mgpu.model.pods import Node, Pod
from mgpu.model.raw_objects import table_at
from scheduler.cluster.gpuids import Bound, Used
from scheduler.cluster.holdings import Accounts

Raw = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class MtgpuNode:
    """A node at one moment, as the controller of MtgpuPods needs it. version: moves with every change, as a View's.

    cards: the GPUs that are not cut. held: what anybody holds of them. admitted: by uid what MtgpuPods were admitted to
    that are not bound yet; it is among what is held. occupied: by the uid of an occupy pod the UUID of its card, where
    that is known. ours: the indexes of the cards that mgpu gave out and that nothing keeps from NVIDIA's plugin; where
    that chooses the cards, the occupy pod of a new GPUID is refused while there are any. remnants: by uid the GPUIDs of
    Pods that were deleted and still run.
    """

    node: Node | None
    version: int
    cards: tuple[CardState, ...]
    held: tuple[Holding, ...]
    ours: tuple[int, ...]
    admitted: Mapping[str, Holding]
    occupied: Mapping[str, str]
    remnants: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Own:
    """The Pod of an MtgpuPod. owner: the uid of that, "" where the owner was taken off and no seal names it.

    holding: what it says itself that it has; None: it says nothing, or is nobody's.
    """

    namespace: str
    name: str
    node: str
    owner: str
    ended: bool
    holding: Holding | None


@dataclass(frozen=True, slots=True)
class _Seen:
    """An MtgpuPod as the API has it; holding None: it is not bound."""

    ended: bool
    pod_uid: str
    holding: Holding | None


class MtgpuPods:
    """Thread-safe, by its owner's lock. Its accounts follow from the MtgpuPods and Pods that there are, in whatever
    order they came, and from what is admitted.

    version: that of a node. nodes, accounts, ours: its owner's. freed: told of each node where something came free.
    again: told of each node whose MtgpuPods wait for something of their namespace, once it may be over: that it uses
    fewer GPUIDs, or that its pods that were deleted by force have ended.
    """

    def __init__(
        self,
        lock: threading.RLock,
        nodes: Mapping[str, Node],
        accounts: Accounts,
        version: Callable[[str], int],
        ours: Callable[[str], tuple[int, ...]],
        freed: Callable[[str], None],
        records: RecordVerifier,
        warn: Callable[[dict[str, Any], str, str], None],
        again: Callable[[str], None],
    ) -> None:
        self._records, self._warn, self._tell_again = records, warn, again
        self._used = Used()
        # Namespace → the nodes whose MtgpuPods wait for it, for either reason.
        self._limited: dict[str, set[str]] = {}
        self._held_up: dict[str, set[str]] = {}
        self._findings: dict[str, Finding] = {}  # Pod → why it is no MtgpuPod's
        self._lock, self._nodes, self._accounts, self._version = lock, nodes, accounts, version
        self._ours, self._tell_freed = ours, freed
        self._seen: dict[str, _Seen] = {}
        self._own: dict[str, _Own] = {}
        self._pods_of: dict[str, set[str]] = {}  # MtgpuPod → the Pods that name it as their owner
        self._of_pod: dict[str, set[str]] = {}  # Pod → the MtgpuPods whose status names it
        self._admitted: dict[str, Holding] = {}
        accounts.remnants.subscribe(lambda namespace: self._look_again(self._held_up, namespace))

    # Fed by the watches.

    def changed(self, raw: Raw) -> None:
        uid, seen = raw["metadata"]["uid"], _seen(raw)
        with self._lock:
            self._forget(uid)
            self._seen[uid] = seen
            _add(self._of_pod, seen.pod_uid, uid)
            if seen.ended or seen.holding:
                self._admitted.pop(uid, None)
            self._settle(uid)

    def gone(self, raw: Raw) -> None:
        uid = raw["metadata"]["uid"]
        with self._lock:
            self._forget(uid)
            self._admitted.pop(uid, None)
            self._settle(uid)

    def pod_changed(self, pod: Pod, raw: Raw) -> None:
        own = _own(pod, raw)
        finding = self._records.finding_of_mtgpu(raw) if own is not None else None
        with self._lock:
            if finding is not None:
                # It holds nothing, and keeps nothing held: a user may name any MtgpuPod as the owner of a Pod.
                own = None
                if self._findings.get(pod.uid) != finding and not pod.ended:
                    reference = pod_reference(pod.namespace, pod.name, pod.uid)
                    self._warn(reference, finding.reason, finding.message)
                self._findings[pod.uid] = finding
            else:
                self._findings.pop(pod.uid, None)
            if own is None:
                self._drop_own(pod.uid)
            elif own != self._own.get(pod.uid):
                self._drop_own(pod.uid)
                self._own[pod.uid] = own
                _add(self._pods_of, own.owner, pod.uid)
                self._settle_of_pod(pod.uid, own)

    def pod_gone(self, uid: str) -> None:
        """Remember it if it was deleted before it had ended: its containers may run on.

        On a node that is gone the controller itself deletes Pods by force. That is nothing that a user has to wait for.
        """
        with self._lock:
            self._findings.pop(uid, None)
            own = self._own.get(uid)
            if own is not None and not own.ended and own.node in self._nodes:
                gpuid = own.holding.gpuid if own.holding is not None else ""
                self._accounts.remnants.deleted(uid, own.namespace, own.name, own.node, gpuid)
            self._drop_own(uid)

    def _drop_own(self, uid: str) -> None:
        with self._lock:
            own = self._own.pop(uid, None)
            if own is None:
                return
            _discard(self._pods_of, own.owner, uid)
            self._settle_of_pod(uid, own)

    # For the controller.

    def on(self, node: str) -> MtgpuNode:
        with self._lock:
            ledger = self._accounts.ledger
            cards, held = ledger.cards(node), ledger.holdings(node)
            on = {h.uid: [s.card.uuid for s in cards if h.is_known_on(s.card)] for h in held if h.occupies and h.bound}
            return MtgpuNode(
                self._nodes.get(node),
                self._version(node),
                cards,
                held,
                self._ours(node),
                {uid: self._admitted[uid] for uid in self._admitted_on(node)},
                {uid: uuids[0] for uid, uuids in on.items() if uuids},
                {h.uid: gpuid for h in held if (gpuid := self._accounts.remnants.gpuid(h.uid))},
            )

    def elsewhere(self, namespaces: Iterable[str], node: str) -> Mapping[str, int]:
        """Return how many GPUIDs each of these namespaces uses on other nodes than this one."""
        with self._lock:
            return self._used.elsewhere(namespaces, node)

    def held_up(self, namespaces: Iterable[str], node: str) -> Mapping[str, float]:
        """Return those of the namespaces whose pods were deleted by force and still run.

        For each, the seconds after which that no longer matters. The node is told `again` if it is over before.
        """
        with self._lock:
            seconds = {name: self._accounts.remnants.seconds(name) for name in set(namespaces)}
            found = {name: left for name, left in sorted(seconds.items()) if left > 0}
            for name in found:
                self._held_up.setdefault(name, set()).add(node)
            return found

    def admit(
        self,
        node: str,
        holdings: Iterable[Holding],
        version: int,
        bound: Bound | None = None,
        limited: Iterable[str] = (),
    ) -> bool:
        """From now on exactly these are admitted to cards of this node, but for those that are bound or ended by now.

        Return False where the node has changed since `version`, a namespace uses more or fewer GPUIDs of other nodes
        than `bound` says, or one of the MtgpuPods is not known here (yet, or any more). Nothing is admitted then; look
        again. limited: the namespaces of which MtgpuPods wait until they use fewer GPUIDs.
        """
        wanted = {held.uid: held for held in holdings}
        with self._lock:
            if self._version(node) != version or not wanted.keys() <= self._seen.keys():
                return False
            if bound is not None and self._used.elsewhere(bound.elsewhere, node) != bound.elsewhere:
                return False
            for uid in self._admitted_on(node):
                if uid not in wanted:
                    self._withdraw(uid)
            for uid, held in sorted(wanted.items()):
                if not (self._seen[uid].ended or self._seen[uid].holding):
                    self._admitted[uid] = held
                    self._settle(uid)
            for namespace in limited:
                self._limited.setdefault(namespace, set()).add(node)
            return True

    def drop_admissions(self) -> None:
        """They were decided in an earlier term; another leader may have decided otherwise meanwhile."""
        with self._lock:
            for uid in sorted(self._admitted):
                self._withdraw(uid)

    def _withdraw(self, uid: str) -> None:
        del self._admitted[uid]
        self._settle(uid)

    def _admitted_on(self, node: str) -> list[str]:
        return sorted(uid for uid, held in self._admitted.items() if held.node == node)

    def _settle(self, uid: str) -> None:
        wanted, before = self._account(uid), self._accounts.ledger.holding(uid)
        if wanted == before:
            return
        if uid not in self._seen and before is not None and before.dialect != mtgpu.NAME:
            return  # what another Pod holds: who makes a Pod names any uid as its owner's
        if wanted is None:
            self._accounts.release(uid)
        else:
            self._accounts.hold(wanted)
        namespace = self._used.put(uid, wanted)
        if namespace is not None:
            self._look_again(self._limited, namespace)
        if before is not None:
            self._tell_freed(before.node)

    def _look_again(self, waiting: dict[str, set[str]], namespace: str) -> None:
        """The next look at each of these nodes finds out whether any MtgpuPods still wait there."""
        for node in sorted(waiting.pop(namespace, ())):
            self._tell_again(node)

    def _settle_of_pod(self, uid: str, own: _Own) -> None:
        for of in sorted({own.owner, *self._of_pod.get(uid, ())} - {""}):
            self._settle(of)

    def _account(self, uid: str) -> Holding | None:
        seen, running = self._seen.get(uid), [own for own in self._pods(uid) if not own.ended]
        if seen and seen.holding and (running or not seen.ended):
            return seen.holding
        # What its Pod has outlives it: a finalizer that was taken off by hand, a status that was lost.
        of_pod = next((own.holding for own in running if own.holding and own.owner == uid), None)
        return of_pod or self._admitted.get(uid)

    def _pods(self, uid: str) -> Iterator[_Own]:
        named = {self._seen[uid].pod_uid} if uid in self._seen else set()
        return (self._own[of] for of in sorted(self._pods_of.get(uid, set()) | named) if of in self._own)

    def _forget(self, uid: str) -> None:
        before = self._seen.pop(uid, None)
        if before is not None:
            _discard(self._of_pod, before.pod_uid, uid)


def _add(index: dict[str, set[str]], key: str, value: str) -> None:
    if key:
        index.setdefault(key, set()).add(value)


def _discard(index: dict[str, set[str]], key: str, value: str) -> None:
    if key:
        index[key].discard(value)
        if not index[key]:
            del index[key]


def _seen(raw: Raw) -> _Seen:
    try:
        pod = mtgpu.read_mtgpupod(raw)
    except BadObject:
        return _unreadable(raw)
    return _Seen(pod.ended, pod.pod_uid, mtgpu.holding(pod, pod.bound) if pod.bound else None)


def _unreadable(raw: Raw) -> _Seen:
    """How much it has of its card nobody knows: all of it is taken for its own."""
    meta, spec, status = raw["metadata"], table_at(raw, "spec"), table_at(raw, "status")
    node, card, pod_uid = (
        spec.get("nodeName"),
        status.get("BoundDeviceID"),
        table_at(status, "PodObjectMeta").get("uid"),
    )
    held = None
    if isinstance(node, str) and node and isinstance(card, str) and card:
        held = Holding(meta["uid"], meta["namespace"], meta["name"], node, mtgpu.NAME, (Share("", card, whole=True),))
    return _Seen(status.get("phase") in ("Succeeded", "Failed"), pod_uid if isinstance(pod_uid, str) else "", held)


def _own(pod: Pod, raw: Raw) -> _Own | None:
    """None: it is no Pod of an MtgpuPod. Nobody else's may have such annotations (the webhook denies them)."""
    owner = mtgpu.mtgpupod_of(raw)
    if not owner and mtgpu.GPUID not in pod.annotations:
        return None
    return _Own(pod.namespace, pod.name, pod.node, owner, pod.ended, mtgpu.holding_of_pod(pod, raw))
