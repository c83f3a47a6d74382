"""Who holds what of which card.

The ledger keeps each pod's record and each node's cards, and derives the fullness of a node's cards from these
two alone. So it never depends on the order of events, and a release gives back exactly what was taken.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from mgpu.model.asks import Amount, Ask, Placement, peak
from mgpu.model.cards import Card, CardState
from mgpu.model.groups import Group, Seat
from mgpu.model.pods import Stage
from mgpu.model.wishes import NONE, Wishes


@dataclass(frozen=True, slots=True)
class Share:
    """What one container holds of one card.

    card: its index or its UUID, as the record names it; None: not known (an unreadable record), then the share is
    held on every card of the node, since it may be on any.
    whole: all of the card, whatever its size now.
    """

    container: str
    card: int | str | None
    core: int = 0
    memory: int = 0
    whole: bool = False
    stage: Stage = Stage.APP

    def amount(self, card: Card) -> Amount:
        return Amount(card.core, card.memory, 1) if self.whole else Amount(self.core, self.memory, 1)

    def is_on(self, card: Card) -> bool:
        return self.card is None or self.card in (card.index, card.uuid)


@dataclass(frozen=True, slots=True)
class Holding:
    """The shares of one pod on one node, in the start order of its containers. `bound`: seen on the API so.

    wishes: those under which it got them; its groups hold what it holds.
    """

    uid: str
    namespace: str
    name: str
    node: str
    dialect: str
    shares: tuple[Share, ...]
    bound: bool = True
    wishes: Wishes = NONE

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    def uses(self, card: Card) -> Amount:
        return peak((s.stage, s.amount(card)) for s in self.shares if s.is_on(card))

    def is_known_on(self, card: Card) -> bool:
        return any(s.card is not None and s.is_on(card) for s in self.shares)


def shares_of(ask: Ask, placement: Placement) -> tuple[Share, ...]:
    """The shares that `placement` gives to `ask`."""
    return tuple(
        Share(c.container, index, c.core, c.memory, c.whole, c.stage)
        for c in ask.containers
        for index in placement.cards(c.container)
    )


def unknown_shares(ask: Ask) -> tuple[Share, ...]:
    """The shares of a pod that runs on cards nobody can tell: held everywhere on its node."""
    return tuple(Share(c.container, None, c.core, c.memory, c.whole, c.stage) for c in ask.containers)


class Ledger:
    """Not thread-safe: its owner serialises all calls. What it returns is immutable."""

    def __init__(self) -> None:
        self._cards: dict[str, tuple[Card, ...]] = {}
        self._holdings: dict[str, Holding] = {}
        self._on_node: dict[str, dict[str, Holding]] = {}
        self._states: dict[str, tuple[CardState, ...]] = {}
        self._members: dict[Group, dict[str, Holding]] = {}
        self._used: dict[str, list[tuple[int, Amount]]] = {}

    def set_cards(self, node: str, cards: tuple[Card, ...] | None) -> None:
        """The cards of a node as they are now; None: the node has none any more. Holdings stay."""
        if cards is None:
            self._cards.pop(node, None)
        else:
            self._cards[node] = tuple(sorted(cards, key=lambda card: card.index))
        for uid in self._on_node.get(node, {}):
            self._used.pop(uid, None)
        self._states.pop(node, None)

    def hold(self, holding: Holding) -> None:
        """Record a pod's shares, in place of what its UID held before."""
        self.release(holding.uid)
        self._holdings[holding.uid] = holding
        self._on_node.setdefault(holding.node, {})[holding.uid] = holding
        for group in holding.wishes.groups:
            self._members.setdefault(group, {})[holding.uid] = holding
        self._states.pop(holding.node, None)

    def release(self, uid: str) -> Holding | None:
        """Forget what a UID holds; the holding, or None where there was none."""
        holding = self._holdings.pop(uid, None)
        self._used.pop(uid, None)
        if holding is not None:
            on_node = self._on_node[holding.node]
            del on_node[uid]
            if not on_node:
                del self._on_node[holding.node]
            for group in holding.wishes.groups:
                del self._members[group][uid]
                if not self._members[group]:
                    del self._members[group]
            self._states.pop(holding.node, None)
        return holding

    def holding(self, uid: str) -> Holding | None:
        return self._holdings.get(uid)

    def holdings(self, node: str | None = None) -> tuple[Holding, ...]:
        """All holdings, or those of a node, ordered by namespace, name and UID."""
        found = self._holdings if node is None else self._on_node.get(node, {})
        return tuple(sorted(found.values(), key=lambda h: (h.namespace, h.name, h.uid)))

    def nodes(self) -> Mapping[str, tuple[Card, ...]]:
        return MappingProxyType(self._cards)

    def cards(self, node: str, without: str = "") -> tuple[CardState, ...]:
        """The cards of a node by index and what is held of each; () for a node without cards.

        without: a pod UID whose own holding is left out (deciding again for the same pod).
        """
        if without and without in self._on_node.get(node, {}):
            return self._derive(node, without)
        if node not in self._states:
            self._states[node] = self._derive(node)
        return self._states[node]

    def members(self, group: Group) -> tuple[Holding, ...]:
        """What the pods of a group hold, in no order that means anything."""
        return tuple(self._members.get(group, {}).values())

    def seats(self, group: Group | None, without: str = "") -> tuple[Seat, ...]:
        """The cards that a group holds, each once, by node and card; () for no group. without: as above."""
        held = [h for h in (self.members(group) if group else ()) if h.uid != without]
        seats = {Seat(h.node, self._name(h.node, share.card)) for h in held for share in h.shares}
        return tuple(sorted(seats, key=lambda seat: (seat.node, len(seat.card), seat.card)))

    def groups(self) -> tuple[Group, ...]:
        """Those that hold anything, in order."""
        return tuple(sorted(self._members))

    def _name(self, node: str, card: int | str | None) -> str:
        """A card by its index, however the record names it; "" where that is not known."""
        if isinstance(card, str):
            return next((str(c.index) for c in self._cards.get(node, ()) if c.uuid == card), card)
        return "" if card is None else str(card)

    def _derive(self, node: str, without: str = "") -> tuple[CardState, ...]:
        cards, held = self._cards.get(node, ()), [h for u, h in self._on_node.get(node, {}).items() if u != without]
        uses = [Amount()] * len(cards)
        for holding in held:
            for position, amount in self._uses(holding, cards):
                core, memory, shares = uses[position]
                uses[position] = Amount(core + amount.core, memory + amount.memory, shares + amount.shares)
        grouped = [(h, h.wishes.groups) for h in held if h.wishes.spread or h.wishes.same_card]
        return tuple(
            CardState(
                card,
                used.core,
                used.memory,
                used.shares,
                frozenset(g for h, its in grouped for g in its if h.is_known_on(card)) if grouped else frozenset(),
            )
            for card, used in zip(cards, uses, strict=True)
        )

    def _uses(self, holding: Holding, cards: Sequence[Card]) -> list[tuple[int, Amount]]:
        """The cards that it is on, by position, and what it uses of each: worked out once while neither changes."""
        if holding.uid not in self._used:
            amounts = enumerate(map(holding.uses, cards))
            self._used[holding.uid] = [(position, amount) for position, amount in amounts if amount.shares]
        return self._used[holding.uid]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ledger):
            return NotImplemented
        return (self._cards, self._holdings) == (other._cards, other._holdings) and all(
            self.cards(node) == other.cards(node) for node in self._cards
        )

    __hash__ = None  # type: ignore[assignment]
