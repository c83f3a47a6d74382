"""Handles the admission of allocations of ResourceClaims: the cards are decided in the write that allocates the claim.

The API server calls `/claim-admission` for each write to `resourceclaims/status` that allocates devices of mgpu's
driver (`manifests/components/dra`, matchConditions). kube-scheduler has taken the first cards that fit its own sums.
The reply replaces them by the cards that mgpu chooses. kube-scheduler continues with the object that the API server
returns, so it and the kubelet use these cards (docs/design/dra.md, "Observations"). `failurePolicy` is `Fail`, because
an allocation without a decision of mgpu could overlap with pods of the other vocabularies.

A denial is a 403: kube-scheduler tries a write again at once after a 409, and it does not choose other cards then.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mgpu.model import budget
from mgpu.model.claim_object import read_claim
from mgpu.model.errors import BadObject
from mgpu.model.gpu_requests import Rejection, cards_by_index
from mgpu.model.raw_objects import table_at
from mgpu.serving.review import Reply, Review, allow, deny, json_pointer
from mgpu.settings import CARD_POLICIES
from scheduler.cluster.cache import ClusterCache
from scheduler.decisions.claim_allocation import Change, changes
from scheduler.decisions.claim_decider import ClaimDecider
from scheduler.decisions.effort_budgets import CallerGone, EffortExceeded, never

log = logging.getLogger(__name__)

_REFUSED = 403


class ClaimAdmission:
    """Decides the cards of the claim that is being allocated, and patches them into its allocation.

    Args:
        may_decide: Raises RetryLater while this replica must not decide.
        caller: Returns, for the current request, a function that returns whether the client has given up.
    """

    def __init__(
        self,
        state: ClusterCache,
        decider: ClaimDecider,
        may_decide: Callable[[], None],
        caller: Callable[[], CallerGone] = lambda: never,
    ) -> None:
        self._state = state
        self._decider = decider
        self._may_decide = may_decide
        self._caller = caller

    def __call__(self, review: Review) -> Reply:
        """Allow the write, with a patch if cards were decided, or deny it with the reason.

        Raises:
            RetryLater: No decision is possible now, for example because this replica does not lead.
        """
        raw = review.object
        if raw is None or review.operation != "UPDATE" or review.resource != "resourceclaims/status":
            return allow(review)
        if table_at(review.old, "status", "allocation"):
            return allow(review)  # The API server itself denies changes of an allocation, and its removal is allowed.
        if large := budget.excess(raw):
            return deny(review, large)
        try:
            claim = read_claim(raw, CARD_POLICIES)
        except BadObject as error:
            return deny(review, error.problems)
        if not any(not result.admin for result in claim.results):
            return allow(review)
        present = table_at(review.old, "metadata").get("resourceVersion")
        if isinstance(present, str) and present != claim.version:
            if claim.version:
                # The API server refuses this write, or calls again with the present object if its cache was late.
                return allow(review)
            claim = replace(claim, version=present)
        self._may_decide()
        try:
            decision = self._decider.decide(claim, reserve=not review.dry_run, gone=self._caller())
        except EffortExceeded as error:
            return deny(review, f"no cards for this claim on {claim.node}: {error}", _REFUSED)
        if decision is None:
            return allow(review)
        if isinstance(decision, Rejection):
            log.info("claim rejected: %s", decision, extra={"claim": claim.uid, "node": claim.node})
            return deny(review, f"no cards for this claim on {claim.node}: {decision}", _REFUSED)
        # This is checked again, because the process may have been suspended and another replica may lead by now.
        self._may_decide()
        cards = cards_by_index(self._state.cards(claim.node))
        found = changes(table_at(raw, "status", "allocation"), claim, decision.request, decision.placement, cards)
        return allow(review, [_operation(change) for change in found])


def _operation(change: Change) -> dict[str, Any]:
    path = json_pointer("status", "allocation", "devices", "results", change.position, change.field)
    return {"op": "replace", "path": path, "value": change.value}
