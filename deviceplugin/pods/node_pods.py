"""The pods of this node, as a watch keeps them: what each asks for, what was decided, how far it has come."""

import logging
import re
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from deviceplugin.pods.limited_pods import Limited, read_limited
from mgpu import dialects
from mgpu.dialects import mtgpu, watched_pods
from mgpu.dialects.record_verification import UNSEALED, Finding, RecordVerifier, Verdict
from mgpu.dialects.registry import vocabularies
from mgpu.dialects.watched_pods import bounded, fingerprint
from mgpu.model import budget
from mgpu.model.errors import BadObject
from mgpu.model.gpu_requests import Amount, ContainerRequest, GpuRequest, peak
from mgpu.model.ledger import Share
from mgpu.model.pods import Container, Pod, read_pod
from mgpu.model.quantities import QuantityError, whole_number
from mgpu.settings import Settings

log = logging.getLogger(__name__)

MIRROR = "kubernetes.io/config.mirror"
"""Of the API server's pod for a static one: the UID by which the kubelet knows it."""
GRACE_SECONDS = 30
"""What Kubernetes takes for `terminationGracePeriodSeconds` where a pod does not say."""
_STATIC = re.compile(r"[^-]{1,64}")
"""The hash of a static pod's manifest has 32 digits. The text is kept of every pod, and users may write it too."""


def kubelets_uid(annotations: Mapping[str, str], uid: str) -> str:
    """The UID by which the kubelet knows the pod with this UID.

    Of a static pod it is a hash, without "-". A user may write the annotation too, with the UID of another pod.
    """
    mirror = annotations.get(MIRROR, "")
    return mirror if _STATIC.fullmatch(mirror) else uid


def is_static(kubelets: str) -> bool:
    """Return whether this UID, by which the kubelet knows a pod, is a static pod's: a UID of the API contains "-"."""
    return "-" not in kubelets


@dataclass(frozen=True, slots=True)
class GpuPod:
    """A pod of this node that asks for GPU.

    shares: its record; None: not decided yet. problem: what makes its ask or its record unreadable, "" where nothing.
    ran: its containers that ask for GPU and have run. done: its init containers that ended well.
    amounts: resource → its containers that ask for it and how much, in the order in which the kubelet allocates.
    held: resource → how much the pod occupies on its node, at its busiest moment, as the scheduler counts.
    carriers: container → the one of its resources whose answer brings its cards (`dialects.carrier`).
    judged: what was found of its record; where that does not count, `pod` is without it and `shares` is None.
    grace: seconds that its containers may run on after its deletion.
    said: the fingerprint of all that was read of it (`watched_pods.fingerprint`); None where its record is not the API
    server's.
    """

    pod: Pod
    request: GpuRequest | None = None
    shares: tuple[Share, ...] | None = None
    problem: str = ""
    ran: frozenset[str] = frozenset()
    done: frozenset[str] = frozenset()
    amounts: Mapping[str, tuple[tuple[Container, int], ...]] = field(default_factory=dict, hash=False)
    held: Mapping[str, int] = field(default_factory=dict, hash=False)
    carriers: Mapping[str, str] = field(default_factory=dict, hash=False)
    judged: Verdict | None = None
    grace: int = GRACE_SECONDS
    said: bytes | None = field(default=None, compare=False)

    @property
    def finding(self) -> Finding | None:
        return self.judged.finding if self.judged is not None else None

    @property
    def decided(self) -> bool:
        """Whether waiting longer cannot tell more: there is a record, or the pod itself is wrong."""
        return self.shares is not None or bool(self.problem)

    def container_request(self, container: str) -> ContainerRequest | None:
        """For cards."""
        return next((c for c in (self.request.containers if self.request else ()) if c.container == container), None)

    def requests(self, container: str) -> tuple[ContainerRequest, ...]:
        """For what the node hands to the container: cards, or slices of one type or several."""
        return dialects.handed(self.request, container) if self.request else ()

    def asking(self, resource: str) -> tuple[tuple[Container, int], ...]:
        return self.amounts.get(resource, ())


