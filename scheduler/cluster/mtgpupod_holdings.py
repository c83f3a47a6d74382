"""Derives what MtgpuPods hold.

An MtgpuPod is bound if its status names its card. It then holds its share of the card, even if the card has no free
capacity for the share. Until then it holds the share to which the controller has admitted it, if any. An admission
exists only in memory until the informer delivers the bound MtgpuPod; if another replica begins to lead before that, it
decides again (docs/design/mtgpu.md, "Controller"). The cluster cache uses `MtgpuPodHoldings` with its lock held.
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
from scheduler.cluster.gpuids import GpuidLimit, UsedGpuids
from scheduler.cluster.holdings import Holdings
from scheduler.cluster.node_snapshots import NodeSnapshots
from scheduler.cluster.nodes import Nodes

Raw = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class MtgpuNode:
    """The cards of a node at one moment, for the controller of MtgpuPods.

    Attributes:
        node: The Node, or None if there is none.
        version: The version of the node, as in a NodeSnapshot.
        cards: The GPUs that are not partitioned.
        admitted: By UID, the holdings of MtgpuPods that are admitted and not bound yet. They are part of `held`.
        occupied: By UID of an occupy pod, the UUID of its card, if the card is known.
        remnants: By UID of a Pod that is a remnant of an MtgpuPod, the GPUID of the MtgpuPod.
    """

    node: Node | None
    version: int
    cards: tuple[CardState, ...]
    held: tuple[Holding, ...]
    admitted: Mapping[str, Holding]
    occupied: Mapping[str, str]
    remnants: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class OwnPod:
    """The Pod of an MtgpuPod.

    Attributes:
        owner: The UID of the MtgpuPod, or None if the owner reference was removed and no seal names the MtgpuPod.
        holding: The holding according to the Pod's annotations, or None if they describe none.
    """

    namespace: str
    name: str
    node: str
    owner: str | None
    ended: bool
    holding: Holding | None


@dataclass(frozen=True, slots=True)
class _Observed:
    """The state of an MtgpuPod in the API server.

    Attributes:
        pod_uid: The UID of the Pod that the status names; "" if it names none.
        holding: The holding according to its status, or None if the MtgpuPod is not bound.
    """

    ended: bool
    pod_uid: str
    holding: Holding | None


class MtgpuPodHoldings:
    """Part of the ClusterCache, which holds its lock around every call.

    The holdings that it writes follow from the admissions and from the present MtgpuPods and Pods, in whatever order
    these have arrived. It publishes CardsFreed if the holding of an MtgpuPod has changed or ended. It publishes
    MtgpuPodsAffected for the nodes on which MtgpuPods of a namespace wait, once the namespace uses fewer GPUIDs or its
    remnants have ended.
    """

    def __init__(self, nodes: Nodes, holdings: Holdings, snapshots: NodeSnapshots, events: Publisher) -> None:
        self._nodes = nodes
        self._holdings = holdings
        self._snapshots = snapshots
        self._events = events
        self._gpuids = UsedGpuids()
        # By namespace, the nodes where its MtgpuPods wait until the namespace uses fewer GPUIDs.
        self._limited_nodes: dict[str, set[str]] = {}
        # By namespace, the nodes where its MtgpuPods wait until the remnants of the namespace have ended.
        self._remnant_nodes: dict[str, set[str]] = {}
        self._findings: dict[str, Finding] = {}  # By UID of a Pod, why its claim to belong to an MtgpuPod is false.
        self._observed: dict[str, _Observed] = {}
        self._own: dict[str, OwnPod] = {}
        self._pods_of: dict[str, set[str]] = {}  # By UID of an MtgpuPod, the Pods that name it as their owner.
        self._mtgpupods_of: dict[str, set[str]] = {}  # By UID of a Pod, the MtgpuPods whose status names it.
        self._admitted: dict[str, Holding] = {}
        events.subscribe(RemnantsEnded, lambda event: self._wake(self._remnant_nodes, event.namespace))

    def mtgpupod_changed(self, raw: Raw) -> None:
        uid = raw["metadata"]["uid"]
        observed = _observed(raw)
        self._forget(uid)
        self._observed[uid] = observed
        _add(self._mtgpupods_of, observed.pod_uid, uid)
        if observed.ended or observed.holding:
            self._admitted.pop(uid, None)
        self._settle(uid)

    def mtgpupod_gone(self, raw: Raw) -> None:
        uid = raw["metadata"]["uid"]
        self._forget(uid)
        self._admitted.pop(uid, None)
        self._settle(uid)

    def pod_changed(self, pod: Pod, own: OwnPod | None, finding: Finding | None) -> None:
        """Store a Pod of any kind, with the result of `own_pod`."""
        if finding is not None:
            # A user may name any MtgpuPod as the owner of a Pod. So a Pod with a finding must hold nothing, and must
            # not prolong the holding of the MtgpuPod that it names.
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
        """Remove a Pod that was deleted. If it had not ended, it may become a remnant.

        The Pods of a deleted node do not become remnants, because the controller itself deletes them by force.
        """
        self._findings.pop(uid, None)
        own = self._own.get(uid)
        if own is not None and not own.ended and own.node in self._nodes:
            gpuid = own.holding.gpuid if own.holding is not None else None
            self._holdings.remnants.deleted(uid, own.namespace, own.name, own.node, gpuid)
        self._drop_own(uid)

    def _drop_own(self, uid: str) -> None:
        own = self._own.pop(uid, None)
        if own is None:
            return
        _discard(self._pods_of, own.owner, uid)
        self._settle_of_pod(uid, own)

    def on(self, node: str) -> MtgpuNode:
        ledger = self._holdings.ledger
        cards = ledger.cards(node)
        held = ledger.holdings(node)
        occupy_pods = [h for h in held if h.occupies and h.bound]
        occupied = {h.uid: [s.card.uuid for s in cards if h.is_known_on(s.card)] for h in occupy_pods}
        return MtgpuNode(
            self._nodes.get(node),
            self._snapshots.version(node),
            cards,
            held,
            {uid: self._admitted[uid] for uid in self._admitted_on(node)},
            {uid: uuids[0] for uid, uuids in occupied.items() if uuids},
            {h.uid: gpuid for h in held if (gpuid := self._holdings.remnants.gpuid(h.uid)) is not None},
        )

    def gpuids_elsewhere(self, namespaces: Iterable[str], node: str) -> Mapping[str, int]:
        return self._gpuids.elsewhere(namespaces, node)

    def remnant_seconds(self, namespaces: Iterable[str], node: str) -> Mapping[str, float]:
        """Return what `MtgpuPodCache.remnant_seconds` describes."""
        remnants = self._holdings.remnants
        all_seconds = {name: remnants.seconds(name) for name in sorted(set(namespaces))}
        waits = {name: seconds for name, seconds in all_seconds.items() if seconds > 0}
        for name in waits:
            self._remnant_nodes.setdefault(name, set()).add(node)
        return waits

    def admit(
        self, node: str, holdings: Iterable[Holding], version: int, limit: GpuidLimit | None, limited: Iterable[str]
    ) -> bool:
        """Admit exactly these MtgpuPods to cards of this node, except those that are now bound or have ended.

        Other MtgpuPods that are admitted on the node lose their admission. Returns False, and changes nothing, if the
        decision is outdated: the node has changed since `version`, the namespaces use other numbers of GPUIDs on other
        nodes than `limit` says, or one of the MtgpuPods is not stored here.

        Args:
            limit: The limit that the decision observes, or None if there is none.
            limited: The namespaces whose MtgpuPods on this node wait because of the limit.
        """
        desired = {holding.uid: holding for holding in holdings}
        if self._snapshots.version(node) != version or not desired.keys() <= self._observed.keys():
            return False
        if limit is not None and self._gpuids.elsewhere(limit.elsewhere, node) != limit.elsewhere:
            return False
        for uid in self._admitted_on(node):
            if uid not in desired:
                self._withdraw(uid)
        for uid, held in sorted(desired.items()):
            if not (self._observed[uid].ended or self._observed[uid].holding):
                self._admitted[uid] = held
                self._settle(uid)
        for namespace in limited:
            self._limited_nodes.setdefault(namespace, set()).add(node)
        return True

    def drop_admissions(self) -> None:
        for uid in sorted(self._admitted):
            self._withdraw(uid)

    def _withdraw(self, uid: str) -> None:
        del self._admitted[uid]
        self._settle(uid)

    def _admitted_on(self, node: str) -> list[str]:
        return sorted(uid for uid, held in self._admitted.items() if held.node == node)

    def _settle(self, uid: str) -> None:
        """Derive what this MtgpuPod holds from the present MtgpuPod, Pods and admissions."""
        holding = self._holding_of(uid)
        before = self._holdings.ledger.holding(uid)
        if holding == before:
            return
        if uid not in self._observed and before is not None and before.dialect != mtgpu.NAME:
            # This is the holding of a Pod. A user can write any UID, such as that of a Pod, into an owner reference.
            return
        if holding is None:
            self._holdings.release(uid)
        else:
            self._holdings.hold(holding)
        namespace = self._gpuids.put(uid, holding)
        if namespace is not None:
            self._wake(self._limited_nodes, namespace)
        if before is not None:
            self._events.publish(CardsFreed(before.node))

    def _wake(self, waiting: dict[str, set[str]], namespace: str) -> None:
        """Make the controller reconcile the nodes that wait for a namespace.

        If MtgpuPods of a node still have to wait, the controller registers the node again (`admit`, `remnant_seconds`).
        """
        for node in sorted(waiting.pop(namespace, ())):
            self._events.publish(MtgpuPodsAffected(node))

    def _settle_of_pod(self, uid: str, own: OwnPod) -> None:
        owners = {own.owner} if own.owner is not None else set()
        for mtgpupod in sorted(owners | self._mtgpupods_of.get(uid, set())):
            self._settle(mtgpupod)

    def _holding_of(self, uid: str) -> Holding | None:
        observed = self._observed.get(uid)
        running = [own for own in self._pods(uid) if not own.ended]
        if observed and observed.holding and (running or not observed.ended):
            return observed.holding
        # A running Pod holds its card even if the MtgpuPod or its status is lost: users can remove the finalizer.
        of_pod = next((own.holding for own in running if own.holding and own.owner == uid), None)
        return of_pod or self._admitted.get(uid)

    def _pods(self, uid: str) -> Iterator[OwnPod]:
        named = {self._observed[uid].pod_uid} if uid in self._observed else set()
        uids = self._pods_of.get(uid, set()) | named
        return (self._own[pod_uid] for pod_uid in sorted(uids) if pod_uid in self._own)

    def _forget(self, uid: str) -> None:
        before = self._observed.pop(uid, None)
        if before is not None:
            _discard(self._mtgpupods_of, before.pod_uid, uid)


def own_pod(pod: Pod, raw: Raw, records: RecordVerifier) -> tuple[OwnPod | None, Finding | None]:
    """Return the OwnPod of a Pod that claims to be created for an MtgpuPod, and the reason why the claim is false.

    The reason is None if the claim is true. The function returns (None, None) for a Pod without such a claim. It may
    verify a seal, which takes time, so the caller must not hold the cache's lock.
    """
    owner = mtgpu.claimed_mtgpupod(raw)
    if not owner and mtgpu.GPUID not in pod.annotations:
        return None, None
    own = OwnPod(pod.namespace, pod.name, pod.node, owner, pod.ended, mtgpu.holding_of_pod(pod, raw))
    return own, records.finding_of_mtgpu(raw)


def _add(index: dict[str, set[str]], key: str | None, value: str) -> None:
    if key:
        index.setdefault(key, set()).add(value)


def _discard(index: dict[str, set[str]], key: str | None, value: str) -> None:
    if key:
        index[key].discard(value)
        if not index[key]:
            del index[key]


def _observed(raw: Raw) -> _Observed:
    try:
        pod = mtgpu.read_mtgpupod(raw)
    except BadObject:
        return _unreadable(raw)
    return _Observed(pod.ended, pod.pod_uid, mtgpu.holding(pod, pod.card_uuid) if pod.card_uuid else None)


def _unreadable(raw: Raw) -> _Observed:
    """Return the state of an MtgpuPod that cannot be read. If it has a card, it holds the whole card."""
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
