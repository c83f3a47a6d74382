"""Reads a pod of this node: its request, its allocation record, and which of its containers have run.

`node_pods.NodePods` reads the pods that the watch delivers. A node may have thousands of pods, and users can create
large ones, so a `GpuPod` contains only those fields of the pod that the agent reads later. `NodePods` ignores a change
of a pod if the fingerprint (`mgpu.dialects.watched_pods`) stays the same, so every field of the API object that is read
here must be part of the fingerprint.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mgpu import dialects
from mgpu.dialects import mtgpu, watched_pods
from mgpu.dialects.record_verification import UNSEALED, Finding, RecordVerifier, Verdict
from mgpu.dialects.registry import vocabularies
from mgpu.dialects.watched_pods import limit_containers
from mgpu.model import budget
from mgpu.model.errors import BadObject
from mgpu.model.gpu_requests import Amount, ContainerRequest, GpuRequest, peak
from mgpu.model.ledger import Share
from mgpu.model.pods import Container, Pod, read_pod
from mgpu.model.quantities import QuantityError, whole_number
from mgpu.model.raw_objects import table_at
from mgpu.model.resizing import RESIZED, limited_shares, read_sizes
from mgpu.settings import Settings

log = logging.getLogger(__name__)

MIRROR = "kubernetes.io/config.mirror"
"""The annotation of a mirror pod that contains the UID by which the kubelet knows the static pod."""
GRACE_SECONDS = 30
"""Kubernetes' default of `terminationGracePeriodSeconds`."""
_CONTROL = "CUDA_DISABLE_CONTROL"
_STATIC = re.compile(r"[^-]{1,64}")
"""The UID by which the kubelet knows a static pod: the hash of its manifest, which has 32 digits. The limit exists
because users can write the annotation."""


def kubelets_uid(annotations: Mapping[str, str], uid: str) -> str:
    """Return the UID by which the kubelet knows the pod whose UID in the API is `uid`.

    The two differ for a static pod, which the kubelet knows by a hash without "-". Users can write the annotation
    `MIRROR` too, so a value with "-" is ignored: it could be the UID of another pod.
    """
    mirror = annotations.get(MIRROR, "")
    return mirror if _STATIC.fullmatch(mirror) else uid


def is_static(kubelets: str) -> bool:
    """Return whether a pod that the kubelet knows by this UID is a static pod. UIDs of the API contain "-"."""
    return "-" not in kubelets


@dataclass(frozen=True, slots=True)
class GpuPod:
    """A pod of this node that requests GPUs.

    Attributes:
        pod: The fields of the pod that the agent needs.
        request: The GPU request; None if it is invalid or the pod has ended.
        shares: The shares in the allocation record; None if there is no valid record, or if `request` is None.
        problem: Why no container may start: the request or the record cannot be read, or the pod has ended. None
            otherwise.
        started_containers: The containers that request GPUs or slices and have run; empty if `request` is None.
        completed_init_containers: The init containers that have succeeded.
        amounts: For each resource, the containers that request it, each with the amount, in the order in which the
            kubelet allocates.
        held: For each resource, the largest amount that the pod's containers request at the same time.
        carriers: For each container, the resource for which the agent answers Allocate with the container's cards
            (`dialects.carrier`).
        verdict: The verdict on the record's seal; None if there was nothing to verify. If the verdict is negative,
            `pod` does not contain the record.
        control_disabled: The containers whose spec sets CUDA_DISABLE_CONTROL to true, which asks HAMi-core not to limit
            them.
        grace: The time in seconds that the containers may run after the deletion of the pod.
        fingerprint: The fingerprint (`watched_pods`) of the API object. `NodePods` sets it, unless `pod` has
            annotations that the API server does not have yet.
    """

    pod: Pod
    request: GpuRequest | None = None
    shares: tuple[Share, ...] | None = None
    problem: str | None = None
    started_containers: frozenset[str] = frozenset()
    completed_init_containers: frozenset[str] = frozenset()
    amounts: Mapping[str, tuple[tuple[Container, int], ...]] = field(default_factory=dict, hash=False)
    held: Mapping[str, int] = field(default_factory=dict, hash=False)
    carriers: Mapping[str, str] = field(default_factory=dict, hash=False)
    verdict: Verdict | None = None
    control_disabled: frozenset[str] = frozenset()
    grace: int = GRACE_SECONDS
    fingerprint: bytes | None = field(default=None, compare=False)

    @property
    def finding(self) -> Finding | None:
        return self.verdict.finding if self.verdict is not None else None

    @property
    def is_decided(self) -> bool:
        """Whether it is useless to wait for a decision, because there is a record or a problem."""
        return self.shares is not None or self.problem is not None

    @property
    def limited_shares(self) -> tuple[Share, ...] | None:
        """The shares to which containers must be limited. While a limit is being lowered, they are below `shares`."""
        if self.shares is None or RESIZED not in self.pod.annotations:
            return self.shares
        return limited_shares(self.shares, read_sizes(self.pod.annotations))

    def container_requests(self, container: str) -> tuple[ContainerRequest, ...]:
        """Return the container's requests: one for GPUs, or one for each type of slices; () if it has none."""
        return dialects.device_requests(self.request, container) if self.request else ()

    def containers_requesting(self, resource: str) -> tuple[tuple[Container, int], ...]:
        """Return the containers that request the resource, with amounts, in the order of the kubelet's allocations."""
        return self.amounts.get(resource, ())