class NodePods:
    """Fed by a Reflector (`take`, `drop`), read from any thread. `changed` is called after every change.

    dropped: how many pods have gone so far.
    """

    def __init__(self, settings: Settings, changed: Callable[[], None], records: RecordVerifier = UNSEALED) -> None:
        self._settings, self._changed, self._records = settings, changed, records
        self._pods: dict[str, GpuPod] = {}
        # UID → annotations of ours that are still on their way to the API server.
        self._amended: dict[str, Mapping[str, str]] = {}
        # UID of every pod, GPU or not → (the kubelet's UID, namespace/name, ended).
        self._present: dict[str, tuple[str, str, bool]] = {}
        self._limited: dict[str, Limited] = {}
        self._lost: dict[str, GpuPod] = {}
        self._over: set[str] = set()
        self.dropped = 0
        self._ordered: tuple[GpuPod, ...] | None = None
        self._lock = threading.Lock()

    def take(self, raw: dict[str, Any]) -> None:
        uid = raw["metadata"]["uid"]
        with self._lock:
            annotations = raw["metadata"].get("annotations") or {}
            key = f"{raw['metadata'].get('namespace', 'default')}/{raw['metadata']['name']}"
            ended = (raw.get("status") or {}).get("phase") in ("Succeeded", "Failed")
            present = kubelets_uid(annotations, uid), key, ended
            kept = self._present.get(uid) == present
            self._present[uid] = present
            kept = self._keep_limited(raw, ended=ended) and kept
            amended = self._amended.get(uid, {})
            if amended.items() <= annotations.items():
                self._amended.pop(uid, None)
            before = self._pods.get(uid)
            if kept and not amended and before is not None and before.said == fingerprint(raw, MIRROR):
                return  # nothing has changed that is read of it
            known = read_gpu_pod(raw, self._settings, amended, self._records, before.judged if before else None)
            if known is None and kept:
                return
            if known is not None:
                said = None if amended else fingerprint(raw, MIRROR)
                self._pods[uid], self._ordered = replace(known, said=said), None
        self._changed()

    def drop(self, raw: dict[str, Any]) -> None:
        """Of a pod that vanished while the watch was down no more than its name and UID are told."""
        uid = raw["metadata"]["uid"]
        with self._lock:
            self._amended.pop(uid, None)
            present = self._present.pop(uid, None)
            self._limited.pop(uid, None)
            known, phase = self._pods.pop(uid, None), (raw.get("status") or {}).get("phase")
            if known is not None and known.ran and not known.pod.ended and phase not in ("Succeeded", "Failed"):
                self._lost[uid] = known
            if (present is not None and present[2]) or _is_over(raw):
                self._over.add(uid)
            self._ordered = None
            self.dropped += 1
        self._changed()

    def amend(self, known: GpuPod, annotations: Mapping[str, str]) -> None:
        """The pod's record says this from now on; until the API server says so too, it stands over what it says.

        Nothing where the pod has ended or gone meanwhile.
        """
        uid = known.pod.uid
        with self._lock:
            now = self._pods.get(uid)
            if now is None or now.pod.ended:
                return
            self._amended[uid] = {**self._amended.get(uid, {}), **annotations}
            self._pods[uid] = _with_record(replace(now, pod=_annotated(now.pod, annotations), said=None))
            self._ordered = None
        self._changed()

    def by_uid(self, uid: str) -> GpuPod | None:
        """The pod that the kubelet knows by this UID. Of a static pod that is a hash, which its mirror pod names."""
        with self._lock:
            if uid in self._pods or "-" in uid:
                return self._pods.get(uid)
            return next((known for known in self._pods.values() if known.pod.annotations.get(MIRROR) == uid), None)

    def present(self) -> Mapping[str, tuple[str, bool]]:
        """All pods of the node, those without GPU too: the kubelet's UID → (namespace/name, whether it has ended)."""
        with self._lock:
            return {kubelets: (key, ended) for kubelets, key, ended in self._present.values()}

    def lost(self) -> tuple[GpuPod, ...]:
        """Those that vanished while they ran, and that nobody has forgotten since."""
        with self._lock:
            return tuple(self._lost.values())

    def forget(self, uid: str) -> None:
        """Nothing of this lost one runs any more."""
        with self._lock:
            self._lost.pop(uid, None)

    def is_over(self, uid: str) -> bool:
        """Return whether this pod is gone and its last status said that all of its containers had ended."""
        with self._lock:
            return uid in self._over

    def keep_over(self, uids: Collection[str]) -> None:
        """Forget for all other pods whether they were over."""
        with self._lock:
            self._over &= {*uids}

    def limited(self) -> tuple[Limited, ...]:
        """The Pods of MtgpuPods that have not ended."""
        with self._lock:
            return tuple(sorted(self._limited.values()))

    def _keep_limited(self, raw: Mapping[str, Any], *, ended: bool) -> bool:
        """Whether it is as it was. One that is orphaned is held to its limits for as long as it runs."""
        uid = raw["metadata"]["uid"]
        before = self._limited.pop(uid, None)
        own = None if self._records.finding_of_mtgpu(raw) else read_limited(raw)
        now = None if ended else own or before
        if now:
            self._limited[uid] = now
        return now == before

    def held(self, resource: str) -> int:
        """Return how much of the resource is held by pods that the kubelet has admitted and that have not ended.

        The kubelet sets `status.startTime` when it admits a pod. What other pods ask for must not count: whoever may
        create pods can name this node in them and ask for more than any node has, and the Node would say it has it.
        """
        with self._lock:
            running = (known for known in self._pods.values() if known.pod.start_time and not known.pod.ended)
            return sum(known.held.get(resource, 0) for known in running)

    def all(self) -> tuple[GpuPod, ...]:
        """Oldest first, then by namespace, name and UID."""
        with self._lock:
            if self._ordered is None:
                key = attrgetter("pod.created", "pod.namespace", "pod.name", "pod.uid")
                self._ordered = tuple(sorted(self._pods.values(), key=key))
            return self._ordered


