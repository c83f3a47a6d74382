"""Finds any placement of a pod, for `placement`, if the exact search of `solver` has ended without a result.

Five greedy passes come first. Each puts one container after the other onto cards and takes none back, so it tries each
container on each card at most once. All passes place the containers that need most first, as best-fit decreasing does
for bin packing. They differ in what "most" means, and in which cards they prefer: those that the policy prefers, the
fullest or the emptiest. There are several passes because each of them fails for different pods. If all passes fail, a
depth-first search tries all choices until the budget is used up.

Why the results are right. A placement is checked container by container with `grow` and `Configuration.fits`, so what
is returned fits. None is returned only if all choices were tried, or if the containers need more than all cards have
free (`_exceeds_free`). The depth-first search skips states that have failed before. Equal cards are interchangeable, so
a state is the multiset of the contents of the cards. If the budget ends first, Exhausted is raised, and it is not known
whether the pod fits.

Whether a placement is found may depend on the policy, which prefers cards in the first pass and in the depth-first
search. Callers that must agree on whether a pod fits must use the same policy.
"""

from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, combinations

from mgpu.model.cards import CardState
from mgpu.model.gpu_requests import Amount
from mgpu.model.pods import Stage
from scheduler.engine.card_policy import CardScore
from scheduler.engine.configurations import Configuration, Kind, grow
from scheduler.engine.effort import Budget

_TRY_STEPS = 8  # steps to look at one card for one container
_GROW_STEPS = 8  # steps for each container that is added to a configuration
_MAX_SEEN = 20_000  # the most states that are remembered; each takes some hundreds of bytes

CardPositions = tuple[int, ...]
"""The positions of the cards of one container."""

Preference = Callable[[int, "CardContent", "CardContent"], tuple[int, ...]]
"""Returns the sort key of a card; cards with lower keys are preferred.

The arguments are the position of the card, its content, and its content with the container that is to be placed.
"""

_Turn = tuple[int, int]
"""The number of a kind, and the position of a container of this kind in the request."""


class CardContent:
    """The containers of the pod on a card. Cards in an equal state with equal containers share one object.

    Attributes:
        number: The number that identifies the object.
        state: The state of the card without the pod.
        held: The numbers of the containers' kinds in ascending order, which is their start order.
        configuration: The configuration of the containers.
        with_kind: By kind, the content with one more container of that kind; None if the container does not fit.
        worth: The policy's score by the position of the card, because some policies rate equal cards differently.
    """

    __slots__ = ("configuration", "held", "number", "state", "with_kind", "worth")

    def __init__(self, number: int, state: CardState, held: tuple[int, ...], configuration: Configuration) -> None:
        self.number = number
        self.state = state
        self.held = held
        self.configuration = configuration
        self.with_kind: dict[int, CardContent | None] = {}
        self.worth: dict[int, int] = {}


