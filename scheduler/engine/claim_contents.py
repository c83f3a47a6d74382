"""What the cards of a node can hold of a ResourceClaim, and the losses of the card policy, for `claim_search`.

Requests that differ only in their names are one kind. A content is the number of results of each kind that are on a
card, packed into an integer. All results of a claim run at the same time, so what they take of a card adds up.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add

from mgpu.model.cards import CardState
from mgpu.model.gpu_requests import Amount, ContainerRequest, GpuRequest
from scheduler.engine.card_policy import Policy
from scheduler.engine.effort import Budget

_TRY_STEPS = 4  # steps to check whether a card can take a result
_CONTENT_STEPS = 12  # steps to compute the content of a card with one more result
_RATE_STEPS = 4  # steps to rate a content of a card


@dataclass(frozen=True, slots=True)
class Relation:
    """Between which results of a claim some value of their cards must be equal, or pairwise different.

    An `AttributeConstraint` for several devices becomes a relation, and so may a same-card group.

    Attributes:
        attribute: The name of the attribute, for messages.
        requests: The numbers of the requests.
        values: The value of each card; None for a card that these requests exclude.
        distinct: Whether the values must be pairwise different, and not equal.
    """

    attribute: str
    requests: frozenset[int]
    values: Sequence[Hashable]
    distinct: bool = False


@dataclass(frozen=True, slots=True)
class ClaimTask:
    """The claim and the cards of one search.

    Attributes:
        cards: The cards of the node, by index.
        candidates: For each request, the positions of the healthy cards that it does not exclude, ascending.
        avoided: For each card, whether a holder of the claim's spread group is on it.
        repeats: Whether one card may serve several results of a request.
    """

    request: GpuRequest
    cards: Sequence[CardState]
    candidates: Sequence[Sequence[int]]
    relations: Sequence[Relation]
    policy: Policy
    avoided: Sequence[bool]
    repeats: bool


class Contents:
    """Computes the contents of the cards and their losses, each only once.

    Attributes:
        kinds: The kind of each request.
    """

    def __init__(self, task: ClaimTask) -> None:
        self.kinds: list[int] = []
        self._task = task
        self._score = task.policy.scores(task.cards)
        self._containers: list[ContainerRequest] = []
        self._candidates: list[frozenset[int]] = []
        self._most: list[int] = []
        numbers: dict[Hashable, int] = {}
        for r, container in enumerate(task.request.containers):
            concerned = tuple(r in relation.requests for relation in task.relations)
            alike = (replace(container, container=""), tuple(task.candidates[r]), concerned)
            kind = numbers.setdefault(alike, len(numbers))
            self.kinds.append(kind)
            if kind == len(self._containers):
                self._containers.append(container)
                self._candidates.append(frozenset(task.candidates[r]))
                self._most.append(0)
            self._most[kind] += container.cards if task.repeats else 1
        self._bits = sum(self._most).bit_length()
        self._needs: list[dict[int, Amount]] = [{0: Amount()} for _ in task.cards]
        self._grown: list[dict[tuple[int, int], int | None]] = [{} for _ in task.cards]
        self._losses: list[dict[int, int]] = [{0: 0} for _ in task.cards]
        self._rated: set[tuple[int, int]] = set()

    def with_one(self, i: int, content: int, kind: int, budget: Budget) -> int | None:
        """Return the content of a card with one more result of this kind, or None if it does not fit."""
        budget.take(_TRY_STEPS)
        grown = self._grown[i]
        key = (content, kind)
        if key not in grown:
            budget.take(_CONTENT_STEPS)
            grown[key] = self._grow(i, content, kind)
        return grown[key]

    def _grow(self, i: int, content: int, kind: int) -> int | None:
        container = self._containers[kind]
        if i not in self._candidates[kind] or self._count(content, kind) == self._most[kind]:
            return None
        if content and (container.whole or any(self._count(content, k) for k in self._whole_kinds())):
            return None
        state = self._task.cards[i]
        need = Amount(*map(add, self._needs[i][content], container.amount_on(state.card)))
        most = self._task.request.max_shares
        short = need.core > state.core_free or need.memory > state.memory_free or need.ratio > state.ratio_free
        if short or (most and state.shares + need.shares > most) or (container.whole and not state.idle):
            return None
        grown = content + (1 << (kind * self._bits))
        self._needs[i][grown] = need
        return grown

    def _count(self, content: int, kind: int) -> int:
        return (content >> (kind * self._bits)) & ((1 << self._bits) - 1)

    def _whole_kinds(self) -> Iterator[int]:
        return (kind for kind, container in enumerate(self._containers) if container.whole)

    def loss(self, i: int, content: int, budget: Budget) -> int:
        """Return by how much the policy's score of a card is lower with this content."""
        losses = self._losses[i]
        if content not in losses:
            need = self._needs[i][content]
            is_new = (need.core, need.memory) not in self._rated
            budget.take(_RATE_STEPS + self._task.policy.steps * is_new)
            self._rated.add((need.core, need.memory))
            losses[content] = self._score(i, 0, 0) - self._score(i, need.core, need.memory)
        return losses[content]

    def least_losses(self, budget: Budget) -> Mapping[tuple[int, int], int]:
        """Return by kind and card the least that a result can add to the loss of the card, whatever else is on it.

        A kind that does not fit on a card has no entry. Raises Exhausted if there are too many contents.
        """
        least: dict[tuple[int, int], int] = {}
        for i in range(len(self._task.cards)):
            known = {0}
            pending = [0]
            while pending:
                content = pending.pop()
                for kind in range(len(self._containers)):
                    grown = self.with_one(i, content, kind, budget)
                    if grown is None:
                        continue
                    added = self.loss(i, grown, budget) - self.loss(i, content, budget)
                    least[kind, i] = min(added, least.get((kind, i), added))
                    if grown not in known:
                        known.add(grown)
                        pending.append(grown)
        return least

    def classes(self, *, with_losses: bool) -> list[int]:
        """Return a number for each card, which is the same for equal cards.

        Equal cards can take the same results, and agree with the relations alike: they have the same values, or values
        that no other card has.

        Args:
            with_losses: Whether equal cards also have the same losses. All losses must be computed then.
        """
        task = self._task
        numbers: dict[Hashable, int] = {}
        alone: list[set[Hashable]] = [_unique_values(relation) for relation in task.relations]
        found = []
        for i, state in enumerate(task.cards):
            free = (state.core_free, state.memory_free, state.ratio_free, state.shares)
            values = tuple(
                None if relation.values[i] in unique else (relation.values[i],)
                for relation, unique in zip(task.relations, alone, strict=True)
            )
            usable = tuple(i in candidates for candidates in self._candidates)
            losses = (task.avoided[i], *sorted(self._losses[i].items())) if with_losses else ()
            key = (state.card.core, state.card.memory, free, values, usable, losses)
            found.append(numbers.setdefault(key, len(numbers)))
        return found


def _unique_values(relation: Relation) -> set[Hashable]:
    counts = Counter(relation.values)
    return {value for value, count in counts.items() if count == 1}
