"""Runs the MPS control daemons of this node: one for each card that is partitioned into MPS slices or has clients.

`clients.Mps` sets which cards need a daemon (`Daemons.set_needed`). For each card a task starts the daemon, queries its
health, and starts it again after it ends. A daemon that has answered is never killed while it has clients, since their
work would be lost. Daemons outlive the agent, and the next agent finds them.
"""

import asyncio
import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deviceplugin.isolation.backend import Unable
from deviceplugin.isolation.mps.control import MULTI_USER, STATIC_PARTITIONS, Answer, Control
from deviceplugin.isolation.mps.folders import Mounts, UnlimitedFolder, shm_without_mount
from deviceplugin.isolation.mps.limits import shm_dir
from deviceplugin.pods.identity import Refused

log = logging.getLogger(__name__)

_NOT_STARTED = "has not answered yet"


@dataclass(frozen=True, slots=True)
class Times:
    """Durations in seconds.

    Attributes:
        health: The interval between two queries of a daemon that answers.
        start: The time in which a new daemon must answer for the first time.
        silent: The time without an answer after which a daemon without clients is replaced.
        quit: The time in which a daemon must quit before it is killed.
        first_pause: The pause before the first restart. Each further pause is twice as long.
        first_poll: The first interval between queries of a daemon that does not answer. Each further interval is twice
            as long, up to `health`.
        partition: The time in which a daemon must answer a command for static SM partitions.
    """

    request: float = 2.0
    health: float = 5.0
    start: float = 10.0
    silent: float = 30.0
    quit: float = 5.0
    first_pause: float = 0.5
    longest_pause: float = 30.0
    first_poll: float = 0.05
    partition: float = 5.0


