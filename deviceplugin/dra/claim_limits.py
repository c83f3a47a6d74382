"""Finds out to what the containers of pods with claims are limited, for the back end that limits running containers."""

from collections.abc import Callable, Iterator, Sequence

from deviceplugin.dra.claim_records import ClaimRecord
from deviceplugin.dra.claim_users import ClaimPod, ClaimUsers
from deviceplugin.dra.claim_views import WHOLE_CLAIM
from deviceplugin.dra.prepared_claims import PreparedClaims
from deviceplugin.isolation.backend import Key
from deviceplugin.isolation.limits import CardLimit
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

    def _limits(self, record: ClaimRecord, request: str) -> Iterator[CardLimit]:
        """Yield the limits of a view. Whole cards have none."""
        for card in self._gpus():
            own = [
                device
                for device in record.devices
                if device.is_result and device.card == card.uuid and request in ("", device.request)
            ]
            core, memory = sum(device.core for device in own), sum(device.memory for device in own)
            if own and (core < card.core or memory < card.memory):
                yield CardLimit(card, memory or None, core or None)


def _whole_view(record: ClaimRecord) -> str:
    requests = {device.request for device in record.devices if device.is_result}
    return WHOLE_CLAIM if len(requests) > 1 else next(iter(requests), WHOLE_CLAIM)
