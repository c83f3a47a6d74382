"""MtgpuPods (seeds/k8s-gpu-sharing.md; spec page mtgpu.md): the fifth vocabulary, a kind of its own.

A user names the card (GPUID) that the pods of a node share; what is asked for stands in annotations. The Pod that runs
is made by the scheduler's controller and asks the kubelet for nothing: the card is kept by an occupy pod, which asks
for `nvidia.com/gpu: 1`. So this is no `Dialect` of `dialects.ALL`: those read what a Pod asks for.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mgpu.dialects.protocol import SHARE
from mgpu.dialects.registry import MTGPU, vocabulary_of
from mgpu.model.cards import WHOLE_CORE
from mgpu.model.errors import BadObject, Problem
from mgpu.model.ledger import Holding, Share
from mgpu.model.pod_constraints import ALL as WISHES
from mgpu.model.pods import Pod, read_pod
from mgpu.model.quantities import MAX
from mgpu.model.raw_objects import table_at
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
"""What an MtgpuPod says of its share: all are required, and none ever changes."""

FINALIZER = "mgpu.io/mtgpupod"
OCCUPY_NAMESPACE = "kube-system"
OCCUPY_LABEL = "mgpu.io/occupies"
"""Of an occupy pod: its GPUID."""
_OCCUPY = "mtgpupod-occupypod-"
VISIBLE = "NVIDIA_VISIBLE_DEVICES"
CARDS = "MGPU_CARDS"

_NODE = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", re.ASCII)
"""A DNS subdomain (RFC 1123), which every node's name is."""
_DECIMAL = re.compile(r"(0|[1-9]\d{0,3})(?:\.(\d{1,3}))?", re.ASCII)
_BYTES = re.compile(r"[1-9]\d{0,18}", re.ASCII)
_GPUID = re.compile(r"[a-z0-9]{1,63}", re.ASCII)
_LONGEST_NAME = 253
_NO_NODE = Problem("spec.nodeName", "is missing; the user of an MtgpuPod chooses its node")
MOST_MEMORY = MAX // 1000


