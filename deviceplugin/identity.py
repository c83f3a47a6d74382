"""For which pod and container a kubelet's call can be, and what a container gets. Pure.

The kubelet does not say. `Allocate` has to answer at once, so it says `void` unless only one container can be meant;
before the container is created, the kubelet has written down whose the answer was, and then it is certain
(design.md, "Node agent").
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from deviceplugin.pods import GpuPod
from mgpu import dialects
from mgpu.model.asks import ContainerAsk
from mgpu.model.cards import GPU, Card
from mgpu.model.ledger import Minor, Share

VISIBLE = "NVIDIA_VISIBLE_DEVICES"
VOID = {VISIBLE: "void"}
"""The runtime then gives no card at all."""


class Refused(Exception):
    """The container must not start. The message says why, for `kubectl describe pod`. uid: the pod's, where known."""

    def __init__(self, why: str, uid: str = "") -> None:
        super().__init__(why)
        self.uid = uid


@dataclass(frozen=True, slots=True)
class Target:
    """The container that a call is for."""

    known: GpuPod
    container: str

    def __str__(self) -> str:
        return f"{self.known.pod.key} container {self.container}"

    @property
    def key(self) -> tuple[str, str]:
        return self.known.pod.uid, self.container

    @property
    def carrier(self) -> str:
        """The resource whose answer brings the container its cards; "" where none can."""
        return self.known.carriers.get(self.container, "")

    @property
    def ask(self) -> ContainerAsk:
        """What the container asks for. Raises Refused."""
        if self.known.problem:
            raise Refused(f"{self.known.pod.key}: {self.known.problem}", self.known.pod.uid)
        ask = self.known.container_ask(self.container)
        if ask is None:
            raise Refused(f"{self} asks for no GPU", self.known.pod.uid)
        return ask

    @property
    def shares(self) -> tuple[Share, ...]:
        """What the pod's record gives to the container of the node's GPUs."""
        return tuple(s for s in self.known.shares or () if (s.container, s.type) == (self.container, GPU))


def candidates(
    pods: Iterable[GpuPod], resource: str, amount: int, served: Collection[tuple[str, str]]
) -> Iterator[Target]:
    """The containers that an Allocate of `amount` ids can be for, in the pods' order.

    Of each pod that has not started, the first container (in start order, as the kubelet allocates) that asks for
    this resource and was not served yet; `served`: (pod UID, container).
    """
    for known in pods:
        if known.pod.ended or known.pod.started:
            continue
        asking = known.asking(resource)
        following = next(((c.name, asked) for c, asked in asking if (known.pod.uid, c.name) not in served), None)
        if following is not None and following[1] == amount:
            yield Target(known, following[0])


def recorded_cards(target: Target, cards: Sequence[Card]) -> tuple[Card, ...]:
    """The cards that the pod's record names for the container, by index. Raises Refused."""
    uid, ask = target.known.pod.uid, target.ask
    if target.known.shares is None:
        raise Refused(f"{target.known.pod.key}: no cards have been decided for the pod yet", uid)
    chosen = set()
    for share in target.shares:
        card = next((card for card in cards if share.is_on(card)), None)
        if card is None:
            names = ", ".join(f"{c.index} ({c.uuid})" for c in cards) or "none"
            named = f"with minor {share.card.number}" if isinstance(share.card, Minor) else str(share.card)
            why = f"{target}: its record names card {named}, which this node has not; it has {names}"
            raise Refused(why, uid)
        if not card.healthy:
            raise Refused(f"{target}: card {card.index} ({card.uuid}) is unhealthy", uid)
        chosen.add(card)
    if len(chosen) != ask.cards:
        raise Refused(f"{target}: its record names {len(chosen)} cards, it asks for {ask.cards}", uid)
    return tuple(sorted(chosen, key=lambda card: card.index))


def environment_on(target: Target, cards: Sequence[Card]) -> dict[str, str]:
    """What the container sees where these are its cards. Raises Refused where it asks for none."""
    ask = target.ask
    dialect = target.known.ask.dialect if target.known.ask else ""
    return dialects.container_environment(target.known.pod, dialect, ask, cards)


def environment(target: Target, cards: Sequence[Card]) -> dict[str, str]:
    """What the container sees of the node's cards, as its pod's record says. Raises Refused."""
    return environment_on(target, recorded_cards(target, cards))
