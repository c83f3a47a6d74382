"""Waking coroutines from threads."""

import asyncio
import threading


class Wakeup:
    """Coroutines of one event loop wait; any thread wakes them all.

    Check what you wait for, then wait, with no `await` between: then nothing is lost.
    Before `bind` and after `unbind` waking does nothing.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._waiting: set[asyncio.Future[None]] = set()

    def bind(self) -> None:
        """Called on the loop that the waiting happens on."""
        self._loop = asyncio.get_running_loop()

    def unbind(self) -> None:
        with self._lock:
            self._loop = None

    def wake(self) -> None:
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._wake)

    async def wait(self, seconds: float | None = None) -> bool:
        """Whether it was woken; False after `seconds`."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            async with asyncio.timeout(seconds):
                await future
        except TimeoutError:
            return False
        finally:
            self._waiting.discard(future)
        return True

    def _wake(self) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
