"""nvidia-cuda-mps-control of one card: starting its daemon, asking it, ending it.

A daemon runs in a session of its own and outlives the agent: what computes on the card would end with it. Who it is
stands in a file, so that the next agent finds it again.
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
"""Of a unix socket (sun_path is 108 bytes)."""
_LONGEST_SOCKET = "control_privileged"
_KILL_SECONDS = 1.0
_MOST_ANSWER = 4096
"""Bytes. A root container with a share can listen in place of the daemon (its pipe directory is writable, since MPS
clients make files there), and the agent's memory is all that such an answer would fill."""
_TAIL = 200
"""Bytes of its last words that an Event can hold."""
MOST_LOG = 4 << 20
"""Bytes of each file that it, or its server, writes: they lie in the node's memory, and every question adds to them."""


class Answer(Enum):
    """healthy: as it should be. absent: nobody is there, or not up yet. silent: nothing in time."""

    HEALTHY, ABSENT, SILENT = range(3)


class Control:
    """The control daemon of one card, used on one event loop.

    Args:
        command: how the program is called.
        folder: the setting `mpsDir`.
        card: the card's UUID.
        mounts: makes the folders that containers write mounts of their own; None: they may be plain folders.
    """

    def __init__(self, command: Sequence[str], folder: Path, card: str, mounts: Mounts | None = None) -> None:
        self._command, self._folder, self._mounts = list(command), folder, mounts
        self._pipe, self._log = pipe_dir(folder, card), folder / card / "log"
        self._record = folder / card / "daemon"
        mine = {"CUDA_VISIBLE_DEVICES": card, PIPE: str(self._pipe), "CUDA_MPS_LOG_DIRECTORY": str(self._log)}
        self._environ = {k: v for k, v in os.environ.items() if not k.startswith("CUDA_")} | mine
        self._child = 0
        self._asking: asyncio.subprocess.Process | None = None

    def running(self) -> int | None:
        """The pid of the daemon that this or an earlier agent started, while it runs."""
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
        """Return whether containers may write where files have no bound of their own."""
        mounts, written = self._mounts, (self._pipe, shm_dir(self._folder))
        return mounts is not None and not all(map(mounts.is_own, written))

    def crowded(self) -> bool:
        """Return whether more than half of the room of the pipe folder's own mount is taken. Raises OSError."""
        if self._mounts is None or not self._mounts.is_own(self._pipe):
            return False
        room = os.statvfs(self._pipe)
        return 2 * room.f_bfree < room.f_blocks or 2 * room.f_ffree < room.f_files

    def prepare(self, *, clients: bool, alone: bool) -> None:
        """Make the daemon's folders, and remove what ended containers left there. Raises OSError and Unbounded.

        Args:
            clients: whether containers that run were given this daemon. They see the pipe folder that was there when
                they started and may need their files in it: nothing is mounted over it, and only links are removed.
                Without a daemon they would have no limits, so it is also started where the folder has no bound.
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
        """Return the pid of a new daemon; its folders have been prepared. Raises OSError."""
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

    def said(self) -> str:
        """The last line that it wrote; "" where none."""
        try:
            with self._output.open("rb") as output:
                output.seek(max(0, output.seek(0, os.SEEK_END) - _TAIL))
                lines = output.read().decode(errors="replace").split("\n")
        except OSError:
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def trim(self) -> None:
        """Empty what of its logs has become too large. Who writes on past the hole that this leaves fills nothing."""
        for file in self._log.glob("*"):
            with contextlib.suppress(OSError):
                if file.stat().st_blocks * 512 > MOST_LOG:
                    os.truncate(file, 0)

    async def healthy(self, seconds: float) -> Answer:
        """It tells its default thread percentage, as NVIDIA's own device plugin asks it."""
        answer, text = await self._say("get_default_active_thread_percentage", seconds)
        try:
            float(text)
        except ValueError:
            return Answer.ABSENT if answer is Answer.HEALTHY else answer
        return answer

    async def quit(self, seconds: float) -> None:
        """Ask it to end; it may not."""
        await self._say("quit", seconds)

    def kill(self) -> None:
        """It and its servers, at once."""
        if (pid := self.running()) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    async def _say(self, line: str, seconds: float) -> tuple[Answer, str]:
        if self._asking is not None and self._asking.returncode is None:
            return Answer.SILENT, ""  # the last call cannot even be killed: no second one beside it
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
        """Containers of any user come in by the pipe directory, and write into the shared memory."""
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
    """Return what it prints until its end; None where that is longer than any answer."""
    assert asking.stdin is not None
    assert asking.stdout is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended already, and its output says why
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
    """When it started, in ticks since boot: another process under its number is not it. None: it runs no more."""
    try:
        # The second field, the program's name in brackets, may hold anything.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else int(fields[18])
