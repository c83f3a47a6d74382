"""The status that a kubelet reports for a pod, computed from the states of its containers.

The functions have no side effects. Apart from the times, their results depend only on their arguments. Mainly
`pod_worker` calls them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from playground.container_runtime import Container

Raw = Mapping[str, Any]
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ContainerView:
    """One container of a pod's spec, with what the kubelet knows of it.

    Attributes:
        name: The name of the container.
        image: The image in the pod's spec.
        attempts: The containers that were started for it so far. The last one may run.
        waiting: The reason and the message that say why the next attempt waits, or None if it does not wait.
        resources: For each resource of a device plugin, the health of each device id that the container has. It is
            empty for init containers and sidecars, for which the kubelet does not report health.
        init: Whether it is an init container or a sidecar.
        claims: The entries of `allocatedResourcesStatus` for the ResourceClaims of the container.
    """

    name: str
    image: str
    attempts: tuple[Container, ...] = ()
    waiting: tuple[str, str] | None = None
    resources: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    init: bool = False
    claims: Sequence[Raw] = ()

    @property
    def latest(self) -> Container | None:
        return self.attempts[-1] if self.attempts else None

    @property
    def running(self) -> bool:
        return self.latest is not None and self.latest.running

    @property
    def done(self) -> bool:
        return self.latest is not None and self.latest.exit_code == 0


# kubelet 1.36.2 reports this for a container that had not started when another client set the pod's phase to Failed.
_NEVER_STARTED = {
    "exitCode": 137,
    "reason": "ContainerStatusUnknown",
    "message": "The container could not be located when the pod was terminated",
}


def sidecar(container: Raw) -> bool:
    """Return whether an init container is a sidecar. The result means nothing for an app container."""
    return container.get("restartPolicy") == "Always"


def phase_of(pod: Raw, apps: Sequence[ContainerView], *, released: bool = True) -> str:
    """Return the phase as the kubelet's `getPhase` does. The phases Succeeded and Failed never change.

    Args:
        pod: The pod, with the status that the API server has.
        apps: Its containers other than init containers and sidecars.
        released: Whether the pod has no claims that must be unprepared. Before that, its phase is not Succeeded or
            Failed.
    """
    before: str = (pod.get("status") or {}).get("phase") or "Pending"
    if before in ("Succeeded", "Failed"):
        return before
    if any(view.latest is None for view in apps):
        return "Pending"
    if any(view.running for view in apps) or pod["spec"].get("restartPolicy", "Always") == "Always" or not released:
        return "Running"
    if all(view.done for view in apps):
        return "Succeeded"
    return "Failed" if pod["spec"].get("restartPolicy") == "Never" else "Running"


def pod_status(
    pod: Raw,
    inits: Sequence[ContainerView],
    apps: Sequence[ContainerView],
    host_ip: str,
    reported: Raw,
    *,
    released: bool = True,
) -> Json:
    """Return the status to report.

    Args:
        pod: The pod.
        inits: Its init containers and sidecars.
        apps: Its other containers.
        host_ip: The IP address of the node.
        reported: The status that was reported last, or {} before the first report. A condition that does not change
            keeps its time.
        released: See `phase_of`.
    """
    phase = phase_of(pod, apps, released=released)
    done = phase == "Succeeded"
    ended = phase in ("Succeeded", "Failed")
    flags = _flags(pod, inits, apps, phase)
    old = reported or pod.get("status") or {}
    status: Json = {
        "phase": phase,
        "hostIP": host_ip,
        "podIP": _pod_ip(pod),
        "podIPs": [{"ip": _pod_ip(pod)}],
        "startTime": old.get("startTime") or now(),
        "conditions": _conditions(flags, old.get("conditions") or (), "PodCompleted" if done else "ContainersNotReady"),
        "containerStatuses": [_container(view, ended=ended) for view in apps],
    }
    if inits:
        status["initContainerStatuses"] = [_container(view, ended=ended) for view in inits]
    return status


def _flags(pod: Raw, inits: Sequence[ContainerView], apps: Sequence[ContainerView], phase: str) -> dict[str, bool]:
    """Return the values of the conditions by their types."""
    kinds = {c["name"]: sidecar(c) for c in pod["spec"].get("initContainers") or ()}
    initialized = all(view.running if kinds[view.name] else view.done for view in inits)
    ready = phase == "Running" and all(view.running for view in apps)
    return {
        "PodReadyToStartContainers": any(view.running for view in (*inits, *apps)),
        "Initialized": initialized or phase == "Succeeded",
        "ContainersReady": ready,
        "Ready": ready,
        "PodScheduled": True,
    }


def rejected(reason: str, message: str) -> Json:
    """Return the status of a pod that the kubelet did not admit."""
    return {"phase": "Failed", "reason": reason, "message": f"Pod was rejected: {message}", "startTime": now()}


def now() -> str:
    """Return the current time in the format of API objects."""
    return timestamp(datetime.now(UTC).timestamp())


def timestamp(seconds: float) -> str:
    """Return a time, given in seconds since the epoch, in the format of API objects."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _conditions(flags: Mapping[str, bool], old: Sequence[Raw], reason: str) -> list[Json]:
    """Return the conditions. ContainersReady and Ready get `reason` if they are false."""
    before = {row["type"]: row for row in old}
    rows = []
    for kind, flag in flags.items():
        value, known = str(flag), before.get(kind, {})
        since = known.get("lastTransitionTime") if known.get("status") == value else None
        row: Json = {"type": kind, "status": value, "lastTransitionTime": since or now()}
        if kind in ("ContainersReady", "Ready"):
            row["reason"] = None if flag else reason  # null removes the reason in a merge patch
        rows.append(row)
    return rows


