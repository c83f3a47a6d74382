"""Checks that no card is over its capacity and that all holdings are known. Pure."""

from collections.abc import Iterator

from mgpu.cli.doctor.installation import Finding, Installation, Level
from mgpu.model.quantities import format_bytes, format_core
from mgpu.presentation.card_views import CardView
from mgpu.presentation.overview import NVIDIA_PLUGIN
from mgpu.presentation.plain_text import join_names

_CHECK = "cards"
_WHO = "-o custom-columns=POD:.metadata.name,SCHEDULER:.spec.schedulerName,NODE:.spec.nodeName"


def check_capacity(installation: Installation) -> Iterator[Finding]:
    """Check for a second scheduler with a ledger of its own, which allocates cards that are taken.

    Without Devices no card is known, and every allocation record would seem to name a missing card: no finding then.
    """
    if {"nodes", "pods", "devices"} & installation.hidden.keys():
        return
    twice = [
        f"card {card.state.card.index} of {node.name} ({text})"
        for node in installation.given.nodes
        for card in node.cards
        if (text := _too_much(card))
    ]
    if twice:
        text = f"cards are over their capacity, so two schedulers allocate them: {join_names(twice)}"
        remedy = f"delete all but one of them there; which scheduler placed them: kubectl get pods -A {_WHO}"
        yield Finding(_CHECK, Level.FAILED, text, remedy)
    unclear = installation.given.unclear
    if unclear:
        text = f"some holdings are unknown: {join_names(list(unclear))}"
        remedy = "kubectl mgpu inspect shows the reasons, in its last lines"
        yield Finding(_CHECK, Level.WARNING, text, remedy)
    if not twice and not unclear:
        yield Finding(_CHECK, Level.OK, "no card is over its capacity")


def _too_much(card: CardView) -> str:
    """Return a sentence on what pods hold of a card that is over its capacity, or "".

    Cards that NVIDIA's device plugin alone allocated are exempt: it can share them in time (check `nvidia plugin`). A
    divided card is over its capacity if a slice has two holders; the memory in the names of its slices can add up to
    more than the card has.
    """
    uses = [use for use in card.uses if use.certain]
    core, memory = sum(use.core for use in uses), sum(use.memory for use in uses)
    has = card.state.card
    twice = (
        any(sum(use.certain for use in s.uses) > 1 for s in card.slices)
        if card.cut
        else core > has.core or memory > has.memory
    )
    if not twice or all(use.dialect == NVIDIA_PLUGIN for use in uses):
        return ""
    return f"{format_core(core)} and {format_bytes(memory)} of it: {', '.join(sorted(use.pod for use in uses))}"