@dataclass(frozen=True, slots=True)
class MtgpuPod:
    """An MtgpuPod. request, limit: milli of its card. memory: bytes.

    bound: the UUID of the card that it was given (`status.BoundDeviceID`), "" before. pod_uid: of the Pod that was made
    for it. phase: `status.phase`, Pending before there is any. created: its creationTimestamp.
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
    bound: str = ""
    phase: str = "Pending"
    pod_uid: str = ""
    deleting: bool = False

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def decided_by(self) -> tuple[str, str, str, int, int, int]:
        """What its card is decided by; it never changes."""
        return self.uid, self.node, self.gpuid, self.request, self.limit, self.memory

    @property
    def ended(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    @property
    def turn(self) -> tuple[str, str, str]:
        """First come first served: the order in which those that wait are looked at."""
        return self.created, self.key, self.uid


def enabled(settings: Settings) -> bool:
    return settings.dialects.mtgpu.enabled


def read_mtgpupod(raw: Mapping[str, Any]) -> MtgpuPod:
    """Raises BadObject with every broken rule, in the order of the fields.

    One that has its card was admitted once: only what its account is made of is looked at, so that neither a stricter
    rule nor an annotation that came later takes the account away.
    """
    pod = read_pod(raw)
    status = raw.get("status") or {}
    bound, made = status.get("BoundDeviceID"), status.get("PodObjectMeta") or {}
    problems = [*(_of_the_account(pod) if bound else _problems(pod))]
    if problems:
        raise BadObject(problems)
    said = pod.annotations
    return MtgpuPod(
        pod.namespace,
        pod.name,
        pod.uid,
        pod.node,
        said[GPUID],
        *read_share(said),
        pod.created,
        bound if isinstance(bound, str) else "",
        pod.phase,
        str(made.get("uid") or "") if isinstance(made, dict) else "",
        pod.deleting,
    )


def read_share(said: Mapping[str, str]) -> tuple[int, int, int]:
    """Request and limit (milli of the card) and memory (bytes), as the annotations of an MtgpuPod or its Pod say.

    Raises BadObject.
    """
    problems = [*_of_the_share(said)]
    if problems:
        raise BadObject(problems)
    return milli(said[REQUEST]) or 0, milli(said[LIMIT]) or 0, int(said[MEMORY])


def milli(text: str) -> int | None:
    """`0.25` in thousandths, exactly; None for anything but a plain decimal with at most three places."""
    match = _DECIMAL.fullmatch(text)
    return int(match[1]) * 1000 + int((match[2] or "").ljust(3, "0")) if match else None


def _problems(pod: Pod) -> Iterator[Problem]:
    yield from _of_the_share(pod.annotations)
    for key in sorted(set(WISHES) & set(pod.annotations)):
        yield Problem(_path(key), f"is a wish for cards, while an MtgpuPod names its card by {GPUID}; leave it out")
    yield from _of_the_node(pod)
    if not pod.app_containers:
        yield Problem("spec.containers", "is missing; an MtgpuPod runs at least one container")
    for container in pod.containers:
        if container.visible:
            yield Problem(f"{container.path}.env[{VISIBLE}]", "is set by mgpu to the card of the GPUID; leave it out")
        for name in dict.fromkeys((*container.requests, *container.limits)):
            asked = container.asked(name)
            if asked and (vocabulary_of(name) or name == SHARE):
                text = f"asks for GPU a second time; an MtgpuPod's share stands in {REQUEST} and {MEMORY}"
                yield Problem(asked[1], text)


def _of_the_account(pod: Pod) -> Iterator[Problem]:
    yield from _of_the_share(pod.annotations)
    if not pod.node:
        yield _NO_NODE


def _of_the_node(pod: Pod) -> Iterator[Problem]:
    gpuid = pod.annotations.get(GPUID, "")
    if not pod.node:
        yield _NO_NODE
    elif len(pod.node) > _LONGEST_NAME or not _NODE.fullmatch(pod.node):
        text = "must be the name of a node: lower-case letters, digits, '-' and '.'"
        yield Problem("spec.nodeName", f"{text}, not {pod.node[:64]!r}")
    elif _GPUID.fullmatch(gpuid) and len(occupy_name(pod.node, gpuid)) > _LONGEST_NAME:
        text = f"is too long: with the GPUID, the name of the occupy pod has more than {_LONGEST_NAME} characters"
        yield Problem("spec.nodeName", text)


def _of_the_share(said: Mapping[str, str]) -> Iterator[Problem]:
    for key in ANNOTATIONS:
        if key not in said:
            yield Problem(_path(key), f"is missing; an MtgpuPod has all of {', '.join(ANNOTATIONS)}")
    amounts: dict[str, int] = {}
    for key in (REQUEST, LIMIT):
        if key in said:
            amount = milli(said[key])
            if amount is None or amount > WHOLE_CORE:
                text = "must be a decimal from 0 to 1 with at most three places, such as 0.25"
                yield Problem(_path(key), f"{text}, not {said[key][:64]!r}")
            else:
                amounts[key] = amount
    if amounts.get(LIMIT) == 0:
        yield Problem(_path(LIMIT), "must be above 0")
    if amounts.get(REQUEST, 0) > amounts.get(LIMIT, WHOLE_CORE):
        yield Problem(_path(REQUEST), f"is {said[REQUEST]}, more than {LIMIT}, which is {said[LIMIT]}")
    if MEMORY in said and not (_BYTES.fullmatch(said[MEMORY]) and int(said[MEMORY]) <= MOST_MEMORY):
        text = f"must be a whole number of bytes from 1 to {MOST_MEMORY}, such as 1073741824"
        yield Problem(_path(MEMORY), f"{text}, not {said[MEMORY][:64]!r}")
    if GPUID in said and not _GPUID.fullmatch(said[GPUID]):
        text = "must be 1 to 63 lower-case letters and digits, such as zxcvb"
        yield Problem(_path(GPUID), f"{text}, not {said[GPUID][:64]!r}")


def _path(key: str) -> str:
    return f"metadata.annotations[{key}]"


def holding(pod: MtgpuPod, card: str | int | None, *, bound: bool = True) -> Holding:
    """What it holds of a card of its node, by UUID or index. None: of a card that it is not known yet which, all of
    each.
    """
    share = Share("", card, whole=True) if card is None else Share("", card, pod.request, pod.memory)
    return Holding(pod.uid, pod.namespace, pod.name, pod.node, NAME, (share,), bound=bound, gpuid=pod.gpuid)


def owner_of(raw: Mapping[str, Any]) -> str:
    """The uid of the MtgpuPod that a Pod names as its controller; "": none."""
    owners = table_at(raw, "metadata").get("ownerReferences")
    tables = (owner for owner in owners if isinstance(owner, dict)) if isinstance(owners, list) else ()
    named = (o for o in tables if o.get("controller") and (o.get("apiVersion"), o.get("kind")) == (API_VERSION, KIND))
    return next((str(owner["uid"]) for owner in named if owner.get("uid")), "")


def mtgpupod_of(raw: Mapping[str, Any]) -> str:
    """The uid of the MtgpuPod that a Pod names as its controller, or else that its seal names; "": neither does.

    Whoever may change Pods may take a Pod's owner off, and the Pod keeps running on its card. Its seal cannot be taken
    off, so the card stays held. The caller checks the seal (`RecordVerifier.finding_of_mtgpu`).
    """
    annotations = annotations_of(raw)
    seal = Seal.read(annotations[SEAL]) if {SEAL, GPUID} <= annotations.keys() else None
    return owner_of(raw) or (seal.subject if seal is not None else "")


def card_of(raw: Mapping[str, Any]) -> str:
    """The UUID of the card that the Pod of an MtgpuPod sees, whatever containers others have put beside its own."""
    containers = (raw.get("spec") or {}).get("containers") or ()
    rows = (row for container in containers for row in container.get("env") or ())
    return next((str(row["value"]) for row in rows if row.get("name") == VISIBLE and row.get("value")), "")


def holding_of_pod(pod: Pod, raw: Mapping[str, Any]) -> Holding | None:
    """What a Pod (as read, and raw) says that its MtgpuPod holds; None: it says nothing, or is no MtgpuPod's."""
    owner, card = mtgpupod_of(raw), card_of(raw)
    if not (owner and card and pod.node):
        return None
    try:
        request, _, memory = read_share(pod.annotations)
    except BadObject:
        return None
    share, gpuid = Share("", card, request, memory), pod.annotations[GPUID]
    return Holding(owner, pod.namespace, pod.name, pod.node, NAME, (share,), gpuid=gpuid)


