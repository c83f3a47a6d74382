"""Stores ResourceClaims, and derives what they hold.

A claim holds the cards in its allocation until it is deallocated or deleted, however many pods share it. Before the
watch delivers the allocation, the reservation that the decision made holds them. While mgpu replaces the allocation of
a claim (`scheduler.claims.repair`), the claim holds both its former and its new cards, because either of them may turn
out to be the ones that its pod gets. A claim with MIG instances also holds their cards, which matters if the label of
the node is removed (`mig_devices.with_whole_cards`). The cluster cache uses `ClaimHoldings` with its lock held.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from mgpu.model.ledger import Holding, Share
from mgpu.model.mig_devices import with_whole_cards
from mgpu.model.resource_claims import Claim, claim_holding, is_newer
from scheduler.cluster.events import CardsFreed, Publisher
from scheduler.cluster.holdings import Holdings
from scheduler.cluster.reservations import Reservations

Raw = Mapping[str, Any]


class ClaimHoldings:
    """Part of the ClusterCache, which holds its lock around every call.

    The holdings that it writes follow from the present claims, the reservations and the repairs in progress, in
    whatever order these have arrived. It publishes CardsFreed when a claim no longer holds what it held.
    """

    def __init__(self, holdings: Holdings, reservations: Reservations, events: Publisher) -> None:
        self._holdings = holdings
        self._reservations = reservations
        self._events = events
        self._claims: dict[str, Claim] = {}
        self._by_name: dict[tuple[str, str], str] = {}
        self._moving: dict[str, tuple[Share, ...]] = {}  # By UID, the shares to which a repair moves the claim.

    def get(self, uid: str) -> Claim | None:
        return self._claims.get(uid)

    def named(self, namespace: str, name: str) -> Claim | None:
        uid = self._by_name.get((namespace, name))
        return self._claims.get(uid) if uid is not None else None

    def items(self) -> Iterator[Claim]:
        """Yield the claims that are stored: those that hold cards of mgpu's driver, and those without allocation."""
        return iter(tuple(self._claims.values()))

    def changed(self, claim: Claim) -> None:
        """Store a claim that was added or modified."""
        if claim.allocated and not claim.results:
            # Other drivers serve the claim. It may have had an allocation or a reservation of mgpu's driver before.
            self._drop(claim)
            if not self._is_older_than_reservation(claim):
                self._release(claim.uid)
            return
        self._claims[claim.uid] = claim
        self._by_name[claim.namespace, claim.name] = claim.uid
        self._settle(claim.uid)

    def gone(self, claim: Claim) -> None:
        self._moving.pop(claim.uid, None)
        self._reservations.mark_deleted(claim.uid)
        self._drop(claim)
        self._release(claim.uid)

    def is_outdated(self, uid: str, version: str) -> bool:
        """Return whether cards that were decided for this version of the claim must not be reserved for it.

        The claim has an allocation that is not older, or cards were decided for a later version of it. A reservation
        would replace what the claim really holds. The API server refuses the write.
        """
        reserved = self._reservations.get(uid)
        if reserved is not None and reserved.version and version and is_newer(reserved.version, version):
            return True
        claim = self._claims.get(uid)
        return claim is not None and bool(claim.results) and not is_newer(version, claim.version)

    def begin_move(self, uid: str, shares: tuple[Share, ...]) -> None:
        """Let the claim hold these shares besides those of its allocation, until `end_move`."""
        self._moving[uid] = shares
        self._settle(uid)

    def end_move(self, uid: str) -> None:
        if self._moving.pop(uid, None) is not None:
            self._settle(uid)

    def is_moving(self, uid: str) -> bool:
        return uid in self._moving

    def _drop(self, claim: Claim) -> None:
        before = self._claims.pop(claim.uid, None)
        if self._by_name.get((claim.namespace, claim.name)) == claim.uid:
            del self._by_name[claim.namespace, claim.name]
        if before is not None:
            self._settle(claim.uid)

    def _settle(self, uid: str) -> None:
        """Derive what this claim holds."""
        claim = self._claims.get(uid)
        if self._reservations.get(uid) is not None and (
            claim is None or not claim.results or self._is_older_than_reservation(claim)
        ):
            return  # A reservation stays: this event may be older than the decision.
        found = self._holding_of(claim) if claim is not None else None
        holding = with_whole_cards(found) if found is not None else None
        if holding is None:
            self._release(uid)
            return
        before = self._holdings.ledger.holding(uid)
        if holding == before:
            return
        self._holdings.release(uid)
        self._holdings.hold(holding)
        if before is not None and before.shares != holding.shares:
            self._events.publish(CardsFreed(before.node))

    def _holding_of(self, claim: Claim) -> Holding | None:
        moving = self._moving.get(claim.uid, ())
        holding = claim_holding(claim)
        if holding is None:
            # The repair has removed the allocation (its second write). No pod can get the former cards by it any more,
            # and the pod of the claim will get the new ones.
            before = self._holdings.ledger.holding(claim.uid)
            return replace(before, shares=moving) if before is not None and moving else None
        if not moving:
            return holding
        # Several results may be equal shares of one card, so the union counts how often each share occurs.
        both = Counter(holding.shares) | Counter(moving)
        return replace(holding, shares=tuple(both.elements()))

    def _is_older_than_reservation(self, claim: Claim) -> bool:
        """Return whether this state of a claim is not later than the one for which its reservation was decided.

        That one had no allocation. So an allocation in an older state has been removed since, and the claim does not
        hold it any more.
        """
        reservation = self._reservations.get(claim.uid)
        return reservation is not None and not is_newer(claim.version, reservation.version)

    def _release(self, uid: str) -> None:
        before = self._holdings.ledger.holding(uid)
        if before is not None:
            self._holdings.claim_released(uid, before.node)
            self._events.publish(CardsFreed(before.node))
