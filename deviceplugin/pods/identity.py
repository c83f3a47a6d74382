"""Which containers an Allocate call can be for, and what a container gets by its pod's record. Pure.

The kubelet does not say for which pod and container it calls. `Allocate` has to answer at once, so it answers `void`
unless a single container is possible. Before the container is created, the kubelet has written the owner of the device
ids into its checkpoint, and `PreStartContainer` knows it for certain (docs/design/design.md, "Node agent").
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from deviceplugin.pods.gpu_pod import GpuPod
from deviceplugin.pods.slice_usage import PLACES_VARIABLE
from mgpu import dialects
from mgpu.model.cards import GPU, Card, noun
from mgpu.model.gpu_requests import ContainerRequest
from mgpu.model.ledger import Minor, Share, absent
from mgpu.model.slice_names import is_slice, place_of

VISIBLE = "NVIDIA_VISIBLE_DEVICES"
VOID = {VISIBLE: "void"}
"""The environment with which the container runtime gives no card at all."""


class Refused(Exception):
    """The container must not start. The message says why, for `kubectl describe pod`.

    Attributes:
        uid: the pod's; "" where the pod is not known.
    """

    def __init__(self, why: str, uid: str = "") -> None:
        super().__init__(why)
        self.uid = uid


@dataclass(frozen=True, slots=True)
class Target:
    """The container that a call is for."""

    gpu_pod: GpuPod
    container: str

    def __str__(self) -> str:
        return f"{self.gpu_pod.pod.key} container {self.container}"

    @property
    def key(self) -> tuple[str, str]:
        return self.gpu_pod.pod.uid, self.container

    @property
    def carrier(self) -> str:
        """The resource whose answer brings the container its cards; "" where none does."""
        return self.gpu_pod.carriers.get(self.container, "")

    @property
    def request(self) -> ContainerRequest:
        """What the container requests; of several types of slices the first. Raises Refused."""
        return self.requests[0]

    @property
    def requests(self) -> tuple[ContainerRequest, ...]:
        """What the container requests: cards, or slices of one type or several. Raises Refused."""
        if self.gpu_pod.problem is not None:
            raise Refused(f"{self.gpu_pod.pod.key}: {self.gpu_pod.problem}", self.gpu_pod.pod.uid)
        requests = self.gpu_pod.container_requests(self.container)
        if not requests:
            raise Refused(f"{self} asks for no GPU", self.gpu_pod.pod.uid)
        return requests

    @property
    def shares(self) -> tuple[Share, ...]:
        """What the pod's record gives to the container of the node's GPUs and slices."""
        own = (s for s in self.gpu_pod.shares or () if s.container == self.container)
        return tuple(s for s in own if s.type == GPU or is_slice(s.type))

    @property
    def requests_slices(self) -> bool:
        """Whether the container requests slices."""
        return any(is_slice(request.type) for request in self.gpu_pod.container_requests(self.container))


def candidates(
    pods: Iterable[GpuPod], resource: str, amount: int, answered: Collection[tuple[str, str]]
) -> Iterator[Target]:
    """Yield the containers that an Allocate of `amount` ids can be for, in the pods' order.

    Of each pod that has not started that is the first container, in start order as the kubelet allocates, that requests
    this resource and was not answered yet.

    Args:
        answered: (pod UID, container).
    """
    for gpu_pod in pods:
        if gpu_pod.pod.ended or gpu_pod.pod.started:
            continue
        asking = gpu_pod.containers_requesting(resource)
        following = next(((c.name, asked) for c, asked in asking if (gpu_pod.pod.uid, c.name) not in answered), None)
        if following is not None and following[1] == amount:
            yield Target(gpu_pod, following[0])


def recorded_cards(target: Target, cards: Sequence[Card]) -> tuple[Card, ...]:
    """Return the cards, or slices, that the pod's record names for the container, by type and index. Raises Refused.

    Args:
        cards: those of the node that are whole, and its slices.
    """
    uid, requests = target.gpu_pod.pod.uid, target.requests
    if target.gpu_pod.shares is None:
        raise Refused(f"{target.gpu_pod.pod.key}: no cards have been decided for the pod yet", uid)
    chosen = set()
    for share in target.shares:
        card = next((card for card in cards if share.is_on(card)), None)
        if card is None:
            raise Refused(f"{target}: its record names {_absent(share, cards)}", uid)
        if not card.healthy:
            raise Refused(f"{target}: {noun(card.type)} {card.index} ({card.uuid}) is unhealthy", uid)
        chosen.add(card)
    for request in requests:
        if (count := sum(card.type == request.type for card in chosen)) != request.cards:
            named = f"{count} {noun(request.type)}s"
            raise Refused(f"{target}: its record names {named}, it asks for {request.cards}", uid)
    return tuple(sorted(chosen, key=lambda card: (card.type, card.index)))


def _absent(share: Share, cards: Sequence[Card]) -> str:
    if is_slice(share.type):
        (name,) = absent((share,), ())
        return f"{name}, which does not exist on this node"
    names = ", ".join(f"{c.index} ({c.uuid})" for c in cards if c.type == GPU) or "none"
    named = f"with minor {share.card.number}" if isinstance(share.card, Minor) else str(share.card)
    return f"card {named}, which this node does not have; it has {names}"


def lacks_slice(target: Target, cards: Sequence[Card]) -> bool:
    """Return whether a slice that the container's record names does not exist, or not yet."""
    return any(is_slice(share.type) and not any(map(share.is_on, cards)) for share in target.shares)


def environment_on(target: Target, cards: Sequence[Card], gpus: Sequence[Card] = ()) -> dict[str, str]:
    """Return the environment of the container with these cards, or slices. Raises Refused where it requests none.

    Args:
        gpus: all of the node's, also those that are cut into slices.
    """
    request = target.gpu_pod.request
    if not target.requests or request is None:
        return {}
    env = dialects.environment_of(target.gpu_pod.pod, request, target.container, cards, gpus)
    if target.requests_slices:
        env[PLACES_VARIABLE] = ",".join("{}:{}".format(*place_of(card.index)) for card in cards)
    return env


def environment(target: Target, cards: Sequence[Card], gpus: Sequence[Card] = ()) -> dict[str, str]:
    """Return the environment of the container with the cards of its pod's record. Raises Refused."""
    return environment_on(target, recorded_cards(target, cards), gpus)
