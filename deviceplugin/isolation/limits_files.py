"""Writes the limits of the MtgpuPods of each card into a file, for isolation back ends outside of mgpu.

`deviceplugin.agent` runs `LimitsFiles` while it serves the node. docs/design/mtgpu.md, "Per-card limits file", defines
the format. A file contains the number of Pods, and then a line `namespace/name request limit memBytes` for each Pod. A
back end watches the file or its folder, so a file keeps its inode and is closed once for every change. A back end may
read a file during a change, and the agent may end during a change. Even then the file has at least as many complete
lines as its first line states.
"""

import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from deviceplugin.cards import NodeGpus
from deviceplugin.pods.gpu_pod import LimitedPod

log = logging.getLogger(__name__)

_INTERVAL_SECONDS = 10.0
"""The interval at which the files are checked although no pod has changed. Another program may have written a file, or
a write may have failed."""
_FILE_NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)


def format_limits(rows: Iterable[LimitedPod]) -> bytes:
    """Return the content of a card's file, sorted by namespace, name and UID, with numbers as short as possible."""
    lines = [f"{r.namespace}/{r.name} {r.request / 1000:g} {r.limit / 1000:g} {r.memory}" for r in sorted(rows)]
    return "\n".join([str(len(lines)), *lines, ""]).encode()


class PodList(Protocol):
    """The part of the pod watch (`NodeState.pod_watch`) that is used here."""

    @property
    def synced(self) -> bool:
        """Whether all pods of the node have been read."""


class LimitedPods(Protocol):
    """The part of `NodePods` that is used here."""

    def limited_pods(self) -> Sequence[LimitedPod]: ...


class LimitsFiles:
    """A thread that keeps the files current, from `start` to `stop`. The files remain afterwards, as the Pods do.

    Args:
        folder: The setting `deviceplugin.limitsDir`. If it is empty, nothing is written.
        pod_list: The watch of the pods. Nothing is written until it has read all pods.
        node: The GPUs of the node. A file is created when its GPU gets the first Pod.
        warn: A function that reports that the files cannot be written. It is called for the first failure, and for the
            first one after each success.
    """

    def __init__(
        self,
        folder: str,
        pods: LimitedPods,
        pod_list: PodList,
        node: NodeGpus,
        warn: Callable[[str], None],
        interval_seconds: float = _INTERVAL_SECONDS,
    ) -> None:
        self._folder = Path(folder) if folder else None
        self._pods = pods
        self._pod_list = pod_list
        self._node = node
        self._warn = warn
        self._interval_seconds = interval_seconds
        self._failed = False
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="limits", daemon=True)

    def start(self) -> None:
        if self._folder:
            self._thread.start()

    def stop(self) -> None:
        """End the thread, and wait at most two seconds for it, since a file system may hang."""
        self._stop.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=2)

    def wake(self) -> None:
        self._wake.set()

    def write(self) -> None:
        """Write the files that are not current. Do nothing until all pods have been read."""
        if self._folder is None or not self._pod_list.synced:
            return
        pods = self._pods.limited_pods()
        problems = []
        for card in self._node.gpus:
            # The UUIDs of simulated cards come from a file. A UUID with a slash would name a file in another folder.
            if not _FILE_NAME.fullmatch(card.uuid):
                continue
            try:
                _write(self._folder / card.uuid, [pod for pod in pods if pod.card == card.uuid])
            except OSError as error:
                problems.append(f"the limits of MtgpuPods on card {card.index} cannot be written: {error}")
        if problems and not self._failed:
            self._warn(problems[0])
        self._failed = bool(problems)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.clear()
            self.write()
            self._wake.wait(self._interval_seconds)


def _write(file: Path, pods: Sequence[LimitedPod]) -> None:
    """Write the file of a card unless it is current. Create it when the card gets its first Pod. Raises OSError."""
    old = _read(file)
    new = format_limits(pods)
    if old == new or (old is None and not pods):
        return
    size = len(old or b"")
    file.parent.mkdir(parents=True, exist_ok=True)
    # Links are not followed, since other programs may write to the folder.
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    with open(descriptor, "wb") as stream:  # Opening a descriptor does not truncate the file.
        # The part that makes the file longer is written first, so that the lines exist before the number counts them.
        stream.seek(size)
        stream.write(new[size:])
        stream.seek(0)
        stream.write(new[:size])
        stream.truncate(len(new))
    log.info("limits written", extra={"card": file.name, "pods": len(pods)})


def _read(file: Path) -> bytes | None:
    """Return the content of the file, or None if it is missing. Raises OSError.

    The file is not opened for writing, since back ends would take its closing for a change.
    """
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None
