"""Limits the size of the MPS folders that containers can write to, and empties them.

The pipe folder of a card and the node's shared memory are mounted read-write into containers. If they lay on the node's
/run, a tmpfs that the container runtime and the kubelet use too, one container could fill it, and its files would
remain after it has ended. So each of these folders is a tmpfs with a limited size and number of inodes. Each card has a
pipe folder of its own, so a container that fills one disturbs only the containers that share its card.
`isolation.mps.control` calls this module, and `isolation.mps.clients` creates the `KernelMounts`.
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
"""The flags of the mounts. mount(2) ignores flags that the kernel does not know; MS_NOSYMFOLLOW exists since Linux
5.10."""
_OPTIONS = b"size=4m,nr_inodes=1024,mode=0755"
"""The mount options of a card's pipe folder, which contains sockets, locks and files with a process id."""
MOST_ENTRIES = 200_000
"""The most entries that one call of `empty` removes. The tmpfs of the shared memory has fewer inodes."""
_BATCH = 1000
"""The most entries that are listed at once, so that a folder with many long names does not fill the agent's memory."""
_OPEN_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOUNTINFO = Path("/proc/self/mountinfo")


class UnlimitedFolder(Exception):
    """A folder that containers can write to is not a separate mount. The message names the folder and the remedy."""


class Mounts(Protocol):
    """An interface that mounts folders and reports which folders are mounts."""

    def is_mount(self, folder: Path) -> bool:
        """Return whether the folder is a separate mount."""

    def mount(self, folder: Path) -> None:
        """Mount a small tmpfs at the folder. Raises UnlimitedFolder if that is not possible."""


class KernelMounts:
    """The mounts of this process's mount namespace."""

    def is_mount(self, folder: Path) -> bool:
        return os.path.ismount(folder)

    def mount(self, folder: Path) -> None:
        """Mount a tmpfs that is visible on the node too, since the container runtime mounts the folder from there."""
        if not propagates_to_node(_MOUNTINFO.read_text(), folder.resolve()):
            cause = "a mount that the agent makes there does not propagate to the node"
            raise UnlimitedFolder(_pipe_without_mount(folder, cause))
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", ctypes.c_ulong(_FLAGS), _OPTIONS):
            cause = f"mounting it failed: {os.strerror(ctypes.get_errno())}"
            raise UnlimitedFolder(_pipe_without_mount(folder, cause))


def _pipe_without_mount(folder: Path, cause: str) -> str:
    return (
        f"{folder} is not a separate mount, so a container could fill the node's memory through it ({cause}). "
        "Run the agent privileged with mountPropagation: Bidirectional for the volume of deviceplugin.mpsDir, as "
        "manifests/components/slices does, or mount a tmpfs there"
    )


def shm_without_mount(folder: Path) -> str:
    return (
        f"{folder} is not a separate mount, so a container could fill the node's memory through it. "
        "Mount a tmpfs there before the agent starts, as the init container of manifests/components/slices does"
    )


def propagates_to_node(mountinfo: str, folder: Path) -> bool:
    """Return whether a mount at or below this folder propagates out of this mount namespace.

    That is so if the innermost mount that contains the folder is a shared mount, as a volume is with the
    mountPropagation Bidirectional. With HostToContainer a volume is a slave mount, and with None a private one.

    Args:
        mountinfo: The content of /proc/self/mountinfo (proc_pid_mountinfo(5)).
    """
    innermost = ""
    is_shared = False
    for line in mountinfo.splitlines():
        fields = line.split()
        mount_point = fields[4].replace("\\040", " ")
        # A later mount at the same place covers the earlier one.
        if folder.is_relative_to(mount_point) and len(mount_point) >= len(innermost):
            innermost = mount_point
            is_shared = any(field.startswith("shared:") for field in fields[6 : fields.index("-", 6)])
    return is_shared


def empty(folder: Path, limit: int = MOST_ENTRIES) -> None:
    """Remove everything in the folder without following links.

    Containers created the entries, and a container that still runs may change them during the removal. So every name is
    resolved relative to an open directory. Nested folders are moved up before they are removed, so that thousands of
    nested folders need neither deep recursion nor thousands of file descriptors.

    Raises OSError if an entry cannot be removed, or if there are more than `limit` entries; nested folders count twice.
    """
    budget = iter(range(limit))
    root = _open(folder)
    try:
        while names := _next_batch(root):
            for name, is_folder in names:
                if is_folder:
                    _remove_folder(root, name, budget)
                else:
                    os.unlink(name, dir_fd=root)
                _spend(budget, folder)
    finally:
        os.close(root)


def remove_links(folder: Path) -> None:
    """Remove the symbolic links directly in the folder. Raises OSError.

    The daemon creates no links, but it would follow those that a container has created.
    """
    root = _open(folder)
    try:
        with os.scandir(root) as entries:
            links = [entry.name for entry in islice(entries, MOST_ENTRIES) if entry.is_symlink()]
        for name in links:
            os.unlink(name, dir_fd=root)
    finally:
        os.close(root)


def _remove_folder(root: int, name: str, budget: Iterator[int]) -> None:
    inner = _open(name, root)
    try:
        while names := _next_batch(inner):
            for child, is_folder in names:
                if is_folder:
                    os.rename(child, f"mgpu-{secrets.token_hex(16)}", src_dir_fd=inner, dst_dir_fd=root)
                else:
                    os.unlink(child, dir_fd=inner)
                _spend(budget, name)
    finally:
        os.close(inner)
    os.rmdir(name, dir_fd=root)


def _open(path: Path | str, parent: int | None = None) -> int:
    return os.open(path, _OPEN_FLAGS, dir_fd=parent)


def _next_batch(folder: int) -> list[tuple[str, bool]]:
    """Return the names of some entries, and whether each is a folder. The list is empty only if the folder is empty."""
    with os.scandir(folder) as entries:
        return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in islice(entries, _BATCH)]


def _spend(budget: Iterator[int], folder: Path | str) -> None:
    if next(budget, None) is None:
        raise OSError(0, "there are more files and folders than one attempt removes", str(folder))
