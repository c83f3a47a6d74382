"""One node with everything on it, in one thread: what can happen to it, and what must hold whatever happens."""

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from deviceplugin.delivery.cdi import CdiFiles
from deviceplugin.pods.gpu_pod import read_gpu_pod
from mgpu.model.cards import WHOLE_RATIO, Card
from mgpu.model.ledger import Holding, Share
from playground.container_runtime import Runtime
from playground.kubelet.device_checkpoint import FILE
from playground.kubelet.device_manager import DeviceManager, PluginError
from proto import deviceplugin_pb2 as api
from tests.builders import CORE, cards
from tests.deviceplugin.machine.agent import RESOURCES, SETTINGS, Agent, Context, Listing
from tests.deviceplugin.machine.cluster import Cluster, Raw
from tests.deviceplugin.machine.kubelet import Killed, Kubelet
from tests.deviceplugin.machine.loop import VirtualLoop
from tests.deviceplugin.records import recorded

CARDS = cards(2)
_STEP = 0.3
_ENDED = ("Succeeded", "Failed")
_MEANWHILE = ("die", "sync", "event", "decide", "delete")


class World:
    """A node with API server, kubelet and agent. `fates` has the events inside the next calls of the agent."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.loop, self.rng = folder, VirtualLoop(), Lowest(seed)
        self.cdi_folder = folder / "cdi"
        self.cdi_folder.mkdir()
        self.cluster, self.runtime = Cluster(), Runtime(self.cdi_folder)
        self.cards: tuple[Card, ...] = CARDS
        self.shares: dict[str, tuple[Share, ...]] = {}
        self.planned: dict[str, dict[str, str]] = {}
        self.forged: set[str] = set()
        self.fates: list[str] = []
        self.handled: list[str] = []
        self.kubelet = Kubelet(folder, self.cluster, self.runtime, self.rng)
        self.cluster.watchers.append(self._queue)
        self.agent = self._new_agent()
        self._checked = 0
        self.registered: set[str] = set()
        self.late = self.stale = False
        self.before_answer = b""

    def close(self) -> None:
        self.kill_agent()
        self.loop.let_pass(0)
        self.loop.close()

    # Pods

    def create(self, raw: Raw, record: Mapping[str, int], *, late: bool = False, forged: bool = False) -> None:
        """Bind a pod to the node, unless it does not fit.

        Args:
            record: container → card.
            late: write the record later.
            forged: bind the pod even if it does not fit.
        """
        uid, decided = raw["metadata"]["uid"], recorded(raw, record, CARDS)
        known = read_gpu_pod(decided, SETTINGS)
        assert known is not None
        assert known.shares
        if not forged and self.over([*self._held(), known.shares]):
            return
        self.shares[uid] = known.shares
        if forged:
            self.forged.add(uid)
        if late:
            self.planned[uid] = decided["metadata"]["annotations"]
        self.cluster.put(raw if late else decided)

    def decide(self, count: int = 1) -> None:
        for uid in list(self.planned)[:count]:
            annotations, raw = self.planned.pop(uid), self.cluster.last[uid]
            name = raw["metadata"]["name"]
            if self.cluster.pods.get(name, {}).get("metadata", {}).get("uid") == uid:
                self.cluster.edit(name, annotations=annotations)

    def delete(self, name: str, *, force: bool) -> None:
        if force:
            self.cluster.remove(name)
        else:
            self.cluster.edit(name, deletionTimestamp="now")

    def over(self, held: Sequence[Sequence[Share]]) -> list[int]:
        """Return the cards whose capacity these pods exceed."""
        found = []
        for card in CARDS:
            uses = [Holding("", "", "", "", "", tuple(shares)).uses(card) for shares in held]
            core, memory, _, ratio = map(sum, zip(*uses, strict=True)) if uses else (0, 0, 0, 0)
            if core > card.core or memory > card.memory or ratio > WHOLE_RATIO:
                found.append(card.index)
        return found

    def live(self) -> list[Raw]:
        return [raw for raw in self.cluster.pods.values() if raw["status"]["phase"] not in _ENDED]

    def _held(self) -> Iterator[Sequence[Share]]:
        return (self.shares[raw["metadata"]["uid"]] for raw in self.live())

    # What happens

    @contextmanager
    def fated(self, fates: Sequence[str]) -> Iterator[None]:
        self.fates, self.late = list(fates), False
        try:
            yield
        except Killed:
            self.restart_kubelet()
        self.fates = []

    def admit(self, position: int) -> None:
        calm = (
            len(self.registered) == len(RESOURCES)
            and not self.fates
            and not self.forged
            and all(card.healthy for card in self.cards)
        )
        failed = len(self.kubelet.failed)
        self.kubelet.admit(position)
        assert not calm or len(self.kubelet.failed) == failed, self.kubelet.failed

    def kill_agent(self) -> None:
        if self.agent.alive:
            self.agent.kill()
            for resource in sorted(self.registered):
                self.kubelet.devices.disconnected(resource)
            self.registered = set()

    def start_agent(self) -> None:
        self.kill_agent()
        self.agent = self._new_agent()

    def sync_agent(self) -> None:
        if self.agent.alive:
            self.agent.sync(list(self.cluster.pods.values()))

    def register(self, resources: Sequence[str] = RESOURCES) -> None:
        for resource in resources if self.agent.alive else ():
            self.registered.add(resource)
            self.kubelet.devices.connected(resource, Endpoint(self, self.agent, resource))
            self._offer(resource)
            self.agent.serve(resource, self._hears(self.agent, self.kubelet.devices, resource))

    def restart_kubelet(self) -> None:
        if self.stale:
            devices = self.kubelet.devices  # writes the checkpoint again
            known = devices.all_ids().get(CORE, ())
            devices.update(CORE, {i: devices.health(CORE, i) == "Healthy" for i in known})
        self.stale = False
        self.kubelet.start()
        self.registered = set()

    def reboot(self, *, keep_checkpoint: bool) -> None:
        """Reboot the node. /var/run is lost, and on some nodes the kubelet's folder too."""
        self.kill_agent()
        self.runtime.reboot()
        for file in [*([] if keep_checkpoint else [self.folder / FILE]), *self.cdi_folder.iterdir()]:
            file.unlink(missing_ok=True)
        self.restart_kubelet()

    def set_health(self, index: int, *, healthy: bool) -> None:
        self.cards = tuple(replace(c, healthy=healthy) if c.index == index else c for c in self.cards)
        for resource in sorted(self.registered):
            self._offer(resource)

    def fate(self, *, writing: bool = False) -> None:
        """Let the next event happen inside a call, or with `writing` while the agent writes a CDI file."""
        if writing and self.fates and self.fates[0] not in _MEANWHILE:
            return
        what = self.fates.pop(0) if self.fates else ""
        acts: dict[str, Callable[[], None]] = {
            "die": self.kill_agent,
            "restart": self.start_agent,
            "sync": self.sync_agent,
            "event": lambda: self.agent.see(1),
            "decide": self.decide,
            "another": self._another,
            "admit": lambda: self.kubelet.admit(0),
            "delete": self._delete_handled,
            "busy": self._busy,
            "late": self._be_late,
            "stale": self._be_stale,
        }
        if what == "killed":
            raise Killed
        if what in acts:
            acts[what]()

    def _another(self) -> None:
        if working := self.kubelet.working():
            self.work(self.rng.choice(working))

    def _be_late(self) -> None:
        self.late = True

    def _be_stale(self) -> None:
        """Restore the checkpoint from before the last answer, as if one writer of the kubelet had overtaken another."""
        if self.before_answer and self.registered:
            (self.folder / FILE).write_bytes(self.before_answer)
            self.stale = True

    def _busy(self) -> None:
        self.agent.listing.busy = 2

    def _delete_handled(self) -> None:
        name = self.cluster.last[self.handled[-1]]["metadata"]["name"] if self.handled else ""
        if name in self.cluster.pods:
            self.delete(name, force=True)

    def work(self, uid: str) -> None:
        self.handled.append(uid)
        try:
            self.kubelet.work(uid)
        finally:
            self.handled.pop()

    def _new_agent(self) -> Agent:
        listing = Listing(lambda: self.kubelet.listing())
        cdi = Cdi(self.cdi_folder, self._while_writing)
        return Agent(self.loop, lambda: self.cards, listing, cdi, self.folder / FILE)

    def _while_writing(self) -> None:
        self.fate(writing=True)
        if not self.agent.alive:
            raise asyncio.CancelledError

    def _hears(self, agent: Agent, devices: DeviceManager, resource: str) -> Callable[[dict[str, bool]], None]:
        def update(ids: dict[str, bool]) -> None:
            if agent.alive and devices is self.kubelet.devices:
                devices.update(resource, ids)

        return update

    def _queue(self, what: str, raw: Raw) -> None:
        if self.agent.alive and self.agent.synced:
            self.agent.queue.append((what, raw))

    def _offer(self, resource: str) -> None:
        held: dict[int, list[str]] = {}
        taken: set[str] = set()
        for entry in self.kubelet.devices.entries():
            if entry.resource == resource:
                taken.update(entry.ids)
                for index in self._cards_of(entry.uid, entry.container):
                    held.setdefault(index, []).extend(entry.ids)
        self.agent.offer(resource, held, taken)

    def _cards_of(self, uid: str, container: str) -> list[int]:
        own = [share for share in self.shares.get(uid, ()) if share.container == container]
        return [card.index for card in CARDS if any(share.is_on(card) for share in own)]

    # What must hold

    def check(self) -> None:
        self._check_exact()
        running = {c.uid for c in self.runtime.containers() if c.running and "NVIDIA_VISIBLE_DEVICES" in c.env}
        started = [self.shares[uid] for raw in self.live() if (uid := raw["metadata"]["uid"]) in running]
        assert not self.over(started), "a card is over its size"

    def _check_exact(self) -> None:
        """Check that each container that has started since the last check has exactly the cards of its record."""
        containers = self.runtime.containers()
        for container in containers[self._checked :]:
            own = self._cards_of(container.uid, container.name)
            expected = ",".join(c.uuid for c in CARDS if c.index in own)
            seen = container.env.get("NVIDIA_VISIBLE_DEVICES", "")
            sick = [c.index for c in self.cards if not c.healthy and c.index in own]
            assert not (sick and len(self.registered) == len(RESOURCES)), (
                f"{container.pod}/{container.name} started on sick cards {sick}"
            )
            assert seen == expected, f"{container.pod}/{container.name} sees {seen or 'none'}, its record: {expected}"
        self._checked = len(containers)

    def recover(self) -> None:
        """Let everything happen that happens by itself after a fault."""
        if not self.agent.alive:
            self.start_agent()
        if not self.agent.synced:
            self.sync_agent()
        self.agent.see()
        if len(self.registered) < len(RESOURCES):
            self.register()

    def settle(self) -> None:
        """End all faults, and let time pass."""
        self.set_health(0, healthy=True)
        self.set_health(1, healthy=True)
        self.recover()
        self.decide(len(self.planned))
        for _ in range(4):
            while self.kubelet.waiting:
                self.admit(0)
            for uid in self.kubelet.working():
                self.work(uid)
            self.agent.see()
            self.loop.let_pass(_STEP)
        self.check()

    def check_settled(self) -> None:
        """Check that all pods run that can run, and that all CDI files are those of existing pods."""
        crowded = self.over(list(self._held()))
        for raw in self.live():
            uid = raw["metadata"]["uid"]
            if not any(share.is_on(CARDS[index]) for share in self.shares[uid] for index in crowded):
                why = [row.get("state") for row in raw["status"].get("containerStatuses", ())]
                assert raw["status"]["phase"] == "Running", (raw["metadata"]["name"], why)
        there = {raw["metadata"]["uid"] for raw in self.cluster.pods.values()}
        left = {file.name.split("_")[1] for file in self.cdi_folder.iterdir()} - there
        assert not left, f"CDI files of {left} are left"


