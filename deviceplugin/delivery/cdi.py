"""CDI spec files (Container Device Interface): what a container gets, applied by the runtime when it creates it.

One file per allocated container. The name of its device is a nonce that Allocate gave out: a name made from device ids
could name the file of their previous owner where the kubelet skips PreStartContainer (kubernetes.md). The file's own
name says whose it is: so it can be removed when the pod is gone, and an agent that starts knows what was handed out.
"""

import logging
import os
import re
import secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import orjson

log = logging.getLogger(__name__)

KIND = "mgpu.io/card"
CARRIER_VARIABLE = "MGPU_CARRIER"
"""All that is in the spec of a resource which is not its container's carrier. CDI takes no device without edits."""
ANSWER_ANNOTATION = "mgpu.io/answer"
"""Where an answer's name stands when the runtime has no CDI; the runtime itself makes nothing of it."""
PERMISSIONS = "rw"
"""Of device nodes."""
_VERSION = "0.5.0"
_BIND = ["rbind", "rw", "nosuid", "nodev"]
_PREFIX = "mgpu"
_NAME = re.compile(rf"{_PREFIX}_([^_]+)_([^_]+)_[^_]+\.json")
"""Of a spec file. Neither UIDs nor names of containers have an underscore."""


@dataclass(frozen=True, slots=True)
class Edits:
    """What a container gets besides its dialect's environment. mounts: (path on the host, path in the container).

    nodes: device nodes, the same path on both sides.
    """

    env: Mapping[str, str] = field(default_factory=dict, hash=False)
    mounts: tuple[tuple[str, str], ...] = ()
    nodes: tuple[str, ...] = ()


def new_name() -> str:
    """A fresh fully qualified device name; no spec of it exists yet."""
    return f"{KIND}={secrets.token_hex(8)}"


class CdiFiles:
    """The spec files in `folder`, which the runtime watches: `mgpu_<pod UID>_<container>_<nonce>.json`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(
        self,
        name: str,
        uid: str,
        container: str,
        env: Mapping[str, str],
        mounts: Iterable[tuple[str, str]] = (),
        nodes: Iterable[str] = (),
    ) -> None:
        """Make device `name` (as `new_name` gave it) stand for `env`, for this container of the pod `uid`.

        mounts: (path on the host, path in the container); over what the pod itself mounts there.
        nodes: device nodes, on the host and in the container.
        Atomic: the runtime sees the old file, the new one or none. Raises OSError.
        """
        edits: dict[str, object] = {"env": [f"{key}={value}" for key, value in sorted(env.items())]}
        if bound := [{"hostPath": at, "containerPath": to, "options": _BIND} for at, to in mounts]:
            edits["mounts"] = bound
        if made := [{"path": path, "permissions": PERMISSIONS} for path in nodes]:
            edits["deviceNodes"] = made
        device = {"name": name.removeprefix(f"{KIND}="), "containerEdits": edits}
        spec = {"cdiVersion": _VERSION, "kind": KIND, "devices": [device]}
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._file(name, uid, container)
        # The runtime reads only what ends in .json or .yaml.
        new = file.with_suffix(".new")
        new.write_bytes(orjson.dumps(spec))
        os.replace(new, file)

    def remove(self, name: str, uid: str, container: str) -> None:
        """The container must not be created any more."""
        self._remove([self._file(name, uid, container)])

    def keep_only(self, uids: Collection[str]) -> None:
        """Remove the files of all other pods."""
        ours = self._folder.glob(f"{_PREFIX}_*_*")
        self._remove(file for file in ours if file.name.split("_")[1] not in uids)

    def environments(self) -> dict[tuple[str, str], dict[str, str]]:
        """Return by pod UID and container what its files say together.

        Other programs may write to the folder: a file that is damaged, or has a name of another form, is ignored. It
        must not keep an agent from starting.
        """
        found: dict[tuple[str, str], dict[str, str]] = {}
        for file in sorted(self._folder.glob(f"{_PREFIX}_*_*_*.json")):
            named = _NAME.fullmatch(file.name)
            if named is None:
                log.warning("CDI file %s has a name that mgpu does not give", file)
                continue
            uid, container = named.groups()
            try:
                (device,) = orjson.loads(file.read_bytes())["devices"]
                lines: list[str] = device["containerEdits"]["env"]
                env = dict(line.split("=", 1) for line in lines)
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                log.warning("CDI file %s is not readable: %r", file, error)
                continue
            found.setdefault((uid, container), {}).update(env)
        return found

    def _file(self, name: str, uid: str, container: str) -> Path:
        return self._folder / f"{_PREFIX}_{uid}_{container}_{name.removeprefix(f'{KIND}=')}.json"

    def _remove(self, files: Iterable[Path]) -> None:
        for file in list(files):
            try:
                file.unlink(missing_ok=True)
            except OSError as error:
                log.warning("CDI file not removed: %s", error)
