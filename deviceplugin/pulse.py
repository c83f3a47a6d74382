"""Whether the agent's event loop still runs.

The kubelet's calls are answered on that loop, while the probes are answered on threads: without this, an agent whose
loop hangs would seem to be well, and the kubelet, whose `Allocate` has no time limit, would hang with it.
"""

import asyncio
import time
from collections.abc import Callable

_BEAT_SECONDS = 0.5
SILENT_SECONDS = 3.0
"""After so long without a beat, no pod should be sent to the node."""
HANGING_SECONDS = 30.0
"""After so long, only a restart helps."""


class Pulse:
    """`run` on the loop in question; `silence` from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_beat: float | None = None

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            self._last_beat = self._clock()
            await asyncio.sleep(_BEAT_SECONDS)

    def silence(self) -> float:
        """Return the seconds since the last beat; 0 before the first one."""
        return 0.0 if self._last_beat is None else self._clock() - self._last_beat
