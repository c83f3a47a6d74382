"""Why a container cannot be placed even alone, for many nodes: the engine's words, made once for nodes that are alike.

kube-scheduler counts how many nodes gave which reason and writes all reasons into the pod's condition, uncut
(handleSchedulingFailure; only the Event is cut, at 1,024 bytes). 5,000 nodes, each with amounts of its own, would make
more than the 1.5 MiB that etcd takes. So beyond MOST different reasons they are given without amounts.
"""

from collections.abc import Sequence

import numpy as np

from mgpu.model.asks import Ask, ContainerAsk, Rejection
from scheduler.placement.refusals import alone
from scheduler.placement.wishing import bars
from scheduler.vector.fits import serving
from scheduler.vector.rows import CORE, CORE_FREE, HEALTH, MEMORY, MEMORY_FREE, SHARES, UNHEALTHY, Ints, Rows

MOST = 50
_LARGEST = 1 << 62

_ABSENT, _SERVES, _CORE, _MEMORY, _BOTH, _SHARES, _IN_USE, _UNHEALTHY, _BARRED = range(9)
"""What is said of a card, roughly; each text of wishes is one more, from _BARRED on."""


def told(found: Rejection) -> str:
    """Readable behind the number of nodes: `0/3 nodes are available: 2 insufficient GPU (8 cards: 8 unhealthy)`."""
    return str(found) if found.reason else f"insufficient GPU ({found})"


def reasons(rows: Rows, ask: Ask, container: ContainerAsk) -> list[str]:
    """`told` of each node, where this container is the first of the ask that cannot be placed."""
    core_short = (rows.data[CORE] if container.whole else container.core) - rows.data[CORE_FREE]
    memory_short = (rows.data[MEMORY] if container.whole else container.memory) - rows.data[MEMORY_FREE]
    kinds = _kinds(rows, ask, container, core_short, memory_short)

    def exactly(count: int) -> Sequence[int]:
        some = kinds[:count]
        short = (some >= _CORE) & (some <= _BOTH)
        core = np.where(some == _SHARES, rows.data[SHARES, :count], np.where(short, core_short[:count].clip(0), 0))
        return _alike(np.hstack((some, core, np.where(short, memory_short[:count].clip(0), 0))), MOST)

    exact = exactly(4 * MOST) and exactly(len(rows))  # the first ones mostly tell that there are too many
    alike = exact or _roughly_alike(kinds)
    texts: dict[int, str] = {}
    for i in set(alike):
        found = alone(ask, container, rows.cards[i], bars(ask, rows.cards[i]), roughly=not exact)
        assert found is not None
        texts[i] = told(found)
    return [texts[i] for i in alike]


def _kinds(rows: Rows, ask: Ask, container: ContainerAsk, core_short: Ints, memory_short: Ints) -> Ints:
    """n × cards: as `refusal` has it; what comes last here comes first there."""
    kinds = np.where(core_short > 0, np.where(memory_short > 0, _BOTH, _CORE), _MEMORY)
    if ask.max_shares:
        kinds[rows.data[SHARES] >= ask.max_shares] = _SHARES
    if container.whole:
        kinds[rows.data[SHARES] > 0] = _IN_USE
    kinds[rows.data[HEALTH] == UNHEALTHY] = _UNHEALTHY
    if rows.bars is not None:
        kinds = np.where(rows.bars > 0, _BARRED + rows.bars, kinds)
    kinds[serving(rows, container, ask)] = _SERVES
    kinds[rows.data[HEALTH] == 0] = _ABSENT
    return kinds


def _roughly_alike(kinds: Ints) -> Sequence[int]:
    """For each node the first that has as many cards of each kind. Numbers are found faster than their bytes."""
    base = int(kinds.max(initial=0)) + 1
    code, codes = np.zeros(len(kinds), np.int64), 1
    for column in np.sort(kinds.astype(np.int16), axis=1).T:
        if codes > _LARGEST // base:
            known, code = np.unique(code, return_inverse=True)
            codes = len(known)
        code, codes = code * base + column, codes * base
    first: dict[int, int] = {}
    return [first.setdefault(one, i) for i, one in enumerate(code.tolist())]


def _alike(table: Ints, most: int) -> Sequence[int]:
    """For each row the first one that is equal; () where there are more than `most` different ones."""
    text, size = np.ascontiguousarray(table).tobytes(), table[:1].nbytes
    first: dict[bytes, int] = {}
    found = []
    for i in range(len(table)):
        found.append(first.setdefault(text[i * size : (i + 1) * size], i))
        if len(first) > most:
            return ()
    return found
