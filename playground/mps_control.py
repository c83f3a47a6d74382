"""Simulates nvidia-cuda-mps-control: the daemon and the control commands that the node agent uses.

    mps_control.py -f [-M] [-S]       run the daemon of $CUDA_MPS_PIPE_DIRECTORY in the foreground
    mps_control.py -d [-M] [-S]       run the daemon in the background; -M: for several users, -S: static partitions
    echo <command> | mps_control.py   send a command to the daemon

`cluster` and the tests pass this program to the node agent in place of NVIDIA's. It runs with `python -S -E`, so it may
import only the standard library.

Each pipe directory has at most one daemon. The daemon ends when the directory is removed, so that it does not outlive
its cluster. While the file `hang` exists in the pipe directory, the daemon does not answer. Other files, which lie next
to the pipe directory, make it fail too:

    refuse            the daemon exits at the start
    old               the program does not know the options -M and -S
    unpartitionable   the card has no static partitions, as cards before the architecture Ampere
    in-use            the names of partitions that have clients

The answers about partitions have the form that the program has in practice (`deviceplugin.isolation.mps.partitions`).
"""

import base64
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
_CHUNKS, _SMS_PER_CHUNK, _REST = 16, 8, 4  # a card of the architecture Hopper: chunks of 8 SMs, and SMs in no chunk


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
        self._partitions: dict[str, frozenset[int]] = {}

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
            case ["sm_partition", "rm", card, partition] if self._is_static:
                return self._remove(card, partition)
        return f"Unknown command {' '.join(command)!r}\n"

    def _is_card(self, start: str) -> bool:
        """Return whether this is the UUID of the daemon's card, or its start."""
        return len(start) > len("GPU-") and os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith(start)

    def _add(self, card: str, chunks: int) -> str:
        if not self._is_card(card):
            return f"Failed to find device {card}\n"
        taken = {chunk for chunks_of_one in self._partitions.values() for chunk in chunks_of_one}
        free = [chunk for chunk in range(_CHUNKS) if chunk not in taken]
        if self._is_unpartitionable() or not 0 < chunks <= len(free):
            error = "CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION"
            return f"Failed to fulfill the requested SM partition of {chunks} chunks, error {error}\n"
        # The name depends on the chunks alone, so a restarted daemon gives the same names again.
        mask = sum(1 << chunk for chunk in free[:chunks])
        name = f"D/{base64.b64encode(mask.to_bytes(4, 'little')).decode().rstrip('=')}/{'A' * 26}"
        self._partitions[name] = frozenset(free[:chunks])
        return f"Partition {os.environ['CUDA_VISIBLE_DEVICES']}/{name} created\n"

    def _remove(self, card: str, partition: str) -> str:
        if not self._is_card(card) or partition not in self._partitions:
            return f"Failed to find partition {partition}\n"
        if self._is_in_use(partition):
            return f"Partition {partition} in use. Terminate all clients before removing.\n"
        del self._partitions[partition]
        return ""

    def _is_unpartitionable(self) -> bool:
        return self._pipes.with_name("unpartitionable").exists()

    def _is_in_use(self, partition: str) -> bool:
        names = self._pipes.with_name("in-use")
        return names.exists() and partition in names.read_text().split()

    def _list(self) -> str:
        """Return the table of partitions, which names a card by the start of its UUID."""
        if self._is_unpartitionable():
            return "Failed to query devices, error CUDA_ERROR_NOT_SUPPORTED\n"
        card = os.environ.get("CUDA_VISIBLE_DEVICES", "")[:12]
        used = sum(map(len, self._partitions.values()))
        free = _CHUNKS - used
        lines = ["GPU Partition free used free used clients", "chunks chunks SM SM"]
        lines.append(f"{card} {free} {used} {free * _SMS_PER_CHUNK + _REST} {used * _SMS_PER_CHUNK}")
        for name, own in self._partitions.items():
            lines.append(
                f"{card} {name} {len(own)} {len(own) * _SMS_PER_CHUNK} {'Yes' if self._is_in_use(name) else 'No'}"
            )
        return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
