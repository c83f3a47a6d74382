"""CDI spec files (Container Device Interface): what a container gets, applied by the runtime when it creates it.

There is one file per allocated container, written by the allocator before the container starts. The name of its device
is a nonce from the answer to Allocate. A name made from device ids could be the name of the ids' previous owner, whose
file would take effect where the kubelet skips PreStartContainer (docs/design/kubernetes.md, "Device manager").

The file name contains pod UID and container. So a file can be removed when its pod is gone, and an agent that starts
knows what was handed out. Other versions of the agent read these files: keep name and content readable for them.
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
"""The only variable in the spec of a resource that is not its container's carrier. CDI needs at least one edit."""
ANSWER_ANNOTATION = "mgpu.io/answer"
"""Holds the name of an answer if the runtime has no CDI. The runtime ignores it; the checkpoint keeps it."""
PERMISSIONS = "rw"
"""Cgroup permissions of device nodes."""
_VERSION = "0.5.0"
_BIND = ["rbind", "rw", "nosuid", "nodev"]
_PREFIX = "mgpu"
_NAME = re.compile(rf"{_PREFIX}_([^_]+)_([^_]+)_[^_]+\.json")
"""The name of a spec file. Neither UIDs nor names of containers contain an underscore."""


@dataclass(frozen=True, slots=True)
class Edits:
    """What a container gets.

    env: environment variables.
    mounts: path on the host, path in the container.
    nodes: device nodes, by the path that they have on both sides.
    """

    env: Mapping[str, str] = field(default_factory=dict, hash=False)
    mounts: tuple[tuple[str, str], ...] = ()
    nodes: tuple[str, ...] = ()


def new_name() -> str:
    """Return a fresh, fully qualified device name, for which no spec exists yet."""
    return f"{KIND}={secrets.token_hex(8)}"


class CdiFiles:
    """The spec files `mgpu_<pod UID>_<container>_<nonce>.json` in a folder that the container runtime reads."""

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
        """Write the spec of a device. The runtime sees the old file, the new one or none. Raises OSError.

        Args:
            name: of the device, from `new_name`.
            uid, container: for which the device is.
            env, mounts, nodes: as in `Edits`. Mounts cover what the pod itself mounts there.
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
        # The runtime reads only files that end in .json or .yaml, so it never sees this one.
        new = file.with_suffix(".new")
        new.write_bytes(orjson.dumps(spec))
        os.replace(new, file)

    def remove(self, name: str, uid: str, container: str) -> None:
        """Remove the spec of a device, so that the runtime cannot create the container."""
        self._remove([self._file(name, uid, container)])

    def keep_only(self, uids: Collection[str]) -> None:
        """Remove the specs of all other pods."""
        ours = self._folder.glob(f"{_PREFIX}_*_*")
        self._remove(file for file in ours if file.name.split("_")[1] not in uids)

    def environments(self) -> dict[tuple[str, str], dict[str, str]]:
        """Return the environment in the specs of each container, by pod UID and container.

        Other programs may write to the folder: a file that is damaged, or has a name of another form, is ignored. It
        must not keep an agent from starting.
        """
        found: dict[tuple[str, str], dict[str, str]] = {}
        for file in sorted(self._folder.glob(f"{_PREFIX}_*_*_*.json")):
            named = _NAME.fullmatch(file.name)
            if named is None:
                log.warning("Ignoring CDI file %s: mgpu gives no such name", file)
                continue
            uid, container = named.groups()
            try:
                (device,) = orjson.loads(file.read_bytes())["devices"]
                lines: list[str] = device["containerEdits"]["env"]
                env = dict(line.split("=", 1) for line in lines)
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                log.warning("Ignoring unreadable CDI file %s: %r", file, error)
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
