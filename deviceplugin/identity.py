"""For which pod and container a kubelet's call is, and what that container gets.

The kubelet does not say. `Allocate` has to answer at once, so it says `void` unless only one container can be meant;
before the container is created, `PreStartContainer` asks the kubelet who owns the device ids, and then it is certain
(design.md, "Node agent").
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from deviceplugin.pods import GpuPod
from mgpu import dialects
from mgpu.model.cards import Card

VOID = {"NVIDIA_VISIBLE_DEVICES": "void"}
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


def candidates(
    pods: Iterable[GpuPod], resource: str, amount: int, served: Mapping[str, Collection[str]]
) -> Iterator[Target]:
    """The containers that an Allocate of `amount` ids can be for, in the pods' order.

    Of each pod that has not started, the first container (in start order, as the kubelet allocates) that asks for
    this resource and was not served yet; `served`: pod UID → containers.
    """
    for known in pods:
        if known.pod.ended or known.pod.started:
            continue
        done = served.get(known.pod.uid, ())
        following = next(((c.name, asked) for c, asked in known.asking(resource) if c.name not in done), None)
        if following is not None and following[1] == amount:
            yield Target(known, following[0])


def environment(target: Target, cards: Sequence[Card]) -> dict[str, str]:
    """What the container sees of its cards, as its pod's record says. Raises Refused."""
    known, uid = target.known, target.known.pod.uid
    if known.problem:
        raise Refused(f"{known.pod.key}: {known.problem}", uid)
    ask = known.container_ask(target.container)
    if known.ask is None or ask is None:
        raise Refused(f"{target} asks for no GPU", uid)
    if known.shares is None:
        raise Refused(f"{known.pod.key}: no cards have been decided for the pod yet", uid)
    chosen = []
    for share in known.shares:
        if share.container == target.container:
            card = next((card for card in cards if share.is_on(card)), None)
            if card is None:
                names = ", ".join(f"{c.index} ({c.uuid})" for c in cards) or "none"
                why = f"{target}: its record names card {share.card}, which this node has not; it has {names}"
                raise Refused(why, uid)
            if not card.healthy:
                raise Refused(f"{target}: card {card.index} ({card.uuid}) is unhealthy", uid)
            chosen.append(card)
    if len(set(chosen)) != ask.cards:
        raise Refused(f"{target}: its record names {len(set(chosen))} cards, it asks for {ask.cards}", uid)
    chosen.sort(key=lambda card: card.index)
    return dialects.container_environment(known.ask.dialect, ask, chosen)
