"""Any placement at all, for asks that are too large for the exact search."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations

from mgpu.model.cards import CardState
from mgpu.model.pods import Stage
from scheduler.placement.configurations import Configuration, Kind, grow
from scheduler.placement.policies import CardScore

Contents = tuple[int, ...]
"""How many containers of each kind are on a card."""

EFFORT = 10_000
"""States after which the search ends undecided, about a second. Only a pod made for it gets so far: dozens of
containers of different sizes that fit by every total and yet not together."""


class Undecided(Exception):
    """Nothing was found with all the effort there is, and that there is nothing is not proven."""


def first_fit(
    kinds: Sequence[Kind], cards: Sequence[CardState], max_shares: int, score: CardScore, avoided: Sequence[bool]
) -> list[tuple[int, ...]] | None:
    """Per container of the ask the positions of its cards; None: no placement exists. Raises Undecided.

    Depth-first, the hardest containers first, each on the cards that gain most, `avoided` ones last. Equal cards are
    one, and what has failed once is not tried again.
    """
    if _more_than_is_free(kinds, cards):
        return None
    order = sorted(
        ((kind, k, member) for k, kind in enumerate(kinds) for member in kind.members),
        key=lambda row: (-row[0].container.whole, -row[0].container.cards * (1 + _memory(row[0], cards)), row[2]),
    )
    alike = [
        (s.card.healthy, avoid, s.card.core, s.card.memory, s.core_free, s.memory_free, s.ratio_free, s.shares)
        for s, avoid in zip(cards, avoided, strict=True)
    ]
    contents: tuple[Contents, ...] = ((0,) * len(kinds),) * len(cards)
    seen: set[object] = set()
    path: list[tuple[int, ...]] = []
    trials: list[Iterator[_Step]] = []
    while len(path) < len(order):
        if len(trials) == len(path):
            _, k, _ = order[len(path)]
            trials.append(_steps(kinds, k, cards, contents, max_shares, score, avoided))
        step = next(trials[-1], None)
        if step is None:
            trials.pop()
            if not trials:
                return None
            path.pop()
            continue
        chosen, after = step
        state = (len(path), tuple(sorted(zip(alike, after, strict=True))))
        if state not in seen:
            if len(seen) == EFFORT:
                raise Undecided
            seen.add(state)
            path.append(chosen)
            contents = after
    by_member = sorted((member, chosen) for (_, _, member), chosen in zip(order, path, strict=True))
    return [chosen for _, chosen in by_member]


_Step = tuple[tuple[int, ...], tuple[Contents, ...]]
"""The cards of one more container, and what is on each card then."""


def _steps(
    kinds: Sequence[Kind],
    k: int,
    cards: Sequence[CardState],
    contents: tuple[Contents, ...],
    max_shares: int,
    score: CardScore,
    avoided: Sequence[bool],
) -> Iterator[_Step]:
    """All ways to place one more container of kind `k`, the cards that gain most first."""
    gains: list[tuple[bool, int, int]] = []
    grown: dict[int, Contents] = {}
    for i, (state, held) in enumerate(zip(cards, contents, strict=True)):
        more = tuple(n + (j == k) for j, n in enumerate(held))
        after = configuration(kinds, more, state)
        if state.card.healthy and after is not None and after.fits(state, max_shares):
            now = (configuration(kinds, held, state) or Configuration()).need
            gain = score(i, now.core, now.memory) - score(i, after.need.core, after.need.memory)
            gains.append((avoided[i] and not any(held), gain, i))
            grown[i] = more
    for chosen in combinations([i for *_, i in sorted(gains)], kinds[k].container.cards):
        placed = tuple(grown[i] if i in chosen else held for i, held in enumerate(contents))
        yield tuple(sorted(chosen)), placed


def _memory(kind: Kind, cards: Sequence[CardState]) -> int:
    """What a container takes of a card, for a comparison: what is asked for in percent is of the first card."""
    return kind.container.memory or (kind.container.ratio or 0) * cards[0].card.memory // 100


def _more_than_is_free(kinds: Sequence[Kind], cards: Sequence[CardState]) -> bool:
    """Whether what runs at the same time is too much for all cards together, by amount or by number.

    By number: no card holds more containers than it holds of the smallest.
    """
    running = [kind for kind in kinds if kind.container.stage is not Stage.INIT]
    healthy = [state for state in cards if state.card.healthy]
    for sizes, free in (
        ([k.container.core for k in running for _ in range(k.units)], [s.core_free for s in healthy]),
        ([k.container.memory for k in running for _ in range(k.units)], [s.memory_free for s in healthy]),
        ([k.container.ratio or 0 for k in running for _ in range(k.units)], [s.ratio_free for s in healthy]),
    ):
        smallest = list(accumulate(sorted(sizes)))
        if sum(sizes) > sum(free) or sum(bisect_right(smallest, room) for room in free) < len(sizes):
            return True
    return False


def configuration(kinds: Sequence[Kind], held: Contents, state: CardState) -> Configuration | None:
    """What these containers need of a card together; None: two of them exclude each other."""
    found: Configuration | None = Configuration()
    for kind, count in zip(kinds, held, strict=True):
        for _ in range(count):
            found = grow(found, kind, state.card) if found else None
    return found
