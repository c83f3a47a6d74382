"""Writes and reads CDI spec files (Container Device Interface), which the runtime applies when it creates a container.

Before a container starts, the allocators write one file for each of its resources that the agent serves as device ids.
The name of the CDI device is a nonce from the answer to Allocate. If the name were made from device ids, the file of
the previous owner of these ids would take effect when the kubelet skips PreStartContainer (docs/design/kubernetes.md,
"Device manager").

The name of a file contains the pod's UID and the container. So the agent can remove the file when the pod is gone, and
an agent that starts can read which cards the containers have. Other versions of the agent read these files, so the form
of their names and contents must not change.
"""

import logging
import os
import re
import secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import orjson

log = logging.getLogger(__name__)

KIND = "mgpu.io/card"
CARRIER_VARIABLE = "MGPU_CARRIER"
"""The only variable in the spec of a resource that is not the container's carrier; its value is the carrier. The spec
has it because CDI requires at least one edit."""
ANSWER_ANNOTATION = "mgpu.io/answer"
"""The annotation with the name of an answer to Allocate if the runtime has no CDI. The kubelet stores it in its
checkpoint, and the runtime ignores it."""
PERMISSIONS = "rw"
"""The cgroup permissions of device nodes: read and write."""
VERSION = "0.5.0"
"""The version of the CDI specification that the files follow."""
_PREFIX = "mgpu"
_NAME = re.compile(rf"{_PREFIX}_([^_]+)_([^_]+)_[^_]+\.json")
"""The name of a spec file. UIDs and names of containers contain no underscore."""


class Mount(NamedTuple):
    """A bind mount of a file or folder of the host.

    Attributes:
        source: The path on the host.
        target: The path in the container.
    """

    source: str
    target: str
    read_only: bool = False


class Hook(NamedTuple):
    """A program of the host that the runtime calls as root. If it fails, the container does not start.

    Attributes:
        name: The point in the container's life at which it is called, such as `createContainer` (the OCI runtime
            specification, "POSIX-platform Hooks").
        path: The path of the program on the host.
        args: The arguments, of which the first one is the name of the program.
        env: The environment of the program, as `key=value`.
    """

    name: str
    path: str
    args: tuple[str, ...] = ()
    env: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Edits:
    """The changes that the runtime makes to a container.

    Attributes:
        env: The environment variables that are set.
        mounts: The mounts. The runtime prefers them to the pod's own mounts at the same path.
        nodes: The paths of device nodes, which are the same on the host and in the container.
        hooks: The programs that the runtime calls, in the order of the calls.
    """

    env: Mapping[str, str] = field(default_factory=dict, hash=False)
    mounts: tuple[Mount, ...] = ()
    nodes: tuple[str, ...] = ()
    hooks: tuple[Hook, ...] = ()

    def __or__(self, other: "Edits") -> "Edits":
        """Return all edits of both. The variables of `other` take precedence."""
        return Edits(
            {**self.env, **other.env},
            (*self.mounts, *other.mounts),
            (*self.nodes, *other.nodes),
            (*self.hooks, *other.hooks),
        )


def new_name() -> str:
    """Return a fresh, fully qualified device name, for which no spec exists yet."""
    return f"{KIND}={secrets.token_hex(8)}"


class CdiFiles:
    """The spec files `mgpu_<pod UID>_<container>_<nonce>.json` in a folder that the container runtime reads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, name: str, uid: str, container: str, edits: Edits) -> None:
        """Write the spec of a device atomically. Raises OSError.

        Args:
            name: The name of the device, as `new_name` returned it.
            uid: The UID of the container's pod.
            container: The name of the container.
            edits: The changes to the container.
        """
        device = {"name": name.removeprefix(f"{KIND}="), "containerEdits": container_edits(edits)}
        spec = {"cdiVersion": VERSION, "kind": KIND, "devices": [device]}
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._file(name, uid, container)
        # The runtime reads only files that end in .json or .yaml, so it does not read the unfinished file.
        new = file.with_suffix(".new")
        new.write_bytes(orjson.dumps(spec))
        os.replace(new, file)

    def remove(self, name: str, uid: str, container: str) -> None:
        """Remove the spec of a device, so that the runtime cannot create the container."""
        self._remove([self._file(name, uid, container)])

    def keep_only(self, uids: Collection[str]) -> None:
        """Remove the specs and the receipts (`pods.receipts`) of all pods except those with these UIDs."""
        ours = self._folder.glob(f"{_PREFIX}_*_*")
        self._remove(file for file in ours if file.name.split("_")[1] not in uids)

    def environments(self) -> dict[tuple[str, str], dict[str, str]]:
        """Return the merged environments of all specs of each container, by pod UID and container.

        Other programs may write to the folder. A damaged file, or one with an unexpected name, is ignored, because it
        must not keep an agent from starting.
        """
        by_container: dict[tuple[str, str], dict[str, str]] = {}
        for file in sorted(self._folder.glob(f"{_PREFIX}_*_*_*.json")):
            name = _NAME.fullmatch(file.name)
            if name is None:
                log.warning("Ignoring CDI file %s: mgpu does not use names of this form", file)
                continue
            uid, container = name.groups()
            try:
                (device,) = orjson.loads(file.read_bytes())["devices"]
                lines: list[str] = device["containerEdits"]["env"]
                env = dict(line.split("=", 1) for line in lines)
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                log.warning("Ignoring unreadable CDI file %s: %r", file, error)
                continue
            by_container.setdefault((uid, container), {}).update(env)
        return by_container

    def _file(self, name: str, uid: str, container: str) -> Path:
        return self._folder / f"{_PREFIX}_{uid}_{container}_{name.removeprefix(f'{KIND}=')}.json"

    def _remove(self, files: Iterable[Path]) -> None:
        for file in list(files):
            try:
                file.unlink(missing_ok=True)
            except OSError as error:
                log.warning("CDI file cannot be removed: %s", error)


def container_edits(edits: Edits) -> dict[str, object]:
    """Return `containerEdits` of the CDI specification."""
    content: dict[str, object] = {"env": [f"{key}={value}" for key, value in sorted(edits.env.items())]}
    if edits.mounts:
        content["mounts"] = [
            {"hostPath": mount.source, "containerPath": mount.target, "options": _options(mount)}
            for mount in edits.mounts
        ]
    if edits.nodes:
        content["deviceNodes"] = [{"path": path, "permissions": PERMISSIONS} for path in edits.nodes]
    if edits.hooks:
        content["hooks"] = [
            {"hookName": hook.name, "path": hook.path, "args": [*hook.args], "env": [*hook.env]} for hook in edits.hooks
        ]
    return content


def _options(mount: Mount) -> list[str]:
    return ["rbind", "ro" if mount.read_only else "rw", "nosuid", "nodev"]
