"""Explains why ResourceClaims have no cards, node by node and card by card, or which cards they have.

`decisions.explanation` calls this module for claims, and for pods that use claims. The reasons are those with which the
admission of claims would deny an allocation. Nothing is decided or written.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mgpu.model.cards import GPU
from mgpu.model.claim_object import read_claim
from mgpu.model.errors import BadObject
from mgpu.model.gpu_requests import GpuRequest, Rejection
from mgpu.model.ledger import Holding
from mgpu.model.mig_devices import instances_of
from mgpu.model.raw_objects import table_at
from mgpu.model.resource_claims import DRA, Claim, claim_holding, gpu_request, requests_before_allocation
from mgpu.presentation import request_text
from mgpu.presentation.explanations import CardRow, Explanation, NodeRow
from mgpu.settings import CARD_POLICIES, Settings
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.claim_pods import claim_names
from scheduler.decisions.claim_decider import ClaimDecider
from scheduler.decisions.effort_budgets import EffortExceeded
from scheduler.decisions.open_claims import sets_of_alternatives

Raw = Mapping[str, Any]
CardRows = Callable[[str, str], tuple[CardRow, ...]]
"""Returns the cards of a node, with the holders other than the object with this UID."""
KIND = "ResourceClaim"
_MOST_NODES = 500
"""The most nodes that are examined, since each needs a search."""
_MOST_DETAILED = 8
"""If at most this many nodes are examined, their cards are listed."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """Whether a claim fits on a node.

    Attributes:
        reason: why it does not fit, or None if it does.
        cards: the reasons against cards, by index.
    """

    reason: str | None = None
    hopeless: bool = False
    cards: Mapping[int, str] | None = None


class ClaimExplainer:
    """Explains claims.

    Args:
        decider: A decider whose allowances no other caller uses.
        pace: A function that is called after each search. A process that also serves other callers sleeps in it.
    """

    def __init__(
        self,
        state: ClusterCache,
        settings: Settings,
        decider: ClaimDecider,
        card_rows: CardRows,
        pace: Callable[[], object] = lambda: None,
    ) -> None:
        self._state = state
        self._settings = settings
        self._decider = decider
        self._card_rows = card_rows
        self._pace = pace

    def claim(self, raw: Raw, selected: Sequence[str] = ()) -> Explanation:
        """Explain a ResourceClaim.

        Args:
            selected: The nodes to which the user limits the explanation; () for no limit.
        """
        meta = raw["metadata"]
        subject = f"{KIND} {meta['namespace']}/{meta['name']}"
        try:
            claim = read_claim(raw, CARD_POLICIES)
        except BadObject as error:
            text = "Its request or an annotation is invalid, so mgpu denies its allocation."
            return Explanation(subject, "invalid", DRA, problems=tuple(map(str, error.problems)), verdict=(text,))
        explanation = replace(self._request(claim), subject=subject, status=_status(claim))
        if claim.allocated:
            return self._allocated(explanation, claim)
        if not self._alternatives(claim):
            text = "It requests no devices of mgpu's driver, so mgpu does not affect it."
            return replace(explanation, verdict=(text,))
        explanation = self._open(explanation, [claim], selected)
        hint = "kube-scheduler allocates a claim only for a pod that it places; explain that pod for its own reasons."
        return replace(explanation, verdict=(*explanation.verdict, hint))

    def pod(self, explanation: Explanation, raw: Raw, selected: Sequence[str] = ()) -> Explanation | None:
        """Explain a pod by the claims that it uses; return None if it uses none that mgpu's driver may serve.

        Args:
            explanation: What is known about the pod.
        """
        namespace = str(table_at(raw, "metadata").get("namespace", ""))
        found = [self._state.claims.named(namespace, name) for name in claim_names(raw)]
        claims = [claim for claim in found if claim is not None and (claim.results or self._alternatives(claim))]
        if not claims:
            return None
        open_claims = [claim for claim in claims if not claim.allocated]
        for claim in claims:
            explanation = _joined(explanation, self._request(claim), claim.name)
        if open_claims and not table_at(raw, "spec").get("nodeName"):
            explanation = self._open(explanation, open_claims, selected)
        for claim in claims:
            if claim.results:
                explanation = self._allocated(explanation, claim)
            elif table_at(raw, "spec").get("nodeName"):
                text = f"Its ResourceClaim {claim.name} has no cards yet, although the pod is bound."
                explanation = replace(explanation, verdict=(*explanation.verdict, text))
        return explanation

    def _request(self, claim: Claim) -> Explanation:
        request = gpu_request(claim) if claim.results else self._first_request(claim)
        constraints = claim.card_constraints.texts()
        policy = request_text.describe_policy(request, self._settings) if request.containers else None
        rows = request_text.describe_containers(request)
        if not claim.results:
            names = next(iter(self._alternatives(claim)), frozenset())
            of_first = [request for request in claim.requests if request.name in names]
            for_instances = [request for request in of_first if not self._decider.is_for_cards(request)]
            rows += [(one.name, _instances_text(one.count)) for one in for_instances]
        return Explanation("", "", DRA, tuple(rows), constraints, policy)

    def _first_request(self, claim: Claim) -> GpuRequest:
        """Return what the claim requests of cards with the first alternative of each request."""
        names = next(iter(self._alternatives(claim)), frozenset())
        of_cards = {one.name for one in claim.requests if one.name in names and self._decider.is_for_cards(one)}
        return requests_before_allocation(claim, of_cards)

    def _alternatives(self, claim: Claim) -> list[frozenset[str]]:
        """Return the sets of requests of mgpu's driver of which one is enough."""
        return sets_of_alternatives(
            one
            for one in claim.requests
            if not one.admin and (self._decider.is_for_cards(one) or self._decider.is_for_instances(one))
        )

    def _allocated(self, explanation: Explanation, claim: Claim) -> Explanation:
        """Add where the cards of an allocated claim are."""
        name = f"Its ResourceClaim {claim.name}" if explanation.subject.startswith("Pod") else "It"
        holding = claim_holding(claim)
        if holding is None:
            text = f"{name} is allocated, and holds no card of mgpu's driver."
            return replace(explanation, verdict=(*explanation.verdict, text))
        rows = self._card_rows(claim.node, claim.uid)
        before = {row.state.card.index for row in explanation.cards.get(claim.node, ()) if row.own}
        rows = tuple(
            replace(row, own=row.state.card.index in before or any(s.is_on(row.state.card) for s in holding.shares))
            for row in rows
        )
        state = "The agent has delivered it." if claim.is_prepared else "The agent has not delivered it yet."
        if claim.repair:
            state = "mgpu is replacing its allocation, because it did not fit."
        text = f"{name} is on {_places(holding)} of {claim.node}. {state}"
        cards = {**explanation.cards, claim.node: rows} if rows else explanation.cards
        return replace(explanation, verdict=(*explanation.verdict, text), cards=cards)

    def _open(self, explanation: Explanation, claims: Sequence[Claim], selected: Sequence[str]) -> Explanation:
        """Add on which nodes all of these claims fit."""
        names = list(dict.fromkeys(selected)) or list(self._state.nodes_for_claims())
        answers = {name: self._answer(claims, name) for name in names[:_MOST_NODES]}
        rows = sorted(
            (NodeRow(name, answer.reason, unresolvable=answer.hopeless) for name, answer in answers.items()),
            key=lambda row: (row.reason is not None, row.name),
        )
        fits = sum(row.reason is None for row in rows)
        total = f"{len(rows):,} node{'s' * (len(rows) != 1)} with cards"
        which = "Its cards" if len(claims) == 1 else f"The cards of its {len(claims)} claims"
        verdict = [f"{which} fit on {fits:,} of {total}." if fits else f"{which} fit on none of {total}."]
        if len(names) > _MOST_NODES:
            verdict.append(f"Only {_MOST_NODES} of {len(names):,} nodes were examined; --node selects others.")
        detailed = answers if selected or len(answers) <= _MOST_DETAILED else {}
        cards = {name: self._cards(name, claims[0].uid, answer) for name, answer in detailed.items()}
        return replace(
            explanation,
            nodes=tuple(rows),
            cards={name: found for name, found in cards.items() if found},
            verdict=(*explanation.verdict, *verdict),
        )

    def _answer(self, claims: Sequence[Claim], node: str) -> _Answer:
        """Return whether each of the claims fits on the node by itself."""
        for claim in claims:
            answer = self._answer_for(claim, node)
            if answer.reason is not None:
                named = f"claim {claim.name}: {answer.reason}" if len(claims) > 1 else answer.reason
                return replace(answer, reason=named)
        return _Answer()

    def _answer_for(self, claim: Claim, node: str) -> _Answer:
        snapshot = self._state.node_snapshot(node, claim.uid)
        agent = self._state.agent_problem(node)
        if snapshot.node is None or agent is not None:
            return _Answer(agent or "the node is not known to mgpu (yet)", hopeless=True)
        answers = []
        for alternative in self._alternatives(claim):
            try:
                rejection = self._decider.assess(claim, alternative, snapshot)
            except EffortExceeded as error:
                answers.append(_Answer(str(error)))
                continue
            finally:
                self._pace()
            if rejection is None:
                return _Answer()
            answers.append(_refusal(rejection))
        return answers[0] if answers else _Answer()

    def _cards(self, node: str, uid: str, answer: _Answer) -> tuple[CardRow, ...]:
        reasons = answer.cards or {}
        return tuple(replace(row, reason=reasons.get(row.state.card.index)) for row in self._card_rows(node, uid))


