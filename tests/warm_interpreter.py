"""The interpreter of tests/warm.py: `python -m tests.warm_interpreter MODULE…`, its orders on stdin.

Each order is one message: JSON, with the descriptors of the new process's output and of the socket that its number and
then its exit status are written to. Imports nothing that the modules do not.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_PR_SET_PDEATHSIG = 1
_LARGEST = 1 << 18
_LIBC = ctypes.CDLL(None)


@dataclass(frozen=True)
class Order:
    options: dict[str, Any]
    output: int
    report: int


def forked(control: socket.socket) -> Order | None:
    """Fork a process for each order. Returns in each of them its order, and None at the end of all orders."""
    children: dict[int, tuple[int, int]] = {}
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready != control.fileno():
                poll.unregister(ready)
                _told(ready, *children.pop(ready))
                continue
            message, descriptors, _, _ = socket.recv_fds(control, _LARGEST, 2)
            if not message:
                return None
            order = Order(json.loads(message), *descriptors)
            if (pid := os.fork()) == 0:
                for pidfd, (_, report) in children.items():
                    os.close(pidfd)
                    os.close(report)
                control.close()
                return order
            os.close(order.output)
            pidfd = os.pidfd_open(pid)
            children[pidfd] = pid, order.report
            poll.register(pidfd, select.POLLIN)


def _told(pidfd: int, pid: int, report: int) -> None:
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(pidfd)
    with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
        os.write(report, f"{status}\n".encode())
    os.close(report)


def become(order: Order, parent: int) -> None:
    """The process that was ordered."""
    options = order.options
    if options["session"]:
        os.setsid()
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, options["orphaned"])
    if os.getppid() != parent:  # it ended before it could be tied to
        os._exit(1)
    os.write(order.report, f"{os.getpid()}\n".encode())
    os.close(order.report)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(order.output, 1)
    if options["errors"]:
        os.dup2(order.output, 2)
    os.close(order.output)
    os.environ.clear()
    os.environ.update(options["environ"])
    flag, what, *arguments = options["arguments"]
    if flag == "-m":
        sys.argv = [what, *arguments]
        sys.modules.pop(what, None)  # it may be one of those that have been imported, and now it is __main__
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [flag, *arguments]
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})


def _ended(run: Callable[[], None]) -> None:
    """Run, and end as Python does, but without freeing memory: that would first copy all pages shared with the parent.

    What waits for threads and what was registered with `atexit` runs as usual. Also the children that `run` forks end
    like this.
    """
    status = 0
    try:
        run()
    except SystemExit as error:
        if error.code is not None and not isinstance(error.code, int):
            raise
        status = error.code or 0
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main() -> None:
    control, own = socket.socket(fileno=os.dup(0)), os.getpid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the tests, which end this one
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    if order := forked(control):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _ended(lambda: become(order, own))


if __name__ == "__main__":
    main()
