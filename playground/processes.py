"""Starts child processes, and finds free loopback ports for them.

On Linux the children end when this process ends, even if it is killed. `playground.cluster`, `playground.realapi`,
benchmarks and tests start processes here. tests/conftest.py may replace `spawn`.
"""

import atexit
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

from playground import child

BLOCK = 100
"""The number of ports in a block; the first of them only reserves the block."""
# These ports are below the range from which Linux by default takes ports for outgoing connections.
_FIRST_PORT = 20_000
_LAST_PORT = 32_000
_STOP_SECONDS = 10.0
_POLL_SECONDS = 0.05


class StartError(Exception):
    """A part of the cluster did not start. If the part is a process, the message contains the end of its log."""


class Ports:
    """A source of free ports. No port is returned twice, not even in two processes that run at the same time.

    Another process could take a port between the moment when it is found free and the moment when it is used.
    Therefore a process reserves blocks of ports: it listens on the first port of a block for as long as it lives.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owned: list[socket.socket] = []
        self._free: Iterator[int] = iter(())

    def free(self) -> int:
        """Return a port that is free now. Raises OSError if all blocks are reserved."""
        with self._lock:
            while True:
                for port in self._free:
                    if _is_free(port):
                        return port
                self._free = iter(self._reserve_block())

    def close(self) -> None:
        for owned in self._owned:
            owned.close()

    def _reserve_block(self) -> range:
        blocks = range(_FIRST_PORT, _LAST_PORT, BLOCK)
        for first in random.sample(blocks, len(blocks)):
            with contextlib.suppress(OSError):
                self._owned.append(socket.create_server(("127.0.0.1", first)))
                return range(first + 1, first + BLOCK)
        raise OSError(f"no block of {BLOCK} ports is free between {_FIRST_PORT} and {_LAST_PORT}")


def own_address() -> str:
    """Return the address of this machine in its network, or that of loopback if it is in none.

    A real API server and the playground's own pass requests on to Pods, but not to addresses of loopback.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # A UDP socket sends nothing when it connects.
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def _is_free(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True
    return False


_ports = Ports()
atexit.register(_ports.close)
free_port = _ports.free


class Child(Protocol):
    """The part of `subprocess.Popen` that is used here. tests/warm.py implements it by a fork."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def terminate(self) -> None: ...


def spawn(command: Sequence[str], environ: Mapping[str, str], out: IO[bytes], orphaned: signal.Signals) -> Child:
    """Start a command in a session of its own. On Linux it gets the signal `orphaned` if this process ends first."""
    # `child` needs only the standard library. With -S and -E Python looks for no other packages and starts faster.
    tied = [sys.executable, "-S", "-E", child.__file__, str(os.getpid()), str(int(orphaned))]
    return subprocess.Popen(
        [*tied, *command],
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=subprocess.STDOUT,
        env=environ,
        start_new_session=True,
    )


class Process:
    """One command, whose output goes to `log`.

    The command runs in a session of its own, so that Ctrl-C reaches only this process, which then stops the command.

    Args:
        name: The name of the process in error messages.
        log: The file to which the output is appended.
        orphaned: The signal that the command gets if this process ends first. Unlike SIGKILL, SIGTERM lets the command
            end its own children.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        environ: Mapping[str, str],
        orphaned: signal.Signals = signal.SIGTERM,
    ) -> None:
        self.name = name
        self.log = log
        self.command = tuple(command)
        self.environ = dict(environ)
        self._orphaned = orphaned
        self._child: Child | None = None

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    @property
    def pid(self) -> int:
        """The process id, or 0 if the process was not started, or was ended by `stop` or `kill`."""
        return self._child.pid if self._child else 0

    def start(self) -> None:
        with self.log.open("ab") as out:
            self._child = spawn(self.command, self.environ, out, self._orphaned)

    def terminate(self) -> None:
        """Send SIGTERM without waiting for the process to end."""
        if self._child and self.running:
            self._child.terminate()

    def stop(self) -> None:
        """Send SIGTERM, wait up to 10 seconds, and then call `kill` for the processes that remain."""
        self.terminate()
        if self._child:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(_STOP_SECONDS)
            self.kill()

    def kill(self) -> None:
        """Send SIGKILL to the process group of the command, and wait until the command has ended."""
        if self._child:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()
            self._child = None  # the kernel may give its PID to another process from here on

    def wait(self, what: str, reached: Callable[[], bool], seconds: float) -> None:
        """Wait until `reached()` is true. Raises StartError after `seconds`, or as soon as the process ends.

        Args:
            what: The expected state, as the error message names it.
        """
        until(f"{self.name}: {what}", reached, seconds, process=self)

    def tail(self, lines: int = 15) -> str:
        """Return the last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else ""


def until(what: str, reached: Callable[[], bool], seconds: float, process: Process | None = None) -> None:
    """Poll until `reached()` is true. Raises StartError after `seconds`, or as soon as `process` has ended."""
    deadline = time.monotonic() + seconds
    while not reached():
        problem = ""
        if process and not process.running:
            problem = "the process ended"
        elif time.monotonic() >= deadline:
            problem = f"this did not happen within {seconds:.0f} s"
        if problem:
            raise StartError("\n".join(filter(None, (f"{what}: {problem}", process.tail() if process else ""))))
        time.sleep(_POLL_SECONDS)
