"""Places a ResourceClaim on the cards of a node: `place_claim` returns the best placement, or why there is none.

`scheduler.decisions` calls `place_claim`. A claim is a `GpuRequest` with one "container" for each request of the claim.
In contrast to a pod, its requests may exclude different cards by their selectors, the attributes of the cards may have
to be equal or different (`AttributeConstraint`), and one card may serve several results of a request.

Why the result is right. A card without an attribute that a constraint needs is excluded for the requests of the
constraint. The devices of a `matchAttribute` that concerns all requests have the same value, so each placement is
within one group of cards with equal values. The best placement is the best one of all groups, and a group is a problem
without these constraints. If no other constraints are left, and the requests exclude the same cards, the problem is
that of a pod, and `place` solves it. Otherwise `claim_search` solves it. Each group is first solved with different
cards for the results of a request. Only if no group has such a placement, one card may serve several results; for
`place` such a request is several requests for one card each.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import attrgetter

from mgpu.model import resource_slices
from mgpu.model.cards import Card, CardState
from mgpu.model.gpu_requests import ContainerRequest, GpuRequest, Placement, Rejection, RejectionKind
from mgpu.model.resource_claims import DRIVER, AttributeConstraint
from mgpu.model.resource_slices import Attribute
from scheduler.engine.card_constraints import Exclusion, cards_of_spread_group, exclusions
from scheduler.engine.card_policy import CardScore, Policy
from scheduler.engine.claim_contents import ClaimTask, Relation
from scheduler.engine.claim_search import search_claim
from scheduler.engine.effort import FULL, SHORT, Effort, Limits
from scheduler.engine.placement import place
from scheduler.engine.rejections import (
    container_rejection,
    empty_cards,
    impossible_request,
    not_together_rejection,
    unproven_rejection,
)

LONGEST_ATTRIBUTE = 64
"""The most characters of an attribute's value. The API server allows no more, so the agent publishes no more."""

_Rank = tuple[int, int, tuple[tuple[str, tuple[int, ...]], ...]]
"""How good a placement is: the cards of the spread group, the loss, and the indexes; less is better."""


def qualified_attributes(card: Card) -> dict[str, Attribute]:
    """Return the attributes of the device of a card as kube-scheduler sees them, by their fully qualified names."""
    return {
        f"{DRIVER}/{name}": value[:LONGEST_ATTRIBUTE] if isinstance(value, str) else value
        for name, value in resource_slices.attributes(card).items()
    }


def place_claim(
    request: GpuRequest,
    constraints: Sequence[AttributeConstraint],
    cards: Sequence[CardState],
    policy: Policy,
    excluded: Mapping[str, Mapping[int, str]],
    attributes: Callable[[Card], Mapping[str, Attribute]] = qualified_attributes,
    *,
    limits: Limits = FULL,
    effort: Effort | None = None,
) -> Placement | Rejection:
    """Return the best placement of a claim on the cards of a node, or why there is none.

    These criteria decide which placement is best, the first one first:

    1. The results of each request are on different cards. A placement that violates this for one request is as good as
       one that violates it for several.
    2. The claim uses the fewest cards on which other holders of its spread group are.
    3. The sum of the policy's scores over all cards of the node is highest.
    4. The card indexes are lowest, request by request in the order of the claim.

    `proven` of the result and `limits` mean the same as for `place`. If one card serves several results of a request,
    its index is in the placement once for each of them.

    Args:
        request: The result of `resource_claims.gpu_request`.
        constraints: The constraints between the devices of the claim.
        cards: All cards of the node without what the claim itself holds, in any order.
        excluded: For the name of a request, the indexes of the cards that its selectors exclude, with the reasons.
        attributes: Returns the attributes of a card by their fully qualified names.
        effort: Counts the steps. Its checkpoint may end the search by an exception.
    """
    if not request.containers:
        return Placement(())
    ordered = sorted(cards, key=attrgetter("card.index"))
    no_cards = None if ordered else impossible_request(request, ordered)
    if no_cards is not None:
        return no_cards
    problem = _problem(request, constraints, ordered, policy, excluded, attributes)
    effort = effort or Effort()
    outcome = _solve(problem, limits, effort)
    if outcome.placement is not None:
        return outcome.placement
    hopeless = outcome.hopeless
    if hopeless is None:
        lower = Limits(min(limits.search, SHORT.search), min(limits.fallback, SHORT.fallback))
        hopeless = all(state.idle for state in ordered) or _solve(problem.when_empty(), lower, effort).is_impossible
    return _rejection(problem, proven=outcome.proven, hopeless=hopeless)


