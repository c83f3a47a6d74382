"""Two agents on one node would take each other's sockets and files away: the second one says so and ends."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mgpu.model.errors import BadObject, Problem


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Held by one process at a time, and by none that ended, however it did. Raises BadObject.

    The lock is on the kubelet's folder itself: the kubelet removes every file in there when it starts.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise BadObject([Problem("deviceplugin.kubeletDir", f"{folder}: {error.strerror}")]) from error
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(held)
        problem = Problem("deviceplugin.kubeletDir", f"another node agent runs on this node already, it holds {folder}")
        raise BadObject([problem]) from error
    try:
        yield
    finally:
        os.close(held)