class Packing:
    """Computes what happens to the cards of a node when containers of the pod are added.

    Args:
        score: The policy's rating of the cards.
        avoided: For each card, whether a pod of the request's spread group is on it.
        largest: The result of `configurations.largest_of`.
        budget: The budget of the search. `rank` and the functions of this module raise Exhausted if it ends.
    """

    def __init__(
        self,
        kinds: Sequence[Kind],
        cards: Sequence[CardState],
        max_shares: int,
        score: CardScore,
        avoided: Sequence[bool],
        largest: Amount | None,
        budget: Budget,
    ) -> None:
        self.kinds = kinds
        self.cards = cards
        self.budget = budget
        self._max_shares = max_shares
        self._score = score
        self._avoided = avoided
        self._largest = largest
        self._apps_only = all(kind.container.stage is Stage.APP for kind in kinds)
        self._contents: dict[tuple[object, ...], CardContent] = {}
        self.empty = tuple(self._content(i, (), Configuration()) for i in range(len(cards)))

    def _content(self, i: int, held: tuple[int, ...], configuration: Configuration) -> CardContent:
        s = self.cards[i]
        free = (s.core_free, s.memory_free, s.ratio_free, s.shares)
        key = (s.card.healthy, self._avoided[i], s.card.core, s.card.memory, *free, held)
        content = self._contents.get(key)
        if content is None:
            content = self._contents[key] = CardContent(len(self._contents), s, held, configuration)
        return content

    def _add(self, i: int, content: CardContent, k: int) -> CardContent | None:
        """Return the card's content with one more container of kind `k`, or None if it does not fit."""
        self.budget.take(_TRY_STEPS)
        if k not in content.with_kind:
            content.with_kind[k] = self._grown(i, content, k)
        return content.with_kind[k]

    def _grown(self, i: int, content: CardContent, k: int) -> CardContent | None:
        state = self.cards[i]
        if not state.card.healthy:
            return None
        held = list(content.held)
        insort(held, k)
        # What app containers need does not depend on their order, because they run at the same time. With other
        # containers, the configuration must be built again in start order.
        added = [k] if self._apps_only else held
        self.budget.take(_GROW_STEPS * len(added) + len(held))
        configuration: Configuration | None = content.configuration if self._apps_only else Configuration()
        for kind in added:
            configuration = grow(configuration, self.kinds[kind], state.card) if configuration else None
        if configuration is None or not configuration.fits(state, self._max_shares):
            return None
        return self._content(i, tuple(held), configuration)

    def by_policy(self, i: int, before: CardContent, after: CardContent) -> tuple[int, ...]:
        """Prefer the card whose score increases most. Cards of the spread group come last until the pod is on them."""
        return self._avoided[i] and not before.held, self._worth(i, before) - self._worth(i, after)

    def _worth(self, i: int, content: CardContent) -> int:
        worth = content.worth.get(i)
        if worth is None:
            self.budget.take(_GROW_STEPS)
            need = content.configuration.need
            worth = content.worth[i] = self._score(i, need.core, need.memory)
        return worth

    def _held(self, content: CardContent) -> int:
        return 0 if self._largest is None else content.configuration.held(self._largest)

    def rank(
        self, contents: Sequence[CardContent], k: int, preference: Preference
    ) -> tuple[list[int], dict[int, CardContent]]:
        """Return the cards on which one more container of kind `k` fits, best first, and their contents with it.

        The best cards are those on which the container adds least to what the pod holds. Among equal ones, `preference`
        decides.
        """
        keys: list[tuple[tuple[int, ...], int]] = []
        grown: dict[int, CardContent] = {}
        for i, before in enumerate(contents):
            after = self._add(i, before, k)
            if after is not None:
                keys.append(((self._held(after) - self._held(before), *preference(i, before, after)), i))
                grown[i] = after
        return [i for _, i in sorted(keys)], grown


def first_fit(packing: Packing) -> list[CardPositions] | None:
    """Return the positions of each container's cards, in the order of the request; None if no placement exists.

    Raises Exhausted if the budget ends first.
    """
    kinds, cards = packing.kinds, packing.cards
    packing.budget.take(8 * len(kinds) + 4 * sum(kind.units for kind in kinds))
    if _exceeds_free(kinds, cards):
        return None
    by_larger_part, by_memory, by_core = _orders(kinds, cards)
    for order, preference in (
        (by_memory, packing.by_policy),
        (by_larger_part, _tightest),
        (by_memory, _tightest),
        (by_core, _tightest),
        (by_larger_part, _emptiest),
    ):
        path = _greedy_pass(packing, order, preference)
        if path is not None:
            return _in_request_order(order, path)
    path = _depth_first(packing, by_memory, packing.by_policy)
    return None if path is None else _in_request_order(by_memory, path)


def _greedy_pass(packing: Packing, order: Sequence[_Turn], preference: Preference) -> list[CardPositions] | None:
    """Put each container in turn onto the cards that are best for it; return None if one finds too few cards."""
    contents = list(packing.empty)
    path: list[CardPositions] = []
    for k, _ in order:
        ranked, grown = packing.rank(contents, k, preference)
        number = packing.kinds[k].container.cards
        if len(ranked) < number:
            return None
        for i in ranked[:number]:
            contents[i] = grown[i]
        path.append(tuple(sorted(ranked[:number])))
    return path


