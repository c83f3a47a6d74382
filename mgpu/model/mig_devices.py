"""Names the MIG instances that ResourceClaims can have, and finds out which of them can still be given on a card.

On a node with the label `gpu.partitioning=mig-claims`, each possible instance of a card is a device of Dynamic Resource
Allocation: `card-0-mig-2g-20gb-4` is the profile 2g.20gb on card 0 from memory slice 4 on. Only the instances that
claims hold exist. In the ledger, an instance is a slice like those of the classic partition plans: it has the same
device type and index (`mgpu.model.slice_names`), so what a pod and what a claim hold of a card can be compared.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from mgpu.model.cards import GPU, WHOLE_CORE, Card
from mgpu.model.ledger import Holding, Share
from mgpu.model.mig import Instance, Layout, Profile, layout_of, possible_instances
from mgpu.model.slice_names import PLACES, RESOURCE_PREFIX, device_type, is_mps, is_slice, place_of, slice_of_resource

_NAME = re.compile(
    r"card-(0|[1-9]\d{0,3})-mig-([1-9]\d?)g-([1-9]\d{0,3})gb(-me)?-(0|[1-9]\d?)",
    re.ASCII,
)


@dataclass(frozen=True, slots=True, order=True)
class MigDevice:
    """A MIG instance of a card of a node, whether it exists or not.

    Attributes:
        card: the index of the card.
    """

    card: int
    instance: Instance

    @property
    def name(self) -> str:
        """The name of the DRA device, which is a DNS label."""
        profile = self.instance.profile.replace(".", "-").replace("+", "-")
        return f"card-{self.card}-mig-{profile}-{self.instance.start}"

    @property
    def type(self) -> str:
        """The device type in the ledger, such as `mig-2g.20gb`."""
        return device_type(self.instance.profile)

    @property
    def index(self) -> int:
        """The index of the instance among the devices of its type."""
        return self.card * PLACES + self.instance.start

    def __str__(self) -> str:
        return f"{self.instance} of card {self.card}"


def read_mig_device(name: str) -> MigDevice | None:
    """Return the MIG instance that a DRA device stands for, or None if the name is not that of an instance."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    media = "+me" if match[4] else ""
    return MigDevice(int(match[1]), Instance(int(match[5]), f"{match[2]}g.{match[3]}gb{media}"))


def mig_device_at(type: str, index: int) -> MigDevice | None:
    """Return the MIG instance with this device type and index in the ledger; None for a device of another type."""
    profile = slice_of_resource(RESOURCE_PREFIX + type)
    if profile is None or is_mps(type):
        return None
    card, start = place_of(index)
    return MigDevice(card, Instance(start, profile))


def share_of_instance(container: str, device: MigDevice) -> Share:
    """Return what a container, or a request of a claim, holds that has an instance."""
    return Share(container, device.index, WHOLE_CORE, whole=True, type=device.type)


def instances_of(shares: Iterable[Share]) -> tuple[MigDevice, ...]:
    """Return the MIG instances among these shares, in their order."""
    found = (mig_device_at(share.type, share.card) for share in shares if isinstance(share.card, int))
    return tuple(device for device in found if device is not None)


def with_whole_cards(holding: Holding) -> Holding:
    """Return a claim's holding that also has the whole card of each of its MIG instances.

    While the node has the label, its cards are in no ledger, and nothing changes. Without the label the cards are there
    again, and no other pod or claim may have a card as long as it has instances.
    """
    whole = cards_of_instances(holding)
    return holding if whole is None else replace(holding, shares=(*holding.shares, *whole.shares))


def cards_of_instances(holding: Holding) -> Holding | None:
    """Return a holding of the whole cards of the MIG instances of a claim; None if it has no instances."""
    cards = dict.fromkeys(device.card for device in instances_of(holding.shares))
    shares = tuple(Share(holding.shares[0].container, card, WHOLE_CORE, whole=True) for card in cards)
    return replace(holding, shares=shares) if shares else None


def cards_in(holding: Holding) -> tuple[Share, ...]:
    """Return the shares of cards in a holding."""
    return tuple(share for share in holding.shares if share.type == GPU)


def foreign_holding(devices: Iterable[MigDevice]) -> Holding:
    """Return MIG instances that exist without a claim as what a holder without a name has."""
    return Holding("", "", "", "", "", tuple(share_of_instance("", device) for device in devices))


