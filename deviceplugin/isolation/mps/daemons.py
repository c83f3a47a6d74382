"""The MPS control daemons of this node, one for each card that has clients."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from deviceplugin.isolation.mps.control import Answer, Control
from deviceplugin.isolation.mps.folders import Mounts, Unbounded
from deviceplugin.pods.identity import Refused

log = logging.getLogger(__name__)

_UNKNOWN = "has not answered yet"


@dataclass(frozen=True, slots=True)
class Times:
    """In seconds. ask: for an answer. health: between two questions. start: until the first answer.

    silent: without an answer, until it is replaced. quit: until it is killed. pauses: before it is started again.
    """

    request: float = 2.0
    health: float = 5.0
    start: float = 10.0
    silent: float = 30.0
    quit: float = 5.0
    first_pause: float = 0.5
    longest_pause: float = 30.0
    first_poll: float = 0.05


class _Daemon:
    """One card's daemon. used: containers were given it, so it is never killed while it may serve them.

    node: what the daemons of the node share.
    """

    def __init__(self, card: str, control: Control, node: "_Node") -> None:
        self._card, self._control, self._node = card, control, node
        self._told, self._changed, self._times = node.told, node.changed, node.times
        self.wanted = self.used = self._refused = False
        self.problem = _UNKNOWN
        self.well = asyncio.Event()
        self._stir = asyncio.Event()

    def want(self, *, wanted: bool, used: bool) -> None:
        if (wanted, used) != (self.wanted, self.used):
            self.wanted, self.used = wanted, used
            self._stir.set()

    @property
    def present(self) -> bool:
        """Whether the daemon runs or containers were given it, so that the node's shared memory may be in use."""
        return self.used or self.well.is_set() or self._control.running() is not None

    @property
    def unbounded(self) -> bool:
        """Whether containers may fill the node's own file system through its folders, or it is refused for that."""
        return self.wanted and (self._refused or (self.well.is_set() and self._control.unbounded()))

    async def run(self) -> None:
        """Until it is not wanted and has ended. Cancelled, it leaves the daemon as it is."""
        pause = self._times.first_pause
        while True:
            while self.wanted:
                begun = _now()
                if not (why := await self._live()):
                    break
                if _now() - begun > self._times.longest_pause:
                    pause = self._times.first_pause
                self._unwell(f"{why}; it is started again in {pause:g} s")
                await self._stirred(pause)
                pause = min(pause * 2, self._times.longest_pause)
            self._set(well=False, problem=_UNKNOWN)
            await self._end()
            if not self.wanted:
                return

    async def _live(self) -> str:
        """Start it, or find the one that an earlier agent left, and look after it.

        Why it is no more; "": it is not wanted any more.
        """
        fresh = False
        if (pid := self._control.running()) is None and await self._control.healthy(
            self._times.request
        ) is Answer.ABSENT:
            self._refused = False
            try:
                pid, fresh = await self._started(), True
            except OSError as error:
                return f"cannot be started: {error.strerror}: {error.filename}"
            except Unbounded as error:
                self._refused = True
                return f"is not started: {error}"
            log.info("MPS daemon started", extra={"card": self._card, "pid": pid})
        with self._watching(pid):
            return await self._look_after(pid, fresh=fresh)

    async def _started(self) -> int:
        """Return the pid of a new daemon in folders without leftovers. Raises OSError and Unbounded."""
        async with self._node.folders:  # no other daemon starts while the shared memory is emptied
            alone = not self._node.any_present()
            await asyncio.to_thread(self._control.prepare, clients=self.used, alone=alone)
            return self._control.start()

    async def _look_after(self, pid: int | None, *, fresh: bool) -> str:
        """fresh: it has just been started, so nobody is its client yet. pid None: nobody knows who started it."""
        times, heard, answered = self._times, _now(), False
        pause, had_clients = times.first_poll, not fresh
        while self.wanted:
            answer = await self._control.healthy(times.request)
            self._control.trim()
            if pid is not None and self._control.running() is None:
                return f"ended: {self._control.said() or 'it said nothing'}"
            had_clients = had_clients or self.used
            if had_clients and not self.used and self._control.crowded():
                self._set(well=False, problem="starts anew")
                await self._quitted()
                return "was ended, since ended containers left its folder more than half full"
            if answer is Answer.HEALTHY:
                heard, answered, pause = _now(), True, times.health
                self._set(well=True, problem="")
            elif answer is Answer.ABSENT and pid is None:
                return "ended"
            else:
                limit = times.start if fresh and not answered else times.silent
                if _now() - heard > limit and ((fresh and not answered) or not self.used):
                    self._control.kill()
                    return f"has not answered for {limit:g} s and was ended"
                if answered or not fresh:
                    self._unwell("does not answer; what runs stays, nothing new starts")
            await self._stirred(pause)
            pause = times.first_poll if answer is Answer.HEALTHY else min(pause * 2, times.health)
        return ""

    async def _end(self) -> None:
        """Nobody is its client: it quits, or it is killed."""
        if self._control.running() is not None or await self._control.healthy(self._times.request) is not Answer.ABSENT:
            await self._quitted()
            log.info("MPS daemon ended", extra={"card": self._card})
        await self._free_shared()

    async def _quitted(self) -> None:
        deadline = _now() + self._times.quit
        await self._control.quit(self._times.request)
        while self._control.running() is not None:
            if _now() > deadline:
                self._control.kill()
            await asyncio.sleep(self._times.first_poll)

    async def _free_shared(self) -> None:
        """Give the memory back that ended containers left in /dev/shm, where no daemon of the node uses it."""
        async with self._node.folders:
            if self._node.any_present():
                return
            try:
                await asyncio.to_thread(self._control.empty_shared)
            except OSError as error:
                self._told(f"the shared memory of MPS is not emptied: {error.strerror}: {error.filename}")

    def _unwell(self, why: str) -> None:
        if why != self.problem:
            self._told(f"the MPS daemon of card {self._card} {why}")
        self._set(well=False, problem=why)

    def _set(self, *, well: bool, problem: str) -> None:
        changed, self.problem = well != self.well.is_set(), problem
        (self.well.set if well else self.well.clear)()
        if changed:
            self._changed()

    async def _stirred(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stir.wait()
        self._stir.clear()

    @contextlib.contextmanager
    def _watching(self, pid: int | None) -> Iterator[None]:
        """Its end stirs at once. Where the kernel cannot tell, the next question does."""
        loop = asyncio.get_running_loop()
        try:
            end = None if pid is None else os.pidfd_open(pid)
        except OSError:
            end = None
        if end is None:
            yield
            return

        def ended() -> None:
            loop.remove_reader(end)
            self._stir.set()

        loop.add_reader(end, ended)
        try:
            yield
        finally:
            loop.remove_reader(end)
            os.close(end)


@dataclass(frozen=True, slots=True)
class _Node:
    """What the daemons of one node share. folders: held while one of them changes the shared memory."""

    told: Callable[[str], None]
    changed: Callable[[], None]
    times: Times
    any_present: Callable[[], bool]
    folders: asyncio.Lock


class Daemons:
    """Used on one event loop. command: how nvidia-cuda-mps-control is called. folder: the setting `mpsDir`.

    told: hears what the node's Events shall say. changed: is called when one is well that was not, or the reverse.
    mounts: makes the folders that containers write mounts of their own; None: they may be plain folders.
    Daemons outlive the agent; the next one takes them over.
    """

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        told: Callable[[str], None],
        changed: Callable[[], None],
        times: Times | None = None,
        mounts: Mounts | None = None,
    ) -> None:
        self._folder, self._command, self._mounts = folder, command, mounts
        self._node = _Node(told, changed, times or Times(), self._any_present, asyncio.Lock())
        self._cards: dict[str, _Daemon] = {}
        self._kept = asyncio.Event()

    def keep(self, wanted: Collection[str], used: Collection[str]) -> None:
        """These cards have a daemon from now on, the others none. used: those that containers were given.

        wanted, used: UUIDs of cards; used is a part of wanted.
        """
        for card in sorted({*wanted, *self._cards}):
            self._daemon(card).want(wanted=card in wanted, used=card in used)
        self._kept.set()

    def well(self, card: str) -> bool:
        """From any thread."""
        return card in self._cards and self._cards[card].well.is_set()

    def unbounded(self) -> bool:
        """Return whether containers of this node may fill the node's own file system by MPS. From any thread."""
        return any(daemon.unbounded for daemon in tuple(self._cards.values()))

    async def ready(self, card: str, deadline: float) -> None:
        """Until the card's daemon answers. Raises Refused at the deadline (of the loop's clock)."""
        daemon = self._daemon(card)
        try:
            async with asyncio.timeout_at(deadline):
                await daemon.well.wait()
        except TimeoutError:
            raise Refused(f"the MPS daemon of card {card} {daemon.problem}") from None

    async def run(self) -> None:
        """From the first `keep` on until cancelled. Those of earlier agents are taken over, or ended; all then stay."""
        for left in sorted(self._folder.glob("*/pipe")):
            self._daemon(left.parent.name)
        running: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                self._kept.clear()
                for card, daemon in self._cards.items():
                    if card not in running or (running[card].done() and daemon.wanted):
                        running[card] = group.create_task(daemon.run())
                await self._kept.wait()

    def _daemon(self, card: str) -> _Daemon:
        if card not in self._cards:
            control = Control(self._command, self._folder, card, self._mounts)
            self._cards[card] = _Daemon(card, control, self._node)
        return self._cards[card]

    def _any_present(self) -> bool:
        return any(daemon.present for daemon in self._cards.values())


def _now() -> float:
    return asyncio.get_running_loop().time()
