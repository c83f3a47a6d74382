"""Defines the ledger, which stores which pod holds how much of which card.

A ledger stores each pod's holding and each node's cards, and derives the state of the cards from these two alone. So
the state never depends on the order of events, and releasing a holding frees exactly what the holding took.
`scheduler.cluster` owns the ledger of the cluster and serializes all calls. Code that only shows or examines cards
creates a ledger of its own.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import add
from types import MappingProxyType
from typing import NamedTuple

from mgpu.model.cards import GPU, Card, CardState, noun
from mgpu.model.gpu_requests import Amount, ContainerRequest, GpuRequest, Placement, amount_of, peak, whole_card_amount
from mgpu.model.groups import Group, GroupCard
from mgpu.model.pod_constraints import NO_CONSTRAINTS, Constraints
from mgpu.model.pods import Pod, Stage
from mgpu.model.slice_names import is_slice, place_of


class Minor(NamedTuple):
    """The minor number of a card (`Card.minor`), for an allocation record with neither its index nor its UUID."""

    number: int


@dataclass(frozen=True, slots=True)
class Share:
    """The part of one card that one container holds.

    Attributes:
        card: the index, the UUID or the minor of the card, whichever the allocation record contains. None means that
            the card is unknown. The share is then held on every card of this type on the node.
        core: the core in milli.
        memory: the memory in bytes.
        whole: whether the container holds the whole card.
        ratio: the memory in percent; None if the request states no percentage (`amount_of`).
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
        return whole_card_amount(card) if self.whole else amount_of(self.core, self.memory, self.ratio, card)

    def is_on(self, card: Card) -> bool:
        # Every view of a node calls this for each card, so the frequent cases are compared first.
        if self.type != card.type:
            return False
        own = self.card
        if own is None or own == card.index or own == card.uuid:
            return True
        return isinstance(own, Minor) and own.number == (card.index if card.minor is None else card.minor)


def share_of(request: ContainerRequest, card: int | str | Minor | None) -> Share:
    return Share(
        request.container, card, request.core, request.memory, request.whole, request.stage, request.ratio, request.type
    )


@dataclass(frozen=True, slots=True)
class Holding:
    """The shares of one pod on one node, in the start order of its containers.

    Attributes:
        dialect: the name of the vocabulary.
        bound: whether the binding is observed; False for a reservation.
        constraints: the constraints of the pod. Its cards are also cards of the groups that the constraints name.
        gpuid: the GPUID of an MtgpuPod or occupy pod; "" for other pods.
        occupies: whether the pod is an occupy pod, which holds a whole card for the MtgpuPods of its GPUID. The amount
            that it holds of this card is not added to theirs (docs/design/mtgpu.md, "Accounting").
    """

    uid: str
    namespace: str
    name: str
    node: str
    dialect: str
    shares: tuple[Share, ...]
    bound: bool = True
    constraints: Constraints = NO_CONSTRAINTS
    gpuid: str = ""
    occupies: bool = False

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    def uses(self, card: Card) -> Amount:
        shares = [s for s in self.shares if s.is_on(card)]
        # Most pods have one share of a card, and its amount is the peak.
        return shares[0].amount(card) if len(shares) == 1 else peak((s.stage, s.amount(card)) for s in shares)

    def is_on(self, card: Card) -> bool:
        for share in self.shares:  # any() with a generator takes twice as long.  # noqa: SIM110
            if share.is_on(card):
                return True
        return False

    def is_known_on(self, card: Card) -> bool:
        return any(s.card is not None and s.is_on(card) for s in self.shares)


def shares_of(request: GpuRequest, placement: Placement) -> tuple[Share, ...]:
    return tuple(
        share_of(c, index)
        for c in (*request.containers, *request.others)
        for index in placement.cards(c.container, c.type)
    )


