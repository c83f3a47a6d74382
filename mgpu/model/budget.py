"""The budget of an object: how large its parts may be. Pure.

The API server accepts objects of 1.5 MiB, and any user who may create pods chooses the length of their lists. Without
bounds that user would also choose the work and the memory of every process. Each bound here has its reason;
`mgpu.serving.request_memory` bounds what all requests of a process hold together. Sizes are counted before anything is
built from an object: by the webhook (`excess`), and by the scheduler and the agents (`excess_of_containers`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import orjson

from mgpu.model.errors import Problem, Rule
from mgpu.model.raw_objects import table_at

MAX_CONTAINERS = 256
"""Containers and init containers of a pod: 16 on each of 16 cards, which is what the vocabularies allow at most."""

MAX_RESOURCES = 2048
"""Entries of requests and limits of all containers, 8 for each: cpu, memory and two for GPU in both."""

MAX_VARIABLES = 16_384
"""Environment variables of all containers: 64 for each. Charts that set hundreds in one container stay far below."""

MAX_ANNOTATIONS = 1024
"""Annotations of an object. The API server allows 256 KiB of annotations; ordinary pods have tens."""

MAX_PATCH_OPERATIONS = 4096
"""Operations of one JSON Patch: 16 for each container. `koordinator.sh/gpu` and `mgpu.io/share` need 8."""


MAX_LABELS = 128
"""Labels of an object. The scheduler keeps those of GPU pods for disruption budgets (`mgpu.dialects.watched_pods`)."""

MAX_NESTING = 32
"""Levels of objects and lists in the spec of an MtgpuPod, whose schema keeps unknown fields. A PodSpec has 12. The JSON
encoder refuses 254, so the Pod of such an MtgpuPod could not be created."""

MAX_SPEC_BYTES = 256 << 10
"""Bytes of the spec of an MtgpuPod, as JSON: what `kubectl apply` can keep of it in an annotation."""


@dataclass(frozen=True, slots=True)
class Size:
    """The number of entries in the lists of an object whose length users choose."""

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


def size_of(raw: object) -> Size:
    """Return the size of a Pod, or of an object with a Pod's spec, as decoded JSON. Parts of a wrong type are empty."""
    meta, spec = table_at(raw, "metadata"), table_at(raw, "spec")
    containers = [item for kind in ("initContainers", "containers") for item in _list(spec.get(kind))]
    if len(containers) > MAX_CONTAINERS:  # That suffices to refuse it.
        return Size(len(containers))
    resources = [table_at(item, "resources", kind) for item in containers for kind in ("requests", "limits")]
    return Size(
        containers=len(containers),
        resources=sum(map(len, resources)),
        variables=sum(len(_list(item.get("env"))) for item in containers if isinstance(item, dict)),
        annotations=len(table_at(meta, "annotations")),
        labels=len(table_at(meta, "labels")),
    )


def excess(raw: object, old: object = None) -> list[Problem]:
    """Return what of an object exceeds its bound.

    Args:
        old: the object before an update, or None. What was too large before is accepted as long as it does not grow, so
            that an object from before this version can still be changed and deleted.
    """
    now = size_of(raw)
    before = size_of(old) if old is not None else Size()
    return list(_above(now, before))


def excess_of_containers(raw: object) -> list[Problem]:
    """Return what of an admitted pod exceeds its bound, of the lists that are immutable and that processes keep.

    Processes do not keep a pod's labels, annotations and variables as a whole, so their number does not matter here.
    """
    now = size_of(raw)
    return [*_above(Size(containers=now.containers, resources=now.resources), Size())]


def excess_of_spec(raw: object, old: object = None) -> list[Problem]:
    """Return what is wrong with the size of an MtgpuPod's spec. old: as in `excess`."""
    spec, spec_before = table_at(raw, "spec"), table_at(old, "spec")
    deep, deep_before = _is_deep(spec), _is_deep(spec_before)
    if deep:
        text = f"is nested more than {MAX_NESTING} levels deep; remove what is no field of a PodSpec"
        return [] if deep_before else [Problem("spec", text, Rule.TOO_LARGE)]
    size, before = len(orjson.dumps(spec)), 0 if deep_before else len(orjson.dumps(spec_before))
    if size <= max(MAX_SPEC_BYTES, before):
        return []
    limit = f"more than the {MAX_SPEC_BYTES} that mgpu accepts"
    text = f"has {size} bytes as JSON, {limit}; move scripts and data into ConfigMaps"
    return [Problem("spec", text, Rule.TOO_LARGE)]


def _is_deep(value: object) -> bool:
    """Return whether a decoded value has more than `NESTING` levels."""
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
    for what, path, text, most, remedy in _BOUNDS:
        count = getattr(now, what)
        if count > max(most, getattr(before, what)):
            message = f"has {count} {text}, more than the {most} that mgpu accepts; {remedy}"
            yield Problem(path, message, Rule.TOO_LARGE)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
