"""Runs the API server's event loop in a thread, beside whatever else a process does."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from playground.apiserver.server import ApiServer

_TURNS, _TURN_SECONDS = 10, 0.005


@contextmanager
def running(
    server: ApiServer, *, host: str = "127.0.0.1", port: int = 0, tls: tuple[str, str] | None = None
) -> Iterator[str]:
    """The URL of a served API, for the length of the context. Port 0 takes a free one."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="apiserver", daemon=True)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(server.start(host, port, tls), loop).result(timeout=30)
    finally:
        asyncio.run_coroutine_threadsafe(_stopped(server), loop).result(timeout=30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=30)
        loop.close()


async def _stopped(server: ApiServer) -> None:
    """Connections, above all those with TLS, end some turns of the loop after they were closed: it sees them out."""
    await server.stop()
    for _ in range(_TURNS):
        await asyncio.sleep(_TURN_SECONDS)
