"""The rules that admission holds MtgpuPods to, and Pods with their annotations. Pure; `mgpu simulate` calls it too."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mgpu import dialects
from mgpu.dialects import mtgpu
from mgpu.dialects.registry import MTGPU
from mgpu.model.errors import BadObject, Problem
from mgpu.model.pods import Pod
from mgpu.model.raw_objects import table_at
from mgpu.settings import Settings

_OWNERS = "metadata.ownerReferences"
_ANEW = "it cannot be changed; delete the MtgpuPod and make another"


def validate_mtgpupod_create(raw: Mapping[str, Any], settings: Settings) -> list[Problem]:
    """Every rule that a new MtgpuPod breaks, parts of a wrong type too. What its `status` says does not count: the API
    server drops it. Nothing where MtgpuPods are not served.
    """
    return _broken(raw) if mtgpu.enabled(settings) else []


def validate_mtgpupod_update(raw: Mapping[str, Any], old: Mapping[str, Any], settings: Settings) -> list[Problem]:
    """What a change of an MtgpuPod may not touch: what its card is chosen by, and its spec, from which its Pod is made.

    Everything else may change, to what breaks no rule that it did not break before: whoever removes a finalizer of an
    MtgpuPod that was never good is not held up.
    """
    if not mtgpu.enabled(settings):
        return []
    said = _differing(table_at(raw, "metadata", "annotations"), table_at(old, "metadata", "annotations"))
    spec = _differing(table_at(raw, "spec"), table_at(old, "spec"))
    before = {*_broken(old)}
    return [
        *(Problem(_path(key), f"is what the card is chosen by; {_ANEW}") for key in said if key in mtgpu.ANNOTATIONS),
        *(Problem(f"spec.{key}", f"is what its Pod is made from; {_ANEW}") for key in spec),
        *(problem for problem in _broken(raw) if problem not in before),
    ]


def foreign(pod: Pod, raw: Mapping[str, Any], settings: Settings) -> Iterator[Problem]:
    """A new Pod that the suite did not create and that looks like the Pod of an MtgpuPod, which holds a card.

    This holds where MtgpuPods are not served too: Pods that were made for them before hold their cards still.
    """
    if mtgpu.enabled(settings):
        remedy = f"create an object of kind {mtgpu.KIND} ({mtgpu.API_VERSION}) in place of this Pod"
    else:
        remedy = "leave it out; where another controller creates these Pods, name its user in webhook.identities"
    for key in sorted(key for key in pod.annotations if key.startswith(MTGPU))[:1]:
        yield Problem(_path(key), f"is for MtgpuPods, whose Pods mgpu creates; {remedy}")
    if mtgpu.owner_of(raw):
        text = f"names an {mtgpu.KIND} as the controller of this Pod, and mgpu creates the Pods of MtgpuPods; {remedy}"
        yield Problem(_OWNERS, text)


def adopted(raw: Mapping[str, Any], old: Mapping[str, Any]) -> Iterator[Problem]:
    """A change that names an MtgpuPod as the controller of a Pod that had not named it. Removing one is allowed: the
    garbage collector does so when the MtgpuPod is deleted and its Pod is orphaned.
    """
    if mtgpu.owner_of(raw) not in ("", mtgpu.owner_of(old)):
        text = f"names an {mtgpu.KIND} as the controller of this Pod; mgpu sets it when it creates the Pod, and it"
        yield Problem(_OWNERS, f"{text} cannot be added or changed afterwards")


def copied(changed: Iterable[str]) -> Iterator[Problem]:
    """Of a Pod with these changed annotations. Pods that had them before mgpu came keep them, too."""
    for key in changed:
        if key.startswith(MTGPU):
            text = "is copied from an MtgpuPod when its Pod is made; it cannot be added, changed or removed afterwards"
            yield Problem(_path(key), text)


def _broken(raw: Mapping[str, Any]) -> list[Problem]:
    recorded = sorted(filter(dialects.is_placement_annotation, table_at(raw, "metadata", "annotations")))
    found = [Problem(_path(key), "records a placement, which only mgpu decides; leave it out") for key in recorded]
    try:
        mtgpu.read_mtgpupod({key: value for key, value in raw.items() if key != "status"})
    except BadObject as error:
        found += error.problems
    return found


def _differing(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    return sorted(key for key in {*now, *before} if now.get(key) != before.get(key))


def _path(key: str) -> str:
    return f"metadata.annotations[{key}]"