def _container(view: ContainerView, *, ended: bool) -> Json:
    """Return the status of a container. `ended` is whether its pod has ended."""
    latest, earlier = view.latest, view.attempts[:-1]
    # Between two attempts, the state says why the next attempt waits, and lastState describes the previous attempt.
    waits = view.waiting if view.waiting and not view.running else None
    state: Json = {"waiting": {"reason": "ContainerCreating"}}
    if waits:
        state = {"waiting": {"reason": waits[0], "message": waits[1]}}
        earlier = view.attempts
    elif latest:
        state = _state(latest)
    elif ended:
        state = {"terminated": _NEVER_STARTED}
    row: Json = {
        "name": view.name,
        "image": view.image,
        "imageID": "",
        "ready": view.running or (view.init and view.done),
        "started": view.running,
        "restartCount": max(len(view.attempts) - 1, 0),
        "state": state,
        "lastState": _state(earlier[-1]) if earlier else {},
    }
    if latest:
        row["containerID"] = f"playground://{latest.id}"
    if view.resources or view.claims:
        row["allocatedResourcesStatus"] = [
            {"name": name, "resources": [{"resourceID": i, "health": health} for i, health in sorted(ids.items())]}
            for name, ids in sorted(view.resources.items())
        ] + [dict(claim) for claim in view.claims]
    return row


def _state(container: Container) -> Json:
    """Return the state of a container that was started: running or terminated."""
    if container.running:
        return {"running": {"startedAt": timestamp(container.started)}}
    return {
        "terminated": {
            "exitCode": container.exit_code,
            "reason": "Completed" if container.exit_code == 0 else "Error",
            "containerID": f"playground://{container.id}",
            "startedAt": timestamp(container.started),
            "finishedAt": timestamp(container.finished),
        }
    }


def _pod_ip(pod: Raw) -> str:
    """Return an address that is derived from the UID, because the pod has no network."""
    number = int.from_bytes(pod["metadata"]["uid"].encode()[-3:], "big")
    return f"10.{128 + (number >> 16) % 64}.{(number >> 8) % 256}.{number % 254 + 1}"