def read_gpu_pod(
    raw: Mapping[str, Any],
    settings: Settings,
    amended: Mapping[str, str] | None = None,
    records: RecordVerifier = UNSEALED,
    before: Verdict | None = None,
) -> GpuPod | None:
    """None: the pod asks for no GPU. What is unreadable in it is its `problem`, so that its containers are refused.

    amended: annotations that stand over its own. before: what was found of its record when it was read the last time.
    """
    try:
        pod = read_pod(bounded(raw))
    except BadObject as error:
        meta = raw["metadata"]
        log.warning("pod cannot be read: %s", error, extra={"pod": meta.get("uid", "")})
        return None
    pod, judged = records.judge(dialects.without_unread(_annotated(pod, amended or {}), MIRROR), before)
    if large := budget.excess_of_containers(raw):
        few = _kept(replace(pod, containers=pod.containers[:1]))
        return GpuPod(few, problem=str(BadObject(large)), judged=judged) if vocabularies(pod) else None
    small = _kept(pod)
    amounts = _amounts(small)
    held = {r: peak((c.stage, Amount(memory=n)) for c, n in rows).memory for r, rows in amounts.items()}
    ran, done = _history(raw.get("status") or {})
    carriers = {c.name: name for c in pod.containers if (name := dialects.carrier(c, settings))}
    known = GpuPod(small, done=done, amounts=amounts, held=held, carriers=carriers, judged=judged, grace=_grace(raw))
    try:
        request = dialects.read_request(pod, settings)
    except BadObject as error:
        known = replace(known, problem=str(error))
        return _ended(known) if pod.ended else known
    if request is None:
        return None
    ran &= {asked.container for asked in dialects.handed(request)}
    known = _with_record(replace(known, request=request, ran=ran))
    return _ended(known) if pod.ended else known


