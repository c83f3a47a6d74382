"""One look at many nodes for one pod: what the arrays tell of them, and copies of those to look at closely."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mgpu.model.asks import Ask
from mgpu.model.groups import Seat
from mgpu.settings import Settings
from scheduler.gpu_pods import GpuPod
from scheduler.placement.wishing import behind, elsewhere, fresh
from scheduler.state import State
from scheduler.vector.beside import crowded, tells
from scheduler.vector.fits import Sifted, sift
from scheduler.vector.rows import COUNT, Ints, Mask, Places, Rows
from scheduler.vector.scores import same_on_any_cards, scores


class Look(NamedTuple):
    """Nodes by their positions in the names asked about.

    unmet: where the pod cannot be whatever the cards hold, and why. fits, points: n each; points only where known.
    closely: the nodes to look at closely; of these, as many each: rows, sifted, and apart: no other node is like it.
    seats: where the pod's same-card group is.
    """

    unmet: dict[int, str]
    fits: Mask
    points: Ints
    closely: Places
    rows: Rows
    sifted: Sifted
    apart: Mask
    seats: Sequence[Seat]


def look(
    state: State, settings: Settings, known: GpuPod, ask: Ask, names: Sequence[str], *, scoring: bool = False
) -> Look:
    """Closely: for the filter those that do not fit for sure; for scoring those that may fit and have no points yet."""
    seats, beside = state.seats(ask, known.pod.uid), state.group_nodes(ask)

    def needed(rows: Rows, at: Places, unmet: dict[int, str]) -> Look:
        everything = sift(rows, ask)
        sifted, apart = everything.at(at), (rows.odd | (rows.totals[COUNT] == 0)).take(at)
        if beside:
            apart |= np.fromiter([name in beside for name in names], np.bool_, len(names))
        if seats:  # the group's nodes are for the engine, which knows on which card it is
            sifted = sifted.without(apart)
            unmet = {**dict.fromkeys(np.flatnonzero(~apart).tolist(), str(elsewhere(ask, (), seats))), **unmet}
        which = np.ones(len(names), np.bool_)
        which[list(unmet)] = False
        fits, points = which & sifted.fits, np.zeros(len(names), np.int64)
        closely = which & ~fits
        if scoring:
            at_once = fits & same_on_any_cards(rows, ask).take(at)
            if not tells(ask):
                at_once &= ~apart
            points[at_once] = scores(rows, ask, at[at_once], settings.node_policy, _weight(settings))
            if ask.wishes.spread:
                others = at_once & apart
                beside_others = np.zeros(len(names), np.bool_)
                beside_others[others] = crowded(rows, ask, at[others])
                points[at_once] = np.where(beside_others, behind(points), fresh(points))[at_once]
            closely = which & (sifted.open | (fits & ~at_once))
        chosen = np.flatnonzero(closely)
        return Look(unmet, fits, points, chosen, rows.some(at[chosen]), sifted.at(chosen), apart[chosen], seats)

    return state.look(names, known.pod, ask, needed)


def _weight(settings: Settings) -> int:
    return settings.dialects.mgpu.weight_of_core
