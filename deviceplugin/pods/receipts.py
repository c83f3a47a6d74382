"""Receipts: which cards each pod was given, in files that outlive the agent and the pod's object in the API.

An API object can vanish while its containers run. `deviceplugin.pods.remnants` writes the receipt before a container
starts, and holds the cards in it until the container runtime reports that the pod has ended. Agents of different
versions read each other's files: a field may be added with a default, and none may change its meaning.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from mgpu.model.cards import GPU, Card
from mgpu.model.device_checkpoints import CheckpointEntry
from mgpu.model.ledger import Holding, Minor, Share
from mgpu.model.pods import Stage

log = logging.getLogger(__name__)

_NAME = "mgpu_{}_receipt"
"""Without the suffix `.json`, with which the container runtime would read it as a CDI spec. The prefix is that of CDI
files, so that an agent from before receipts removes them as well (`CdiFiles.keep_only`)."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one pod was given.

    Attributes:
        uid: the pod's UID in the API; where another plugin gave the cards, the kubelet's.
        kubelets_uid: the UID by which the kubelet and the runtime know the pod.
        grace: seconds that the kubelet lets its containers run after its deletion.
        shares: its shares; GPUs are named by UUID, since indexes may change.
    """

    uid: str
    kubelets_uid: str
    grace: int
    shares: tuple[Share, ...]


def merge_by_card(shares: Sequence[Share], cards: Sequence[Card]) -> tuple[Share, ...]:
    """Return what the shares are together at the pod's busiest moment: of each GPU one share, named by UUID.

    A pod of hundreds of containers has a receipt of one row for each card, and the Device that repeats it is bounded.
    Shares of slices, and of cards that are not there, stay as they are.
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
    """Yield one row of the Device for all GPUs of which the pod holds the same.

    Args:
        shares: as `summed` has them.
        container: the name to put into the rows; None: their number.
    """
    on: dict[Share, list[str]] = {}
    for share in shares:
        if share.type == GPU and isinstance(share.card, str):
            on.setdefault(replace(share, card=None), []).append(share.card)
    for i, (share, cards) in enumerate(on.items()):
        yield CheckpointEntry(uid, str(i) if container is None else container, resource, tuple(sorted(cards)), share)


class Receipts:
    """The receipts in `folder`. `read` takes over what is there; from then on they are kept in memory too."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, Receipt] = {}

    def read(self) -> None:
        """Take over what another agent has written. A file that is damaged is logged and ignored."""
        found: dict[str, Receipt] = {}
        for file in sorted(self._folder.glob(_NAME.format("*"))):
            try:
                receipt = _parsed(orjson.loads(file.read_bytes()))
            except (OSError, ValueError, LookupError, TypeError) as error:
                log.warning("receipt %s is not readable: %r", file, error)
                continue
            found[receipt.uid] = receipt
        self._known = found

    def all(self) -> Mapping[str, Receipt]:
        """Return the receipts by the UID of their pod."""
        return self._known

    def write(self, receipt: Receipt) -> None:
        """Write the receipt in place of the pod's former one. Raises OSError."""
        if self._known.get(receipt.uid) == receipt:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / _NAME.format(receipt.uid)
        # Replaced as a whole: the agent may be killed in the middle, and a receipt in pieces would free the cards.
        new = file.with_suffix(".new")
        new.write_bytes(orjson.dumps(asdict(receipt), default=tuple))
        os.replace(new, file)
        self._known = {**self._known, receipt.uid: receipt}

    def remove(self, uid: str) -> None:
        """Remove the pod's receipt."""
        self._known = {key: receipt for key, receipt in self._known.items() if key != uid}
        try:
            (self._folder / _NAME.format(uid)).unlink(missing_ok=True)
        except OSError as error:
            log.warning("receipt not removed: %s", error)


def _parsed(data: dict[str, Any]) -> Receipt:
    shares = tuple(_share(row) for row in data["shares"])
    return Receipt(str(data["uid"]), str(data["kubelets_uid"]), int(data["grace"]), shares)


def _share(row: dict[str, Any]) -> Share:
    card = row["card"]
    named = Minor(card[0]) if isinstance(card, list) else card  # a tuple is a list in JSON
    return Share(**{**row, "card": named, "stage": Stage(row["stage"])})
