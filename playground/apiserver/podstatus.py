"""The columns of a pod in `kubectl get`: how far it is, in one word."""

from typing import Any

from playground.apiserver.storage import Object

Statuses = list[dict[str, Any]]


def _statuses(pod: Object, field: str) -> Statuses:
    return (pod.get("status") or {}).get(field) or []


def ready_count(pod: Object) -> str:
    ready = sum(1 for s in _statuses(pod, "containerStatuses") if s.get("ready"))
    return f"{ready}/{len(pod['spec']['containers'])}"


def restarts(pod: Object) -> str:
    return str(sum(s.get("restartCount") or 0 for s in _statuses(pod, "containerStatuses")))


def _reason_of(status: Object) -> str | None:
    """Why a container does not run; None when it does."""
    state = status.get("state") or {}
    if reason := (state.get("waiting") or {}).get("reason"):
        return str(reason)
    if (ended := state.get("terminated")) is not None:
        if ended.get("reason"):
            return str(ended["reason"])
        signal = ended.get("signal")
        return f"Signal:{signal}" if signal else f"ExitCode:{ended.get('exitCode', 0)}"
    return None


def _initializing(pod: Object) -> str | None:
    specs = pod["spec"].get("initContainers") or []
    for i, status in enumerate(_statuses(pod, "initContainerStatuses")):
        state = status.get("state") or {}
        ended = state.get("terminated")
        if ended is not None and ended.get("exitCode") == 0:
            continue
        if i < len(specs) and specs[i].get("restartPolicy") == "Always" and status.get("started"):
            continue
        reason = _reason_of(status)
        if reason and reason != "PodInitializing":
            return f"Init:{reason}"
        return f"Init:{i}/{len(specs)}"
    return None


def summary(pod: Object) -> str:
    """The STATUS column."""
    status = pod.get("status") or {}
    reason = status.get("reason") or status.get("phase") or "Unknown"
    if any(
        c["type"] == "PodScheduled" and c.get("reason") == "SchedulingGated" for c in status.get("conditions") or []
    ):
        reason = "SchedulingGated"
    if initializing := _initializing(pod):
        reason = initializing
    else:
        statuses = _statuses(pod, "containerStatuses")
        running = any(s.get("ready") and (s.get("state") or {}).get("running") is not None for s in statuses)
        for container in reversed(statuses):
            reason = _reason_of(container) or reason
        if reason == "Completed" and running:
            reason = "Running"
    if "deletionTimestamp" in pod["metadata"]:
        return "Unknown" if status.get("reason") == "NodeLost" else "Terminating"
    return str(reason)