def environment(pod: MtgpuPod, uuid: str, index: int) -> dict[str, str]:
    """What every container of its Pod sees, init containers too. uuid, index: of its card."""
    return {
        VISIBLE: uuid,
        CARDS: str(index),
        "MGPU_CORE_PERCENT": f"{pod.request / 10:g}",
        "MGPU_MEMORY_BYTES": str(pod.memory),
    }


def occupy_name(node: str, gpuid: str) -> str:
    return f"{_OCCUPY}{node}-{gpuid}"


def occupied(pod: Pod) -> tuple[str, str] | None:
    """(node, GPUID) that this pod occupies a card for; None: it is no occupy pod.

    Known by namespace, label and exact name (docs/design/mtgpu.md, "Controller").
    """
    gpuid = pod.labels.get(OCCUPY_LABEL, "")
    if pod.namespace != OCCUPY_NAMESPACE or not _GPUID.fullmatch(gpuid):
        return None
    node = pod.name.removeprefix(_OCCUPY).removesuffix(f"-{gpuid}")
    return (node, gpuid) if node and pod.name == occupy_name(node, gpuid) else None


def occupy_label(raw: Mapping[str, Any]) -> str | None:
    """Return the GPUID that a Pod says it occupies, where its namespace is that of occupy pods."""
    meta = table_at(raw, "metadata")
    return table_at(meta, "labels").get(OCCUPY_LABEL) if meta.get("namespace") == OCCUPY_NAMESPACE else None


def annotations_of(raw: Mapping[str, Any]) -> Mapping[str, str]:
    return {key: text for key, text in table_at(raw, "metadata", "annotations").items() if isinstance(text, str)}


def created(raw: Mapping[str, Any]) -> str:
    """When the API server created the object; "": never, it is about to be created."""
    return str(table_at(raw, "metadata").get("creationTimestamp") or "")


def said(raw: Mapping[str, Any]) -> dict[str, str]:
    """What a Pod says of the share of a card that its MtgpuPod has: its annotations of the vocabulary, and the card."""
    own = {key: text for key, text in annotations_of(raw).items() if key.startswith(MTGPU)}
    return {**own, VISIBLE: card_of(raw)}


def subject(raw: Mapping[str, Any], owner: str) -> Subject:
    """Of the seal of the Pod `raw` of the MtgpuPod with the uid `owner`."""
    meta, node = table_at(raw, "metadata"), table_at(raw, "spec").get("nodeName")
    return Subject(owner, str(meta.get("namespace", "")), str(meta.get("name", "")), str(node or ""))
