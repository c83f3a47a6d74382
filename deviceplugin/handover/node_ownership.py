"""Decides when an agent serves its node: from when it gets the lock until it is stopped or hands the node over.

`deviceplugin.agent` serves its node through `NodeOwnership`, and `deviceplugin.agent_process` reads the `Outcome`. Two
agents that serve one node would remove each other's sockets and CDI files, and both would partition cards. So a lock
decides which one serves. The kubelet goes on admitting pods while the lock passes from one agent to the next:
`handover.takeover` describes the steps and sends the messages, and this module carries the steps out. Do not change
their order without reading `handover.takeover`.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
from collections.abc import Callable, Coroutine, Iterable, Sequence
from enum import Enum, auto
from pathlib import Path
from typing import Any

from deviceplugin.advertised_resources import AdvertisedResources
from deviceplugin.event_loop import Wakeup
from deviceplugin.handover.takeover import OtherAgents, Predecessor, Successor, listening, request, stand_by
from mgpu.model.errors import BadObject, Problem

log = logging.getLogger(__name__)

_LOCK_RETRY_SECONDS = 0.05
"""The interval at which an agent that requests the node tries to take the lock."""
_RESIGNED_LOCK_RETRY_SECONDS = 0.2
"""The same interval for an agent that has handed the node over. It is longer, so that an agent that requests the node
gets the lock first."""
_UNANSWERED_SECONDS = 5.0
"""If nobody has answered for this time, the serving agent counts as unable to hand over. If a predecessor has agreed
and the lock is still taken after this time, a third agent counts as having taken it."""
_HOLD_SECONDS = 6.0
"""How long a handover waits for the kubelet's calls in progress, which take at most `allocator.WAIT_SECONDS`."""
_REGISTERED_SECONDS = 15.0
"""How long a takeover waits until the new agent has registered its resources."""
_STAND_BY_SECONDS = 5.0
"""How long an agent that is stopped after a takeover waits until its predecessor has read pods and cards again and
stands by."""
_STOP_SECONDS = 5.0
_POLL_SECONDS = 0.01

Work = Coroutine[Any, Any, None]


