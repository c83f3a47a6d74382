"""Computes what the containers that use a claim see of it. The functions are pure.

A container references a whole claim, or one of its requests, and gets the CDI devices of the results of what it
references, in the order of the kubelet's list. Mounts and device nodes of several CDI devices add up, but of a variable
such as NVIDIA_VISIBLE_DEVICES only the last value counts. So each result has two CDI devices: one of its own, with
mounts and device nodes, and one for the *view* that the container has, with the variables. The view is the same for all
results of a request, and names all of its cards.

If a claim has several requests, a container that references the whole claim would get the variables of whichever
request comes last. So the kubelet's list then ends with an entry whose view is the whole claim. Its request has a name
that no request can have, so only containers that reference the whole claim get it, and it comes last for them.

What remains are containers with several references to claims of mgpu. `claim_preparation` refuses these, unless mounts
or device nodes make the cards visible.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from deviceplugin.dra.claim_cdi import cdi_name
from deviceplugin.dra.claim_records import PreparedDevice
from deviceplugin.pods.gpu_pod import GpuPod
from deviceplugin.pods.identity import VISIBLE, Target
from mgpu.model.cards import GPU, Card
from mgpu.model.gpu_requests import Amount, ContainerRequest, GpuRequest
from mgpu.model.ledger import Share
from mgpu.model.mig_devices import MigDevice, mig_device_at
from mgpu.model.pods import Pod
from mgpu.model.resource_claims import DRA, Claim, Result, base_request, card_index, claim_holding

WHOLE_CLAIM = "claim.all"
"""The view of a container that references a whole claim with several requests. Requests have names without a dot."""


@dataclass(frozen=True, slots=True)
class ClaimTarget(Target):
    """A view of a claim, in place of a container of a pod. `gpu_pod` is the claim in the form of a pod."""

    def __str__(self) -> str:
        return f"ResourceClaim {self.gpu_pod.pod.key}"

    @property
    def subject(self) -> str:
        return f"ResourceClaim {self.gpu_pod.pod.name}"


@dataclass(frozen=True, slots=True)
class View:
    """What a container sees of a claim.

    Attributes:
        name: The request, or `WHOLE_CLAIM`.
        cards: The cards by index, and the MIG instances as cards of their own types.
        shares: What the claim holds of these cards, one share for each card of which it holds any.
    """

    name: str
    cards: tuple[Card, ...]
    shares: tuple[Share, ...]

    def environment(self) -> dict[str, str]:
        """Return the variables, which have the same names as those of a pod's container."""
        amounts = [share.amount(card) for share in self.shares for card in self.cards if share.is_on(card)]
        core = min((amount.core for amount in amounts), default=0)
        memory = min((amount.memory for amount in amounts), default=0)
        instances = [device for card in self.cards if (device := instance_of(card)) is not None]
        indexes = dict.fromkeys(parent_index(card) for card in self.cards)
        slices = {"MGPU_SLICES": ",".join(device.instance.profile for device in instances)} if instances else {}
        return {
            VISIBLE: ",".join(card.uuid for card in self.cards),
            "MGPU_CARDS": ",".join(map(str, indexes)),
            "MGPU_CORE_PERCENT": f"{core / 10:g}",
            "MGPU_MEMORY_BYTES": str(memory),
            **slices,
        }


def instance_of(card: Card) -> MigDevice | None:
    """Return the MIG instance that a device of a view stands for; None for a card."""
    return mig_device_at(card.type, card.index)


def parent_index(card: Card) -> int:
    """Return the index of the card, or of the card of the MIG instance."""
    device = instance_of(card)
    return card.index if device is None else device.card


def card_of(result: Result, cards: Iterable[Card]) -> Card | None:
    """Return the card or the MIG instance of an allocation result; None if it is not among these."""
    device = result.mig_device
    place = (GPU, card_index(result.device)) if device is None else (device.type, device.index)
    return next((card for card in cards if (card.type, card.index) == place), None)


def views_of(claim: Claim, cards: Sequence[Card]) -> tuple[View, ...]:
    """Return a view for each request of an allocated claim. If there are several, the last view is the whole claim.

    Args:
        cards: The GPUs of the node and the MIG instances of the claim, with the card of each result.
    """
    held = claim_holding(claim)
    shares = held.shares if held is not None else ()
    names = list(dict.fromkeys(base_request(result.request) for result in claim.results))
    views = [
        _view(
            name,
            [result for result in claim.results if base_request(result.request) == name],
            [share for share in shares if base_request(share.container) == name],
            cards,
        )
        for name in names
    ]
    return (*views, _view(WHOLE_CLAIM, claim.results, shares, cards)) if len(views) > 1 else tuple(views)


def _view(name: str, results: Sequence[Result], shares: Sequence[Share], cards: Sequence[Card]) -> View:
    found = {(card.type, card.index): card for result in results if (card := card_of(result, cards)) is not None}
    own = tuple(found[place] for place in sorted(found))
    merged = (_merged(name, [share for share in shares if share.is_on(card)], card) for card in own)
    return View(name, own, tuple(share for share in merged if share is not None))


