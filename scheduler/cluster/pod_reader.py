"""Reads the pods of the watch. Of the pods that were created from one template, most are read by comparison only.

A cluster has tens of thousands of pods, but most were created by a few hundred workloads, and differ only in their
names, nodes, cards, seals, labels and times. `PodReader` remembers what it has read of a pod. It reads another pod with
an equal template (`mgpu.dialects.watched_pods.PodContent`) by replacing these fields. The result is that of
`read_afresh`, which remembers nothing. The pods of a template share their containers, requests, annotations and shares
of cards, so that they also take less memory. `ClusterCache` has the only reader.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import orjson

from mgpu import dialects
from mgpu.dialects.record_verification import RecordVerifier, Verdict
from mgpu.dialects.registry import is_placement_annotation
from mgpu.dialects.watched_pods import PodContent, limit_containers, stored_labels
from mgpu.model.errors import BadObject
from mgpu.model.gpu_requests import GpuRequest
from mgpu.model.ledger import Share
from mgpu.model.pods import Pod, read_pod
from mgpu.model.raw_objects import table_at
from mgpu.model.record_seals import SEAL, Subject
from mgpu.settings import Settings
from scheduler.cluster.gpu_pods import GpuPod, make_gpu_pod, recorded_shares, trim

Raw = Mapping[str, Any]

_MAX_TEMPLATES = 2048
"""The most templates that are remembered. One more, and all are forgotten."""
_MAX_TEMPLATE_BYTES = 2048
"""The most bytes of a template that is remembered, since users choose its size. An ordinary one has 400 to 800."""
_MAX_SEEN = 8192
"""The most templates of which it is known that one pod was read. One more, and all are forgotten."""
_MAX_RECORDS = 8192
"""The most records of all templates that are remembered. Most name one of the cards of a node."""
_MAX_RECORD_BYTES = 512
"""The most bytes of a record that is remembered."""


@dataclass(frozen=True, slots=True)
class ReadPod:
    """What was read of a pod.

    Attributes:
        pod: The pod; for a GPU pod, the part that is stored.
        gpu_pod: The stored part of the GPU pod, or None if the pod requests no GPU.
        request: The whole request, or None if the pod has none, or has not changed since it was read last.
    """

    pod: Pod
    gpu_pod: GpuPod | None
    request: GpuRequest | None


@dataclass(frozen=True, slots=True)
class _Placed:
    """The stored annotations of a pod, and the shares in its allocation record (`GpuPod.shares`)."""

    annotations: Mapping[str, str]
    shares: tuple[Share, ...] | None


@dataclass(frozen=True, slots=True)
class _Template:
    """What was read of one of the pods with this template.

    Attributes:
        read: What was read. Its annotations do not contain the record.
        placed: What depends on the record, by the record as JSON text.
    """

    read: ReadPod
    placed: dict[bytes, _Placed] = field(default_factory=dict)


class PodReader:
    """Not thread-safe."""

    def __init__(self, settings: Settings, records: RecordVerifier) -> None:
        self._settings = settings
        self._records = records
        self._templates: dict[bytes, _Template] = {}
        self._seen: set[int] = set()  # hashes of templates
        self._count_of_records = 0

    def read(self, raw: Raw, content: PodContent, before: Verdict | None) -> ReadPod:
        """Return what `read_afresh` returns, and raise BadObject as it does.

        Args:
            content: The content of the pod (`content_of`).
            before: The last verdict on the pod's allocation record, or None.
        """
        template = self._templates.get(content.template)
        read = None if template is None else self._read_like(template, raw, content, before)
        if read is not None:
            return read
        pod = read_pod(limit_containers(raw))
        gpu_pod = make_gpu_pod(pod, raw, self._settings, self._records, before)
        if (
            template is None
            and len(content.template) <= _MAX_TEMPLATE_BYTES
            and self._is_second(content.template)
            and self._is_like_others(pod, gpu_pod, content)
        ):
            if len(self._templates) >= _MAX_TEMPLATES:
                self._templates.clear()
                self._count_of_records = 0
            self._templates[content.template] = _template(pod, gpu_pod)
        return _stored(pod, gpu_pod, content)

    def _is_second(self, template: bytes) -> bool:
        """Return whether a pod with this template came before. Remembering one that stays the only one costs time."""
        key = hash(template)
        if key in self._seen:
            return True
        if len(self._seen) >= _MAX_SEEN:
            self._seen.clear()
        self._seen.add(key)
        return False

    def _is_like_others(self, pod: Pod, gpu_pod: GpuPod | None, content: PodContent) -> bool:
        """Return whether every pod with this template and a valid record has the same request, or none has any.

        A record matters for the request if the pod could not be admitted under the present settings
        (`dialects.read_request`).
        """
        if gpu_pod is None:
            return not content.record
        if gpu_pod.request is None:
            return False
        if not content.record:
            return True
        try:
            return dialects.read_request(_without_record(pod), self._settings) == gpu_pod.request
        except BadObject:
            return False

    def _read_like(self, template: _Template, raw: Raw, content: PodContent, before: Verdict | None) -> ReadPod | None:
        """Return what was read of a pod with this template, or None if its record is invalid."""
        labels = table_at(raw, "metadata", "labels")
        like = template.read.gpu_pod
        if like is None:
            of_template = template.read.pod
            return ReadPod(_with_own_fields(of_template, raw, of_template.annotations, labels), None, None)
        placed = self._placed(template, like, content)
        pod = _with_own_fields(like.pod, raw, placed.annotations, _shared_labels(labels))
        verdict = None
        if content.record and pod.node:
            record = content.record if content.seal is None else {**content.record, SEAL: content.seal}
            subject = Subject(pod.uid, pod.namespace, pod.name, pod.node)
            verdict = self._records.verdict(subject, pod.created, record, before)
            if verdict is not None and verdict.finding is not None:
                return None
        version = str(raw["metadata"].get("resourceVersion", ""))
        gpu_pod = GpuPod(pod, like.request, (), version, verdict, content.fingerprint, placed.shares)
        return ReadPod(pod, gpu_pod, template.read.request)

    def _placed(self, template: _Template, like: GpuPod, content: PodContent) -> _Placed:
        if not content.record or not like.pod.node or like.pod.ended:
            return _Placed(like.pod.annotations, None)
        key = orjson.dumps(content.record)
        placed = template.placed.get(key)
        if placed is None:
            annotations = {**like.pod.annotations, **content.record}
            placed = _Placed(annotations, _shares(replace(like, pod=replace(like.pod, annotations=annotations))))
            if len(key) <= _MAX_RECORD_BYTES:
                self._remember(template, key, placed)
        return placed

    def _remember(self, template: _Template, record: bytes, placed: _Placed) -> None:
        if self._count_of_records >= _MAX_RECORDS:
            for one in self._templates.values():
                one.placed.clear()
            self._count_of_records = 0
        self._count_of_records += 1
        template.placed[record] = placed


def read_afresh(
    raw: Raw, content: PodContent, settings: Settings, records: RecordVerifier, before: Verdict | None = None
) -> ReadPod:
    """Return the pod as the scheduler stores it, and its request. Raises BadObject for a malformed pod."""
    pod = read_pod(limit_containers(raw))
    return _stored(pod, make_gpu_pod(pod, raw, settings, records, before), content)


def _stored(pod: Pod, gpu_pod: GpuPod | None, content: PodContent) -> ReadPod:
    if gpu_pod is None:
        return ReadPod(pod, None, None)
    stored = replace(trim(gpu_pod), fingerprint=content.fingerprint)
    return ReadPod(stored.pod, stored, gpu_pod.request)


def _template(pod: Pod, gpu_pod: GpuPod | None) -> _Template:
    if gpu_pod is None:
        # mgpu reads no other annotations and labels, which may be large. A template has no labels.
        read = {key: text for key, text in pod.annotations.items() if dialects.is_read_annotation(key)}
        return _Template(ReadPod(replace(pod, annotations=read, labels={}), None, None))
    stored = trim(gpu_pod)
    stored = replace(stored, pod=replace(_without_record(stored.pod), labels={}))
    return _Template(ReadPod(stored.pod, stored, gpu_pod.request))


def _without_record(pod: Pod) -> Pod:
    """Return the pod without the annotations of its record, except those that are part of its request too."""
    kept = {
        key: text
        for key, text in pod.annotations.items()
        if key in dialects.REQUEST_ANNOTATIONS or not is_placement_annotation(key)
    }
    return replace(pod, annotations=kept)


def _shares(gpu_pod: GpuPod) -> tuple[Share, ...] | None:
    try:
        return recorded_shares(gpu_pod)
    except BadObject:
        return None  # Whoever needs the shares gets this error again.


def _with_own_fields(like: Pod, raw: Raw, annotations: Mapping[str, str], labels: Mapping[str, str]) -> Pod:
    """Return the pod in `raw`, which has the same template as `like`."""
    meta = table_at(raw, "metadata")
    return Pod(
        namespace=like.namespace,
        name=meta.get("name") or meta.get("generateName") or "",
        uid=meta.get("uid") or "",
        annotations=annotations,
        labels=labels,
        containers=like.containers,
        node=sys.intern(table_at(raw, "spec").get("nodeName") or ""),
        nominated_node=like.nominated_node,
        phase=like.phase,
        deleting=like.deleting,
        ran=like.ran,
        created=meta.get("creationTimestamp") or "",
        scheduler=like.scheduler,
        priority=like.priority,
        start_time=table_at(raw, "status").get("startTime") or "",
        cpu_memory=like.cpu_memory,
        gates=like.gates,
        scheduling_group=like.scheduling_group,
        volcano_group=like.volcano_group,
    )


def _shared_labels(labels: Mapping[str, str]) -> Mapping[str, str]:
    """Return the labels as they are stored. Most pods with equal labels get the same table."""
    kept = stored_labels(labels)
    return _table(orjson.dumps(kept)) if kept else kept


@lru_cache(maxsize=1024)
def _table(text: bytes) -> Mapping[str, str]:
    table: Mapping[str, str] = orjson.loads(text)
    return table
