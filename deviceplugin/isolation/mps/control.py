"""Starts, queries and ends the nvidia-cuda-mps-control daemon of one card.

A daemon runs in a session of its own and outlives the agent: if a daemon ends, so do the processes that use its card.
Its pid and start time are in a file, by which the next agent finds it. Only `deviceplugin.isolation.mps.daemons` uses a
`Control`.
"""

import asyncio
import contextlib
import errno
import os
import signal
from collections.abc import Sequence
from enum import Enum
from pathlib import Path

from deviceplugin.isolation.mps import folders
from deviceplugin.isolation.mps.folders import Mounts, Unbounded
from deviceplugin.isolation.mps.limits import PIPE, pipe_dir, shm_dir

_MAX_PATH = 107
"""The longest path of a unix socket (sun_path has 108 bytes)."""
_LONGEST_SOCKET = "control_privileged"
_KILL_SECONDS = 1.0
_MOST_ANSWER = 4096
"""Bytes. A root container with a share can listen in place of the daemon, since the pipe directory is writable for MPS
clients, and an endless answer would fill the agent's memory."""
_TAIL = 200
"""Bytes of the daemon's output that are searched for the last line, which goes into an Event."""
MOST_LOG = 4 << 20
"""Bytes of each log file. They are on a tmpfs, and every query makes the daemon write some more."""


class Answer(Enum):
    """HEALTHY: a valid answer. ABSENT: no daemon listens, or not yet. SILENT: no answer in time."""

    HEALTHY, ABSENT, SILENT = range(3)