@dataclass(frozen=True, slots=True)
class MigCardState:
    """A card whose MIG instances claims can have.

    Attributes:
        used: the instances that claims and pods hold. They overlap if an allocation was written without mgpu.
        blocked: whether a holder has the card, or a part of it that is no MIG instance, so that it cannot have new
            instances. This happens if the node has had another label before.
        in_mode: whether the card is in MIG mode, as far as that is known.
    """

    card: Card
    used: frozenset[Instance] = frozenset()
    blocked: bool = False
    in_mode: bool = True

    @property
    def layout(self) -> Layout | None:
        return layout_of(self.card.model, self.card.memory)

    def possible(self) -> tuple[Instance, ...]:
        """Return the instances that can be created beside those in use."""
        layout = self.layout
        if layout is None or self.blocked or not self.in_mode or not self.card.healthy:
            return ()
        return possible_instances(layout, self.used)

    def with_instance(self, instance: Instance) -> "MigCardState":
        return replace(self, used=self.used | {instance})

    def has(self, instance: Instance) -> bool:
        """Return whether the instance can be created beside those in use."""
        return instance in self.possible()


def mig_card_states(
    cards: Iterable[Card], holdings: Sequence[Holding], in_mode: Collection[int] | None = None
) -> tuple[MigCardState, ...]:
    """Return the states of the cards that support MIG, by index.

    A holder of an instance may also hold its whole card, which keeps other holders off the card where the label of the
    node has been removed (`scheduler.cluster.claim_holdings`). This does not block the card.

    Args:
        cards: the GPUs of a node.
        holdings: what pods and claims hold on the node.
        in_mode: the indexes of the cards in MIG mode; None if that is not known.
    """
    found = (_state(card, holdings) for card in sorted(cards, key=lambda card: card.index))
    known = (state for state in found if state is not None)
    return tuple(replace(one, in_mode=in_mode is None or one.card.index in in_mode) for one in known)


def _state(card: Card, holdings: Sequence[Holding]) -> MigCardState | None:
    layout = layout_of(card.model, card.memory)
    if card.type != GPU or layout is None:
        return None
    used: set[Instance] = set()
    blocked = False
    for holding in holdings:
        own = {device.instance for device in instances_of(holding.shares) if device.card == card.index}
        # An instance that the card cannot have exists only in a record that somebody has forged.
        used |= {one for one in own if (profile := layout.profile(one.profile)) and one.start in profile.starts}
        blocked = blocked or any(_blocks(share, card, is_owner=bool(own)) for share in holding.shares)
    return MigCardState(card, frozenset(used), blocked)


def _blocks(share: Share, card: Card, *, is_owner: bool) -> bool:
    """Return whether a share keeps new instances off the card, although it is no known instance of it."""
    if share.type == GPU:
        return share.is_on(card) and not is_owner
    if not is_slice(share.type):
        return False
    if not isinstance(share.card, int):
        return True  # It is a slice on an unknown card.
    return is_mps(share.type) and place_of(share.card)[0] == card.index


@dataclass(frozen=True, slots=True)
class MigOffer:
    """A MIG instance that a card can have, with its part of the card.

    Attributes:
        profile: the profile of the instance.
        layout: the layout of the card.
    """

    card: Card
    instance: Instance
    profile: Profile
    layout: Layout

    @property
    def device(self) -> MigDevice:
        return MigDevice(self.card.index, self.instance)

    @property
    def core(self) -> int:
        """The part of the card's core, in milli."""
        return WHOLE_CORE * self.profile.compute // self.layout.compute

    @property
    def memory(self) -> int:
        """The part of the card's memory, in bytes."""
        return self.card.memory * self.profile.size // self.layout.slices

    def as_card(self) -> Card:
        """Return the instance as a device of the ledger."""
        card = self.card
        uuid = f"{card.uuid}/{self.instance.profile}/{self.instance.start}"
        device = self.device
        return Card(
            device.index, uuid, card.model, self.memory, self.core, card.healthy, card.numa, device.index, device.type
        )


def offers_of(card: Card) -> tuple[MigOffer, ...]:
    """Return all instances that a card can have, each by itself; () if the card does not support MIG.

    The order is that in which kube-scheduler should try them: small profiles first, for requests that any instance of
    some size can serve, and of each profile the highest start first, which in most cases leaves the most ways to
    partition the rest of the card.
    """
    layout = layout_of(card.model, card.memory)
    if layout is None or card.type != GPU:
        return ()
    offers = [
        MigOffer(card, Instance(start, profile.name), profile, layout)
        for profile in layout.profiles
        for start in profile.starts
    ]
    return tuple(sorted(offers, key=lambda o: (o.profile.size, o.profile.compute, o.profile.name, -o.instance.start)))


def taken_instances(state: MigCardState) -> frozenset[Instance]:
    """Return the instances that a healthy card in MIG mode cannot have beside those in use."""
    possible = replace(state, card=replace(state.card, healthy=True), in_mode=True).possible()
    return frozenset(offer.instance for offer in offers_of(state.card)).difference(possible)


def offer_of(device: MigDevice, cards: Iterable[Card]) -> MigOffer | None:
    """Return what an instance offers, or None if the node has no such card or the card no such instance."""
    card = next((card for card in cards if card.type == GPU and card.index == device.card), None)
    if card is None:
        return None
    return next((offer for offer in offers_of(card) if offer.instance == device.instance), None)
