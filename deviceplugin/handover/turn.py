"""When an agent serves its node: it stands by, takes over from the agent before it, and hands over to the next one.

`deviceplugin.handover.takeover` has the order of the steps, the reasons for it, and the messages between the two
agents.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from enum import Enum, auto
from pathlib import Path
from typing import Any

from deviceplugin.handover.node_lock import NodeLock
from deviceplugin.handover.takeover import Others, Predecessor, Successor, listening, request, stand_by
from deviceplugin.resources import Resources
from deviceplugin.wakeup import Wakeup

log = logging.getLogger(__name__)

_TURN_SECONDS, _RESIGNED_SECONDS = 0.05, 0.2
"""Between two attempts to lock the node. An agent that asks for the node tries before one that has handed it over."""
_UNANSWERED_SECONDS = 5.0
_HOLD_SECONDS = 6.0
"""For the kubelet's calls that were under way: a start waits at most `allocation.WAIT_SECONDS`."""
_REGISTERED_SECONDS = 15.0
_STAND_BY_SECONDS = 5.0
"""For the predecessor, from the end of the takeover on: it makes another agent, which reads pods and cards."""
_STOP_SECONDS = 5.0
_LOOK_SECONDS = 0.01

Work = Coroutine[Any, Any, None]


class Outcome(Enum):
    """Why an agent has ended."""

    STOPPED = auto()
    HANDED_OVER = auto()


class Phase(Enum):
    """What an agent does about its node.

    `WAITING`: it stands by as well, but the agent that serves has to end first. So it must count as ready, since a
    rolling update ends the agent before only once the new one is ready, and a replaced agent stays until the new one
    is well.
    """

    STARTING = auto()
    STANDING_BY = auto()
    WAITING = auto()
    TAKING_OVER = auto()
    SERVING = auto()


