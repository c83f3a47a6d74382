"""The ResourceClaims of the cluster, as the admission and the controllers of claims read them.

`ClusterCache.claims` is the only instance. It is a facade of the parts of the cluster cache that concern claims, and
acquires the lock of the cluster cache for each call. Parsing a claim takes time, so it happens without the lock.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mgpu.model.claim_object import read_stored_claim
from mgpu.model.compute_resources import NO_CPU_MEMORY, CpuMemory
from mgpu.model.errors import BadObject
from mgpu.model.ledger import Share
from mgpu.model.pods import Pod
from mgpu.model.raw_objects import table_at
from mgpu.model.resource_claims import Claim, gpu_request
from mgpu.settings import CARD_POLICIES
from scheduler.cluster.claim_holdings import ClaimHoldings
from scheduler.cluster.claim_pods import ClaimPods, WaitingPod
from scheduler.cluster.converted_pods import ConvertedPod
from scheduler.cluster.forecast import Forecast
from scheduler.cluster.node_snapshots import NodeSnapshots
from scheduler.cluster.reservation_cache import ReservationCache
from scheduler.cluster.reservations import Reservation, Reservations

log = logging.getLogger(__name__)

Raw = Mapping[str, Any]

_MOST_UNREADABLE = 1000
"""The most unreadable claims that are remembered, so that each is logged once. Users can create any number."""
_MOST_CHARACTERS = 16 << 10
"""The most characters of the selectors of a stored claim together. The API server accepts 1.5 MB."""
_LONG_SELECTORS = ("selectors that are too long for mgpu",)
"""What stands for longer selectors. It is no expression, so mgpu cannot evaluate it and knows no card for the claim."""


class ClaimCache:
    """The claims, the DeviceClasses and the pods that wait for claims. Thread-safe."""

    def __init__(
        self,
        lock: threading.RLock,
        holdings: ClaimHoldings,
        pods: ClaimPods,
        reservations: Reservations,
        snapshots: NodeSnapshots,
        forecast: Forecast,
        decided: ReservationCache,
    ) -> None:
        self._lock = lock
        self._holdings = holdings
        self._pods = pods
        self._reservations = reservations
        self._snapshots = snapshots
        self._forecast = forecast
        self._decided = decided
        self._classes: dict[str, tuple[str, ...]] = {}
        self._unreadable: OrderedDict[str, str] = OrderedDict()  # By UID, the reason that was logged.

    # Called by the informers

    def claim_changed(self, raw: Raw) -> None:
        try:
            claim = read_stored_claim(raw, CARD_POLICIES)
        except BadObject as error:
            self._log_unreadable(raw, str(error))
            return
        claim = _without_long_selectors(claim)
        with self._lock:
            self._unreadable.pop(claim.uid, None)
            before = self._holdings.get(claim.uid)
            self._holdings.changed(claim)
            needs = self.needs(claim)
        if claim.results and not (before and before.results):
            # Learning policies expect further pods like the one that this claim is for.
            pod = Pod(claim.namespace, claim.name, claim.uid, created=claim.created, cpu_memory=needs)
            request = gpu_request(claim)
            self._forecast.pod_added(pod, request)
            self._forecast.pod_placed(pod, request)

    def _log_unreadable(self, raw: Raw, reason: str) -> None:
        """Log the reason, unless it was logged for the last change of the claim."""
        meta = raw["metadata"]
        with self._lock:
            is_new = self._unreadable.get(meta["uid"]) != reason
            self._unreadable[meta["uid"]] = reason
            while len(self._unreadable) > _MOST_UNREADABLE:
                self._unreadable.popitem(last=False)
        if is_new:
            log.warning("ignoring ResourceClaim that cannot be read: %s", reason, extra={"claim": meta["name"]})

    def claim_gone(self, raw: Raw) -> None:
        meta = raw["metadata"]
        claim = Claim(uid=meta["uid"], namespace=meta["namespace"], name=meta["name"])
        with self._lock:
            self._unreadable.pop(claim.uid, None)
            self._holdings.gone(claim)

    def class_changed(self, raw: Raw) -> None:
        """Store the selectors of a DeviceClass."""
        rows = table_at(raw, "spec").get("selectors")
        expressions = (table_at(row, "cel").get("expression") for row in (rows if isinstance(rows, list) else ()))
        with self._lock:
            self._classes[raw["metadata"]["name"]] = tuple(text for text in expressions if isinstance(text, str))

    def class_gone(self, raw: Raw) -> None:
        with self._lock:
            self._classes.pop(raw["metadata"]["name"], None)

    # For decisions and controllers

    def get(self, uid: str) -> Claim | None:
        with self._lock:
            return self._holdings.get(uid)

    def named(self, namespace: str, name: str) -> Claim | None:
        with self._lock:
            return self._holdings.named(namespace, name)

    def items(self) -> tuple[Claim, ...]:
        """Return the stored claims by namespace, name and UID (`ClaimHoldings.items`)."""
        with self._lock:
            found = tuple(self._holdings.items())
        return tuple(sorted(found, key=_key))

    def unprepared(self) -> tuple[Claim, ...]:
        """Return the claims whose cards are not delivered yet, the latest first.

        Their allocation can still be replaced. Claims that are being deleted are left out.
        """
        with self._lock:
            found = [c for c in self._holdings.items() if c.results and not (c.is_prepared or c.deleting)]
        return tuple(sorted(sorted(found, key=_key), key=_created, reverse=True))

    def interrupted(self) -> tuple[Claim, ...]:
        """Return the claims with the annotation of a repair, by namespace, name and UID."""
        with self._lock:
            found = [claim for claim in self._holdings.items() if claim.repair and not claim.deleting]
        return tuple(sorted(found, key=_key))

    def is_outdated(self, uid: str, version: str) -> bool:
        """Return whether nothing may be decided for this version of the claim (`ClaimHoldings.is_outdated`)."""
        with self._lock:
            return self._holdings.is_outdated(uid, version)

    def reserve(self, reservation: Reservation, version: int, before: Reservation | None) -> bool:
        """Hold the cards of a reservation for a claim (`ReservationCache.reserve`).

        Also return False if the watch has delivered an allocation meanwhile. It need not have changed the node of the
        reservation, and no further event would correct what the claim holds.
        """
        with self._lock:
            if self._holdings.is_outdated(reservation.uid, reservation.version):
                return False
            return self._decided.reserve(reservation, version, before=before)

    def is_deleted(self, uid: str) -> bool:
        """Return whether the claim was deleted recently."""
        with self._lock:
            return self._reservations.is_deleted(uid)

    def class_selectors(self, name: str) -> tuple[str, ...] | None:
        """Return the CEL selectors of a DeviceClass, or None if the class is not known."""
        with self._lock:
            return self._classes.get(name)

    def waiting_pods(self) -> tuple[WaitingPod, ...]:
        """Return the pods with claims for which kube-scheduler has found no node, the oldest first."""
        with self._lock:
            return self._pods.waiting()

    def needs(self, claim: Claim) -> CpuMemory:
        """Return the cpu and memory that the first pod of the claim requests; nothing if it is bound or unknown."""
        with self._lock:
            return self._pods.needs(claim.consumers[0].uid) if claim.consumers else NO_CPU_MEMORY

    def converted_pods(self) -> tuple[ConvertedPod, ...]:
        """Return the converted pods whose claims do not exist yet, by namespace, name and UID."""
        with self._lock:
            return self._pods.converted.without_claim()

    def referred_templates(self) -> frozenset[tuple[str, str]]:
        """Return the namespaces and names of the ResourceClaimTemplates that pods refer to."""
        with self._lock:
            return self._pods.converted.referred_templates()

    def begin_move(self, uid: str, node: str, shares: tuple[Share, ...], version: int) -> bool:
        """Let the claim hold these shares, too, until `end_move`, because a repair moves it there.

        Return False, and change nothing, if the node has changed since the snapshot with this version, or if cards were
        decided for the claim again.
        """
        with self._lock:
            if self._snapshots.version(node) != version or self._holdings.is_moving(uid):
                return False
            if self._reservations.get(uid) is not None:
                return False
            self._holdings.begin_move(uid, shares)
            return True

    def end_move(self, uid: str) -> None:
        """End what `begin_move` began. The claim holds what its allocation says."""
        with self._lock:
            self._holdings.end_move(uid)


def _without_long_selectors(claim: Claim) -> Claim:
    """Return the claim as it is stored. Admissions evaluate the selectors in the object of their call."""
    if sum(len(text) for request in claim.requests for text in request.selectors) <= _MOST_CHARACTERS:
        return claim
    return replace(claim, requests=tuple(replace(request, selectors=_LONG_SELECTORS) for request in claim.requests))


def _key(claim: Claim) -> tuple[str, str, str]:
    return claim.namespace, claim.name, claim.uid


def _created(claim: Claim) -> str:
    return claim.created
