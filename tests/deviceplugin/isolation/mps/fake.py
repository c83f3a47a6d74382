"""Runs daemons by the playground's nvidia-cuda-mps-control, and tests on an event loop."""

import asyncio
import contextlib
import functools
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, ParamSpec

from deviceplugin.isolation.mps.control import option_sets
from deviceplugin.isolation.mps.daemons import Daemons, Times
from deviceplugin.isolation.mps.folders import Mounts
from playground import mps_control

COMMAND = [sys.executable, "-S", "-E", mps_control.__file__]
CARD, OTHER = "GPU-n1-0", "GPU-n1-1"
TIMES = Times(request=20, health=0.2, start=20, silent=20, quit=20, first_pause=0.01, longest_pause=0.05, partition=20)
"""Long timeouts, since the machine that runs the tests may be slow."""
P = ParamSpec("P")


def broken_program(folder: Path) -> str:
    """Return a program that exists, but that cannot be started."""
    program = folder / "broken"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    return str(program)


def on_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test that is a coroutine function on an event loop."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


async def until(condition: Callable[[], object], seconds: float = 120.0) -> None:
    """Wait until the condition holds.

    Args:
        seconds: more than a daemon may take by TIMES to answer, to quit and to start again.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.01)


def pid_of(folder: Path, card: str = CARD) -> int:
    return int((folder / card / "pipe" / "nvidia-cuda-mps-control.pid").read_text())


def lives(pid: int) -> bool:
    """Return whether the process runs. A zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@contextlib.asynccontextmanager
async def serving(
    folder: Path,
    warnings: list[str],
    times: Times = TIMES,
    command: list[str] | None = None,
    mounts: Mounts | None = None,
    multi_user: str = "auto",
    partitions: bool = False,
) -> AsyncIterator[Daemons]:
    """Run daemons as an agent does. At the end the agent stops, and the daemons stay."""
    attempts = option_sets(multi_user, partitions=partitions)
    daemons = Daemons(folder, command or COMMAND, warnings.append, lambda: None, times, mounts, attempts)
    task = asyncio.create_task(daemons.run())
    try:
        yield daemons
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def ready(daemons: Daemons, card: str = CARD, seconds: float = 60.0) -> None:
    await daemons.ready(card, asyncio.get_running_loop().time() + seconds)
