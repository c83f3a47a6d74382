"""Creates the rejections of thousands of nodes, with one computation for each group of nodes that lack the same.

`scheduler.decisions.array_filter` calls `reject_nodes` for the nodes that `node_fits` has rejected. The texts come from
`scheduler.engine.rejections`, which is called for one node of each group.

kube-scheduler counts how many nodes gave which reason and writes all reasons into the pod's condition without a limit
(handleSchedulingFailure; only the Event is cut, at 1,024 bytes). The reasons of 5,000 nodes with different amounts
could exceed the 1.5 MiB that etcd accepts. So if there are too many different reasons, they are brief: amounts are left
out.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mgpu.model.gpu_requests import ContainerRequest, GpuRequest, Rejection
from scheduler.engine.arrays.node_fits import NodeVerdicts, fitting_cards, hopeless_nodes, taken_amounts
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
from scheduler.engine.rejections import container_rejection, impossible_request

MAX_REASONS = 50
"""The maximum number of different reasons with amounts for one container.

If the nodes that the container does not fit have more different reasons, the reasons of all of them are brief.
"""
_LARGEST_CODE = 1 << 61
"""The codes of `_number_by_brief_reasons` stay below this number, so that twice a code fits 64 bits."""

_ABSENT, _FITS, _CORE, _MEMORY, _CORE_AND_MEMORY, _SHARES, _IN_USE, _UNHEALTHY, _EXCLUDED = range(9)
"""The brief reasons of a card. An exclusion is _EXCLUDED plus its key in `NodeArrays.exclusions`."""


Reasons = npt.NDArray[np.int32]


class RejectedNodes(NamedTuple):
    """Nodes with an equal rejection, by their positions in the call. `rejection.cards` is empty."""

    nodes: Places
    rejection: Rejection


def reject_nodes(
    rows: NodeArrays, row_numbers: Places, verdicts: NodeVerdicts, request: GpuRequest, most: int = MAX_REASONS
) -> Iterator[RejectedNodes]:
    """Yield the rejected nodes in groups, by their positions in `row_numbers`.

    Args:
        row_numbers: The row of each node of the filter call.
        verdicts: The verdicts on these nodes, in the same order.
        most: The maximum number of different reasons with amounts for one container (`MAX_REASONS`).
    """
    too_few = np.flatnonzero(verdicts.too_few)
    for group in _group(rows.totals[COUNT].take(row_numbers[too_few])):
        rejection = impossible_request(request, rows.cards(row_numbers[too_few[group[0]]]))
        assert rejection is not None
        yield RejectedNodes(too_few[group], rejection)
    for number in sorted(set(verdicts.failing_container.tolist()) - {-1}):
        nodes = np.flatnonzero(verdicts.failing_container == number)
        for group, rejection in _reject_container(rows, row_numbers[nodes], request, request.containers[number], most):
            yield RejectedNodes(nodes[group], rejection)


def _reject_container(
    rows: NodeArrays, places: Places, request: GpuRequest, container: ContainerRequest, most: int
) -> Iterator[RejectedNodes]:
    """Yield the rejections of nodes on which this is the first container for which too few cards have capacity."""
    reasons = _brief_reasons(rows, request, container).take(places, axis=0)
    without_hope = hopeless_nodes(rows, request).take(places)
    # To save time, only the first nodes are tried at first. They often have too many different reasons already.
    few = _number_by_amounts(rows, places[: 4 * most], container, reasons, most) is not None
    exact = _number_by_amounts(rows, places, container, reasons, most) if few else None
    numbers = _number_by_brief_reasons(reasons) if exact is None else exact
    for nodes in _group(2 * numbers + without_hope):
        first = places[nodes[0]]
        rejection = container_rejection(
            request, container, rows.cards(first), rows.excluded(first), brief=exact is None
        )
        assert rejection is not None
        yield RejectedNodes(nodes, replace(rejection.summary(), hopeless=bool(without_hope[nodes[0]])))


def _brief_reasons(rows: NodeArrays, request: GpuRequest, container: ContainerRequest) -> Reasons:
    """Return the brief reason of each card, [n, cards].

    If several reasons apply, the result must be the one that `card_refusal` finds first. So the reasons are set in
    reverse order.
    """
    core, memory, ratio = taken_amounts(rows.data, container)
    core_short, memory_short = rows.data[CORE_FREE] < core, rows.data[MEMORY_FREE] < memory
    if container.ratio is not None or container.whole:
        memory_short |= rows.data[RATIO_FREE] < ratio
    reasons = np.where(core_short, np.where(memory_short, _CORE_AND_MEMORY, _CORE), _MEMORY).astype(np.int32)
    if request.max_shares:
        reasons[rows.data[SHARES] >= request.max_shares] = _SHARES
    if container.whole:
        reasons[rows.data[SHARES] > 0] = _IN_USE
    reasons[rows.data[HEALTH] == UNHEALTHY] = _UNHEALTHY
    if rows.exclusion is not None:
        np.copyto(reasons, _EXCLUDED + rows.exclusion, "unsafe", where=rows.exclusion > 0)
    reasons[fitting_cards(rows, container, request)] = _FITS
    reasons[rows.data[HEALTH] == 0] = _ABSENT
    return reasons


def _number_by_amounts(
    rows: NodeArrays, places: Places, container: ContainerRequest, reasons: Reasons, most: int
) -> Ints | None:
    """Return a number for each node, which is equal for nodes whose cards lack the same amounts in the same order.

    Returns None if there would be more than `most` different numbers.

    Args:
        reasons: The brief reasons of these nodes. Further rows are ignored.
    """
    reasons, data = reasons[: len(places)], rows.data.take(places, axis=1)
    short = (reasons >= _CORE) & (reasons <= _CORE_AND_MEMORY)
    core, memory, ratio = taken_amounts(data, container)
    core_or_shares = np.where(reasons == _SHARES, data[SHARES], np.where(short, (core - data[CORE_FREE]).clip(0), 0))
    amounts = [reasons, core_or_shares, np.where(short, (memory - data[MEMORY_FREE]).clip(0), 0)]
    if container.ratio is not None or container.whole:
        amounts.append(np.where(short & (amounts[-1] == 0), (ratio - data[RATIO_FREE]).clip(0), 0))
    return _number_rows(np.hstack(amounts), most)


def _number_by_brief_reasons(reasons: Reasons) -> Ints:
    """Return a number for each node, which is equal for nodes with the same number of cards for each reason."""
    base = int(reasons.max(initial=0)) + 1
    code, codes = np.zeros(len(reasons), np.int64), 1
    for column in np.sort(reasons, axis=1).T:
        # Before the codes overflow, they are numbered again: at most one code for each node is in use.
        if codes > _LARGEST_CODE // base:
            known, code = np.unique(code, return_inverse=True)
            codes = len(known)
        code, codes = code * base + column, codes * base
    return code


def _number_rows(table: Ints, most: int) -> Ints | None:
    """Return a number for each row, which is equal for equal rows; None if there are more than `most` numbers."""
    content, size = np.ascontiguousarray(table).tobytes(), table[:1].nbytes
    numbers: dict[bytes, int] = {}
    number_of_row = []
    for i in range(len(table)):
        number_of_row.append(numbers.setdefault(content[i * size : (i + 1) * size], len(numbers)))
        if len(numbers) > most:
            return None
    return np.array(number_of_row, np.int64)


def _group(numbers: Ints) -> list[Places]:
    """Return, for each different number, the positions at which it occurs."""
    order = np.argsort(numbers, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1) if len(order) else []
