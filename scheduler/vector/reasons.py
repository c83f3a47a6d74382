"""Why a container cannot be placed even alone, for many nodes: in the words of `refusals`, each made once.

A node's reason lists the refusals of its cards, the most frequent first, then in alphabetical order. So the words are
numbered in that order, and the nodes are worked out in numbers.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mgpu.model.asks import Ask, ContainerAsk, Rejection
from scheduler.placement.refusals import refusal, short, unplaceable
from scheduler.vector.fits import serving
from scheduler.vector.rows import CORE, CORE_FREE, HEALTH, MEMORY, MEMORY_FREE, SHARES, UNHEALTHY, Ints, Mask, Rows

_NONE = 1 << 62
_ROOM, _SHARES, _IDLE, _HEALTH, _BAR = range(5)
_KINDS = 5
_TABLE = 1 << 20
_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30


def told(found: Rejection) -> str:
    """Readable behind the number of nodes: `0/3 nodes are available: 2 insufficient GPU (8 cards: 8 unhealthy)`."""
    return str(found) if found.reason else f"insufficient GPU ({found})"


def reasons(rows: Rows, ask: Ask, container: ContainerAsk) -> list[str]:
    """For each node `told` of what `unplaceable` says; this container is the first of the ask that cannot be placed."""
    able = serving(rows, container, ask)
    refused = (rows.data[HEALTH] > 0) & ~able
    words = _words(rows, ask, container, refused)
    counted = _counted(np.where(refused, words.codes, _NONE), _bits(words.first) + _bits(words.second))
    pieces, ends = _pieces(words, counted)
    heads = _heads(rows, ask, able.sum(axis=1), refused.sum(axis=1))
    spans = zip(heads, pairwise([0, *ends]), strict=True)
    return [f"{head}{''.join(pieces[begin:end])})" for head, (begin, end) in spans]


class _Words(NamedTuple):
    """What is said of cards, in two parts: `core 20 percent short` and ` and memory 4.0 GiB short`.

    first, second: the parts, each once and in order. codes: n × cards, both parts' numbers in one, in order too;
    whatever it says of a card that is not refused.
    """

    first: list[str]
    second: list[str]
    codes: Ints


def _words(rows: Rows, ask: Ask, container: ContainerAsk, refused: Mask) -> _Words:
    core = rows.data[CORE] if container.whole else container.core
    memory = rows.data[MEMORY] if container.whole else container.memory
    # As `refusal` has it: what comes last here is the reason, whatever else could be said.
    lacks = np.full(refused.shape, _ROOM)
    if ask.max_shares:
        lacks[rows.data[SHARES] >= ask.max_shares] = _SHARES
    if container.whole:
        lacks[rows.data[SHARES] > 0] = _IDLE
    lacks[rows.data[HEALTH] == UNHEALTHY] = _HEALTH
    if rows.bars is not None:
        lacks[rows.bars > 0] = _BAR
    room = refused & (lacks == _ROOM)
    core_short = np.where(room, np.maximum(core - rows.data[CORE_FREE], 0), 0)
    memory_short = np.where(room, np.maximum(memory - rows.data[MEMORY_FREE], 0), 0)
    detail = np.where(lacks == _SHARES, rows.data[SHARES], core_short)
    if rows.bars is not None:
        detail = np.where(lacks == _BAR, rows.bars, detail)
    first_kind, one = _distinct(detail * _KINDS + lacks)
    first = [
        short(amount, 0) if fits else _said(rows, ask, container, *divmod(i, refused.shape[1]))
        for i, fits, amount in zip(one, room.ravel()[one].tolist(), core_short.ravel()[one].tolist(), strict=True)
    ]
    second_kind, one = _distinct(2 * _alike(memory_short) + (core_short > 0))
    second = [
        f" and {short(0, amount)}" if core and amount else short(0, amount)
        for core, amount in zip(core_short.ravel()[one].tolist(), memory_short.ravel()[one].tolist(), strict=True)
    ]
    # Where no core is short, the words begin with `memory`.
    first, first_rank = _in_order(first, key=lambda word: word or "memory")
    second, second_rank = _in_order(second)
    codes = (first_rank[first_kind] << _bits(second)) | second_rank[second_kind]
    return _Words(first, second, codes.reshape(refused.shape))


def _said(rows: Rows, ask: Ask, container: ContainerAsk, row: int, column: int) -> str:
    bar = "" if rows.bars is None else rows.bar_texts[rows.bars[row, column]]
    cards = rows.cards[row]
    return refusal(cards[column], container, ask.max_shares, bar) or "" if column < len(cards) else ""


def _bits(words: Sequence[str]) -> int:
    return len(words).bit_length()


def _alike(amount: Ints) -> Ints:
    """Equal only for amounts that `format_bytes` writes alike: it rounds at twentieths of a GiB and halves below."""
    found = amount
    for n, (shift, parts) in enumerate(((10, 2), (20, 2), (30, 20)), 1):
        all_parts = amount * parts
        whole, rest = all_parts >> shift, all_parts & ((1 << shift) - 1)
        found = np.where(amount >> shift > 0, (n << 13) + 2 * whole + (rest > 0), found)
    return found


def _counted(codes: Ints, bits: int) -> Ints:
    """Per node each of its codes once, the most frequent first: how many cards lack it, and the code in `bits`."""
    codes = np.sort(codes, axis=1)
    width = codes.shape[1]
    positions, filled = np.arange(width), (codes < _NONE).sum(axis=1)[:, None]
    begins = positions < filled
    begins[:, 1:] &= codes[:, 1:] != codes[:, :-1]
    ahead = np.where(begins, positions, filled)
    following = np.minimum.accumulate(np.hstack((ahead, filled))[:, :0:-1], axis=1)[:, ::-1]
    return np.sort(np.where(begins, ((width - following + positions) << bits) | codes, _NONE), axis=1)


def _pieces(words: _Words, counted: Ints) -> tuple[list[str], list[int]]:
    """`3 core 20 percent short`, ` and memory 4.0 GiB short`, …: two for each; and after how many a node ends."""
    first_bits, second_bits = _bits(words.first), _bits(words.second)
    listed = counted < _NONE
    begun = np.cumsum(listed, axis=1) > 1
    run = counted[listed]
    forms = 2 * (run >> second_bits) + begun[listed]
    form, one = _distinct(forms)
    made = []
    for f in forms[one].tolist():
        missing, word = divmod(f >> 1, 1 << first_bits)
        made.append(f"{', ' if f & 1 else ''}{counted.shape[1] - missing} {words.first[word]}")
    pieces = np.empty((len(run), 2), object)
    pieces[:, 0] = np.array(made, object)[form]
    pieces[:, 1] = np.array(words.second, object)[run & ((1 << second_bits) - 1)]
    return pieces.ravel().tolist(), (2 * np.cumsum(listed.sum(axis=1))).tolist()


def _heads(rows: Rows, ask: Ask, able: Ints, refused: Ints) -> list[str]:
    """`insufficient GPU (8 cards: `, by how many cards can serve and how many cannot."""
    kind, one = _distinct(able * (1 + int(refused.max())) + refused)
    made = []
    for i in one:
        found = unplaceable(ask, rows.cards[i])
        assert found is not None
        cards = f"{len(found.cards)} card{'s' if len(found.cards) != 1 else ''}"
        made.append(f"{found.reason or 'insufficient GPU'} ({cards}: ")
    return [made[k] for k in kind.tolist()]


def _distinct(values: Ints) -> tuple[Ints, list[int]]:
    """For each of `values`, flat, which of the distinct ones it is; and for each of those where there is one."""
    values = values.ravel()
    top = int(values.max()) + 1
    if top > _TABLE:
        _, one, which = np.unique(values, return_index=True, return_inverse=True)
        return which, one.tolist()
    place = np.zeros(top, np.int64)
    place[values] = 1
    kinds = np.flatnonzero(place)
    place[kinds] = np.arange(len(kinds))
    which = place[values]
    one = np.empty(len(kinds), np.int64)
    one[which] = np.arange(len(values))
    return which, one.tolist()


def _in_order(words: Sequence[str], key: Callable[[str], str] = str) -> tuple[list[str], Ints]:
    """Each word once, in order; and of each of `words` its number among them."""
    once = sorted(set(words), key=key)
    number = {word: i for i, word in enumerate(once)}
    return once, np.array([number[word] for word in words], np.int64)
