"""An attacker that keeps hundreds of unfinished connections open and replaces each closed one."""

import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tests.waiting import until

ATTACKER = "127.0.0.6"
MANY = 400


class Flood(threading.Thread):
    """A thread that keeps MANY connections open. Each has sent only these bytes."""

    def __init__(self, port: int, sent: bytes, source: str) -> None:
        super().__init__(daemon=True)
        self._port, self._sent, self._source = port, sent, source
        self._ends = threading.Event()
        self.made = 0

    def run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for _ in range(MANY):
                self._connect(selector)
            while not self._ends.is_set():
                for key, _ in selector.select(0.1):
                    selector.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]
                    self._connect(selector)
            for key in list(selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]

    def _connect(self, selector: selectors.BaseSelector) -> None:
        if self._ends.is_set():
            return
        with suppress(ConnectionError):  # the server may close a connection before it is used
            made = socket.create_connection(("127.0.0.1", self._port), 10, (self._source, 0))
            try:
                made.sendall(self._sent)
            except ConnectionError:
                made.close()
            else:
                selector.register(made, selectors.EVENT_READ)
        self.made += 1

    def stop(self) -> None:
        self._ends.set()
        self.join(30)


@contextmanager
def flooded(port: int, sent: bytes, source: str = ATTACKER) -> Iterator[None]:
    flood = Flood(port, sent, source)
    flood.start()
    try:
        until(lambda: flood.made >= MANY)
        yield
    finally:
        flood.stop()
