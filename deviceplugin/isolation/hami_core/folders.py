"""Creates and removes the folder of each container that HAMi-core limits.

The container can write there. If the folder lay on the node's /run, the container could fill it, so it is a tmpfs of
limited size (`deviceplugin.isolation.mps.folders` explains the risk).
"""

import ctypes
import logging
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Protocol

from deviceplugin.isolation.backend import Key
from deviceplugin.isolation.hami_core.edits import LIBRARY_IN_CONTAINER, LOCK, PRELOAD, SHARED
from deviceplugin.isolation.mps.folders import empty, propagates_to_node

log = logging.getLogger(__name__)

_FLAGS = 2 | 4 | 8 | 256
"""nosuid, nodev, noexec and nosymfollow. mount(2) ignores flags that the kernel does not know."""
_OPTIONS = b"size=8m,nr_inodes=64,mode=0755"
"""The library's file takes 2 MiB."""
_DETACH = 2
_MOUNTINFO = Path("/proc/self/mountinfo")
_NAME = re.compile(r"([^_]+)_([^_]+)")
"""The name of a container's folder: the pod's UID and the container. Neither contains an underscore."""


class Mounts(Protocol):
    """The mounts of the folders."""

    def mount(self, folder: Path) -> None:
        """Mount a small tmpfs at the folder, unless something is mounted there. Raises OSError."""

    def unmount(self, folder: Path) -> None:
        """Unmount the folder if it is a mount. Raises OSError."""


class NoMounts:
    """Plain folders, for nodes where all containers are trusted."""

    def mount(self, folder: Path) -> None:
        """Do nothing."""

    def unmount(self, folder: Path) -> None:
        """Do nothing."""


class KernelMounts:
    """The mounts of this process's mount namespace, which must propagate to the node."""

    def mount(self, folder: Path) -> None:
        if os.path.ismount(folder):
            return
        if not propagates_to_node(_MOUNTINFO.read_text(), folder.resolve()):
            raise OSError(0, "a mount that the agent makes there does not propagate to the node", str(folder))
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", ctypes.c_ulong(_FLAGS), _OPTIONS):
            number = ctypes.get_errno()
            raise OSError(number, f"mounting it failed: {os.strerror(number)}", str(folder))

    def unmount(self, folder: Path) -> None:
        if not os.path.ismount(folder):
            return
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.umount2(os.fsencode(folder), _DETACH):
            number = ctypes.get_errno()
            raise OSError(number, f"unmounting it failed: {os.strerror(number)}", str(folder))


class Folders:
    """The folders `<root>/<pod UID>_<container>` and the file `<root>/ld.so.preload`."""

    def __init__(self, root: Path, mounts: Mounts) -> None:
        self._root = root
        self._mounts = mounts

    @property
    def preload(self) -> Path:
        return self._root / PRELOAD

    def of(self, key: Key) -> Path:
        """Return the folder of a container, which may not exist."""
        return self._root / f"{key[0]}_{key[1]}"

    def create(self, key: Key) -> Path:
        """Create what a container mounts, and return its folder. Raises OSError."""
        self._root.mkdir(parents=True, exist_ok=True)
        text = f"{LIBRARY_IN_CONTAINER}\n"
        if not self.preload.is_file() or self.preload.read_text() != text:
            new = self.preload.with_suffix(".new")
            new.write_text(text)
            new.chmod(0o644)
            os.replace(new, self.preload)
        folder = self.of(key)
        folder.mkdir(exist_ok=True)
        self._mounts.mount(folder)
        for name in (LOCK, SHARED):
            (folder / name).mkdir(exist_ok=True)
            (folder / name).chmod(0o1777)  # The processes of the container may have any user.
        return folder

    def keep_only(self, uids: Collection[str]) -> None:
        """Remove the folders of all pods except those with these UIDs. What fails is tried again at the next call."""
        for folder in list(self._present()):
            if folder.name.partition("_")[0] not in uids:
                try:
                    self._remove(folder)
                except OSError as error:
                    log.warning("folder of HAMi-core cannot be removed: %s", error, extra={"folder": folder.name})

    def _present(self) -> Iterator[Path]:
        if self._root.is_dir():
            yield from sorted(file for file in self._root.iterdir() if _NAME.fullmatch(file.name))

    def _remove(self, folder: Path) -> None:
        self._mounts.unmount(folder)
        for name in (LOCK, SHARED):
            if (folder / name).is_dir():
                empty(folder / name)
                (folder / name).rmdir()
        folder.rmdir()
