"""The MtgpuPods as the API server has them, and the Pods that were made for them, as the controller reads them.

They are kept as bounded JSON text (scheduler/cluster/stored_objects.py), since there may be thousands and users choose
their size.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from mgpu.dialects import mtgpu
from mgpu.dialects.record_verification import RecordVerifier
from mgpu.model.pods import Pod, read_pod
from mgpu.model.raw_objects import table_at
from scheduler.cluster.stored_objects import Texts, of_mtgpupod, of_occupy_pod, of_own_pod, read_text, text_of
from scheduler.cluster.taints import evicting

V = TypeVar("V")

Raw = Mapping[str, Any]
Key = tuple[str, str]
"""Namespace and name."""


@dataclass(frozen=True, slots=True)
class MtgpuObjects:
    """The objects of one node at one moment, decoded one by one when they are read.

    Attributes:
        items: Its MtgpuPods, in the order of their keys.
        made: The Pods of these names that were made for MtgpuPods, not necessarily for these.
        uids: The UIDs of the Pods of these names, whoever made them.
        occupies: Its occupy pods, by GPUID.
        impostors: By GPUID, the UIDs of Pods that have the name of an occupy pod and are none.
        unschedulable: Whether the node is cordoned.
        taints: The taints of the node that end Pods (`evicting`).
    """

    items: Texts[Key]
    made: Texts[Key]
    uids: Mapping[Key, str]
    occupies: Mapping[str, Raw]
    impostors: Mapping[str, str]
    unschedulable: bool
    taints: tuple[Raw, ...]


@dataclass(frozen=True, slots=True)
class PodText:
    """What is kept of one Pod.

    Attributes:
        uid: None where the Pod is gone.
        made: Its text if it was made for an MtgpuPod.
        occupied: The node and GPUID that its name stands for, where that is the name of an occupy pod.
        occupies: Its text if it is that occupy pod.
    """

    key: Key
    uid: str | None
    made: bytes | None
    occupied: tuple[str, str] | None
    occupies: bytes | None


class MtgpuPodObjects:
    """Part of the ClusterCache, which holds its lock around every call.

    A method that takes an object returns the nodes whose MtgpuPods it may concern.
    """

    def __init__(self) -> None:
        self._items: dict[Key, bytes] = {}
        self._node_of: dict[Key, str] = {}
        self._on: dict[str, set[Key]] = {}
        self._made: dict[Key, bytes] = {}
        self._occupies: dict[str, dict[str, bytes]] = {}
        self._impostors: dict[str, dict[str, str]] = {}
        self._unschedulable: set[str] = set()
        self._taints: dict[str, tuple[Raw, ...]] = {}

    def mtgpupod_changed(self, raw: Raw) -> Collection[str]:
        """Take in an MtgpuPod that was added or modified."""
        key = key_of(raw)
        node = node_of(raw)
        before = self._drop(key)
        self._items[key] = text_of(of_mtgpupod(raw))
        self._node_of[key] = node
        self._on.setdefault(node, set()).add(key)
        return {*before, node}

    def mtgpupod_gone(self, raw: Raw) -> Collection[str]:
        """Take in that an MtgpuPod was deleted."""
        return self._drop(key_of(raw))

    def pod(self, text: PodText) -> Collection[str]:
        """Take in a Pod (`pod_text`). One that has the name of an MtgpuPod concerns it, whoever made it."""
        self._made.pop(text.key, None)
        if text.made is not None:
            self._made[text.key] = text.made
        concerned = {self._node_of[text.key]} if text.key in self._node_of else set()
        if text.occupied is not None:
            node, gpuid = text.occupied
            concerned.add(node)
            _put(self._occupies, node, gpuid, text.occupies)
            _put(self._impostors, node, gpuid, text.uid if text.occupies is None else None)
        return concerned

    def node_changed(self, raw: Raw) -> Collection[str]:
        """Take in the taints of a Node, and whether it is cordoned."""
        cordoned = bool((raw.get("spec") or {}).get("unschedulable"))
        return self._node(raw["metadata"]["name"], evicting(raw), cordoned=cordoned)

    def node_gone(self, raw: Raw) -> Collection[str]:
        """Take in that a Node was deleted."""
        return self._node(raw["metadata"]["name"], (), cordoned=False)

    def on(self, node: str, uid_of: Callable[[str, str], str | None]) -> MtgpuObjects:
        """Return the objects of a node. uid_of: the UID of the Pod of a namespace and name, or None."""
        items = {key: self._items[key] for key in sorted(self._on.get(node, ()))}
        uids = {key: uid for key in items if (uid := uid_of(*key)) is not None}
        return MtgpuObjects(
            Texts(items),
            Texts({key: self._made[key] for key in items if key in self._made}),
            uids,
            {gpuid: read_text(text) for gpuid, text in self._occupies.get(node, {}).items()},
            dict(self._impostors.get(node, {})),
            node in self._unschedulable,
            self._taints.get(node, ()),
        )

    def items(self) -> Iterator[Raw]:
        """Return all MtgpuPods that are known now, in no particular order, decoded one after the other."""
        return map(read_text, tuple(self._items.values()))

    def concerns(self, node: str) -> bool:
        """Return whether the node has MtgpuPods or occupy pods."""
        return node in self._on or node in self._occupies

    def nodes(self) -> tuple[str, ...]:
        """Return the names of the nodes that have MtgpuPods or occupy pods, sorted."""
        return tuple(sorted({*self._on, *self._occupies}))

    def _drop(self, key: Key) -> Collection[str]:
        """The node where it was, if it was there."""
        if self._items.pop(key, None) is None:
            return ()
        node = self._node_of.pop(key)
        self._on[node].discard(key)
        if not self._on[node]:
            del self._on[node]
        return (node,)

    def _node(self, name: str, taints: tuple[Raw, ...], *, cordoned: bool) -> Collection[str]:
        if (taints, cordoned) == (self._taints.get(name, ()), name in self._unschedulable):
            return ()
        (self._unschedulable.add if cordoned else self._unschedulable.discard)(name)
        self._taints.pop(name, None)
        if taints:
            self._taints[name] = taints
        return (name,)


def pod_text(raw: Raw, records: RecordVerifier) -> PodText:
    """Return what is kept of a Pod. It may verify a seal, so the caller does not hold the cache's lock."""
    key = key_of(raw)
    made = text_of(of_own_pod(raw)) if _is_made(raw) and records.finding_of_mtgpu(raw) is None else None
    occupied = _occupied_by_name(key)
    is_occupy_pod = occupied is not None and mtgpu.occupied(read_pod(raw)) is not None
    occupies = text_of(of_occupy_pod(raw)) if is_occupy_pod else None
    return PodText(key, raw["metadata"]["uid"], made, occupied, occupies)


