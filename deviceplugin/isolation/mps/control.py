"""Starts, queries and ends the nvidia-cuda-mps-control daemon of one card.

`isolation.mps.daemons` has a `Control` for each card that needs a daemon. A daemon runs in a session of its own and
must outlive the agent: if a daemon ends, the processes that are its clients end too. A file contains the daemon's
process id and start time, so that the next agent finds the daemon.
"""

import asyncio
import contextlib
import errno
import os
import signal
from collections.abc import Sequence
from enum import Enum
from pathlib import Path

from deviceplugin.isolation.backend import Unable
from deviceplugin.isolation.mps import folders
from deviceplugin.isolation.mps.folders import Mounts, UnlimitedFolder
from deviceplugin.isolation.mps.limits import PIPE, pipe_dir, shm_dir
from deviceplugin.isolation.mps.partitions import (
    Partitions,
    add_command,
    list_command,
    read_added,
    read_listed,
    remove_command,
)

MULTI_USER, STATIC_PARTITIONS = "-M", "-S"
"""Options of the control program: clients of several users at the same time, and static SM partitions."""
_MAX_PATH = 107
"""The maximum length of a unix socket's path in bytes. `sun_path` has 108, including the terminating zero."""
_LONGEST_SOCKET = "control_privileged"
"""The socket with the longest name in the pipe folder."""
_KILL_SECONDS = 1.0
_MOST_ANSWER = 4096
"""The most bytes of an answer. MPS clients can write to the pipe folder, so a root container with a share can listen in
place of the daemon. Without this limit its endless answer would fill the agent's memory."""
_MOST_SHOWN = 200
"""The most characters of a daemon's answer in a message."""
_TAIL = 200
"""How many bytes at the end of the daemon's output are searched for the last line, which is reported in an Event."""
MOST_LOG = 4 << 20
"""A log file that takes more bytes than this is emptied. The files are on a tmpfs, and the daemon writes a few lines
for every query."""


def option_sets(multi_user: str, *, partitions: bool) -> tuple[tuple[str, ...], ...]:
    """Return the options with which daemons are started, in the order of the attempts.

    Args:
        multi_user: The setting `deviceplugin.mpsMultiUser`.
        partitions: The setting `deviceplugin.mpsPartitions`.
    """
    users = {"auto": ((MULTI_USER,), ()), "always": ((MULTI_USER,),), "never": ((),)}[multi_user]
    static = ((STATIC_PARTITIONS,), ()) if partitions else ((),)
    return tuple((*one, *other) for one in users for other in static)


class Answer(Enum):
    """The result of a query.

    `HEALTHY` stands for a valid answer, and `SILENT` for no answer before the timeout. `ABSENT` means that no daemon
    listens yet or any more, or that its answer is invalid.
    """

    HEALTHY, ABSENT, SILENT = range(3)


