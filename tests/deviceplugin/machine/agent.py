"""An agent without gRPC, threads or time: its allocators, pod cache, CDI files and plugins."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from deviceplugin.allocation.allocator import AllocationContext, Allocator
from deviceplugin.delivery.cdi import CdiFiles
from deviceplugin.event_loop import Wakeup
from deviceplugin.inventory.offers import id_resources
from deviceplugin.kubelet.device_ids import device_ids
from deviceplugin.kubelet.pod_resources import OwnersByResource, PodResources, owners_by_resource
from deviceplugin.plugin.plugin_server import DeviceList, Plugin
from deviceplugin.pods.capacity_check import Grants, read_delivered
from deviceplugin.pods.node_pods import NodePods
from deviceplugin.pods.remnants import PodStore, remove_gone_pods
from mgpu.model.cards import Card
from mgpu.model.errors import RetryLater
from mgpu.settings import load_settings
from playground.kubelet.device_manager import PluginError
from proto import deviceplugin_pb2 as api
from proto import podresources_pb2
from tests.deviceplugin.fake_node import NoHolders, NoRemnants
from tests.deviceplugin.machine.cluster import Raw
from tests.deviceplugin.machine.loop import VirtualLoop

WAIT_SECONDS = 1.0
SETTINGS = load_settings()
RESOURCES = tuple(resource.name for resource in id_resources((), SETTINGS))


class Listing(PodResources):
    """PodResources of a kubelet in this process. It refuses the next `busy` queries."""

    def __init__(self, query: Callable[[], podresources_pb2.ListPodResourcesResponse]) -> None:
        super().__init__(Path())
        self._ask, self.busy = query, 0

    async def _query(self) -> OwnersByResource:
        if self.busy:
            self.busy -= 1
            raise RetryLater("PodResources: RESOURCE_EXHAUSTED: rejected by rate limit")
        return owners_by_resource(self._ask())


class Context:
    async def abort(self, code: Any, details: str) -> None:
        raise PluginError(f"rpc error: code = {code.name} desc = {details}")


class Agent(NoHolders):
    """An agent from its start to its end. It reads pods late: `sync` lists them, `see` delivers events of the watch."""

    def __init__(
        self,
        loop: VirtualLoop,
        cards: Callable[[], Sequence[Card]],
        listing: Listing,
        cdi: CdiFiles,
        checkpoint: Path,
    ) -> None:
        self.alive = True
        self.synced = False
        self.queue: list[tuple[str, Raw]] = []
        self.listing = listing
        self._cdi = cdi
        self._cards = cards
        self._stored: dict[str, Raw] = {}
        self._changed = Wakeup()
        self._pods = NodePods(SETTINGS, self._changed.wake)
        self._grants = Grants(read_delivered(cdi.environments()))
        context = AllocationContext(
            pods=self._pods,
            devices=self,
            owners=listing,
            checkpoint=checkpoint,
            delivery=cdi,
            grants=self._grants,
            changed=self._changed,
            listener=self,
            unrecorded=self,
        )
        lists = {name: DeviceList() for name in RESOURCES}
        self._allocators = {name: Allocator(name, context, lists[name].resend, WAIT_SECONDS) for name in RESOURCES}
        self.plugins = {name: Plugin(name, self._allocators[name], lists[name]) for name in RESOURCES}
        self._loop, self._tasks = loop, [loop.create_task(self._clean_up())]
        loop.let_pass(0)

    def gpus(self) -> Sequence[Card]:
        return self._cards()

    def devices(self) -> Sequence[Card]:
        return self._cards()

    def kill(self) -> None:
        self.alive = False
        for task in self._tasks:
            task.cancel()

    def serve(self, resource: str, update: Callable[[dict[str, bool]], None]) -> None:
        """Open a stream of device lists."""
        self._tasks.append(self._loop.create_task(self._stream(self.plugins[resource], update)))
        self._loop.let_pass(0)

    async def _stream(self, plugin: Plugin, update: Callable[[dict[str, bool]], None]) -> None:
        plugin.open()
        async for response in plugin.ListAndWatch(api.Empty(), None):
            update({device.ID: device.health == "Healthy" for device in response.devices})

    def offer(self, name: str, held: dict[int, list[str]], taken: set[str]) -> None:
        resource = next(r for r in id_resources(self._cards(), SETTINGS) if r.name == name)
        before = [i for i, healthy in self.plugins[name].device_list.ids.items() if not healthy]
        self.plugins[name].device_list.offer(device_ids(resource, self._cards(), held=held, taken=taken, before=before))
        self._loop.let_pass(0)

    def sync(self, pods: Sequence[Raw]) -> None:
        """Deliver a list of pods as the Reflector does."""
        self.queue.clear()
        present = {raw["metadata"]["uid"] for raw in pods}
        for raw in pods:
            self._take("put", raw)
        for uid in [uid for uid in self._stored if uid not in present]:
            self._take("gone", self._stored[uid])
        self.synced = True
        self._changed.wake()

    def see(self, count: int = 1 << 30) -> None:
        for _ in range(min(count, len(self.queue))):
            self._take(*self.queue.pop(0))

    def _take(self, what: str, raw: Raw) -> None:
        if what == "put":
            self._stored[raw["metadata"]["uid"]] = raw
            self._pods.take(raw)
        else:
            self._stored.pop(raw["metadata"]["uid"], None)
            self._pods.drop(raw)

    async def _clean_up(self) -> None:
        """Remove gone pods, as `deviceplugin.reconciler` does."""
        self._changed.bind()
        while not self.synced:
            await self._changed.wait()
        for allocator in self._allocators.values():
            allocator.resume()
        stores: list[PodStore] = [self._cdi, self._grants, *self._allocators.values()]
        await remove_gone_pods(self._pods, NoRemnants(), stores, self._changed)
