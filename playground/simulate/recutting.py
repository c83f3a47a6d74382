"""Which node is cut anew for a pod that asks for slices and fits on none as they are."""

from collections.abc import Iterable

from mgpu.model.asks import Ask, Rejection
from mgpu.model.pods import Pod
from mgpu.settings import Settings
from playground.simulate.accounts import Accounts
from scheduler.placement.effort import full_budget
from scheduler.slices.choosing import answer_of, best_first
from scheduler.slices.score import site_score
from scheduler.slices.site import cut, wanted_by

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
        if not wanted or site is None:
            return None
        answer = answer_of(site, wanted, full_budget())
        if not answer.reason:
            return None
        return Rejection(_ANEW if answer.recut else answer.reason, hopeless=answer.hopeless, proven=answer.proven)

    def recut(self, pod: Pod, ask: Ask, nodes: Iterable[str]) -> str:
        """The node that has been cut for it, the best one of these; "": none can be."""
        wanted = wanted_by(ask)
        known = [self._accounts.site(name, pod.uid) for name in nodes] if wanted else []
        able = [site for site in known if site and not site.problem and ask.unmet(site.node) is None]
        for site in best_first(able, wanted, pod, self._settings):
            slices = cut(site, [wanted])
            if not isinstance(slices, Rejection):
                self._accounts.cut(site.node.name, slices)
                return site.node.name
        return ""

    def score(self, pod: Pod, ask: Ask, node: str) -> int | None:
        """0..10; None: the pod asks for no slices."""
        wanted, site = wanted_by(ask), self._accounts.site(node, pod.uid)
        return site_score(site, wanted, pod, self._settings) if wanted and site else None
