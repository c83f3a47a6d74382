"""Writes and reads receipts: files that say which cards each pod got. They outlive the agent and the pod's API object.

`pods.remnants` writes a receipt before a container starts, because the API object can disappear while the container
runs. The cards in the receipt stay held until `pods.remnants` removes the receipt. `pods.unrecorded_pods` calls only
`merge_by_card` and `device_rows`, for pods without an allocation record. Agents of different versions read each other's
files, so unknown fields are ignored, a new field needs a default, and no field may change its meaning.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import orjson

from mgpu.model.cards import GPU, Card
from mgpu.model.device_checkpoints import CheckpointEntry
from mgpu.model.ledger import Holding, Minor, Share
from mgpu.model.pods import Stage

log = logging.getLogger(__name__)

_NAME = "mgpu_{}_receipt"
"""The name of a receipt. It does not end in `.json`, so the container runtime does not read the file as a CDI spec. It
begins like the names of CDI files. So an agent of a version without receipts removes it together with the CDI files of
pods that no longer exist (`CdiFiles.keep_only`)."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """The cards that one pod got.

    Attributes:
        uid: The pod's UID in the API, or `kubelets_uid` if another plugin gave out the cards.
        kubelets_uid: The UID by which the kubelet and the runtime know the pod. For a static pod it is not the UID in
            the API.
        grace: The time in seconds that the kubelet lets the containers run after the deletion.
        shares: The shares that the pod holds. They name GPUs by UUID, since indexes may change.
    """

    uid: str
    kubelets_uid: str
    grace: int
    shares: tuple[Share, ...]


def merge_by_card(shares: Sequence[Share], cards: Sequence[Card]) -> tuple[Share, ...]:
    """Return one share for each GPU, with the most that the pod holds of that GPU at any time.

    Without this function, a pod with hundreds of containers would have hundreds of rows in its receipt and in the
    annotation of the Device object, whose size is limited. Shares of slices, and of cards that the node does not have,
    stay as they are.
    """
    held = Holding("", "", "", "", "", tuple(shares))
    gpus = [card for card in cards if card.type == GPU]
    uses = [(card, held.uses(card)) for card in gpus if held.is_on(card)]
    there = [Share("", card.uuid, use.core, use.memory, ratio=use.ratio or None) for card, use in uses]
    others = (share for share in shares if not any(share.is_on(card) for card in gpus))
    return (*there, *dict.fromkeys(others))


def device_rows(
    uid: str, resource: str, shares: Sequence[Share], container: str | None = None
) -> Iterator[CheckpointEntry]:
    """Yield rows for the annotation of the Device object that `mgpu.model.device_checkpoints` writes.

    There is one row for all GPUs of which the pod holds equal shares.

    Args:
        shares: The result of `merge_by_card`.
        container: The name of the container in the rows; None if the rows have numbers instead of a name.
    """
    uuids: dict[Share, list[str]] = {}
    for share in shares:
        if share.type == GPU and isinstance(share.card, str):
            uuids.setdefault(replace(share, card=None), []).append(share.card)
    for i, (share, cards) in enumerate(uuids.items()):
        yield CheckpointEntry(uid, str(i) if container is None else container, resource, tuple(sorted(cards)), share)


class Receipts:
    """The receipts in `folder`, cached in memory. Call `read` before all other methods. Any thread may call `all`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, Receipt] = {}

    def read(self) -> None:
        """Read all files, some of which other agents may have written. A damaged file is logged and ignored."""
        found: dict[str, Receipt] = {}
        for file in sorted(self._folder.glob(_NAME.format("*"))):
            try:
                receipt = _parsed(orjson.loads(file.read_bytes()))
            except (OSError, ValueError, LookupError, TypeError) as error:
                log.warning("ignoring unreadable receipt %s: %r", file, error)
                continue
            found[receipt.uid] = receipt
        self._known = found

    def all(self) -> Mapping[str, Receipt]:
        """Return the receipts by the UID of their pod."""
        return self._known

    def write(self, receipt: Receipt) -> None:
        """Write the receipt in place of an earlier one of the pod. Raises OSError."""
        if self._known.get(receipt.uid) == receipt:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / _NAME.format(receipt.uid)
        # The file is replaced atomically. If an agent that is killed left a truncated file, the cards would be free.
        new = file.with_suffix(".new")
        new.write_bytes(orjson.dumps(asdict(receipt), default=tuple))
        os.replace(new, file)
        self._known = {**self._known, receipt.uid: receipt}

    def remove(self, uid: str) -> None:
        """Remove the pod's receipt. A failure is logged."""
        self._known = {key: receipt for key, receipt in self._known.items() if key != uid}
        try:
            (self._folder / _NAME.format(uid)).unlink(missing_ok=True)
        except OSError as error:
            log.warning("cannot remove a receipt: %s", error)


def _parsed(data: dict[str, Any]) -> Receipt:
    shares = tuple(_share(row) for row in data["shares"])
    return Receipt(str(data["uid"]), str(data["kubelets_uid"]), int(data["grace"]), shares)


def _share(row: dict[str, Any]) -> Share:
    card = row["card"]
    named = Minor(card[0]) if isinstance(card, list) else card  # A `Minor` is a tuple, and so a list in JSON.
    known = {field.name: row[field.name] for field in fields(Share) if field.name in row}
    return Share(**{**known, "card": named, "stage": Stage(row["stage"])})
