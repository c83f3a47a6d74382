"""What is said of a pod on a node that can be cut, and which of several is cut for it: pure, for the scheduler and
`mgpu simulate` alike.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby

from mgpu.model.asks import Rejection
from mgpu.model.pods import Pod
from mgpu.slices_settings import SlicesSettings
from scheduler.answers import Answer
from scheduler.slices.score import site_score
from scheduler.slices.site import Site, cut, offers

ANEW = "its cards are cut anew for it"


def refusal_of(site: Site, wanted: Mapping[str, int]) -> Answer:
    """Why no cut of the node's cards gives the pod its slices."""
    found = cut(site, [wanted])
    if not isinstance(found, Rejection):
        return Answer(ANEW, recut=True)
    return Answer(found.reason if found.reason else f"insufficient slices ({found})", found.hopeless)


def answer_of(
    site: Site, wanted: Mapping[str, int], refusal: Callable[[Site, Mapping[str, int]], Answer] = refusal_of
) -> Answer:
    """Of a node that is what the pod requires; without points. refusal: of one that cannot be cut so."""
    if site.fits(wanted):
        return Answer()
    if site.problem:
        return Answer(f"what the node says of its slices cannot be read: {site.problem}")
    if site.found.waiting:
        return Answer(f"waits for plan {site.found.partitioning.plan} of its slices", recut=True)
    if not offers(site, wanted):
        return refusal(site, wanted)
    if site.found.refused:
        plan, why = site.found.refused
        return Answer(f"{ANEW}, but plan {plan} of its slices was refused: {why}", recut=True)
    return Answer(ANEW, recut=True)


def best_first(sites: Iterable[Site], wanted: Mapping[str, int], pod: Pod, settings: SlicesSettings) -> Iterator[Site]:
    """Those that can be cut for the pod: by score, then by how many free slices are destroyed, then by name."""
    scored = [
        (-site_score(site, wanted, pod, settings), site.node.name, site) for site in sites if offers(site, wanted)
    ]
    scored.sort(key=lambda row: row[:2])
    for _, alike in groupby(scored, key=lambda row: row[0]):
        destroying = []
        for _, name, site in alike:
            destroyed = _destroyed(site, wanted)
            if not destroyed:
                yield site  # at once: none after it is better, and a thousand nodes may have the same score
            else:
                destroying.append((destroyed, name, site))
        yield from (site for *_, site in sorted(destroying, key=lambda row: row[:2]))


def _destroyed(site: Site, wanted: Mapping[str, int]) -> int:
    """How many free slices go when the node is cut for this pod alone."""
    found = cut(site, [wanted])
    return 0 if isinstance(found, Rejection) else len(site.made.difference(found, site.used))
