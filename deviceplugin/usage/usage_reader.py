"""Measures the use of the cards once in a while, and reports containers that use more than their share.

`deviceplugin.agent` runs `UsageReader.run` while the agent serves the node, and `usage_metrics` reads the result. A
call into the driver may hang forever, so NVML and the isolation back ends are asked on a daemon thread, and at most one
such thread runs at a time.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import NamedTuple

from deviceplugin.isolation.backend import Measured
from deviceplugin.pods.container_runtime import RunningRow
from deviceplugin.usage.cgroup_names import CgroupName
from deviceplugin.usage.container_use import ContainerUse, Names, NodeShares, Usage, combine
from deviceplugin.usage.nvml_usage import CardReading, Nvml, NvmlUsage
from deviceplugin.usage.over_share import OverShare, message
from deviceplugin.usage.process_owners import Owners, ProcessOwners
from mgpu.model.errors import RetryLater
from mgpu.model.usage_problems import EXPLANATIONS, UsageProblem

log = logging.getLogger(__name__)

_ANSWER_SECONDS = 10.0
"""The time after which a reading counts as hanging."""


class UsageSource(NamedTuple):
    """Where the agent reads what processes use.

    Attributes:
        nvml: The `pynvml` module, or a simulation.
        proc: The folder with the processes that NVML names.
    """

    nvml: Nvml
    proc: Path = Path("/proc")


@dataclass(frozen=True, slots=True)
class UsageInputs:
    """What `UsageReader` asks other parts of the agent.

    Attributes:
        shares: Returns what the containers hold. It is called on the event loop.
        measure: Returns what the isolation back ends measure. It may block.
        running: Returns the containers that run. Raises RetryLater.
        is_held: Returns whether an isolation back end holds the container to its share.
    """

    shares: Callable[[], NodeShares]
    measure: Callable[[], Sequence[Measured]]
    running: Callable[[], Awaitable[Sequence[RunningRow]]]
    is_held: Callable[[ContainerUse], bool]


@dataclass(frozen=True, slots=True)
class _Answer:
    readings: tuple[CardReading, ...]
    owners: Owners
    measured: tuple[Measured, ...]


class UsageReader:
    """The use of the node's cards. Use it on one event loop; any thread may read `usage`.

    Args:
        over: A function that is called with a container that has gone over its share, and the text of the Event.
        changed: A function that is called when `usage.problem` has changed.

    Attributes:
        usage: The result of the last reading. It is empty before the first one, and what is not known now is None in
            it, whatever was known before.
    """

    def __init__(
        self,
        source: UsageSource,
        inputs: UsageInputs,
        over: Callable[[ContainerUse, str], None],
        changed: Callable[[], None],
    ) -> None:
        self._nvml = NvmlUsage(source.nvml)
        self._owners = ProcessOwners(source.proc)
        self._inputs = inputs
        self._over = over
        self._changed = changed
        self._over_share = OverShare()
        self._answer: Future[_Answer] | None = None
        self._names: Names = {}
        self.usage = Usage()

    async def run(self, seconds: float) -> None:
        """Read the use at this interval until cancelled; return at once if it is 0."""
        try:
            while seconds:
                await self.read()
                await asyncio.sleep(seconds)
        finally:
            self.usage = Usage()

    async def read(self) -> None:
        """Read the use once, and report what is new in it."""
        shares = self._inputs.shares()
        answer = await self._ask([card.uuid for card in shares.gpus])
        if answer is None:
            usage = replace(combine(shares, (), Owners({}), {}, ()), problem=UsageProblem.HANGS)
        else:
            await self._learn_names(answer.owners)
            usage = combine(shares, answer.readings, answer.owners, self._names, answer.measured)
        had, self.usage = self.usage.problem, usage
        if usage.problem != had:
            if usage.problem:
                log.warning("%s", EXPLANATIONS[usage.problem], extra={"problem": usage.problem.value})
            self._changed()
        now = asyncio.get_running_loop().time()
        for use in self._over_share.newly_over(usage.containers, self._inputs.is_held, now):
            self._over(use, message(use, usage.containers))

    async def _ask(self, cards: Sequence[str]) -> _Answer | None:
        """Return the answers of the driver and of the kernel, or None if they do not come."""
        if self._answer is None or self._answer.done():
            self._answer = Future()
            self._answer.set_running_or_notify_cancel()
            Thread(target=self._query, args=(cards, self._answer), name="usage", daemon=True).start()
        awaited = asyncio.wrap_future(self._answer)
        await asyncio.wait([awaited], timeout=_ANSWER_SECONDS)
        if awaited.done():
            return awaited.result()
        awaited.cancel()  # so that an answer that comes after the end of the event loop does not look for it
        return None

    def _query(self, cards: Sequence[str], answer: Future[_Answer]) -> None:
        try:
            listed = self._owners.now()
            readings = self._nvml.read(cards)
            pids = [process.pid for reading in readings for process in reading.processes or ()]
            answer.set_result(_Answer(readings, self._owners.find(pids, listed), tuple(self._inputs.measure())))
        except Exception as error:  # noqa: BLE001 (`read` raises it on the event loop)
            answer.set_exception(error)

    async def _learn_names(self, owners: Owners) -> None:
        """Ask the runtime for the names of containers if one of the owners is not known."""
        ids = {owner.container for owner in owners.by_pid.values() if isinstance(owner, CgroupName)}
        if ids <= self._names.keys():
            return
        try:
            rows = await self._inputs.running()
        except RetryLater as error:
            log.debug("cannot find out the names of containers: %s", error)
        else:
            self._names = {row.id: (row.uid, row.name) for row in rows}
