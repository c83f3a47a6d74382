"""GPU pods as the scheduler reads them: their request, and the cards in their allocation record.

`PodReader` reads the pods of the informer with `make_gpu_pod`, and keeps what `trim` leaves of them. Other pods,
such as those in calls of kube-scheduler, are read with `read_gpu_pod`. Users choose the size of a pod, so `trim` must
leave only what the filter, a decision or the web page reads.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mgpu import dialects
from mgpu.dialects import mtgpu, watched_pods
from mgpu.dialects.record_verification import UNSEALED, Finding, RecordVerifier, Verdict
from mgpu.dialects.registry import vocabularies
from mgpu.model import budget
from mgpu.model.errors import BadObject, Problem, shorten_problems
from mgpu.model.gpu_requests import GpuRequest
from mgpu.model.ledger import Share, unknown_shares
from mgpu.model.pod_constraints import NO_CONSTRAINTS, Constraints
from mgpu.model.pods import Pod, read_pod
from mgpu.model.record_seals import SEAL
from mgpu.settings import Settings


@dataclass(frozen=True, slots=True)
class GpuPod:
    """A pod that requests GPUs.

    Attributes:
        pod: The pod. If its allocation record is invalid, the record is left out.
        request: The request, or None if it is malformed or cannot be served.
        problems: The reasons why the request is malformed or cannot be served.
        version: The resourceVersion of the pod.
        verdict: The result of the verification of the allocation record, or None if there was nothing to verify.
        fingerprint: The digest of everything that was read of the pod (`mgpu.dialects.watched_pods`), or None if the
            pod does not come from an informer.
        shares: The shares in the allocation record, if they were read together with the pod; otherwise None
            (`recorded_shares`).
    """

    pod: Pod
    request: GpuRequest | None
    problems: tuple[Problem, ...] = ()
    version: str = ""
    verdict: Verdict | None = None
    fingerprint: bytes | None = field(default=None, compare=False)
    shares: tuple[Share, ...] | None = field(default=None, compare=False)

    @property
    def finding(self) -> Finding | None:
        """The reason why the pod's allocation record is invalid, or None."""
        return self.verdict.finding if self.verdict is not None else None

    @property
    def dialect(self) -> str:
        """The dialect of the request; "" if `request` is None."""
        return self.request.dialect if self.request is not None else ""

    @property
    def constraints(self) -> Constraints:
        """The constraints of the request; none if `request` is None."""
        return self.request.constraints if self.request is not None else NO_CONSTRAINTS


def read_gpu_pod(raw: Mapping[str, Any], settings: Settings, records: RecordVerifier = UNSEALED) -> GpuPod | None:
    """Return the pod, or None if it requests no GPU in an enabled vocabulary. Raises BadObject for a malformed pod."""
    return make_gpu_pod(read_pod(raw), raw, settings, records)


def make_gpu_pod(
    pod: Pod,
    raw: Mapping[str, Any],
    settings: Settings,
    records: RecordVerifier = UNSEALED,
    before: Verdict | None = None,
) -> GpuPod | None:
    """Return the GPU pod for a pod that has been read, or None if it requests no GPU in an enabled vocabulary.

    Args:
        before: The last verdict on the pod's allocation record. It is used again if the record has not changed.
    """
    version = str((raw.get("metadata") or {}).get("resourceVersion", ""))
    pod, verdict = records.judge(dialects.drop_unread_annotations(pod), before)
    excess = budget.excess_of_containers(raw) if pod.node else budget.excess(raw)
    if excess:
        few = replace(pod, containers=pod.containers[:1])
        return _rejected(few, excess, version, verdict) if _is_ours(pod) else None
    try:
        request = dialects.read_request(pod, settings)
    except BadObject as error:
        return _rejected(pod, error.problems, version, verdict)
    if request is None:
        return None
    problems = () if pod.node else tuple(_incomplete_containers(pod, request, settings))
    return _rejected(pod, problems, version, verdict) if problems else GpuPod(pod, request, (), version, verdict)


def _is_ours(pod: Pod) -> bool:
    """Return whether the pod requests GPUs in a vocabulary, so that it is a GPU pod even if it cannot be read.

    For a bound Pod of an MtgpuPod the vocabulary of MtgpuPods does not count, because the MtgpuPod has the holding.
    """
    return bool(vocabularies(pod).keys() - ({mtgpu.NAME} if pod.node else set()))


