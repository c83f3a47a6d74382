"""What is said of a pod on a node that can be cut, and which of several is cut for it: pure, for the scheduler and
`mgpu simulate` alike.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import groupby

from mgpu.model.gpu_requests import Rejection, RejectionKind
from mgpu.model.pods import Pod
from mgpu.settings.slice_settings import SlicesSettings
from scheduler.engine.effort import Budget, Exhausted, full_budget
from scheduler.engine.node_fit import NodeFit
from scheduler.engine.partitioning.partition_plan import NOT_PROVEN
from scheduler.engine.partitioning.partitionable_node import Site, cut, offers
from scheduler.engine.partitioning.slice_scores import site_score

ANEW = "its cards are cut anew for it"


def _rejected(text: str, *, fits_repartitioned: bool = False) -> NodeFit:
    return NodeFit(Rejection(RejectionKind.SLICES, text), fits_repartitioned=fits_repartitioned)


def refusal_of(site: Site, wanted: Mapping[str, int], budget: Budget) -> NodeFit:
    """Say why no cut of the node's cards gives the pod its slices."""
    found = cut(site, [wanted], budget)
    if not isinstance(found, Rejection):
        return _rejected(ANEW, fits_repartitioned=True)
    text = found.reason if found.reason else f"insufficient slices ({found})"
    return NodeFit(replace(found, reason=text, cards=()))


def answer_of(
    site: Site,
    wanted: Mapping[str, int],
    budget: Budget,
    refusal: Callable[[Site, Mapping[str, int], Budget], NodeFit] = refusal_of,
) -> NodeFit:
    """Answer for a node that is what the pod requires, without points; not proven where the budget ends before that.

    refusal: the answer for a node that cannot be cut so.
    """
    if site.fits(wanted):
        return NodeFit()
    if site.problem:
        return _rejected(f"what the node says of its slices cannot be read: {site.problem}")
    if site.found.waiting:
        return _rejected(f"waits for plan {site.found.partitioning.plan} of its slices", fits_repartitioned=True)
    try:
        if not offers(site, wanted, budget):
            return refusal(site, wanted, budget)
    except Exhausted:
        return NodeFit(Rejection(RejectionKind.NOT_PROVEN, NOT_PROVEN, proven=False))
    if site.found.refused:
        plan, why = site.found.refused
        return _rejected(f"{ANEW}, but plan {plan} of its slices was refused: {why}", fits_repartitioned=True)
    return _rejected(ANEW, fits_repartitioned=True)


def best_first(
    sites: Iterable[Site],
    wanted: Mapping[str, int],
    pod: Pod,
    settings: SlicesSettings,
    budget: Callable[[], Budget] = full_budget,
) -> Iterator[Site]:
    """Yield those that can be cut for the pod: by score, then by how many free slices are destroyed, then by name.

    budget: gives the steps for the next node. Those for which they do not suffice are left out.
    """
    scored = [
        (-site_score(site, wanted, pod, settings), site.node.name, site)
        for site in sites
        if _is_known_to_offer(site, wanted, budget())
    ]
    scored.sort(key=lambda row: row[:2])
    for _, alike in groupby(scored, key=lambda row: row[0]):
        destroying = []
        for _, name, site in alike:
            destroyed = _destroyed(site, wanted, budget())
            if not destroyed:
                yield site  # at once: none after it is better, and a thousand nodes may have the same score
            else:
                destroying.append((destroyed, name, site))
        yield from (site for *_, site in sorted(destroying, key=lambda row: row[:2]))


def _is_known_to_offer(site: Site, wanted: Mapping[str, int], budget: Budget) -> bool:
    with suppress(Exhausted):
        return offers(site, wanted, budget)
    return False


def _destroyed(site: Site, wanted: Mapping[str, int], budget: Budget) -> int:
    """Return how many free slices go when the node is cut for this pod alone; many, where the budget ends before."""
    found = cut(site, [wanted], budget)
    if isinstance(found, Rejection):
        return 0 if found.proven else sys.maxsize
    return len(site.made.difference(found, site.used))
