"""Exchanges the cards in the allocation records of two containers if the container runtime has no CDI.

`deviceplugin.allocation.allocator_without_cdi` calls `RecordExchange` when the agent starts, and before a container
starts. Without CDI, Allocate has to guess the container, and the kubelet keeps the answer. If the guess was wrong, a
container gets the cards of another container with an equal request. That does no harm if both records are changed
accordingly. After an exchange every placement still belongs to exactly one container.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from deviceplugin.metrics import CORRECTIONS
from deviceplugin.pods.capacity_check import excess, holding
from deviceplugin.pods.gpu_pod import GpuPod
from deviceplugin.pods.identity import VISIBLE, Refused, Target, environment, environment_on, recorded_cards
from deviceplugin.pods.node_pods import NodePods
from mgpu import dialects
from mgpu.model.cards import GPU, Card
from mgpu.model.gpu_requests import Placement
from mgpu.model.ledger import share_of
from mgpu.settings import Settings

Key = tuple[str, str]
"""The UID of a pod, and the name of one of its containers."""


class RecordExchange:
    """Compares records with answers to Allocate, and exchanges records. Use it on one event loop.

    Args:
        gpus: A function that returns the GPUs of the node.
        write: A function that sends annotations of a pod to the API server, in the background.
        sealed: Whether records are sealed. If they are, only the scheduler can write records that count.
    """

    def __init__(
        self,
        pods: NodePods,
        gpus: Callable[[], Sequence[Card]],
        settings: Settings,
        write: Callable[[GpuPod, Mapping[str, str]], None],
        *,
        sealed: bool = False,
    ) -> None:
        self._pods = pods
        self._gpus = gpus
        self._settings = settings
        self._write = write
        self._sealed = sealed
        self._confirmed: set[Key] = set()

    def reconcile(self, target: Target, env: Mapping[str, str], served: set[Key]) -> None:
        """Change the records so that the container's record has the cards of its answer to Allocate.

        Args:
            env: The environment in the answer.
            served: The containers whose placement Allocate has given away, to them or to other containers. The method
                updates this set.

        Raises:
            Refused: The container must not run on the cards of the answer.
        """
        gpus = self._gpus()
        own = recorded_cards(target, gpus)
        given = _visible_cards(env, gpus)
        other = None
        if not given or dict(env) != environment_on(target, given):
            raise Refused(_wrong_cards(target), target.gpu_pod.pod.uid)
        if own != given:
            other = self._exchange(target, own, given, served)
        elif target.key not in served:
            other = self._owner_of(given, target, served)
        if other is not None and target.key not in served:
            # The other container now has the former placement of this one, which Allocate has not given away yet.
            served.discard(other.key)
        served.add(target.key)
        self._confirmed.add(target.key)

    def confirm(self, target: Target, env: Mapping[str, str]) -> bool:
        """Return whether the record agrees with the answer. If it does, later exchanges leave the record alone."""
        try:
            agrees = dict(env) == environment(target, self._gpus())
        except Refused:
            return False
        if agrees:
            self._confirmed.add(target.key)
        return agrees

    def keep_only(self, uids: Collection[str]) -> None:
        """Forget all pods except those with these UIDs."""
        self._confirmed = {key for key in self._confirmed if key[0] in uids}

    def _exchange(
        self, target: Target, own: Sequence[Card], given: Sequence[Card], served: Collection[Key]
    ) -> Target | None:
        """Record the cards `given` for the container, and its former cards `own` for the former owner of `given`.

        Return that owner, or None if it is gone. Raises Refused.
        """
        uid = target.gpu_pod.pod.uid
        if self._sealed:
            remedy = "its record is sealed, so that only the scheduler can change it; delete the pod"
            raise Refused(f"{_wrong_cards(target)}; {remedy}", uid)
        if not _is_exchangeable(target):
            raise Refused(_wrong_cards(target), uid)
        other = self._owner_of(given, target, served)
        # The record of the other container is changed first. If the agent dies between the two changes, the record of
        # this container still differs from its answer, so its next start makes the second change.
        if other is not None:
            self._amend(other, own)
        elif reason := self._excess(target, given):
            raise Refused(f"{_wrong_cards(target)}; {reason}", uid)
        self._amend(target, given)
        CORRECTIONS.labels("records").inc()
        return other

    def _owner_of(self, given: Sequence[Card], target: Target, served: Collection[Key]) -> Target | None:
        """Return a container with an equal request whose placement has these cards; None if there is none.

        Containers in `served` are preferred, because Allocate has given away their placement. Among them, and among the
        other containers, those of older pods are preferred.
        """
        targets = [
            Target(gpu_pod, request.container)
            for gpu_pod in self._pods.all()
            if gpu_pod.request
            for request in gpu_pod.request.containers
        ]
        for other in sorted(targets, key=lambda other: other.key not in served):
            if other.gpu_pod.pod.ended or other.gpu_pod.problem or other.key in {*self._confirmed, target.key}:
                continue
            if other.carrier != target.carrier or not _is_exchangeable(other):
                continue  # An answer for one resource never has the cards of a container with another carrier.
            equal = replace(other.request, container=target.container, stage=target.request.stage) == target.request
            recorded = {card for card in self._gpus() if any(share.is_on(card) for share in other.shares)}
            if equal and recorded == set(given):
                return other
        return None

    def _excess(self, target: Target, given: Sequence[Card]) -> str | None:
        """Return why these cards have too little capacity for the pod and the recorded shares of all other pods.

        Return None if they have enough.
        """
        gpus = self._gpus()
        uid = target.gpu_pod.pod.uid
        others = [other for other in self._pods.all() if not other.pod.ended and other.pod.uid != uid]
        return excess(holding(_placed_on(target, given), gpus), [holding(other, gpus) for other in others], gpus)

    def _amend(self, target: Target, cards: Sequence[Card]) -> None:
        # If both containers belong to one pod, `target` has the record as it was before the first change. The current
        # record is used, so that the second change does not undo the first.
        now = self._pods.by_uid(target.gpu_pod.pod.uid) or target.gpu_pod
        annotations = self._record_of(_placed_on(Target(now, target.container), cards))
        self._pods.amend(now, annotations)
        self._write(now, annotations)

    def _record_of(self, gpu_pod: GpuPod) -> dict[str, str]:
        """Return the annotations that record the pod's shares; empty if the pod requests nothing."""
        request = gpu_pod.request
        if request is None:
            return {}
        gpus = self._gpus()
        placed = []
        for container in request.containers:
            shares = Target(gpu_pod, container.container).shares
            indexes = (card.index for card in gpus if any(share.is_on(card) for share in shares))
            placed.append((container.container, tuple(sorted(indexes))))
        placement = Placement(tuple(placed))
        dialect = dialects.by_name(request.dialect)
        return dialect.write_placement(gpu_pod.pod, request, placement, gpus, self._settings, time.time_ns())


