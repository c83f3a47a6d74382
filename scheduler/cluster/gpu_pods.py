"""Pods that ask for GPU, and what their annotations say of the cards they got."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mgpu import dialects
from mgpu.dialects import mtgpu, watched_pods
from mgpu.dialects.record_verification import UNSEALED, Finding, RecordVerifier, Verdict
from mgpu.dialects.registry import vocabularies
from mgpu.model import budget
from mgpu.model.errors import BadObject, Problem, first
from mgpu.model.gpu_requests import GpuRequest
from mgpu.model.ledger import Share, unknown_shares
from mgpu.model.pod_constraints import NONE, Constraints
from mgpu.model.pods import Pod, read_pod
from mgpu.settings import Settings


@dataclass(frozen=True, slots=True)
class GpuPod:
    """A pod that asks for GPU. `ask` None: malformed, `problems` say how. version: its resourceVersion.

    judged: what was found of its record; where that does not count, `pod` is without it. fingerprint: of all
    that was read of it, where an informer brought it (`mgpu.dialects.watched_pods`).
    """

    pod: Pod
    request: GpuRequest | None
    problems: tuple[Problem, ...] = ()
    version: str = ""
    judged: Verdict | None = None
    fingerprint: bytes | None = field(default=None, compare=False)

    @property
    def finding(self) -> Finding | None:
        return self.judged.finding if self.judged is not None else None

    @property
    def dialect(self) -> str:
        """ "": not known, a malformed ask belongs to none."""
        return self.request.dialect if self.request is not None else ""

    @property
    def constraints(self) -> Constraints:
        return self.request.constraints if self.request is not None else NONE


def read_gpu_pod(raw: Mapping[str, Any], settings: Settings, records: RecordVerifier = UNSEALED) -> GpuPod | None:
    """The pod, if it asks for GPU in a vocabulary that is served. Raises BadObject only where it is no pod at all."""
    return gpu_pod_of(read_pod(raw), raw, settings, records)


def gpu_pod_of(
    pod: Pod,
    raw: Mapping[str, Any],
    settings: Settings,
    records: RecordVerifier = UNSEALED,
    before: Verdict | None = None,
) -> GpuPod | None:
    """The same of a pod that is read already. before: what was found of its record when it was read the last time."""
    version = str((raw.get("metadata") or {}).get("resourceVersion", ""))
    pod, judged = records.judge(dialects.without_unread(pod), before)
    if large := budget.excess_of_containers(raw) if pod.node else budget.excess(raw):
        few = replace(pod, containers=pod.containers[:1])
        return _refused(few, large, version, judged) if _is_ours(pod) else None
    try:
        request = dialects.read_request(pod, settings)
    except BadObject as error:
        return _refused(pod, error.problems, version, judged)
    if request is None:
        return None
    problems = () if pod.node else tuple(_unhanded(pod, request, settings))
    return _refused(pod, problems, version, judged) if problems else GpuPod(pod, request, (), version, judged)


def _is_ours(pod: Pod) -> bool:
    """Whether the pod uses a vocabulary. The bound Pod of an MtgpuPod is accounted for by its MtgpuPod."""
    return bool(vocabularies(pod).keys() - ({mtgpu.NAME} if pod.node else set()))


def kept(known: GpuPod) -> GpuPod:
    """Return the part that the scheduler keeps of a pod, of which users choose the size.

    A pod that has ended holds nothing, and clusters keep 12,500 of them: of what it asked for, the vocabulary remains.
    """
    pod, request = known.pod, known.request
    if pod.ended:
        pod = replace(pod, containers=(), ran=frozenset())
        known, request = replace(known, problems=()), request and GpuRequest(request.dialect, ())
    if pod.ended or known.request is None:
        pod = replace(pod, annotations={})
    # Before it is bound, a record counts for nothing.
    return replace(known, pod=watched_pods.kept(pod, record=bool(pod.node)), request=request)


def renewed(known: GpuPod, raw: Mapping[str, Any]) -> GpuPod:
    """Return a pod of which nothing has changed but its labels and its version."""
    meta = raw["metadata"]
    labels = watched_pods.kept_labels(meta.get("labels") or {})
    return replace(known, pod=replace(known.pod, labels=labels), version=str(meta.get("resourceVersion", "")))


def _refused(pod: Pod, problems: Sequence[Problem], version: str, judged: Verdict | None = None) -> GpuPod:
    """Of a pod that gets no cards nobody looks at its containers, which may be many, before it is bound."""
    return GpuPod(pod if pod.node else replace(pod, containers=()), None, first(problems), version, judged)


def _unhanded(pod: Pod, request: GpuRequest, settings: Settings) -> Iterator[Problem]:
    """Containers that would start without the node agent, and so without their cards: what admission has not completed,
    or not under these settings.
    """
    given = dialects.served(request)
    for container in pod.containers:
        if container.name in given and not dialects.carrier(container, settings):
            text = "asks for nothing that a node hands out as device ids; make the pod anew, and admission completes it"
            yield Problem(f"{container.path}.resources", text)


def occupies(pod: Pod, node: str) -> str:
    """The GPUID for which this pod keeps a card of this node from others; "": for none."""
    found = mtgpu.occupied(pod)
    return found[1] if found and found[0] == node else ""


def left_by(before: GpuPod | None, now: GpuPod | None) -> tuple[str, ...]:
    """The node where a pod had cards, or some were kept for it, and where that is so no more; () for none."""
    places = ["" if p is None or p.pod.ended else p.pod.node or p.pod.nominated_node for p in (before, now)]
    return (places[0],) if places[0] not in ("", places[1]) else ()


def recorded(known: GpuPod) -> tuple[Share, ...] | None:
    """The shares that a pod's annotations record; None: no record. Raises BadObject for an unreadable one."""
    if known.request is None:
        raise BadObject(known.problems)
    return dialects.read_placement(known.pod, known.request)


def shares_unknown(known: GpuPod, *, recorded: bool) -> tuple[Share, ...]:
    """Return what is held for a pod that runs on cards nobody can tell.

    Args:
        recorded: whether it has a record that cannot be read or does not count.
    """
    if known.request is not None:
        return unknown_shares(known.request, known.pod, recorded=recorded)
    # Not even how much it asked for is known: it may use up any card.
    return (Share(known.pod.containers[0].name if known.pod.containers else "", None, whole=True),)
