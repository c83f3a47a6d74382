"""Ports of loopback for those who must know them before they listen."""

import atexit
import contextlib
import random
import socket
import threading
from collections.abc import Iterator

BLOCK = 100
# Below the range from which systems give ports to outgoing connections: none of those takes one meanwhile.
_FIRST, _LAST = 20_000, 32_000


class Ports:
    """Between the answer and the listening anybody could take a port. So a process takes whole blocks of them, each by
    listening at its first port for as long as it lives: no other process gives one of them away, and this one none
    twice.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owned: list[socket.socket] = []
        self._free: Iterator[int] = iter(())

    def free(self) -> int:
        """One that nobody listens at now. Raises OSError where all blocks are taken."""
        with self._lock:
            for port in self._free:
                if _is_free(port):
                    return port
            self._free = iter(self._own_block())
            return next(port for port in self._free if _is_free(port))

    def close(self) -> None:
        for owned in self._owned:
            owned.close()

    def _own_block(self) -> range:
        blocks = range(_FIRST, _LAST, BLOCK)
        for first in random.sample(blocks, len(blocks)):
            with contextlib.suppress(OSError):
                self._owned.append(socket.create_server(("127.0.0.1", first)))
                return range(first + 1, first + BLOCK)
        raise OSError(f"no {BLOCK} ports in a row are free between {_FIRST} and {_LAST}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True
    return False


_ports = Ports()
atexit.register(_ports.close)
free_port = _ports.free