def _wrong_cards(target: Target) -> str:
    return f"{target} was given the cards of another container at admission, and the runtime has no CDI to correct that"


def _visible_cards(env: Mapping[str, str], gpus: Sequence[Card]) -> tuple[Card, ...]:
    uuids = env.get(VISIBLE, "").split(",")
    return tuple(card for card in gpus if card.uuid in uuids)


def _is_exchangeable(target: Target) -> bool:
    """Return whether the agent can write the pod's record. The request must be valid, and only for GPUs."""
    return target.gpu_pod.request is not None and not target.gpu_pod.request.others


def _placed_on(target: Target, cards: Sequence[Card]) -> GpuPod:
    """Return the pod as if its record gave these cards to the container. Raises Refused if it requests no cards."""
    gpu_pod = target.gpu_pod
    request = target.request
    new = tuple(share_of(request, card.index) for card in cards)
    shares = gpu_pod.shares or ()
    of_other_containers = (share for share in shares if share.type == GPU and share.container != request.container)
    other_devices = tuple(share for share in shares if share.type != GPU)
    order = [container.container for container in gpu_pod.request.containers] if gpu_pod.request else []
    gpu_shares = sorted((*of_other_containers, *new), key=lambda s: order.index(s.container))
    return replace(gpu_pod, shares=(*gpu_shares, *other_devices))