class _Daemon:
    """The daemon of one card.

    Attributes:
        is_used: Whether containers may be running as clients of the daemon, so that it must not be killed.
        options: The options after `-f` with which the daemon that was watched last was started.
        problem: Why the daemon does not answer: the part of a message that follows "the MPS daemon of card …".
    """

    def __init__(self, card: str, control: Control, node: "Daemons") -> None:
        self._card = card
        self._node = node
        self._times = node.times
        self._is_refused = False
        self._had_clients = False
        self._wake = asyncio.Event()
        self._has_answered = False
        self._attempt = 0
        self.control = control
        self.options: frozenset[str] = frozenset()
        self.is_needed = False
        self.is_used = False
        self.problem = _NOT_STARTED
        self.healthy = asyncio.Event()

    def set_need(self, *, is_needed: bool, is_used: bool) -> None:
        if (is_needed, is_used) != (self.is_needed, self.is_used):
            self.is_needed = is_needed
            self.is_used = is_used
            # Clients are recorded here, since one may start and end during a single query.
            self._had_clients = self._had_clients or is_used
            self._wake.set()

    @property
    def may_use_shared_memory(self) -> bool:
        """Whether the daemon runs, or containers may be running as its clients."""
        return self.is_used or self.healthy.is_set() or self.control.pid() is not None

    @property
    def has_unlimited_folder(self) -> bool:
        """Whether a folder of the daemon has no size limit, or the daemon is not started for that reason."""
        return self.is_needed and (self._is_refused or (self.healthy.is_set() and self.control.has_unlimited_folder()))

    async def run(self) -> None:
        """Run the daemon until the card does not need it any more. When cancelled, leave the daemon running."""
        pause = self._times.first_pause
        while True:
            while self.is_needed:
                begun = _now()
                reason = await self._start_and_watch()
                if reason is None:
                    break
                if _now() - begun > self._times.longest_pause:
                    pause = self._times.first_pause
                self._set_problem(f"{reason}; the next attempt to start it is in {pause:g} s")
                await self._wait(pause)
                pause = min(pause * 2, self._times.longest_pause)
            self._set_health(healthy=False, problem=_NOT_STARTED)
            await self._end()
            # The card may have come to need the daemon again while it ended.
            if not self.is_needed:
                return

    async def _start_and_watch(self) -> str | None:
        """Start the daemon, or find the daemon that an earlier agent started, and watch it.

        Returns why the daemon has ended, or None if the card does not need it any more.
        """
        is_new = False
        pid = self.control.pid()
        if pid is None and await self.control.check_health(self._times.request) is Answer.ABSENT:
            self._is_refused = False
            try:
                pid = await self._start()
            except OSError as error:
                return f"cannot be started: {error.strerror}: {error.filename}"
            except UnlimitedFolder as error:
                self._is_refused = True
                return f"is not started: {error}"
            is_new = True
            self.options = frozenset(self._node.attempts[self._attempt])
            log.info("MPS daemon started", extra={"card": self._card, "pid": pid, "options": sorted(self.options)})
        else:
            self.options = self.control.options()
        with self._waking_at_exit(pid):
            reason = await self._watch(pid, is_new=is_new)
        if is_new and reason is not None and not self._has_answered:
            # A program that does not know an option ends without an answer, and one that cannot partition the card
            # is ended. If that happens without options too, there is another reason, and the next attempt uses all of
            # them again.
            attempts = self._node.attempts
            failed = " ".join(attempts[self._attempt])
            self._attempt = (self._attempt + 1) % len(attempts)
            if self._attempt:
                log.warning("MPS daemon did not start with %s: %s", failed, reason, extra={"card": self._card})
                return await self._start_and_watch()
        return reason

    async def _start(self) -> int:
        """Prepare the folders, start a daemon, and return its pid. Raises OSError and UnlimitedFolder."""
        async with self._node.folders:  # No other daemon starts while the shared memory is emptied.
            is_only_user = not self._node.is_shared_memory_used()
            await asyncio.to_thread(self.control.prepare, has_clients=self.is_used, is_only_user=is_only_user)
            return self.control.start(self._node.attempts[self._attempt])

    async def _watch(self, pid: int | None, *, is_new: bool) -> str | None:
        """Query the daemon until it ends, and return why. Return None if the card does not need it any more.

        Args:
            pid: The process id of the daemon; None if an unknown program started the daemon.
            is_new: Whether the daemon has just been started.
        """
        times = self._times
        last_answer = _now()
        self._has_answered = False
        pause = times.first_poll
        self._had_clients = self.is_used or not is_new
        while self.is_needed:
            answer = await self.control.check_health(times.request)
            self.control.trim()
            if pid is not None and self.control.pid() is None:
                return f"ended: {self.control.last_output() or 'it wrote nothing'}"
            if self._had_clients and not self.is_used and self.control.is_half_full():
                self._set_health(healthy=False, problem="is being restarted")
                await self._quit()
                return "was ended because its folder was more than half full of files that ended containers had left"
            if answer is Answer.HEALTHY and is_new and (lack := await self._lack_of_partitions()):
                await self._quit()
                return lack
            if answer is Answer.HEALTHY:
                last_answer = _now()
                self._has_answered = True
                pause = times.health
                self._set_health(healthy=True, problem=_NOT_STARTED)
            elif answer is Answer.ABSENT and pid is None:
                return "ended"
            else:
                is_starting = is_new and not self._has_answered
                limit = times.start if is_starting else times.silent
                if _now() - last_answer > limit and (is_starting or not self.is_used):
                    self.control.kill()
                    return f"has not answered for {limit:g} s and was killed"
                if not is_starting:
                    self._set_problem("does not answer; running containers continue, and no new ones start")
            await self._wait(pause)
            pause = times.first_poll if answer is Answer.HEALTHY else min(pause * 2, times.health)
        return None

    async def _lack_of_partitions(self) -> str | None:
        """Return why a new daemon with `-S` cannot partition the card, or None if it can.

        Cards before the architecture Ampere have no static SM partitions. No client could run there, because each one
        would need a partition.
        """
        if self._has_answered or STATIC_PARTITIONS not in self.options:
            return None
        found = await self.control.partitions(self._times.start)
        return f"has no static SM partitions: {found.reason}" if isinstance(found, Unable) else None

    async def _end(self) -> None:
        """Make the daemon quit, or kill it if it does not quit in time. Call this only if it has no clients."""
        if self.control.pid() is not None or (
            await self.control.check_health(self._times.request) is not Answer.ABSENT
        ):
            await self._quit()
            log.info("MPS daemon ended", extra={"card": self._card})
        await self._free_shared_memory()

    async def _quit(self) -> None:
        deadline = _now() + self._times.quit
        await self.control.quit(self._times.request)
        while self.control.pid() is not None:
            if _now() > deadline:
                self.control.kill()
            await asyncio.sleep(self._times.first_poll)

    async def _free_shared_memory(self) -> None:
        """Remove what ended containers left in the shared memory, unless another daemon of the node may use it."""
        async with self._node.folders:
            if self._node.is_shared_memory_used():
                return
            try:
                await asyncio.to_thread(self.control.empty_shared_memory)
            except OSError as error:
                self._node.warn(f"the shared memory of MPS cannot be emptied: {error.strerror}: {error.filename}")

    def _set_problem(self, problem: str) -> None:
        """Mark the daemon as not healthy, and report a new problem."""
        if problem != self.problem:
            self._node.warn(f"the MPS daemon of card {self._card} {problem}")
        self._set_health(healthy=False, problem=problem)

    def _set_health(self, *, healthy: bool, problem: str) -> None:
        self.problem = problem
        if healthy == self.healthy.is_set():
            return
        if healthy:
            self.healthy.set()
        else:
            self.healthy.clear()
        self._node.changed()

    async def _wait(self, seconds: float) -> None:
        """Wait at most this long. Return earlier if the need for the daemon changes, or if its process ends."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        self._wake.clear()

    @contextlib.contextmanager
    def _waking_at_exit(self, pid: int | None) -> Iterator[None]:
        """Interrupt `_wait` when the process ends. Without pidfds (before Linux 5.3) the next query notices the end."""
        loop = asyncio.get_running_loop()
        try:
            descriptor = None if pid is None else os.pidfd_open(pid)
        except OSError:
            descriptor = None
        if descriptor is None:
            yield
            return

        def wake() -> None:
            loop.remove_reader(descriptor)
            self._wake.set()

        loop.add_reader(descriptor, wake)
        try:
            yield
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)


class Daemons:
    """The MPS daemons of all cards.

    Use it on one event loop, except for the methods that are documented as thread-safe.

    Args:
        folder: The setting `deviceplugin.mpsDir`.
        warn: A function that reports a problem in an Event of the node.
        changed: A function that is called when a daemon becomes healthy or unhealthy.
        attempts: The options of the daemons (`option_sets`). The next ones are used if a daemon ends unanswered.

    Attributes:
        folders: A lock that a daemon holds while it is started, or while it empties the shared memory.
    """

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        warn: Callable[[str], None],
        changed: Callable[[], None],
        times: Times | None = None,
        mounts: Mounts | None = None,
        attempts: Sequence[Sequence[str]] = ((MULTI_USER,), ()),
    ) -> None:
        self.attempts = attempts
        self._folder = folder
        self._command = command
        self._mounts = mounts
        self.warn = warn
        self.changed = changed
        self.times = times or Times()
        self.folders = asyncio.Lock()
        self._cards: dict[str, _Daemon] = {}
        self._needs_changed = asyncio.Event()

    def set_needed(self, needed: Collection[str], used: Collection[str]) -> None:
        """Run daemons for these cards from now on, and end the daemons of all other cards.

        Args:
            used: The UUIDs of those cards whose daemon may have running clients.
        """
        for card in sorted({*needed, *self._cards}):
            self._daemon(card).set_need(is_needed=card in needed, is_used=card in used)
        self._needs_changed.set()

    def is_healthy(self, card: str) -> bool:
        """Return whether the card's daemon answers. Thread-safe."""
        return card in self._cards and self._cards[card].healthy.is_set()

    def has_unlimited_folder(self) -> bool:
        """Return whether an MPS folder that containers can write to lacks the required size limit. Thread-safe."""
        return any(daemon.has_unlimited_folder for daemon in tuple(self._cards.values()))

    def unable_reason(self) -> str | None:
        """Return why no daemon can run on this node, or None if nothing is known that prevents it. Thread-safe."""
        program = self._command[0]
        if shutil.which(program) is None:
            return f"the program {program} does not exist, or the agent cannot execute it"
        shared = shm_dir(self._folder)
        if self._mounts is not None and not self._mounts.is_mount(shared):
            return shm_without_mount(shared)
        return None

    def lack(self, option: str) -> bool:
        """Return whether a daemon answers that runs without this option. Thread-safe."""
        daemons = tuple(self._cards.values())
        return any(daemon.healthy.is_set() and option not in daemon.options for daemon in daemons)

    def partitionable(self) -> Mapping[str, Control]:
        """Return the daemons that answer and have static SM partitions, by the UUIDs of their cards, sorted."""
        found = sorted(self._cards.items())
        return {c: d.control for c, d in found if d.healthy.is_set() and STATIC_PARTITIONS in d.options}

    async def ready(self, card: str, deadline: float) -> None:
        """Wait until the card's daemon answers. Raises Refused at the deadline, a time of the event loop's clock."""
        daemon = self._daemon(card)
        try:
            async with asyncio.timeout_at(deadline):
                await daemon.healthy.wait()
        except TimeoutError:
            raise Refused(f"the MPS daemon of card {card} {daemon.problem}") from None

    async def run(self) -> None:
        """Find the daemons of earlier agents, and run all daemons until cancelled. They outlive the cancellation."""
        for pipe in sorted(self._folder.glob("*/pipe")):
            self._daemon(pipe.parent.name)
        running: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                self._needs_changed.clear()
                for card, daemon in self._cards.items():
                    if card not in running or (running[card].done() and daemon.is_needed):
                        running[card] = group.create_task(daemon.run())
                await self._needs_changed.wait()

    def _daemon(self, card: str) -> _Daemon:
        if card not in self._cards:
            control = Control(self._command, self._folder, card, self._mounts)
            self._cards[card] = _Daemon(card, control, self)
        return self._cards[card]

    def is_shared_memory_used(self) -> bool:
        """Return whether a daemon or its clients may use the node's shared memory."""
        return any(daemon.may_use_shared_memory for daemon in self._cards.values())


def _now() -> float:
    return asyncio.get_running_loop().time()
