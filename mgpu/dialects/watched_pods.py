"""What of a pod on a watch is read, and whether that has changed since it was read the last time. Pure.

Whoever may change a pod may send the scheduler and an agent hundreds of events of it each second, of changes that
admission is not asked about: labels, images, annotations of others. Both read a pod with each event, on the one thread
that all pods of the cluster wait for. So a pod is read again only where something that is read of it has changed, and
of a pod that is larger than any that gets cards no more is read than that it asks for some.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import orjson

from mgpu import dialects
from mgpu.dialects import mtgpu
from mgpu.dialects.mtgpu import ANNOTATIONS as OF_MTGPUPODS
from mgpu.dialects.protocol import SHARE
from mgpu.dialects.registry import MTGPU, vocabulary_of
from mgpu.model import budget
from mgpu.model.budget import LABELS
from mgpu.model.pods import Container, Pod, is_none, that_ran
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


def fingerprint(raw: Raw, *also: str) -> bytes:
    """Return a digest of all that is read of a pod, but for its labels and its resourceVersion.

    Two pods of one fingerprint are read alike, by the same settings. The labels of a pod decide nothing of its ask, and
    they change most easily, so that the caller takes them over by itself.

    Args:
        raw: the pod, as JSON of the API server.
        also: annotations that the caller reads beside those that say what a pod asks for.
    """
    meta, spec, status = (table_at(raw, key) for key in ("metadata", "spec", "status"))
    annotations = {key: text for key, text in table_at(meta, "annotations").items() if _is_read(key, also)}
    owner = mtgpu.owner_of(raw)
    said = (
        _some(meta, (*_META, *_ENDS)),
        annotations,
        owner,
        mtgpu.card_of(raw) if owner or mtgpu.GPUID in annotations else None,
        bool(spec.get("schedulingGates")),
        _some(spec, _SPEC),
        [_containers(spec, kind) for kind in _KINDS],
        _some(status, _STATUS),
        [(problem.field, problem.message) for problem in budget.excess(raw)],
        mtgpu.occupy_label(raw),
    )
    return blake2b(orjson.dumps(said), digest_size=16).digest()


def bounded(raw: Raw) -> Raw:
    """Return the pod, of one that is larger than any that gets cards with few of its containers.

    They are the first one that asks in each vocabulary, and the first one that has run. What the others reserve of the
    cpu and memory of a node is not counted: no node runs a pod of more than 256 containers.
    """
    if not budget.excess_of_containers(raw):
        return raw
    spec = table_at(raw, "spec")
    ran = frozenset(that_ran(table_at(raw, "status")))
    seen: set[str] = set()
    few = {kind: [*_telling(_rows(spec, kind), seen, ran)] for kind in _KINDS}
    return {**raw, "spec": {**spec, **few}}


_RAN = "ran"


def _telling(rows: Iterable[Any], seen: set[str], ran: frozenset[str]) -> Iterator[Any]:
    """Yield the containers that tell what those before them do not."""
    for row in rows:
        tells = {*_asked(row)}
        if isinstance(row, dict) and row.get("name") in ran:
            tells.add(_RAN)
        if not tells <= seen:
            seen |= tells
            yield row


def _asked(row: Any) -> Iterator[str]:
    """Yield the vocabularies in which a container asks for something."""
    limits, requests = (table_at(row, "resources", kind) for kind in ("limits", "requests"))
    for name, amount in (*limits.items(), *requests.items()):
        vocabulary = vocabulary_of(name)
        if vocabulary and not is_none(name, str(requests.get(name, amount))):
            yield vocabulary


def _is_read(key: str, also: tuple[str, ...]) -> bool:
    return dialects.is_read(key) or key in also or key == SEAL or key.startswith(MTGPU)


def _containers(spec: Raw, kind: str) -> list[Any]:
    return [_some(row, _OF_CONTAINER) if isinstance(row, dict) else row for row in _rows(spec, kind)]


def _rows(spec: Raw, kind: str) -> list[Any]:
    rows = spec.get(kind)
    return rows if isinstance(rows, list) else []


def _some(table: Raw, keys: Iterable[str]) -> list[Any]:
    return [table.get(key) for key in keys]


LABEL_TEXT = 4096
"""Characters of the labels of a pod that are kept, names and values: 70 labels of an ordinary length. An API server
stores 105,000 short ones, which take 14 MiB once decoded."""

TEXT = 2048
"""Characters of any other text, of which the longest that says something is a number for each of 256 containers. An API
server stores a `spec.schedulerName` of 1.3 MiB. A record is kept whole: a seal or a peer vouches for it."""
_TEXTS = ("scheduler", "nominated_node", "phase", "start_time")


def kept(pod: Pod, *, record: bool) -> Pod:
    """Return the part of the pod that is looked at after its ask has been read.

    Its wishes are part of the ask. Other resources than those of the vocabularies are counted when the pod is read.
    record: whether its record is looked at.
    """
    texts = {name: text[:TEXT] for name in _TEXTS if len(text := getattr(pod, name)) > TEXT}
    said = {key: text for key, text in pod.annotations.items() if _is_kept(key, record=record)}
    return replace(
        pod,
        **texts,
        annotations={key: text if _is_whole(key, text) else text[:TEXT] for key, text in said.items()},
        labels=kept_labels(pod.labels),
        containers=tuple(map(_container, pod.containers)),
    )


def _is_whole(key: str, text: str) -> bool:
    return len(text) <= TEXT or dialects.is_placement_annotation(key)


def kept_labels(labels: Mapping[str, str]) -> Mapping[str, str]:
    """Return all of these labels, or none where they are too many or too long.

    Of some of the labels a selector would say what is not so of all: `DoesNotExist` matches what was left out.
    """
    if len(labels) > LABELS or sum(map(len, labels)) + sum(map(len, labels.values())) > LABEL_TEXT:
        return {}
    return labels


def _is_kept(key: str, *, record: bool) -> bool:
    if dialects.is_placement_annotation(key):
        return record
    return key in dialects.ASK_ANNOTATIONS or key in OF_MTGPUPODS


def _container(container: Container) -> Container:
    requests, limits = (_ours(amounts) for amounts in (container.requests, container.limits))
    if requests == limits:
        limits = requests  # one table in place of two equal ones
    name = container.name if len(container.name) <= TEXT else container.name[:TEXT]
    return replace(container, name=name, requests=requests, limits=limits, visible=())


def _ours(amounts: Mapping[str, str]) -> Mapping[str, str]:
    return _shared(
        tuple((name, amount) for name, amount in amounts.items() if name == SHARE or vocabulary_of(name) is not None)
    )


@lru_cache(maxsize=4096)
def _shared(amounts: tuple[tuple[str, str], ...]) -> Mapping[str, str]:
    """Return one table for all containers that ask for the same: a pod may have 256 of them, a process many pods."""
    return dict(amounts)
