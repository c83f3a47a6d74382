"""Python processes that are forked from an interpreter which has already imported what they need.

Importing takes most of the CPU time that a short process needs: 0.6 to 0.8 s for each of mgpu's, and the tests start
some 150 of them. A forked process gets the same command line, environment and files as one that was executed, and it
runs the same `-m` or `-c`. `mgpu playground` executes its processes (test_commands.py).
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]
_lock = threading.Lock()
_warm: dict[tuple[str, ...], "Interpreter"] = {}


class Forked:
    """As much of `subprocess.Popen` as the tests use."""

    def __init__(self, report: socket.socket) -> None:
        self._report = report
        self._unread = b""
        self.returncode: int | None = None
        line = self._line(None)
        if line is None:
            raise RuntimeError("the warm interpreter ended before it forked")
        self.pid = int(line)

    def poll(self) -> int | None:
        return self.returncode if self.returncode is not None else self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        """Raises TimeoutExpired."""
        if self.returncode is None and self._ended(timeout) is None:
            raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Forget it, whether it has ended or not."""
        self._report.close()

    def _ended(self, timeout: float | None) -> int | None:
        line = self._line(timeout)
        if line is not None:
            self.returncode = int(line)
            self._report.close()
        return self.returncode

    def _line(self, timeout: float | None) -> bytes | None:
        """The next line of the report; None where it has not come within `timeout`."""
        while b"\n" not in self._unread:
            if not select.select([self._report], [], [], timeout)[0]:
                return None
            part = self._report.recv(64)
            if not part:
                raise RuntimeError("the warm interpreter ended before the process that it forked")
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return line


class Interpreter:
    """It has imported `modules`, and forks."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "tests.warm_interpreter", *modules]
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), cwd=ROOT)

    def fork(self, order: Mapping[str, object], output: int) -> Forked:
        report, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [json.dumps(order).encode()], [output, theirs.fileno()])
        return Forked(report)

    def close(self) -> None:
        """End it. What it has forked gets the signal that it was given for this case."""
        self._control.close()
        self._process.wait()


def modules_of(arguments: Sequence[str]) -> tuple[str, ...]:
    """What a process of these arguments (`-m MODULE …` or `-c CODE …`) imports anyway."""
    if list(arguments[:2]) == ["-m", "tests.mgpu.serving.sample"]:
        return ("tests.mgpu.serving.sample",)
    command = next((word for word in arguments if word in ("webhook", "scheduler", "deviceplugin")), None)
    if command is None:
        raise ValueError(f"not known what {arguments} imports")
    return (f"{command}.main",)


def fork(
    arguments: Sequence[str],
    environ: Mapping[str, str],
    output: IO[bytes] | int,
    *,
    errors: bool = False,
    session: bool = False,
    orphaned: signal.Signals = signal.SIGKILL,
) -> Forked:
    """Start Python with these arguments: its working directory is the root of the repository.

    output: where stdout goes. errors: and stderr too. session: in a session of its own. orphaned: the signal that it
    gets where this process ends first.
    """
    modules = modules_of(arguments)
    with _lock:
        if modules not in _warm:
            _warm[modules] = Interpreter(modules)
        order = {
            "arguments": list(arguments),
            "environ": dict(environ),
            "errors": errors,
            "session": session,
            "orphaned": int(orphaned),
        }
        return _warm[modules].fork(order, output if isinstance(output, int) else output.fileno())


def close() -> None:
    """End the warm interpreters."""
    with _lock:
        while _warm:
            _warm.popitem()[1].close()
