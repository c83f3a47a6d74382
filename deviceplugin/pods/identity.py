"""Finds the containers that an Allocate call can be for, and the cards that a pod's record gives to a container.

The kubelet does not say for which pod and container it calls Allocate. `allocation.allocator` has to answer at once, so
it answers `VOID` unless `candidates` yields exactly one container and the container's cards are known. Before the
container is created, the kubelet writes the owner of the device ids into its checkpoint, where PreStartContainer reads
it (docs/design/design.md, "Node agent"). All functions are pure.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from deviceplugin.pods.gpu_pod import GpuPod
from deviceplugin.pods.slice_usage import PLACES_VARIABLE
from mgpu import dialects
from mgpu.model.cards import GPU, Card, noun
from mgpu.model.gpu_requests import ContainerRequest
from mgpu.model.ledger import Minor, Share, missing_cards
from mgpu.model.resizing import RESIZED
from mgpu.model.slice_names import is_slice, place_of

VISIBLE = "NVIDIA_VISIBLE_DEVICES"
VOID = {VISIBLE: "void"}
"""With this environment NVIDIA's container runtime gives the container no card."""


class Refused(Exception):
    """The container must not start. `kubectl describe pod` shows the message.

    Attributes:
        uid: The UID of the pod, for the log; "" if it is not known.
    """

    def __init__(self, reason: str, uid: str = "") -> None:
        super().__init__(reason)
        self.uid = uid


@dataclass(frozen=True, slots=True)
class Target:
    """A container, with its pod. A subclass stands for a ResourceClaim (`dra.claim_views`).

    Attributes:
        is_shared: Whether several containers may use it, which only a claim can be.
    """

    gpu_pod: GpuPod
    container: str
    is_shared: bool = False

    def __str__(self) -> str:
        return f"{self.gpu_pod.pod.key} {self.subject}"

    @property
    def subject(self) -> str:
        """What holds the shares, in messages about the pod."""
        return f"container {self.container}"

    @property
    def key(self) -> tuple[str, str]:
        return self.gpu_pod.pod.uid, self.container

    @property
    def carrier(self) -> str:
        """The resource whose answer brings the container its cards; "" if no resource of the container can."""
        return self.gpu_pod.carriers.get(self.container, "")

    @property
    def request(self) -> ContainerRequest:
        """The container's request, or the first one if it requests several types of slices. Raises Refused."""
        return self.requests[0]

    @property
    def requests(self) -> tuple[ContainerRequest, ...]:
        """The container's requests: one for cards, or one for each type of slices. Raises Refused."""
        if self.gpu_pod.problem is not None:
            raise Refused(f"{self.gpu_pod.pod.key}: {self.gpu_pod.problem}", self.gpu_pod.pod.uid)
        requests = self.gpu_pod.container_requests(self.container)
        if not requests:
            raise Refused(f"{self} requests no GPU", self.gpu_pod.pod.uid)
        return requests

    @property
    def shares(self) -> tuple[Share, ...]:
        """The shares of GPUs and slices that the pod's record gives to the container."""
        return self._own(self.gpu_pod.shares)

    @property
    def limited_shares(self) -> tuple[Share, ...]:
        """The shares to which the container must be limited (`GpuPod.limited_shares`)."""
        return self._own(self.gpu_pod.limited_shares)

    def _own(self, shares: Collection[Share] | None) -> tuple[Share, ...]:
        own = (s for s in shares or () if s.container == self.container)
        return tuple(s for s in own if s.type == GPU or is_slice(s.type))

    @property
    def requests_slices(self) -> bool:
        return any(is_slice(request.type) for request in self.gpu_pod.container_requests(self.container))


def candidates(
    pods: Iterable[GpuPod], resource: str, amount: int, answered: Collection[tuple[str, str]]
) -> Iterator[Target]:
    """Yield the containers that an Allocate call with `amount` ids can be for, in the order of `pods`.

    The kubelet allocates for the containers of a pod in their start order. So in each pod that has not started, the
    call can only be for the first container that requests the resource and has not been answered, if it requests
    `amount`.

    Args:
        answered: The containers that have been answered, each as the pod's UID and the container.
    """
    for gpu_pod in pods:
        if gpu_pod.pod.ended or gpu_pod.pod.started:
            continue
        for container, requested in gpu_pod.containers_requesting(resource):
            if (gpu_pod.pod.uid, container.name) not in answered:
                if requested == amount:
                    yield Target(gpu_pod, container.name)
                break


def recorded_cards(target: Target, cards: Sequence[Card]) -> tuple[Card, ...]:
    """Return the cards or slices that the pod's record names for the container, sorted by type and index.

    Raises:
        Refused: The pod has a problem or no record, the container requests no GPU, the record does not match the
            request or the node's cards, or a card is unhealthy.
    """
    uid = target.gpu_pod.pod.uid
    requests = target.requests
    if target.gpu_pod.shares is None:
        raise Refused(f"{target.gpu_pod.pod.key}: no cards have been decided for the pod yet", uid)
    chosen = set()
    for share in target.shares:
        card = next((card for card in cards if share.is_on(card)), None)
        if card is None:
            raise Refused(f"{target}: its record names {_describe_absent(share, cards)}", uid)
        if not card.healthy:
            raise Refused(f"{target}: {noun(card.type)} {card.index} ({card.uuid}) is unhealthy", uid)
        chosen.add(card)
    for request in requests:
        if (count := sum(card.type == request.type for card in chosen)) != request.cards:
            named = f"{count} {noun(request.type)}s"
            raise Refused(f"{target}: its record names {named}, but it requests {request.cards}", uid)
    return tuple(sorted(chosen, key=lambda card: (card.type, card.index)))


def _describe_absent(share: Share, cards: Sequence[Card]) -> str:
    if is_slice(share.type):
        (name,) = missing_cards((share,), ())
        return f"{name}, which does not exist on this node"
    names = ", ".join(f"{c.index} ({c.uuid})" for c in cards if c.type == GPU) or "none"
    named = f"with minor {share.card.number}" if isinstance(share.card, Minor) else str(share.card)
    return f"card {named}, which this node does not have; it has {names}"


def lacks_slice(target: Target, cards: Sequence[Card]) -> bool:
    """Return whether the container's record names a slice that does not exist, perhaps not yet."""
    return any(is_slice(share.type) and not any(map(share.is_on, cards)) for share in target.shares)


def environment_on(target: Target, cards: Sequence[Card], gpus: Sequence[Card] = ()) -> dict[str, str]:
    """Return the environment of the container with these cards or slices.

    `gpus` are all GPUs of the node. Raises Refused if the container requests no GPU, or its pod has a problem.
    """
    request = target.gpu_pod.request
    if not target.requests or request is None:
        return {}
    env = dialects.environment_of(target.gpu_pod.pod, request, target.container, cards, gpus)
    if RESIZED in target.gpu_pod.pod.annotations:
        amounts = [s.amount(card).memory for s in target.limited_shares for card in cards if s.is_on(card)]
        env["MGPU_MEMORY_BYTES"] = str(min(amounts, default=0))
    if target.requests_slices:
        env[PLACES_VARIABLE] = ",".join("{}:{}".format(*place_of(card.index)) for card in cards)
    return env


def environment(target: Target, cards: Sequence[Card], gpus: Sequence[Card] = ()) -> dict[str, str]:
    """Return the environment of the container with the cards of its pod's record. Raises Refused."""
    return environment_on(target, recorded_cards(target, cards), gpus)
