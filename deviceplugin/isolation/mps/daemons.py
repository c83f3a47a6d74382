"""Keeps the MPS control daemons of this node: one for each card that is cut or has clients.

`Mps` says which cards need a daemon (`Daemons.keep`) and waits for it (`Daemons.ready`). One task per card starts the
daemon, queries its health, and starts it again after it ends. A daemon that containers were given is never killed while
it may serve them: their work would be lost. Daemons outlive the agent, and the next agent takes them over.
"""

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
    """Seconds.

    Attributes:
        request: for an answer.
        health: between two queries.
        start: until the first answer of a new daemon.
        silent: without an answer, until a daemon without clients is replaced.
        quit: until a daemon that was asked to end is killed.
        first_pause: before it is started again; doubled up to `longest_pause`.
        first_poll: between the queries until the first answer; doubled up to `health`.
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
    """One card's daemon.

    Attributes:
        wanted: whether the card needs a daemon.
        used: whether containers were given it, so that it is never killed while it may serve them.
        problem: why it is not well.
        well: whether it answers.
    """

    def __init__(self, card: str, control: Control, node: "_Node") -> None:
        self._card = card
        self._control = control
        self._node = node
        self._times = node.times
        self._refused = False
        self._had_clients = False
        self._wake = asyncio.Event()
        self.wanted = False
        self.used = False
        self.problem = _UNKNOWN
        self.well = asyncio.Event()

    def want(self, *, wanted: bool, used: bool) -> None:
        if (wanted, used) != (self.wanted, self.used):
            self.wanted, self.used = wanted, used
            # Noted here, since a client may come and go during one query.
            self._had_clients = self._had_clients or used
            self._wake.set()

    @property
    def present(self) -> bool:
        """Whether the daemon runs or containers were given it, so that the node's shared memory may be in use."""
        return self.used or self.well.is_set() or self._control.running() is not None

    @property
    def unbounded(self) -> bool:
        """Whether containers may fill the node's own file system through its folders, or it is refused for that."""
        return self.wanted and (self._refused or (self.well.is_set() and self._control.unbounded()))

    async def run(self) -> None:
        """Keep the daemon until it is not wanted and has ended. When cancelled, leave it as it is."""
        pause = self._times.first_pause
        while True:
            while self.wanted:
                begun = _now()
                reason = await self._live()
                if reason is None:
                    break
                if _now() - begun > self._times.longest_pause:
                    pause = self._times.first_pause
                self._unwell(f"{reason}; it is started again in {pause:g} s")
                await self._woken(pause)
                pause = min(pause * 2, self._times.longest_pause)
            self._set(well=False, problem=_UNKNOWN)
            await self._end()
            # It may have become wanted again while it ended.
            if not self.wanted:
                return

    async def _live(self) -> str | None:
        """Start the daemon, or find the one that an earlier agent left, and look after it.

        Return why it has ended; None: it is not wanted any more.
        """
        fresh = False
        pid = self._control.running()
        if pid is None and await self._control.healthy(self._times.request) is Answer.ABSENT:
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

    async def _look_after(self, pid: int | None, *, fresh: bool) -> str | None:
        """Query the daemon until it ends, and return why; None: it is not wanted any more.

        Args:
            pid: None: an unknown program started the daemon.
            fresh: whether it has just been started, so that it has no clients yet.
        """
        times = self._times
        heard = _now()
        answered = False
        pause = times.first_poll
        self._had_clients = self.used or not fresh
        while self.wanted:
            answer = await self._control.healthy(times.request)
            self._control.trim()
            if pid is not None and self._control.running() is None:
                return f"ended: {self._control.last_output() or 'it wrote nothing'}"
            if self._had_clients and not self.used and self._control.crowded():
                self._set(well=False, problem="starts again")
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
            await self._woken(pause)
            pause = times.first_poll if answer is Answer.HEALTHY else min(pause * 2, times.health)
        return None

    async def _end(self) -> None:
        """End the daemon, which has no clients: it quits, or it is killed."""
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
        """Free the memory that ended containers left in /dev/shm, where no daemon of the node uses it."""
        async with self._node.folders:
            if self._node.any_present():
                return
            try:
                await asyncio.to_thread(self._control.empty_shared)
            except OSError as error:
                self._node.warn(f"the shared memory of MPS is not emptied: {error.strerror}: {error.filename}")

    def _unwell(self, reason: str) -> None:
        if reason != self.problem:
            self._node.warn(f"the MPS daemon of card {self._card} {reason}")
        self._set(well=False, problem=reason)

    def _set(self, *, well: bool, problem: str) -> None:
        self.problem = problem
        if well == self.well.is_set():
            return
        if well:
            self.well.set()
        else:
            self.well.clear()
        self._node.changed()

    async def _woken(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        self._wake.clear()

    @contextlib.contextmanager
    def _watching(self, pid: int | None) -> Iterator[None]:
        """Wake when the process ends. Without pidfds (a kernel before 5.3) the next query notices the end."""
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
            self._wake.set()

        loop.add_reader(end, ended)
        try:
            yield
        finally:
            loop.remove_reader(end)
            os.close(end)


@dataclass(frozen=True, slots=True)
class _Node:
    """What the daemons of one node share.

    Attributes:
        folders: is held while one of them changes the shared memory.
    """

    warn: Callable[[str], None]
    changed: Callable[[], None]
    times: Times
    any_present: Callable[[], bool]
    folders: asyncio.Lock


class Daemons:
    """Used on one event loop, except for the methods that are called thread-safe.

    Args:
        folder: the setting `deviceplugin.mpsDir`.
        command: how nvidia-cuda-mps-control is called.
        warn: reports a problem in an Event of the node.
        changed: is called when a daemon begins or ceases to be well.
        mounts: makes the folders that containers write mounts of their own; None: they may be plain folders.
    """

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        warn: Callable[[str], None],
        changed: Callable[[], None],
        times: Times | None = None,
        mounts: Mounts | None = None,
    ) -> None:
        self._folder = folder
        self._command = command
        self._mounts = mounts
        self._node = _Node(warn, changed, times or Times(), self._any_present, asyncio.Lock())
        self._cards: dict[str, _Daemon] = {}
        self._kept = asyncio.Event()

    def keep(self, wanted: Collection[str], used: Collection[str]) -> None:
        """Keep daemons for exactly these cards from now on.

        Args:
            wanted: UUIDs of cards.
            used: those of them whose daemon containers were given.
        """
        for card in sorted({*wanted, *self._cards}):
            self._daemon(card).want(wanted=card in wanted, used=card in used)
        self._kept.set()

    def well(self, card: str) -> bool:
        """Return whether the card's daemon answers. Thread-safe."""
        return card in self._cards and self._cards[card].well.is_set()

    def unbounded(self) -> bool:
        """Return whether containers of this node may fill the node's own file system by MPS. Thread-safe."""
        return any(daemon.unbounded for daemon in tuple(self._cards.values()))

    async def ready(self, card: str, deadline: float) -> None:
        """Wait until the card's daemon answers. Raises Refused at the deadline (in the loop's time)."""
        daemon = self._daemon(card)
        try:
            async with asyncio.timeout_at(deadline):
                await daemon.well.wait()
        except TimeoutError:
            raise Refused(f"the MPS daemon of card {card} {daemon.problem}") from None

    async def run(self) -> None:
        """Keep the daemons until cancelled; they then go on. Daemons of earlier agents are taken over, or ended."""
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
