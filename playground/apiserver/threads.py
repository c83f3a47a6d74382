"""Runs the API server's event loop in a thread, beside whatever else a process does."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from playground.apiserver.server import ApiServer

T = TypeVar("T")


class Served:
    """An API server on a loop of its own. `start` and `kill` any number of times: what it has stored stays, as in etcd.

    Port 0 takes a free one, and keeps it.
    """

    def __init__(
        self, server: ApiServer, *, host: str = "127.0.0.1", port: int = 0, tls: tuple[str, str] | None = None
    ) -> None:
        self._server, self._host, self._port, self._tls = server, host, port, tls
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="apiserver", daemon=True)
        self._thread.start()

    def start(self) -> str:
        """Its URL."""
        url = self._wait(self._server.start(self._host, self._port, self._tls))
        self._port = int(url.rpartition(":")[2])
        return url

    def kill(self) -> None:
        """Every connection ends, and with it whatever was being answered, done or not."""
        self._wait(self._server.stop(abruptly=True))

    def close(self) -> None:
        self._wait(self._server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=30)
        self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=30)


@contextmanager
def running(
    server: ApiServer, *, host: str = "127.0.0.1", port: int = 0, tls: tuple[str, str] | None = None
) -> Iterator[str]:
    """The URL of a served API, for the length of the context. Port 0 takes a free one."""
    served = Served(server, host=host, port=port, tls=tls)
    try:
        yield served.start()
    finally:
        served.close()
