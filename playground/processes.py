"""Child processes that are stopped again, and whose log is shown where they fail."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

from playground import child

_STOP_SECONDS = 10.0
_POLL_SECONDS = 0.05


class StartError(Exception):
    """A part of the cluster did not come up; the message has the end of its log."""


class Child(Protocol):
    """As much of `subprocess.Popen` as is used here."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def terminate(self) -> None: ...


def spawn(command: Sequence[str], environ: Mapping[str, str], out: IO[bytes], orphaned: signal.Signals) -> Child:
    """Start a command in a session of its own, which gets the signal `orphaned` where this process ends first."""
    # -S and -E: nothing but the standard library is needed before the command takes over.
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
    """One command (its first word a path), its output in `log`; it ends with this process at the latest.

    In a session of its own, so that Ctrl-C reaches only who stops it in order.
    orphaned: what it gets where this process dies first; SIGTERM lets it end children of its own.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        environ: Mapping[str, str],
        orphaned: signal.Signals = signal.SIGTERM,
    ) -> None:
        self.name, self.log, self._orphaned = name, log, orphaned
        self.command, self.environ = tuple(command), dict(environ)
        self._child: Child | None = None

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    @property
    def pid(self) -> int:
        return self._child.pid if self._child else 0

    def start(self) -> None:
        with self.log.open("ab") as out:
            self._child = spawn(self.command, self.environ, out, self._orphaned)

    def terminate(self) -> None:
        if self._child and self.running:
            self._child.terminate()

    def stop(self) -> None:
        """SIGTERM, and SIGKILL for whatever that does not end."""
        self.terminate()
        if self._child:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(_STOP_SECONDS)
            self.kill()

    def kill(self) -> None:
        """SIGKILL for the process and its children, as where a container dies."""
        if self._child:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()
            self._child = None  # its number may be somebody else's from here on

    def wait(self, what: str, reached: Callable[[], bool], seconds: float) -> None:
        """Until `reached`. Raises StartError when the process ends before, or after `seconds`."""
        until(
            f"{self.name}: {what}",
            reached,
            seconds,
            failed=lambda: "" if self.running else "the process ended",
            log=self.log,
        )

    def tail(self, lines: int = 15) -> str:
        return tail(self.log, lines)


def until(
    what: str,
    reached: Callable[[], bool],
    seconds: float,
    *,
    failed: Callable[[], str] = str,
    log: Path | None = None,
) -> None:
    """Poll until `reached`. Raises StartError where `failed` says why it never will be, or after `seconds`."""
    deadline = time.monotonic() + seconds
    while not reached():
        problem = failed() or ("" if time.monotonic() < deadline else f"not within {seconds:.0f} s")
        if problem:
            raise StartError("\n".join(filter(None, (f"{what}: {problem}", tail(log, 15) if log else ""))))
        time.sleep(_POLL_SECONDS)


def tail(path: Path, lines: int) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""