def _ended(known: GpuPod) -> GpuPod:
    """Return the part of an ended pod that an agent keeps: who it is, since a node may have thousands that failed.

    A pod that has ended holds nothing by its record, and no container of it starts again. What its containers still run
    on, if the phase is ahead of them, is in its receipt (`deviceplugin.pods.remnants`).
    """
    pod, mirror = known.pod, known.pod.annotations.get(MIRROR)
    who = Pod(pod.namespace, pod.name, pod.uid, node=pod.node, phase=pod.phase, created=pod.created)
    bare = replace(who, annotations={} if mirror is None else {MIRROR: mirror})
    return GpuPod(bare, problem="the pod has ended", grace=known.grace)


def _kept(pod: Pod) -> Pod:
    """The part of a pod that an agent keeps: the label of occupy pods alone, and who a mirror pod stands for."""
    labels = {key: text for key, text in pod.labels.items() if key == mtgpu.OCCUPY_LABEL}
    small = watched_pods.kept(replace(pod, labels=labels), record=True)
    mirror = pod.annotations.get(MIRROR, "")
    if kubelets_uid(pod.annotations, "") != mirror or not mirror:
        return small
    return replace(small, annotations={**small.annotations, MIRROR: mirror})


def _annotated(pod: Pod, annotations: Mapping[str, str]) -> Pod:
    return replace(pod, annotations={**pod.annotations, **annotations}) if annotations else pod


def _with_record(known: GpuPod) -> GpuPod:
    if known.request is None:
        return known
    try:
        shares = dialects.read_placement(known.pod, known.request)
    except BadObject as error:
        return replace(known, shares=None, problem=str(error))
    return replace(known, shares=shares, problem="")


def _amounts(pod: Pod) -> dict[str, tuple[tuple[Container, int], ...]]:
    found: dict[str, list[tuple[Container, int]]] = {}
    for container, resource in pod.resources():
        if amount := _amount(container, resource):
            found.setdefault(resource, []).append((container, amount))
    return {resource: tuple(rows) for resource, rows in found.items()}


def _amount(container: Container, resource: str) -> int:
    asked = container.asked(resource)
    try:
        return whole_number(asked[0]) if asked else 0
    except QuantityError:
        return 0  # half a CPU; the API server takes no fraction of an extended resource


def _grace(raw: Mapping[str, Any]) -> int:
    """Return the longest time that the kubelet may give its containers: a deletion may name more than the pod does."""
    given = (
        (raw.get("spec") or {}).get("terminationGracePeriodSeconds"),
        raw["metadata"].get("deletionGracePeriodSeconds"),
    )
    return max((n for n in given if isinstance(n, int)), default=GRACE_SECONDS)


def _is_over(raw: Mapping[str, Any]) -> bool:
    """Return whether the pod's last status says that all of its containers have ended, by its phase or one by one.

    A kubelet from before 1.27 reports no final phase of a pod that is being deleted.
    """
    status = raw.get("status") or {}
    rows = [row for kind in ("initContainerStatuses", "containerStatuses") for row in status.get(kind) or ()]
    ended = bool(rows) and all("terminated" in (row.get("state") or {}) for row in rows)
    return ended or status.get("phase") in ("Succeeded", "Failed")


def _history(status: Mapping[str, Any]) -> tuple[frozenset[str], frozenset[str]]:
    """(containers that have run, init containers that ended well)."""
    ran, done = set(), set()
    for kind in ("initContainerStatuses", "containerStatuses"):
        for row in status.get(kind) or ():
            states = {**(row.get("lastState") or {}), **(row.get("state") or {})}
            if row.get("containerID") or states.keys() - {"waiting"}:
                ran.add(row["name"])
            ended = (row.get("state") or {}).get("terminated") or {}
            if kind == "initContainerStatuses" and ended and ended.get("exitCode", 0) == 0:
                done.add(row["name"])
    return frozenset(ran), frozenset(done)
