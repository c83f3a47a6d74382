"""Limits the size of the MPS folders that containers can write to, and empties them.

The pipe folder of a card and the node's shared memory are mounted read-write into containers. If they lay on
the node's /run, a tmpfs that the container runtime and the kubelet use too, one container could fill it, and its files
would remain after it has ended. So each of these folders is a tmpfs with a limited size and number of inodes. Each card
has a pipe folder of its own, so a container that fills one disturbs only the containers that share its card.
"""

import ctypes
import os
import secrets
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Protocol

_NOSUID, _NODEV, _NOEXEC, _NOSYMFOLLOW = 2, 4, 8, 256
_FLAGS = _NOSUID | _NODEV | _NOEXEC | _NOSYMFOLLOW
"""mount(2) ignores flags that the kernel does not know: MS_NOSYMFOLLOW came with Linux 5.10."""
_BOUNDS = b"size=4m,nr_inodes=1024,mode=0755"
"""The size of a card's pipe folder, which holds sockets, locks and files with a process id."""
MOST_ENTRIES = 200_000
"""The most entries that one attempt removes: more than the tmpfs of the shared memory has inodes."""
_BATCH = 1000
"""The most entries that are listed at once: a folder with many long names must not fill the agent's memory."""
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOUNTINFO = Path("/proc/self/mountinfo")


class Unbounded(Exception):
    """A folder that containers can write to is not a separate mount. The message names the folder and the remedy."""


class Mounts(Protocol):
    """How the folders are mounted."""

    def is_own(self, folder: Path) -> bool:
        """Return whether the folder is a mount of its own."""

    def make(self, folder: Path) -> None:
        """Mount a small tmpfs at the folder. Raises Unbounded where that is not possible."""


class KernelMounts:
    """The mounts of this process's mount namespace."""

    def is_own(self, folder: Path) -> bool:
        return os.path.ismount(folder)

    def make(self, folder: Path) -> None:
        """Mount a tmpfs that is visible on the node too, since the container runtime mounts the folder from there."""
        if not reaches_node(_MOUNTINFO.read_text(), folder.resolve()):
            raise Unbounded(_without_mount(folder, "a mount that the agent makes there does not propagate to the node"))
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", ctypes.c_ulong(_FLAGS), _BOUNDS):
            raise Unbounded(_without_mount(folder, f"mounting it failed: {os.strerror(ctypes.get_errno())}"))


def _without_mount(folder: Path, why: str) -> str:
    return (
        f"{folder} is not a mount of its own, so a container could fill the node's memory through it ({why}). "
        "Run the agent privileged with mountPropagation: Bidirectional for the volume of deviceplugin.mpsDir, as "
        "manifests/components/slices does, or mount a tmpfs there"
    )


def shm_without_mount(folder: Path) -> str:
    return (
        f"{folder} is not a mount of its own, so a container could fill the node's memory through it. "
        "Mount a tmpfs there before the agent starts, as the init container of manifests/components/slices does"
    )


def reaches_node(mountinfo: str, folder: Path) -> bool:
    """Return whether a mount below this folder propagates out of this mount namespace (man 5 proc, mountinfo).

    A volume with mountPropagation: Bidirectional is shared; HostToContainer makes it a slave, and None private.
    """
    best, shared = "", False
    for line in mountinfo.splitlines():
        fields = line.split()
        at = fields[4].replace("\\040", " ")
        # A later mount at the same place covers the earlier one.
        if folder.is_relative_to(at) and len(at) >= len(best):
            best, shared = at, any(field.startswith("shared:") for field in fields[6 : fields.index("-", 6)])
    return shared


def empty(folder: Path, most: int = MOST_ENTRIES) -> None:
    """Remove everything in the folder without following links.

    Containers made the entries, and one may still run and race with the removal. So every name is resolved relative to
    an open directory. Nested folders are moved up before they are removed, so that thousands of nested folders need
    neither deep recursion nor thousands of file descriptors.

    Raises OSError if an entry cannot be removed, or if there are more than `most` entries.
    """
    left, root = iter(range(most)), _opened(folder)
    try:
        while names := _some(root):
            for name, is_folder in names:
                if is_folder:
                    _remove_folder(root, name, left)
                else:
                    os.unlink(name, dir_fd=root)
                _count(left, folder)
    finally:
        os.close(root)


def remove_links(folder: Path, most: int = MOST_ENTRIES) -> None:
    """Remove the symbolic links directly in the folder: the daemon makes none, but follows them. Raises OSError."""
    root = _opened(folder)
    try:
        with os.scandir(root) as entries:
            links = [entry.name for entry in islice(entries, most) if entry.is_symlink()]
        for name in links:
            os.unlink(name, dir_fd=root)
    finally:
        os.close(root)


def _remove_folder(root: int, name: str, left: Iterator[int]) -> None:
    inner = _opened(name, root)
    try:
        while names := _some(inner):
            for child, is_folder in names:
                if is_folder:
                    os.rename(child, f"mgpu-{secrets.token_hex(16)}", src_dir_fd=inner, dst_dir_fd=root)
                else:
                    os.unlink(child, dir_fd=inner)
                _count(left, name)
    finally:
        os.close(inner)
    os.rmdir(name, dir_fd=root)


def _opened(path: Path | str, within: int | None = None) -> int:
    return os.open(path, _OPEN, dir_fd=within)


def _some(folder: int) -> list[tuple[str, bool]]:
    with os.scandir(folder) as entries:
        return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in islice(entries, _BATCH)]


def _count(left: Iterator[int], folder: Path | str) -> None:
    if next(left, None) is None:
        raise OSError(0, "there are more files than one attempt removes", str(folder))
