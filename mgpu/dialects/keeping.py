"""What a process keeps of a pod once it has read what the pod asks for. Pure.

Admission checks the size of a pod when it is created. It is not asked about every later update, such as one of labels
alone, and a process that keeps all labels of every pod is full after a few hundred requests, also when it starts again.
So these bounds hold whenever a pod is read, whatever has become of it since its admission.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from mgpu import dialects
from mgpu.dialects.mtgpu import ANNOTATIONS as OF_MTGPUPODS
from mgpu.dialects.node_resources import SHARE
from mgpu.dialects.vocabulary import vocabulary_of
from mgpu.model.budget import LABELS
from mgpu.model.pods import Container, Pod

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
