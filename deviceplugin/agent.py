"""The node agent: cards, pods, the kubelet and the API server, put together."""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from deviceplugin.accounts import Grants, handed, holding
from deviceplugin.allocation import Allocations, Node
from deviceplugin.cards import CardSource
from deviceplugin.cards.watch import CardWatch
from deviceplugin.cdi import CdiFiles
from deviceplugin.checkpoint import FILE, read_checkpoint
from deviceplugin.exchange import Exchange
from deviceplugin.exposure import exposure_of
from deviceplugin.ids import MAX_IDS, device_ids
from deviceplugin.leftovers import Leftovers
from deviceplugin.limits_files import LimitsFiles
from deviceplugin.metrics import Seen
from deviceplugin.mig.driver import MigDriver
from deviceplugin.mps.clients import mps_of
from deviceplugin.nodelock import NodeLock
from deviceplugin.offers import WHOLE_CARDS, as_ids, budget
from deviceplugin.plugin import Plugin
from deviceplugin.podresources import PodResources, pod_resources_socket
from deviceplugin.pods import GpuPod, NodePods
from deviceplugin.pulse import HANGING_SECONDS, SILENT_SECONDS, Pulse
from deviceplugin.records import RecordWriter
from deviceplugin.registration import CHECK_SECONDS, Registration
from deviceplugin.reporter import Reporter
from deviceplugin.runtime import ContainerRuntime
from deviceplugin.slices.service import Slices
from deviceplugin.slices.worker import Around
from deviceplugin.takeover import Others, Predecessor, Successor, ask, listening, stand_by
from deviceplugin.toolkit import read_toolkit
from deviceplugin.unrecorded import Unrecorded
from deviceplugin.upkeep import Keeper, keep_clean
from deviceplugin.wakeup import Wakeup
from deviceplugin.wholecards import OURS, WholeCards
from mgpu.dialects import gpushare
from mgpu.dialects.records import OPEN, Records
from mgpu.kube import Api
from mgpu.kube.events import Recorder, node_reference, pod_reference
from mgpu.kube.reflector import Reflector
from mgpu.model.cards import Card
from mgpu.model.errors import RetryLater
from mgpu.model.given import write_given
from mgpu.model.partitioning import LABEL
from mgpu.model.slices import MIG, MPS
from mgpu.serving.record_keys import warn_if_unsealed
from mgpu.settings import Settings

log = logging.getLogger(__name__)

_RETRY_SECONDS = 2.0
_STOP_SECONDS = _NODE_SECONDS = 5.0
_TURN_SECONDS, _RESIGNED_SECONDS = 0.05, 0.2
"""Between two looks whether the node is free: the one that asks for it comes before one that has handed it over."""
_UNANSWERED_SECONDS = 5.0
_HOLD_SECONDS = 6.0
"""For the calls of the kubelet that were under way: a start waits at most `allocation.WAIT_SECONDS`."""
_REGISTERED_SECONDS = 15.0
_ANOTHER_SERVES = "another agent serves this node; this one stands by"
_LOOK_SECONDS = 0.01


class Outcome(Enum):
    """Why an agent has ended."""

    STOPPED = "stopped"
    HANDED_OVER = "another agent serves the node"


class _Part(Protocol):
    def start(self) -> None: ...
    def stop(self) -> None: ...


