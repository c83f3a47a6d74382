"""The lock of a node: of all agents on it, the one that holds the lock serves.

Two agents that serve would take each other's sockets and CDI files away, and would both cut cards.
"""

import fcntl
import os
from pathlib import Path

from mgpu.model.errors import BadObject, Problem


class NodeLock:
    """Held by one process at a time, and by none that has ended, however it ended.

    The lock is on the kubelet's folder itself, which every version of the agent locks, and which the kubelet does not
    empty when it starts.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor: int | None = None

    def try_acquire(self) -> bool:
        """Return whether this object holds the lock now. Raises BadObject where the folder cannot be opened."""
        if self._descriptor is not None:
            return True
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise BadObject([Problem("deviceplugin.kubeletDir", f"{self._folder}: {error.strerror}")]) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        """Let another agent serve; nothing where this object does not hold the lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
