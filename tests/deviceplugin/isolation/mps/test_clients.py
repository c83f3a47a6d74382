"""PreStartContainer for clients of MPS daemons, without a kubelet."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.allocation.allocator import AllocationContext, Allocator
from deviceplugin.delivery.cdi import CdiFiles
from deviceplugin.event_loop import Wakeup
from deviceplugin.isolation.mps.clients import Mps
from deviceplugin.isolation.mps.daemons import Daemons, Times
from deviceplugin.isolation.mps.limits import Client, edits
from deviceplugin.kubelet.pod_resources import Owner
from deviceplugin.pods.capacity_check import Grants
from deviceplugin.pods.gpu_pod import GpuPod
from deviceplugin.pods.identity import Refused, Target
from deviceplugin.pods.node_pods import NodePods
from mgpu.dialects.slices import GIVEN
from mgpu.model.cards import Card
from mgpu.model.ledger import Holding
from mgpu.settings import load_settings
from playground.container_runtime import Edits, Unresolvable, resolve
from playground.kubelet import device_checkpoint
from proto import deviceplugin_pb2 as api
from tests.builders import CORE, cards, container, pod
from tests.deviceplugin.fake_node import FixedGpus
from tests.deviceplugin.isolation.mps.fake import CARD, COMMAND, OTHER, TIMES, kill, lives, on_loop, pid_of, until
from tests.deviceplugin.records import ASSUMED, RECORD, decided, requesting

MULTIPLE = "vke.volcengine.com/container-multiple-gpu"


class Bench:
    """A node with a checkpoint, CDI files and daemons. Each call of `running` runs another agent."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.entries = folder, list[device_checkpoint.Entry]()
        self.told: list[str] = []
        self.unenforced: list[str] = []
        self.refusals: list[str] = []

    @asynccontextmanager
    async def running(
        self,
        *pods: dict[str, Any],
        enforce: bool = True,
        times: Times = TIMES,
        command: list[str] | None = None,
        wait_seconds: float = 60.0,
    ) -> AsyncIterator["Bench"]:
        changed, files, settings = Wakeup(), CdiFiles(self.folder / "cdi"), load_settings()
        changed.bind()
        self.pods = NodePods(settings, changed.wake)
        for raw in pods:
            self.pods.take(raw)
        daemons = Daemons(self.folder, command or COMMAND, self.told.append, changed.wake, times)
        self.mps = Mps(
            daemons,
            files,
            self.folder,
            FixedGpus(cards(2)),
            self.pods,
            changed,
            lambda known, why: self.unenforced.append(f"{known.pod.name}: {why}"),
            enforce=enforce,
        )
        context = AllocationContext(
            pods=self.pods,
            devices=self,
            owners=self,
            checkpoint=self.folder / "checkpoint",
            delivery=files,
            grants=Grants({}),
            changed=changed,
            listener=self,
            unrecorded=self,
            mps=self.mps,
        )
        self.allocator = Allocator(CORE, context, lambda: None, wait_seconds)
        self.allocator.resume()
        task = asyncio.create_task(self.mps.run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            changed.unbind()

    def gpus(self) -> Sequence[Card]:
        return cards(2)

    def devices(self) -> Sequence[Card]:
        return cards(2)

    def holdings(self) -> tuple[Holding, ...]:
        return ()

    def is_undetermined(self) -> bool:
        return False

    def start_refused(self, gpu_pod: GpuPod, reason: str) -> None:
        self.refusals.append(f"{gpu_pod.pod.name}: {reason}")

    def start_granted(self, gpu_pod: GpuPod) -> None:
        """Ignore it: the tests look at what containers get."""

    async def owners(self, resource: str) -> list[Owner]:
        assert resource == CORE
        return []

    async def start(self, name: str, *ids: str, container: str = "c") -> Edits:
        """The kubelet admits and starts the container; what it gets."""
        answer = await self.allocator.allocate(ids)
        response = api.ContainerAllocateResponse(
            envs=answer.env, cdi_devices=[api.CDIDevice(name=device) for device in answer.cdi]
        ).SerializeToString()
        self.entries.append(device_checkpoint.Entry(f"uid-{name}", container, CORE, ids, response))
        device_checkpoint.write(self.folder / "checkpoint", self.entries, {})
        await self.allocator.pre_start(ids)
        return resolve(answer.cdi, self.folder / "cdi")

    def end(self, name: str) -> None:
        raw = decided(name, "0")
        raw["status"]["phase"] = "Succeeded"
        self.pods.take(raw)

    def drop(self, name: str) -> None:
        """The pod's object goes, and the keepers hear of it as `keep_clean` tells them."""
        self.pods.drop({"metadata": {"uid": f"uid-{name}"}})
        self.mps.keep_only({known.pod.uid for known in self.pods.all()})


@pytest.fixture
def bench(folder: Path) -> Bench:
    return Bench(folder)


@on_loop
async def test_share_is_a_client_of_its_cards_daemon_within_its_limits(bench: Bench) -> None:
    async with bench.running(decided("p", "1", core=50, mib=4096)):
        got = await bench.start("p", "1", "2")
        pipe = str(bench.folder / OTHER / "pipe")
        assert dict(got.env) == {
            "NVIDIA_VISIBLE_DEVICES": OTHER,
            "CUDA_MPS_PIPE_DIRECTORY": pipe,
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=4096M",
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50",
            **{key: value for key, value in got.env.items() if key.startswith("MGPU_")},
        }
        assert got.mounts == ((pipe, pipe), ("/dev/shm", str(bench.folder / "shm")))
        assert lives(pid_of(bench.folder, OTHER))
        assert not (bench.folder / CARD).exists()
    assert not bench.unenforced


@on_loop
async def test_share_is_no_client_without_the_setting(bench: Bench) -> None:
    async with bench.running(decided("p", "1"), enforce=False):
        got = await bench.start("p", "1", "2")
        assert not [key for key in got.env if key.startswith("CUDA")]
        assert got.mounts == ()
    assert sorted(file.name for file in bench.folder.iterdir()) == ["cdi", "checkpoint"]


@on_loop
async def test_start_waits_for_the_daemon_and_is_refused_with_its_problem(bench: Bench) -> None:
    async with bench.running(decided("p", "0"), command=["/no/such/control"], wait_seconds=0.2):
        why = f"default/p container c: the MPS daemon of card {CARD} cannot be started: No such file or directory"
        with pytest.raises(Refused, match=why):
            await bench.start("p", "1", "2")
        with pytest.raises(Unresolvable):
            resolve(["mgpu.io/card=x"], bench.folder / "cdi")
        assert not list(bench.folder.glob("cdi/*"))
    assert len(bench.refusals) == 1
    assert bench.told


@on_loop
async def test_daemon_stays_until_its_last_pod_has_ended_or_is_gone(bench: Bench) -> None:
    async with bench.running(decided("p", "0"), decided("q", "0"), decided("r", "0")):
        for i, name in enumerate("pqr"):
            await bench.start(name, str(i), f"x{i}")
        pid = pid_of(bench.folder)
        bench.end("p")
        bench.drop("q")
        await asyncio.sleep(0.1)
        assert lives(pid)
        bench.end("r")
        await until(lambda: not lives(pid))
    assert not bench.told


def test_next_agent_keeps_the_daemon_of_running_clients_whatever_the_setting(bench: Bench) -> None:
    async def first() -> int:
        async with bench.running(decided("p", "0")):
            await bench.start("p", "1", "2")
            return pid_of(bench.folder)

    async def second() -> None:
        # The pod is not seen to run yet: what the agent before it handed out tells.
        async with bench.running(decided("p", "0"), enforce=False):
            await until(lambda: bench.mps.is_healthy(CARD))
            assert pid_of(bench.folder) == pid
            bench.drop("p")
            bench.pods.take(decided("q", "1"))
            await until(lambda: not lives(pid))

    pid = asyncio.run(first())
    asyncio.run(second())
    assert not bench.told


@on_loop
async def test_dead_daemon_is_started_again_for_running_clients(bench: Bench) -> None:
    async with bench.running(decided("p", "0")):
        await bench.start("p", "1", "2")
        before = pid_of(bench.folder)
        kill(before)
        await until(lambda: not bench.mps.is_healthy(CARD))
        await until(lambda: bench.mps.is_healthy(CARD))
        assert pid_of(bench.folder) != before
    assert len(bench.told) == 1


@on_loop
async def test_silent_daemon_is_replaced_only_where_no_container_was_given_it(bench: Bench) -> None:
    async with bench.running(
        decided("p", "0"), decided("q", "0"), times=replace(TIMES, request=0.5, silent=0.01), wait_seconds=0.2
    ):
        bench.mps.set_partitioned_cards({CARD})
        await until(lambda: bench.mps.is_healthy(CARD))
        pid = pid_of(bench.folder)
        await bench.start("p", "1", "2")
        (bench.folder / CARD / "pipe" / "hang").touch()
        await until(lambda: not bench.mps.is_healthy(CARD))
        with pytest.raises(Refused, match="does not answer"):
            await bench.start("q", "3", "4")
        assert lives(pid)
        bench.drop("p")
        bench.pods.take(decided("r", "1"))
        await until(lambda: not lives(pid))


@on_loop
async def test_cut_card_has_a_daemon_before_any_container_starts(bench: Bench) -> None:
    async with bench.running(enforce=False):
        assert not bench.mps.is_healthy(CARD)
        await asyncio.to_thread(bench.mps.set_partitioned_cards, [CARD])
        await until(lambda: bench.mps.is_healthy(CARD))
        pid = pid_of(bench.folder)
        await asyncio.to_thread(bench.mps.set_partitioned_cards, [])
        await until(lambda: not lives(pid))
        assert not bench.mps.is_healthy(CARD)


@on_loop
async def test_mps_slice_is_a_client_whatever_the_setting(bench: Bench) -> None:
    asking_slice = requesting("c", {"nvidia.com/gpu-4gb": 1})
    raw = pod("p", asking_slice, annotations={GIVEN: '{"c": {"gpu-4gb": ["1:3"]}}'})
    async with bench.running(raw, enforce=False):
        known = bench.pods.by_uid("uid-p")
        assert known is not None
        deadline = asyncio.get_running_loop().time() + 20
        found = await bench.mps.ready([Target(known, "c")], deadline)
        assert found["uid-p", "c"] == edits(Client(OTHER, "4G", 5), bench.folder)
        assert lives(pid_of(bench.folder, OTHER))


@on_loop
async def test_shares_of_several_cards_are_not_enforced_and_an_event_says_so(bench: Bench) -> None:
    both = pod("p", container("c", 100, 4096), annotations={ASSUMED: "true", RECORD + "c": "0,1", MULTIPLE: "2"})
    async with bench.running(both):
        got = await bench.start("p", "1", "2")
        assert got.env["NVIDIA_VISIBLE_DEVICES"] == f"{CARD},{OTHER}"
        assert not got.mounts
    (said,) = bench.unenforced
    assert said.startswith("p: the share of container c is not enforced: it has shares of 2 cards")


@on_loop
async def test_pod_whose_record_changes_while_its_daemon_starts_is_refused(bench: Bench) -> None:
    async with bench.running(decided("p", "0")):
        start = asyncio.create_task(bench.start("p", "1", "2"))
        await until(lambda: (bench.folder / CARD / "pipe").exists())
        bench.pods.take(decided("p", "1"))
        with pytest.raises(Refused, match="its allocation record has changed during the start"):
            await start
