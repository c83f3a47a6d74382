"""Stores which MIG instances the agent has created for claims: one file for each place of a card.

A file is written before its instance is created, and removed after it was destroyed. So an instance without a file was
created by somebody else, and is never destroyed here; and whatever happens between two steps, an instance that the
agent has created has a file. The file does not say whether the instance exists: `mig_instances` finds that out.

The files are in the driver's folder, and outlive the agent and a reboot. No MIG instance outlives a reboot.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from mgpu.model.mig import Instance

log = logging.getLogger(__name__)

FOLDER = "mig-instances"
"""The name of the folder of the files in the driver's folder."""


@dataclass(frozen=True, slots=True, order=True)
class OwnedInstance:
    """A place of a card at which the agent has created an instance, or is about to.

    Attributes:
        card: the UUID of the card.
        claim: the UID of the claim for which it was created.
    """

    card: str
    start: int
    profile: str
    claim: str

    @property
    def instance(self) -> Instance:
        return Instance(self.start, self.profile)

    def __str__(self) -> str:
        return f"{self.instance} of {self.card}"


class MigOwnership:
    """The files. Use it on one event loop; any thread may call `all`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._owned: Mapping[tuple[str, int], OwnedInstance] = {}

    def recover(self) -> None:
        """Read the files that earlier agents have written. A damaged file is logged and ignored."""
        found: dict[tuple[str, int], OwnedInstance] = {}
        for file in sorted(self._folder.glob("*.json")):
            try:
                row = orjson.loads(file.read_bytes())
                own = OwnedInstance(str(row["card"]), int(row["start"]), str(row["profile"]), str(row["claim"]))
            except (OSError, ValueError, LookupError, TypeError) as error:
                log.warning("ignoring unreadable record of a MIG instance %s: %r", file, error)
                continue
            if file.name == _file_name(own):
                found[own.card, own.start] = own
        self._owned = found

    def all(self) -> tuple[OwnedInstance, ...]:
        return tuple(sorted(self._owned.values()))

    def add(self, own: OwnedInstance) -> None:
        """Store an instance that will be created. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / _file_name(own)
        new = file.with_suffix(".new")
        new.write_bytes(orjson.dumps(asdict(own)))
        os.replace(new, file)
        self._owned = {**self._owned, (own.card, own.start): own}

    def remove(self, own: OwnedInstance) -> None:
        """Forget an instance that does not exist any more. Raises OSError."""
        (self._folder / _file_name(own)).unlink(missing_ok=True)
        self._owned = {place: one for place, one in self._owned.items() if place != (own.card, own.start)}


def _file_name(own: OwnedInstance) -> str:
    return f"{own.card}_{own.start}.json"
