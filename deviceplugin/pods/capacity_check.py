"""Checks before a container starts that no card exceeds its capacity, whatever the allocation records contain.

The scheduler decides the cards, but a user who may edit pods, or an older scheduler, can write records that overlap,
and another plugin can give out the same cards. So `allocation.allocator` calls `Grants.refusal` in PreStartContainer.
Of two pods that do not both fit, the one that was granted first keeps its cards and the other one waits. Grants survive
a restart of the agent, because the agent derives them from CDI files and from the containers that have run. Other
modules of the agent call `holding` to find out what a pod holds, and `delivery.exchange` also calls `excess`.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from deviceplugin.pods.gpu_pod import GpuPod
from deviceplugin.pods.slice_usage import Environments, names_in, place_at
from mgpu.model.cards import GPU, WHOLE_RATIO, Card, noun
from mgpu.model.gpu_requests import Amount
from mgpu.model.ledger import Holding, Share, unknown_shares
from mgpu.model.pod_references import names_visible_to
from mgpu.model.quantities import format_bytes, format_core
from mgpu.model.resizing import RESIZED

Delivered = Mapping[tuple[str, str], Sequence[str]]
"""The UUIDs of the cards or slices that were delivered to a container, by pod UID and container."""


def read_delivered(environments: Environments) -> Delivered:
    """Return which devices were delivered to containers, according to the environments in their CDI files."""
    found = {key: names_in(env) for key, env in environments.items()}
    return {key: names for key, names in found.items() if names}


def holding(
    gpu_pod: GpuPod, cards: Sequence[Card], delivered: Delivered | None = None, *, bare: bool = False
) -> Holding:
    """Return what the pod holds.

    A container holds the devices that were delivered to it, or else the devices in the record. Without either it holds
    a share on an unknown card. If `delivered` is given, it holds that share only if the container has run and the pod
    is not bare. The shares name the node's cards by index, so that equal holdings compare equal.

    Args:
        cards: The whole cards of the node, and its slices.
        delivered: The devices that were delivered on the node; None to use the record alone.
    """
    pod, request = gpu_pod.pod, gpu_pod.request
    shares: list[Share] = []
    for unknown in unknown_shares(request) if request else ():
        own = [s for s in gpu_pod.shares or () if (s.container, s.type) == (unknown.container, unknown.type)]
        named = {card.uuid for card in cards if any(s.is_on(card) for s in own)}
        uuids = (delivered or {}).get((pod.uid, unknown.container), ())
        if unknown.type != GPU:
            there = {card.uuid for card in cards if card.type == unknown.type}
            if uuids and not there and gpu_pod.shares is None:
                # The node has no such slices any more. Only the record named their card, and the record is lost. So the
                # pod may use any card.
                unknown = Share(unknown.container, None, whole=True, stage=unknown.stage)
            uuids = [uuid for uuid in uuids if uuid in there]
        if uuids and (gpu_pod.shares is None or set(uuids) != named):
            shares += (replace(unknown, card=uuid) for uuid in uuids)
        elif gpu_pod.shares is not None:
            shares += own
        elif delivered is None or (not bare and pod.has_run((unknown.container,))):
            shares.append(unknown)
    dialect = request.dialect if request else ""
    return Holding(pod.uid, pod.namespace, pod.name, pod.node, dialect, tuple(_by_index(s, cards) for s in shares))


def _by_index(share: Share, cards: Sequence[Card]) -> Share:
    if share.card is None:
        return share
    return replace(share, card=next((card.index for card in cards if share.is_on(card)), share.card))


def excess(added: Holding, others: Sequence[Holding], cards: Sequence[Card]) -> str | None:
    """Return a text about the first card that is too full for `added` beside `others`; None if no card is.

    The text becomes part of Events and of the pod's status, which its tenant reads, so it names no pods of other
    namespaces.
    """
    others = [_on_their_cards(other, cards) for other in others]
    for card in cards:
        own = added.uses(card)
        if not own.shares:
            continue
        uses = [(other, use) for other in others if (use := other.uses(card)).shares]
        used = Amount(*map(sum, zip(*(use for _, use in uses), strict=True))) if uses else Amount()
        short = [
            f"{what} {show(amount)} requested, {show(max(0, size - taken))} free"
            for what, show, amount, taken, size in (
                ("core", format_core, own.core, used.core, card.core),
                ("memory", format_bytes, own.memory, used.memory, card.memory),
                ("memory ratio", _percent, own.ratio, used.ratio, WHOLE_RATIO),
            )
            if amount and taken + amount > size
        ]
        if short:
            holders = f"; held by {names_visible_to(added.namespace, _names(uses))}" if uses else ""
            return (
                f"{noun(card.type)} {card.index} ({card.uuid}) has insufficient capacity: {', '.join(short)}{holders}"
            )
    return None


def _names(uses: Sequence[tuple[Holding, Amount]]) -> list[tuple[str, str]]:
    return [(held.namespace, held.name) for held, _ in uses]


def _on_their_cards(held: Holding, cards: Sequence[Card]) -> Holding:
    if all(share.type == GPU for share in held.shares):
        return held
    return replace(held, shares=tuple(_on_its_card(share, cards) for share in held.shares))


def _on_its_card(share: Share, cards: Sequence[Card]) -> Share:
    """Replace the share of a slice that does not exist by a share of its whole card, as the scheduler does."""
    place = place_at(share.type, share.card) if isinstance(share.card, int) else None
    if place is None or any(share.is_on(card) for card in cards):
        return share
    return Share(share.container, place.card, whole=True, stage=share.stage)


def _percent(amount: int) -> str:
    return f"{amount}%"


class Grants:
    """The holdings of pods that were allowed to start, in the order of the grants. Use it on one event loop.

    Attributes:
        bare: The UIDs of bare pods, which hold nothing. `UnrecordedPods` sets this attribute.
    """

    def __init__(self, delivered: Delivered) -> None:
        self._delivered = dict(delivered)
        self._granted: dict[str, Holding] = {}
        self.bare: frozenset[str] = frozenset()

    def recover(self, delivered: Delivered) -> None:
        """Replace the delivered devices, because another agent may have delivered more in the meantime."""
        self._delivered = dict(delivered)

    def delivered_shares(self, gpu_pod: GpuPod, cards: Sequence[Card]) -> tuple[Share, ...]:
        """Return the shares of known cards that were delivered to the pod, whatever its record contains now."""
        granted = self._granted.get(gpu_pod.pod.uid)
        shares = granted.shares if granted else holding(replace(gpu_pod, shares=None), cards, self._delivered).shares
        return tuple(share for share in shares if share.card is not None)

    def has_delivered(self, uid: str) -> bool:
        """Return whether a device was delivered to a container of this pod, even if the device is gone now."""
        return uid in self._granted or any(key[0] == uid for key in self._delivered)

    def refusal(
        self, gpu_pod: GpuPod, pods: Iterable[GpuPod], cards: Sequence[Card], foreign: Sequence[Holding] = ()
    ) -> str | None:
        """Return why the pod must not start now; None if it may.

        Args:
            cards: The whole cards of the node, and its slices.
            foreign: The holdings of remnants, of unrecorded pods, of pods with cards from another plugin, and of
                claims. They replace the records of these pods.
        """
        return self.refusal_of(holding(gpu_pod, cards), pods, cards, foreign)

    def refusal_of(
        self, added: Holding, pods: Iterable[GpuPod], cards: Sequence[Card], foreign: Sequence[Holding] = ()
    ) -> str | None:
        """Return why a pod or a claim must not get what it would hold; None if it may. See `refusal`."""
        # Another plugin chooses cards itself. If mgpu's record of the same pod counted too, cards would count twice.
        theirs = {held.uid for held in foreign}
        active = {other.pod.uid: other for other in pods if not other.pod.ended and other.pod.uid not in theirs}
        before = [held for held in foreign if held.uid != added.uid]
        self._follow_resizes(active.values(), cards)
        for uid, other in active.items():
            if uid not in self._granted and (other.started_containers or self.has_delivered(uid)):
                held = holding(other, cards, self._delivered, bare=uid in self.bare)
                if held.shares and all(share.card is not None for share in held.shares):
                    self._granted[uid] = held
                elif uid != added.uid:
                    # The pod counts on every card until `UnrecordedPods` has found out which cards it has.
                    before.append(held)
        for uid, granted in self._granted.items():
            if uid == added.uid:
                # The pod was granted these cards before, so it takes precedence over all later grants. They do not
                # reduce what is free for it.
                if granted == added:
                    break
            elif uid in active:
                before.append(granted)
        return excess(added, before, cards)

    def _follow_resizes(self, pods: Iterable[GpuPod], cards: Sequence[Card]) -> None:
        """Bring the grants of resized pods to the amounts of their records. A grant keeps its cards and its place.

        A larger amount counts only if it fits, so that no record takes cards from pods that were granted them.
        """
        for gpu_pod in pods:
            uid = gpu_pod.pod.uid
            granted = self._granted.get(uid)
            if granted is None or RESIZED not in gpu_pod.pod.annotations:
                continue
            now = holding(gpu_pod, cards, self._delivered)
            is_less = all(now.uses(card).memory <= granted.uses(card).memory for card in cards)
            others = [held for other, held in self._granted.items() if other != uid]
            if is_less or excess(now, others, cards) is None:
                self._granted[uid] = now

    def grant(self, gpu_pod: GpuPod, cards: Sequence[Card]) -> None:
        """Store that the pod starts with the cards of its record.

        If the pod has a grant of the same cards already, that grant keeps its place in the order.
        """
        held = holding(gpu_pod, cards)
        if self._granted.get(gpu_pod.pod.uid) != held:
            self._granted.pop(gpu_pod.pod.uid, None)
            self._granted[gpu_pod.pod.uid] = held

    def keep_only(self, uids: Collection[str]) -> None:
        self._granted = {uid: granted for uid, granted in self._granted.items() if uid in uids}
        self._delivered = {key: cards for key, cards in self._delivered.items() if key[0] in uids}
