"""Searches for the best placement of a ResourceClaim whose requests exclude different cards or have other constraints.

Only `claim_placement` calls this module. The configurations of `solver` describe one card each, so they cannot express
that two cards must have different values of an attribute. A claim has at most 32 results, and such constraints are
rare, so a depth-first search with bounds suffices.

Why the result is right. A *result* is one card for one request. The search decides result after result, and tries every
card on which the result fits and which agrees with the relations, except in these cases:

- The results of a request are interchangeable, so they are placed in the order of a ranking of the cards.
- *Equal* cards (`Contents.classes`) are interchangeable while they have equal contents: exchanging them in a placement
  gives another one with the same loss that also agrees with the relations. Only the first of them is tried.
- For the same reason, a state is not searched again if only the contents of equal cards are exchanged in it.
- The loss of a placement is the sum of what each result adds to the loss of its card. The least that a result of a
  request can add to a card, whatever else is on the card, is computed beforehand (`Contents.least_losses`). If the loss
  so far and the least losses of the other results together are not below the best loss, no better placement follows.

A second search then takes the requests in their order, and tries the lowest cards first. The first placement that it
finds with the best loss is the one with the lowest indexes.
"""

from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate

from scheduler.engine.claim_contents import ClaimTask, Contents
from scheduler.engine.effort import Budget, Effort, Exhausted, Limits

_PUT_STEPS = 8  # steps to put a result on a card and to take it back
_STATE_STEPS = 1  # steps for each card to describe a state
_MAX_SEEN = 20_000  # the most states that are remembered

Chosen = list[tuple[int, ...]]
"""For each request, the positions of its cards, ascending. A position occurs once for each result on the card."""

_Cost = tuple[int, int]
"""The number of used cards of the spread group, and the loss."""


