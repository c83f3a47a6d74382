"""The ResourceClaims, ResourceSlices and DeviceClasses that the scheduling loop knows.

A claim that the loop has written counts as written, although the watch may not have shown it yet. A claim that is *in
flight*, because its allocation has been chosen and is being written, counts on the chosen devices.
"""

import threading
from collections.abc import Mapping
from typing import Any

from playground.scheduling.claims.device_requests import Usage, usage_of

Raw = Mapping[str, Any]
_IMPLICIT = "deviceclass.resource.kubernetes.io/"


class ClaimStore:
    """The objects. It is thread-safe, and `_lock` guards all attributes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._claims: dict[tuple[str, str], Raw] = {}
        self._slices: dict[str, Raw] = {}
        self._classes: dict[str, Raw] = {}
        self._in_flight: dict[str, Raw] = {}

    def set_claim(self, claim: Raw) -> tuple[bool, Raw | None]:
        """Store a claim that was observed or written.

        Return whether it is newer than what is known of it, and its earlier state, if there is one.
        """
        key = _key(claim)
        with self._lock:
            known = self._claims.get(key)
            if known is not None and _version(known) >= _version(claim):
                return False, known
            self._claims[key] = claim
            same = known is not None and known["metadata"]["uid"] == claim["metadata"]["uid"]
            return True, known if same else None

    def remove_claim(self, claim: Raw) -> Raw | None:
        """Remove a claim and return its last known state, or return None if it is not known."""
        key = _key(claim)
        with self._lock:
            known = self._claims.get(key)
            if known is None or known["metadata"]["uid"] != claim["metadata"]["uid"]:
                return None
            return self._claims.pop(key)

    def claim(self, namespace: str, name: str) -> Raw | None:
        with self._lock:
            return self._claims.get((namespace, name))

    def claims(self) -> list[Raw]:
        with self._lock:
            return list(self._claims.values())

    def set_slice(self, raw: Raw) -> None:
        with self._lock:
            self._slices[raw["metadata"]["name"]] = raw

    def remove_slice(self, raw: Raw) -> None:
        with self._lock:
            self._slices.pop(raw["metadata"]["name"], None)

    def slices(self) -> list[Raw]:
        with self._lock:
            return list(self._slices.values())

    def set_class(self, raw: Raw) -> None:
        with self._lock:
            self._classes[raw["metadata"]["name"]] = raw

    def remove_class(self, raw: Raw) -> None:
        with self._lock:
            self._classes.pop(raw["metadata"]["name"], None)

    def classes(self) -> dict[str, Raw]:
        with self._lock:
            return dict(self._classes)

    def extended_resources(self) -> dict[str, str]:
        """Return the names of the DeviceClasses by the extended resources that they stand for.

        If several classes name the same resource, the newest one counts, and of these the first in alphabetical order.
        """
        with self._lock:
            classes = sorted(self._classes.items(), reverse=True)
        classes.sort(key=lambda item: str(item[1]["metadata"].get("creationTimestamp", "")))
        found = {f"{_IMPLICIT}{name}": name for name, _ in classes}
        for name, raw in classes:
            if resource := (raw.get("spec") or {}).get("extendedResourceName"):
                found[resource] = name
        return found

    def begin_flight(self, uid: str, allocation: Raw) -> None:
        """Note that an allocation was chosen for a claim and will be written."""
        with self._lock:
            self._in_flight[uid] = allocation

    def end_flight(self, uid: str) -> None:
        """Note that the allocation was written and the claim stored here, or that it was given up."""
        with self._lock:
            self._in_flight.pop(uid, None)

    def in_flight(self, uid: str) -> bool:
        with self._lock:
            return uid in self._in_flight

    def usage(self) -> Usage:
        """Return what the allocated claims and those in flight use."""
        with self._lock:
            written = {c["metadata"]["uid"]: c["status"]["allocation"] for c in self._claims.values() if allocated(c)}
            return usage_of((self._in_flight | written).values())


def allocated(claim: Raw) -> bool:
    """Return whether a claim has an allocation."""
    return bool((claim.get("status") or {}).get("allocation"))


def is_reserved(claim: Raw, pod: Raw) -> bool:
    """Return whether a pod is a consumer of a claim."""
    rows = (claim.get("status") or {}).get("reservedFor") or ()
    return any(row["uid"] == pod["metadata"]["uid"] for row in rows)


def _key(claim: Raw) -> tuple[str, str]:
    meta = claim["metadata"]
    return meta["namespace"], meta["name"]


def _version(claim: Raw) -> int:
    return int(claim["metadata"]["resourceVersion"])
