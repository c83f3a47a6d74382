"""The admission rules for MtgpuPods, and for Pods that look like the Pods of MtgpuPods.

`mgpu.dialects.mtgpu` defines what a valid MtgpuPod is. The rules here protect the fields that must not change, and
limit who may create the Pods of MtgpuPods (docs/security.md). The functions are pure; `webhook.admission`,
`webhook.pod_rules` and `mgpu simulate` call them.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mgpu import dialects
from mgpu.dialects import mtgpu
from mgpu.dialects.registry import MTGPU_PREFIX
from mgpu.model.errors import BadObject, Problem, Rule
from mgpu.model.pods import Pod
from mgpu.model.raw_objects import annotation_path, table_at
from mgpu.settings import Settings

_OWNERS = "metadata.ownerReferences"
_FIXED = "it cannot be changed; delete the MtgpuPod and create another"


def validate_mtgpupod_create(raw: Mapping[str, Any], settings: Settings) -> list[Problem]:
    """Return every rule that a new MtgpuPod breaks; none if MtgpuPods are disabled.

    The rules ignore its `status`, because the API server removes it.
    """
    return _broken(raw) if mtgpu.enabled(settings) else []


def validate_mtgpupod_update(raw: Mapping[str, Any], old: Mapping[str, Any], settings: Settings) -> list[Problem]:
    """Return the rules that an update of an MtgpuPod breaks.

    The spec, from which the Pod is built, and the annotations that determine the card are immutable. Other changes are
    allowed unless they break a rule that the old object does not break. So the finalizer of an invalid MtgpuPod can be
    removed.
    """
    if not mtgpu.enabled(settings):
        return []
    annotations = _changed_keys(table_at(raw, "metadata", "annotations"), table_at(old, "metadata", "annotations"))
    spec = _changed_keys(table_at(raw, "spec"), table_at(old, "spec"))
    before = {*_broken(old)}
    request = [annotation_path(key) for key in annotations if key in mtgpu.ANNOTATIONS]
    return [
        *(Problem(path, f"determines the card; {_FIXED}", Rule.REQUEST_IS_FIXED) for path in request),
        *(Problem(f"spec.{key}", f"determines the Pod; {_FIXED}", Rule.REQUEST_IS_FIXED) for key in spec),
        *(problem for problem in _broken(raw) if problem not in before),
    ]


def check_foreign_pod(pod: Pod, raw: Mapping[str, Any], settings: Settings) -> Iterator[Problem]:
    """Yield the problems of a new Pod of an untrusted user if the Pod looks like the Pod of an MtgpuPod.

    Such a Pod would hold a card. The rules apply even if MtgpuPods are disabled, because the Pods of earlier MtgpuPods
    still hold their cards.
    """
    if mtgpu.enabled(settings):
        remedy = f"create an object of kind {mtgpu.KIND} ({mtgpu.API_VERSION}) instead of this Pod"
    else:
        remedy = "remove it; if another controller creates these Pods, add its user to webhook.identities"
    for key in sorted(key for key in pod.annotations if key.startswith(MTGPU_PREFIX))[:1]:
        text = f"is for MtgpuPods, whose Pods only mgpu creates; {remedy}"
        yield Problem(annotation_path(key), text, Rule.MTGPU_ON_A_POD)
    if mtgpu.controlling_mtgpupod(raw):
        text = f"names an {mtgpu.KIND} as the controller of this Pod, but only mgpu creates Pods of MtgpuPods; {remedy}"
        yield Problem(_OWNERS, text)


def check_adoption(raw: Mapping[str, Any], old: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem if an update makes an MtgpuPod the controller of a Pod.

    The removal of the owner is allowed, because the garbage collector removes it when an MtgpuPod is deleted with
    `--cascade=orphan`.
    """
    if mtgpu.controlling_mtgpupod(raw) not in (None, mtgpu.controlling_mtgpupod(old)):
        text = f"names an {mtgpu.KIND} as the controller of this Pod; mgpu sets this owner when it creates the Pod"
        yield Problem(_OWNERS, f"{text}, and the owner cannot be added or changed afterwards")


def check_copied_annotations(changed: Iterable[str]) -> Iterator[Problem]:
    """Yield a problem for each changed annotation of MtgpuPods on a Pod, whether or not an MtgpuPod owns the Pod.

    Args:
        changed: the names of the annotations that an update adds, changes or removes.
    """
    for key in changed:
        if key.startswith(MTGPU_PREFIX):
            text = (
                "is copied from an MtgpuPod when its Pod is created; it cannot be added, changed or removed afterwards"
            )
            yield Problem(annotation_path(key), text, Rule.REQUEST_IS_FIXED)


def _broken(raw: Mapping[str, Any]) -> list[Problem]:
    reserved = sorted(filter(dialects.is_placement_annotation, table_at(raw, "metadata", "annotations")))
    text = "records a placement, which only mgpu decides; remove it"
    problems = [Problem(annotation_path(key), text, Rule.PLACEMENT_IS_RESERVED) for key in reserved]
    try:
        mtgpu.read_mtgpupod({key: value for key, value in raw.items() if key != "status"})
    except BadObject as error:
        problems += error.problems
    return problems


def _changed_keys(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    return sorted(key for key in {*now, *before} if now.get(key) != before.get(key))