@dataclass(frozen=True, slots=True, order=True)
class LimitedPod:
    """The Pod that the scheduler has created for an MtgpuPod, with its share of a card.

    Attributes:
        card: The UUID of the card.
        request: The guaranteed compute, in thousandths of the card.
        limit: The maximum compute, in thousandths of the card.
        memory: The memory in bytes.
    """

    namespace: str
    name: str
    uid: str
    card: str
    request: int
    limit: int
    memory: int


def read_limited(raw: Mapping[str, Any]) -> LimitedPod | None:
    """Return the Pod of an MtgpuPod; None for other pods, and for Pods without a valid share or without a card.

    The owner reference identifies the Pod of an MtgpuPod. If the reference was removed, the seal identifies the Pod.
    The caller checks the seal. In a cluster without seals, only the admission webhook prevents users from writing these
    annotations.
    """
    meta = raw["metadata"]
    if not mtgpu.claimed_mtgpupod(raw):
        return None
    try:
        share = mtgpu.read_share(meta.get("annotations") or {})
    except BadObject:
        return None
    card = mtgpu.visible_card(raw)
    return LimitedPod(meta.get("namespace", "default"), meta["name"], meta["uid"], card, *share) if card else None


def read_gpu_pod(
    raw: Mapping[str, Any],
    settings: Settings,
    amended: Mapping[str, str] | None = None,
    records: RecordVerifier = UNSEALED,
    before: Verdict | None = None,
) -> GpuPod | None:
    """Return the pod, or None if it requests no GPU or is not a readable pod.

    If the request or the record is not valid, the pod's `problem` says why.

    Args:
        amended: Annotations that the API server does not have yet. They replace those of `raw` with the same keys.
        before: The verdict on the record when the pod was read last; None if it was not.
    """
    try:
        pod = read_pod(limit_containers(raw))
    except BadObject as error:
        meta = raw["metadata"]
        log.warning("pod cannot be read: %s", error, extra={"pod": meta.get("uid", "")})
        return None
    pod, verdict = records.judge(dialects.drop_unread_annotations(with_annotations(pod, amended or {}), MIRROR), before)
    if large := budget.excess_of_containers(raw):
        few = _kept(replace(pod, containers=pod.containers[:1]))
        return GpuPod(few, problem=str(BadObject(large)), verdict=verdict) if vocabularies(pod) else None
    small = _kept(pod)
    amounts = _amounts(small)
    held = {r: peak((c.stage, Amount(memory=n)) for c, n in rows).memory for r, rows in amounts.items()}
    ran, done = _history(raw.get("status") or {})
    carriers = {c.name: name for c in pod.containers if (name := dialects.carrier(c, settings))}
    gpu_pod = GpuPod(
        small,
        completed_init_containers=done,
        amounts=amounts,
        held=held,
        carriers=carriers,
        verdict=verdict,
        control_disabled=_control_disabled(raw),
        grace=_grace(raw),
    )
    try:
        request = dialects.read_request(pod, settings)
    except BadObject as error:
        gpu_pod = replace(gpu_pod, problem=str(error))
        return _ended(gpu_pod) if pod.ended else gpu_pod
    if request is None:
        return None
    ran &= {asked.container for asked in dialects.device_requests(request)}
    gpu_pod = with_record(replace(gpu_pod, request=request, started_containers=ran))
    return _ended(gpu_pod) if pod.ended else gpu_pod