class Lowest(random.Random):
    """A generator that mostly samples the first values, so that ids of deleted pods are used again at once."""

    def sample(self, population: Sequence[Any], k: int, **_: Any) -> list[Any]:
        return super().sample(population, k) if self.random() < 0.2 else list(population[:k])


class Cdi(CdiFiles):
    """CDI files with events while a file is written, as on other threads."""

    def __init__(self, folder: Path, meanwhile: Callable[[], None]) -> None:
        super().__init__(folder)
        self._meanwhile = meanwhile

    def write(self, *arguments: Any, **more: Any) -> None:
        self._meanwhile()
        super().write(*arguments, **more)


class Endpoint:
    """The kubelet's client of one agent. Events happen inside its calls (`World.fate`)."""

    pre_start_required = True

    def __init__(self, world: World, agent: Agent, resource: str) -> None:
        self._world, self._agent, self._resource = world, agent, resource

    def allocate(self, ids: Sequence[str]) -> api.ContainerAllocateResponse:
        file = self._world.folder / FILE
        self._world.before_answer = file.read_bytes() if file.exists() else b""
        asked = api.AllocateRequest(container_requests=[api.ContainerAllocateRequest(devices_ids=ids)])
        response = self._call(self._agent.plugins[self._resource].Allocate(asked, Context()))
        answer: api.ContainerAllocateResponse = response.container_responses[0]
        return answer

    def pre_start(self, ids: Sequence[str]) -> None:
        asked = api.PreStartContainerRequest(devices_ids=ids)
        self._call(self._agent.plugins[self._resource].PreStartContainer(asked, Context()))

    def _call(self, work: Any) -> Any:
        loop = self._world.loop
        task = loop.create_task(work)
        try:
            self._world.fate()
            while self._agent.alive and not task.done():
                loop.let_pass(0)
                self._world.fate()
                if not task.done():
                    if not self._world.late:
                        self._agent.see()
                    loop.let_pass(_STEP)
            self._world.fate()
        finally:
            task.cancel()
            loop.let_pass(0)
        if not self._agent.alive:
            raise PluginError("rpc error: code = Unavailable desc = error reading from server: EOF")
        return task.result()
