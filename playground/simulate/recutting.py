"""Which node is cut anew for a pod that asks for slices and fits on none as they are."""

from collections.abc import Iterable

from mgpu.model.asks import Ask, Rejection
from mgpu.model.pods import Pod
from mgpu.settings import Settings
from playground.simulate.accounts import Accounts
from scheduler.slices.score import site_score
from scheduler.slices.site import cut, offers, wanted_by

_ANEW = "its cards would have to be cut anew"


class Recutting:
    """Asks for cards are none of its business: nothing is said of them."""

    def __init__(self, accounts: Accounts, settings: Settings) -> None:
        self._accounts, self._settings = accounts, settings.dialects.slices

    def restore(self) -> None:
        """Slices that records name and that are not there are made again, as after a reboot."""
        for name in self._accounts.cuttings:
            site = self._accounts.site(name, "")
            slices = cut(site, []) if site and site.missing and not site.problem else None
            if slices is not None and not isinstance(slices, Rejection):
                self._accounts.cut(name, slices)

    def refusal(self, pod: Pod, ask: Ask, node: str) -> Rejection | None:
        """Why a node, cut as it is, does not have the slices; None: it has."""
        wanted, site = wanted_by(ask), self._accounts.site(node, pod.uid)
        if not wanted or site is None or site.fits(wanted):
            return None
        if site.problem:
            return Rejection(f"what the node says of its slices cannot be read: {site.problem}")
        found = cut(site, [wanted])
        return found if isinstance(found, Rejection) else Rejection(_ANEW)

    def recut(self, pod: Pod, ask: Ask, nodes: Iterable[str]) -> str:
        """The node that has been cut for it, the best one by score, then by name; "": none can be."""
        wanted = wanted_by(ask)
        if not wanted:
            return ""
        known = [(name, self._accounts.site(name, pod.uid), self._accounts.nodes[name]) for name in nodes]
        can = [
            (-site_score(site, wanted, pod, self._settings), name, site)
            for name, site, node in known
            if site and not site.problem and ask.unmet(node) is None and offers(site, wanted)
        ]
        if not can:
            return ""
        _, name, site = min(can, key=lambda row: row[:2])
        slices = cut(site, [wanted])
        if isinstance(slices, Rejection):
            return ""
        self._accounts.cut(name, slices)
        return name

    def score(self, pod: Pod, ask: Ask, node: str) -> int | None:
        """0..10; None: the pod asks for no slices."""
        wanted, site = wanted_by(ask), self._accounts.site(node, pod.uid)
        return site_score(site, wanted, pod, self._settings) if wanted and site else None
