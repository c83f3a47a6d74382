"""The admission rules for Pods, according to which `/validate` denies a Pod or warns about it.

The rules of one vocabulary are in its dialect. The rules here apply to all vocabularies, and protect placement
annotations (docs/security.md). The functions are pure. `webhook.admission` and `mgpu simulate` call them.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from mgpu import dialects
from mgpu.dialects import mtgpu
from mgpu.dialects.protocol import SHARE
from mgpu.dialects.registry import mixed_vocabulary_problems, vocabularies, vocabulary_of
from mgpu.model import budget
from mgpu.model.converted_requests import CONVERTED
from mgpu.model.errors import BadObject, Problem, Rule
from mgpu.model.gpu_requests import GpuRequest
from mgpu.model.pod_constraints import CONSTRAINT_ANNOTATIONS, PREFIX
from mgpu.model.pods import Pod, read_new_pod, read_pod
from mgpu.model.quantities import same_quantity
from mgpu.model.raw_objects import annotation_path, table_at
from mgpu.model.resizing import RESIZE
from mgpu.settings import Settings
from webhook import mtgpupod_rules
from webhook.resize_rules import resize_problems

_WARNINGS = 20
"""The maximum number of warnings of one review. The API server truncates all warnings together to 4 KiB."""


def validate_create(raw: Mapping[str, Any], settings: Settings, user: str = "") -> list[Problem]:
    """Return every rule that a new pod breaks, sorted by field.

    Only trusted users may create a pod with placement annotations, or one that looks like the Pod of an MtgpuPod. This
    holds for every pod and every vocabulary, enabled or not: the mutation removes such annotations, but another webhook
    may add them again afterwards.

    Args:
        user: the name of the user who creates the pod; "" if it is unknown.

    Raises:
        BadObject: if parts of the pod's JSON have a wrong type.
    """
    pod = read_new_pod(raw)
    problems = [*mixed_vocabulary_problems(pod), *_unequal(pod)]
    if user not in settings.webhook.trusted_users:
        problems += (*_placements(sorted(pod.annotations), user), *mtgpupod_rules.check_foreign_pod(pod, raw, settings))
    requests: list[GpuRequest] = []
    for dialect in dialects.enabled(settings):
        try:
            request = dialect.read_request(pod, settings)
        except BadObject as error:
            problems += error.problems
        else:
            requests += [request] if request else []
    if vocabularies(pod):
        only = requests[0] if len(requests) == 1 else None
        problems += (*dialects.constraint_problems(pod, only), *resize_problems(pod, only, settings))
    else:
        problems += _useless_shares(pod)
    return _sort(problems)


def validate_update(raw: Mapping[str, Any], old_raw: Mapping[str, Any], user: str, settings: Settings) -> list[Problem]:
    """Return the rules that an update of a pod, or of its status, breaks.

    Placement annotations are protected on every pod. The annotations of a request are immutable, like the resources of
    a container in Kubernetes. Constraints apply when the cards are decided, so they can change until the pod has a
    node. A wanted size (`mgpu.io/resize`) can change at any time. What a pod was converted from (`mgpu.io/converted`)
    never changes. Raises BadObject as `validate_create` does.
    """
    pod = _read(raw)
    old = _read(old_raw)
    changed = [
        key
        for key in sorted({*pod.annotations, *old.annotations})
        if pod.annotations.get(key) != old.annotations.get(key)
    ]
    trusted = user in settings.webhook.trusted_users
    problems = [] if trusted else [*mtgpupod_rules.check_adoption(raw, old_raw)]
    if mtgpu.enabled(settings) or not trusted:
        problems += mtgpupod_rules.check_copied_annotations(changed)
    if not trusted:
        problems += _placements(changed, user)
    if CONVERTED in changed:
        text = "says what mgpu has converted into a claim, which is immutable"
        problems.append(Problem(annotation_path(CONVERTED), text, Rule.REQUEST_IS_FIXED))
    if changed and vocabularies(old):
        problems += (*_request_changes(pod, old, changed, settings), *_constraint_changes(pod, old, changed, settings))
    if RESIZE in changed and isinstance(request := _request(old, settings), GpuRequest):
        problems += resize_problems(pod, request, settings)
    return _sort(problems)


def _read(raw: Mapping[str, Any]) -> Pod:
    """Return an existing pod, without its containers if it has more of them than any process reads.

    Such a pod gets no cards, and its containers are immutable, so the annotations of its request have no meaning. With
    10,000 containers an update would otherwise occupy a worker process for half a second.
    """
    if not budget.excess_of_containers(raw):
        return read_pod(raw)
    spec = {key: value for key, value in table_at(raw, "spec").items() if key not in ("containers", "initContainers")}
    return read_pod({**raw, "spec": spec})


def unknown_constraints(raw: Mapping[str, Any], old_raw: Mapping[str, Any] | None) -> list[str]:
    """Return a warning for each new annotation of a GPU pod that looks like a constraint but is none, such as a typo.

    Args:
        old_raw: the pod before the update; None for a new pod.

    Raises:
        BadObject: as in `validate_create`.
    """
    annotations = table_at(raw, "metadata", "annotations")
    before = table_at(old_raw, "metadata", "annotations")
    new = sorted(
        key
        for key in annotations
        if key.startswith(PREFIX) and key not in (*CONSTRAINT_ANNOTATIONS, RESIZE) and key not in before
    )
    unknown = [key for key in new if not dialects.is_placement_annotation(key)][:_WARNINGS]
    read = read_new_pod if old_raw is None else _read
    if not unknown or not vocabularies(read(raw)):
        return []
    return [f"{annotation_path(key)}: is unknown to mgpu and has no effect{_suggestion(key)}" for key in unknown]


def _suggestion(key: str) -> str:
    close = get_close_matches(key.lower(), CONSTRAINT_ANNOTATIONS, n=1, cutoff=0.75)
    return f"; did you mean {close[0]}?" if close else f"; the constraints are {', '.join(CONSTRAINT_ANNOTATIONS)}"


def _unequal(pod: Pod) -> Iterator[Problem]:
    for container in pod.containers:
        for name in sorted(container.requests.keys() & container.limits.keys()):
            request, limit = container.requests[name], container.limits[name]
            if (vocabulary_of(name) or name == SHARE) and not same_quantity(request, limit):
                path = f"{container.path}.resources.limits[{name}]"
                text = f"must equal the request, which is {request}, not {limit}"
                yield Problem(path, text, Rule.REQUEST_EQUALS_LIMIT)


def _useless_shares(pod: Pod) -> Iterator[Problem]:
    """Yield a problem for each `mgpu.io/share` in a pod without GPUs.

    The kubelet would allocate a device id, and the container would wait for a placement that is never decided.
    """
    text = "is not a request for GPUs; mgpu sets it on pods that request GPUs and need it"
    for amount in filter(None, (container.requested(SHARE) for container in pod.containers)):
        yield Problem(amount.path, text, Rule.SHARE_RESOURCE)


def _placements(keys: Iterable[str], user: str) -> Iterator[Problem]:
    """Yield a problem for each placement annotation among `keys`. Call this only if `user` is not trusted."""
    for key in keys:
        if dialects.is_placement_annotation(key):
            text = f"records a placement; only mgpu may change it, not {user or 'an unnamed user'}"
            yield Problem(annotation_path(key), text, Rule.PLACEMENT_IS_RESERVED)


def _request_changes(pod: Pod, old: Pod, changed: Iterable[str], settings: Settings) -> Iterator[Problem]:
    """Yield a problem for each changed annotation that would change the request of the old pod."""
    changed = [key for key in changed if key in dialects.REQUEST_ANNOTATIONS]
    before = _request(old, settings) if changed else None
    if not changed or _request(replace(old, annotations=pod.annotations), settings) == before:
        return
    annotations = dict(old.annotations)  # One copy for all keys: there may be thousands of other annotations.
    pod_with_one_change = replace(old, annotations=annotations)
    for key in changed:
        _copy(annotations, key, pod.annotations)
        if _request(pod_with_one_change, settings) != before:
            text = "is part of the pod's request, which is immutable"
            yield Problem(annotation_path(key), text, Rule.REQUEST_IS_FIXED)
        _copy(annotations, key, old.annotations)


def _copy(target: dict[str, str], key: str, source: Mapping[str, str]) -> None:
    """Set the key in `target` to its value in `source`, or remove it if `source` does not have it."""
    if key in source:
        target[key] = source[key]
    else:
        target.pop(key, None)


def _constraint_changes(pod: Pod, old: Pod, changed: Iterable[str], settings: Settings) -> Iterator[Problem]:
    """Yield the problems with constraints that an update adds.

    A problem that the old pod has already must not prevent other changes.
    """
    keys = [key for key in changed if key in CONSTRAINT_ANNOTATIONS]
    if keys and old.node:
        text = f"cannot be changed: the cards are decided, and the pod is on {old.node}"
        yield from (Problem(annotation_path(key), text, Rule.CONSTRAINT_IN_TIME) for key in keys)
    elif keys:
        parsed = _request(old, settings)
        request = parsed if isinstance(parsed, GpuRequest) else None
        before = dialects.constraint_problems(old, request)
        yield from (problem for problem in dialects.constraint_problems(pod, request) if problem not in before)


def _request(pod: Pod, settings: Settings) -> GpuRequest | tuple[Problem, ...] | None:
    """Return the request, or the problems of an invalid request, or None for a pod without GPUs.

    Callers compare the results of two pods.
    """
    try:
        return dialects.read_bare_request(pod, settings)
    except BadObject as error:
        return error.problems


def _sort(problems: Iterable[Problem]) -> list[Problem]:
    """Return the problems without duplicates, by field in natural order (`[2]` before `[10]`), then by message."""
    return sorted(
        set(problems), key=lambda p: ([(len(d), d, t) for d, t in _split_digits(p.field)], p.field, p.message)
    )


def _split_digits(field: str) -> list[tuple[str, str]]:
    return re.findall(r"(\d*)(\D*)", field)
