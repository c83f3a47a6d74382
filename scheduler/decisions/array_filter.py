"""Evaluates a request against the arrays of all nodes at once.

`decisions.filter` calls this module first, because numpy evaluates thousands of nodes in milliseconds. The nodes for
which the arrays do not suffice are returned as `Remaining`, and the engine evaluates them one by one. An answer of this
module must be the one that the engine would give for the same node. Only the text of a rejection may differ: it leaves
amounts out if there are too many different ones.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mgpu.model.cards import CardState
from mgpu.model.gpu_requests import GpuRequest, Rejection
from mgpu.model.groups import GroupCard
from mgpu.model.pods import Node
from scheduler.engine.arrays.array_rejections import MAX_REASONS, RejectedNodes, reject_nodes
from scheduler.engine.arrays.array_scores import same_on_any_cards, scores
from scheduler.engine.arrays.node_fits import NodeVerdicts, can_tell_spread, evaluate, only_beside_group
from scheduler.engine.arrays.node_table import COUNT, Ints, Mask, NodeArrays, NodeTable, Places
from scheduler.engine.card_constraints import same_card_group_rejection, score_beside_group, score_on_fresh_cards


@dataclass(frozen=True, slots=True)
class Members:
    """Where the other pods of the request's groups are.

    Attributes:
        group_cards: The cards of the request's same-card group.
        nodes: The names of the nodes with cards of the same-card group. If that group has no card, the names of the
            nodes that have a pod of any of the request's groups, or to which such a pod is nominated.
    """

    group_cards: Sequence[GroupCard]
    nodes: Collection[str]


@dataclass(frozen=True, slots=True)
class Remaining:
    """The nodes that the engine has to evaluate one by one. Equal indexes of the sequences belong to the same node.

    Attributes:
        positions: The position of each node among the names of the call.
        unique: True for a node whose answer must not be used for another node with an equal row.
    """

    positions: Places
    rows: NodeArrays
    nodes: Sequence[Node]
    cards: Sequence[tuple[CardState, ...]]
    unique: Mask


@dataclass(frozen=True, slots=True)
class ArrayVerdict:
    """The answers that the arrays give, by the positions of the nodes among the names of the call.

    Attributes:
        unmet: The nodes that cannot take the pod regardless of free capacity, each with the reason.
        fits: True for nodes on which the pod fits.
        rejected: The nodes that are rejected for other reasons.
    """

    unmet: Mapping[int, Rejection]
    fits: Mask
    rejected: Sequence[RejectedNodes]
    remaining: Remaining


@dataclass(frozen=True, slots=True)
class ArrayScores:
    """The score of each node, by its position among the names of the call; 0 for nodes that are not scored."""

    points: Ints
    remaining: Remaining


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The nodes of a snapshot with the verdict of the arrays on each, from which both the answers and the scores come.

    Attributes:
        names: The names of the call.
        members: The groups at the time of the snapshot. With those of a later time, the engine's answer for a node that
            is not in `unique` could depend on a group.
        unique: [n], as `Remaining.unique`.
        unmet: As in `ArrayVerdict`.
    """

    table: NodeTable
    names: Sequence[str]
    request: GpuRequest
    members: Members
    verdicts: NodeVerdicts
    unique: Mask
    unmet: Mapping[int, Rejection]

    def candidates(self) -> Mask:
        mask = np.ones(len(self.names), np.bool_)
        mask[list(self.unmet)] = False
        return mask


def evaluate_nodes(table: NodeTable, names: Sequence[str], request: GpuRequest, members: Members) -> Evaluation:
    """Evaluate these nodes of a snapshot, each by its row."""
    rows, at = table.rows, table.rows_of_names
    unique: Mask = (rows.odd | (rows.totals[COUNT] == 0)).take(at)
    if members.nodes:
        unique |= np.fromiter([name in members.nodes for name in names], np.bool_, len(names))
    verdicts = evaluate(rows, request).select(at)
    if request.constraints.same_card:
        # On the nodes of a same-card group the pod must get the card of the group, which only the engine checks.
        verdicts = verdicts.without(unique)
    return Evaluation(table, names, request, members, verdicts, unique, _unmet(table, unique, request, members))


def filter_nodes(nodes: Evaluation, reasons_if_passing: int = MAX_REASONS) -> ArrayVerdict:
    """Return which of the nodes fit the pod, which do not, and which the engine has to evaluate.

    Args:
        reasons_if_passing: The most different reasons with amounts for one container if any node fits the pod.
    """
    table, verdicts = nodes.table, nodes.verdicts
    candidates = nodes.candidates()
    fits = candidates & verdicts.fits
    most = reasons_if_passing if fits.any() else MAX_REASONS
    of_candidates = verdicts.without(~candidates)
    rejected = list(reject_nodes(table.rows, table.rows_of_names, of_candidates, nodes.request, most))
    remaining = _remaining(table, candidates & verdicts.undecided, nodes.unique)
    return ArrayVerdict(nodes.unmet, fits, rejected, remaining)


def score_nodes(nodes: Evaluation, chosen: Mask, node_policy: str, weight_of_core: int) -> ArrayScores:
    """Score those of the chosen nodes on which every placement that fits has the same score.

    Args:
        chosen: [n], which nodes to score.
    """
    table, verdicts, request, unique = nodes.table, nodes.verdicts, nodes.request, nodes.unique
    rows, at = table.rows, table.rows_of_names
    candidates = chosen & nodes.candidates()
    fits = candidates & verdicts.fits
    scored = fits & same_on_any_cards(rows, request).take(at)
    if not can_tell_spread(request):
        scored &= ~unique
    points = np.zeros(len(at), np.int64)
    points[scored] = scores(rows, request, at[scored], node_policy, weight_of_core)
    if request.constraints.spread:
        points[scored] = _spread(points, scored & unique, table, request)[scored]
    return ArrayScores(points, _remaining(table, (candidates & verdicts.undecided) | (fits & ~scored), unique))


def _unmet(table: NodeTable, unique: Mask, request: GpuRequest, members: Members) -> Mapping[int, Rejection]:
    elsewhere_only = same_card_group_rejection(request, (), members.group_cards)
    if elsewhere_only is None:
        return table.unmet
    return {**dict.fromkeys(np.flatnonzero(~unique).tolist(), elsewhere_only), **table.unmet}


def _spread(points: Ints, near: Mask, table: NodeTable, request: GpuRequest) -> Ints:
    """Return the points for a pod with a spread group.

    A node where the pod must share a card with the group gets fewer points than one where it need not.

    Args:
        near: True for the nodes that may have pods of the group.
    """
    shares_card = np.zeros(len(points), np.bool_)
    cards = map(table.cards.__getitem__, table.places[near].tolist())
    shares_card[near] = only_beside_group(table.rows.select(table.rows_of_names[near]), cards, request)
    return np.where(shares_card, score_beside_group(points), score_on_fresh_cards(points))


def _remaining(table: NodeTable, chosen: Mask, unique: Mask) -> Remaining:
    positions = np.flatnonzero(chosen)
    places = table.places[positions].tolist()
    nodes = [table.nodes[place] for place in places]
    cards = [table.cards[place] for place in places]
    return Remaining(positions, table.rows.select(table.rows_of_names[positions]), nodes, cards, unique[positions])
