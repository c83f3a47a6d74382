"""Finds out what the containers of pods with claims hold, for the parts that limit and measure running containers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from deviceplugin.dra.claim_records import ClaimRecord, PreparedDevice
from deviceplugin.dra.claim_users import ClaimPod, ClaimUsers
from deviceplugin.dra.claim_views import WHOLE_CLAIM
from deviceplugin.dra.prepared_claims import PreparedClaims
from deviceplugin.isolation.backend import Key
from deviceplugin.isolation.limits import CardLimit
from deviceplugin.usage.container_use import ContainerUse
from mgpu.model.cards import Card


class ClaimLimits:
    """The limits of containers that use claims. Thread-safe.

    Args:
        gpus: A function that returns all GPUs of the node.
    """

    def __init__(self, claims: PreparedClaims, users: ClaimUsers, gpus: Callable[[], Sequence[Card]]) -> None:
        self._claims = claims
        self._users = users
        self._gpus = gpus

    def pod(self, uid: str) -> ClaimPod | None:
        """Return the pod with this UID if it uses claims."""
        return self._users.get(uid)

    def limits_of(self, uid: str, container: str) -> tuple[tuple[Key, tuple[CardLimit, ...]], ...]:
        """Return the limits of a container, given by the UID of its pod and by its name.

        Each row has a view of a claim that the container uses, by the UID of the claim and the name of the view.
        """
        pod = self._users.get(uid)
        if pod is None or pod.ended:
            return ()
        rows = []
        for reference in pod.references.get(container, ()):
            record = self._claims.named(pod.namespace, reference.claim)
            if record is not None:
                view = reference.request or _whole_view(record)
                rows.append(((record.uid, view), tuple(self._limits(record, reference.request))))
        return tuple(rows)

    def uses(self) -> tuple[ContainerUse, ...]:
        """Return a row without use for each container of a claim's pods and each card that it sees."""
        return tuple(use for uid in sorted(self._users.uids()) for use in self._uses(uid))

    def _uses(self, uid: str) -> Iterator[ContainerUse]:
        pod = self._users.get(uid)
        if pod is None or pod.ended:
            return
        for container in sorted(pod.references):
            memory: dict[Card, int] = {}
            claims: dict[Card, dict[str, None]] = {}
            for claim, device, card in self._devices(pod, container):
                memory[card] = memory.get(card, 0) + device.memory
                claims.setdefault(card, {})[claim] = None
            for card, held in memory.items():
                row = ContainerUse(uid, pod.namespace, pod.name, container, card, limit=held or None)
                yield replace(row, whole=held >= card.memory, claims=tuple(claims[card]))

    def _devices(self, pod: ClaimPod, container: str) -> Iterator[tuple[str, PreparedDevice, Card]]:
        """Yield the devices that a container sees, each once, with the name of the claim and the card."""
        cards = {card.uuid: card for card in self._gpus()}
        seen = set()
        for reference in pod.references.get(container, ()):
            record = self._claims.named(pod.namespace, reference.claim)
            for device in record.devices if record is not None else ():
                place = reference.claim, device.allocated
                is_seen = device.is_result and reference.request in ("", device.request)
                if is_seen and place not in seen and device.card in cards:
                    seen.add(place)
                    yield reference.claim, device, cards[device.card]

    def _limits(self, record: ClaimRecord, request: str) -> Iterator[CardLimit]:
        """Yield the limits of a view. Whole cards have none."""
        for card in self._gpus():
            own = [
                device
                for device in record.devices
                if device.is_result and device.card == card.uuid and request in ("", device.request)
            ]
            core = sum(device.core for device in own)
            memory = sum(device.memory for device in own)
            if own and (core < card.core or memory < card.memory):
                yield CardLimit(card, memory or None, core or None)


def _whole_view(record: ClaimRecord) -> str:
    requests = {device.request for device in record.devices if device.is_result}
    return WHOLE_CLAIM if len(requests) > 1 else next(iter(requests), WHOLE_CLAIM)
