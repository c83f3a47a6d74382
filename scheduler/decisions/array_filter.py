"""One look at many nodes for one pod: what the arrays tell of them, and which are to be looked at closely."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mgpu.model.cards import CardState
from mgpu.model.gpu_requests import GpuRequest
from mgpu.model.groups import Seat
from mgpu.model.pods import Node
from mgpu.settings import Settings
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.engine.arrays.array_scores import same_on_any_cards, scores
from scheduler.engine.arrays.fits import sift
from scheduler.engine.arrays.node_table import COUNT, Ints, Mask, Places, Rows, Table
from scheduler.engine.arrays.rejections import Refusal, refusals
from scheduler.engine.arrays.spread import crowded, tells
from scheduler.engine.constraints import behind, elsewhere, fresh


class Closely(NamedTuple):
    """Nodes to look at closely, by their positions in the names asked about; all else of these.

    apart: no other node is like it.
    """

    at: Places
    rows: Rows
    nodes: Sequence[Node]
    cards: Sequence[tuple[CardState, ...]]
    apart: Mask


class Look(NamedTuple):
    """Nodes by their positions in the names asked about.

    unmet: where the pod cannot be whatever the cards hold, and why. fits, points: n each; points only where known.
    refused: what the arrays refuse; () where points are asked for. seats: where the pod's same-card group is.
    """

    unmet: Mapping[int, str]
    fits: Mask
    points: Ints
    refused: Sequence[Refusal]
    closely: Closely
    seats: Sequence[Seat]


def look(
    state: ClusterCache,
    settings: Settings,
    known: GpuPod,
    request: GpuRequest,
    names: Sequence[str],
    *,
    scoring: bool = False,
) -> Look:
    """Closely: those of which the arrays cannot tell whether they fit, and for scoring what points they have."""
    seats = state.seats(request, known.pod.uid)
    beside = {seat.node for seat in seats} or state.group_nodes(request)

    def needed(table: Table) -> Look:
        rows, at, unmet = table.rows, table.at, table.unmet
        sifted, apart = sift(rows, request).at(at), (rows.odd | (rows.totals[COUNT] == 0)).take(at)
        if beside:
            apart |= np.fromiter([name in beside for name in names], np.bool_, len(names))
        if request.constraints.same_card:  # the group's nodes are for the engine, which knows on which card it is
            sifted = sifted.without(apart)
        if seats:
            unmet = {**dict.fromkeys(np.flatnonzero(~apart).tolist(), str(elsewhere(request, (), seats))), **unmet}
        which = np.ones(len(names), np.bool_)
        which[list(unmet)] = False
        fits, points = which & sifted.fits, np.zeros(len(names), np.int64)
        closely = which & sifted.open
        if scoring:
            at_once = fits & same_on_any_cards(rows, request).take(at)
            if not tells(request):
                at_once &= ~apart
            points[at_once] = scores(rows, request, at[at_once], settings.node_policy, _weight(settings))
            if request.constraints.spread:
                others = at_once & apart
                beside_others = np.zeros(len(names), np.bool_)
                cards = map(table.cards.__getitem__, at[others].tolist())
                beside_others[others] = crowded(rows.some(at[others]), cards, request)
                points[at_once] = np.where(beside_others, behind(points), fresh(points))[at_once]
            closely |= fits & ~at_once
        refused = [] if scoring else list(refusals(rows, at, sifted.without(~which), request))
        return Look(unmet, fits, points, refused, _closely(table, np.flatnonzero(closely), apart), seats)

    return state.look(names, known.pod, request, needed)


def _closely(table: Table, chosen: Places, apart: Mask) -> Closely:
    places = table.at[chosen]
    listed = places.tolist()
    nodes, cards = [table.nodes[row] for row in listed], [table.cards[row] for row in listed]
    return Closely(chosen, table.rows.some(places), nodes, cards, apart[chosen])


def _weight(settings: Settings) -> int:
    return settings.dialects.mgpu.weight_of_core
