"""An MtgpuPod's status: what was decided, and what its Pod says. And what of it is worth an Event."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from scheduler.mtgpupods.outcome import FALSE, Said, Verdict
from scheduler.mtgpupods.owned_pods import interrupted

_TYPES = ("Bound", "PodCreated", "Degraded")
_LONGEST = 1024
"""Characters of a condition's message, which may repeat what an API server says. The schema allows 32 KiB."""
_ENDED = ("Succeeded", "Failed")
_ORDINARY = {
    *("Bound", "Occupying", "Retiring", "Ended", "PodCreated", "PodTerminating", "OccupyPodNotRunning", "AsBound")
}
"""Reasons that nobody has to do anything about."""


@dataclass(frozen=True, slots=True)
class Transition:
    """A condition that is another one than before. warning: the kind of the Event that tells of it."""

    type: str
    status: str
    reason: str
    message: str
    warning: bool


def next_status(raw: Mapping[str, Any], verdict: Verdict, own: Mapping[str, Any] | None, now: str) -> dict[str, Any]:
    """The whole status of an MtgpuPod (`raw`) as it shall be: equal to the one it has where nothing changes.

    own: its Pod. now: RFC 3339. That an MtgpuPod has ended stays true when its Pod goes.
    """
    meta, old = raw["metadata"], raw.get("status") or {}
    if own is None and meta.get("deletionTimestamp"):
        return dict(old)
    new = {**old, "conditions": _conditions(old, verdict, meta.get("generation"), now)}
    if verdict.bind:
        new["BoundDeviceID"] = verdict.bind
    if meta.get("generation") is not None:
        new["observedGeneration"] = meta["generation"]
    if own is not None:
        status = _without_null(own.get("status") or {})
        new |= {"phase": _phase(own, status, old), "PodStatus": status, "PodObjectMeta": _meta(own)}
    elif old.get("phase") not in _ENDED:
        new = {key: value for key, value in new.items() if key not in ("PodStatus", "PodObjectMeta")}
        new["phase"] = "Pending"
    return new


def refused(raw: Mapping[str, Any], verdict: Verdict, message: str, now: str) -> dict[str, Any]:
    """The same where the API server calls its Pod invalid, so that there will never be one."""
    said = replace(verdict, created=Said(FALSE, "PodRefused", message))
    return {**next_status(raw, said, None, now), "phase": "Failed"}


def transitions(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> tuple[Transition, ...]:
    """What of a status that was written is an Event, against the one that the API had: one per condition that has
    another status or reason. That nothing is degraded is worth none by itself.
    """
    before, found = _by_type(old or {}), []
    for type, row in _by_type(new).items():
        had = before.get(type)
        calm = type == "Degraded" and had is None and row.get("status") == FALSE
        if type in _TYPES and not calm and (had is None or _said(had) != _said(row)):
            status, reason = _said(row)
            found.append(Transition(type, status, reason, str(row.get("message") or ""), reason not in _ORDINARY))
    return tuple(found)


def _conditions(old: Mapping[str, Any], verdict: Verdict, generation: int | None, now: str) -> list[dict[str, Any]]:
    found = _by_type(old)
    for type, said in zip(_TYPES, (verdict.bound, verdict.created, verdict.degraded), strict=True):
        if said is None:
            continue
        had = found.get(type, {})
        same = had.get("status") == said.status
        row = {"type": type, "status": said.status, "reason": said.reason, "message": said.message[:_LONGEST]}
        row["lastTransitionTime"] = had["lastTransitionTime"] if same and had.get("lastTransitionTime") else now
        found[type] = row if generation is None else {**row, "observedGeneration": generation}
    ours = [found.pop(type) for type in _TYPES if type in found]
    return [*ours, *found.values()]


def _phase(own: Mapping[str, Any], status: Mapping[str, Any], old: Mapping[str, Any]) -> str:
    """A Pod that ends because somebody deletes it is made again: its MtgpuPod has not ended with it."""
    phase = status.get("phase") or "Pending"
    return old.get("phase") or "Pending" if phase in _ENDED and interrupted(own) else phase


def _by_type(status: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {str(row.get("type")): dict(row) for row in status.get("conditions") or ()}


def _said(row: Mapping[str, Any]) -> tuple[str, str]:
    return str(row.get("status")), str(row.get("reason"))


def _meta(own: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _without_null(value) for key, value in own["metadata"].items() if key != "managedFields"}


def _without_null(value: Any) -> Any:
    """An API server may leave nulls out of what it stores; then a status would seem to differ for ever."""
    if isinstance(value, dict):
        return {key: _without_null(row) for key, row in value.items() if row is not None}
    return [_without_null(row) for row in value] if isinstance(value, list) else value
