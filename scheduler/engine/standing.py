"""Whether a placement made earlier still stands."""

from collections.abc import Sequence

from mgpu.model.cards import CardState, of_type
from mgpu.model.gpu_requests import GpuRequest, peak
from mgpu.model.ledger import Share
from scheduler.engine.constraints import exclusions


def stands(request: GpuRequest, shares: Sequence[Share], cards: Sequence[CardState]) -> bool:
    """Whether these shares of a pod with this ask are on cards that are there, healthy, not out for it, and have room.

    cards: the node's devices of all types, without what the pod itself holds. A slice may be in use by what its node,
    not mgpu, gave it to.
    """
    gpus = of_type(cards)
    out: set[tuple[str, object]] = {
        (s.card.type, s.card.index) for s, out in zip(gpus, exclusions(request, gpus), strict=True) if out
    }
    there: dict[tuple[str, object], CardState] = {(s.card.type, s.card.index): s for s in cards if s.card.healthy}
    for place in dict.fromkeys((share.type, share.card) for share in shares):
        state = None if place in out else there.get(place)
        if state is None:
            return False
        on_it = [share for share in shares if (share.type, share.card) == place]
        used = peak((share.stage, share.amount(state.card)) for share in on_it)
        full = request.max_shares and state.shares + used.shares > request.max_shares
        short = used.core > state.core_free or used.memory > state.memory_free or used.ratio > state.ratio_free
        if full or short or (not state.idle and any(share.whole for share in on_it)):
            return False
    return True
