"""The last line of defence: no start may put a card over its capacity, whoever wrote the record.

Whose start was granted first stays; who comes later and does not fit waits. So of two pods that cannot both run exactly
one does. What is granted survives a restart of the agent: it is what was handed out, and what has run.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from deviceplugin.pods import GpuPod
from mgpu.model.asks import Amount
from mgpu.model.cards import Card
from mgpu.model.ledger import Holding, Share, unknown_shares
from mgpu.model.quantities import format_bytes, format_core

Handed = Mapping[tuple[str, str], Sequence[str]]
"""(pod UID, container) → the UUIDs of the cards that it was given."""


def holding(known: GpuPod, cards: Sequence[Card], handed: Handed | None = None) -> Holding:
    """What the pod holds: of each container what was handed out to it, else what the record says, else any card."""
    pod, ask = known.pod, known.ask
    indexes = {card.uuid: card.index for card in cards}
    shares: list[Share] = []
    for unknown in unknown_shares(ask) if ask else ():
        uuids = (handed or {}).get((pod.uid, unknown.container))
        if uuids:
            shares += (replace(unknown, card=uuid) for uuid in uuids)
        elif known.shares is not None:
            shares += (share for share in known.shares if share.container == unknown.container)
        else:
            shares.append(unknown)
    by_index = (replace(s, card=indexes.get(s.card, s.card)) if isinstance(s.card, str) else s for s in shares)
    return Holding(pod.uid, pod.namespace, pod.name, pod.node, ask.dialect if ask else "", tuple(by_index))


def excess(wanted: Holding, others: Sequence[Holding], cards: Sequence[Card]) -> str:
    """Which card has no room for `wanted` beside `others`, and by how much; "" where all have."""
    for card in cards:
        own = wanted.uses(card)
        if not own.shares:
            continue
        uses = {other.key: use for other in others if (use := other.uses(card)).shares}
        used = Amount(sum(use.core for use in uses.values()), sum(use.memory for use in uses.values()))
        short = []
        if own.core and used.core + own.core > card.core:
            short.append(f"core {format_core(own.core)} asked, {format_core(max(0, card.core - used.core))} free")
        if own.memory and used.memory + own.memory > card.memory:
            free = format_bytes(max(0, card.memory - used.memory))
            short.append(f"memory {format_bytes(own.memory)} asked, {free} free")
        if short:
            holders = f"; held by {', '.join(sorted(uses))}" if uses else ""
            return f"card {card.index} ({card.uuid}) has no room: {', '.join(short)}{holders}"
    return ""


class Grants:
    """What has been granted, the earliest first. `handed`: what agents before this one had handed out."""

    def __init__(self, handed: Handed) -> None:
        self._handed = dict(handed)
        self._granted: dict[str, Holding] = {}

    def refusal(self, known: GpuPod, pods: Iterable[GpuPod], cards: Sequence[Card]) -> str:
        """Why the pod must not start now beside the other `pods` of the node; "" where it may."""
        active = {other.pod.uid: other for other in pods if not other.pod.ended}
        for uid, other in active.items():
            if uid not in self._granted and (other.ran or any(key[0] == uid for key in self._handed)):
                self._granted[uid] = holding(other, cards, self._handed)
        wanted, before = holding(known, cards), []
        for uid, granted in self._granted.items():
            if uid == known.pod.uid:
                if granted == wanted:
                    break
            elif uid in active:
                before.append(granted)
        return excess(wanted, before, cards)

    def grant(self, known: GpuPod, cards: Sequence[Card]) -> None:
        """The pod starts with what its record says; its place stays where that is what it had."""
        wanted = holding(known, cards)
        if self._granted.get(known.pod.uid) != wanted:
            self._granted.pop(known.pod.uid, None)
            self._granted[known.pod.uid] = wanted

    def keep_only(self, uids: Collection[str]) -> None:
        """All other pods are gone."""
        self._granted = {uid: granted for uid, granted in self._granted.items() if uid in uids}
        self._handed = {key: cards for key, cards in self._handed.items() if key[0] in uids}