def trim(gpu_pod: GpuPod) -> GpuPod:
    """Return the part of a pod that the scheduler stores.

    Of the request of a pod that has ended, only the vocabulary remains, because such a pod holds nothing. There may be
    many: by default, Kubernetes keeps up to 12,500 pods that have ended.
    """
    pod = gpu_pod.pod
    request = gpu_pod.request
    if pod.ended:
        pod = replace(pod, containers=(), ran=frozenset())
        gpu_pod = replace(gpu_pod, problems=())
        request = request and GpuRequest(request.dialect, ())
    if pod.ended or request is None:
        pod = replace(pod, annotations={})
    # The allocation record of a pod that is not bound has no effect.
    pod = watched_pods.stored_pod(pod, record=bool(pod.node))
    if SEAL in pod.annotations:
        # The seal has been verified. Without it, all pods of one workload on cards of one number have equal records.
        pod = replace(pod, annotations={key: text for key, text in pod.annotations.items() if key != SEAL})
    return replace(gpu_pod, pod=pod, request=request)


def with_current_labels(gpu_pod: GpuPod, raw: Mapping[str, Any]) -> GpuPod:
    """Return the pod with the labels and the resourceVersion of `raw`, which must agree with it in everything else."""
    meta = raw["metadata"]
    labels = watched_pods.stored_labels(meta.get("labels") or {})
    return replace(gpu_pod, pod=replace(gpu_pod.pod, labels=labels), version=str(meta.get("resourceVersion", "")))


def _rejected(pod: Pod, problems: Sequence[Problem], version: str, verdict: Verdict | None) -> GpuPod:
    """Return a pod that gets no cards. Its containers, which may be many, are stored only if it is bound."""
    return GpuPod(pod if pod.node else replace(pod, containers=()), None, shorten_problems(problems), version, verdict)


def _incomplete_containers(pod: Pod, request: GpuRequest, settings: Settings) -> Iterator[Problem]:
    """Yield a problem for each container that would start without the node agent, and so without its cards.

    Such a container has not passed mgpu's webhook, or it has passed the webhook under other settings.
    """
    served = dialects.device_containers(request)
    for container in pod.containers:
        if container.name in served and not dialects.carrier(container, settings):
            text = "requests no resource that a device plugin allocates; delete and create the pod again, so that "
            yield Problem(f"{container.path}.resources", text + "mgpu's webhook adds one")


def occupied_gpuid(pod: Pod, node: str) -> str:
    """Return the GPUID for which this pod occupies a card of this node; "" if it is no occupy pod of the node."""
    target = mtgpu.occupy_target(pod)
    return target[1] if target and target[0] == node else ""


def node_left(before: GpuPod | None, now: GpuPod | None) -> str | None:
    """Return the node that a pod has left, or None. A pod is on the node to which it is bound or else nominated."""
    place = _place(before)
    return place if place != _place(now) else None


def _place(gpu_pod: GpuPod | None) -> str | None:
    if gpu_pod is None or gpu_pod.pod.ended:
        return None
    return gpu_pod.pod.node or gpu_pod.pod.nominated_node or None


def recorded_shares(gpu_pod: GpuPod) -> tuple[Share, ...] | None:
    """Return the shares in the allocation record of a pod, or None if it has no record.

    Raises BadObject if the request or the record cannot be read.
    """
    if gpu_pod.shares is not None:
        return gpu_pod.shares
    if gpu_pod.request is None:
        raise BadObject(gpu_pod.problems)
    return dialects.read_placement(gpu_pod.pod, gpu_pod.request)


def shares_on_unknown_cards(gpu_pod: GpuPod, *, has_record: bool) -> tuple[Share, ...]:
    """Return the shares that a pod holds while it runs on unknown cards.

    Args:
        has_record: Whether the pod has an allocation record, which is unreadable or invalid.
    """
    if gpu_pod.request is not None:
        return unknown_shares(gpu_pod.request, gpu_pod.pod, recorded=has_record)
    # Even the size of its request is unknown: it may use any card completely.
    container = gpu_pod.pod.containers[0].name if gpu_pod.pod.containers else ""
    return (Share(container, None, whole=True),)


def scheduling_order(gpu_pod: GpuPod) -> tuple[bool, int, str, str, str]:
    """Return the sort key for the order in which kube-scheduler tries waiting pods: by priority and age.

    Gated pods are last, since no scheduler tries them.
    """
    pod = gpu_pod.pod
    return pod.gated, -pod.priority, pod.created, pod.key, pod.uid
