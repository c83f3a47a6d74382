"""Writes the CDI spec of each prepared claim: the file `mgpu_<claim UID>.json` in the folder of the container runtime.

The name differs from those of the files of containers (`delivery.cdi`), which are removed with their pods.
"""

import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from deviceplugin.delivery.cdi import VERSION, Edits, container_edits

log = logging.getLogger(__name__)

KIND = "mgpu.io/claim"
_PREFIX = "mgpu_"


def cdi_name(device: str) -> str:
    """Return the fully qualified name of a CDI device."""
    return f"{KIND}={device}"


def make_spec(devices: Iterable[tuple[str, Edits]]) -> dict[str, Any]:
    """Return the CDI spec with these devices, each with its name and what it does to a container."""
    rows = [{"name": name, "containerEdits": container_edits(edits)} for name, edits in devices]
    return {"cdiVersion": VERSION, "kind": KIND, "devices": rows}


def environments_in(spec: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the devices of a spec of `make_spec`, each with its name and its environment."""
    for device in spec.get("devices", ()):
        lines = device["containerEdits"].get("env", ())
        yield device["name"], dict(line.split("=", 1) for line in lines)


class ClaimCdiFiles:
    """The CDI specs of claims."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, uid: str, spec: Mapping[str, Any]) -> None:
        """Write the spec of a claim, unless the file has it already. Raises OSError."""
        file = self._file(uid)
        text = orjson.dumps(spec)
        try:
            if file.read_bytes() == text:
                return
        except FileNotFoundError:
            self._folder.mkdir(parents=True, exist_ok=True)
        # The runtime reads only files that end in .json or .yaml, so it does not read the unfinished file.
        new = file.with_suffix(".new")
        new.write_bytes(text)
        os.replace(new, file)

    def remove(self, uid: str) -> None:
        """Remove the spec of a claim, if there is one. Raises OSError."""
        self._file(uid).unlink(missing_ok=True)

    def keep_only(self, uids: Collection[str]) -> None:
        """Remove the specs of all claims except those with these UIDs. A failure is logged."""
        for file in self._folder.glob(f"{_PREFIX}*.json"):
            uid = file.stem.removeprefix(_PREFIX)
            if "_" in uid or uid in uids:
                continue
            try:
                file.unlink(missing_ok=True)
            except OSError as error:
                log.warning("CDI file cannot be removed: %s", error)

    def _file(self, uid: str) -> Path:
        return self._folder / f"{_PREFIX}{uid}.json"
