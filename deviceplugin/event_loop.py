"""Connects the agent's asyncio event loop with its threads: wakes coroutines, and detects a loop that is blocked.

The kubelet's calls are answered on one event loop; the watches and the probes run on threads. A coroutine that waits
for a thread uses a `Wakeup`. The probes read the `Heartbeat`.
"""

import asyncio
import threading
import time
from collections.abc import Callable

_BEAT_SECONDS = 0.5
UNRESPONSIVE_SECONDS = 3.0
"""After this time without a beat the agent is not ready, so that no GPU pod is scheduled to the node."""
HANGING_SECONDS = 30.0
"""After this time without a beat the agent is unhealthy, since only a restart helps."""


class Wakeup:
    """A signal that coroutines of one event loop wait for, and that any thread may send.

    No signal is lost if a coroutine checks its condition and then calls `wait` with no `await` in between: signals are
    delivered on the loop, so none can arrive between the two. Before `bind` and after `unbind`, signals are ignored.
    A lock keeps `unbind` from running while another thread uses the loop.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._waiting: set[asyncio.Future[None]] = set()

    def bind(self) -> None:
        """Deliver signals on the running event loop from now on."""
        self._loop = asyncio.get_running_loop()

    def unbind(self) -> None:
        """Ignore further signals. Call this before the loop is closed, since a closed loop accepts no callbacks."""
        with self._lock:
            self._loop = None

    def wake(self) -> None:
        """Wake all coroutines that wait. Thread-safe."""
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._wake)

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait for a signal. Return True when it arrives, or False after `seconds`; with None there is no limit."""
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


class Heartbeat:
    """A measure of how long the event loop has been blocked. Call `run` on the loop, and `silence` from any thread.

    The probes are answered on threads, so without a heartbeat an agent with a blocked loop would seem healthy. But a
    blocked loop can block the kubelet too, whose Allocate call has no timeout.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_beat: float | None = None

    async def run(self) -> None:
        while True:
            self._last_beat = self._clock()
            await asyncio.sleep(_BEAT_SECONDS)

    def silence(self) -> float:
        """Return the seconds since the last beat; 0 before the first one."""
        return 0.0 if self._last_beat is None else self._clock() - self._last_beat
