"""Stores the MtgpuPods, the Pods that are created for them, and the taints of the nodes, for the MtgpuPod controller.

It also stores the occupy pods, each of which occupies a card for the MtgpuPods of a GPUID. There may be thousands of
these objects and users choose their size, so they are stored as JSON text of limited length
(scheduler/cluster/stored_objects.py). The cluster cache uses `MtgpuPodObjects` with its lock held.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from mgpu.dialects import mtgpu
from mgpu.dialects.record_verification import RecordVerifier
from mgpu.model.pods import Pod, read_pod
from mgpu.model.raw_objects import table_at
from scheduler.cluster.events import MtgpuPodsAffected, Publisher
from scheduler.cluster.stored_objects import (
    StoredObjects,
    decode,
    encode,
    stored_mtgpupod,
    stored_occupy_pod,
    stored_own_pod,
)
from scheduler.cluster.taints import evicting_taints

V = TypeVar("V")

Raw = Mapping[str, Any]
Key = tuple[str, str]
"""The namespace and the name of an object."""
_PLAIN_NODE: tuple[bool, tuple[Raw, ...]] = (False, ())
"""A node that is not cordoned and has no taints that evict Pods."""


@dataclass(frozen=True, slots=True)
class MtgpuObjects:
    """The objects of one node at one moment. MtgpuPods and their Pods are decoded one by one when they are read.

    Attributes:
        items: The MtgpuPods of the node, sorted by key.
        made: The Pods that were created for an MtgpuPod and have the name of an MtgpuPod of this node.
        uids: The UIDs of all Pods that have the name of an MtgpuPod of this node.
        occupies: The occupy pods of the node, by GPUID.
        impostors: By GPUID, the UID of a Pod that has the name of an occupy pod but is not one.
        unschedulable: Whether the node is cordoned.
        taints: The taints of the node that evict Pods.
    """

    items: StoredObjects[Key]
    made: StoredObjects[Key]
    uids: Mapping[Key, str]
    occupies: Mapping[str, Raw]
    impostors: Mapping[str, str]
    unschedulable: bool
    taints: tuple[Raw, ...]


@dataclass(frozen=True, slots=True)
class PodText:
    """The stored part of one Pod.

    Attributes:
        uid: The UID of the Pod, or None if the Pod was deleted.
        made: The stored part as JSON text if the Pod was created for an MtgpuPod, or None.
        occupied: The node and the GPUID in the Pod's name if that is the name of an occupy pod, or None.
        occupies: The stored part as JSON text if the Pod is an occupy pod, or None.
    """

    key: Key
    uid: str | None
    made: bytes | None
    occupied: tuple[str, str] | None
    occupies: bytes | None


class MtgpuPodObjects:
    """Part of the ClusterCache, which holds its lock around every call.

    It publishes MtgpuPodsAffected for each node whose MtgpuPods or occupy pods a changed object concerns.
    """

    def __init__(self, events: Publisher) -> None:
        self._events = events
        self._items: dict[Key, bytes] = {}
        self._node_of: dict[Key, str] = {}
        self._on: dict[str, set[Key]] = {}
        self._made: dict[Key, bytes] = {}
        self._occupies: dict[str, dict[str, bytes]] = {}
        self._impostors: dict[str, dict[str, str]] = {}
        self._nodes: dict[str, tuple[bool, tuple[Raw, ...]]] = {}  # All nodes that differ from _PLAIN_NODE.

    def mtgpupod_changed(self, raw: Raw) -> None:
        key = key_of(raw)
        node = node_of(raw)
        before = self._drop(key)
        self._items[key] = encode(stored_mtgpupod(raw))
        self._node_of[key] = node
        self._on.setdefault(node, set()).add(key)
        self._publish({*before, node})

    def mtgpupod_gone(self, raw: Raw) -> None:
        self._publish(self._drop(key_of(raw)))

    def pod_changed(self, text: PodText) -> None:
        """Store what the MtgpuPod controller needs of a Pod, and publish which nodes the Pod concerns.

        A Pod concerns the node of the MtgpuPod with the same name even if a user created the Pod.
        """
        self._made.pop(text.key, None)
        if text.made is not None:
            self._made[text.key] = text.made
        concerned = {self._node_of[text.key]} if text.key in self._node_of else set()
        if text.occupied is not None:
            node, gpuid = text.occupied
            concerned.add(node)
            _put(self._occupies, node, gpuid, text.occupies)
            _put(self._impostors, node, gpuid, text.uid if text.occupies is None else None)
        self._publish(concerned)

    def node_changed(self, raw: Raw) -> None:
        """Store the taints of a Node, and whether it is cordoned."""
        is_cordoned = bool((raw.get("spec") or {}).get("unschedulable"))
        self._set_node(raw["metadata"]["name"], (is_cordoned, evicting_taints(raw)))

    def node_gone(self, raw: Raw) -> None:
        self._set_node(raw["metadata"]["name"], _PLAIN_NODE)

    def on(self, node: str, uid_of: Callable[[str, str], str | None]) -> MtgpuObjects:
        """Return the objects of a node.

        Args:
            uid_of: Returns the UID of the Pod with a namespace and a name, or None if there is no such Pod.
        """
        items = {key: self._items[key] for key in sorted(self._on.get(node, ()))}
        uids = {key: uid for key in items if (uid := uid_of(*key)) is not None}
        return MtgpuObjects(
            StoredObjects(items),
            StoredObjects({key: self._made[key] for key in items if key in self._made}),
            uids,
            {gpuid: decode(text) for gpuid, text in self._occupies.get(node, {}).items()},
            dict(self._impostors.get(node, {})),
            *self._nodes.get(node, _PLAIN_NODE),
        )

    def items(self) -> Iterator[Raw]:
        """Return all MtgpuPods in no particular order. Each is decoded when the iterator reaches it."""
        return map(decode, tuple(self._items.values()))

    def concerns(self, node: str) -> bool:
        """Return whether the node has MtgpuPods or occupy pods."""
        return node in self._on or node in self._occupies

    def nodes(self) -> tuple[str, ...]:
        """Return the names of the nodes that have MtgpuPods or occupy pods, sorted."""
        return tuple(sorted({*self._on, *self._occupies}))

    def _drop(self, key: Key) -> tuple[str, ...]:
        """Remove an MtgpuPod. Return a tuple with the node that it names, or () if it was not stored."""
        if self._items.pop(key, None) is None:
            return ()
        node = self._node_of.pop(key)
        self._on[node].discard(key)
        if not self._on[node]:
            del self._on[node]
        return (node,)

    def _set_node(self, name: str, state: tuple[bool, tuple[Raw, ...]]) -> None:
        before = self._nodes.pop(name, _PLAIN_NODE)
        if state != _PLAIN_NODE:
            self._nodes[name] = state
        if state != before:
            self._publish((name,))

    def _publish(self, nodes: Iterable[str]) -> None:
        for node in nodes:
            self._events.publish(MtgpuPodsAffected(node))


def pod_text(raw: Raw, records: RecordVerifier) -> PodText:
    """Return the stored part of a Pod.

    The function may verify a seal, which takes time, so the caller must not hold the cache's lock.
    """
    key = key_of(raw)
    made = encode(stored_own_pod(raw)) if _claims_mtgpupod(raw) and records.finding_of_mtgpu(raw) is None else None
    occupied = _occupied_by_name(key)
    is_occupy_pod = occupied is not None and mtgpu.occupy_target(read_pod(raw)) is not None
    occupies = encode(stored_occupy_pod(raw)) if is_occupy_pod else None
    return PodText(key, raw["metadata"]["uid"], made, occupied, occupies)


def text_of_gone_pod(raw: Raw) -> PodText:
    """Return the PodText of a deleted Pod, of which the informer may know only the namespace and the name."""
    key = key_of(raw)
    return PodText(key, None, None, _occupied_by_name(key), None)


def key_of(raw: Raw) -> Key:
    return raw["metadata"]["namespace"], raw["metadata"]["name"]


def node_of(item: Raw) -> str:
    """Return the node that an MtgpuPod names; "" if the field cannot be read."""
    node = table_at(item, "spec").get("nodeName")
    return node if isinstance(node, str) else ""


def _claims_mtgpupod(pod: Raw) -> bool:
    """Return whether a Pod claims to have been created for an MtgpuPod. The Pod's seal can prove the claim."""
    meta = pod["metadata"]
    if mtgpu.GPUID in (meta.get("annotations") or {}):
        return True
    owners = meta.get("ownerReferences") or ()
    return any(o.get("kind") == mtgpu.KIND and o.get("apiVersion") == mtgpu.API_VERSION for o in owners)


def _occupied_by_name(key: Key) -> tuple[str, str] | None:
    """Return the node and GPUID that the name of an occupy pod contains, or None for any other name."""
    namespace, name = key
    if namespace != mtgpu.OCCUPY_NAMESPACE:
        return None
    # The name of an occupy pod ends with its GPUID, which is also the value of its label.
    return mtgpu.occupy_target(Pod(namespace, name, labels={mtgpu.OCCUPY_LABEL: name.rpartition("-")[2]}))


def _put(index: dict[str, dict[str, V]], node: str, gpuid: str, value: V | None) -> None:
    """Set the value of a node and GPUID, or remove it if the value is None."""
    values = index.setdefault(node, {})
    values.pop(gpuid, None)
    if value is not None:
        values[gpuid] = value
    if not values:
        del index[node]
