"""The rules that admission holds GPU pods to. Pure; `mgpu simulate` calls it too."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from mgpu import dialects
from mgpu.dialects import mtgpu
from mgpu.dialects.protocol import SHARE
from mgpu.dialects.registry import mixing, vocabularies, vocabulary_of
from mgpu.model import budget
from mgpu.model.errors import BadObject, Problem
from mgpu.model.gpu_requests import GpuRequest
from mgpu.model.pod_constraints import ALL, PREFIX, field
from mgpu.model.pods import Pod, read_new_pod, read_pod
from mgpu.model.quantities import same_quantity
from mgpu.model.raw_objects import table_at
from mgpu.settings import Settings
from webhook import mtgpupod_rules
from webhook.identities import identities

_WARNINGS = 20
"""The API server cuts off what is more than 4 KiB of them."""


def validate_create(raw: Mapping[str, Any], settings: Settings, user: str = "") -> list[Problem]:
    """Every rule that a new pod breaks, in the order of its fields.

    user: who creates it; "": nobody of the suite. Nobody but the suite's identities may create a pod with placement
    annotations of any vocabulary, or one that looks like the Pod of an MtgpuPod, whether it asks for GPU or not and
    whether that vocabulary is enabled or not: the mutation removes records, and another webhook may add them again.
    Raises BadObject where the pod's JSON has parts of a wrong type.
    """
    pod = read_new_pod(raw)
    problems = [*mixing(pod), *_unequal(pod)]
    if user not in identities(settings):
        problems += (*_placements(sorted(pod.annotations), user), *mtgpupod_rules.foreign(pod, raw, settings))
    asks: list[GpuRequest] = []
    for dialect in dialects.enabled(settings):
        try:
            request = dialect.read_request(pod, settings)
        except BadObject as error:
            problems += error.problems
        else:
            asks += [request] if request else []
    if vocabularies(pod):
        problems += dialects.constraint_problems(pod, asks[0] if len(asks) == 1 else None)
    else:
        problems += _shares_of_nothing(pod)
    return _in_order(problems)


def validate_update(raw: Mapping[str, Any], old_raw: Mapping[str, Any], user: str, settings: Settings) -> list[Problem]:
    """What a change of a pod (its status too) may not touch: placements, and the annotations of its request.

    Placements are protected on every pod, whether it asks for GPU or not. Resources are immutable in Kubernetes, so
    the annotations that complete them are immutable too. Wishes are read when cards are decided: until the pod has a
    node they may change to valid ones. Raises BadObject as above.
    """
    pod, old = _read(raw), _read(old_raw)
    changed = [
        key
        for key in sorted({*pod.annotations, *old.annotations})
        if pod.annotations.get(key) != old.annotations.get(key)
    ]
    trusted = user in identities(settings)
    problems = [] if trusted else [*mtgpupod_rules.adopted(raw, old_raw)]
    if mtgpu.enabled(settings) or not trusted:
        problems += mtgpupod_rules.copied(changed)
    if not trusted:
        problems += _placements(changed, user)
    if changed and vocabularies(old):
        problems += (*_asks(pod, old, changed, settings), *_constraints(pod, old, changed, settings))
    return _in_order(problems)


def _read(raw: Mapping[str, Any]) -> Pod:
    """A pod that exists; without containers where it has more of them than any process reads.

    Containers are immutable and such a pod gets no cards, so that the annotations of its request have no meaning. To
    read 10,000 of them four times would take half a second of a worker. Raises BadObject as above.
    """
    if not budget.excess_of_containers(raw):
        return read_pod(raw)
    spec = {key: value for key, value in table_at(raw, "spec").items() if key not in ("containers", "initContainers")}
    return read_pod({**raw, "spec": spec})


def strange_wishes(raw: Mapping[str, Any], old_raw: Mapping[str, Any] | None) -> list[str]:
    """A warning for each new annotation of a GPU pod that looks like a wish and is none: a typo, most likely.

    old_raw: None for a pod that is being created. Raises BadObject as above.
    """
    annotations, before = (table_at(one, "metadata", "annotations") for one in (raw, old_raw))
    new = sorted(key for key in annotations if key.startswith(PREFIX) and key not in ALL and key not in before)
    strange = [key for key in new if not dialects.is_placement_annotation(key)][:_WARNINGS]
    read = read_new_pod if old_raw is None else _read
    if not strange or not vocabularies(read(raw)):
        return []
    return [f"{field(key)}: is not known to mgpu and has no effect{_meant(key)}" for key in strange]


def _meant(key: str) -> str:
    close = get_close_matches(key.lower(), ALL, n=1, cutoff=0.75)
    return f"; did you mean {close[0]}?" if close else f"; a pod may wish {', '.join(ALL)}"


def _unequal(pod: Pod) -> Iterator[Problem]:
    for container in pod.containers:
        for name in sorted(container.requests.keys() & container.limits.keys()):
            request, limit = container.requests[name], container.limits[name]
            if (vocabulary_of(name) or name == SHARE) and not same_quantity(request, limit):
                path = f"{container.path}.resources.limits[{name}]"
                yield Problem(path, f"must equal the request, which is {request}, not {limit}")


def _shares_of_nothing(pod: Pod) -> Iterator[Problem]:
    """The kubelet would hand out an id of it, and the container would wait for a decision for ever."""
    for asked in filter(None, (container.asked(SHARE) for container in pod.containers)):
        yield Problem(asked[1], "stands for no card by itself; mgpu sets it for a pod that asks for GPU and needs it")


def _placements(keys: Iterable[str], user: str) -> Iterator[Problem]:
    """A problem at each of these annotations that records a placement; `user` is none of the suite's identities."""
    for key in keys:
        if dialects.is_placement_annotation(key):
            who = user or "an unnamed user"
            yield Problem(f"metadata.annotations[{key}]", f"records a placement; only mgpu may change it, not {who}")


