"""Finds the claims that do not fit beside the others on their cards, and are not delivered yet.

`repair` moves them. A claim that fits is examined again only after a change of the claim or of its node. A tenant may
have thousands of claims that are never delivered, and examining one takes up to 10 ms. So the time of a round is
limited. Claims that still do not fit after a second look, for example because nothing can move them, wait for their
turn like the others, which would never be examined otherwise.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from mgpu.model.pod_constraints import NO_CONSTRAINTS
from mgpu.model.resource_claims import Claim, Result, card_index, claim_holding, gpu_request
from scheduler.cluster.cache import ClusterCache
from scheduler.decisions.claim_decider import fits

_ROUND_WORK = 0.1
"""The seconds of CPU time after which a round examines no more claims."""

_Seen = tuple[Claim, int | None]
"""A claim, and the version of its node."""


class Suspects:
    """The claims that did not fit when they were examined last. Use it on one thread.

    Args:
        cpu_clock: Returns the CPU time of the thread.

    Attributes:
        uids: The UIDs of these claims.
    """

    def __init__(self, state: ClusterCache, cpu_clock: Callable[[], float] = time.thread_time) -> None:
        self._state = state
        self._cpu_clock = cpu_clock
        self._fitting: dict[str, _Seen] = {}  # By UID, a claim that fits.
        self._examined: dict[str, int] = {}  # By UID, the round in which a claim was examined.
        self._rounds = 0
        self._new: frozenset[str] = frozenset()  # The UIDs of claims that became suspects in the last round.
        self.uids: frozenset[str] = frozenset()

    def find(self) -> list[Claim]:
        """Examine claims that can be moved, as far as the time suffices, and return those that do not fit."""
        claims = [claim for claim in self._state.claims.unprepared() if not claim.repair]
        versions = self._state.node_versions()
        seen: dict[str, _Seen] = {claim.uid: (claim, versions.get(claim.node)) for claim in claims}
        self._fitting = {uid: before for uid, before in self._fitting.items() if seen.get(uid) == before}
        self._examined = {claim.uid: self._examined.get(claim.uid, 0) for claim in claims}
        found = self._examine(self._in_order(claims), seen)
        return [claim for claim in claims if claim.uid in found]

    def _in_order(self, claims: Sequence[Claim]) -> list[Claim]:
        """Return the claims to examine: the new suspects first, then those that were examined longest ago."""
        unknown = [claim for claim in claims if claim.uid not in self._fitting]
        return sorted(unknown, key=lambda claim: (claim.uid not in self._new, self._examined[claim.uid], claim.uid))

    def _examine(self, claims: Sequence[Claim], seen: Mapping[str, _Seen]) -> frozenset[str]:
        """Find out which of the claims fit, until the time of the round is over. Return the UIDs of the others."""
        self._rounds += 1
        end = self._cpu_clock() + _ROUND_WORK
        found = set()
        left = {claim.uid for claim in claims}
        for claim in claims:
            if self._cpu_clock() > end:
                break
            left.remove(claim.uid)
            self._examined[claim.uid] = self._rounds
            if self.fits(claim):
                self._fitting[claim.uid] = seen[claim.uid]
            else:
                found.add(claim.uid)
        self._new = frozenset(found) - self.uids
        self.uids = frozenset(found) | self.uids & left
        return frozenset(found)

    def fits(self, claim: Claim) -> bool:
        """Return whether the claim fits on its cards beside all others."""
        if any(_is_unknown(result) for result in claim.results):
            return False
        holding = claim_holding(claim)
        if holding is None:
            return True
        snapshot = self._state.node_snapshot(claim.node, claim.uid)
        # Users may change the annotations at any time, and a claim must not be moved for that.
        request = replace(gpu_request(claim), constraints=NO_CONSTRAINTS)
        return fits(request, holding.shares, snapshot)


def _is_unknown(result: Result) -> bool:
    """Return whether the device of a result is neither a card nor a MIG instance."""
    return card_index(result.device) is None and result.mig_device is None and not result.admin
