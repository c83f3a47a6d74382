"""Stores which claims were prepared on this node, one file for each claim. The files outlive the agent and a reboot.

A record says which cards a claim holds, and what the container runtime does to containers that use the claim.
`dra.prepared_claims` writes it before anything is delivered. Agents of different versions read each other's files, so
unknown fields are ignored, a new field needs a default, and no field may change its meaning.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import orjson

from mgpu.model.cards import GPU, Card
from mgpu.model.ledger import Holding, Share
from mgpu.model.pods import Stage
from mgpu.model.resource_claims import DRA, Claim, base_request
from mgpu.model.slice_names import PLACES

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedDevice:
    """One allocation result of a claim, or an entry for containers that reference the whole claim (`claim_views`).

    Attributes:
        request: The request as containers reference it, without the name of an alternative.
        share_id: The identifier of the share, or "" if the device is not shared.
        cdi: The names of the CDI devices of containers that reference the request.
        card: The UUID of the card or of the MIG device.
        index: The index of the card.
        core: What the result holds of the card's core, in milli.
        memory: What it holds of the memory, in bytes.
        is_result: Whether the entry is an allocation result.
        instance: The MIG instance (`2g.20gb at 4`), or "" for a card.
    """

    request: str
    pool: str
    device: str
    share_id: str
    cdi: tuple[str, ...]
    card: str
    index: int
    core: int = 0
    memory: int = 0
    is_result: bool = True
    instance: str = ""

    @property
    def allocated(self) -> tuple[str, str, str, str]:
        return self.request, self.pool, self.device, self.share_id


@dataclass(frozen=True, slots=True)
class ClaimRecord:
    """A claim that is being prepared, or that was delivered.

    Attributes:
        delivered: Whether the kubelet may have got the devices. Before that, no container can use them, so another
            allocation of the claim replaces the record.
        devices: What the kubelet gets.
        shares: What the claim holds. The shares name cards by UUID, since indexes may change. That of a MIG instance
            names the UUID of its card and its start: `GPU-…/4`.
        former: What it held by an earlier allocation, which containers may still use.
        consumers: The UIDs of the pods that may use the claim, when it was prepared.
        spec: The CDI spec.
    """

    uid: str
    namespace: str
    name: str
    devices: tuple[PreparedDevice, ...] = ()
    shares: tuple[Share, ...] = ()
    former: tuple[Share, ...] = ()
    consumers: tuple[str, ...] = ()
    delivered: bool = False
    spec: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def allocation(self) -> frozenset[tuple[str, str, str, str]]:
        """The allocation results for which the record was made."""
        return frozenset(device.allocated for device in self.devices if device.is_result)

    def holding(self, node: str, cards: tuple[Card, ...] = ()) -> Holding:
        """Return what the claim holds. Shares of the given cards name them by index, as those of pods do."""
        indexes = {card.uuid: card.index for card in cards}
        named = tuple(_by_index(share, indexes) for share in (*self.shares, *self.former))
        return Holding(self.uid, self.namespace, self.name, node, DRA, named)


def allocation_of(claim: Claim) -> frozenset[tuple[str, str, str, str]]:
    """Return the results of the claim in the form of `ClaimRecord.allocation`."""
    return frozenset((base_request(r.request), r.pool, r.device, r.share_id) for r in claim.results)


def _by_index(share: Share, indexes: Mapping[str, int]) -> Share:
    if not isinstance(share.card, str):
        return share
    if share.type == GPU:
        return replace(share, card=indexes.get(share.card, share.card))
    card, _, start = share.card.rpartition("/")
    is_known = card in indexes and start.isdecimal()
    return replace(share, card=indexes[card] * PLACES + int(start)) if is_known else share


class ClaimRecords:
    """The files `<claim UID>.json` in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self) -> dict[str, ClaimRecord]:
        """Return the records by UID. A damaged file is logged and ignored."""
        found: dict[str, ClaimRecord] = {}
        for file in sorted(self._folder.glob("*.json")):
            try:
                record = _parsed(orjson.loads(file.read_bytes()))
            except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
                log.warning("ignoring unreadable record of a claim %s: %r", file, error)
                continue
            if file.name == _file_name(record.uid):
                found[record.uid] = record
        return found

    def write(self, record: ClaimRecord) -> None:
        """Write the record in place of an earlier one of the claim. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / _file_name(record.uid)
        # The file is replaced atomically, so that an agent that is killed leaves no truncated file. It is not flushed
        # to the disk: after a power failure no container runs, and the kubelet has all claims prepared again.
        new = file.with_suffix(".new")
        new.write_bytes(orjson.dumps(asdict(record), default=tuple))
        os.replace(new, file)

    def remove(self, uid: str) -> None:
        """Remove the record of a claim, if there is one. Raises OSError."""
        (self._folder / _file_name(uid)).unlink(missing_ok=True)


def _file_name(uid: str) -> str:
    return f"{uid}.json"


def _parsed(data: Mapping[str, Any]) -> ClaimRecord:
    return ClaimRecord(
        uid=str(data["uid"]),
        namespace=str(data["namespace"]),
        name=str(data["name"]),
        devices=tuple(_device(row) for row in data["devices"]),
        shares=tuple(_share(row) for row in data["shares"]),
        former=tuple(_share(row) for row in data.get("former", ())),
        consumers=tuple(str(uid) for uid in data.get("consumers", ())),
        delivered=bool(data["delivered"]),
        spec=dict(data["spec"]),
    )


def _device(row: Mapping[str, Any]) -> PreparedDevice:
    known = {one.name: row[one.name] for one in fields(PreparedDevice) if one.name in row}
    return PreparedDevice(**{**known, "cdi": tuple(row["cdi"])})


def _share(row: Mapping[str, Any]) -> Share:
    known = {one.name: row[one.name] for one in fields(Share) if one.name in row}
    return Share(**{**known, "stage": Stage(row["stage"])})
