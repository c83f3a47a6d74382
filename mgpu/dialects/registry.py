"""The registry of the dialects.

Mainly `mgpu.dialects`, the scheduler and the webhook use it. To add a dialect, write its module and add it to `ALL`
(CONTRIBUTING.md, "Adding a dialect"). The order of `ALL` is the order in which dialects read a pod, and in which
`mgpu.dialects.carrier` considers their resources.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache

from mgpu.dialects import gpushare, koordinator, mgpu, slices
from mgpu.dialects.protocol import Dialect
from mgpu.model.errors import Problem, Rule
from mgpu.model.pods import Pod
from mgpu.model.raw_objects import annotation_path
from mgpu.model.record_seals import SEAL
from mgpu.model.resizing import APPLIED, RESIZED
from mgpu.settings import Settings

ALL: tuple[Dialect, ...] = (mgpu, gpushare, koordinator, slices)
REQUEST_ANNOTATIONS = frozenset(key for dialect in ALL for key in dialect.REQUEST_ANNOTATIONS)
REQUEST_LABELS = frozenset(key for dialect in ALL for key in dialect.REQUEST_LABELS)
"""The annotations that are part of a pod's request in any vocabulary."""
MTGPU_PREFIX = "lsalab.nthu/"
"""The prefix of the annotations of MtgpuPods and their Pods. MtgpuPods have no `Dialect`, but a Pod with such an
annotation must not use another vocabulary."""

_BY_NAME: Mapping[str, Dialect] = {dialect.NAME: dialect for dialect in ALL}
_COMMON = (SEAL, RESIZED, APPLIED)
"""The annotations of a record that do not belong to any vocabulary."""
_RECORD_KEYS = (*_COMMON, *(key for dialect in ALL for key in dialect.RECORD_KEYS))
_MAX_CACHED_KEY = 128
"""The most characters of a key that is remembered, since users choose the keys."""
_RESOURCE_PREFIXES = tuple(prefix for dialect in ALL for prefix in dialect.RESOURCE_PREFIXES)


def by_name(name: str) -> Dialect:
    return _BY_NAME[name]


def enabled(settings: Settings) -> Iterator[Dialect]:
    """Yield the enabled dialects in the order of the registry."""
    return (dialect for dialect in ALL if dialect.enabled(settings))


def vocabulary_of(resource: str) -> str | None:
    """Return the name of the vocabulary that a resource belongs to, or None if it is not a GPU resource.

    Disabled vocabularies count too, so that admission denies pods that mix vocabularies.
    """
    if not resource.startswith(_RESOURCE_PREFIXES):
        return None
    return _vocabulary(resource) if len(resource) > _MAX_CACHED_KEY else _vocabulary_cached(resource)


def _vocabulary(resource: str) -> str | None:
    return next((dialect.NAME for dialect in ALL if dialect.owns_resource(resource)), None)


_vocabulary_cached = lru_cache(maxsize=1024)(_vocabulary)


def vocabularies(pod: Pod) -> dict[str, str]:
    """Return the vocabularies that the pod uses, each with the path of the first field that uses it."""
    found: dict[str, str] = {}
    for container, resource in pod.resources():
        name = vocabulary_of(resource)
        amount = container.requested(resource) if name else None
        if name and amount:
            found.setdefault(name, amount.path)
    for key in pod.annotations:
        if key.startswith(MTGPU_PREFIX):
            found.setdefault("mtgpu", annotation_path(key))
    return found


def mixed_vocabulary_problems(pod: Pod) -> list[Problem]:
    """Return a problem for each vocabulary that the pod uses besides the first, at the first field that uses it."""
    (first, _), *others = list(vocabularies(pod).items()) or [("", "")]
    return [
        Problem(
            path,
            f"belongs to {name}, while the pod already requests GPUs with {first}; a pod uses one vocabulary",
            Rule.ONE_VOCABULARY,
        )
        for name, path in others
    ]


def is_placement_annotation(key: str) -> bool:
    """Return whether an annotation is part of an allocation record or is its seal. Users must not write these.

    Disabled vocabularies count too, since a vocabulary may be enabled while the pod exists. The function first compares
    prefixes, because a pod may have 20,000 annotations and nearly all of them have none of the prefixes.
    """
    if not key.startswith(_RECORD_KEYS):
        return False
    if len(key) > _MAX_CACHED_KEY:
        return _is_owned(key)
    return _is_owned_cached(key)


def _is_owned(key: str) -> bool:
    return key in _COMMON or any(dialect.owns_annotation(key) for dialect in ALL)


_is_owned_cached = lru_cache(maxsize=1024)(_is_owned)
"""The pods of a cluster name their containers much alike, so their records have the same few keys."""
