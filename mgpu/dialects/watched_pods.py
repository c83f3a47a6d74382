"""What mgpu reads and keeps of a pod that a watch delivers.

Admission checks the size of a pod when it is created, but not on later updates: a user may change labels, images and
annotations of others hundreds of times a second, to any size. The scheduler and the agents read a pod with each event,
on the one thread that all pods wait for, and keep all of them. So these functions hold whenever a pod is read:

- `fingerprint` tells whether anything that is read has changed since the last event;
- `bounded` leaves of a pod that is too large for any node only what shows that it requests GPUs;
- `kept` drops what is not looked at after the request has been read.

All functions are pure, and on the path of every event. tests/fuzz holds their cost on hostile objects.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import orjson

from mgpu import dialects
from mgpu.dialects import mtgpu
from mgpu.dialects.protocol import SHARE
from mgpu.dialects.registry import MTGPU_PREFIX, vocabulary_of
from mgpu.model import budget
from mgpu.model.pods import Container, Pod, containers_that_ran, is_none
from mgpu.model.raw_objects import table_at
from mgpu.model.record_seals import SEAL

Raw = Mapping[str, Any]

_KINDS = ("initContainers", "containers")
_META = ("namespace", "name", "generateName", "uid", "creationTimestamp")
_ENDS = ("deletionTimestamp", "deletionGracePeriodSeconds")
_SPEC = ("nodeName", "schedulerName", "priority", "overhead", "resources", "terminationGracePeriodSeconds")
_STATUS = (
    *("phase", "startTime", "nominatedNodeName", "extendedResourceClaimStatus"),
    *("initContainerStatuses", "containerStatuses"),
)
_OF_CONTAINER = ("name", "restartPolicy", "resources")

MAX_LABEL_TEXT = 4096
"""Characters of the labels of a pod that are kept, names and values: 70 labels of ordinary length. The API server
stores 105,000 short ones, which take 14 MiB once decoded."""

MAX_TEXT = 2048
"""Characters of any other text that are kept. The longest valid one is a number for each of 256 containers. The API
server stores a `spec.schedulerName` of 1.3 MiB. Records are kept whole: a seal or a peer vouches for them."""
_TEXTS = ("scheduler", "nominated_node", "phase", "start_time")


def fingerprint(raw: Raw, *also: str) -> bytes:
    """Return a digest of all that is read of a pod, except its labels and its resourceVersion.

    Under the same settings, pods with equal fingerprints are read alike. Labels change most often and are no part of a
    request, so the caller takes them over by itself.

    Args:
        raw: the pod, as JSON of the API server.
        also: annotations that the caller reads beside those of requests and records.
    """
    meta = table_at(raw, "metadata")
    spec = table_at(raw, "spec")
    annotations = {key: text for key, text in table_at(meta, "annotations").items() if _is_read(key, also)}
    owner = mtgpu.controlling_mtgpupod(raw)
    content = (
        _values(meta, (*_META, *_ENDS)),
        annotations,
        owner,
        mtgpu.visible_card(raw) if owner or mtgpu.GPUID in annotations else None,
        bool(spec.get("schedulingGates")),
        _values(spec, _SPEC),
        [_containers(spec, kind) for kind in _KINDS],
        _values(table_at(raw, "status"), _STATUS),
        [(problem.field, problem.message) for problem in budget.excess(raw)],
        mtgpu.occupy_label(raw),
    )
    return blake2b(orjson.dumps(content), digest_size=16).digest()


def limit_containers(raw: Raw) -> Raw:
    """Return the pod, or of a pod with too many containers only the few that show what it is.

    These are the first container of each vocabulary and the first one that has run. What the others reserve of a node's
    cpu and memory is not counted: no node runs a pod of more than 256 containers.
    """
    if not budget.excess_of_containers(raw):
        return raw
    spec = table_at(raw, "spec")
    ran = frozenset(containers_that_ran(table_at(raw, "status")))
    shown: set[str] = set()
    few = {kind: [*_telling(_rows(spec, kind), shown, ran)] for kind in _KINDS}
    return {**raw, "spec": {**spec, **few}}


_RAN = "ran"


def _telling(rows: Iterable[Any], shown: set[str], ran: frozenset[str]) -> Iterator[Any]:
    """Yield the containers that show what those before them do not, and add that to `shown`."""
    for row in rows:
        features = {*_vocabularies(row)}
        if isinstance(row, dict) and row.get("name") in ran:
            features.add(_RAN)
        if not features <= shown:
            shown |= features
            yield row


def _vocabularies(row: Any) -> Iterator[str]:
    """Yield the vocabularies of the resources that a container requests."""
    limits = table_at(row, "resources", "limits")
    requests = table_at(row, "resources", "requests")
    for name, amount in (*limits.items(), *requests.items()):
        vocabulary = vocabulary_of(name)
        if vocabulary and not is_none(name, str(requests.get(name, amount))):
            yield vocabulary


def _is_read(key: str, also: tuple[str, ...]) -> bool:
    return dialects.is_read_annotation(key) or key in also or key == SEAL or key.startswith(MTGPU_PREFIX)


def _containers(spec: Raw, kind: str) -> list[Any]:
    return [_values(row, _OF_CONTAINER) if isinstance(row, dict) else row for row in _rows(spec, kind)]


def _rows(spec: Raw, kind: str) -> list[Any]:
    rows = spec.get(kind)
    return rows if isinstance(rows, list) else []


def _values(table: Raw, keys: Iterable[str]) -> list[Any]:
    return [table.get(key) for key in keys]


def stored_pod(pod: Pod, *, record: bool) -> Pod:
    """Return the part of a pod that is looked at after its request has been read.

    Constraints are part of the request then, and resources outside the vocabularies have been counted.

    Args:
        record: whether the annotations of its record are kept.
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
    """Return all labels of a pod, or none where they are too many or too long.

    Some of the labels would be worse than none: the selector `DoesNotExist` would match a label that was left out.
    """
    if len(labels) > budget.MAX_LABELS or sum(map(len, labels)) + sum(map(len, labels.values())) > MAX_LABEL_TEXT:
        return {}
    return labels


def _is_kept(key: str, *, record: bool) -> bool:
    if dialects.is_placement_annotation(key):
        return record
    return key in dialects.REQUEST_ANNOTATIONS or key in mtgpu.ANNOTATIONS


def _is_whole(key: str, text: str) -> bool:
    return len(text) <= MAX_TEXT or dialects.is_placement_annotation(key)


def _kept_container(container: Container) -> Container:
    requests = _gpu_amounts(container.requests)
    limits = _gpu_amounts(container.limits)
    if requests == limits:
        limits = requests  # One table in place of two equal ones.
    name = container.name if len(container.name) <= MAX_TEXT else container.name[:MAX_TEXT]
    return replace(container, name=name, requests=requests, limits=limits, visible=())


def _gpu_amounts(amounts: Mapping[str, str]) -> Mapping[str, str]:
    return _shared(
        tuple((name, amount) for name, amount in amounts.items() if name == SHARE or vocabulary_of(name) is not None)
    )


@lru_cache(maxsize=4096)
def _shared(amounts: tuple[tuple[str, str], ...]) -> Mapping[str, str]:
    """Return one table for all containers with equal amounts: a pod may have 256 of them, a process many pods."""
    return dict(amounts)