def unknown_shares(request: GpuRequest, pod: Pod | None = None, *, recorded: bool = False) -> tuple[Share, ...]:
    """Return the shares of a pod whose cards are unknown. Each share is held on every card of the node.

    Args:
        pod: the pod, or None. If it is given, only the shares that the node may have allocated are returned: the cards
            and slices of containers that have ever run. Nothing on a node allocates rdma and fpga, so without a record
            no container holds any.
        recorded: whether the pod has an allocation record that cannot be read or is not valid. Such a record may name
            rdma and fpga too.
    """
    requests = (*request.containers, *(one for one in request.others if pod is None or recorded or is_slice(one.type)))
    return tuple(share_of(one, None) for one in requests if pod is None or pod.has_run((one.container,)))


def missing_cards(shares: Sequence[Share], cards: Iterable[Card]) -> tuple[str, ...]:
    """Return a text such as `card of minor 7` or `card 3` for each card of `shares` that is not among `cards`.

    The shares of these cards have no effect until the node reports the cards.
    """
    reported = tuple(cards)
    if all(position_of(share, reported) is not None for share in shares):
        return ()
    named = {(s.type, s.card) for s in shares if s.card is not None and not any(s.is_on(card) for card in reported)}
    return tuple(sorted(_named(type_, card) for type_, card in named))


def position_of(share: Share, cards: Sequence[Card]) -> int | None:
    """Return the position of the only card that a share is on, if it is where it usually is; otherwise None.

    On most nodes the position of a card is its index, by which most records name it.
    """
    index = share.card
    if not isinstance(index, int) or not 0 <= index < len(cards):
        return None
    card = cards[index]
    return index if card.index == index and card.type == share.type else None


def _named(type_: str, card: object) -> str:
    if isinstance(card, Minor):
        return f"{noun(type_)} of minor {card.number}"
    if isinstance(card, int) and is_slice(type_):
        return f"{noun(type_)} {':'.join(map(str, place_of(card)))}"
    return f"{noun(type_)} {card}"


