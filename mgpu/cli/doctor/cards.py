"""Checks that no card is over its capacity and that all holdings are known.

`mgpu doctor` runs these checks, which are pure functions of the Installation.
"""

from collections.abc import Iterator

from mgpu.cli.doctor.installation import Finding, Installation, Level
from mgpu.model.quantities import format_bytes, format_core
from mgpu.presentation.card_views import CardView
from mgpu.presentation.overview import NVIDIA_PLUGIN
from mgpu.presentation.plain_text import join_names

_CHECK = "cards"
_COLUMNS = "-o custom-columns=POD:.metadata.name,SCHEDULER:.spec.schedulerName,NODE:.spec.nodeName"


def check_capacity(installation: Installation) -> Iterator[Finding]:
    """Check that no card is over its capacity, and that the cards of all pods are known.

    A second scheduler with a ledger of its own would allocate cards that are already allocated. There is no finding if
    the user may not read Nodes, Pods or Devices. Without Devices, for example, every allocation record would seem to
    name a missing card.
    """
    if {"nodes", "pods", "devices"} & installation.hidden.keys():
        return
    exceeded = [
        f"card {card.state.card.index} of {node.name} ({text})"
        for node in installation.overview.nodes
        for card in node.cards
        if (text := _excess(card))
    ]
    if exceeded:
        text = (
            f"cards are over their capacity, probably because several schedulers allocate them: {join_names(exceeded)}"
        )
        remedy = f"delete pods until the cards suffice; to see the pods' schedulers: kubectl get pods -A {_COLUMNS}"
        yield Finding(_CHECK, Level.FAILED, text, remedy)
    unclear = installation.overview.unclear
    if unclear:
        text = f"some holdings are unknown: {join_names(list(unclear))}"
        remedy = "kubectl mgpu inspect shows the reasons, in its last lines"
        yield Finding(_CHECK, Level.WARNING, text, remedy)
    if not exceeded and not unclear:
        yield Finding(_CHECK, Level.OK, "no card is over its capacity")


def _excess(card: CardView) -> str | None:
    """Return which pods hold how much of the card, as a text; None if the card is not over its capacity.

    A card that NVIDIA's device plugin alone has allocated is exempt, since that plugin may use time-slicing. A
    partitioned card is over its capacity if a slice has several holders. The memory in the names of its slices is not
    compared, because it can add up to more than the card has.
    """
    uses = [use for use in card.uses if use.certain]
    core, memory = sum(use.core for use in uses), sum(use.memory for use in uses)
    capacity = card.state.card
    if card.mode:
        is_exceeded = any(sum(use.certain for use in s.uses) > 1 for s in card.slices)
    else:
        is_exceeded = core > capacity.core or memory > capacity.memory
    if not is_exceeded or all(use.dialect == NVIDIA_PLUGIN for use in uses):
        return None
    pods = ", ".join(sorted(use.pod for use in uses))
    return f"pods hold {format_core(core)} and {format_bytes(memory)} of it: {pods}"