class Control:
    """The control daemon of one card, used on one event loop.

    Args:
        command: how the program is called.
        folder: the setting `mpsDir`.
        card: the card's UUID.
        mounts: mounts a tmpfs at each folder that containers can write to; None if these may be plain folders.
    """

    def __init__(self, command: Sequence[str], folder: Path, card: str, mounts: Mounts | None = None) -> None:
        self._command = list(command)
        self._folder = folder
        self._mounts = mounts
        self._pipe = pipe_dir(folder, card)
        self._log = folder / card / "log"
        self._record = folder / card / "daemon"
        mine = {"CUDA_VISIBLE_DEVICES": card, PIPE: str(self._pipe), "CUDA_MPS_LOG_DIRECTORY": str(self._log)}
        self._environ = {k: v for k, v in os.environ.items() if not k.startswith("CUDA_")} | mine
        self._child = 0
        self._asking: asyncio.subprocess.Process | None = None

    def running(self) -> int | None:
        """Return the pid of the daemon that this or an earlier agent started, if it runs."""
        try:
            pid, born = map(int, self._record.read_text().split())
        except (OSError, ValueError):
            return None
        now = _born(pid)
        if now is None and pid == self._child:
            self._child = 0
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        return pid if now == born else None

    def unbounded(self) -> bool:
        """Return whether containers can write to a folder whose size is not limited."""
        mounts, written = self._mounts, (self._pipe, shm_dir(self._folder))
        return mounts is not None and not all(map(mounts.is_own, written))

    def crowded(self) -> bool:
        """Return whether more than half of the blocks or inodes of the pipe folder's mount are used. Raises OSError."""
        if self._mounts is None or not self._mounts.is_own(self._pipe):
            return False
        room = os.statvfs(self._pipe)
        return 2 * room.f_bfree < room.f_blocks or 2 * room.f_ffree < room.f_files

    def prepare(self, *, clients: bool, alone: bool) -> None:
        """Make the daemon's folders, and remove what ended containers left there. Raises OSError and Unbounded.

        Args:
            clients: whether running containers are clients of this daemon. They see the pipe folder that existed when
                they started and may need their files in it: nothing is mounted over it, and only links are removed.
                Without a daemon they would have no limits, so it is started even if the folder's size is not limited.
            alone: whether no container of the node is a client, and no other daemon runs.
        """
        self._make_folders(clients=clients)
        if clients:
            folders.remove_links(self._pipe)
            return
        folders.empty(self._pipe)
        if alone:
            self.empty_shared()

    def empty_shared(self) -> None:
        """Remove all shared memory of the node's clients, where there is any. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            folders.empty(shm_dir(self._folder))

    def start(self) -> int:
        """Start a daemon and return its pid. Call `prepare` first. Raises OSError."""
        output = (os.POSIX_SPAWN_OPEN, 1, str(self._output), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        nothing = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
        self._child = pid = os.posix_spawnp(
            self._command[0],
            [*self._command, "-f"],
            self._environ,
            file_actions=[nothing, output, (os.POSIX_SPAWN_DUP2, 1, 2)],
            setsid=True,
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
        )
        self._record.write_text(f"{pid} {_born(pid) or 0}")
        return pid

    def last_output(self) -> str | None:
        """Return the last line that the daemon wrote; None: it wrote nothing."""
        try:
            with self._output.open("rb") as output:
                output.seek(max(0, output.seek(0, os.SEEK_END) - _TAIL))
                lines = output.read().decode(errors="replace").split("\n")
        except OSError:
            return None
        return next((line.strip() for line in reversed(lines) if line.strip()), None)

    def trim(self) -> None:
        """Empty log files that have become too large. A writer that goes on at its old offset leaves a hole, without
        data."""
        for file in self._log.glob("*"):
            with contextlib.suppress(OSError):
                if file.stat().st_blocks * 512 > MOST_LOG:
                    os.truncate(file, 0)

    async def healthy(self, seconds: float) -> Answer:
        """Query the daemon's default thread percentage, as NVIDIA's own device plugin does."""
        answer, text = await self._say("get_default_active_thread_percentage", seconds)
        try:
            float(text)
        except ValueError:
            return Answer.ABSENT if answer is Answer.HEALTHY else answer
        return answer

    async def quit(self, seconds: float) -> None:
        """Ask the daemon to end, which it may ignore."""
        await self._say("quit", seconds)

    def kill(self) -> None:
        """Kill the daemon and its servers."""
        if (pid := self.running()) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    async def _say(self, line: str, seconds: float) -> tuple[Answer, str]:
        if self._asking is not None and self._asking.returncode is None:
            return Answer.SILENT, ""  # the last client hangs and cannot be killed; a second one would hang too
        pipe, out = asyncio.subprocess.PIPE, asyncio.subprocess.STDOUT
        try:
            self._asking = asking = await asyncio.create_subprocess_exec(
                *self._command, stdin=pipe, stdout=pipe, stderr=out, env=self._environ, limit=_MOST_ANSWER
            )
        except OSError:
            return Answer.ABSENT, ""
        try:
            async with asyncio.timeout(seconds):
                text = await _answered(asking, line)
        except TimeoutError:
            return Answer.SILENT, ""
        finally:
            if asking.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    asking.kill()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_KILL_SECONDS):
                        await _discarded(asking)
                        await asking.wait()
        if text is None or asking.returncode:
            return Answer.ABSENT, ""
        return Answer.HEALTHY, text.decode(errors="replace")

    @property
    def _output(self) -> Path:
        return self._log / "output"

    def _make_folders(self, *, clients: bool) -> None:
        """Make the folders with modes for containers of any user. Raises OSError and Unbounded."""
        if len(os.fsencode(self._pipe / _LONGEST_SOCKET)) > _MAX_PATH:
            raise OSError(errno.ENAMETOOLONG, "too long for unix sockets in it", str(self._pipe))
        shared = shm_dir(self._folder)
        for folder in (self._pipe, self._log, shared):
            folder.mkdir(parents=True, exist_ok=True)
        if self._mounts is not None and not clients:
            if not self._mounts.is_own(shared):
                raise Unbounded(folders.shm_without_mount(shared))
            if not self._mounts.is_own(self._pipe):
                self._mounts.make(self._pipe)
        for folder, mode in ((self._pipe, 0o755), (self._log, 0o755), (shared, 0o1777)):
            folder.chmod(mode)


async def _answered(asking: asyncio.subprocess.Process, line: str) -> bytes | None:
    """Return what the client prints until its end; None where that is longer than any answer."""
    assert asking.stdin is not None
    assert asking.stdout is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the client has ended, and its output says why
        asking.stdin.write(f"{line}\n".encode())
        await asking.stdin.drain()
    asking.stdin.close()
    text = b""
    while part := await asking.stdout.read(_MOST_ANSWER):
        text += part
        if len(text) > _MOST_ANSWER:
            return None
    await asking.wait()
    return text


async def _discarded(asking: asyncio.subprocess.Process) -> None:
    """Read the rest of the output: asyncio keeps the pipe open until its end has been read."""
    assert asking.stdout is not None
    while await asking.stdout.read(_MOST_ANSWER):
        pass


def _born(pid: int) -> int | None:
    """Return when the process started, in ticks since boot; None: it has ended. A reused pid has another start time."""
    try:
        # The second field, the program's name in brackets, may hold anything.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else int(fields[18])
