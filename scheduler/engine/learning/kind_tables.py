"""Computes what states of nodes of one kind are worth to the weighted types of pods, for many states at once.

`state_rating` calls this module for the policies `fragmentation` and `fgd`. The worth of a node is the sum of

- the value of each of its cards,
- for every type of pod that fits now, the free milli (thousandths of a card) that the type can use, times the type's
  fit weight,
- for every type, the number of pods of the type for which there is capacity, times the type's copy weight.

`tests/scheduler/engine/learning/plain_worth.py` computes the same node by node. Two properties make it fast here:

- What a type that requests one card can use is a sum over the cards of the node. So a table of the types that fit a
  card replaces a computation for each type and state.
- If a pod takes `need` milli of a card, the number of shares of a size that fit on the card falls by the quotient of
  `need` and the size, or by one more. So the states after the pod differ only in which sizes lose one more, which is
  one bit for each type.

Weights and values are whole numbers, and all sums stay below 2^53. So the sums of floats are exact in any order.

The dimensions of arrays are given in brackets. B is the number of states, D the number of different pairs of free CPU
and memory among them, U the number of types that request one card, and V the number of the other types.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler.engine.learning.shapes import CARD, Bools, Ints

Floats = NDArray[np.float64]
Shorts = NDArray[np.int16]
Bytes = NDArray[np.uint8]

MANY_PODS = 1 << 14
"""More pods than the cards of a node have capacity for. It fits 16 bits."""

_MANY_ROWS = 48  # for fewer rows, a search for equal ones takes longer than it saves

Hosting = Callable[[Ints, Ints], Shorts]
"""Returns how many pods of each type free CPU and memory, [D], suffice for, [D, U + V]; MANY_PODS stands for more."""


@dataclass(frozen=True, slots=True, eq=False)
class HostedStates:
    """B states of nodes of one kind, without their cards.

    Attributes:
        hosted: [D, U + V], how many pods of each type each pair of free CPU and memory suffices for.
        pair: [B], the pair of the state.
    """

    hosted: Shorts
    pair: Ints


@dataclass(frozen=True, slots=True, eq=False)
class ShareTable:
    """What a pod takes that requests one card of a node, for A amounts that may be free on the card.

    Attributes:
        need: The milli of the card that the pod takes.
        place: [1001], the position of each amount.
        lost_copies: [A], the worth of the shares that no longer fit, where neither CPU nor memory limits any type.
        surely_lost: [U], how many shares of each type no longer fit, whatever is free on the card.
        loses_more: [A, U bits], the types of which one share more no longer fits.
        lost_rooms: What types that request several cards lose, without repetitions.
        lost_room: [A], the position in `lost_rooms`.
    """

    need: int
    place: Ints
    lost_copies: Floats
    surely_lost: Shorts
    loses_more: Bytes
    lost_rooms: Shorts
    lost_room: Ints


class KindTables:
    """The tables of one kind of nodes: nodes whose cards have the same size, and where the same pods may run."""

    def __init__(
        self,
        cards: Ints,
        milli: Ints,
        weights: Floats,
        card_value: Ints,
        hosting: Callable[[Ints], Hosting],
    ) -> None:
        """Create the tables for T types of pods.

        Args:
            cards: [T], the number of cards that a pod of the type requests.
            milli: [T], the milli that it takes of each of its cards; NEVER if the cards are too small.
            weights: [2, T], the worth of each milli that a type can use, and of capacity for one more pod.
            card_value: [1001], the value of a card by its free milli.
            hosting: Returns the `Hosting` for the types in this order.
        """
        order = np.lexsort((milli, cards > 1))  # the U types that request one card come first
        self.singles = int((cards == 1).sum())
        self.hosting = hosting(order)
        self._value = card_value.astype(np.float64)
        (self._fit, self._fit_several), (self._copy, self._copy_several) = (
            np.split(row[order], [self.singles]) for row in weights
        )
        self._has_copies = bool(weights[1].any())
        self._copy_of_byte = _sums_of_bits(self._copy)
        single_milli, several_milli = np.split(milli[order], [self.singles])
        self._cards = cards[order][self.singles :].astype(np.float32)
        free = np.arange(CARD + 1)
        self._fitting = np.searchsorted(single_milli, free, side="right")
        self._sizes, self._size = np.unique(single_milli, return_inverse=True)
        self._shares = (free[:, None] // self._sizes).astype(np.int16)
        sizes, self._several_size = np.unique(several_milli, return_inverse=True)
        shares = free[:, None] // sizes
        # For each size: whether a share fits, how many fit, and the free milli if one fits.
        self._room = np.stack((shares > 0, shares, free[:, None] * (shares > 0)), axis=1).astype(np.int16)

    def worth(self, states: HostedStates, free: Ints) -> Floats:
        """Return the worth of each state, [B].

        Args:
            free: [B, cards of the node], the free milli of each card.
        """
        worth: Floats = self._of_cards(self._worth_per_milli(states), free).sum(1)
        if self._has_copies:
            copies = np.minimum(self._shares_of_types(free), states.hosted[states.pair, : self.singles])
            worth += np.vecdot(copies.astype(np.float64), self._copy)
        if len(self._cards):
            room = self._room[free].sum(1, dtype=np.int16)
            worth += self._of_several(room, states.hosted[states.pair, self.singles :])
        return worth

    def _worth_per_milli(self, states: HostedStates) -> tuple[Floats, Ints]:
        """Return what a free milli of a card is worth to types that request one card.

        Returns:
            A table with a column for each number of types of which shares fit on the card, in the order of their milli,
            and the row of the table for each state, [B].
        """
        fits = states.hosted[:, : self.singles] > 0
        first, number = runs(fits)
        fits, row = fits[first], number[states.pair]
        table = np.zeros((len(fits), self.singles + 1))
        np.cumsum(fits * self._fit, axis=1, out=table[:, 1:])
        return table, row

    def _of_cards(self, worth_per_milli: tuple[Floats, Ints], free: Ints) -> Floats:
        """Return the value of each card and its worth to types that can use it and request one card, [B, cards]."""
        table, row = worth_per_milli
        of_cards: Floats = self._value[free] + free * table[row[:, None], self._fitting[free]]
        return of_cards

    def _shares_of_types(self, free: Ints) -> Shorts:
        """Return for how many shares of each type that requests one card the cards have capacity, [B, U]."""
        shares: Shorts = self._shares[free].sum(1, dtype=np.int16)
        return shares if len(self._sizes) == self.singles else shares[:, self._size]

    def _of_several(self, room: Shorts, hosted: Shorts) -> Floats:
        """Return the worth to the types that request several cards.

        Args:
            room: [..., 3, sizes], the sums of `self._room` over the cards of each state.
            hosted: [..., V].
        """
        room = room[..., self._several_size]
        cards, shares, usable = room[..., 0, :], room[..., 1, :], room[..., 2, :]
        copies = np.minimum(np.floor(shares / self._cards) * (cards >= self._cards), hosted)
        worth: Floats = np.vecdot((usable * (copies > 0)).astype(np.float64), self._fit_several)
        worth += np.vecdot(copies.astype(np.float64), self._copy_several)
        return worth

    def share(self, need: int, free: Ints) -> ShareTable:
        """Return the table of a pod that takes `need` milli of one card. `free` has the cards that will be rated."""
        present = np.zeros(CARD + 1, np.bool_)
        present[free] = True
        before = np.flatnonzero(present)
        after = np.maximum(before - need, 0)
        surely_lost = need // self._sizes
        lost = self._shares[before] - self._shares[after]
        loses_more: Bools = lost > surely_lost
        lost_rooms, lost_room = _distinct_rooms(self._room[before] - self._room[after])
        return ShareTable(
            need,
            np.cumsum(present) - 1,
            np.vecdot(lost[:, self._size].astype(np.float64), self._copy),
            surely_lost.astype(np.int16)[self._size],
            np.packbits(loses_more[:, self._size], axis=1),
            lost_rooms,
            lost_room,
        )

    def changes(self, share: ShareTable, before: HostedStates, after: HostedStates, free: Ints) -> Floats:
        """Return how the worth of each state changes if the pod takes its share of each of the cards, [B, cards].

        The result is -inf for a card that has less free than the pod takes.

        Args:
            before: The states without the pod.
            after: The states with the pod. It is the same object if the pod requests neither CPU nor memory.
            free: [B, cards], the free milli of each card without the pod.
        """
        worth_per_milli = self._worth_per_milli(before)
        now = untouched = self._of_cards(worth_per_milli, free)
        if after is not before:
            worth_per_milli = self._worth_per_milli(after)
            untouched = self._of_cards(worth_per_milli, free)
        taken = self._of_cards(worth_per_milli, np.maximum(free - share.need, 0))
        changes: Floats = taken - untouched + (untouched.sum(1) - now.sum(1))[:, None]
        if self._has_copies:
            changes += self._changes_of_copies(share, before, after, free)
        if len(self._cards):
            changes += self._changes_of_several(share, before, after, free)
        changes[free < share.need] = -np.inf
        return changes

    def _changes_of_copies(self, share: ShareTable, before: HostedStates, after: HostedStates, free: Ints) -> Floats:
        changes: Floats
        if (after.hosted[:, : self.singles].min(0) >= free.shape[1] * self._shares[CARD, self._size]).all():
            changes = -share.lost_copies[share.place[free]]  # neither CPU nor memory limits any type
            return changes
        shares = self._shares_of_types(free)
        left = shares - share.surely_lost
        hosted = after.hosted[after.pair, : self.singles]
        copies = np.minimum(left, hosted) - np.minimum(shares, before.hosted[before.pair, : self.singles])
        # A type loses one more pod if it loses one more share, and if its shares, not CPU or memory, limit its pods.
        loses: Bytes = np.packbits(left <= hosted, axis=1)[:, None] & share.loses_more[share.place[free]]
        lost = np.einsum("bcn->bc", self._copy_of_byte.take(loses + 256 * np.arange(loses.shape[2])))
        changes = np.vecdot(copies.astype(np.float64), self._copy)[:, None] - lost
        return changes

    def _changes_of_several(self, share: ShareTable, before: HostedStates, after: HostedStates, free: Ints) -> Floats:
        room = self._room[free].sum(1, dtype=np.int16)
        now = self._of_several(room, before.hosted[before.pair, self.singles :])
        hosted = after.hosted[after.pair, None, self.singles :]
        lost = share.lost_room[share.place[free]]
        # Often there are fewer different losses than cards, because most of these types request whole cards.
        if len(share.lost_rooms) < free.shape[1]:
            then = self._of_several(room[:, None] - share.lost_rooms, hosted)[np.arange(len(lost))[:, None], lost]
        else:
            then = self._of_several(room[:, None] - share.lost_rooms[lost], hosted)
        changes: Floats = then - now[:, None]
        return changes


def runs(rows: NDArray[np.generic]) -> tuple[Ints | slice, Ints]:
    """Return which rows begin a run of equal rows, and the number of the run of each row.

    A few rows all count as different, because a comparison would take longer than it saves.
    """
    if len(rows) < _MANY_ROWS:
        return slice(None), np.arange(len(rows))
    new = np.ones(len(rows), np.bool_)
    np.any(rows[1:] != rows[:-1], axis=1, out=new[1:])
    return np.flatnonzero(new), np.cumsum(new) - 1


def _distinct_rooms(rooms: Shorts) -> tuple[Shorts, Ints]:
    """Return the rooms without repetitions, unless they are few, and the position of each room among them."""
    if len(rooms) < _MANY_ROWS:
        return rooms, np.arange(len(rooms))
    distinct, position = np.unique(rooms, axis=0, return_inverse=True)
    return distinct, position.ravel()


def _sums_of_bits(weights: Floats) -> Floats:
    """Return the sum of the weights whose bits are set, [bytes · 256], for each byte and value of the byte.

    The bits are those of `np.packbits`.
    """
    of_bytes = np.concatenate((weights, np.zeros(-len(weights) % 8))).reshape(-1, 8)
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)
    sums: Floats = np.vecdot(of_bytes[:, None], bits.astype(np.float64)).ravel()
    return sums
