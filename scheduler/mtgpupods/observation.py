"""Observes the MtgpuPods of a node: creates the input of the node plan from a snapshot of the ClusterCache.

The MtgpuPod controller calls `observe` for each plan. `mtgpupod_writer` uses the functions that compare and read single
objects.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from mgpu.dialects import mtgpu
from mgpu.dialects.mtgpu import MtgpuPod
from mgpu.model.errors import BadObject
from mgpu.model.pods import read_pod
from mgpu.model.raw_objects import table_at
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.gpuids import GpuidLimit
from scheduler.cluster.mtgpupod_holdings import MtgpuNode
from scheduler.cluster.mtgpupod_objects import Key, MtgpuObjects, Raw
from scheduler.cluster.stored_objects import EXCESS, StoredObjects
from scheduler.cluster.taints import untolerated_taint
from scheduler.engine import nvidia_plugin
from scheduler.mtgpupods.observed_node import (
    ObservedNode,
    OwnedPod,
    UnreadableMtgpuPod,
    is_owned,
    read_owned_pod,
)
from scheduler.mtgpupods.occupy_pods import OccupyPod, read_occupy_pod

_LONGEST_PROBLEMS = 4096
"""The most characters of `UnreadableMtgpuPod.problems`. The message of a condition is shortened further."""


@dataclass(frozen=True, slots=True)
class Observation:
    """A node at one moment, with its objects as JSON.

    Attributes:
        node: The input of the node plan.
        version: The node's version in the ClusterCache. The cache refuses reservations if the version has changed.
        items: The MtgpuPods by UID.
        pods: The Pods that were created for MtgpuPods, by the UID of the MtgpuPod.
        recheck_seconds: The time after which remnants stop holding up one of the namespaces; None if they hold up none.
    """

    node: ObservedNode
    version: int
    items: StoredObjects[str]
    pods: StoredObjects[str]
    recheck_seconds: float | None = None


def observe(
    cluster: ClusterCache,
    name: str,
    *,
    enabled: bool,
    gpuid_limit: int | None = None,
    left_out: Collection[str] = (),
) -> Observation:
    """Observe the MtgpuPods of a node.

    All objects come from one snapshot. Otherwise a Pod that was just created could be in one part of the observation
    and not in another, and would look like a foreign Pod.

    Args:
        enabled: Whether the vocabulary is enabled. If not, valid MtgpuPods that are neither bound nor being deleted are
            left out.
        gpuid_limit: How many GPUIDs a namespace may use; None means without limit.
        left_out: The UIDs of further MtgpuPods to leave out, unless they are bound or being deleted.
    """
    snapshot = cluster.mtgpupods.snapshot(name)
    cached, known = snapshot.objects, snapshot.node
    found = _Objects()
    for key, raw in cached.items.items():
        pod = read_stored(raw)
        begins = isinstance(pod, MtgpuPod) and not pod.card_uuid and not pod.deleting
        if begins and (not enabled or pod.uid in left_out):
            continue
        found.add(pod, key, raw, cached)
    namespaces = {key[0] for key in cached.items}
    held_up = cluster.mtgpupods.remnant_seconds(namespaces, name)
    limit = None if gpuid_limit is None else GpuidLimit(gpuid_limit, snapshot.gpuids_elsewhere)
    node = ObservedNode(
        name,
        tuple(found.readable),
        tuple(state.card for state in known.cards),
        known.held,
        exists=known.node is not None,
        unschedulable=cached.unschedulable,
        nvidia_plugin=nvidia_plugin.is_on_node(known.node),
        untolerated=found.untolerated,
        unreadable=tuple(found.unreadable),
        owned_pods=found.owned,
        name_conflicts=frozenset(found.conflicts),
        occupy_pods=_occupy_pods(found.readable, cached, known),
        reservations=known.admitted,
        gpuid_limit=limit,
        held_up=frozenset(held_up),
        remnant_gpuids=known.remnants,
    )
    recheck_seconds = min(held_up.values(), default=None)
    return Observation(
        node, known.version, StoredObjects(found.item_texts), StoredObjects(found.pod_texts), recheck_seconds
    )


@dataclass(slots=True)
class _Objects:
    readable: list[MtgpuPod] = field(default_factory=list)
    unreadable: list[UnreadableMtgpuPod] = field(default_factory=list)
    item_texts: dict[str, bytes] = field(default_factory=dict)
    pod_texts: dict[str, bytes] = field(default_factory=dict)
    untolerated: dict[str, str] = field(default_factory=dict)
    owned: dict[str, OwnedPod] = field(default_factory=dict)
    conflicts: set[str] = field(default_factory=set)

    def add(self, pod: MtgpuPod | UnreadableMtgpuPod, key: Key, raw: Raw, cached: MtgpuObjects) -> None:
        """Add an MtgpuPod and the Pod that was created for it, or a conflict if another Pod has its name."""
        self.item_texts[pod.uid] = cached.items.text(key)
        if isinstance(pod, UnreadableMtgpuPod):
            self.unreadable.append(pod)
        else:
            self.readable.append(pod)
            taint = untolerated_taint(table_at(raw, "spec"), cached.taints)
            if taint:
                self.untolerated[pod.uid] = taint
        own = cached.made.get(key)
        if own is not None and is_pod_of(own, raw):
            self.pod_texts[pod.uid] = cached.made.text(key)
            self.owned[pod.uid] = read_owned_pod(own)
        elif key in cached.uids:
            self.conflicts.add(pod.uid)


def read_stored(raw: Raw) -> MtgpuPod | UnreadableMtgpuPod:
    """Read an MtgpuPod of the cache or of the API server.

    An MtgpuPod whose spec is too large is unreadable, unless it is bound. The holding of a bound MtgpuPod does not
    depend on the large parts of the spec.
    """
    excess = raw.get(EXCESS)
    if excess and not table_at(raw, "status").get("BoundDeviceID"):
        return _unreadable(raw, excess)
    try:
        return mtgpu.read_mtgpupod(raw)
    except BadObject as error:
        return _unreadable(raw, str(error))


def _unreadable(raw: Raw, problems: str) -> UnreadableMtgpuPod:
    meta = raw["metadata"]
    key = f"{meta['namespace']}/{meta['name']}"
    return UnreadableMtgpuPod(meta["uid"], key, problems[:_LONGEST_PROBLEMS], deleting="deletionTimestamp" in meta)


def _occupy_pods(pods: Collection[MtgpuPod], cached: MtgpuObjects, known: MtgpuNode) -> dict[str, OccupyPod]:
    found = {}
    for gpuid, raw in sorted(cached.occupies.items()):
        pod = read_pod(raw)
        found[gpuid] = read_occupy_pod(raw, pod, known.occupied.get(pod.uid))
    for gpuid in sorted({pod.gpuid for pod in pods} - set(found)):
        if gpuid in cached.impostors:
            found[gpuid] = OccupyPod(cached.impostors[gpuid], ours=False)
    return found


def is_pod_of(pod: Raw, item: Raw) -> bool:
    """Return whether this Pod was created for the MtgpuPod of the same name (`is_owned`).

    Args:
        item: The MtgpuPod as JSON. It may be invalid.
    """
    mirrored = (item.get("status") or {}).get("PodObjectMeta") or {}
    return is_owned(pod, item["metadata"]["uid"], str(mirrored.get("uid") or ""))


def occupy_pod_key(node: str, gpuid: str) -> Key:
    return mtgpu.OCCUPY_NAMESPACE, mtgpu.occupy_name(node, gpuid)
