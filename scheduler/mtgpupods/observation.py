"""A snapshot of the MtgpuPods of a node: from the watches, and of its cards from the ClusterCache."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from mgpu.dialects import mtgpu
from mgpu.dialects.mtgpu import MtgpuPod
from mgpu.model.errors import BadObject
from mgpu.model.pods import read_pod
from mgpu.model.raw_objects import table_at
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.gpuids import Bound
from scheduler.cluster.mtgpupod_holdings import MtgpuNode
from scheduler.engine import nvidia_plugin
from scheduler.mtgpupods.mtgpupod_cache import Key, Known, OnNode, Raw, is_own
from scheduler.mtgpupods.observed_node import Broken, Seen
from scheduler.mtgpupods.occupy_pods import Occupy, read_occupy
from scheduler.mtgpupods.owned_pods import Made, read_made
from scheduler.mtgpupods.stored_objects import EXCESS, Texts
from scheduler.mtgpupods.taints import untolerated

_PROBLEMS = 4096
"""Characters of the problems of an MtgpuPod that cannot be read. Its condition repeats fewer."""


@dataclass(frozen=True, slots=True)
class Look:
    """items, own: the MtgpuPods and the Pods made for them, by the uid of the MtgpuPod, as the API has them. version:
    of the node, as the cache counts. recheck: seconds after which a namespace is no longer held up; None: none is.
    """

    seen: Seen
    version: int
    items: Texts[str]
    own: Texts[str]
    recheck: float | None = None


@dataclass(slots=True)
class _Items:
    pods: list[MtgpuPod] = field(default_factory=list)
    broken: list[Broken] = field(default_factory=list)
    texts: dict[str, bytes] = field(default_factory=dict)
    own: dict[str, bytes] = field(default_factory=dict)
    untolerated: dict[str, str] = field(default_factory=dict)
    made: dict[str, Made] = field(default_factory=dict)
    conflicts: set[str] = field(default_factory=set)


def look(
    known: Known,
    state: ClusterCache,
    name: str,
    *,
    serving: bool,
    most: int | None = None,
    left_out: Collection[str] = (),
) -> Look:
    """serving False: those that are not bound yet are not looked at. left_out: those of which nothing is to be begun.
    most: the number of GPUIDs that a namespace may use; None: any number.

    What feeds both must not go on meanwhile: else a Pod that was just made would look like somebody else's.
    """
    there, node = known.on(name), state.mtgpus.on(name)
    items = _Items()
    for key, raw in there.items.items():
        pod = read(raw)
        if isinstance(pod, MtgpuPod) and not _is_served(pod, serving=serving, left_out=left_out):
            continue
        _take(items, pod, there, key, raw)
        _find_pod(items, raw, there, key, state.uid_of(*key))
    namespaces = {key[0] for key in there.items}
    held_up = state.mtgpus.held_up(namespaces, name)
    seen = Seen(
        name,
        tuple(items.pods),
        tuple(card.card for card in node.cards),
        node.held,
        present=node.node is not None,
        unschedulable=there.unschedulable,
        stock=nvidia_plugin.is_there(node.node),
        untolerated=items.untolerated,
        broken=tuple(items.broken),
        made=items.made,
        conflicts=frozenset(items.conflicts),
        occupies=_occupies(name, items.pods, there.occupies, node, state),
        admitted=node.admitted,
        bound=None if most is None else Bound(most, state.mtgpus.elsewhere(namespaces, name)),
        held_up=frozenset(held_up),
        remnants=node.remnants,
    )
    return Look(seen, node.version, Texts(items.texts), Texts(items.own), min(held_up.values(), default=None))


def read(raw: Raw) -> MtgpuPod | Broken:
    """Return the MtgpuPod. One that is bound is read even where its spec is too large: its account does not need it."""
    excess = raw.get(EXCESS)
    if excess and not table_at(raw, "status").get("BoundDeviceID"):
        return _broken(raw, excess)
    try:
        return mtgpu.read_mtgpupod(raw)
    except BadObject as error:
        return _broken(raw, str(error))


def _broken(raw: Raw, problems: str) -> Broken:
    meta = raw["metadata"]
    key = f"{meta['namespace']}/{meta['name']}"
    return Broken(meta["uid"], key, problems[:_PROBLEMS], deleting="deletionTimestamp" in meta)


def _is_served(pod: MtgpuPod, *, serving: bool, left_out: Collection[str]) -> bool:
    """One that is bound stays so, and one that is being deleted has to go, whatever else."""
    return bool(pod.bound) or pod.deleting or (serving and pod.uid not in left_out)


def _take(items: _Items, pod: MtgpuPod | Broken, there: OnNode, key: Key, raw: Raw) -> None:
    items.texts[pod.uid] = there.items.text(key)
    if isinstance(pod, Broken):
        items.broken.append(pod)
        return
    items.pods.append(pod)
    taint = untolerated(table_at(raw, "spec"), there.taints)
    if taint:
        items.untolerated[pod.uid] = taint


def _find_pod(items: _Items, raw: Raw, there: OnNode, key: Key, uid_of_name: str | None) -> None:
    """Take the Pod of its name for its own, or for somebody else's."""
    uid, made = raw["metadata"]["uid"], there.made.get(key)
    if made is not None and is_own(made, raw):
        items.own[uid], items.made[uid] = there.made.text(key), read_made(made)
    elif uid_of_name is not None:
        items.conflicts.add(uid)


def _occupies(
    node: str, pods: Collection[MtgpuPod], ours: Mapping[str, Raw], there: MtgpuNode, state: ClusterCache
) -> dict[str, Occupy]:
    found = {}
    for gpuid, raw in sorted(ours.items()):
        pod = read_pod(raw)
        found[gpuid] = read_occupy(raw, pod, there.occupied.get(pod.uid, ""))
    for gpuid in sorted({pod.gpuid for pod in pods} - set(found)):
        uid = state.uid_of(*occupy_key(node, gpuid))
        if uid is not None:
            found[gpuid] = Occupy(uid, ours=False)
    return found


def occupy_key(node: str, gpuid: str) -> Key:
    return mtgpu.OCCUPY_NAMESPACE, mtgpu.occupy_name(node, gpuid)
