"""A node without processes: pods and cards in memory, allocators, and the kubelet's checkpoint and PodResources."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from deviceplugin.allocation.allocator import AllocationContext, Allocator, Answer
from deviceplugin.allocation.allocator_without_cdi import AllocatorWithoutCdi
from deviceplugin.allocation.wait_budget import WaitBudget
from deviceplugin.delivery.cdi import CdiFiles
from deviceplugin.delivery.exchange import RecordExchange
from deviceplugin.delivery.visibility import Exposure
from deviceplugin.event_loop import Wakeup
from deviceplugin.inventory.offers import id_resources
from deviceplugin.isolation.isolation import Isolation
from deviceplugin.kubelet.pod_resources import Owner
from deviceplugin.pods.capacity_check import Grants, read_delivered
from deviceplugin.pods.gpu_pod import GpuPod
from deviceplugin.pods.node_pods import NodePods
from mgpu.dialects.record_verification import UNSEALED, RecordVerifier
from mgpu.model.cards import Card
from mgpu.model.errors import RetryLater
from mgpu.model.ledger import Holding
from mgpu.settings import load_settings
from playground.container_runtime import resolve
from playground.kubelet import device_checkpoint
from proto import deviceplugin_pb2 as api
from tests.builders import CORE, cards

SLICES = ("nvidia.com/mig-1g.10gb", "nvidia.com/mig-2g.20gb", "nvidia.com/gpu-4gb")
T = TypeVar("T")


@dataclass
class FixedGpus:
    """The GPUs of a node (`deviceplugin.cards.NodeGpus`)."""

    gpus: tuple[Card, ...]


@dataclass
class FixedCards:
    """The cards of a node as `CardWatch` has them; None if they have not been read."""

    cards: tuple[Card, ...] | None


class NoRemnants:
    """A node without deleted pods that still run."""

    removed = 0

    def uids(self) -> tuple[str, ...]:
        return ()

    def holdings(self) -> tuple[Holding, ...]:
        return ()

    def is_remnant(self, uid: str) -> bool:  # noqa: ARG002
        return False


class NoHolders:
    """The other holders of a node's cards, and a listener that ignores starts (`AllocationContext`)."""

    def holdings(self) -> tuple[Holding, ...]:
        return ()

    def is_undetermined(self) -> bool:
        return False

    def start_refused(self, gpu_pod: GpuPod, reason: str) -> None: ...

    def start_granted(self, gpu_pod: GpuPod) -> None: ...


