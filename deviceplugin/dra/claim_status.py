"""Reads ResourceClaims from the API server, and writes into their status which devices were delivered.

The condition `Prepared` protects the allocation: the scheduler process replaces only allocations of claims that are not
prepared, by a write with the resourceVersion that it has read. The agent writes the condition with the resourceVersion
that it has read, too. So exactly one of the two writes succeeds, and the other one gets a conflict.
"""

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from deviceplugin.dra.claim_records import ClaimRecord, PreparedDevice
from mgpu.kube import Api, ApiError, Unreachable
from mgpu.model.claim_object import read_stored_claim
from mgpu.model.errors import BadObject, RetryLater
from mgpu.model.raw_objects import table_at
from mgpu.model.resource_claims import DRIVER, MILLI_PER_PERCENT, PREPARED, Claim, claim_path
from mgpu.settings import CARD_POLICIES

Raw = dict[str, Any]
_CONFLICT = 409
_MISSING = 404
_INVALID = 422


class ClaimGone(Exception):
    """The claim does not exist, or another one has its name."""


class ReadClaim(NamedTuple):
    """A claim, as decoded JSON and as mgpu reads it."""

    raw: Raw
    claim: Claim


class ClaimApi:
    """The claims in the API server. Thread-safe; the methods block."""

    def __init__(self, api: Api, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._api = api
        self._now = now

    def read(self, namespace: str, name: str, uid: str) -> ReadClaim:
        """Return the claim. Raises ClaimGone, and RetryLater if the API server does not answer."""
        try:
            raw = self._api.get(claim_path(namespace, name))
        except ApiError as error:
            if error.status == _MISSING:
                raise ClaimGone(f"ResourceClaim {namespace}/{name} does not exist") from error
            raise RetryLater(f"ResourceClaim {namespace}/{name} cannot be read: {error}") from error
        except Unreachable as error:
            raise RetryLater(f"ResourceClaim {namespace}/{name} cannot be read: {error}") from error
        claim = _read(raw)
        if claim.uid != uid:
            raise ClaimGone(f"ResourceClaim {namespace}/{name} has the UID {claim.uid}, not {uid}")
        return ReadClaim(raw, claim)

    def mark_prepared(self, found: ReadClaim, record: ClaimRecord) -> bool:
        """Write the condition for all devices of the record. Return False if the claim has changed since `found`.

        Raises ClaimGone, and RetryLater if the write was refused, or if it is not known whether it has succeeded.
        """
        rows = [*_devices(found.raw, record, self._now())]
        if rows == table_at(found.raw, "status").get("devices"):
            return True
        body = {**found.raw, "status": {**found.raw["status"], "devices": rows}}
        claim = found.claim
        try:
            self._api.replace(f"{claim_path(claim.namespace, claim.name)}/status", body)
        except ApiError as error:
            if error.status == _CONFLICT:
                return False
            if error.status == _MISSING:
                raise ClaimGone(f"ResourceClaim {claim.key} does not exist") from error
            hint = " (has the agent the rights for resourceclaims/driver?)" if error.status == _INVALID else ""
            raise RetryLater(f"the status of ResourceClaim {claim.key} cannot be written{hint}: {error}") from error
        except Unreachable as error:
            raise RetryLater(f"the status of ResourceClaim {claim.key} cannot be written: {error}") from error
        return True


def _read(raw: Raw) -> Claim:
    try:
        return read_stored_claim(raw, CARD_POLICIES)
    except BadObject as error:
        meta = raw["metadata"]
        raise RetryLater(f"ResourceClaim {meta.get('namespace')}/{meta.get('name')}: {error}") from error


def _devices(raw: Raw, record: ClaimRecord, now: datetime) -> Iterator[Raw]:
    """Yield `status.devices`: the rows of other drivers, and one for each device of the record."""
    before = [row for row in table_at(raw, "status").get("devices") or () if isinstance(row, dict)]
    yield from (row for row in before if row.get("driver") != DRIVER)
    own = {_place(row): row for row in before if row.get("driver") == DRIVER}
    written = set()
    for device in record.devices:
        place = device.pool, device.device, device.share_id
        if device.is_result and place not in written:
            written.add(place)
            yield _row(device, own.get(place, {}), now)


def _described(device: PreparedDevice) -> str:
    card = f"card {device.index}"
    return f"{device.instance} of {card}" if device.instance else card


def _place(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return str(row.get("pool") or ""), str(row.get("device") or ""), str(row.get("shareID") or "")


def _row(device: PreparedDevice, before: Mapping[str, Any], now: datetime) -> Raw:
    conditions = [row for row in before.get("conditions") or () if isinstance(row, dict)]
    others = [row for row in conditions if row.get("type") != PREPARED]
    standing = next((row for row in conditions if row.get("type") == PREPARED and row.get("status") == "True"), None)
    since = standing.get("lastTransitionTime") if standing else None
    condition = {
        "type": PREPARED,
        "status": "True",
        "reason": "Delivered",
        "message": f"containers that reference the claim get {_described(device)} ({device.card})",
        "lastTransitionTime": since or now.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    row: Raw = {
        **before,
        "driver": DRIVER,
        "pool": device.pool,
        "device": device.device,
        "conditions": [*others, condition],
        "data": {
            "uuid": device.card,
            "index": device.index,
            "corePercent": device.core // MILLI_PER_PERCENT,
            "memoryBytes": device.memory,
        },
    }
    return row | ({"shareID": device.share_id} if device.share_id else {})
