"""What MtgpuPods hold: the bound ones as the API server says, the others what the controller admitted them to.

A bound MtgpuPod holds its share whatever the capacity of the card is. An admission is in memory only, until the
informer shows the MtgpuPod bound; the next leader decides it again (docs/design/mtgpu.md, "Controller").
"""

from collections.abc import Iterable, Iterator, Mapping
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
from scheduler.cluster.events import CardsFreed, MtgpuPodsAffected, ObjectWarning, Publisher, RemnantsEnded
from scheduler.cluster.gpuids import Bound, Used
from scheduler.cluster.holdings import Holdings
from scheduler.cluster.node_snapshots import NodeSnapshots
from scheduler.cluster.nodes import Nodes

Raw = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class MtgpuNode:
    """The cards of a node at one moment, as the controller of MtgpuPods needs them.

    Attributes:
        version: That of a NodeSnapshot.
        cards: The GPUs that are not partitioned.
        held: All holdings on them.
        admitted: By UID, what MtgpuPods were admitted to that are not bound yet; it is part of `held`.
        occupied: By the UID of an occupy pod, the UUID of its card, where that is known.
        ours: The indexes of the cards that mgpu gave out and that nothing keeps from NVIDIA's plugin. Where that plugin
            chooses the cards, the occupy pod of a new GPUID is refused while there are any.
        remnants: By UID, the GPUIDs of Pods that were deleted and still run.
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
class OwnPod:
    """The Pod of an MtgpuPod.

    Attributes:
        owner: The UID of the MtgpuPod, or "" where the owner reference was removed and no seal names the MtgpuPod.
        holding: What the Pod says that it has. None: it says nothing, or it was not made for any MtgpuPod.
    """

    namespace: str
    name: str
    node: str
    owner: str
    ended: bool
    holding: Holding | None


@dataclass(frozen=True, slots=True)
class _Observed:
    """An MtgpuPod as the API server has it. holding: None where it is not bound."""

    ended: bool
    pod_uid: str
    holding: Holding | None


class MtgpuPodHoldings:
    """Part of the ClusterCache, which holds its lock around every call.

    What it writes into the holdings follows from the MtgpuPods and Pods that there are, in whatever order they came,
    and from what is admitted. It publishes CardsFreed where a share came free, and MtgpuPodsAffected for each node
    whose MtgpuPods wait for something of their namespace that may be over: the namespace uses fewer GPUIDs, or its pods
    that were deleted by force have ended.
    """

    def __init__(self, nodes: Nodes, holdings: Holdings, snapshots: NodeSnapshots, events: Publisher) -> None:
        self._nodes = nodes
        self._holdings = holdings
        self._snapshots = snapshots
        self._events = events
        self._used = Used()
        self._nodes_limited: dict[str, set[str]] = {}  # namespace → nodes where MtgpuPods wait for fewer GPUIDs of it
        self._nodes_held_up: dict[str, set[str]] = {}  # namespace → nodes where MtgpuPods wait for its remnants to end
        self._findings: dict[str, Finding] = {}  # UID of a Pod → why it was not made for an MtgpuPod
        self._observed: dict[str, _Observed] = {}
        self._own: dict[str, OwnPod] = {}
        self._pods_of: dict[str, set[str]] = {}  # UID of an MtgpuPod → the Pods that name it as their owner
        self._of_pod: dict[str, set[str]] = {}  # UID of a Pod → the MtgpuPods whose status names it
        self._admitted: dict[str, Holding] = {}
        events.subscribe(RemnantsEnded, lambda event: self._look_again(self._nodes_held_up, event.namespace))

    def mtgpupod_changed(self, raw: Raw) -> None:
        """Take in an MtgpuPod that was added or modified."""
        uid = raw["metadata"]["uid"]
        observed = _observed(raw)
        self._forget(uid)
        self._observed[uid] = observed
        _add(self._of_pod, observed.pod_uid, uid)
        if observed.ended or observed.holding:
            self._admitted.pop(uid, None)
        self._settle(uid)

    def mtgpupod_gone(self, raw: Raw) -> None:
        """Take in that an MtgpuPod was deleted."""
        uid = raw["metadata"]["uid"]
        self._forget(uid)
        self._admitted.pop(uid, None)
        self._settle(uid)

    def pod_changed(self, pod: Pod, own: OwnPod | None, finding: Finding | None) -> None:
        """Take in a Pod of any kind: `own_pod` of it, and why it was not made for an MtgpuPod although it says so."""
        if finding is not None:
            # A user may name any MtgpuPod as the owner of a Pod, so this one neither holds anything nor keeps anything
            # held.
            own = None
            if self._findings.get(pod.uid) != finding and not pod.ended:
                reference = pod_reference(pod.namespace, pod.name, pod.uid)
                self._events.publish(ObjectWarning(reference, finding.reason, finding.message))
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
        """Take in that a Pod was deleted. If it had not ended, its containers may run on: it may become a remnant.

        On a node that is gone the controller itself deletes Pods by force, and no user has to wait for that.
        """
        self._findings.pop(uid, None)
        own = self._own.get(uid)
        if own is not None and not own.ended and own.node in self._nodes:
            gpuid = own.holding.gpuid if own.holding is not None else ""
            self._holdings.remnants.deleted(uid, own.namespace, own.name, own.node, gpuid)
        self._drop_own(uid)

    def _drop_own(self, uid: str) -> None:
        own = self._own.pop(uid, None)
        if own is None:
            return
        _discard(self._pods_of, own.owner, uid)
        self._settle_of_pod(uid, own)

    def on(self, node: str) -> MtgpuNode:
        """Return the cards of a node and what is held on them."""
        ledger = self._holdings.ledger
        cards = ledger.cards(node)
        held = ledger.holdings(node)
        on = {h.uid: [s.card.uuid for s in cards if h.is_known_on(s.card)] for h in held if h.occupies and h.bound}
        return MtgpuNode(
            self._nodes.get(node),
            self._snapshots.version(node),
            cards,
            held,
            self._snapshots.indexes_used_by_mgpu(node),
            {uid: self._admitted[uid] for uid in self._admitted_on(node)},
            {uid: uuids[0] for uid, uuids in on.items() if uuids},
            {h.uid: gpuid for h in held if (gpuid := self._holdings.remnants.gpuid(h.uid))},
        )

    def gpuids_elsewhere(self, namespaces: Iterable[str], node: str) -> Mapping[str, int]:
        """Return how many GPUIDs each of these namespaces uses on other nodes than this one."""
        return self._used.elsewhere(namespaces, node)

    def held_up(self, namespaces: Iterable[str], node: str) -> Mapping[str, float]:
        """Return those of the namespaces whose pods were deleted by force and still run.

        Each with the seconds after which that no longer matters. If it is over before, MtgpuPodsAffected is published
        for the node.
        """
        remnants = self._holdings.remnants
        seconds = {name: remnants.seconds(name) for name in set(namespaces)}
        found = {name: left for name, left in sorted(seconds.items()) if left > 0}
        for name in found:
            self._nodes_held_up.setdefault(name, set()).add(node)
        return found

    def admit(
        self, node: str, holdings: Iterable[Holding], version: int, bound: Bound | None, limited: Iterable[str]
    ) -> bool:
        """Admit exactly these MtgpuPods to cards of this node, but for those that are bound or have ended by now.

        Nothing is admitted, and False returned, where the node has changed since `version`, a namespace uses more or
        fewer GPUIDs of other nodes than `bound` says, or one of the MtgpuPods is not known here (yet, or any more).

        Args:
            limited: The namespaces of which MtgpuPods wait until they use fewer GPUIDs.
        """
        wanted = {held.uid: held for held in holdings}
        if self._snapshots.version(node) != version or not wanted.keys() <= self._observed.keys():
            return False
        if bound is not None and self._used.elsewhere(bound.elsewhere, node) != bound.elsewhere:
            return False
        for uid in self._admitted_on(node):
            if uid not in wanted:
                self._withdraw(uid)
        for uid, held in sorted(wanted.items()):
            if not (self._observed[uid].ended or self._observed[uid].holding):
                self._admitted[uid] = held
                self._settle(uid)
        for namespace in limited:
            self._nodes_limited.setdefault(namespace, set()).add(node)
        return True

    def drop_admissions(self) -> None:
        """Withdraw all admissions. They were decided in an earlier term, and another leader may have decided since."""
        for uid in sorted(self._admitted):
            self._withdraw(uid)

    def _withdraw(self, uid: str) -> None:
        del self._admitted[uid]
        self._settle(uid)

    def _admitted_on(self, node: str) -> list[str]:
        return sorted(uid for uid, held in self._admitted.items() if held.node == node)

    def _settle(self, uid: str) -> None:
        """Make the holdings say of this MtgpuPod what follows from everything that is known of it."""
        wanted = self._holding_of(uid)
        before = self._holdings.ledger.holding(uid)
        if wanted == before:
            return
        if uid not in self._observed and before is not None and before.dialect != mtgpu.NAME:
            return  # the holding of another Pod: a user who creates a Pod can name any UID as its owner's
        if wanted is None:
            self._holdings.release(uid)
        else:
            self._holdings.hold(wanted)
        namespace = self._used.put(uid, wanted)
        if namespace is not None:
            self._look_again(self._nodes_limited, namespace)
        if before is not None:
            self._events.publish(CardsFreed(before.node))

    def _look_again(self, waiting: dict[str, set[str]], namespace: str) -> None:
        """Have the controller look at these nodes. It registers those again where MtgpuPods still wait."""
        for node in sorted(waiting.pop(namespace, ())):
            self._events.publish(MtgpuPodsAffected(node))

    def _settle_of_pod(self, uid: str, own: OwnPod) -> None:
        for mtgpupod in sorted({own.owner, *self._of_pod.get(uid, ())} - {""}):
            self._settle(mtgpupod)

    def _holding_of(self, uid: str) -> Holding | None:
        observed = self._observed.get(uid)
        running = [own for own in self._pods(uid) if not own.ended]
        if observed and observed.holding and (running or not observed.ended):
            return observed.holding
        # What its Pod has outlives the MtgpuPod: the finalizer may be removed by hand, the status be lost.
        of_pod = next((own.holding for own in running if own.holding and own.owner == uid), None)
        return of_pod or self._admitted.get(uid)

    def _pods(self, uid: str) -> Iterator[OwnPod]:
        named = {self._observed[uid].pod_uid} if uid in self._observed else set()
        return (self._own[of] for of in sorted(self._pods_of.get(uid, set()) | named) if of in self._own)

    def _forget(self, uid: str) -> None:
        before = self._observed.pop(uid, None)
        if before is not None:
            _discard(self._of_pod, before.pod_uid, uid)


def own_pod(pod: Pod, raw: Raw, records: RecordVerifier) -> tuple[OwnPod | None, Finding | None]:
    """Return the Pod as that of an MtgpuPod, and why it was not made for one although it says so.

    The first is None for a Pod that does not say that it is one; the webhook denies such annotations to users. It may
    verify a seal, so the caller does not hold the cache's lock.
    """
    owner = mtgpu.mtgpupod_of(raw) or ""
    if not owner and mtgpu.GPUID not in pod.annotations:
        return None, None
    own = OwnPod(pod.namespace, pod.name, pod.node, owner, pod.ended, mtgpu.holding_of_pod(pod, raw))
    return own, records.finding_of_mtgpu(raw)


def _add(index: dict[str, set[str]], key: str, value: str) -> None:
    if key:
        index.setdefault(key, set()).add(value)


def _discard(index: dict[str, set[str]], key: str, value: str) -> None:
    if key:
        index[key].discard(value)
        if not index[key]:
            del index[key]


def _observed(raw: Raw) -> _Observed:
    try:
        pod = mtgpu.read_mtgpupod(raw)
    except BadObject:
        return _unreadable(raw)
    return _Observed(pod.ended, pod.pod_uid, mtgpu.holding(pod, pod.bound) if pod.bound else None)


def _unreadable(raw: Raw) -> _Observed:
    """Return an MtgpuPod that cannot be read. How much of its card it has is unknown, so it holds the whole card."""
    meta = raw["metadata"]
    spec = table_at(raw, "spec")
    status = table_at(raw, "status")
    node = spec.get("nodeName")
    card = status.get("BoundDeviceID")
    pod_uid = table_at(status, "PodObjectMeta").get("uid")
    held = None
    if isinstance(node, str) and node and isinstance(card, str) and card:
        held = Holding(meta["uid"], meta["namespace"], meta["name"], node, mtgpu.NAME, (Share("", card, whole=True),))
    return _Observed(status.get("phase") in ("Succeeded", "Failed"), pod_uid if isinstance(pod_uid, str) else "", held)
