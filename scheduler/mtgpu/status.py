"""An MtgpuPod's status: what was decided, and what its Pod says. And what of it is worth an Event."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scheduler.mtgpu.verdict import Verdict


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

    own: its Pod. now: RFC 3339.
    """
    raise NotImplementedError


def refused(raw: Mapping[str, Any], verdict: Verdict, message: str, now: str) -> dict[str, Any]:
    """The same where the API server calls its Pod invalid, so that there will never be one."""
    raise NotImplementedError


def transitions(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> tuple[Transition, ...]:
    """What of a status that was written is an Event, against the one that the API had."""
    raise NotImplementedError