class Ledger:
    """The holdings of all pods and the cards of all nodes.

    A Ledger is not thread-safe. The values that it returns are immutable, except for the mapping that `nodes` returns,
    which changes with the ledger.
    """

    def __init__(self) -> None:
        self._cards: dict[str, tuple[Card, ...]] = {}  # by node
        self._holdings: dict[str, Holding] = {}  # by UID
        self._on_node: dict[str, dict[str, Holding]] = {}  # by node and UID
        self._members: dict[Group, dict[str, Holding]] = {}  # by group and UID
        # Caches: the states of each node's devices by type, and the amounts of each holding (see `_uses`).
        self._states: dict[str, Mapping[str, tuple[CardState, ...]]] = {}
        self._used: dict[str, list[tuple[int, Amount]]] = {}

    def set_cards(self, node: str, cards: tuple[Card, ...] | None) -> None:
        """Set the cards of a node, or remove them if `cards` is None. Holdings on the node stay."""
        if cards is None:
            self._cards.pop(node, None)
        else:
            self._cards[node] = tuple(sorted(cards, key=lambda card: (card.type, card.index)))
        for uid in self._on_node.get(node, {}):
            self._used.pop(uid, None)
        self._states.pop(node, None)

    def hold(self, holding: Holding) -> None:
        """Store a pod's holding, which replaces an earlier holding of the same UID."""
        self.release(holding.uid)
        self._holdings[holding.uid] = holding
        self._on_node.setdefault(holding.node, {})[holding.uid] = holding
        for group in holding.constraints.groups:
            self._members.setdefault(group, {})[holding.uid] = holding
        self._states.pop(holding.node, None)

    def release(self, uid: str) -> Holding | None:
        """Remove and return the holding of a UID, or return None if there is none."""
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
        """Return the holdings on a node, or all holdings, ordered by namespace, name and UID."""
        found = self._holdings if node is None else self._on_node.get(node, {})
        return tuple(sorted(found.values(), key=lambda h: (h.namespace, h.name, h.uid)))

    def nodes(self) -> Mapping[str, tuple[Card, ...]]:
        return MappingProxyType(self._cards)

    def cards(self, node: str, without: str = "") -> tuple[CardState, ...]:
        """Return the state of each GPU of a node, by index; () for a node without GPUs.

        Args:
            without: the UID of a pod whose holding is ignored, so that cards can be decided for this pod again.
        """
        return self._by_type(node, without).get(GPU, ())

    def states_for_gpuid(self, node: str, gpuid: str, without: str = "") -> tuple[CardState, ...]:
        """Return the states of the GPUs that the occupy pod of a GPUID may get.

        If cards of the node have the GPUID already, the result has only these, and their states are idle. Otherwise it
        has all GPUs.

        Args:
            without: the UID of the occupy pod, as in `cards`.
        """
        states = self.cards(node, without)
        return tuple(CardState(s.card) for s in states if s.gpuid == gpuid) or states

    def states_without(self, node: str, uids: Collection[str]) -> tuple[CardState, ...]:
        """Return the states of all devices of a node, ignoring the holdings of these UIDs."""
        return self._derive(node, uids)

    def others(self, node: str, without: str = "") -> tuple[CardState, ...]:
        """Return the states of a node's other devices, by type and index. `without` is as in `cards`."""
        return tuple(s for type, states in self._by_type(node, without).items() if type != GPU for s in states)

    def _by_type(self, node: str, without: str) -> Mapping[str, tuple[CardState, ...]]:
        if without and without in self._on_node.get(node, {}):
            return _grouped(self._derive(node, (without,)))
        if node not in self._states:
            self._states[node] = _grouped(self._derive(node))
        return self._states[node]

    def members(self, group: Group) -> tuple[Holding, ...]:
        """Return the holdings of a group's pods in no particular order."""
        return tuple(self._members.get(group, {}).values())

    def group_cards(self, group: Group | None, without: str = "") -> tuple[GroupCard, ...]:
        """Return the cards that a group holds, by node and card; () if `group` is None. `without` is as in `cards`."""
        if group is None:
            return ()
        held = [h for h in self.members(group) if h.uid != without]
        cards = {GroupCard(h.node, self._name(h.node, s)) for h in held for s in h.shares if s.type == GPU}
        return tuple(sorted(cards, key=lambda card: (card.node, len(card.card), card.card)))

    def groups(self) -> tuple[Group, ...]:
        """Return the groups that hold cards, in ascending order."""
        return tuple(sorted(self._members))

    def _name(self, node: str, share: Share) -> str:
        """Return `GroupCard.card` for the card of a share."""
        if isinstance(share.card, str | Minor):
            named = share.card if isinstance(share.card, str) else f"of minor {share.card.number}"
            return next((str(c.index) for c in self._cards.get(node, ()) if share.is_on(c)), named)
        return "" if share.card is None else str(share.card)

    def _derive(self, node: str, without: Collection[str] = ()) -> tuple[CardState, ...]:
        cards = self._cards.get(node, ())
        held = [h for uid, h in self._on_node.get(node, {}).items() if uid not in without]
        uses = [Amount()] * len(cards)
        gpuids = _gpuids(held, cards)
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
        """Return the position and the amount of each card that a holding is on.

        The result is cached until the holding or the cards of the node change.
        """
        used = self._used.get(holding.uid)
        if used is None:
            position = position_of(holding.shares[0], cards) if len(holding.shares) == 1 else None
            if position is None:
                used = [(at, holding.uses(card)) for at, card in enumerate(cards) if holding.is_on(card)]
            else:
                used = [(position, holding.uses(cards[position]))]
            self._used[holding.uid] = used
        return used

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ledger):
            return NotImplemented
        return (self._cards, self._holdings) == (other._cards, other._holdings) and all(
            self._by_type(node, "") == other._by_type(node, "") for node in self._cards
        )

    __hash__ = None  # type: ignore[assignment]


def _gpuids(held: Sequence[Holding], cards: Sequence[Card]) -> list[str]:
    """Return each card's GPUID, or "" for none.

    A GPUID belongs to the card of its MtgpuPods, or to the card of its occupy pod if no MtgpuPod has a known card yet.
    An occupy pod on another card than its MtgpuPods holds that card as any other pod would.
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
    """Return the states by type. The states must be in the order in which `set_cards` stores the cards."""
    return {type: tuple(of_type) for type, of_type in groupby(states, key=lambda state: state.card.type)}
