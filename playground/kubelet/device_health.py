"""Keeps the health of the devices of DRA drivers, and describes it for the status of a pod.

It follows pkg/kubelet/cm/dra/healthinfo.go of Kubernetes 1.36. `driver_client` passes the reports of a driver to
`DeviceHealth`, and `pod_worker` reads it.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from playground.kubelet.claim_checkpoint import ClaimState
from playground.kubelet.pod_claims import ClaimError, claims_of
from proto import dra_health_pb2 as api

Raw = Mapping[str, Any]

DEFAULT_SECONDS = 30.0
"""The seconds for which a report counts if the driver does not say how long."""
_LONGEST_MESSAGE = 1024
_WORDS = {api.HEALTHY: "Healthy", api.UNHEALTHY: "Unhealthy"}


@dataclass(frozen=True, slots=True)
class Report:
    """What a driver has reported for a device.

    Attributes:
        health: `Healthy`, `Unhealthy` or `Unknown`.
        message: The driver's explanation, or "".
        seconds: For how long the report counts.
    """

    health: str = "Unknown"
    message: str = ""
    seconds: float = DEFAULT_SECONDS


class DeviceHealth:
    """The latest report for each device. It is thread-safe.

    Args:
        changed: Called when the health of a device may have changed.
        clock: A monotonic clock in seconds.
    """

    def __init__(self, changed: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._changed = changed
        self._clock = clock
        self._lock = threading.Lock()
        self._reports: dict[str, dict[tuple[str, str], tuple[Report, float]]] = {}

    def update(self, driver: str, devices: Iterable[api.DeviceHealth]) -> None:
        """Store the reports of a driver. A device that is missing keeps its report until it is too old."""
        now = self._clock()
        reports = {(row.device.pool_name, row.device.device_name): _report(row) for row in devices}
        with self._lock:
            known = self._reports.setdefault(driver, {})
            differ = any(known[key][0] != report if key in known else True for key, report in reports.items())
            known.update({key: (report, now) for key, report in reports.items()})
        if differ:
            self._changed()

    def clear(self, driver: str) -> None:
        """Forget the reports of a driver whose stream has ended."""
        with self._lock:
            self._reports.pop(driver, None)

    def report(self, driver: str, pool: str, device: str) -> Report:
        """Return the report for a device. Its health is `Unknown` without a report, or if the report is too old."""
        with self._lock:
            report, since = self._reports.get(driver, {}).get((pool, device), (Report(), 0.0))
        return report if self._clock() - since <= report.seconds else Report()


def claim_rows(
    pod: Raw, container: Raw, claim: Callable[[str], ClaimState | None], health: DeviceHealth
) -> list[dict[str, Any]]:
    """Return the entries of `allocatedResourcesStatus` for the claims of a container, sorted by name.

    Args:
        claim: Returns the state of the claim with a name, or None if it is not known.
    """
    wanted = (container.get("resources") or {}).get("claims") or ()
    if not wanted:
        return []
    try:
        names = {use.entry: use.claim for use in claims_of(pod)}
    except ClaimError:
        return []
    rows = {}
    for row in wanted:
        state = claim(names[row["name"]]) if row["name"] in names else None
        request = row.get("request") or ""
        found: dict[str, dict[str, Any]] = {}
        for each in _resources(state, request.partition("/")[0], health) if state else ():
            found.setdefault(each["resourceID"], each)
        if found:
            rows[f"claim:{row['name']}" + (f"/{request}" if request else "")] = list(found.values())
    return [{"name": name, "resources": resources} for name, resources in sorted(rows.items())]


def _resources(state: ClaimState, request: str, health: DeviceHealth) -> Iterator[dict[str, Any]]:
    """Yield an entry for each device that serves a request, or for all devices if `request` is empty."""
    for driver, devices in state.drivers.items():
        for device in devices:
            if request and device.requests and request not in device.requests:
                continue
            report = health.report(driver, device.pool, device.device)
            row = {
                "resourceID": device.cdi[0] if device.cdi else f"{driver}/{device.pool}/{device.device}",
                "health": report.health,
            }
            yield row | ({"message": report.message} if report.message else {})


def _report(row: api.DeviceHealth) -> Report:
    text = row.message
    if len(text) > _LONGEST_MESSAGE:
        text = text[: _LONGEST_MESSAGE - 3] + "..."
    seconds = float(row.health_check_timeout_seconds)
    return Report(_WORDS.get(row.health, "Unknown"), text, seconds if seconds > 0 else DEFAULT_SECONDS)
