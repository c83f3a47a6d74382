"""What admission changes in a new GPU pod. Pure; `mgpu simulate` calls it too."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mgpu import dialects
from mgpu.dialects.vocabulary import vocabularies, vocabulary_of
from mgpu.model.errors import BadObject
from mgpu.model.pods import Container, Pod, Stage, read_pod
from mgpu.serving.review import pointer
from mgpu.settings import Settings

VISIBLE_DEVICES = "NVIDIA_VISIBLE_DEVICES"

Operation = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Mutation:
    """A JSON Patch (RFC 6902), and what to tell the user about it. Mutating the patched pod again gives neither."""

    patch: tuple[Operation, ...] = ()
    warnings: tuple[str, ...] = ()


def mutate(raw: Mapping[str, Any], settings: Settings) -> Mutation:
    """The changes to a pod that is being created; none to one that asks for no GPU in any vocabulary.

    Raises BadObject where the pod's JSON has parts of a wrong type.
    """
    pod = read_pod(raw)
    if not vocabularies(pod):
        return Mutation()
    patch: list[Operation] = []
    warnings: list[str] = []
    for key in sorted(pod.annotations):
        if dialects.is_placement_annotation(key):
            patch.append({"op": "remove", "path": pointer("metadata", "annotations", key)})
            warnings.append(f"metadata.annotations[{key}]: removed; it records a placement, which only mgpu decides")
    ours = _is_ours(pod, settings)
    for container in pod.containers:
        patch += _equalised(container)
        if ours and any(vocabulary_of(name) for name in {**container.requests, **container.limits}):
            removed = list(_without_visible_devices(container))
            patch += removed
            if removed:
                path = f"{container.path}.env[{VISIBLE_DEVICES}]"
                warnings.append(f"{path}: removed; mgpu sets it to the cards that the container gets")
    return Mutation(tuple(patch), tuple(warnings))


def _is_ours(pod: Pod, settings: Settings) -> bool:
    """Whether an enabled dialect reads the pod; a broken ask is one's own too (it is denied later)."""
    try:
        return dialects.read_ask(pod, settings) is not None
    except BadObject:
        return True


def _equalised(container: Container) -> Iterator[Operation]:
    """Requests for limits and the reverse: extended resources need both, equal (kubernetes.md, "Pods")."""
    for kind, present, other in (
        ("limits", container.limits, container.requests),
        ("requests", container.requests, container.limits),
    ):
        missing = {name: other[name] for name in sorted(other) if name not in present and vocabulary_of(name)}
        if missing and not present:
            yield {"op": "add", "path": _pointer(container, "resources", kind), "value": missing}
        elif missing:
            for name, amount in missing.items():
                yield {"op": "add", "path": _pointer(container, "resources", kind, name), "value": amount}


def _without_visible_devices(container: Container) -> Iterator[Operation]:
    """The pod's own variable would win over Allocate's (kubernetes.md, "Device manager"). From the back: each
    operation of a patch sees the list as the one before left it.
    """
    for i in reversed(range(len(container.env))):
        if container.env[i] == VISIBLE_DEVICES:
            yield {"op": "remove", "path": _pointer(container, "env", i)}


def _pointer(container: Container, *parts: str | int) -> str:
    listed = "containers" if container.stage is Stage.APP else "initContainers"
    return pointer("spec", listed, container.position, *parts)
