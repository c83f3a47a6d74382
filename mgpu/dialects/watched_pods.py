"""Limits the work and memory that the pods from a watch cost.

Admission checks the size of new pods, but not that of updated pods. A user can change labels, images and annotations
hundreds of times a second, up to the size that the API server accepts. The scheduler (`scheduler.cluster`) and the
agents (`deviceplugin.pods`) read the pods of all events on a single thread, and store the pods that they watch. For an
event they call:

- `fingerprint`, to ignore an event in which nothing that they read has changed;
- `limit_containers`, to drop most containers of a pod that has too many;
- `stored_pod`, to drop the fields that are not needed once the request has been read.

All functions are pure.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import orjson

from mgpu import dialects
from mgpu.dialects import mtgpu
from mgpu.dialects.protocol import SHARE
from mgpu.dialects.registry import MTGPU_PREFIX, vocabulary_of
from mgpu.model import budget
from mgpu.model.pods import SUGGESTED_NODE, VOLCANO_GROUP, Container, Pod, containers_that_ran, gate_names, is_none
from mgpu.model.raw_objects import table_at
from mgpu.model.record_seals import SEAL
from mgpu.model.resizing import RESIZE

Raw = Mapping[str, Any]

_KINDS = ("initContainers", "containers")
_META = ("name", "generateName", "uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds")
_SPEC = ("schedulerName", "priority", "overhead", "resources", "terminationGracePeriodSeconds", "schedulingGroup")
_STATUS = ("startTime", "initContainerStatuses", "containerStatuses")
_OF_CONTAINER = ("name", "restartPolicy", "resources")

MAX_LABEL_TEXT = 4096
"""The most characters in the names and values of stored labels, enough for 70 labels of ordinary length. The API server
accepts 105,000 short labels, which need 14 MiB once they are decoded."""

MAX_TEXT = 2048
"""The most characters of any other stored text. The longest valid text has a number for each of 256 containers, but the
API server accepts a `spec.schedulerName` of 1.3 MiB. Allocation records are stored whole, since users cannot write
them."""
_TEXTS = ("scheduler", "nominated_node", "phase", "start_time", "scheduling_group", "volcano_group")


class PodContent(NamedTuple):
    """What mgpu reads of a pod, except most labels.

    Attributes:
        template: what is equal in all pods that were created from one template and are in the same state, as JSON. It
            says whether there are a record and a seal, but not which. It does not have the name, UID, node, labels and
            times of the pod.
        record: the annotations of the allocation record, without the seal.
        seal: the annotation with the seal; None if there is none.
        fingerprint: the digest of everything.
    """

    template: bytes
    record: Mapping[str, Any]
    seal: Any
    fingerprint: bytes


def fingerprint(raw: Raw, *also: str) -> bytes:
    """Return a digest of the fields of a pod that mgpu reads, except most labels.

    Under the same settings, pods with equal fingerprints lead to the same result. Most labels change often and are not
    part of a request, so the caller updates them separately. Only the label of occupy pods, and the labels that are
    part of a request (`REQUEST_LABELS`), are part of the digest. If
    mgpu is to read another field of pods, add the field to `content_of`, because changes of all other fields are
    ignored.

    Args:
        raw: the pod as decoded JSON.
        also: the names of further annotations that the caller reads.
    """
    return content_of(raw, *also).fingerprint


def content_of(raw: Raw, *also: str) -> PodContent:
    """Return the template and the fingerprint of a pod. The arguments are those of `fingerprint`."""
    meta = table_at(raw, "metadata")
    spec = table_at(raw, "spec")
    status = table_at(raw, "status")
    labels = table_at(meta.get("labels"))
    annotations: dict[str, Any] = {}
    record: dict[str, Any] = {}
    for key, text in table_at(meta.get("annotations")).items():
        is_record = dialects.is_placement_annotation(key)
        if is_record:
            record[key] = text
        if key in dialects.REQUEST_ANNOTATIONS or key in also or (not is_record and _is_read_elsewhere(key)):
            annotations[key] = text
    seal = record.pop(SEAL, None)
    owner = mtgpu.controlling_mtgpupod(raw)
    get_meta, get_spec, get_status = meta.get, spec.get, status.get
    node = get_spec("nodeName")
    template = (
        get_meta("namespace"),
        annotations,
        {key: labels[key] for key in sorted(dialects.REQUEST_LABELS) if key in labels},
        not record,
        seal is None,
        not get_meta("deletionTimestamp"),
        not node,
        gate_names(_rows(spec, "schedulingGates")) if "schedulingGates" in spec else (),
        [*map(get_spec, _SPEC)],
        _containers(spec, "initContainers") if "initContainers" in spec else (),
        _containers(spec, "containers"),
        get_status("phase"),
        get_status("nominatedNodeName"),
        get_status("extendedResourceClaimStatus"),
        [*containers_that_ran(status)],
        [(problem.field, problem.message) for problem in budget.excess(raw)],
    )
    own = (
        [*map(get_meta, _META)],
        record,
        seal,
        owner,
        mtgpu.visible_card(raw) if owner or mtgpu.GPUID in annotations else None,
        node,
        [*map(get_status, _STATUS)],
        mtgpu.occupy_label(raw),
    )
    text = orjson.dumps(template)
    return PodContent(text, record, seal, blake2b(text + orjson.dumps(own), digest_size=16).digest())


def limit_containers(raw: Raw) -> Raw:
    """Return the pod, but with only a few containers if it has too many containers or resources (`mgpu.model.budget`).

    The result has the first container of each vocabulary and the first container that has run. So the cpu and memory of
    the other containers are not counted.
    """
    if not budget.excess_of_containers(raw):
        return raw
    spec = table_at(raw, "spec")
    ran = frozenset(containers_that_ran(table_at(raw, "status")))
    features: set[str] = set()
    selected = {kind: [*_select(_rows(spec, kind), features, ran)] for kind in _KINDS}
    return {**raw, "spec": {**spec, **selected}}


_RAN = "ran"


def _select(rows: Iterable[Any], features: set[str], ran: frozenset[str]) -> Iterator[Any]:
    """Yield each container with a feature that no earlier container has. A feature is a vocabulary, or `_RAN`.

    Args:
        features: the features of earlier containers, to which those of the yielded containers are added.
    """
    for row in rows:
        own = {*_vocabularies(row)}
        if isinstance(row, dict) and row.get("name") in ran:
            own.add(_RAN)
        if not own <= features:
            features |= own
            yield row


def _vocabularies(row: Any) -> Iterator[str]:
    limits = table_at(row, "resources", "limits")
    requests = table_at(row, "resources", "requests")
    for name, amount in (*limits.items(), *requests.items()):
        vocabulary = vocabulary_of(name)
        if vocabulary and not is_none(name, str(requests.get(name, amount))):
            yield vocabulary


def _is_read_elsewhere(key: str) -> bool:
    """Return whether mgpu reads an annotation that is not part of a record."""
    return key == VOLCANO_GROUP or key.startswith(MTGPU_PREFIX) or dialects.is_request_annotation(key)


def _containers(spec: Raw, kind: str) -> list[Any]:
    return [[*map(row.get, _OF_CONTAINER)] if isinstance(row, dict) else row for row in _rows(spec, kind)]


def _rows(spec: Raw, kind: str) -> list[Any]:
    rows = spec.get(kind)
    return rows if isinstance(rows, list) else []


def stored_pod(pod: Pod, *, record: bool) -> Pod:
    """Return the pod without the fields that are not needed once its request has been read.

    By then, the constraints are part of the request, and the resources outside the vocabularies have been counted.

    Args:
        record: whether to keep the annotations of the pod's allocation record.
    """
    texts = {name: text[:MAX_TEXT] for name in _TEXTS if len(text := getattr(pod, name)) > MAX_TEXT}
    annotations = {key: text for key, text in pod.annotations.items() if _is_kept(key, record=record)}
    return replace(
        pod,
        **texts,
        annotations={key: text if _is_whole(key, text) else text[:MAX_TEXT] for key, text in annotations.items()},
        labels=stored_labels(pod.labels),
        containers=tuple(map(_kept_container, pod.containers)),
    )


def stored_labels(labels: Mapping[str, str]) -> Mapping[str, str]:
    """Return all labels of a pod, or none if they are too many or too long.

    The labels are stored for PodDisruptionBudgets. A part of the labels would be worse than none, since a selector with
    `DoesNotExist` would match a pod whose label was omitted. `scheduler.decisions.disruption_budgets` assumes
    that no budget protects a pod without labels.
    """
    if len(labels) > budget.MAX_LABELS or sum(map(len, labels)) + sum(map(len, labels.values())) > MAX_LABEL_TEXT:
        return {}
    return labels


def _is_kept(key: str, *, record: bool) -> bool:
    if dialects.is_placement_annotation(key):
        return record
    return key in dialects.REQUEST_ANNOTATIONS or key in mtgpu.ANNOTATIONS or key in (SUGGESTED_NODE, RESIZE)


def _is_whole(key: str, text: str) -> bool:
    return len(text) <= MAX_TEXT or dialects.is_placement_annotation(key)


def _kept_container(container: Container) -> Container:
    requests = _gpu_amounts(container.requests)
    limits = _gpu_amounts(container.limits)
    if requests == limits:
        limits = requests  # store one table instead of two equal ones
    name = container.name if len(container.name) <= MAX_TEXT else container.name[:MAX_TEXT]
    return replace(container, name=name, requests=requests, limits=limits, visible=())


def _gpu_amounts(amounts: Mapping[str, str]) -> Mapping[str, str]:
    return _shared(
        tuple((name, amount) for name, amount in amounts.items() if name == SHARE or vocabulary_of(name) is not None)
    )


@lru_cache(maxsize=4096)
def _shared(amounts: tuple[tuple[str, str], ...]) -> Mapping[str, str]:
    """Return the same table for all containers with equal amounts, to save memory."""
    return dict(amounts)