def _merged(name: str, shares: Sequence[Share], card: Card) -> Share | None:
    """Return what all these shares hold together of a card."""
    if not shares:
        return None
    if any(share.whole for share in shares):
        return Share(name, card.uuid, card.core, whole=True, type=card.type)
    amounts = [share.amount(card) for share in shares]
    return Share(name, card.uuid, sum(a.core for a in amounts), sum(a.memory for a in amounts))


def target_of(claim: Claim, view: View, *, is_shared: bool) -> ClaimTarget:
    """Return the view in the form of a container, for the parts of the agent that limit containers.

    It has only the shares of cards, because MIG itself limits instances. A card that it sees by administrative access,
    without a share, is like a whole card: nothing limits it.
    """
    held = tuple(share for share in view.shares if share.type == GPU)
    seen = (card for card in view.cards if card.type == GPU and not any(share.is_on(card) for share in held))
    shares = (*held, *(Share(view.name, card.uuid, card.core, whole=True) for card in seen))
    requests = tuple(_request(share, view) for share in shares)
    pod = Pod(claim.namespace, claim.name, claim.uid, node=claim.node)
    gpu_pod = GpuPod(pod, GpuRequest(DRA, requests, constraints=claim.card_constraints), shares)
    return ClaimTarget(gpu_pod, view.name, is_shared)


def _request(share: Share, view: View) -> ContainerRequest:
    cards = sum(card.type == GPU for card in view.cards)
    return ContainerRequest(view.name, cards, share.core, share.memory, share.whole)


def holder_of(claim: Claim) -> GpuPod:
    """Return an allocated claim in the form of a pod, for the parts of the agent that compare holdings of pods."""
    held = claim_holding(claim)
    shares = held.shares if held is not None else ()
    shares = tuple(share for share in shares if share.type == GPU)
    requests = tuple(ContainerRequest(s.container, 1, s.core, s.memory, s.whole, ratio=s.ratio) for s in shares)
    pod = Pod(claim.namespace, claim.name, claim.uid, node=claim.node)
    return GpuPod(pod, GpuRequest(DRA, requests), shares)


def devices_of(claim: Claim, views: Sequence[View], cards: Sequence[Card]) -> Iterator[PreparedDevice]:
    """Yield what the kubelet gets: an entry for each result, and the one for containers that reference all of it."""
    by_name = {view.name: view for view in views}
    for position, result in enumerate(claim.results):
        card = card_of(result, cards)
        assert card is not None
        request = base_request(result.request)
        names = (cdi_name(own_device(claim.uid, position)), cdi_name(view_device(claim.uid, request)))
        amount = _amount(claim, result, card)
        place = result.pool, result.device, result.share_id
        index = parent_index(card)
        instance = str(result.mig_device.instance) if result.mig_device is not None else ""
        yield PreparedDevice(request, *place, names, card.uuid, index, amount.core, amount.memory, instance=instance)
    if WHOLE_CLAIM in by_name:
        first = claim.results[0]
        card = by_name[WHOLE_CLAIM].cards[0]
        only = (cdi_name(view_device(claim.uid, WHOLE_CLAIM)),)
        place = first.pool, first.device, first.share_id
        yield PreparedDevice(WHOLE_CLAIM, *place, only, card.uuid, parent_index(card), is_result=False)


def own_device(uid: str, position: int) -> str:
    """Return the name of the CDI device of an allocation result."""
    return f"{uid}.{position}"


def view_device(uid: str, view: str) -> str:
    """Return the name of the CDI device of a view."""
    return f"{uid}-{view}"


def view_in(uid: str, device: str) -> str | None:
    """Return the view of a CDI device of this claim; None if the device is that of a result."""
    return device.removeprefix(f"{uid}-") if device.startswith(f"{uid}-") else None


def own_environment(uid: str, position: int, card: Card) -> Mapping[str, str]:
    """Return the variable of a result. It is unique, so that those of several results and claims add up.

    CDI requires at least one edit for each device.
    """
    return {f"MGPU_CLAIM_{uid.replace('-', '_')}_{position}": card.uuid}


def _amount(claim: Claim, result: Result, card: Card) -> Amount:
    held = claim_holding(claim)
    for share in held.shares if held is not None and not result.admin else ():
        if share.container == result.request and share.is_on(card):
            return share.amount(card)
    return Amount()


def held_shares(claim: Claim, cards: Sequence[Card]) -> tuple[Share, ...]:
    """Return what an allocated claim holds of the cards, which the shares name by UUID.

    The share of a MIG instance names the UUID of its card and its start (`claim_records`).
    """
    held = claim_holding(claim)
    view = _view(WHOLE_CLAIM, claim.results, held.shares if held is not None else (), cards)
    gpus = {card.index: card.uuid for card in cards if card.type == GPU}
    places = {
        card.uuid: f"{gpus[device.card]}/{device.instance.start}"
        for card in view.cards
        if (device := instance_of(card)) is not None and device.card in gpus
    }
    return tuple(replace(s, card=places.get(s.card, s.card)) if isinstance(s.card, str) else s for s in view.shares)
