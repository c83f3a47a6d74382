"""Stopping containers of pods that were deleted by force, some time after their objects have gone.

The kubelet waits for the grace period of the first deletion, which the deleter chooses: years, if wanted. A quota does
not count such a pod, nothing can evict it, and it keeps its cards. So the agent kills its containers through CRI.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from mgpu.model.errors import RetryLater

log = logging.getLogger(__name__)

STOP_SECONDS = 60.0
"""After the object has gone. Force deletion promises a pod no time at all; this lets checkpoints be written."""
_LOOK_SECONDS = 5.0
_MAX_PAUSE = 60.0
_LIST_SECONDS = 5.0


class Overdue(Protocol):
    """`deviceplugin.pods.remnants`."""

    def overdue(self, seconds: float) -> tuple[str, ...]: ...


class Runtime(Protocol):
    async def stop(self, uid: str) -> int:
        """Kill the containers of the pod that run, and return how many. Raises RetryLater."""


class Stops:
    """Used on one event loop.

    Args:
        remnants: the pods that hold cards although their object has gone.
        runtime: the container runtime.
        refresh: lists the pods of the node anew within so many seconds and returns whether that succeeded. Blocks.
        warn: is called with what fails, whenever that changes.
    """

    def __init__(
        self, remnants: Overdue, runtime: Runtime, refresh: Callable[[float], bool], warn: Callable[[str], None]
    ) -> None:
        self._remnants, self._runtime, self._refresh, self._warn = remnants, runtime, refresh, warn
        self._told: frozenset[str] = frozenset()

    async def follow(self) -> None:
        """Stop what is overdue, until cancelled. After a failure the pauses grow."""
        pause = _LOOK_SECONDS
        while True:
            failures = await self.look()
            if failures - self._told:
                self._warn("; ".join(sorted(failures)))
            self._told = failures
            pause = min(pause * 2, _MAX_PAUSE) if failures else _LOOK_SECONDS
            await asyncio.sleep(pause)

    async def look(self) -> frozenset[str]:
        """Stop what is overdue, and return what failed.

        The watch may be behind, or the API server out of reach for longer than the time that has passed. So the pods
        are listed again first, and only what the API server itself does not have any more is stopped.
        """
        if not self._remnants.overdue(STOP_SECONDS):
            return frozenset()
        if not await asyncio.to_thread(self._refresh, _LIST_SECONDS):
            return frozenset({"deleted pods still run here; they are stopped once the API server lists the pods again"})
        uids = self._remnants.overdue(STOP_SECONDS)
        return frozenset(problem for problem in await asyncio.gather(*map(self._stop, uids)) if problem is not None)

    async def _stop(self, uid: str) -> str | None:
        try:
            stopped = await self._runtime.stop(uid)
        except RetryLater as error:
            return f"containers of the deleted pod {uid} are not stopped: {error}"
        if stopped:
            log.warning("stopped %d containers: their pod was deleted by force", stopped, extra={"pod": uid})
        return None
