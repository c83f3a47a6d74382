"""What the MtgpuPods of each card are limited to, for isolation back ends that read it.

Source: docs/design/mtgpu.md, "Per-card limits file".

A file per card: the count, then `namespace/name request limit memBytes` for each Pod. A back end watches the file or
its folder, so a file keeps its inode, and is closed once for every change. Who reads in the middle of one, or after an
agent that ended there, finds all the lines that the count tells of; what may follow them says nothing.
"""

import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from deviceplugin.pods.gpu_pod import LimitedPod
from mgpu.model.cards import Card

log = logging.getLogger(__name__)

_LOOK_SECONDS = 10.0
"""So often at least: what somebody else wrote is put right, and what could not be written is tried again."""
_FILE_NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)


def content(rows: Iterable[LimitedPod]) -> bytes:
    """By namespace, name and UID. A decimal is the shortest that says the same: `0.2` for 0.200, `1` for 1.0."""
    lines = [f"{r.namespace}/{r.name} {r.request / 1000:g} {r.limit / 1000:g} {r.memory}" for r in sorted(rows)]
    return "\n".join([str(len(lines)), *lines, ""]).encode()


class LimitsFiles:
    """On a thread of its own, from `start` to `stop`; the files stay, since the Pods do.

    folder: "": nothing is written. pods: those that hold a share of a card; None: not all are known yet.
    warn: hears once that the files cannot be written, and again after they could.
    """

    def __init__(
        self,
        folder: str,
        pods: Callable[[], Sequence[LimitedPod] | None],
        cards: Callable[[], Sequence[Card]],
        warn: Callable[[str], None],
        look_seconds: float = _LOOK_SECONDS,
    ) -> None:
        self._folder = Path(folder) if folder else None
        self._pods, self._cards, self._warn = pods, cards, warn
        self._look_seconds, self._failed = look_seconds, False
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="limits", daemon=True)

    def start(self) -> None:
        if self._folder:
            self._thread.start()

    def stop(self) -> None:
        """A file system that hangs is left behind: the thread is a daemon."""
        self._stop.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=2)

    def wake(self) -> None:
        self._wake.set()

    def look(self) -> None:
        """Make the files say what is so now."""
        pods = self._pods()
        if self._folder is None or pods is None:
            return
        problems = []
        for card in self._cards():
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
            self.look()
            self._wake.wait(self._look_seconds)


def _write(file: Path, pods: Sequence[LimitedPod]) -> None:
    """A file is made with the first Pod of its card. Raises OSError."""
    before, new = _read(file), content(pods)
    if before == new or (before is None and not pods):
        return
    size = len(before or b"")
    file.parent.mkdir(parents=True, exist_ok=True)
    # Never through a link: the folder may be one that others write to.
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    with open(descriptor, "wb") as stream:  # what is opened by its descriptor is not emptied
        # First what makes it longer: a count is never there before its lines are.
        stream.seek(size)
        stream.write(new[size:])
        stream.seek(0)
        stream.write(new[:size])
        stream.truncate(len(new))
    log.info("limits written", extra={"card": file.name, "pods": len(pods)})


def _read(file: Path) -> bytes | None:
    """Not through what a writer opens: its closing would tell those who watch of a change."""
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None
