"""Exchange of allocation records where the container runtime has no CDI.

Allocate had to guess the container there, and the kubelet keeps its answer. If the guess was wrong, a container got the
cards of another one with an equal request. That does no harm as long as the records say what is so, so the two records
change places. Each step is a transposition: at any time each placement belongs to exactly one container.

The allocator calls this before a container starts (`deviceplugin.allocation.allocator_without_cdi`).
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
"""Pod UID and container."""


class RecordExchange:
    """Used on one event loop.

    Args:
        gpus: returns the GPUs of the node.
        write: sends annotations of a pod to the API server, in the background.
        sealed: whether records are sealed. A record that an agent writes would not count then.
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
        self._settled: set[Key] = set()

    def settle(self, target: Target, env: Mapping[str, str], served: set[Key]) -> None:
        """Make the records say that the container runs on what its answer `env` names.

        Args:
            served: the containers whose placement Allocate has given away; kept true.

        Raises Refused if the container must not run on those cards.
        """
        gpus = self._gpus()
        own = recorded_cards(target, gpus)
        given = _named(env, gpus)
        uid = target.gpu_pod.pod.uid
        why = f"{target}: the runtime has no CDI, and at admission the cards of another pod were given to it"
        if not given or dict(env) != environment_on(target, given):
            raise Refused(why, uid)
        if own != given and self._sealed:
            rule = "its record is sealed, so that only the scheduler can change it; delete the pod"
            raise Refused(f"{why}; {rule}", uid)
        if own != given and not _is_exchangeable(target):
            raise Refused(why, uid)
        other = self._owner_of(given, target, served) if own != given or target.key not in served else None
        if own != given:
            # The other record first: an agent that dies between the two leaves cards that look free, not held twice.
            if other is not None:
                self._amend(other, own)
            elif short := self._excess(target, given):
                raise Refused(f"{why}; {short}", uid)
            self._amend(target, given)
            CORRECTIONS.labels("records").inc()
        if other is not None and target.key not in served:
            # The placement that this container had is still to be given away, and it is the other one's now.
            served.discard(other.key)
        served.add(target.key)
        self._settled.add(target.key)

    def agrees(self, target: Target, env: Mapping[str, str]) -> bool:
        """Return whether the record says what the answer does; if so, the container is settled."""
        try:
            agrees = dict(env) == environment(target, self._gpus())
        except Refused:
            return False
        if agrees:
            self._settled.add(target.key)
        return agrees

    def keep_only(self, uids: Collection[str]) -> None:
        """Forget all other pods."""
        self._settled = {key for key in self._settled if key[0] in uids}

    def _owner_of(self, given: Sequence[Card], target: Target, served: Collection[Key]) -> Target | None:
        """Return the container whose placement has these cards: the oldest one with an equal request; None if gone.

        It is one of `served`, whose placement Allocate has given away, unless an agent before this one did.
        """
        targets = [
            Target(gpu_pod, request.container)
            for gpu_pod in self._pods.all()
            if gpu_pod.request
            for request in gpu_pod.request.containers
        ]
        for other in sorted(targets, key=lambda other: other.key not in served):
            if other.gpu_pod.pod.ended or other.gpu_pod.problem or other.key in {*self._settled, target.key}:
                continue
            if other.carrier != target.carrier or not _is_exchangeable(other):
                continue  # Allocate of one resource never gives away what another one carries
            equal = replace(other.request, container=target.container, stage=target.request.stage) == target.request
            recorded = {card for card in self._gpus() if any(share.is_on(card) for share in other.shares)}
            if equal and recorded == set(given):
                return other
        return None

    def _excess(self, target: Target, given: Sequence[Card]) -> str | None:
        """Return why the container cannot have these cards beside what the records of other pods say."""
        gpus = self._gpus()
        uid = target.gpu_pod.pod.uid
        others = [other for other in self._pods.all() if not other.pod.ended and other.pod.uid != uid]
        return excess(holding(_placed_on(target, given), gpus), [holding(other, gpus) for other in others], gpus)

    def _amend(self, target: Target, cards: Sequence[Card]) -> None:
        # Both containers may be of one pod: then the first amendment must not be undone by the second.
        now = self._pods.by_uid(target.gpu_pod.pod.uid) or target.gpu_pod
        annotations = self._record(_placed_on(Target(now, target.container), cards))
        self._pods.amend(now, annotations)
        self._write(now, annotations)

    def _record(self, gpu_pod: GpuPod) -> dict[str, str]:
        """Return the annotations that record the pod's shares; none if it requests nothing."""
        request = gpu_pod.request
        if request is None:
            return {}
        gpus = self._gpus()
        placed = []
        for container in request.containers:
            own = Target(gpu_pod, container.container).shares
            indexes = (card.index for card in gpus if any(share.is_on(card) for share in own))
            placed.append((container.container, tuple(sorted(indexes))))
        placement = Placement(tuple(placed))
        dialect = dialects.by_name(request.dialect)
        return dialect.write_placement(gpu_pod.pod, request, placement, gpus, self._settings, time.time_ns())


def _named(env: Mapping[str, str], gpus: Sequence[Card]) -> tuple[Card, ...]:
    """Return the cards that an environment names."""
    uuids = env.get(VISIBLE, "").split(",")
    return tuple(card for card in gpus if card.uuid in uuids)


def _is_exchangeable(target: Target) -> bool:
    """Return whether the agent can write the pod's record: it knows the request, and all of it is about GPUs."""
    return target.gpu_pod.request is not None and not target.gpu_pod.request.others


def _placed_on(target: Target, cards: Sequence[Card]) -> GpuPod:
    """Return the pod as if its record gave these cards to the container. Raises Refused if it requests none."""
    gpu_pod = target.gpu_pod
    request = target.request
    moved = tuple(share_of(request, card.index) for card in cards)
    shares = gpu_pod.shares or ()
    kept = (share for share in shares if share.type == GPU and share.container != request.container)
    others = tuple(share for share in shares if share.type != GPU)
    order = [container.container for container in gpu_pod.request.containers] if gpu_pod.request else []
    return replace(gpu_pod, shares=(*sorted((*kept, *moved), key=lambda s: order.index(s.container)), *others))