def _refusal(rejection: Rejection) -> _Answer:
    cards = {card.index: card.reason for card in rejection.cards}
    return _Answer(str(rejection), hopeless=rejection.hopeless, cards=cards)


def _places(holding: Holding) -> str:
    """Return the cards and the MIG instances of a claim as a text."""
    indexes = sorted({s.card for s in holding.shares if s.type == GPU and isinstance(s.card, int)})
    listed = ", ".join(map(str, indexes))
    cards = [f"card{'s' if len(indexes) > 1 else ''} {listed}"] if indexes else []
    return " and ".join([*cards, *map(str, instances_of(holding.shares))])


def _instances_text(count: int) -> str:
    return "one MIG instance" if count == 1 else f"{count or 'all'} MIG instances"


def _joined(explanation: Explanation, of_claim: Explanation, claim: str) -> Explanation:
    """Add the request of a claim to the explanation of a pod."""
    request = tuple((f"{claim}/{name}", text) for name, text in of_claim.request)
    return replace(
        explanation,
        dialect=DRA,
        request=(*explanation.request, *request),
        constraints={**explanation.constraints, **of_claim.constraints},
        policy=explanation.policy or of_claim.policy,
    )


def _status(claim: Claim) -> str:
    if claim.deleting:
        return "Terminating"
    if not claim.allocated:
        return "not allocated"
    pods = [consumer.name for consumer in claim.consumers if consumer.resource == "pods"]
    where = f"on {claim.node}, " if claim.node else ""
    return f"{where}allocated for {', '.join(pods)}" if pods else f"{where}allocated"