@dataclass(frozen=True, slots=True)
class _Problem:
    """A claim with what its selectors and constraints mean for each card.

    Attributes:
        cards: The cards, by index.
        excluded: For each request and each card, why the card is excluded, or None.
        wide: The constraints by which all devices of the claim have equal values.
        relations: The other constraints between devices.
    """

    request: GpuRequest
    cards: Sequence[CardState]
    policy: Policy
    excluded: Sequence[Sequence[Exclusion | None]]
    wide: Sequence[Relation]
    relations: Sequence[Relation]

    @property
    def is_like_pod(self) -> bool:
        """Whether `place` solves the problem: there are no other constraints, and the requests exclude equal cards."""
        first = [bool(exclusion) for exclusion in self.excluded[0]]
        return not self.relations and all([bool(exclusion) for exclusion in row] == first for row in self.excluded[1:])

    @property
    def has_repeatable(self) -> bool:
        """Whether one card may serve several results of a request."""
        return any(container.cards > 1 and not container.whole for container in self.request.containers)

    def when_empty(self) -> "_Problem":
        return replace(self, cards=empty_cards(self.cards))


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The result of the search for a placement.

    Attributes:
        placement: The best placement that was found, or None.
        proven: Whether it is proven that it is the best one, or that there is none.
        hopeless: Whether there would be none on empty cards either; None if it is not known.
    """

    placement: Placement | None
    proven: bool
    hopeless: bool | None = None

    @property
    def is_impossible(self) -> bool:
        return self.placement is None and self.proven


def _problem(
    request: GpuRequest,
    constraints: Sequence[AttributeConstraint],
    cards: Sequence[CardState],
    policy: Policy,
    excluded: Mapping[str, Mapping[int, str]],
    attributes: Callable[[Card], Mapping[str, Attribute]],
) -> _Problem:
    found = [attributes(state.card) for state in cards]
    rows = [_excluded(container, cards, excluded) for container in request.containers]
    wide: list[Relation] = []
    relations: list[Relation] = []
    for constraint in constraints:
        # A constraint for a single device only requires that the device has the attribute.
        concerned = frozenset(r for r, one in enumerate(request.containers) if constraint.concerns(one.container))
        relation = Relation(
            constraint.attribute, concerned, [_value(constraint, of) for of in found], constraint.distinct
        )
        missing = Exclusion(f"no attribute {constraint.attribute}")
        for r in concerned:
            rows[r] = [one or (missing if v is None else None) for one, v in zip(rows[r], relation.values, strict=True)]
        if sum(request.containers[r].cards for r in concerned) > 1:
            is_wide = not constraint.distinct and len(concerned) == len(request.containers)
            (wide if is_wide else relations).append(relation)
    by_annotations = exclusions(request, cards)
    rows = [[one or other for one, other in zip(row, by_annotations, strict=True)] for row in rows]
    problem = _Problem(request, cards, policy, rows, wide, relations)
    if request.constraints.same_card and not problem.is_like_pod:
        group = Relation(str(request.constraints.same_card), frozenset(range(len(rows))), list(range(len(cards))))
        problem = replace(problem, wide=(*wide, group))
    return problem


def _value(constraint: AttributeConstraint, found: Mapping[str, Attribute]) -> Hashable:
    """Return the value that the constraint compares, with its type, because in Python True == 1; None for no value."""
    value = found.get(constraint.attribute)
    return None if value is None else (type(value).__name__, value)


def _excluded(
    container: ContainerRequest, cards: Sequence[CardState], excluded: Mapping[str, Mapping[int, str]]
) -> list[Exclusion | None]:
    reasons = excluded.get(container.container, {})
    return [Exclusion(reasons[s.card.index]) if s.card.index in reasons else None for s in cards]


def _groups(problem: _Problem) -> list[frozenset[int]]:
    """Return the positions of the cards that have equal values of all attributes in `wide`.

    The group with the lowest card comes first. A card without one of the attributes is in no group.
    """
    groups: dict[tuple[Hashable, ...], list[int]] = {}
    for i in range(len(problem.cards)):
        key = tuple(relation.values[i] for relation in problem.wide)
        if None not in key:
            groups.setdefault(key, []).append(i)
    return [frozenset(positions) for positions in groups.values()]


def _solve(problem: _Problem, limits: Limits, effort: Effort) -> _Outcome:
    """Return the best placement of all groups. Each group gets an equal part of the limits."""
    groups = _groups(problem)
    parts = max(1, len(groups))
    limits = Limits(limits.search // parts, limits.fallback // parts)
    score = problem.policy.scores(problem.cards)
    proven = True
    hopeless: bool | None = True
    for repeats in (False, True) if problem.has_repeatable else (False,):
        solve = _solve_like_pod if problem.is_like_pod else _solve_by_search
        outcomes = [solve(problem, group, limits, effort, repeats=repeats) for group in groups]
        proven = proven and all(outcome.proven for outcome in outcomes)
        placements = [outcome.placement for outcome in outcomes if outcome.placement is not None]
        if placements:
            best = min(placements, key=lambda placement: _rank(problem, placement, score))
            return _Outcome(replace(best, proven=proven), proven)
        if any(outcome.hopeless is None for outcome in outcomes):
            hopeless = None
        hopeless = hopeless and all(outcome.hopeless for outcome in outcomes)
    return _Outcome(None, proven, hopeless and proven)


def _solve_like_pod(
    problem: _Problem, group: frozenset[int], limits: Limits, effort: Effort, *, repeats: bool
) -> _Outcome:
    """Place the claim on the cards of a group by `place`.

    The cards that are excluded or not in the group are marked unhealthy, and the policy rates the original cards.
    """
    request = problem.request
    usable = [
        replace(state, card=replace(state.card, healthy=False)) if exclusion or i not in group else state
        for i, (state, exclusion) in enumerate(zip(problem.cards, problem.excluded[0], strict=True))
    ]
    originals = {state.card.index: state.card for state in problem.cards}

    def scoring(states: Sequence[CardState], weight_of_core: int) -> CardScore:
        rated = [replace(state, card=originals[state.card.index]) for state in states]
        return problem.policy.scoring(rated, weight_of_core)

    policy = replace(problem.policy, scoring=scoring)
    split = replace(request, containers=tuple(_single_results(request))) if repeats else request
    found = place(split, usable, policy, limits=limits, effort=effort)
    if isinstance(found, Rejection):
        return _Outcome(None, found.proven, found.hopeless)
    if not repeats:
        return _Outcome(found, found.proven)
    chosen = (indexes for _, indexes in found.containers)
    return _Outcome(_joined(request, chosen, proven=found.proven), found.proven)


def _single_results(request: GpuRequest) -> Iterator[ContainerRequest]:
    """Yield the requests with each shared request for several cards as several requests for one card each."""
    for container in request.containers:
        if container.whole:
            yield container
        else:
            yield from [replace(container, cards=1)] * container.cards


def _joined(request: GpuRequest, chosen: Iterator[tuple[int, ...]], *, proven: bool) -> Placement:
    """Return the placement of the requests, given the indexes for each of `_single_results`."""
    joined = []
    for container in request.containers:
        parts = 1 if container.whole else container.cards
        indexes = sorted(index for part in islice(chosen, parts) for index in part)
        joined.append((container.container, tuple(indexes)))
    return Placement(tuple(joined), proven)


def _solve_by_search(
    problem: _Problem, group: frozenset[int], limits: Limits, effort: Effort, *, repeats: bool
) -> _Outcome:
    candidates = [
        [i for i, exclusion in enumerate(row) if not exclusion and i in group and problem.cards[i].card.healthy]
        for row in problem.excluded
    ]
    avoided = cards_of_spread_group(problem.request, problem.cards)
    task = ClaimTask(
        problem.request, problem.cards, candidates, problem.relations, problem.policy, avoided, repeats=repeats
    )
    chosen, proven = search_claim(task, limits, effort)
    if chosen is None:
        return _Outcome(None, proven)
    rows = zip(problem.request.containers, chosen, strict=True)
    containers = tuple((c.container, tuple(problem.cards[i].card.index for i in positions)) for c, positions in rows)
    return _Outcome(Placement(containers, proven), proven)


def _rank(problem: _Problem, placement: Placement, score: CardScore) -> _Rank:
    avoided = cards_of_spread_group(problem.request, problem.cards)
    beside = 0
    loss = 0
    for i, state in enumerate(problem.cards):
        amounts = [
            container.amount_on(state.card)
            for container, (_, indexes) in zip(problem.request.containers, placement.containers, strict=True)
            for _ in range(indexes.count(state.card.index))
        ]
        if amounts:
            beside += avoided[i]
            loss += score(i, 0, 0) - score(i, sum(one.core for one in amounts), sum(one.memory for one in amounts))
    return beside, loss, placement.containers


def _rejection(problem: _Problem, *, proven: bool, hopeless: bool) -> Rejection:
    """Return why the claim has no placement: the first request that does not fit alone, or that they do not together.

    A request for several cards does not surely fail if fewer cards can take it, because one card may serve several of
    its results.
    """
    request = problem.request
    whole = replace(request, containers=tuple(container for container in request.containers if container.whole))
    impossible = impossible_request(whole, problem.cards)
    if impossible is not None:
        return impossible
    short: list[Rejection] = []
    for container, row in zip(request.containers, problem.excluded, strict=True):
        found = _alone(problem, container, row)
        if found is None:
            continue
        least = container if container.whole else replace(container, cards=1)
        if _alone(problem, least, row) is not None:
            return replace(found, hopeless=hopeless)
        short.append(found)
    if not proven:
        return unproven_rejection(request)
    if short:
        return replace(short[0], hopeless=hopeless)
    return _not_together(problem, hopeless=hopeless)


def _alone(problem: _Problem, container: ContainerRequest, row: Sequence[Exclusion | None]) -> Rejection | None:
    """Return the rejection of a request that too few cards can take even alone, or None.

    If all cards can take it, but the node has too few, it has no rejection, because there is no card with a reason.
    """
    enough = replace(container, cards=min(container.cards, len(problem.cards)))
    if container_rejection(problem.request, enough, problem.cards, row) is None:
        return None
    return container_rejection(problem.request, container, problem.cards, row)


def _not_together(problem: _Problem, *, hopeless: bool) -> Rejection:
    request = problem.request
    attributes = [
        f"{'different' if relation.distinct else 'equal'} {relation.attribute}"
        for relation in (*problem.wide, *problem.relations)
    ]
    count = sum(container.cards for container in request.containers)
    if not attributes and count == len(request.containers):
        return not_together_rejection(request, hopeless=hopeless)
    together = f"with {' and '.join(attributes)}" if attributes else "together"
    text = f"each of the {count} requested cards is available alone, but not all of them {together}"
    return Rejection(RejectionKind.NOT_TOGETHER, text, hopeless=hopeless)
