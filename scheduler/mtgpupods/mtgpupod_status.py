"""Defines the desired state of one MtgpuPod, and computes its status and the Events about it without side effects.

`node_plan` decides a `DesiredMtgpuPod` for every MtgpuPod, and `mtgpupod_writer` writes the result of `next_status`.
The status also mirrors the Pod of the MtgpuPod. Reasons of conditions must be literals in the code, because
docs/mtgpu.md lists them and is checked against the code.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mgpu.model.cards import Card
from scheduler.mtgpupods.observed_node import is_interrupted

Raw = Mapping[str, Any]

TRUE, FALSE, UNKNOWN = "True", "False", "Unknown"
_TYPES = ("Bound", "PodCreated", "Degraded")
_LONGEST_MESSAGE = 1024
"""The maximum length of a condition's message, in characters. It may contain a long error of the API server."""
_ENDED = ("Succeeded", "Failed")
_NORMAL = {
    *("Bound", "Occupying", "Retiring", "Ended", "PodCreated", "PodTerminating", "OccupyPodNotRunning", "AsBound")
}
"""Reasons whose Events have the type Normal, because they require no action."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition of an MtgpuPod without its type."""

    status: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class DesiredMtgpuPod:
    """The decision of the node plan about one MtgpuPod.

    Attributes:
        bound: The condition Bound; None leaves it unchanged.
        created: The condition PodCreated; None leaves it unchanged. It is None if `create_pod` is true, because the
            condition then depends on the result of the creation.
        degraded: The condition Degraded; None leaves it unchanged.
        bind: The UUID of the card to write as BoundDeviceID; None if nothing is to be written.
        create_pod: Whether to create its Pod on `card`, after BoundDeviceID is written.
        card: The card of the MtgpuPod; None if it has none, or if the node does not report it.
        delete_pod: Whether to delete its Pod.
        force: Whether to delete the Pod without a grace period, because the node that could end the Pod is gone.
        remove_finalizer: Whether to remove the finalizer, because the MtgpuPod is being deleted and no Pod of it was
            observed. The writer reads the Pod from the API server once more before it removes the finalizer.
    """

    bound: Condition | None = None
    created: Condition | None = None
    degraded: Condition | None = None
    bind: str | None = None
    create_pod: bool = False
    card: Card | None = None
    delete_pod: bool = False
    force: bool = False
    remove_finalizer: bool = False


@dataclass(frozen=True, slots=True)
class Transition:
    """A condition whose status or reason has changed. One Event is created for each transition.

    Attributes:
        warning: Whether the Event has the type Warning.
    """

    type: str
    status: str
    reason: str
    message: str
    warning: bool


def next_status(raw: Raw, desired: DesiredMtgpuPod, pod: Raw | None, now: str) -> dict[str, Any]:
    """Return the whole status to write for an MtgpuPod. It equals the current status if nothing has changed.

    An MtgpuPod that is being deleted and has no Pod keeps its status.

    Args:
        raw: The MtgpuPod.
        pod: The Pod that was created for the MtgpuPod, or None. The status mirrors the metadata and status of this Pod.
        now: The time in RFC 3339, for conditions whose status changes.
    """
    meta = raw["metadata"]
    old = raw.get("status") or {}
    if pod is None and meta.get("deletionTimestamp"):
        return dict(old)
    new = {**old, "conditions": _conditions(old, desired, meta.get("generation"), now)}
    if desired.bind:
        new["BoundDeviceID"] = desired.bind
    if meta.get("generation") is not None:
        new["observedGeneration"] = meta["generation"]
    if pod is not None:
        status = _without_null(pod.get("status") or {})
        new |= {"phase": _phase(pod, status, old), "PodStatus": status, "PodObjectMeta": _mirrored_metadata(pod)}
    elif old.get("phase") not in _ENDED:
        # Only an MtgpuPod that has ended keeps its phase and the mirrored status after its Pod is deleted.
        new = {key: value for key, value in new.items() if key not in ("PodStatus", "PodObjectMeta")}
        new["phase"] = "Pending"
    return new


def failed_status(raw: Raw, desired: DesiredMtgpuPod, message: str, now: str) -> dict[str, Any]:
    """Return the status of an MtgpuPod that can never run, because the API server calls its Pod invalid."""
    refused = replace(desired, created=Condition(FALSE, "PodRefused", message))
    return {**next_status(raw, refused, None, now), "phase": "Failed"}


def transitions(old: Raw | None, new: Raw) -> tuple[Transition, ...]:
    """Return the changes of conditions between two statuses.

    The first `Degraded: False` is left out, because it is the normal state.
    """
    before = _by_type(old or {})
    found = []
    for type, row in _by_type(new).items():
        previous = before.get(type)
        first_normal = type == "Degraded" and previous is None and row.get("status") == FALSE
        changed = previous is None or _state(previous) != _state(row)
        if type in _TYPES and changed and not first_normal:
            status, reason = _state(row)
            found.append(Transition(type, status, reason, str(row.get("message") or ""), reason not in _NORMAL))
    return tuple(found)


def _conditions(old: Raw, desired: DesiredMtgpuPod, generation: int | None, now: str) -> list[dict[str, Any]]:
    found = _by_type(old)
    for type, condition in zip(_TYPES, (desired.bound, desired.created, desired.degraded), strict=True):
        if condition is None:
            continue
        previous = found.get(type, {})
        changed_at = previous.get("lastTransitionTime") if previous.get("status") == condition.status else None
        found[type] = {
            "type": type,
            "status": condition.status,
            "reason": condition.reason,
            "message": condition.message[:_LONGEST_MESSAGE],
            "lastTransitionTime": changed_at or now,
        }
        if generation is not None:
            found[type]["observedGeneration"] = generation
    ours = [found.pop(type) for type in _TYPES if type in found]
    return [*ours, *found.values()]


def _phase(pod: Raw, status: Raw, old: Raw) -> str:
    """Return the phase of an MtgpuPod that has a Pod.

    A Pod that ended because it is being deleted is created again, so the MtgpuPod keeps its phase.
    """
    phase = status.get("phase") or "Pending"
    if phase in _ENDED and is_interrupted(pod):
        phase = old.get("phase") or "Pending"
    return str(phase)


def _by_type(status: Raw) -> dict[str, dict[str, Any]]:
    return {str(row.get("type")): dict(row) for row in status.get("conditions") or ()}


def _state(row: Raw) -> tuple[str, str]:
    return str(row.get("status")), str(row.get("reason"))


def _mirrored_metadata(pod: Raw) -> dict[str, Any]:
    return {key: _without_null(value) for key, value in pod["metadata"].items() if key != "managedFields"}


def _without_null(value: Any) -> Any:
    """Return the value without null fields.

    The API server may drop them, and then the stored status would differ from the desired one each time.
    """
    if isinstance(value, dict):
        return {key: _without_null(row) for key, row in value.items() if row is not None}
    return [_without_null(row) for row in value] if isinstance(value, list) else value
