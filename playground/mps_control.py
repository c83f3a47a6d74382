"""Simulates nvidia-cuda-mps-control: the daemon and the control commands that the node agent uses.

    mps_control.py -f [-M] [-S]       run the daemon of $CUDA_MPS_PIPE_DIRECTORY in the foreground
    mps_control.py -d [-M] [-S]       run the daemon in the background; -M: for several users, -S: static partitions
    echo <command> | mps_control.py   send a command to the daemon

`cluster` and the tests pass this program to the node agent in place of NVIDIA's. It runs with `python -S -E`, so it may
import only the standard library.

Each pipe directory has at most one daemon. The daemon ends when the directory is removed, so that it does not outlive
its cluster. Two files make it fail: while `hang` exists in the pipe directory, the daemon does not answer, and if
`refuse` exists next to the pipe directory, the daemon exits at the start. If `old` exists there, the program does not
know the options -M and -S.
"""

import contextlib
import fcntl
import os
import signal
import socket
import sys
import time
from pathlib import Path

_LOOK_SECONDS = 0.5  # how often the daemon checks whether its directory and `hang` still exist
_DEFAULT = "/tmp/nvidia-mps"
_CHUNKS, _SMS_PER_CHUNK = 16, 8  # a card of the architecture Hopper has chunks of 8 SMs


def main() -> int:
    pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", _DEFAULT))
    options = sys.argv[1:]
    known = set() if pipes.with_name("old").exists() else {"-M", "-S"}
    is_static = "-S" in options and "-S" in known
    options = [option for option in options if option not in known]
    match options:
        case []:
            return _send(pipes)
        case ["-f"]:
            return _serve(pipes, is_static=is_static)
        case ["-d"]:
            return _daemonize(pipes, is_static=is_static)
    print("usage: nvidia-cuda-mps-control [-d | -f]", file=sys.stderr)
    return 1


def _send(pipes: Path) -> int:
    """Send every line of standard input as a command, and print the answers."""
    for line in sys.stdin:
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(str(pipes / "control"))
            except OSError:
                print("Cannot find MPS control daemon process")
                return 1
            client.sendall(line.encode())
            client.shutdown(socket.SHUT_WR)
            while answer := client.recv(4096):
                sys.stdout.write(answer.decode())
    return 0


def _daemonize(pipes: Path, *, is_static: bool) -> int:
    """Fork the daemon. Return 0 as soon as it answers, or 1 if it fails to start."""
    ready, notify = os.pipe()
    if os.fork():
        os.close(notify)
        return 0 if os.read(ready, 1) else 1
    os.close(ready)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    os._exit(_serve(pipes, notify, is_static=is_static))


def _serve(pipes: Path, notify: int = -1, *, is_static: bool) -> int:
    """Run the daemon until it ends, and return the exit status.

    Args:
        notify: The file descriptor of a pipe to which one byte is written as soon as the daemon answers, or -1.
    """
    if pipes.with_name("refuse").exists():
        print("The server cannot be started", file=sys.stderr)
        return 1
    with (pipes / "control_lock").open("w") as lock, socket.socket(socket.AF_UNIX) as server:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print("An instance of this daemon is already running", file=sys.stderr)
            return 1
        number = pipes / "nvidia-cuda-mps-control.new"
        number.write_text(str(os.getpid()))
        number.replace(number.with_suffix(".pid"))
        path = pipes / "control"
        path.unlink(missing_ok=True)
        server.bind(str(path))
        path.chmod(0o666)
        server.listen()
        server.settimeout(_LOOK_SECONDS)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        if notify >= 0:
            os.write(notify, b"1")
            os.close(notify)
        _Daemon(pipes, is_static=is_static).run(server)
        path.unlink(missing_ok=True)
    return 0


class _Daemon:
    def __init__(self, pipes: Path, *, is_static: bool) -> None:
        self._pipes = pipes
        self._ended = False
        self._is_static = is_static
        self._partitions: dict[str, int] = {}
        self._made = 0

    def run(self, server: socket.socket) -> None:
        """Answer commands until `quit` comes or the pipe directory is removed."""
        while not self._ended and (self._pipes / "control").exists():
            with contextlib.suppress(OSError):  # no client came, or the client is gone
                connection, _ = server.accept()
                with connection, connection.makefile("rw") as lines:
                    if not (self._pipes / "hang").exists():
                        lines.write(self._answer(lines.readline().split()))
                        continue
                    while (self._pipes / "hang").exists():
                        time.sleep(_LOOK_SECONDS)

    def _answer(self, command: list[str]) -> str:
        match command:
            case ["quit"] | ["quit", "-t", _]:
                self._ended = True
                return ""
            case ["get_default_active_thread_percentage"]:
                return "100.0\n"
            case ["get_server_list"]:
                return ""
            case ["lspart"] if self._is_static:
                return self._list()
            case ["sm_partition", "add", card, chunks] if self._is_static and chunks.isdecimal():
                return self._add(card, int(chunks))
            case ["sm_partition", "rm", _, partition] if self._is_static:
                return "" if self._partitions.pop(partition, None) else "Failed to remove: no such partition\n"
        return f"Unknown command {' '.join(command)!r}\n"

    def _add(self, card: str, chunks: int) -> str:
        if card != os.environ.get("CUDA_VISIBLE_DEVICES"):
            return f"Failed to find device {card}\n"
        if not 0 < chunks <= _CHUNKS - sum(self._partitions.values()):
            return f"Failed to create a partition of {chunks} chunks: not enough free chunks\n"
        self._made += 1
        name = f"Dx{self._made}AAAA"
        self._partitions[name] = chunks
        return f"{card}/{name}\n"

    def _list(self) -> str:
        """Return the table of NVIDIA's documentation, which names a card by the start of its UUID."""
        card = os.environ.get("CUDA_VISIBLE_DEVICES", "")[:12]
        used = sum(self._partitions.values())
        free = _CHUNKS - used
        head = ["GPU Partition free used free used clients", "chunk chunk SM SM"]
        whole = f"{card} - {free} {used} {free * _SMS_PER_CHUNK} {used * _SMS_PER_CHUNK} -"
        rows = [f"{card} {name} - {n} - {n * _SMS_PER_CHUNK} -" for name, n in self._partitions.items()]
        return "".join(f"{line}\n" for line in (*head, whole, *rows))


if __name__ == "__main__":
    sys.exit(main())
