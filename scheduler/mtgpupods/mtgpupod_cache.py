"""What the controller of MtgpuPods knows of them as the watches bring it, and of the Pods that were made for them."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mgpu.dialects import mtgpu
from mgpu.dialects.record_verification import UNSEALED, RecordVerifier
from mgpu.model.pods import Pod, read_pod
from mgpu.model.raw_objects import table_at
from scheduler.mtgpupods.stored_objects import Texts, of_mtgpupod, of_occupy_pod, of_own_pod, read_text, text_of
from scheduler.mtgpupods.taints import evicting

Raw = Mapping[str, Any]
Key = tuple[str, str]
"""Namespace and name."""


@dataclass(frozen=True, slots=True)
class OnNode:
    """What is known of one node at one moment: objects of `scheduler.mtgpupods.stored_objects`, decoded one by one.

    items: its MtgpuPods, in the order of their keys. made: the Pods of these names that were made for MtgpuPods, not
    necessarily for these. occupies: its occupy pods, by GPUID. unschedulable: it is cordoned. taints: those of the node
    that end Pods (`evicting`).
    """

    items: Texts[Key]
    made: Texts[Key]
    occupies: Mapping[str, Raw]
    unschedulable: bool
    taints: tuple[Raw, ...]


class Known:
    """Not thread-safe, but for `concerns`. What takes an object returns the nodes whose MtgpuPods it may concern."""

    def __init__(self, records: RecordVerifier = UNSEALED) -> None:
        self._records = records
        self._items: dict[Key, bytes] = {}
        self._node_of: dict[Key, str] = {}
        self._on: dict[str, set[Key]] = {}
        self._made: dict[Key, bytes] = {}
        self._occupies: dict[str, dict[str, bytes]] = {}
        self._unschedulable: set[str] = set()
        self._taints: dict[str, tuple[Raw, ...]] = {}

    def mtgpupod_changed(self, raw: Raw) -> Collection[str]:
        key, node = key_of(raw), node_of(raw)
        before = self._drop(key)
        self._items[key], self._node_of[key] = text_of(of_mtgpupod(raw)), node
        self._on.setdefault(node, set()).add(key)
        return {*before, node}

    def mtgpupod_gone(self, raw: Raw) -> Collection[str]:
        return self._drop(key_of(raw))

    def pod_changed(self, raw: Raw) -> Collection[str]:
        """Any Pod: one that has the name of an MtgpuPod concerns it, whoever made it."""
        return self._pod(key_of(raw), raw)

    def pod_gone(self, raw: Raw) -> Collection[str]:
        return self._pod(key_of(raw), None)

    def node_changed(self, raw: Raw) -> Collection[str]:
        cordoned = bool((raw.get("spec") or {}).get("unschedulable"))
        return self._node(raw["metadata"]["name"], evicting(raw), cordoned=cordoned)

    def node_gone(self, raw: Raw) -> Collection[str]:
        return self._node(raw["metadata"]["name"], (), cordoned=False)

    def on(self, node: str) -> OnNode:
        items = Texts({key: self._items[key] for key in sorted(self._on.get(node, ()))})
        made = Texts({key: self._made[key] for key in items if key in self._made})
        occupies = {gpuid: read_text(text) for gpuid, text in self._occupies.get(node, {}).items()}
        cordoned, taints = node in self._unschedulable, self._taints.get(node, ())
        return OnNode(items, made, occupies, cordoned, taints)

    def items(self) -> Iterator[Raw]:
        """All MtgpuPods that are known now, one decoded after the other."""
        return map(read_text, tuple(self._items.values()))

    def concerns(self, node: str) -> bool:
        """Whether there is anything to look at on this node."""
        return node in self._on or node in self._occupies

    def nodes(self) -> tuple[str, ...]:
        """Those of which that can be said, in order."""
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

    def _pod(self, key: Key, now: Raw | None) -> Collection[str]:
        self._made.pop(key, None)
        if now is not None and _is_made(now) and self._records.finding_of_mtgpu(now) is None:
            self._made[key] = text_of(of_own_pod(now))
        concerned = {self._node_of[key]} if key in self._node_of else set()
        named = _named(key)
        if named is not None:
            concerned.add(named[0])
            self._occupy(*named, now)
        return concerned

    def _occupy(self, node: str, gpuid: str, now: Raw | None) -> None:
        """One of this name without the label is nobody's, but has the name."""
        there = self._occupies.setdefault(node, {})
        there.pop(gpuid, None)
        if now is not None and mtgpu.occupied(read_pod(now)):
            there[gpuid] = text_of(of_occupy_pod(now))
        if not there:
            del self._occupies[node]


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


def _named(key: Key) -> tuple[str, str] | None:
    """The node and GPUID that a Pod of this name would occupy a card for; None: no occupy pod is named so."""
    namespace, name = key
    return mtgpu.occupied(Pod(namespace, name, labels={mtgpu.OCCUPY_LABEL: name.rpartition("-")[2]}))