class Turn:
    """`acquire`, `serve` and `release` once each, in this order and on one event loop; `stop` from any thread.

    folder: the kubelet's device-plugins folder.
    """

    def __init__(self, folder: Path, node: str) -> None:
        self._folder = folder
        self._node = node
        self._lock = NodeLock(folder)
        self._stopping = Wakeup()
        self._stopped = False
        self._predecessor: Predecessor | None = None
        self._others: Others | None = None
        self._taken_over_at: float | None = None
        self.phase = Phase.STARTING

    @property
    def serves(self) -> bool:
        """Whether this agent is the one that serves the node."""
        return self.phase in (Phase.TAKING_OVER, Phase.SERVING)

    def stop(self) -> None:
        """End `acquire` or `serve`, which first finish a takeover that the predecessor has agreed to."""
        self._stopped = True
        self._stopping.wake()

    async def acquire(self, *, requests: bool, is_prepared: Callable[[], bool]) -> bool:
        """Wait for the lock of the node; return whether this agent has it, which one that is stopped may not.

        An agent that is stopped after its predecessor has said "yours" still takes over: the predecessor serves nothing
        any more, and the kubelet would fail pods until another agent has registered. `serve` gives the node back.

        Args:
            asks: whether to ask the agent that serves to hand over; else this agent waits for the other one's end.
            is_prepared: whether this agent knows enough to serve at once. No agent hands over to it before.
        """
        self._stopping.bind()
        loop = asyncio.get_running_loop()
        began = given_at = loop.time()
        while not self._gives_up and not self._lock.try_acquire():
            if self.phase is Phase.STARTING:
                self.phase = Phase.STANDING_BY if requests else Phase.WAITING
                log.info("standing by", extra={"node": self._node})
            if self._predecessor is None and is_prepared():
                self._predecessor = await self._unless_stopped(
                    request(self._folder) if requests else stand_by(self._folder)
                )
                given_at = loop.time()
                if self._predecessor is not None:
                    continue
                # The agent that serves cannot hand over: it is an older version, or it hangs.
                if loop.time() - began > _UNANSWERED_SECONDS:
                    self.phase = Phase.WAITING
            elif self._predecessor is not None and loop.time() - given_at > _UNANSWERED_SECONDS:
                # A third agent has locked the node between the two. It serves now, and is the one to ask.
                self._predecessor.hang_up()
                self._predecessor = None
            await asyncio.sleep(_TURN_SECONDS if requests else _RESIGNED_SECONDS)
        if not self._gives_up:
            self.phase = Phase.SERVING if self._predecessor is None else Phase.TAKING_OVER
        return not self._gives_up

    @property
    def _gives_up(self) -> bool:
        return self._stopped and self._predecessor is None

    async def serve(
        self, resources: Resources, serving: Iterable[Work], works: Iterable[Work], stop_writers: Callable[[], None]
    ) -> Outcome:
        """Serve the node until `stop`, or until another agent takes over.

        Args:
            resources: what is registered with the kubelet.
            serving: keeps the device lists open, until the successor has registered.
            works: everything else; it ends before the successor begins.
            stop_writers: returns once nothing is written any more.
        """
        if self._predecessor is not None:
            works = (*works, self._take_over(self._predecessor, resources))
        kept = [asyncio.create_task(work) for work in serving]
        own = [asyncio.create_task(work) for work in works]
        ending = asyncio.create_task(self._until_it_may_end())
        outcome = Outcome.STOPPED
        try:
            async with listening(self._folder) as others:
                self._others = others
                awaited: list[asyncio.Future[Any]] = [*kept, *own, ending, others.successor]
                done, _ = await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {ending, others.successor}:
                    task.result()
                if ending not in done:
                    outcome = Outcome.HANDED_OVER
                successor = others.successor.result() if others.successor.done() else others.standing_by()
                if successor is not None:
                    await self._hand_over(successor, resources, own, stop_writers)
        finally:
            await self._end([*kept, *own, ending])
        return outcome

    def release(self) -> None:
        """Let another agent lock the node."""
        self._stopping.unbind()
        self._lock.release()

    async def _unless_stopped(self, asking: Coroutine[Any, Any, Predecessor | None]) -> Predecessor | None:
        """Wait until the agent that serves hands the node over or does not, or until this agent is stopped."""
        given = asyncio.create_task(asking)
        ending = asyncio.create_task(self._until_stopped())
        await asyncio.wait([given, ending], return_when=asyncio.FIRST_COMPLETED)
        predecessor = given.result() if given.done() else None
        await self._end([given, ending])
        return predecessor

    async def _until_stopped(self) -> None:
        while not self._stopped:
            await self._stopping.wait()

    async def _until_it_may_end(self) -> None:
        """Wait until this agent is stopped and, shortly after a takeover, until its predecessor stands by.

        The predecessor takes the node back then, and no resource is ever without devices. One that has ended, or was
        stopped as well, does not come: that is waited for within a pod's time to end (30 s).
        """
        await self._until_stopped()
        if self._predecessor is None:
            return
        loop = asyncio.get_running_loop()
        await _until(lambda: self._taken_over_at is not None, loop.time() + _REGISTERED_SECONDS)
        since = loop.time() if self._taken_over_at is None else self._taken_over_at
        await _until(lambda: self._others is not None and bool(self._others.standing_by()), since + _STAND_BY_SECONDS)

    async def _take_over(self, predecessor: Predecessor, resources: Resources) -> None:
        """Once all resources are registered, end the predecessor (steps 4 to 6 of `deviceplugin.handover.takeover`)."""
        deadline = asyncio.get_running_loop().time() + _REGISTERED_SECONDS
        await _until(lambda: all(r.registered for r in resources.wanted()), deadline)
        registered = [r for r in resources.wanted() if r.registered]
        await asyncio.gather(*(r.withdraw() for r in registered))
        if not await predecessor.end({r.resource: r.socket for r in registered}):
            log.warning("the agent before did not say that it has ended", extra={"node": self._node})
        await asyncio.gather(*(r.renew() for r in registered))
        self.phase = Phase.SERVING
        self._taken_over_at = asyncio.get_running_loop().time()
        log.info("taken over", extra={"node": self._node, "resources": len(registered)})
        await asyncio.get_running_loop().create_future()  # `serve` ends with the first of its works

    async def _hand_over(
        self,
        successor: Successor,
        resources: Resources,
        works: Sequence[asyncio.Task[None]],
        stop_writers: Callable[[], None],
    ) -> None:
        """Let another agent serve the node (steps 2 and 5 of `deviceplugin.handover.takeover`)."""
        log.info("handing over", extra={"node": self._node})
        plugins = tuple(resources.plugins.values())
        for registration in resources.registrations:
            registration.retire()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HOLD_SECONDS):
                await asyncio.gather(*(plugin.hold() for plugin in plugins))
        await self._end(works)
        await asyncio.to_thread(stop_writers)
        self.phase = Phase.WAITING
        self._lock.release()
        sockets = await successor.give()
        if sockets is None:
            log.warning("the agent that wanted to take over has failed", extra={"node": self._node})
        for plugin in plugins:
            name = (sockets or {}).get(plugin.resource)
            plugin.hand_on(None if name is None else self._folder / name)
            plugin.end_streams()
        deadline = asyncio.get_running_loop().time() + _STOP_SECONDS
        await _until(lambda: not any(plugin.streams for plugin in plugins), deadline)
        await successor.ended()
        await _until(lambda: not any(plugin.held_calls for plugin in plugins), deadline)

    async def _end(self, tasks: Sequence[asyncio.Task[Any]]) -> None:
        for task in tasks:
            task.cancel()
        # A task that does not end in time is left behind. It is cancelled once more, alone, when the loop is closed.
        _, left = await asyncio.wait([asyncio.gather(*tasks, return_exceptions=True)], timeout=_STOP_SECONDS)
        if left:
            log.warning("not everything ended in time", extra={"node": self._node})


async def _until(reached: Callable[[], bool], deadline: float) -> None:
    """Wait until the condition is reached, or until the loop's clock shows the deadline."""
    while not reached() and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(_LOOK_SECONDS)
