"""The playground's nvidia-cuda-mps-control, and coroutines that use it on a loop of their own."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from deviceplugin.isolation.mps.daemons import Daemons, Times
from deviceplugin.isolation.mps.folders import Mounts
from playground import mps_control

COMMAND = [sys.executable, "-S", "-E", mps_control.__file__]
CARD, OTHER = "GPU-n1-0", "GPU-n1-1"
TIMES = Times(request=20, health=0.05, start=20, silent=20, quit=20, first_pause=0.01, longest_pause=0.05)
"""Patient where a busy machine may be slow."""


async def until(found: Callable[[], object], seconds: float = 120.0) -> None:
    """seconds: more than a daemon on a busy machine may take to answer, to quit and to start again by TIMES."""
    deadline = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.01)


def pid_of(folder: Path, card: str = CARD) -> int:
    return int((folder / card / "pipe" / "nvidia-cuda-mps-control.pid").read_text())


def lives(pid: int) -> bool:
    """Whether it runs; one that has ended and that nobody asks about does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@contextlib.asynccontextmanager
async def serving(
    folder: Path,
    told: list[str],
    times: Times = TIMES,
    command: list[str] | None = None,
    mounts: Mounts | None = None,
) -> AsyncIterator[Daemons]:
    """Daemons looked after as by an agent; at the end it stops, and they stay."""
    daemons = Daemons(folder, command or COMMAND, told.append, lambda: None, times, mounts)
    task = asyncio.create_task(daemons.run())
    try:
        yield daemons
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def ready(daemons: Daemons, card: str = CARD, seconds: float = 60.0) -> None:
    await daemons.ready(card, asyncio.get_running_loop().time() + seconds)
