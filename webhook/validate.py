"""The rules that admission holds GPU pods to. Pure; `mgpu simulate` calls it too."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from mgpu import dialects
from mgpu.dialects.vocabulary import mixing, vocabularies, vocabulary_of
from mgpu.model.asks import Ask
from mgpu.model.errors import BadObject, Problem
from mgpu.model.pods import Pod, read_pod
from mgpu.model.quantities import QuantityError, parse_quantity
from mgpu.settings import Settings

_PROCESSES = ("mgpu-scheduler", "mgpu-deviceplugin", "mgpu-webhook")


def validate_create(raw: Mapping[str, Any], settings: Settings) -> list[Problem]:
    """Every rule that a new pod breaks, in the order of its fields; nothing for a pod that asks for no GPU.

    Raises BadObject where the pod's JSON has parts of a wrong type.
    """
    pod = read_pod(raw)
    problems = [*mixing(pod), *_unequal(pod)]
    for dialect in dialects.enabled(settings):
        try:
            dialect.read_ask(pod, settings)
        except BadObject as error:
            problems += error.problems
    return _in_order(problems)


def validate_update(raw: Mapping[str, Any], old_raw: Mapping[str, Any], user: str, settings: Settings) -> list[Problem]:
    """What a change of a GPU pod (its status too) may not touch: placements, and the annotations of its ask.

    Resources are immutable in Kubernetes, so what annotations say of them is too. Raises BadObject as above.
    """
    pod, old = read_pod(raw), read_pod(old_raw)
    changed = [
        key
        for key in sorted({*pod.annotations, *old.annotations})
        if pod.annotations.get(key) != old.annotations.get(key)
    ]
    if not changed or not vocabularies(old):
        return []
    trusted = user in identities(settings)
    return _in_order([*_placements(changed, user, trusted=trusted), *_asks(pod, old, changed, settings)])


def identities(settings: Settings) -> Collection[str]:
    """The users that may write placement annotations."""
    namespace = settings.webhook.namespace
    return settings.webhook.identities or [f"system:serviceaccount:{namespace}:{name}" for name in _PROCESSES]


def _unequal(pod: Pod) -> Iterator[Problem]:
    for container in pod.containers:
        for name in sorted(container.requests.keys() & container.limits.keys()):
            request, limit = container.requests[name], container.limits[name]
            if vocabulary_of(name) and not _equal(request, limit):
                path = f"{container.path}.resources.limits[{name}]"
                yield Problem(path, f"must equal the request, which is {request}, not {limit}")


def _equal(request: str, limit: str) -> bool:
    try:
        return parse_quantity(request) == parse_quantity(limit)
    except QuantityError:
        return request == limit


def _placements(changed: Iterable[str], user: str, *, trusted: bool) -> Iterator[Problem]:
    for key in changed:
        if dialects.is_placement_annotation(key) and not trusted:
            who = user or "an unnamed user"
            yield Problem(f"metadata.annotations[{key}]", f"records a placement; only mgpu may change it, not {who}")


def _asks(pod: Pod, old: Pod, changed: Iterable[str], settings: Settings) -> Iterator[Problem]:
    """A problem at each changed annotation that alone would change what the old pod asks for."""
    before = _ask(old, settings)
    if _ask(replace(old, annotations=pod.annotations), settings) == before:
        return
    for key in changed:
        annotations = {k: v for k, v in old.annotations.items() if k != key}
        if key in pod.annotations:
            annotations[key] = pod.annotations[key]
        if _ask(replace(old, annotations=annotations), settings) != before:
            yield Problem(
                f"metadata.annotations[{key}]", "is part of what the pod asks for; it cannot be changed once it exists"
            )


def _ask(pod: Pod, settings: Settings) -> Ask | tuple[Problem, ...] | None:
    try:
        return dialects.read_ask(pod, settings)
    except BadObject as error:
        return error.problems


def _in_order(problems: Iterable[Problem]) -> list[Problem]:
    """Each once, by field as people count (`containers[2]` before `containers[10]`), then by message."""
    return sorted(set(problems), key=lambda p: ([(len(d), d, t) for d, t in _pieces(p.field)], p.field, p.message))


def _pieces(field: str) -> list[tuple[str, str]]:
    return re.findall(r"(\d*)(\D*)", field)
