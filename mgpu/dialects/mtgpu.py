"""Defines the vocabulary of MtgpuPods, which are a kind of their own (docs/design/mtgpu.md).

In annotations of an MtgpuPod, a user names a card of a node by a GPUID and requests a part of that card. The controller
(`scheduler.mtgpupods`) creates the Pod that runs. This Pod requests no GPU from the kubelet. Another pod, the occupy
pod, requests `nvidia.com/gpu: 1` and so keeps the card. Therefore this module is not a `Dialect`, and the scheduler,
the webhook, the agents and the commands import it by name (CONTRIBUTING.md, "Adding a dialect"). Users and other
programs rely on the annotations, kinds and names, so these must not change.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mgpu.dialects.protocol import SHARE
from mgpu.dialects.registry import MTGPU_PREFIX, vocabulary_of
from mgpu.model.cards import WHOLE_CORE
from mgpu.model.errors import BadObject, Problem, Rule, raise_if_any
from mgpu.model.ledger import Holding, Share
from mgpu.model.object_names import LONGEST_NAME, is_object_name
from mgpu.model.pod_constraints import CONSTRAINT_ANNOTATIONS as CONSTRAINTS
from mgpu.model.pods import Pod, read_pod
from mgpu.model.quantities import MAX_QUANTITY
from mgpu.model.raw_objects import annotation_path, table_at
from mgpu.model.record_seals import SEAL, Seal, Subject
from mgpu.settings import Settings

NAME = "mtgpu"
API_VERSION = "lsalab.nthu/v1"
KIND = "MtgpuPod"
COLLECTION = f"/apis/{API_VERSION}/mtgpupods"

REQUEST = "lsalab.nthu/gpu_request"
LIMIT = "lsalab.nthu/gpu_limit"
MEMORY = "lsalab.nthu/gpu_mem"
GPUID = "lsalab.nthu/GPUID"
ANNOTATIONS = (REQUEST, LIMIT, MEMORY, GPUID)
"""The annotations that describe the share of an MtgpuPod. All four are required and immutable."""

FINALIZER = "mgpu.io/mtgpupod"
OCCUPY_NAMESPACE = "kube-system"
OCCUPY_LABEL = "mgpu.io/occupies"
"""The label of an occupy pod whose value is its GPUID."""
_OCCUPY = "mtgpupod-occupypod-"
VISIBLE = "NVIDIA_VISIBLE_DEVICES"
CARDS = "MGPU_CARDS"

_DECIMAL = re.compile(r"(0|[1-9]\d{0,3})(?:\.(\d{1,3}))?", re.ASCII)
_BYTES = re.compile(r"[1-9]\d{0,18}", re.ASCII)
_GPUID = re.compile(r"[a-z0-9]{1,63}", re.ASCII)
_NO_NODE = Problem("spec.nodeName", "is missing; the user of an MtgpuPod chooses its node", Rule.MTGPU_INCOMPLETE)
MAX_MEMORY = MAX_QUANTITY // 1000
"""The most bytes that an MtgpuPod may request. No card has nearly as many."""


@dataclass(frozen=True, slots=True)
class MtgpuPod:
    """An MtgpuPod.

    Attributes:
        request: the requested core, in thousandths of its card.
        limit: the limit of the core, in thousandths of its card.
        memory: the requested memory, in bytes.
        card_uuid: the UUID of its card (`status.BoundDeviceID`); None before it has one.
        phase: the value of `status.phase`; `Pending` if the status has none.
        pod_uid: the UID of the Pod that runs for it; "" before that Pod exists.
    """

    namespace: str
    name: str
    uid: str
    node: str
    gpuid: str
    request: int
    limit: int
    memory: int
    created: str = ""
    card_uuid: str | None = None
    phase: str = "Pending"
    pod_uid: str = ""
    deleting: bool = False

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def placement_key(self) -> tuple[str, str, str, int, int, int]:
        """The immutable fields on which the choice of the card depends."""
        return self.uid, self.node, self.gpuid, self.request, self.limit, self.memory

    @property
    def ended(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    @property
    def queue_key(self) -> tuple[str, str, str]:
        """The sort key of waiting MtgpuPods, by the time of creation."""
        return self.created, self.key, self.uid


def enabled(settings: Settings) -> bool:
    return settings.dialects.mtgpu.enabled


def read_mtgpupod(raw: Mapping[str, Any]) -> MtgpuPod:
    """Return the MtgpuPod in `raw`. Raises BadObject with every broken rule.

    If the MtgpuPod has a card already, only its share and its node are checked. So mgpu does not forget the holding
    when the rules for other fields become stricter, or when someone adds an annotation.
    """
    pod = read_pod(raw)
    status = raw.get("status") or {}
    bound = status.get("BoundDeviceID")
    created_pod = status.get("PodObjectMeta") or {}
    raise_if_any([*(_holding_problems(pod) if bound else _problems(pod))])
    return MtgpuPod(
        pod.namespace,
        pod.name,
        pod.uid,
        pod.node,
        pod.annotations[GPUID],
        *read_share(pod.annotations),
        pod.created,
        bound if isinstance(bound, str) and bound else None,
        pod.phase,
        str(created_pod.get("uid") or "") if isinstance(created_pod, dict) else "",
        pod.deleting,
    )


def read_share(annotations: Mapping[str, str]) -> tuple[int, int, int]:
    """Return request and limit (thousandths of the card) and memory (bytes) from annotations of an MtgpuPod or its Pod.

    Raises BadObject with every broken rule.
    """
    raise_if_any([*_share_problems(annotations)])
    return parse_milli(annotations[REQUEST]) or 0, parse_milli(annotations[LIMIT]) or 0, int(annotations[MEMORY])


def parse_milli(text: str) -> int | None:
    """Return the exact thousandths of a decimal such as `0.25`, or None if the text is not such a decimal.

    At most 4 digits before the point and 3 after it are allowed.
    """
    match = _DECIMAL.fullmatch(text)
    return int(match[1]) * 1000 + int((match[2] or "").ljust(3, "0")) if match else None


def _problems(pod: Pod) -> Iterator[Problem]:
    yield from _share_problems(pod.annotations)
    for key in sorted(set(CONSTRAINTS) & set(pod.annotations)):
        text = f"is a constraint on cards, but an MtgpuPod names its card by {GPUID}; leave it out"
        yield Problem(annotation_path(key), text, Rule.CONSTRAINT_IMPOSSIBLE)
    yield from _node_problems(pod)
    if pod.gates:
        text = (
            "must be empty: an MtgpuPod names its node, and Kubernetes creates no Pod with a node and scheduling gates"
        )
        yield Problem("spec.schedulingGates", text, Rule.MTGPU_MALFORMED)
    if not pod.app_containers:
        text = "is missing; an MtgpuPod needs at least one container"
        yield Problem("spec.containers", text, Rule.MTGPU_INCOMPLETE)
    for container in pod.containers:
        if container.visible:
            text = "must not be set; mgpu sets it to the card of the GPUID"
            yield Problem(f"{container.path}.env[{VISIBLE}]", text, Rule.MTGPU_ONE_REQUEST)
        for name in dict.fromkeys((*container.requests, *container.limits)):
            amount = container.requested(name)
            if amount and (vocabulary_of(name) or name == SHARE):
                text = f"requests GPU a second time; the annotations {REQUEST} and {MEMORY} state an MtgpuPod's share"
                yield Problem(amount.path, text, Rule.MTGPU_ONE_REQUEST)


def _holding_problems(pod: Pod) -> Iterator[Problem]:
    yield from _share_problems(pod.annotations)
    if not pod.node:
        yield _NO_NODE


def _node_problems(pod: Pod) -> Iterator[Problem]:
    gpuid = pod.annotations.get(GPUID, "")
    if not pod.node:
        yield _NO_NODE
    elif not is_object_name(pod.node):
        text = f"must be the name of a node: lower-case letters, digits, '-' and '.', not {pod.node[:64]!r}"
        yield Problem("spec.nodeName", text, Rule.MTGPU_MALFORMED)
    elif _GPUID.fullmatch(gpuid) and len(occupy_name(pod.node, gpuid)) > LONGEST_NAME:
        text = f"is too long: with the GPUID, the name of the occupy pod has more than {LONGEST_NAME} characters"
        yield Problem("spec.nodeName", text, Rule.MTGPU_MALFORMED)


def _share_problems(annotations: Mapping[str, str]) -> Iterator[Problem]:
    for key in ANNOTATIONS:
        if key not in annotations:
            text = f"is missing; an MtgpuPod has all of {', '.join(ANNOTATIONS)}"
            yield Problem(annotation_path(key), text, Rule.MTGPU_INCOMPLETE)
    amounts: dict[str, int] = {}
    for key in (REQUEST, LIMIT):
        if key in annotations:
            amount = parse_milli(annotations[key])
            if amount is None or amount > WHOLE_CORE:
                text = "must be a decimal from 0 to 1 with at most three places, such as 0.25"
                yield _malformed(key, f"{text}, not {annotations[key][:64]!r}")
            else:
                amounts[key] = amount
    if amounts.get(LIMIT) == 0:
        yield _malformed(LIMIT, "must be above 0")
    if amounts.get(REQUEST, 0) > amounts.get(LIMIT, WHOLE_CORE):
        yield _malformed(REQUEST, f"is {annotations[REQUEST]}, more than {LIMIT}, which is {annotations[LIMIT]}")
    memory = annotations.get(MEMORY)
    if memory is not None and not (_BYTES.fullmatch(memory) and int(memory) <= MAX_MEMORY):
        text = f"must be a whole number of bytes from 1 to {MAX_MEMORY}, such as 1073741824"
        yield _malformed(MEMORY, f"{text}, not {memory[:64]!r}")
    gpuid = annotations.get(GPUID)
    if gpuid is not None and not _GPUID.fullmatch(gpuid):
        text = "must be 1 to 63 lower-case letters and digits, such as zxcvb"
        yield _malformed(GPUID, f"{text}, not {gpuid[:64]!r}")


def _malformed(key: str, text: str) -> Problem:
    return Problem(annotation_path(key), text, Rule.MTGPU_MALFORMED)


def holding(pod: MtgpuPod, card: str | int | None, *, bound: bool = True) -> Holding:
    """Return the holding of an MtgpuPod.

    Args:
        card: the UUID or the index of its card. If it is None, the card is unknown, and the MtgpuPod holds every card.
        bound: whether the status of the MtgpuPod in the API has the card. If not, the holding is a reservation.
    """
    share = Share("", card, whole=True) if card is None else Share("", card, pod.request, pod.memory)
    return Holding(pod.uid, pod.namespace, pod.name, pod.node, NAME, (share,), bound=bound, gpuid=pod.gpuid)


def controlling_mtgpupod(raw: Mapping[str, Any]) -> str | None:
    """Return the UID of the MtgpuPod that a Pod names as its controller, or None."""
    owners = table_at(raw, "metadata").get("ownerReferences")
    for owner in owners if isinstance(owners, list) else ():
        if not isinstance(owner, dict) or (owner.get("apiVersion"), owner.get("kind")) != (API_VERSION, KIND):
            continue
        if owner.get("controller") and owner.get("uid"):
            return str(owner["uid"])
    return None


def claimed_mtgpupod(raw: Mapping[str, Any]) -> str | None:
    """Return the UID of the MtgpuPod that a Pod names as its controller.

    If the Pod names none, return the UID in its seal, or None if it has no seal or no GPUID. Users who may change Pods
    can remove the owner of a Pod while the Pod runs on its card. Admission does not let them remove the seal, so the
    card stays held. The caller must verify the seal (`RecordVerifier.finding_of_mtgpu`).
    """
    owner = controlling_mtgpupod(raw)
    if owner is not None or GPUID not in table_at(raw, "metadata", "annotations"):
        return owner
    annotations = annotations_of(raw)
    seal = Seal.read(annotations[SEAL]) if {SEAL, GPUID} <= annotations.keys() else None
    return seal.subject if seal is not None else None


def visible_card(raw: Mapping[str, Any]) -> str | None:
    """Return the UUID of the card that the Pod of an MtgpuPod sees, or None.

    The value in the first container with the variable counts, since other webhooks may have added containers without
    the variable.
    """
    containers = (raw.get("spec") or {}).get("containers") or ()
    rows = (row for container in containers for row in container.get("env") or ())
    return next((str(row["value"]) for row in rows if row.get("name") == VISIBLE and row.get("value")), None)


def holding_of_pod(pod: Pod, raw: Mapping[str, Any]) -> Holding | None:
    """Return the holding of a Pod's MtgpuPod according to the Pod alone.

    Returns None if the Pod is not the Pod of an MtgpuPod, or if the Pod does not state its node, card and share. `pod`
    is the Pod in `raw`.
    """
    owner = claimed_mtgpupod(raw)
    card = visible_card(raw)
    if not (owner and card and pod.node):
        return None
    try:
        request, _, memory = read_share(pod.annotations)
    except BadObject:
        return None
    share = Share("", card, request, memory)
    return Holding(owner, pod.namespace, pod.name, pod.node, NAME, (share,), gpuid=pod.annotations[GPUID])


def environment(pod: MtgpuPod, uuid: str, index: int) -> dict[str, str]:
    """Return the variables that every container of the Pod gets, including init containers.

    `uuid` and `index` identify the MtgpuPod's card.
    """
    return {
        VISIBLE: uuid,
        CARDS: str(index),
        "MGPU_CORE_PERCENT": f"{pod.request / 10:g}",
        "MGPU_MEMORY_BYTES": str(pod.memory),
    }


def occupy_name(node: str, gpuid: str) -> str:
    return f"{_OCCUPY}{node}-{gpuid}"


def occupy_target(pod: Pod) -> tuple[str, str] | None:
    """Return the node and the GPUID for which an occupy pod keeps a card, or None for any other pod.

    An occupy pod has a certain namespace, label and name (docs/design/mtgpu.md, "Controller").
    """
    gpuid = pod.labels.get(OCCUPY_LABEL, "")
    if pod.namespace != OCCUPY_NAMESPACE or not _GPUID.fullmatch(gpuid):
        return None
    node = pod.name.removeprefix(_OCCUPY).removesuffix(f"-{gpuid}")
    return (node, gpuid) if node and pod.name == occupy_name(node, gpuid) else None


def occupy_label(raw: Mapping[str, Any]) -> str | None:
    """Return the value of `OCCUPY_LABEL`, or None for a Pod of another namespace or without the label."""
    meta = table_at(raw, "metadata")
    return table_at(meta, "labels").get(OCCUPY_LABEL) if meta.get("namespace") == OCCUPY_NAMESPACE else None


def annotations_of(raw: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the annotations of an object that are strings. The object has not been validated."""
    return {key: text for key, text in table_at(raw, "metadata", "annotations").items() if isinstance(text, str)}


def created(raw: Mapping[str, Any]) -> str:
    """Return the creationTimestamp of an object; "" before the object exists."""
    return str(table_at(raw, "metadata").get("creationTimestamp") or "")


def sealed_content(raw: Mapping[str, Any]) -> dict[str, str]:
    """Return the content that the seal of an MtgpuPod's Pod covers: the vocabulary's annotations and the card."""
    own = {key: text for key, text in annotations_of(raw).items() if key.startswith(MTGPU_PREFIX)}
    return {**own, VISIBLE: visible_card(raw) or ""}


def subject(raw: Mapping[str, Any], owner: str) -> Subject:
    """Return the subject of the seal of the Pod `raw`, whose MtgpuPod has the UID `owner`."""
    meta = table_at(raw, "metadata")
    node = table_at(raw, "spec").get("nodeName")
    return Subject(owner, str(meta.get("namespace", "")), str(meta.get("name", "")), str(node or ""))