def _depth_first(packing: Packing, order: Sequence[_Turn], preference: Preference) -> list[CardPositions] | None:
    """Try all choices of cards, the best first, until one succeeds. Return None if all have failed."""
    contents = packing.empty
    seen: set[tuple[int, ...]] = set()
    path: list[CardPositions] = []
    choices: list[Iterator[tuple[CardPositions, tuple[CardContent, ...]]]] = []
    while len(path) < len(order):
        if len(choices) == len(path):
            choices.append(_choices(packing, order[len(path)][0], contents, preference))
        choice = next(choices[-1], None)
        if choice is None:
            choices.pop()
            if not choices:
                return None
            path.pop()
            continue
        chosen, after = choice
        # Sorted, because cards with the same content are interchangeable.
        state = (len(path), *sorted(content.number for content in after))
        packing.budget.take(len(after))
        if state not in seen:
            if len(seen) < _MAX_SEEN:
                seen.add(state)
            path.append(chosen)
            contents = after
    return path


def _choices(
    packing: Packing, k: int, contents: tuple[CardContent, ...], preference: Preference
) -> Iterator[tuple[CardPositions, tuple[CardContent, ...]]]:
    """Yield all choices of cards for one more container of kind `k`, with the contents of all cards after it."""
    ranked, grown = packing.rank(contents, k, preference)
    for chosen in combinations(ranked, packing.kinds[k].container.cards):
        packing.budget.take(2 * len(contents))
        yield tuple(sorted(chosen)), tuple(grown[i] if i in chosen else before for i, before in enumerate(contents))


def _in_request_order(order: Sequence[_Turn], path: Sequence[CardPositions]) -> list[CardPositions]:
    return [chosen for _, chosen in sorted((member, chosen) for (_, member), chosen in zip(order, path, strict=True))]


def _orders(kinds: Sequence[Kind], cards: Sequence[CardState]) -> tuple[list[_Turn], list[_Turn], list[_Turn]]:
    """Return three orders of the containers, each with the largest containers first.

    The size of a container is what it requests on all its cards together. The first order compares the larger of core
    and memory, each as a fraction of the largest card; the second compares memory, and the third core. Containers that
    request whole cards always come first.
    """
    core, memory = (max(1, *sizes) for sizes in zip(*((s.card.core, s.card.memory) for s in cards), strict=True))

    def turns(size: Callable[[Kind], int]) -> list[_Turn]:
        keys = [(-k.container.whole, -k.container.cards * (1 + size(k)), number) for number, k in enumerate(kinds)]
        return [(number, member) for *_, number in sorted(keys) for member in kinds[number].members]

    return (
        turns(lambda kind: max(kind.container.core * memory, _memory(kind, cards) * core)),
        turns(lambda kind: _memory(kind, cards)),
        turns(lambda kind: kind.container.core),
    )


def _left(content: CardContent) -> int:
    """Return what is left of the card: the sum of the fractions of core and of memory, in millionths."""
    need, state = content.configuration.need, content.state
    core = (state.core_free - need.core) * 1_000_000 // max(1, state.card.core)
    memory = (state.memory_free - need.memory) * 1_000_000 // max(1, state.card.memory)
    return core + memory


def _tightest(_i: int, _before: CardContent, after: CardContent) -> tuple[int, ...]:
    return (_left(after),)


def _emptiest(_i: int, _before: CardContent, after: CardContent) -> tuple[int, ...]:
    return (-_left(after),)


def _memory(kind: Kind, cards: Sequence[CardState]) -> int:
    """Return the memory of a container in bytes. A request in percent is converted for the first card."""
    return kind.container.memory or (kind.container.ratio or 0) * cards[0].card.memory // 100


def _exceeds_free(kinds: Sequence[Kind], cards: Sequence[CardState]) -> bool:
    """Return whether the containers that run at the same time surely need more than all cards have free.

    That is certain if the sum of their shares exceeds the sum of what is free. It is also certain if there are more
    shares than fit when every card is filled with the smallest ones.
    """
    running = [kind for kind in kinds if kind.container.stage is not Stage.INIT]
    healthy = [state for state in cards if state.card.healthy]
    for sizes, free in (
        ([k.container.core for k in running for _ in range(k.units)], [s.core_free for s in healthy]),
        ([k.container.memory for k in running for _ in range(k.units)], [s.memory_free for s in healthy]),
        ([k.container.ratio or 0 for k in running for _ in range(k.units)], [s.ratio_free for s in healthy]),
    ):
        smallest = list(accumulate(sorted(sizes)))
        if sum(sizes) > sum(free) or sum(bisect_right(smallest, amount) for amount in free) < len(sizes):
            return True
    return False