def text_of_gone_pod(raw: Raw) -> PodText:
    """Return the same for a Pod that was deleted, of which the informer may know no more than the name."""
    key = key_of(raw)
    return PodText(key, None, None, _occupied_by_name(key), None)


def key_of(raw: Raw) -> Key:
    return raw["metadata"]["namespace"], raw["metadata"]["name"]


def node_of(item: Raw) -> str:
    """Where an MtgpuPod wants to be; "" where that cannot be read."""
    node = table_at(item, "spec").get("nodeName")
    return node if isinstance(node, str) else ""


def _is_made(pod: Raw) -> bool:
    """Whether it says that it was created for an MtgpuPod. Admission denies that to users; its seal proves it."""
    meta = pod["metadata"]
    kinds = [(owner.get("apiVersion"), owner.get("kind")) for owner in meta.get("ownerReferences") or ()]
    return mtgpu.GPUID in (meta.get("annotations") or {}) or (mtgpu.API_VERSION, mtgpu.KIND) in kinds


def _occupied_by_name(key: Key) -> tuple[str, str] | None:
    """Return the node and GPUID that a Pod of this name would occupy a card for; None: no occupy pod is named so."""
    namespace, name = key
    return mtgpu.occupied(Pod(namespace, name, labels={mtgpu.OCCUPY_LABEL: name.rpartition("-")[2]}))


def _put(index: dict[str, dict[str, V]], node: str, gpuid: str, value: V | None) -> None:
    """Set the value of a node and GPUID; None removes it."""
    there = index.setdefault(node, {})
    there.pop(gpuid, None)
    if value is not None:
        there[gpuid] = value
    if not there:
        del index[node]