class NodeLock:
    """An advisory lock that at most one process on the node holds. It is released when the process ends or crashes.

    The kubelet's device-plugins folder itself is locked. The kubelet removes the files in this folder when it starts,
    so a lock file would be lost. Agents of other versions lock the same folder, so this must not change.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor: int | None = None

    def try_acquire(self) -> bool:
        """Return whether this object holds the lock now. Raises BadObject if the folder cannot be opened."""
        if self._descriptor is not None:
            return True
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise BadObject([Problem("deviceplugin.kubeletDir", f"{self._folder}: {error.strerror}")]) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class Outcome(Enum):
    """The reason why an agent has ended."""

    STOPPED = auto()
    HANDED_OVER = auto()


class Phase(Enum):
    """The relation of an agent to its node.

    Agents in the phases `STANDING_BY` and `WAITING` do not serve the node, but agents in `WAITING` are ready. A waiting
    agent gets the node only when the serving agent ends, and a rolling update ends the old agent only when the new one
    is ready. So an agent must be ready while it waits for an old version, and after it has handed the node over.
    """

    STARTING = auto()
    """The agent has not tried to take the lock yet."""
    STANDING_BY = auto()
    """The agent requests the node from the serving agent, which may still answer."""
    WAITING = auto()
    """The serving agent does not hand the node over, or this process has handed the node over to it."""
    TAKING_OVER = auto()
    """The agent has the lock, and carries out the steps of the takeover."""
    SERVING = auto()
    """The agent has the lock, and no takeover is in progress."""


class NodeOwnership:
    """The part of an agent that acquires its node, serves it and hands it over.

    On one event loop, call `acquire` once, `serve` if the result was True, and `release` at the end. Any thread may
    call `stop`.

    Args:
        folder: The kubelet's device-plugins folder.
        node: The name of the node, for the log.

    Attributes:
        phase: The present phase. Any thread may read it.
    """

    def __init__(self, folder: Path, node: str) -> None:
        self._folder = folder
        self._node = node
        self._lock = NodeLock(folder)
        self._stopping = Wakeup()
        self._stopped = False
        self._predecessor: Predecessor | None = None
        self._other_agents: OtherAgents | None = None
        self._taken_over_at: float | None = None
        self.phase = Phase.STARTING

    @property
    def serves(self) -> bool:
        return self.phase in (Phase.TAKING_OVER, Phase.SERVING)

    def stop(self) -> None:
        """End `acquire` or `serve`. A takeover that the predecessor has agreed to is finished first."""
        self._stopped = True
        self._stopping.wake()

    async def acquire(self, *, requests: bool, is_prepared: Callable[[], bool]) -> bool:
        """Wait for the lock of the node. Return True if this agent got the lock, or False if it was stopped first.

        An agent that is stopped after its predecessor has agreed ("yours") still takes over: the predecessor does not
        serve any more, and the kubelet would fail pods until another agent has registered. `serve` then hands the node
        back to the predecessor.

        Args:
            requests: Whether to ask the serving agent to hand over. Otherwise this agent waits until that agent ends.
            is_prepared: A function that returns whether this agent could serve at once. The agent connects to the
                serving agent only when the result is true.
        """
        self._stopping.bind()
        loop = asyncio.get_running_loop()
        began = loop.time()
        given_at = began
        while not self._gives_up and not self._lock.try_acquire():
            if self.phase is Phase.STARTING:
                self.phase = Phase.STANDING_BY if requests else Phase.WAITING
                log.info("standing by", extra={"node": self._node})
            if self._predecessor is None and is_prepared():
                answer = request(self._folder) if requests else stand_by(self._folder)
                self._predecessor = await self._unless_stopped(answer)
                given_at = loop.time()
                if self._predecessor is not None:
                    continue
                # The serving agent cannot hand over: it is an older version, or it hangs.
                if loop.time() - began > _UNANSWERED_SECONDS:
                    self.phase = Phase.WAITING
            elif self._predecessor is not None and loop.time() - given_at > _UNANSWERED_SECONDS:
                # A third agent has taken the lock and serves the node now. Ask the third agent next.
                self._predecessor.hang_up()
                self._predecessor = None
            await asyncio.sleep(_LOCK_RETRY_SECONDS if requests else _RESIGNED_LOCK_RETRY_SECONDS)
        if not self._gives_up:
            self.phase = Phase.SERVING if self._predecessor is None else Phase.TAKING_OVER
        return not self._gives_up

    @property
    def _gives_up(self) -> bool:
        return self._stopped and self._predecessor is None

    async def serve(
        self,
        resources: AdvertisedResources,
        serving: Iterable[Work],
        works: Iterable[Work],
        stop_writers: Callable[[], None],
    ) -> Outcome:
        """Serve the node until `stop`, or until another agent takes over.

        Args:
            resources: The resources that are registered with the kubelet.
            serving: The coroutines that keep the device lists open. They run until the successor has registered.
            works: All other coroutines. They are cancelled before the successor begins.
            stop_writers: A function that stops all writes to the API server and to the node. It blocks until they have
                ended.
        """
        if self._predecessor is not None:
            works = (*works, self._take_over(self._predecessor, resources))
        serving_tasks = [asyncio.create_task(work) for work in serving]
        work_tasks = [asyncio.create_task(work) for work in works]
        ending = asyncio.create_task(self._until_it_may_end())
        outcome = Outcome.STOPPED
        try:
            async with listening(self._folder) as others:
                self._other_agents = others
                awaited: list[asyncio.Future[Any]] = [*serving_tasks, *work_tasks, ending, others.successor]
                done, _ = await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {ending, others.successor}:
                    task.result()  # raises the error of a coroutine that has failed, so that the process ends
                if ending not in done:
                    outcome = Outcome.HANDED_OVER
                successor = others.successor.result() if others.successor.done() else others.standing_by()
                if successor is not None:
                    await self._hand_over(successor, resources, work_tasks, stop_writers)
        finally:
            await self._end([*serving_tasks, *work_tasks, ending])
        return outcome

    def release(self) -> None:
        self._stopping.unbind()
        self._lock.release()

    async def _unless_stopped(self, answer: Coroutine[Any, Any, Predecessor | None]) -> Predecessor | None:
        """Return the result of `answer`, or None if this agent is stopped first."""
        answering = asyncio.create_task(answer)
        ending = asyncio.create_task(self._until_stopped())
        await asyncio.wait([answering, ending], return_when=asyncio.FIRST_COMPLETED)
        predecessor = answering.result() if answering.done() else None
        await self._end([answering, ending])
        return predecessor

    async def _until_stopped(self) -> None:
        while not self._stopped:
            await self._stopping.wait()

    async def _until_it_may_end(self) -> None:
        """Wait until this agent is stopped. If it has just taken over, also wait until its predecessor stands by.

        The predecessor then takes the node back, so that no resource is without devices. A predecessor that has ended
        never stands by, so the wait is limited to less than a pod's default grace period (30 s).
        """
        await self._until_stopped()
        if self._predecessor is None:
            return
        loop = asyncio.get_running_loop()
        await _until(lambda: self._taken_over_at is not None, loop.time() + _REGISTERED_SECONDS)
        since = loop.time() if self._taken_over_at is None else self._taken_over_at
        await _until(self._has_agent_standing_by, since + _STAND_BY_SECONDS)

    def _has_agent_standing_by(self) -> bool:
        return self._other_agents is not None and self._other_agents.standing_by() is not None

    async def _take_over(self, predecessor: Predecessor, resources: AdvertisedResources) -> None:
        """Carry out steps 4 to 6 of the takeover as the new agent, for the resources that are registered in time."""
        deadline = asyncio.get_running_loop().time() + _REGISTERED_SECONDS
        await _until(lambda: all(r.is_registered for r in resources.required()), deadline)
        registered = [r for r in resources.required() if r.is_registered]
        await asyncio.gather(*(r.withdraw() for r in registered))
        if not await predecessor.finish({r.resource: r.socket for r in registered}):
            log.warning("the previous agent did not confirm that it has ended", extra={"node": self._node})
        await asyncio.gather(*(r.renew() for r in registered))
        self.phase = Phase.SERVING
        self._taken_over_at = asyncio.get_running_loop().time()
        log.info("taken over", extra={"node": self._node, "resources": len(registered)})
        # Never returns, because `serve` ends as soon as one of its coroutines does.
        await asyncio.get_running_loop().create_future()

    async def _hand_over(
        self,
        successor: Successor,
        resources: AdvertisedResources,
        works: Sequence[asyncio.Task[None]],
        stop_writers: Callable[[], None],
    ) -> None:
        """Carry out steps 2 and 5 of the takeover as the old agent."""
        log.info("handing over", extra={"node": self._node})
        plugins = tuple(resources.plugins.values())
        for registration in resources.registrations:
            registration.retire()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HOLD_SECONDS):
                await asyncio.gather(*(plugin.hold_calls() for plugin in plugins))
        await self._end(works)
        await asyncio.to_thread(stop_writers)
        self.phase = Phase.WAITING
        self._lock.release()
        sockets = await successor.hand_over()
        if sockets is None:
            log.warning("the agent that takes the node over has not registered", extra={"node": self._node})
        for plugin in plugins:
            name = (sockets or {}).get(plugin.resource)
            plugin.forward_calls_to(None if name is None else self._folder / name)
            plugin.end_streams()
        deadline = asyncio.get_running_loop().time() + _STOP_SECONDS
        await _until(lambda: not any(plugin.streams for plugin in plugins), deadline)
        await successor.confirm_end()
        await _until(lambda: not any(plugin.held_calls for plugin in plugins), deadline)

    async def _end(self, tasks: Sequence[asyncio.Task[Any]]) -> None:
        for task in tasks:
            task.cancel()
        # A task that does not end in time is cancelled once more when the loop is closed.
        _, running = await asyncio.wait([asyncio.gather(*tasks, return_exceptions=True)], timeout=_STOP_SECONDS)
        if running:
            log.warning("some tasks did not end in time", extra={"node": self._node})


async def _until(reached: Callable[[], bool], deadline: float) -> None:
    """Poll until the condition holds, or until the loop's clock shows the deadline."""
    while not reached() and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(_POLL_SECONDS)
