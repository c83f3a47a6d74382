"""Why nodes are refused, for many of them: the engine's words, made once for nodes that are alike.

kube-scheduler counts how many nodes gave which reason and writes all reasons into the pod's condition, uncut
(handleSchedulingFailure; only the Event is cut, at 1,024 bytes). 5,000 nodes, each with amounts of its own, would make
more than the 1.5 MiB that etcd takes. So beyond MOST different reasons they are given without amounts.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mgpu.model.gpu_requests import ContainerRequest, GpuRequest, Rejection
from scheduler.engine.arrays.node_fits import NodeVerdicts, hopeless, serving, taken
from scheduler.engine.arrays.node_table import (
    CORE_FREE,
    COUNT,
    HEALTH,
    MEMORY_FREE,
    RATIO_FREE,
    SHARES,
    UNHEALTHY,
    Ints,
    NodeArrays,
    Places,
)
from scheduler.engine.rejections import alone, impossible

MOST = 50
_LARGEST = 1 << 61

_ABSENT, _SERVES, _CORE, _MEMORY, _BOTH, _SHARES, _IN_USE, _UNHEALTHY, _BARRED = range(9)
"""What is said of a card, roughly; each text of wishes is one more, from _BARRED on."""


Kinds = npt.NDArray[np.int32]


class Refusal(NamedTuple):
    """The rejection of all these nodes, summed up (`Rejection.summary`)."""

    nodes: Places
    rejection: Rejection


def refusals(rows: NodeArrays, at: Places, sifted: NodeVerdicts, request: GpuRequest) -> Iterator[Refusal]:
    """What the engine says of the nodes that are refused. at, sifted: the rows of the nodes asked about."""
    few = np.flatnonzero(sifted.too_few)
    for alike in _groups(rows.totals[COUNT].take(at[few])):
        rejection = impossible(request, rows.cards(at[few[alike[0]]]))
        assert rejection is not None
        yield Refusal(few[alike], rejection)
    for number in sorted(set(sifted.alone.tolist()) - {-1}):
        nodes = np.flatnonzero(sifted.alone == number)
        for alike, rejection in _alone(rows, at[nodes], request, request.containers[number]):
            yield Refusal(nodes[alike], rejection)


def _alone(rows: NodeArrays, places: Places, request: GpuRequest, container: ContainerRequest) -> Iterator[Refusal]:
    """Of nodes where this container is the first of the ask that cannot be placed even alone."""
    kinds = _kinds(rows, request, container).take(places, axis=0)
    without_hope = hopeless(rows, request).take(places)
    few = _exactly_alike(rows, places[: 4 * MOST], container, kinds) is not None  # it mostly shows on the first
    exact = _exactly_alike(rows, places, container, kinds) if few else None
    alike = _roughly_alike(kinds) if exact is None else exact
    for nodes in _groups(2 * alike + without_hope):
        first = places[nodes[0]]
        found = alone(request, container, rows.cards(first), rows.excluded(first), roughly=exact is None)
        assert found is not None
        yield Refusal(nodes, replace(found.summary(), hopeless=bool(without_hope[nodes[0]])))


def _kinds(rows: NodeArrays, request: GpuRequest, container: ContainerRequest) -> Kinds:
    """n × cards: as `refusal` has it; what comes last here comes first there."""
    core, memory, ratio = taken(rows.data, container)
    core_short, memory_short = rows.data[CORE_FREE] < core, rows.data[MEMORY_FREE] < memory
    if container.ratio is not None or container.whole:
        memory_short |= rows.data[RATIO_FREE] < ratio
    kinds = np.where(core_short, np.where(memory_short, _BOTH, _CORE), _MEMORY).astype(np.int32)
    if request.max_shares:
        kinds[rows.data[SHARES] >= request.max_shares] = _SHARES
    if container.whole:
        kinds[rows.data[SHARES] > 0] = _IN_USE
    kinds[rows.data[HEALTH] == UNHEALTHY] = _UNHEALTHY
    if rows.exclusion is not None:
        np.copyto(kinds, _BARRED + rows.exclusion, "unsafe", where=rows.exclusion > 0)
    kinds[serving(rows, container, request)] = _SERVES
    kinds[rows.data[HEALTH] == 0] = _ABSENT
    return kinds


def _exactly_alike(rows: NodeArrays, places: Places, container: ContainerRequest, kinds: Kinds) -> Ints | None:
    """The same number for nodes with the same amounts; None where there are more than MOST different ones.

    kinds: of these, and perhaps of further ones.
    """
    kinds, data = kinds[: len(places)], rows.data.take(places, axis=1)
    short = (kinds >= _CORE) & (kinds <= _BOTH)
    core, memory, ratio = taken(data, container)
    first = np.where(kinds == _SHARES, data[SHARES], np.where(short, (core - data[CORE_FREE]).clip(0), 0))
    amounts = [kinds, first, np.where(short, (memory - data[MEMORY_FREE]).clip(0), 0)]
    if container.ratio is not None or container.whole:
        amounts.append(np.where(short & (amounts[-1] == 0), (ratio - data[RATIO_FREE]).clip(0), 0))
    return _alike(np.hstack(amounts), MOST)


def _roughly_alike(kinds: Kinds) -> Ints:
    """The same number for nodes that have as many cards of each kind."""
    base = int(kinds.max(initial=0)) + 1
    code, codes = np.zeros(len(kinds), np.int64), 1
    for column in np.sort(kinds, axis=1).T:
        if codes > _LARGEST // base:
            known, code = np.unique(code, return_inverse=True)
            codes = len(known)
        code, codes = code * base + column, codes * base
    return code


def _alike(table: Ints, most: int) -> Ints | None:
    """The same number for rows that are equal; None where there are more than `most` different ones."""
    text, size = np.ascontiguousarray(table).tobytes(), table[:1].nbytes
    numbers: dict[bytes, int] = {}
    found = []
    for i in range(len(table)):
        found.append(numbers.setdefault(text[i * size : (i + 1) * size], len(numbers)))
        if len(numbers) > most:
            return None
    return np.array(found, np.int64)


def _groups(numbers: Ints) -> list[Places]:
    """The positions of each number."""
    order = np.argsort(numbers, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1) if len(order) else []
