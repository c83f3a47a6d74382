"""The node agent: cards, pods, the kubelet and the API server, put together."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from deviceplugin.accounts import Grants, handed, holding
from deviceplugin.allocation import Allocations, Node
from deviceplugin.alone import alone
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
from deviceplugin.toolkit import read_toolkit
from deviceplugin.unrecorded import Unrecorded
from deviceplugin.upkeep import Keeper, keep_clean
from deviceplugin.wakeup import Wakeup
from deviceplugin.wholecards import OURS, WholeCards
from mgpu.dialects import gpushare
from mgpu.kube import Api
from mgpu.kube.events import Recorder, node_reference, pod_reference
from mgpu.kube.reflector import Reflector
from mgpu.model.cards import Card
from mgpu.model.errors import RetryLater
from mgpu.model.given import write_given
from mgpu.model.partitioning import LABEL
from mgpu.model.slices import MIG, MPS
from mgpu.settings import Settings

log = logging.getLogger(__name__)

_RETRY_SECONDS = 2.0
_STOP_SECONDS = _NODE_SECONDS = 5.0


class Agent:
    """`run` until `stop`. settings.deviceplugin must name the node."""

    def __init__(self, settings: Settings, source: CardSource, api: Api, driver: MigDriver) -> None:
        own = settings.deviceplugin
        self._settings, self._node_name = settings, own.node
        self._folder = Path(own.kubelet_dir) / "device-plugins"
        self._recorder = Recorder(api, "mgpu-deviceplugin", own.node)
        self._cards_changed, self._pods_changed, self._stopping = Wakeup(), Wakeup(), Wakeup()
        self._stopped = False
        self._pulse = Pulse()
        self._source = source
        self._cards = CardWatch(source, self._take_cards, self._warn_node)
        self._pods = NodePods(settings, self._take_pods)
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
            delivery=files if cdi else Exchange(self._pods, self._gpus, self._settings, self._records.write),
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

    async def run(self) -> None:
        """Serve until `stop`; then streams are ended and sockets removed before it returns.

        Raises BadObject where another agent serves this node.
        """
        with alone(self._folder):
            await self._run()

    async def _run(self) -> None:
        for wakeup in (self._cards_changed, self._pods_changed, self._stopping):
            wakeup.bind()
        for part in (self._reflector, self._reporter, self._cards, self._records, self._slices, self._limits):
            part.start()
        log.info("started", extra={"node": self._node_name})
        if self._settings.deviceplugin.enforce == "mps" and self._node.mps is None:
            self._warn_mps("deviceplugin.enforce is mps, and nothing is enforced: the runtime has no CDI")
        works = [self._serve(), self._follow_pods(), self._follow_whole_cards(), self._slices.run()]
        works.append(self._pulse.run())
        works.append(self._runtime.follow(self._reporter.update))
        tasks = [asyncio.create_task(work) for work in works]
        ending = asyncio.create_task(self._until_stopped())
        try:
            done, _ = await asyncio.wait([*tasks, ending], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {ending}:
                task.result()
        finally:
            for task in (*tasks, ending):
                task.cancel()
            # Whatever else keeps a task from ending is not waited for: it is cancelled once more, and alone, when the
            # loop is closed.
            ended = asyncio.gather(*tasks, ending, return_exceptions=True)
            _, left = await asyncio.wait([ended], timeout=_STOP_SECONDS)
            if left:
                log.warning("not everything ended in time", extra={"node": self._node_name})
            self._close()
            await self._owners.close()
            await self._runtime.close()
            log.info("stopped", extra={"node": self._node_name})

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
        # Once it is known whose they are, what is left to others is not waited for.
        known = self._whole.server and self._reporter.capacity(WHOLE_CARDS) is not None
        wanted = [r for r in (*self._registrations, *self._slices.registrations) if not (known and r.left())]
        states = [r.state or "the kubelet has not asked for the devices" for r in wanted if not r.registered]
        if not self._reporter.reported:
            states.append(self._reporter.problem)
        return "; ".join(states)

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

    def _close(self) -> None:
        for wakeup in (self._cards_changed, self._pods_changed, self._stopping):
            wakeup.unbind()
        for part in (self._reflector, self._reporter, self._cards, self._records, self._slices, self._limits):
            part.stop()