class Agent:
    """`run` until `stop`. settings.deviceplugin must name the node."""

    def __init__(
        self, settings: Settings, source: CardSource, api: Api, driver: MigDriver, records: Records = OPEN
    ) -> None:
        own = settings.deviceplugin
        self._settings, self._node_name = settings, own.node
        self._folder = Path(own.kubelet_dir) / "device-plugins"
        self._recorder = Recorder(api, "mgpu-deviceplugin", own.node)
        self._cards_changed, self._pods_changed, self._stopping = Wakeup(), Wakeup(), Wakeup()
        self._stopped = False
        self._lock = NodeLock(self._folder)
        self._started: list[_Part] = []
        self._standing_by: str | None = None
        self._others: Others | None = None
        self._must_wait_for_end = self._serves = self._taking_over = self._resigned = False
        self._pulse = Pulse()
        self._source = source
        self._cards = CardWatch(source, self._take_cards, self._warn_node)
        self._pods = NodePods(settings, self._take_pods, records)
        self._sealed_by = records
        self._reflector = Reflector(
            api, "/api/v1/pods", self._pods.take, self._pods.drop, {"fieldSelector": f"spec.nodeName={own.node}"}
        )
        self._reporter = Reporter(
            api,
            own.node,
            settings,
            lambda: self._reflector.synced,
            self._held,
            self._told_of_whole_cards,
            lambda cards: self._slices.whole(cards),
            lambda: self._slices.wake(),
            lambda: self._runtime.has_cdi,
            read_toolkit,
        )
        self._records = RecordWriter(api)
        self._limits = LimitsFiles(
            own.limits_dir,
            lambda: self._pods.limited() if self._reflector.synced else None,
            self._gpus,
            lambda problem: self._warn_node(problem, "MgpuLimits"),
        )
        self._owners = PodResources(pod_resources_socket(own))
        self._runtime = ContainerRuntime(Path(own.cri_socket) if own.cri_socket else None)
        files = CdiFiles(Path(own.cdi_dir))
        self._mps = mps_of(
            own, files, self._gpus, self._pods, self._pods_changed, self._warn_mps, self._warn_unenforced
        )
        self._whole = WholeCards(
            own.whole_cards,
            self._folder,
            self._pods,
            self._owners,
            Unrecorded(self._runtime, self._pods, self._gpus),
            lambda: self._reporter.capacity(WHOLE_CARDS),
        )
        self._node = self._node_with(files, driver)
        self._keepers: list[Keeper] = [self._node.delivery, self._node.grants, self._mps]
        self._all_known = False
        self._allocations: dict[str, Allocations] = {}
        self._plugins: dict[str, Plugin] = {}
        for resource in as_ids((), settings):
            self._begin(resource.name)
        self._slices = self._slices_with(files, api, driver)
        left = {WHOLE_CARDS: self._whole.left, gpushare.MEMORY: lambda: self._reporter.undrained(gpushare.MEMORY)}
        self._registrations = [
            Registration(self._folder, plugin, left=left.get(name, lambda: ""), changed=self._pods_changed)
            for name, plugin in self._plugins.items()
        ]

    def _node_with(self, files: CdiFiles, driver: MigDriver) -> Node:
        cdi = self._settings.deviceplugin.cdi
        return Node(
            pods=self._pods,
            cards=lambda: self._slices.devices(self._gpus()),
            gpus=self._gpus,
            owners=self._owners,
            checkpoint=self._folder / FILE,
            delivery=files if cdi else self._exchange(),
            grants=Grants(handed(files.environments()) if cdi else {}),
            changed=self._pods_changed,
            refused=self._warn_pod,
            resend=lambda resource: self._plugins[resource].resend(),
            given=self._mark_given,
            foreign=self._whole.holdings,
            mps=self._mps if cdi else None,
            exposure=exposure_of(self._settings.deviceplugin),
            leftovers=Leftovers(self._pods, driver.read),
        )

    def _exchange(self) -> Exchange:
        return Exchange(
            self._pods, self._gpus, self._settings, self._records.write, sealed=self._sealed_by.keys is not None
        )

    def _slices_with(self, files: CdiFiles, api: Api, driver: MigDriver) -> Slices:
        around = Around(
            node=lambda: self._reporter.node,
            gpus=lambda: self._cards.cards,
            pods=self._pods,
            synced=lambda: self._reflector.synced,
            environments=files.environments,
            foreign=self._whole.holdings,
            warn=lambda problem: self._warn_node(problem, "MgpuSlices"),
            changed=self._cut_anew,
        )
        saw = self._reporter.saw_node
        return Slices(self._settings, api, around, driver, self._folder, self._begin, self._node.mps, saw)

    async def run(self, *, asks: bool = True) -> Outcome:
        """Stand by until this node is free, then serve it until `stop`, or until another agent takes over.

        Streams are ended and sockets removed before it returns. An agent runs once.

        Args:
            asks: whether to ask the agent that serves the node to hand it over (`deviceplugin.takeover`). One that has
                handed the node over itself does not: it waits for the other one's end.
        """
        for wakeup in (self._cards_changed, self._pods_changed, self._stopping):
            wakeup.bind()
        self._start(self._reflector, self._cards)
        self._reporter.watch()
        self._resigned = not asks
        try:
            predecessor = await self._turn(asks=asks)
            return Outcome.STOPPED if self._stopped else await self._serve_node(predecessor)
        finally:
            self._close()
            await self._owners.close()
            await self._runtime.close()
            self._lock.release()
            log.info("stopped", extra={"node": self._node_name})

    async def _turn(self, *, asks: bool) -> Predecessor | None:
        """Wait for the lock of the node; return the agent that has handed the node over, None where none has.

        Cards and pods are followed meanwhile, so that this agent can serve at once.
        """
        predecessor, standing_by_since = None, asyncio.get_running_loop().time()
        while not self._stopped and not self._lock.try_acquire():
            if self._standing_by is None:
                self._standing_by = _ANOTHER_SERVES
                log.info("standing by", extra={"node": self._node_name})
            if predecessor is None and self._is_prepared():
                predecessor = await (ask(self._folder) if asks else self._until_given())
                if predecessor is not None:
                    continue
                # Of an agent that cannot hand over, an older version or one that hangs, the end has to be waited for;
                # a rolling update ends it once this one says that it is ready.
                waited = asyncio.get_running_loop().time() - standing_by_since
                self._must_wait_for_end = waited > _UNANSWERED_SECONDS
            await asyncio.sleep(_TURN_SECONDS if asks else _RESIGNED_SECONDS)
        self._standing_by = None
        return predecessor

    async def _until_given(self) -> Predecessor | None:
        """Wait until the agent that serves hands the node over, or has ended, or this one is to end."""
        given = asyncio.create_task(stand_by(self._folder))
        ending = asyncio.create_task(self._until_stopped())
        await asyncio.wait([given, ending], return_when=asyncio.FIRST_COMPLETED)
        predecessor = given.result() if given.done() else None
        await self._end([given, ending])
        return predecessor

    def _is_prepared(self) -> bool:
        return self._cards.cards is not None and self._reflector.synced and self._reporter.node is not None

    async def _serve_node(self, predecessor: Predecessor | None) -> Outcome:
        self._serves, self._taking_over = True, predecessor is not None
        if self._settings.deviceplugin.cdi:  # what another agent has handed out while this one stood by
            self._node.grants.recover(handed(CdiFiles(Path(self._settings.deviceplugin.cdi_dir)).environments()))
        self._mps.recover()
        self._start(self._reporter, self._records, self._slices, self._limits)
        log.info("started", extra={"node": self._node_name})
        warn_if_unsealed(self._sealed_by)
        if self._settings.deviceplugin.enforce == "mps" and self._node.mps is None:
            self._warn_mps("deviceplugin.enforce is mps, and nothing is enforced: the runtime has no CDI")
        serving = [asyncio.create_task(work) for work in (self._serve(), self._slices.run())]
        works = [asyncio.create_task(work) for work in self._works(predecessor)]
        ending = asyncio.create_task(self._until_stopped())
        outcome = Outcome.STOPPED
        try:
            async with listening(self._folder) as others:
                self._others = others
                awaited: list[asyncio.Future[Any]] = [*serving, *works, ending, others.successor]
                done, _ = await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {ending, others.successor}:
                    task.result()
                if ending not in done:
                    outcome = Outcome.HANDED_OVER
                successor = others.successor.result() if others.successor.done() else others.standing_by()
                if successor is not None:
                    await self._hand_over(successor, works)
        finally:
            await self._end([*serving, *works, ending])
        return outcome

    def _works(self, predecessor: Predecessor | None) -> list[Coroutine[Any, Any, None]]:
        works = [self._follow_pods(), self._follow_whole_cards(), self._pulse.run()]
        works.append(self._runtime.follow(self._reporter.update))
        if predecessor is not None:
            works.append(self._take_over(predecessor))
        return works

    async def _take_over(self, predecessor: Predecessor) -> None:
        """Once all resources are registered, let the predecessor end (steps 4 to 6 of `deviceplugin.takeover`)."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _REGISTERED_SECONDS
        while not all(r.registered for r in self._wanted_registrations()) and loop.time() < deadline:
            await asyncio.sleep(_LOOK_SECONDS)
        registered = [r for r in self._wanted_registrations() if r.registered]
        await asyncio.gather(*(r.withdraw() for r in registered))
        if not await predecessor.end({r.resource: r.socket for r in registered}):
            log.warning("the agent before did not say that it has ended", extra={"node": self._node_name})
        await asyncio.gather(*(r.renew() for r in registered))
        self._taking_over = False
        log.info("taken over", extra={"node": self._node_name, "resources": len(registered)})
        await asyncio.get_running_loop().create_future()

    async def _hand_over(self, successor: Successor, works: Sequence[asyncio.Task[None]]) -> None:
        """Let another agent serve the node (steps 2 and 5 of `deviceplugin.takeover`)."""
        log.info("handing over", extra={"node": self._node_name})
        plugins = tuple(self._plugins.values())
        for registration in (*self._registrations, *self._slices.registrations):
            registration.retire()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HOLD_SECONDS):
                await asyncio.gather(*(plugin.hold() for plugin in plugins))
        await self._end(works)
        await asyncio.to_thread(self._stop_writers)
        self._serves, self._standing_by, self._resigned = False, _ANOTHER_SERVES, True
        self._lock.release()
        sockets = await successor.give()
        if sockets is None:
            log.warning("the agent that wanted to take over has failed", extra={"node": self._node_name})
        for plugin in plugins:
            name = (sockets or {}).get(plugin.resource)
            plugin.hand_on(None if name is None else self._folder / name)
            plugin.end_streams()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _STOP_SECONDS
        while any(plugin.streams for plugin in plugins) and loop.time() < deadline:
            await asyncio.sleep(_LOOK_SECONDS)
        await successor.ended()
        while any(plugin.held_calls for plugin in plugins) and loop.time() < deadline:
            await asyncio.sleep(_LOOK_SECONDS)

    async def _end(self, tasks: Sequence[asyncio.Task[Any]]) -> None:
        for task in tasks:
            task.cancel()
        # Whatever else keeps a task from ending is not waited for: it is cancelled once more, and alone, when the
        # loop is closed.
        ended = asyncio.gather(*tasks, return_exceptions=True)
        _, left = await asyncio.wait([ended], timeout=_STOP_SECONDS)
        if left:
            log.warning("not everything ended in time", extra={"node": self._node_name})

    def stop(self) -> None:
        """From any thread, or a signal handler of the loop."""
        self._stopped = True
        self._stopping.wake()

    def divided(self) -> str:
        """How this node's cards are cut (MIG, MPS; ""), as its label says; waits for the Node at first."""
        node = self._reporter.await_node(_NODE_SECONDS) or {}
        mode = ((node.get("metadata") or {}).get("labels") or {}).get(LABEL)
        return mode if mode in (MIG, MPS) else ""

    @property
    def node(self) -> str:
        return self._node_name

    @property
    def watch(self) -> Reflector:
        """Of the node's pods."""
        return self._reflector

    def seen(self) -> Seen:
        """The cards and who holds them, as far as that is decided."""
        if not self._serves:
            return Seen((), (), ())  # the agent that serves tells of them
        gpus, foreign = self._gpus(), self._whole.holdings()
        devices, theirs = self._slices.devices(gpus), {held.uid for held in foreign}
        pods = (known for known in self._pods.all() if known.shares is not None and not known.pod.ended)
        return Seen(gpus, devices, (*(holding(p, devices) for p in pods if p.pod.uid not in theirs), *foreign))

    def unhealthy(self) -> str:
        """Why the process should be restarted; "" where it should not."""
        if self._pulse.silence() > HANGING_SECONDS:
            return f"the event loop has not run for {self._pulse.silence():.0f} s"
        if self._slices.stalled:
            return "cutting the cards hangs"
        return "reading the cards hangs" if self._cards.stalled else ""

    def not_ready(self) -> str:
        """What is missing until pods can start here; "" where nothing."""
        if self._pulse.silence() > SILENT_SECONDS:
            return f"the event loop has not run for {self._pulse.silence():.0f} s"
        if self._cards.cards is None:
            return f"cards: {self._cards.problem}"
        if not self._reflector.synced:
            return "the pods of this node are not known yet"
        if self._standing_by is not None:
            # Containers start, and go on starting once the other agent ends. A rolling update ends a new one's
            # predecessor once the new one is ready; and at once a replaced one that is not ready, which has to stay
            # until the new one is well.
            return "" if self._must_wait_for_end or self._resigned else self._standing_by
        wanted = self._wanted_registrations()
        states = [r.state or "the kubelet has not asked for the devices" for r in wanted if not r.registered]
        if self._taking_over:
            states.append("taking over from the agent before")
        if not self._reporter.reported:
            states.append(self._reporter.problem)
        return "; ".join(states)

    def _wanted_registrations(self) -> list[Registration]:
        """Those that this agent is to have. What is left to others does not count once it is known whose it is."""
        known = self._whole.server and self._reporter.capacity(WHOLE_CARDS) is not None
        return [r for r in (*self._registrations, *self._slices.registrations) if not (known and r.left())]

    def unreported(self) -> str | None:
        """Return what the API server has not been told of this node; None where it knows everything."""
        return self._reporter.problem or None

    def _begin(self, resource: str) -> Plugin:
        """The plugin of a resource that is not served yet."""
        self._allocations[resource] = allocations = Allocations(resource, self._node)
        self._keepers.append(allocations)
        if self._all_known:
            allocations.resume()
        self._plugins[resource] = Plugin(resource, allocations)
        return self._plugins[resource]

    async def _until_stopped(self) -> None:
        while not self._stopped:
            await self._stopping.wait()

    async def _serve(self) -> None:
        """Offer ids once the cards are known: with none the kubelet would fail the pods that run here."""
        while self._cards.cards is None:
            await self._cards_changed.wait()
        cards = self._whole_gpus()
        complete = self._offer(cards)
        async with asyncio.TaskGroup() as group:
            for registration in self._registrations:
                group.create_task(registration.run())
            group.create_task(self._follow_cards(cards, complete=complete))

    async def _follow_cards(self, offered: tuple[Card, ...], *, complete: bool) -> None:
        while True:
            cards = self._whole_gpus()
            if cards == offered and await self._cards_changed.wait(None if complete else _RETRY_SECONDS):
                continue
            complete, offered = self._offer(cards), cards

    def _offer(self, cards: Sequence[Card]) -> bool:
        """Hand the ids of these cards to the plugins. False: of unhealthy ones it is not known which pods hold them."""
        complete, shares = True, budget(cards, self._settings, MAX_IDS - self._slices.ids)
        for resource in as_ids(cards, self._settings):
            try:
                held, taken = self._held_ids(resource.name, cards)
            except RetryLater as error:
                log.warning("which ids are held is not known: %s", error)
                held, taken, complete = {}, set(), False
            plugin = self._plugins[resource.name]
            total, limit = sum(amount for _, amount in resource.amounts), shares[resource.name]
            if total > limit:
                self._warn_node(
                    f"{total} units of {resource.name}, of which {limit} are offered: a node has at most {MAX_IDS} ids "
                    "of all resources together; disable the dialects that are not used"
                )
            before = [i for i, healthy in plugin.devices.items() if not healthy]
            plugin.offer(device_ids(resource, cards, limit, held, taken, before))
        return complete

    def _held_ids(self, resource: str, cards: Sequence[Card]) -> tuple[dict[int, list[str]], set[str]]:
        """The ids that the pods of each unhealthy card hold, and all that pods hold. Raises RetryLater."""
        unhealthy = [card for card in cards if not card.healthy]
        if unhealthy and not self._reflector.synced:
            raise RetryLater("the pods of this node are not known yet")
        rows = read_checkpoint(self._node.checkpoint, resource)
        held: dict[int, list[str]] = {}
        for given in rows:
            known = self._pods.by_uid(given.uid)
            for card in unhealthy:
                shares = (known.shares if known else None) or ()
                if any(share.container == given.container and share.is_on(card) for share in shares):
                    held.setdefault(card.index, []).extend(sorted(given.ids))
        return held, {i for given in rows for i in given.ids}

    async def _follow_pods(self) -> None:
        """Nothing starts before all pods and cards are known, and what was of gone pods goes."""
        while not self._reflector.synced:
            await self._pods_changed.wait(1.0)
        self._limits.wake()
        async with asyncio.TaskGroup() as group:
            group.create_task(keep_clean(self._pods, self._keepers, self._pods_changed))
            group.create_task(self._mps.run())
            while self._cards.cards is None:
                await self._pods_changed.wait()
            self._all_known = True
            for allocations in self._allocations.values():
                allocations.resume()
            while True:
                # Before this agent was there too.
                for known in self._pods.all():
                    if known.ran:
                        self._mark_given(known)
                self._slices.wake()
                await self._pods_changed.wait()

    async def _follow_whole_cards(self) -> None:
        """Who serves them, and what another plugin gave out: whenever pods or the kubelet's checkpoint change."""
        warned = ""
        while True:
            if await self._whole.look(synced=self._reflector.synced):
                self._reporter.update()
                self._pods_changed.wake()
                if self._whole.why not in (warned, "") and self._settings.deviceplugin.whole_cards == OURS:
                    self._warn_node(f"{self._whole.left()}, while deviceplugin.wholeCards is {OURS}")
                warned = self._whole.why
            if WHOLE_CARDS in self._plugins:
                plugin, silent = self._plugins[WHOLE_CARDS], bool(self._whole.left())
                if plugin.silent and not silent:
                    plugin.end_streams()  # the other plugin's registration took the place of this one's
                plugin.silent = silent
            await self._pods_changed.wait(CHECK_SECONDS)

    def _told_of_whole_cards(self) -> tuple[str, str | None]:
        """For the reporter, on its thread."""
        given = self._whole.given
        return self._whole.server, None if given is None else write_given(given) if given else ""

    def _mark_given(self, known: GpuPod) -> None:
        """gpushare: the record says once the node has given the card out."""
        if annotations := gpushare.assigned(known.pod):
            self._pods.amend(known, annotations)
            self._records.write(known, annotations)

    def _held(self, resource: str) -> int:
        return sum(known.held.get(resource, 0) for known in self._pods.all() if not known.pod.ended)

    def _take_cards(self, cards: tuple[Card, ...]) -> None:
        self._reporter.update(cards, self._source.driver)
        self._slices.wake()
        self._limits.wake()
        self._cards_changed.wake()
        self._pods_changed.wake()

    def _take_pods(self) -> None:
        self._reporter.update()
        self._limits.wake()
        self._pods_changed.wake()

    def _cut_anew(self) -> None:
        """Which cards are whole, or which slices there are, has changed."""
        self._reporter.update()
        self._cards_changed.wake()
        self._pods_changed.wake()

    def _gpus(self) -> tuple[Card, ...]:
        """Those too that are cut into slices."""
        return self._cards.cards or ()

    def _whole_gpus(self) -> tuple[Card, ...]:
        whole = self._slices.whole(self._gpus())
        return self._gpus() if whole is None else whole

    def _warn_node(self, problem: str, reason: str = "MgpuCards") -> None:
        log.warning("%s", problem, extra={"node": self._node_name})
        self._recorder.warn(node_reference(self._node_name), reason, problem)

    def _warn_pod(self, known: GpuPod, why: str, reason: str = "MgpuStartRefused") -> None:
        reference = pod_reference(known.pod.namespace, known.pod.name, known.pod.uid)
        self._recorder.warn(reference, reason, why)

    def _warn_mps(self, problem: str) -> None:
        self._warn_node(problem, "MgpuMps")

    def _warn_unenforced(self, known: GpuPod, why: str) -> None:
        self._warn_pod(known, why, "MgpuNotEnforced")

    def _start(self, *parts: _Part) -> None:
        for part in parts:
            part.start()
            self._started.append(part)

    def _stop_writers(self) -> None:
        """Write nothing more: neither to the API server nor to cards and files."""
        for part in (self._reporter, self._records, self._slices, self._limits):
            if part in self._started:
                self._started.remove(part)
                part.stop()

    def _close(self) -> None:
        for wakeup in (self._cards_changed, self._pods_changed, self._stopping):
            wakeup.unbind()
        for part in self._started:
            part.stop()
        if self._reporter not in self._started:  # it has watched all the same
            self._reporter.stop()