class Control:
    """The control daemon of one card. Use it on one event loop.

    Args:
        folder: The setting `deviceplugin.mpsDir`.
        card: The UUID of the card.
        mounts: The object that mounts a tmpfs at each folder that containers can write to; None if these may be plain
            folders.
    """

    def __init__(self, command: Sequence[str], folder: Path, card: str, mounts: Mounts | None = None) -> None:
        self._command = list(command)
        self._folder = folder
        self._card = card
        self._mounts = mounts
        self._pipe = pipe_dir(folder, card)
        self._log = folder / card / "log"
        self._record = folder / card / "daemon"
        of_card = {"CUDA_VISIBLE_DEVICES": card, PIPE: str(self._pipe), "CUDA_MPS_LOG_DIRECTORY": str(self._log)}
        self._environ = {k: v for k, v in os.environ.items() if not k.startswith("CUDA_")} | of_card
        self._child = 0
        self._client: asyncio.subprocess.Process | None = None
        self._queries = asyncio.Lock()

    def pid(self) -> int | None:
        """Return the pid of the daemon that this or an earlier agent started, or None if it does not run."""
        try:
            pid, recorded_start = map(int, self._record.read_text().split())
        except (OSError, ValueError):
            return None
        start = _start_time(pid)
        if start is None and pid == self._child:
            self._child = 0
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        # If another process has the pid now, its start time differs.
        return pid if start == recorded_start else None

    def has_unlimited_folder(self) -> bool:
        """Return whether a folder that containers can write to should be a mount, but is not."""
        mounts, writable = self._mounts, (self._pipe, shm_dir(self._folder))
        return mounts is not None and not all(map(mounts.is_mount, writable))

    def is_half_full(self) -> bool:
        """Return whether more than half of the blocks or inodes of the pipe folder's tmpfs are used. Raises OSError.

        The result is False if the folder is not a mount.
        """
        if self._mounts is None or not self._mounts.is_mount(self._pipe):
            return False
        usage = os.statvfs(self._pipe)
        return 2 * usage.f_bfree < usage.f_blocks or 2 * usage.f_ffree < usage.f_files

    def prepare(self, *, has_clients: bool, is_only_user: bool) -> None:
        """Create the daemon's folders, and remove the files that ended containers left there.

        Args:
            has_clients: Whether running containers are clients of this daemon. They use the pipe folder that existed
                when they started, and may need their files in it. So nothing is mounted over it, and only links are
                removed. Without a daemon they would have no limits, so the daemon starts even if the folder's size is
                not limited.
            is_only_user: Whether no container of the node is a client, and no other daemon runs. If so, the shared
                memory is emptied too.

        Raises OSError and UnlimitedFolder.
        """
        self._make_folders(has_clients=has_clients)
        if has_clients:
            folders.remove_links(self._pipe)
            return
        folders.empty(self._pipe)
        if is_only_user:
            self.empty_shared_memory()

    def empty_shared_memory(self) -> None:
        """Remove all files in the shared memory of the node's clients. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            folders.empty(shm_dir(self._folder))

    def options(self) -> frozenset[str]:
        """Return the options after `-f` with which the running daemon was started; empty if none runs."""
        pid = self.pid()
        try:
            text = Path(f"/proc/{pid}/cmdline").read_text(errors="replace") if pid is not None else ""
        except OSError:
            return frozenset()
        return frozenset(text.partition("\0-f\0")[2].split("\0")) - {""}

    def start(self, options: Sequence[str]) -> int:
        """Start a daemon with these options and return its pid. Call `prepare` first. Raises OSError.

        A program that does not know an option ends at once.
        """
        output = (os.POSIX_SPAWN_OPEN, 1, str(self._output), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        empty_input = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
        self._child = pid = os.posix_spawnp(
            self._command[0],
            [*self._command, "-f", *options],
            self._environ,
            file_actions=[empty_input, output, (os.POSIX_SPAWN_DUP2, 1, 2)],
            setsid=True,
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
        )
        self._record.write_text(f"{pid} {_start_time(pid) or 0}")
        return pid

    def last_output(self) -> str | None:
        """Return the last line that the daemon wrote, or None if it wrote nothing."""
        try:
            with self._output.open("rb") as output:
                output.seek(max(0, output.seek(0, os.SEEK_END) - _TAIL))
                lines = output.read().decode(errors="replace").split("\n")
        except OSError:
            return None
        return next((line.strip() for line in reversed(lines) if line.strip()), None)

    def trim(self) -> None:
        """Empty log files that take more than `MOST_LOG` bytes."""
        for file in self._log.glob("*"):
            with contextlib.suppress(OSError):
                if file.stat().st_blocks * 512 > MOST_LOG:
                    os.truncate(file, 0)

    async def check_health(self, seconds: float) -> Answer:
        """Query the daemon, and return what kind of answer it gave. NVIDIA's device plugin sends the same query."""
        answer, text = await self._query("get_default_active_thread_percentage", seconds)
        try:
            float(text)
        except ValueError:
            return Answer.ABSENT if answer is Answer.HEALTHY else answer
        return answer

    async def partitions(self, seconds: float) -> Partitions | Unable:
        """Return the static SM partitions of the card, or why that is not possible.

        The first command for partitions initializes CUDA in the daemon, which can take seconds.
        """
        text = await self._send(list_command(), seconds)
        return read_listed(text, self._card) or Unable(_shown(text))

    async def add_partition(self, chunks: int, seconds: float) -> str | Unable:
        """Create a static SM partition and return it, or why that is not possible."""
        text = await self._send(add_command(self._card, chunks), seconds)
        return read_added(text, self._card) or Unable(_shown(text))

    async def remove_partition(self, id_: str, seconds: float) -> None:
        """Remove a partition. It stays while it has clients; `partitions` shows whether it is gone."""
        await self._send(remove_command(self._card, id_), seconds)

    async def _send(self, line: str, seconds: float) -> str:
        """Send a command, and return the daemon's answer; "" if there is none."""
        answer, text = await self._query(line, seconds)
        return text if answer is Answer.HEALTHY else ""

    async def quit(self, seconds: float) -> None:
        """Send the command to quit to the daemon, which may ignore it."""
        await self._query("quit", seconds)

    def kill(self) -> None:
        """Kill the daemon and its servers."""
        if (pid := self.pid()) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    async def _query(self, line: str, seconds: float) -> tuple[Answer, str]:
        """Run the program as a client of the daemon, with this line as its input. Return its answer and the output."""
        async with self._queries:
            return await self._query_alone(line, seconds)

    async def _query_alone(self, line: str, seconds: float) -> tuple[Answer, str]:
        if self._client is not None and self._client.returncode is None:
            return Answer.SILENT, ""  # The last client process hangs and cannot be killed. A second one would hang too.
        pipe, out = asyncio.subprocess.PIPE, asyncio.subprocess.STDOUT
        try:
            self._client = client = await asyncio.create_subprocess_exec(
                *self._command, stdin=pipe, stdout=pipe, stderr=out, env=self._environ, limit=_MOST_ANSWER
            )
        except OSError:
            return Answer.ABSENT, ""
        try:
            async with asyncio.timeout(seconds):
                text = await _exchange(client, line)
        except TimeoutError:
            return Answer.SILENT, ""
        finally:
            if client.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    client.kill()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_KILL_SECONDS):
                        await _discard_output(client)
                        await client.wait()
        if text is None or client.returncode:
            return Answer.ABSENT, ""
        return Answer.HEALTHY, text.decode(errors="replace")

    @property
    def _output(self) -> Path:
        return self._log / "output"

    def _make_folders(self, *, has_clients: bool) -> None:
        """Create the folders with modes that suit containers of any user. Raises OSError and UnlimitedFolder."""
        if len(os.fsencode(self._pipe / _LONGEST_SOCKET)) > _MAX_PATH:
            raise OSError(errno.ENAMETOOLONG, "path too long for the unix sockets in it", str(self._pipe))
        shared = shm_dir(self._folder)
        for folder in (self._pipe, self._log, shared):
            folder.mkdir(parents=True, exist_ok=True)
        if self._mounts is not None and not has_clients:
            if not self._mounts.is_mount(shared):
                raise UnlimitedFolder(folders.shm_without_mount(shared))
            if not self._mounts.is_mount(self._pipe):
                self._mounts.mount(self._pipe)
        for folder, mode in ((self._pipe, 0o755), (self._log, 0o755), (shared, 0o1777)):
            folder.chmod(mode)


def _shown(text: str) -> str:
    """Return the answer of a daemon as part of a message."""
    return text.strip()[:_MOST_SHOWN] or "it does not answer"


async def _exchange(client: asyncio.subprocess.Process, line: str) -> bytes | None:
    """Send the line, and return the output of the client process; None if it is longer than any valid answer."""
    assert client.stdin is not None
    assert client.stdout is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the client has ended; its output says why
        client.stdin.write(f"{line}\n".encode())
        await client.stdin.drain()
    client.stdin.close()
    text = b""
    while part := await client.stdout.read(_MOST_ANSWER):
        text += part
        if len(text) > _MOST_ANSWER:
            return None
    await client.wait()
    return text


async def _discard_output(client: asyncio.subprocess.Process) -> None:
    """Read the output to its end, since asyncio keeps the pipe open until then."""
    assert client.stdout is not None
    while await client.stdout.read(_MOST_ANSWER):
        pass


def _start_time(pid: int) -> int | None:
    """Return when the process started, in ticks since boot, or None if it has ended."""
    try:
        # The second field is the program's name in brackets. It may contain any character, even spaces and brackets.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else int(fields[18])