def with_annotations(pod: Pod, annotations: Mapping[str, str]) -> Pod:
    return replace(pod, annotations={**pod.annotations, **annotations}) if annotations else pod


def with_record(gpu_pod: GpuPod) -> GpuPod:
    """Return the pod with `shares` and `problem` read from its annotations. Without a request it is unchanged."""
    if gpu_pod.request is None:
        return gpu_pod
    try:
        shares = dialects.read_placement(gpu_pod.pod, gpu_pod.request)
    except BadObject as error:
        return replace(gpu_pod, shares=None, problem=str(error))
    return replace(gpu_pod, shares=shares, problem=None)


def had_ended(raw: Mapping[str, Any]) -> bool:
    """Return whether the pod has ended, according to its phase or to the statuses of all its containers.

    A kubelet older than 1.27 reports no final phase for a pod that is being deleted, so the phase alone is not enough.
    """
    status = raw.get("status") or {}
    rows = [row for kind in ("initContainerStatuses", "containerStatuses") for row in status.get(kind) or ()]
    ended = bool(rows) and all("terminated" in (row.get("state") or {}) for row in rows)
    return ended or status.get("phase") in ("Succeeded", "Failed")


def _ended(gpu_pod: GpuPod) -> GpuPod:
    """Return only the identity of an ended pod, since a node may have thousands of failed pods.

    No container of an ended pod starts again, and its record holds nothing. If the phase is reported before the
    containers have ended, the receipt says which cards the containers still use (`deviceplugin.pods.remnants`).
    """
    pod = gpu_pod.pod
    mirror = pod.annotations.get(MIRROR)
    identity = Pod(pod.namespace, pod.name, pod.uid, node=pod.node, phase=pod.phase, created=pod.created)
    identity = replace(identity, annotations={} if mirror is None else {MIRROR: mirror})
    return GpuPod(identity, problem="the pod has ended", grace=gpu_pod.grace)


def _kept(pod: Pod) -> Pod:
    """Return the part of a pod that the agent stores. The label of occupy pods and a valid mirror annotation stay."""
    labels = {key: text for key, text in pod.labels.items() if key == mtgpu.OCCUPY_LABEL}
    small = watched_pods.stored_pod(replace(pod, labels=labels), record=True)
    mirror = pod.annotations.get(MIRROR, "")
    if kubelets_uid(pod.annotations, "") != mirror or not mirror:
        return small
    return replace(small, annotations={**small.annotations, MIRROR: mirror})


def _amounts(pod: Pod) -> dict[str, tuple[tuple[Container, int], ...]]:
    found: dict[str, list[tuple[Container, int]]] = {}
    for container, resource in pod.resources():
        if amount := _amount(container, resource):
            found.setdefault(resource, []).append((container, amount))
    return {resource: tuple(rows) for resource, rows in found.items()}


def _amount(container: Container, resource: str) -> int:
    asked = container.requested(resource)
    try:
        return whole_number(asked[0]) if asked else 0
    except QuantityError:
        return 0  # A fraction, as of a CPU. The API server accepts no fraction of an extended resource.


def _control_disabled(raw: Mapping[str, Any]) -> frozenset[str]:
    """Return the containers that set CUDA_DISABLE_CONTROL. The fingerprint does not cover it: variables are fixed."""
    spec = table_at(raw, "spec")
    rows = [row for kind in ("initContainers", "containers") for row in spec.get(kind) or () if isinstance(row, dict)]
    return frozenset(str(row.get("name")) for row in rows if any(map(_disables_control, _env(row))))


def _disables_control(variable: Any) -> bool:
    return isinstance(variable, dict) and variable.get("name") == _CONTROL and variable.get("value") == "true"


def _env(container: Mapping[str, Any]) -> Sequence[Any]:
    found = container.get("env")
    return found if isinstance(found, list) else ()


def _grace(raw: Mapping[str, Any]) -> int:
    """Return the grace period in the pod's spec or that of its deletion, whichever is longer, in seconds."""
    given = (
        (raw.get("spec") or {}).get("terminationGracePeriodSeconds"),
        raw["metadata"].get("deletionGracePeriodSeconds"),
    )
    return max((n for n in given if isinstance(n, int)), default=GRACE_SECONDS)


def _history(status: Mapping[str, Any]) -> tuple[frozenset[str], frozenset[str]]:
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
