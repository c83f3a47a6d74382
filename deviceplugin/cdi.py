"""CDI spec files (Container Device Interface): what a container gets, applied by the runtime when it creates it.

One file per allocated container. The name of its device is a nonce that Allocate gave out: a name made from device ids
could name the file of their previous owner where the kubelet skips PreStartContainer (kubernetes.md). The file's name
says whose it is, so that it can be removed when the pod is gone, by a later agent too.
"""

import logging
import os
import secrets
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import orjson

log = logging.getLogger(__name__)

KIND = "mgpu.io/card"
_VERSION = "0.5.0"
_PREFIX = "mgpu"


def new_name() -> str:
    """A fresh fully qualified device name; no spec of it exists yet."""
    return f"{KIND}={secrets.token_hex(8)}"


class CdiFiles:
    """The spec files in `folder`, which the runtime watches."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, name: str, uid: str, env: Mapping[str, str]) -> None:
        """Make device `name` (as `new_name` gave it) stand for `env`, for a container of the pod `uid`.

        Atomic: the runtime sees the old file, the new one or none. Raises OSError.
        """
        device = name.removeprefix(f"{KIND}=")
        edits = {"env": [f"{key}={value}" for key, value in sorted(env.items())]}
        spec = {"cdiVersion": _VERSION, "kind": KIND, "devices": [{"name": device, "containerEdits": edits}]}
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"{_PREFIX}_{uid}_{device}.json"
        # The runtime reads only what ends in .json or .yaml.
        new = file.with_suffix(".new")
        new.write_bytes(orjson.dumps(spec))
        os.replace(new, file)

    def remove(self, uid: str) -> None:
        """Remove the files of a pod that is gone."""
        self._remove(self._folder.glob(f"{_PREFIX}_{uid}_*"))

    def keep_only(self, uids: Collection[str]) -> None:
        """Remove the files of all other pods: what an agent that was killed could not."""
        ours = self._folder.glob(f"{_PREFIX}_*_*")
        self._remove(file for file in ours if file.name.split("_")[1] not in uids)

    def _remove(self, files: Iterable[Path]) -> None:
        for file in list(files):
            try:
                file.unlink(missing_ok=True)
            except OSError as error:
                log.warning("CDI file not removed: %s", error)
