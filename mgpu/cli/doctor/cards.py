"""Whether what pods hold of the cards is known, and is there. Pure."""

from collections.abc import Iterator

from mgpu.cli.doctor.seen import Finding, Level, Seen
from mgpu.model.quantities import format_bytes, format_core
from mgpu.presentation.card_views import CardView
from mgpu.presentation.overview import STOCK
from mgpu.presentation.plain_text import listed

_CHECK = "cards"
_WHO = "-o custom-columns=POD:.metadata.name,SCHEDULER:.spec.schedulerName,NODE:.spec.nodeName"


def given_out(seen: Seen) -> Iterator[Finding]:
    """Whoever decides beside mgpu by accounts of his own, and binds as he likes: he gives out what is taken.

    Without the Devices no card is known, and every record would seem to name one that is not there.
    """
    if {"nodes", "pods", "devices"} & seen.hidden.keys():
        return
    twice = [
        f"card {card.state.card.index} of {node.name} ({text})"
        for node in seen.given.nodes
        for card in node.cards
        if (text := _too_much(card))
    ]
    if twice:
        text = f"two schedulers decide, more is given out than there is: {listed(twice)}"
        remedy = f"delete all but one of them there; which scheduler placed them: kubectl get pods -A {_WHO}"
        yield Finding(_CHECK, Level.FAILED, text, remedy)
    unclear = seen.given.unclear
    if unclear:
        text = f"not all is known of who holds what: {listed(list(unclear))}"
        remedy = "kubectl mgpu inspect says of each why, in its last lines"
        yield Finding(_CHECK, Level.WARNING, text, remedy)
    if not twice and not unclear:
        yield Finding(_CHECK, Level.OK, "no more is given out than there is")


def _too_much(card: CardView) -> str:
    """What pods hold for certain, where it is more than the card has; "": it is not.

    Not of what NVIDIA's plugin alone has given out: it may share cards in time (check `nvidia plugin`). Of a card that
    is cut what counts is that each slice has one holder: by their names its slices may have more memory than it has.
    """
    uses = [use for use in card.uses if use.certain]
    core, memory = sum(use.core for use in uses), sum(use.memory for use in uses)
    has = card.state.card
    twice = (
        any(sum(use.certain for use in s.uses) > 1 for s in card.slices)
        if card.cut
        else core > has.core or memory > has.memory
    )
    if not twice or all(use.dialect == STOCK for use in uses):
        return ""
    return f"{format_core(core)} and {format_bytes(memory)} of it: {', '.join(sorted(use.pod for use in uses))}"