def search_claim(task: ClaimTask, limits: Limits, effort: Effort) -> tuple[Chosen | None, bool]:
    """Return the positions of the cards, and whether it is proven that they are the best ones.

    The positions are None if no placement was found. The flag then says whether it is proven that there is none.
    """
    budget = Budget(effort, limits.search)
    contents = Contents(task)
    setup = budget.part(limits.search // 4)
    try:
        least = contents.least_losses(setup)
    except Exhausted:
        least = None
    budget.give_back(setup)
    for_lowest = budget.part(budget.left // 4)
    best = _Descent(task, contents, _constrained_first(task), least, budget)
    is_complete = best.run()
    if best.chosen is None:
        return (None, True) if is_complete else _any(task, contents, Budget(effort, limits.fallback))
    if not is_complete:
        return best.chosen, False
    for_lowest.give_back(budget)
    lowest = _Descent(task, contents, range(len(task.candidates)), least, for_lowest, lowest_of=best.cost)
    lowest.run()
    return (best.chosen, False) if lowest.chosen is None else (lowest.chosen, True)


def _any(task: ClaimTask, contents: Contents, budget: Budget) -> tuple[Chosen | None, bool]:
    """Return the first placement, if the steps did not suffice for the best one."""
    descent = _Descent(task, contents, _constrained_first(task), None, budget, first=True)
    is_complete = descent.run()
    return descent.chosen, descent.chosen is None and is_complete


def _constrained_first(task: ClaimTask) -> list[int]:
    """Return the numbers of the requests: whole cards, then those with the fewest cards to choose from."""

    def key(r: int) -> tuple[int, ...]:
        one = task.request.containers[r]
        return -one.whole, len(task.candidates[r]), -one.memory, -(one.ratio or 0), -one.core, r

    return sorted(range(len(task.candidates)), key=key)


class _Descent:
    """One depth-first search.

    Args:
        order: The numbers of the requests, in the order in which their results are decided.
        least: The result of `Contents.least_losses`; None if it is not known.
        lowest_of: The cost of the placements among which the one with the lowest indexes is wanted; None if the
            placement with the lowest cost is wanted.
        first: Whether the first placement suffices, whatever its cost.

    Attributes:
        chosen: The best placement that was found, or None.
        cost: Its cost. The search looks for a lower one.
    """

    def __init__(
        self,
        task: ClaimTask,
        contents: Contents,
        order: Sequence[int],
        least: Mapping[tuple[int, int], int] | None,
        budget: Budget,
        *,
        lowest_of: _Cost | None = None,
        first: bool = False,
    ) -> None:
        self.chosen: Chosen | None = None
        self.cost = None if lowest_of is None else (lowest_of[0], lowest_of[1] + 1)
        self._task = task
        self._contents = contents
        self._order = order
        self._least = None if least is None else self._remaining(least)
        self._budget = budget
        self._by_index = lowest_of is not None
        self._first = first or self._by_index
        # Without all losses it is not known whether equal cards have the same ones, so no cards are equal.
        is_comparable = first or least is not None
        count = len(task.cards)
        self._classes = contents.classes(with_losses=not first) if is_comparable else list(range(count))
        self._held = [0] * count
        self._now: _Cost = (0, 0)
        self._path: list[list[int]] = [[] for _ in order]
        self._values: list[list[Hashable]] = [[] for _ in task.relations]
        self._seen: set[Hashable] = set()
        self._rankings: list[list[int]] = []

    def run(self) -> bool:
        """Search, and return whether the search was complete. Otherwise the budget has ended."""
        try:
            self._rankings = [self._ranking(r) for r in range(len(self._order))]
            self._descend(0, 0)
        except Exhausted:
            return False
        return True

    def _ranking(self, r: int) -> list[int]:
        """Return the cards that can take a result of a request, the best first."""
        kind = self._contents.kinds[r]
        fitting: list[tuple[int, int, int]] = []
        for i in self._task.candidates[r]:
            content = self._contents.with_one(i, 0, kind, self._budget)
            if content is not None:
                loss = 0 if self._by_index else self._contents.loss(i, content, self._budget)
                fitting.append((not self._by_index and self._task.avoided[i], loss, i))
        return [i for *_, i in sorted(fitting)]

    def _remaining(self, least: Mapping[tuple[int, int], int]) -> list[list[int]]:
        """Return the least loss of the results that are not decided, by turn and number of decided results."""
        rows: list[list[int]] = []
        later = 0
        for r in reversed(self._order):
            kind = self._contents.kinds[r]
            cards = self._task.request.containers[r].cards
            losses = sorted(least[kind, i] for i in self._task.candidates[r] if (kind, i) in least)
            if self._task.repeats:
                losses = losses[:1] * cards
            # If fewer cards can take a result, no placement is lost by a wrong bound.
            sums = list(accumulate(losses[:cards], initial=later))
            sums += sums[-1:] * (cards + 1 - len(sums))
            rows.append(sums[::-1])
            later = sums[-1]
        return rows[::-1]

    def _descend(self, turn: int, start: int) -> None:
        """Decide the next result of the request of this turn, on the cards from rank `start` on."""
        if turn == len(self._order):
            self._record()
            return
        r = self._order[turn]
        decided = len(self._path[r])
        if self._is_worse(turn, decided) or (not decided and self._was_seen(turn)):
            return
        is_last = decided + 1 == self._task.request.containers[r].cards
        for rank, i, content, cost in self._choices(r, start):
            before = (self._held[i], self._now)
            self._put(r, i)
            self._held[i] = content
            self._now = cost
            if is_last:
                self._descend(turn + 1, 0)
            else:
                self._descend(turn, rank + (not self._task.repeats))
            self._take_back(r)
            self._held[i], self._now = before
            if self._first and self.chosen is not None:
                return

    def _choices(self, r: int, start: int) -> list[tuple[int, int, int, _Cost]]:
        """Return the rank and the position of the cards that can take the result, with their content and the cost."""
        contents = self._contents
        kind = contents.kinds[r]
        tried: set[tuple[int, int]] = set()
        found: list[tuple[_Cost, int, int, int]] = []
        for rank, i in enumerate(self._rankings[r][start:], start):
            held = self._held[i]
            content = contents.with_one(i, held, kind, self._budget)
            equal = (self._classes[i], held)
            if content is None or equal in tried or not self._agrees(r, i):
                continue
            tried.add(equal)
            loss = contents.loss(i, content, self._budget) - contents.loss(i, held, self._budget)
            beside = self._task.avoided[i] and not held
            found.append(((self._now[0] + beside, self._now[1] + loss), rank, i, content))
        if not self._by_index:
            found.sort()
        return [(rank, i, content, cost) for cost, rank, i, content in found]

    def _agrees(self, r: int, i: int) -> bool:
        """Return whether a result on this card agrees with the relations and the results before."""
        for relation, values in zip(self._task.relations, self._values, strict=True):
            if values and r in relation.requests and (relation.values[i] in values) == relation.distinct:
                return False
        return True

    def _put(self, r: int, i: int) -> None:
        self._budget.take(_PUT_STEPS)
        self._path[r].append(i)
        for relation, values in zip(self._task.relations, self._values, strict=True):
            if r in relation.requests:
                values.append(relation.values[i])

    def _take_back(self, r: int) -> None:
        self._path[r].pop()
        for relation, values in zip(self._task.relations, self._values, strict=True):
            if r in relation.requests:
                values.pop()

    def _is_worse(self, turn: int, decided: int) -> bool:
        """Return whether no placement that follows has a lower cost than the best one."""
        if self.cost is None or self._least is None:
            return False
        beside, loss = self._now
        return (beside, loss + self._least[turn][decided]) >= self.cost

    def _was_seen(self, turn: int) -> bool:
        """Return whether the same requests were decided before in a way that differs only in equal cards."""
        self._budget.take(_STATE_STEPS * len(self._held))
        rows = zip(self._classes, self._held, strict=True)
        state = (turn, *sorted((number, held) for number, held in rows if held))
        if state in self._seen:
            return True
        if len(self._seen) < _MAX_SEEN:
            self._seen.add(state)
        return False

    def _record(self) -> None:
        if self.cost is None or self._now < self.cost:
            self.cost = self._now
            self.chosen = [tuple(sorted(positions)) for positions in self._path]
