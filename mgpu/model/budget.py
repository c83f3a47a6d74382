"""Limits the size of the objects that mgpu accepts.

The API server accepts objects of 1.5 MiB, and any user who may create pods chooses how long the lists in them are.
Without limits a user could make every process spend any amount of work and memory. Each process checks a Pod with this
module before it reads the GPU request of the Pod. `mgpu.serving` limits the memory of all requests together. If you
raise a limit, measure the cost again (docs/attacks.md).
"""

from collections.abc import Iterator
from itertools import chain
from operator import le
from typing import Any, NamedTuple

import orjson

from mgpu.model.errors import Problem, Rule
from mgpu.model.raw_objects import table_at

MAX_CONTAINERS = 256
"""The most containers and init containers of a pod: 16 on each of 16 cards."""

MAX_RESOURCES = 2048
"""The most entries in the requests and limits of all containers: 8 for each of `MAX_CONTAINERS` containers. An ordinary
container has cpu, memory and two GPU resources, each in the requests and in the limits."""

MAX_VARIABLES = 16_384
"""The most environment variables of all containers together: 64 for each of `MAX_CONTAINERS` containers. Helm charts
set a few hundred at most."""

MAX_ANNOTATIONS = 1024
"""The most annotations of an object. Ordinary pods have tens, but the API server allows 256 KiB of annotations."""

MAX_PATCH_OPERATIONS = 4096
"""The most operations of one JSON Patch: 16 for each of `MAX_CONTAINERS` containers. A container that needs both the
translation of `koordinator.sh/gpu` and `mgpu.io/share` takes 8."""

MAX_LABELS = 128
"""The most labels of an object. The scheduler stores the labels of GPU pods, because PodDisruptionBudgets select pods
by label (`mgpu.dialects.watched_pods`)."""

MAX_NESTING = 32
"""The most levels of objects and lists in the spec of an MtgpuPod, whose schema preserves unknown fields. A PodSpec has
12 levels. The JSON encoder fails at 254 levels, so mgpu could not create the Pod of the MtgpuPod."""

MAX_SPEC_BYTES = 256 << 10
"""The most bytes of the spec of an MtgpuPod as JSON. `kubectl apply` cannot store a larger spec in its annotation."""


class Size(NamedTuple):
    """The number of entries in the lists of an object."""

    containers: int = 0
    resources: int = 0
    variables: int = 0
    annotations: int = 0
    labels: int = 0


_BOUNDS = (
    ("containers", "spec.containers", "containers and init containers", MAX_CONTAINERS, "split the pod"),
    ("resources", "spec.containers", "resource amounts in its containers", MAX_RESOURCES, "name fewer resources"),
    ("variables", "spec.containers", "environment variables", MAX_VARIABLES, "use envFrom with a ConfigMap"),
    ("annotations", "metadata.annotations", "annotations", MAX_ANNOTATIONS, "remove some"),
    ("labels", "metadata.labels", "labels", MAX_LABELS, "remove some"),
)

_EMPTY = Size()
_MOST = Size(MAX_CONTAINERS, MAX_RESOURCES, MAX_VARIABLES, MAX_ANNOTATIONS, MAX_LABELS)


def size_of(raw: object) -> Size:
    """Return the size of a Pod or MtgpuPod (decoded JSON). Fields of the wrong type count as empty.

    If the object has more than `MAX_CONTAINERS` containers, nothing else is counted, and the other sizes are 0.
    """
    meta, spec = table_at(raw, "metadata"), table_at(raw, "spec")
    early, late = _list(spec.get("initContainers")), _list(spec.get("containers"))
    count = len(early) + len(late)
    if count > MAX_CONTAINERS:
        return Size(count)
    resources = variables = 0
    for container in (*early, *late):
        if isinstance(container, dict):
            variables += len(_list(container.get("env")))
            amounts = table_at(container.get("resources"))
            resources += len(table_at(amounts.get("requests"))) + len(table_at(amounts.get("limits")))
    annotations, labels = table_at(meta.get("annotations")), table_at(meta.get("labels"))
    return Size(count, resources, variables, len(annotations), len(labels))


def excess(raw: object, old: object = None) -> list[Problem]:
    """Return a problem for each list of an object that is too long.

    Args:
        old: the object before an update, or None. A list that was too long before the update may keep its length, so
            that finalizers of existing objects with such a list can be removed.
    """
    now = size_of(raw)
    if old is None:
        return [*_above(now, _EMPTY)]
    return [*_above(now, size_of(old))]


def excess_of_containers(raw: object) -> list[Problem]:
    """Return the problems of an existing pod: too many containers, or too many resources in them."""
    now = size_of(raw)
    return [*_above(Size(containers=now.containers, resources=now.resources), _EMPTY)]


def excess_of_spec(raw: object, old: object = None) -> list[Problem]:
    """Return the problems with the nesting and the bytes of an MtgpuPod's spec.

    Args:
        old: the object before an update, or None. A spec that was too large before the update may keep its size, and
            one that was too deeply nested may stay so.
    """
    spec, spec_before = table_at(raw, "spec"), table_at(old, "spec")
    deep, deep_before = _is_deep(spec), _is_deep(spec_before)
    if deep:
        text = f"is nested more than {MAX_NESTING} levels deep; remove the fields that a PodSpec does not have"
        return [] if deep_before else [Problem("spec", text, Rule.TOO_LARGE)]
    size, before = len(orjson.dumps(spec)), 0 if deep_before else len(orjson.dumps(spec_before))
    if size <= max(MAX_SPEC_BYTES, before):
        return []
    limit = f"more than the {MAX_SPEC_BYTES} that mgpu accepts"
    text = f"has {size} bytes as JSON, {limit}; move scripts and data into ConfigMaps"
    return [Problem("spec", text, Rule.TOO_LARGE)]


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(MAX_NESTING):
        parts = chain.from_iterable(
            one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)
        )
        level = [part for part in parts if isinstance(part, dict | list)]
        if not level:
            return False
    return True


def _above(now: Size, before: Size) -> Iterator[Problem]:
    if all(map(le, now, _MOST)):
        return
    for what, path, text, most, remedy in _BOUNDS:
        count = getattr(now, what)
        if count > max(most, getattr(before, what)):
            message = f"has {count} {text}, more than the {most} that mgpu accepts; {remedy}"
            yield Problem(path, message, Rule.TOO_LARGE)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