def _asks(pod: Pod, old: Pod, changed: Iterable[str], settings: Settings) -> Iterator[Problem]:
    """A problem at each changed annotation that alone would change what the old pod asks for."""
    changed = [key for key in changed if key in dialects.ASK_ANNOTATIONS]
    before = _ask(old, settings) if changed else None
    if not changed or _ask(replace(old, annotations=pod.annotations), settings) == before:
        return
    tried = dict(old.annotations)  # one for all: there may be thousands of others
    alone = replace(old, annotations=tried)
    for key in changed:
        _put(tried, key, pod.annotations)
        if _ask(alone, settings) != before:
            yield Problem(field(key), "is part of what the pod asks for; it cannot be changed once it exists")
        _put(tried, key, old.annotations)


def _put(tried: dict[str, str], key: str, annotations: Mapping[str, str]) -> None:
    """The key as it is in `annotations`, or not at all."""
    if key in annotations:
        tried[key] = annotations[key]
    else:
        tried.pop(key, None)


def _constraints(pod: Pod, old: Pod, changed: Iterable[str], settings: Settings) -> Iterator[Problem]:
    """Problems that the change brings; those that were there before it keep nobody from another change."""
    keys = [key for key in changed if key in ALL]
    if keys and old.node:
        text = f"is read when cards are decided; the pod is on {old.node} already, it cannot be changed any more"
        yield from (Problem(field(key), text) for key in keys)
    elif keys:
        request = _ask(old, settings)
        known = request if isinstance(request, GpuRequest) else None
        before = dialects.constraint_problems(old, known)
        yield from (problem for problem in dialects.constraint_problems(pod, known) if problem not in before)


def _ask(pod: Pod, settings: Settings) -> GpuRequest | tuple[Problem, ...] | None:
    try:
        return dialects.read_bare_request(pod, settings)
    except BadObject as error:
        return error.problems


def _in_order(problems: Iterable[Problem]) -> list[Problem]:
    """Each once, by field as people count (`containers[2]` before `containers[10]`), then by message."""
    return sorted(set(problems), key=lambda p: ([(len(d), d, t) for d, t in _pieces(p.field)], p.field, p.message))


def _pieces(field: str) -> list[tuple[str, str]]:
    return re.findall(r"(\d*)(\D*)", field)
