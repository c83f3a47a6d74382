"""Who holds what of which card.

The ledger keeps each pod's record and each node's cards, and derives the fullness of a node's cards from these
two alone. So it never depends on the order of events, and a release gives back exactly what was taken.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import add
from types import MappingProxyType
from typing import NamedTuple

from mgpu.model.cards import GPU, Card, CardState, noun
from mgpu.model.gpu_requests import Amount, ContainerRequest, GpuRequest, Placement, amount_of, peak, whole_of
from mgpu.model.groups import Group, Seat
from mgpu.model.pod_constraints import NONE, Constraints
from mgpu.model.pods import Pod, Stage
from mgpu.model.slice_names import is_slice, place_of


class Minor(NamedTuple):
    """A card as a record names it that has neither its index nor its UUID."""

    number: int


@dataclass(frozen=True, slots=True)
class Share:
    """What one container holds of one card.

    card: its index, its UUID or its minor, as the record names it; None: not known (an unreadable record), then the
    share is held on every card of the node of this type, since it may be on any.
    whole: all of the card, whatever its size now. memory, ratio: as `amount_of` has it.
    """

    container: str
    card: int | str | Minor | None
    core: int = 0
    memory: int = 0
    whole: bool = False
    stage: Stage = Stage.APP
    ratio: int | None = None
    type: str = GPU

    def amount(self, card: Card) -> Amount:
        return whole_of(card) if self.whole else amount_of(self.core, self.memory, self.ratio, card)

    def is_on(self, card: Card) -> bool:
        if self.type != card.type:
            return False
        if isinstance(self.card, Minor):
            return self.card.number == (card.index if card.minor is None else card.minor)
        return self.card is None or self.card in (card.index, card.uuid)


def share_of(request: ContainerRequest, card: int | str | Minor | None) -> Share:
    """What a container with this ask holds of a card that it got."""
    return Share(
        request.container, card, request.core, request.memory, request.whole, request.stage, request.ratio, request.type
    )


@dataclass(frozen=True, slots=True)
class Holding:
    """The shares of one pod on one node, in the start order of its containers. `bound`: seen on the API so.

    wishes: those under which it got them; its groups hold what it holds.
    gpuid: that of an MtgpuPod. occupies: an occupy pod, which holds the whole card for the MtgpuPods of that GPUID, so
    that on their card what it holds is not counted beside them (docs/design/mtgpu.md, "Accounting").
    """

    uid: str
    namespace: str
    name: str
    node: str
    dialect: str
    shares: tuple[Share, ...]
    bound: bool = True
    constraints: Constraints = NONE
    gpuid: str = ""
    occupies: bool = False

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    def uses(self, card: Card) -> Amount:
        return peak((s.stage, s.amount(card)) for s in self.shares if s.is_on(card))

    def is_on(self, card: Card) -> bool:
        return any(s.is_on(card) for s in self.shares)

    def is_known_on(self, card: Card) -> bool:
        return any(s.card is not None and s.is_on(card) for s in self.shares)


def shares_of(request: GpuRequest, placement: Placement) -> tuple[Share, ...]:
    """The shares that `placement` gives to `ask`."""
    return tuple(
        share_of(c, index)
        for c in (*request.containers, *request.others)
        for index in placement.cards(c.container, c.type)
    )


def unknown_shares(request: GpuRequest, pod: Pod | None = None, *, recorded: bool = False) -> tuple[Share, ...]:
    """Return the shares of a pod whose cards are not known: each is held on every card of its node.

    Args:
        pod: the pod, if only what its node may have handed out counts: cards and slices of its containers that have
            ever run. A container that waits for its cards was handed none. Nothing hands out rdma and fpga, so a
            container that asks for these starts on every node; without a record it holds none of them.
        recorded: whether the pod has a record that cannot be read or does not count: it may name rdma and fpga too.
    """
    requests = (*request.containers, *(one for one in request.others if pod is None or recorded or is_slice(one.type)))
    return tuple(share_of(one, None) for one in requests if pod is None or pod.has_run((one.container,)))


def absent(shares: Iterable[Share], cards: Iterable[Card]) -> tuple[str, ...]:
    """The cards that a record names and that are not among `cards`, as people read them: `minor 7`, `card 3`, a UUID.

    What is held of them counts as soon as they are there.
    """
    there = tuple(cards)
    named = {(s.type, s.card) for s in shares if s.card is not None and not any(s.is_on(card) for card in there)}
    return tuple(sorted(_named(type_, card) for type_, card in named))


def _named(type_: str, card: object) -> str:
    if isinstance(card, Minor):
        return f"{noun(type_)} of minor {card.number}"
    if isinstance(card, int) and is_slice(type_):
        return f"{noun(type_)} {':'.join(map(str, place_of(card)))}"
    return f"{noun(type_)} {card}"


class Ledger:
    """Not thread-safe: its owner serialises all calls. What it returns is immutable."""

    def __init__(self) -> None:
        self._cards: dict[str, tuple[Card, ...]] = {}
        self._holdings: dict[str, Holding] = {}
        self._on_node: dict[str, dict[str, Holding]] = {}
        self._states: dict[str, Mapping[str, tuple[CardState, ...]]] = {}
        self._members: dict[Group, dict[str, Holding]] = {}
        self._used: dict[str, list[tuple[int, Amount]]] = {}

    def set_cards(self, node: str, cards: tuple[Card, ...] | None) -> None:
        """The cards of a node as they are now; None: the node has none any more. Holdings stay."""
        if cards is None:
            self._cards.pop(node, None)
        else:
            self._cards[node] = tuple(sorted(cards, key=lambda card: (card.type, card.index)))
        for uid in self._on_node.get(node, {}):
            self._used.pop(uid, None)
        self._states.pop(node, None)

    def hold(self, holding: Holding) -> None:
        """Record a pod's shares, in place of what its UID held before."""
        self.release(holding.uid)
        self._holdings[holding.uid] = holding
        self._on_node.setdefault(holding.node, {})[holding.uid] = holding
        for group in holding.constraints.groups:
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
            for group in holding.constraints.groups:
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
        """The GPUs of a node by index and what is held of each; () for a node without them.

        without: a pod UID whose own holding is left out (deciding again for the same pod).
        """
        return self._by_type(node, without).get(GPU, ())

    def for_gpuid(self, node: str, gpuid: str, without: str = "") -> tuple[CardState, ...]:
        """The GPUs as the occupy pod of this GPUID finds them: the card that has it alone, as if nobody used it.

        All cards where none has it. without: as above, that pod itself.
        """
        states = self.cards(node, without)
        return tuple(CardState(s.card) for s in states if s.gpuid == gpuid) or states

    def once_gone(self, node: str, uids: Collection[str]) -> tuple[CardState, ...]:
        """All devices of a node, as they will be without what these hold."""
        return self._derive(node, uids)

    def others(self, node: str, without: str = "") -> tuple[CardState, ...]:
        """The same of its devices of other types, by type and index."""
        return tuple(s for type, states in self._by_type(node, without).items() if type != GPU for s in states)

    def _by_type(self, node: str, without: str) -> Mapping[str, tuple[CardState, ...]]:
        if without and without in self._on_node.get(node, {}):
            return _grouped(self._derive(node, (without,)))
        if node not in self._states:
            self._states[node] = _grouped(self._derive(node))
        return self._states[node]

    def members(self, group: Group) -> tuple[Holding, ...]:
        """What the pods of a group hold, in no order that means anything."""
        return tuple(self._members.get(group, {}).values())

    def seats(self, group: Group | None, without: str = "") -> tuple[Seat, ...]:
        """The cards that a group holds, each once, by node and card; () for no group. without: as above."""
        held = [h for h in (self.members(group) if group else ()) if h.uid != without]
        seats = {Seat(h.node, self._name(h.node, s)) for h in held for s in h.shares if s.type == GPU}
        return tuple(sorted(seats, key=lambda seat: (seat.node, len(seat.card), seat.card)))

    def groups(self) -> tuple[Group, ...]:
        """Those that hold anything, in order."""
        return tuple(sorted(self._members))

    def _name(self, node: str, share: Share) -> str:
        """A share's card by its index, however the record names it; "" where that is not known."""
        if isinstance(share.card, str | Minor):
            named = share.card if isinstance(share.card, str) else f"of minor {share.card.number}"
            return next((str(c.index) for c in self._cards.get(node, ()) if share.is_on(c)), named)
        return "" if share.card is None else str(share.card)

    def _derive(self, node: str, without: Collection[str] = ()) -> tuple[CardState, ...]:
        cards, held = self._cards.get(node, ()), [h for u, h in self._on_node.get(node, {}).items() if u not in without]
        uses, gpuids = [Amount()] * len(cards), _gpuids(held, cards)
        for holding in held:
            for position, amount in self._uses(holding, cards):
                if holding.occupies and gpuids[position] == holding.gpuid:
                    amount = Amount(shares=1)
                uses[position] = Amount(*map(add, uses[position], amount))
        grouped = [(h, h.constraints.groups) for h in held if h.constraints.spread or h.constraints.same_card]
        return tuple(
            CardState(
                card,
                used.core,
                used.memory,
                used.shares,
                frozenset(g for h, its in grouped for g in its if h.is_known_on(card)) if grouped else frozenset(),
                used.ratio,
                gpuid,
            )
            for card, used, gpuid in zip(cards, uses, gpuids, strict=True)
        )

    def _uses(self, holding: Holding, cards: Sequence[Card]) -> list[tuple[int, Amount]]:
        """The cards that it is on, by position, and what it uses of each: worked out once while neither changes."""
        if holding.uid not in self._used:
            self._used[holding.uid] = [
                (position, holding.uses(card)) for position, card in enumerate(cards) if holding.is_on(card)
            ]
        return self._used[holding.uid]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ledger):
            return NotImplemented
        return (self._cards, self._holdings) == (other._cards, other._holdings) and all(
            self._by_type(node, "") == other._by_type(node, "") for node in self._cards
        )

    __hash__ = None  # type: ignore[assignment]


def _gpuids(held: Sequence[Holding], cards: Sequence[Card]) -> list[str]:
    """Each card's GPUID, "" for none: where its MtgpuPods are, and while there are none where its occupy pod is.

    An occupy pod that came back on another card than its MtgpuPods use holds that one as any pod does.
    """
    found = [""] * len(cards)
    users = sorted((h for h in held if h.gpuid and not h.occupies), key=lambda h: (h.gpuid, h.uid))
    placed = {h.gpuid for h in users if any(h.is_known_on(card) for card in cards)}
    alone = sorted((h for h in held if h.occupies and h.gpuid not in placed), key=lambda h: (h.gpuid, h.uid))
    for holding in (*users, *alone):
        for position, card in enumerate(cards):
            if not found[position] and holding.is_known_on(card):
                found[position] = holding.gpuid
    return found


def _grouped(states: tuple[CardState, ...]) -> Mapping[str, tuple[CardState, ...]]:
    """By type; they come so."""
    return {type: tuple(of_type) for type, of_type in groupby(states, key=lambda state: state.card.type)}