class FakeNode(NoHolders):
    """A node whose agent can restart: the checkpoint and the CDI folder stay."""

    def __init__(
        self,
        folder: Path,
        *,
        cdi: bool = True,
        wait_seconds: float = 60.0,
        exposure: Exposure | None = None,
        records: RecordVerifier = UNSEALED,
    ) -> None:
        self._records = records
        self.folder = folder
        self._cdi = cdi
        self._wait = wait_seconds
        self._exposure = exposure or Exposure()
        self.cards: tuple[Card, ...] = cards(2)
        self.all_gpus: tuple[Card, ...] = ()
        self.entries: list[device_checkpoint.Entry] = []
        self.owned: list[Owner] = []
        self.silent = 0
        self.resent = 0
        self.budget = WaitBudget(1e6, wait_seconds, lambda: 0.0)
        self.on_resend: Callable[[], None] = lambda: None
        self.refusals: list[tuple[str, str]] = []
        self.granted: list[str] = []
        self.foreign: tuple[Holding, ...] = ()
        self.written: list[tuple[str, dict[str, str]]] = []
        self.restart()

    def restart(self, *pods: dict[str, Any], cdi: bool | None = None, synced: bool = True) -> None:
        self._cdi = self._cdi if cdi is None else cdi
        self.changed = Wakeup()
        self.pods = NodePods(load_settings(), self.changed.wake, self._records)
        for raw in pods:
            self.pods.take(raw)
        files = CdiFiles(self.folder / "cdi")
        sealed = self._records.keys is not None
        exchange = RecordExchange(self.pods, lambda: self.cards, load_settings(), self._write, sealed=sealed)
        context = AllocationContext(
            pods=self.pods,
            devices=self,
            owners=self,
            checkpoint=self.folder / "checkpoint",
            delivery=files if self._cdi else exchange,
            grants=Grants(read_delivered(files.environments()) if self._cdi else {}),
            changed=self.changed,
            listener=self,
            unrecorded=self,
            isolation=self.make_isolation(files),
            exposure=self._exposure,
            wait_budget=self.budget,
        )
        names = [*(resource.name for resource in id_resources((), load_settings())), *SLICES]
        self.allocators = {name: self._allocator(name, context) for name in names}
        self.allocator = self.allocators[CORE]
        if synced:
            for allocator in self.allocators.values():
                allocator.resume()

    def make_isolation(self, files: CdiFiles) -> Isolation | None:  # noqa: ARG002
        return None

    def _write(self, gpu_pod: GpuPod, annotations: Any) -> None:
        self.written.append((gpu_pod.pod.name, dict(annotations)))

    def _allocator(self, resource: str, context: AllocationContext) -> Allocator:
        if self._cdi:
            return Allocator(resource, context, self._resend, self._wait)
        return AllocatorWithoutCdi(resource, context, self._resend, self._wait)

    def gpus(self) -> tuple[Card, ...]:
        return self.all_gpus or self.cards

    def devices(self) -> tuple[Card, ...]:
        return self.cards

    def holdings(self) -> tuple[Holding, ...]:
        return self.foreign

    def start_refused(self, gpu_pod: GpuPod, reason: str) -> None:
        self.refusals.append((gpu_pod.pod.name, reason))

    def start_granted(self, gpu_pod: GpuPod) -> None:
        self.granted.append(gpu_pod.pod.name)

    def _resend(self) -> None:
        self.resent += 1
        self.on_resend()

    async def owners(self, resource: str) -> list[Owner]:
        assert resource in self.allocators
        if self.silent:
            self.silent -= 1
            raise RetryLater("PodResources: RESOURCE_EXHAUSTED")
        return self.owned

    def admit(self, ids: list[str], uid: str, container: str = "c", resource: str = CORE) -> Answer:
        """Allocate for a container as the kubelet does, and write the checkpoint."""
        answer = self.allocate(ids, resource=resource)
        self.note(answer, ids, uid, container, resource)
        return answer

    def deploy(self, raw: dict[str, Any], ids: list[str], container: str = "c", resource: str = CORE) -> Answer:
        """Deliver a pod to the agent, and admit one of its containers."""
        self.pods.take(raw)
        return self.admit(ids, raw["metadata"]["uid"], container, resource)

    def note(self, answer: Answer, ids: list[str], uid: str, container: str = "c", resource: str = CORE) -> None:
        names = [api.CDIDevice(name=name) for name in answer.cdi]
        response = api.ContainerAllocateResponse(
            envs=answer.env, cdi_devices=names, annotations=answer.annotations
        ).SerializeToString()
        self.entries.append(device_checkpoint.Entry(uid, container, resource, tuple(ids), response))
        device_checkpoint.write(self.folder / "checkpoint", self.entries, {})

    def visible(self, answer: Answer) -> str:
        return self.env(answer)["NVIDIA_VISIBLE_DEVICES"]

    def env(self, answer: Answer) -> Mapping[str, str]:
        return resolve(answer.cdi, self.folder / "cdi").env

    def allocate(self, ids: list[str], meanwhile: Callable[[], None] = lambda: None, resource: str = CORE) -> Answer:
        return self._run(lambda: self.allocators[resource].allocate(ids), meanwhile)

    def start(self, ids: list[str], meanwhile: Callable[[], None] = lambda: None, resource: str = CORE) -> None:
        """Call PreStartContainer; `meanwhile` is called while it waits."""
        self._run(lambda: self.allocators[resource].pre_start(ids), meanwhile)

    def _run(self, call: Callable[[], Coroutine[Any, Any, T]], meanwhile: Callable[[], None]) -> T:
        async def run() -> T:
            self.changed.bind()
            asyncio.get_running_loop().call_soon(meanwhile)
            try:
                return await call()
            finally:
                self.changed.unbind()

        return asyncio.run(run())
