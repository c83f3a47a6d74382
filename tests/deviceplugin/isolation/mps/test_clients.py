"""PreStartContainer for clients of MPS daemons, without a kubelet."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.delivery.cdi import CdiFiles, Edits
from deviceplugin.isolation.isolation import Isolation, Policy
from deviceplugin.isolation.mps.clients import Mps
from deviceplugin.isolation.mps.daemons import Daemons, Times
from deviceplugin.isolation.mps.folders import KernelMounts, Mounts
from deviceplugin.isolation.mps.limits import Client, client_edits
from deviceplugin.pods.gpu_pod import GpuPod
from deviceplugin.pods.identity import Refused, Target
from mgpu.dialects.slices import GIVEN
from playground.container_runtime import Edits as Resolved
from playground.container_runtime import Unresolvable, resolve
from tests.builders import container, pod
from tests.deviceplugin.fake_node import FakeNode, FixedGpus
from tests.deviceplugin.isolation.mps.fake import (
    CARD,
    COMMAND,
    OTHER,
    TIMES,
    broken_program,
    kill,
    lives,
    on_loop,
    pid_of,
    until,
)
from tests.deviceplugin.records import ASSUMED, RECORD, decided, requesting

MULTIPLE = "vke.volcengine.com/container-multiple-gpu"


class MpsNode(FakeNode):
    """A node with MPS daemons. Each call of `running` runs another agent."""

    def __init__(self, folder: Path) -> None:
        self.warnings: list[str] = []
        self.unenforced: list[str] = []
        self.remnants: set[str] = set()
        self._enforce = True
        self._times = TIMES
        self._command = COMMAND
        self._mounts: Mounts | None = None
        super().__init__(folder)

    def make_isolation(self, files: CdiFiles) -> Isolation:
        daemons = Daemons(
            self.folder, self._command, self.warnings.append, self.changed.wake, self._times, self._mounts
        )

        def unenforced(gpu_pod: GpuPod, reason: str) -> None:
            self.unenforced.append(f"{gpu_pod.pod.name}: {reason}")

        gpus = FixedGpus(self.cards)
        self.mps = Mps(daemons, self.folder, gpus, self.pods, lambda: self.remnants, self.changed)
        policy = Policy("mps" if self._enforce else "none")
        self.isolation = Isolation({"mps": self.mps}, self.mps, policy, files, gpus, unenforced)
        return self.isolation

    @asynccontextmanager
    async def running(
        self,
        *pods: dict[str, Any],
        enforce: bool = True,
        times: Times = TIMES,
        command: list[str] = COMMAND,
        wait_seconds: float = 60.0,
        mounts: Mounts | None = None,
    ) -> AsyncIterator["MpsNode"]:
        self._enforce = enforce
        self._times = times
        self._command = command
        self._mounts = mounts
        self._wait = wait_seconds
        self.restart(*pods)
        self.changed.bind()
        task = asyncio.create_task(self.mps.run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self.changed.unbind()

    async def run_container(self, name: str, *ids: str) -> Resolved:
        """Admit and start the container as the kubelet does, and return what it gets."""
        answer = await self.allocator.allocate(ids)
        self.note(answer, list(ids), f"uid-{name}")
        await self.allocator.pre_start(ids)
        return resolve(answer.cdi, self.folder / "cdi")

    def end(self, name: str) -> None:
        self.pods.take(decided(name, "0", phase="Succeeded"))

    def drop(self, name: str) -> None:
        """Delete the pod's object, and let the agent forget the pod."""
        self.pods.drop({"metadata": {"uid": f"uid-{name}"}})
        self.mps.keep_only({gpu_pod.pod.uid for gpu_pod in self.pods.all()} | self.remnants)


@pytest.fixture
def mps_node(folder: Path) -> MpsNode:
    return MpsNode(folder)


@on_loop
async def test_share_is_a_client_of_its_cards_daemon_within_its_limits(mps_node: MpsNode) -> None:
    async with mps_node.running(decided("p", "1", core=50, mib=4096)):
        got = await mps_node.run_container("p", "1", "2")
        pipe = str(mps_node.folder / OTHER / "pipe")
        assert dict(got.env) == {
            "NVIDIA_VISIBLE_DEVICES": OTHER,
            "CUDA_MPS_PIPE_DIRECTORY": pipe,
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=4096M",
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50",
            **{key: value for key, value in got.env.items() if key.startswith("MGPU_")},
        }
        assert got.mounts == ((pipe, pipe), ("/dev/shm", str(mps_node.folder / "shm")))
        assert lives(pid_of(mps_node.folder, OTHER))
        assert not (mps_node.folder / CARD).exists()
    assert not mps_node.unenforced


@on_loop
async def test_share_is_no_client_without_the_setting(mps_node: MpsNode) -> None:
    async with mps_node.running(decided("p", "1"), enforce=False):
        got = await mps_node.run_container("p", "1", "2")
        assert not [key for key in got.env if key.startswith("CUDA")]
        assert got.mounts == ()
    assert sorted(file.name for file in mps_node.folder.iterdir()) == ["cdi", "checkpoint"]


@on_loop
async def test_start_waits_for_the_daemon_and_is_refused_with_its_problem(mps_node: MpsNode) -> None:
    command = [broken_program(mps_node.folder)]
    async with mps_node.running(decided("p", "0"), command=command, wait_seconds=0.2):
        why = f"default/p container c: the MPS daemon of card {CARD} cannot be started: No such file or directory"
        with pytest.raises(Refused, match=why):
            await mps_node.run_container("p", "1", "2")
        with pytest.raises(Unresolvable):
            resolve(["mgpu.io/card=x"], mps_node.folder / "cdi")
        assert not list(mps_node.folder.glob("cdi/*"))
    assert len(mps_node.refusals) == 1
    assert mps_node.warnings


@pytest.mark.parametrize("cause", ["program", "mount"])
@on_loop
async def test_share_starts_without_limits_where_no_daemon_can_run(mps_node: MpsNode, cause: str) -> None:
    command = ["/no/such/control"] if cause == "program" else COMMAND
    mounts = KernelMounts() if cause == "mount" else None
    async with mps_node.running(decided("p", "0"), command=command, mounts=mounts):
        got = await mps_node.run_container("p", "1", "2")
        assert not [key for key in got.env if key.startswith("CUDA")]
        (reason,) = mps_node.unenforced
        assert ("/no/such/control does not exist" if cause == "program" else "shm is not a separate mount") in reason
    assert not mps_node.warnings


@on_loop
async def test_daemon_stays_until_its_last_pod_has_ended_or_is_gone(mps_node: MpsNode) -> None:
    async with mps_node.running(decided("p", "0"), decided("q", "0"), decided("r", "0")):
        for i, name in enumerate("pqr"):
            await mps_node.run_container(name, str(i), f"x{i}")
        pid = pid_of(mps_node.folder)
        mps_node.end("p")
        mps_node.drop("q")
        await asyncio.sleep(0.1)
        assert lives(pid)
        mps_node.end("r")
        await until(lambda: not lives(pid))
    assert not mps_node.warnings


@on_loop
async def test_daemon_stays_until_the_containers_of_deleted_pods_have_ended(mps_node: MpsNode) -> None:
    async with mps_node.running(decided("p", "0"), decided("q", "0")):
        await mps_node.run_container("p", "1", "2")
        await mps_node.run_container("q", "3", "4")
        pid = pid_of(mps_node.folder)
        mps_node.remnants = {"uid-p", "uid-q"}
        mps_node.drop("p")
        mps_node.end("q")
        await asyncio.sleep(0.3)
        assert (mps_node.mps.is_healthy(CARD), lives(pid)) == (True, True)
        mps_node.remnants = set()
        mps_node.changed.wake()
        await until(lambda: not lives(pid))
    assert not mps_node.warnings


@on_loop
async def test_next_agent_keeps_the_daemon_of_running_clients_with_any_setting(mps_node: MpsNode) -> None:
    async with mps_node.running(decided("p", "0")):
        await mps_node.run_container("p", "1", "2")
        pid = pid_of(mps_node.folder)
    # The status of the pod does not show yet that it runs, but its CDI file does.
    async with mps_node.running(decided("p", "0"), enforce=False):
        await until(lambda: mps_node.mps.is_healthy(CARD))
        assert pid_of(mps_node.folder) == pid
        mps_node.drop("p")
        mps_node.pods.take(decided("q", "1"))
        await until(lambda: not lives(pid))
    assert not mps_node.warnings


@on_loop
async def test_dead_daemon_is_started_again_for_running_clients(mps_node: MpsNode) -> None:
    async with mps_node.running(decided("p", "0")):
        await mps_node.run_container("p", "1", "2")
        before = pid_of(mps_node.folder)
        kill(before)
        await until(lambda: not mps_node.mps.is_healthy(CARD))
        await until(lambda: mps_node.mps.is_healthy(CARD))
        assert pid_of(mps_node.folder) != before
    assert len(mps_node.warnings) == 1


@on_loop
async def test_silent_daemon_is_replaced_only_where_no_container_was_given_it(mps_node: MpsNode) -> None:
    async with mps_node.running(
        decided("p", "0"), decided("q", "0"), times=replace(TIMES, request=0.5, silent=0.01), wait_seconds=0.2
    ):
        mps_node.mps.set_partitioned_cards({CARD})
        await until(lambda: mps_node.mps.is_healthy(CARD))
        pid = pid_of(mps_node.folder)
        await mps_node.run_container("p", "1", "2")
        (mps_node.folder / CARD / "pipe" / "hang").touch()
        await until(lambda: not mps_node.mps.is_healthy(CARD))
        with pytest.raises(Refused, match="does not answer"):
            await mps_node.run_container("q", "3", "4")
        assert lives(pid)
        mps_node.drop("p")
        mps_node.pods.take(decided("r", "1"))
        await until(lambda: not lives(pid))


@on_loop
async def test_cut_card_has_a_daemon_before_any_container_starts(mps_node: MpsNode) -> None:
    async with mps_node.running(enforce=False):
        assert not mps_node.mps.is_healthy(CARD)
        await asyncio.to_thread(mps_node.mps.set_partitioned_cards, [CARD])
        await until(lambda: mps_node.mps.is_healthy(CARD))
        pid = pid_of(mps_node.folder)
        await asyncio.to_thread(mps_node.mps.set_partitioned_cards, [])
        await until(lambda: not lives(pid))
        assert not mps_node.mps.is_healthy(CARD)


@on_loop
async def test_mps_slice_is_a_client_whatever_the_setting(mps_node: MpsNode) -> None:
    asking_slice = requesting("c", {"nvidia.com/gpu-4gb": 1})
    raw = pod("p", asking_slice, annotations={GIVEN: '{"c": {"gpu-4gb": ["1:3"]}}'})
    async with mps_node.running(raw, enforce=False):
        known = mps_node.pods.by_uid("uid-p")
        assert known is not None
        deadline = asyncio.get_running_loop().time() + 20
        found = await mps_node.isolation.ready([Target(known, "c")], deadline)
        marked = Edits({"MGPU_ISOLATION": "mps"})
        assert found["uid-p", "c"] == client_edits(Client(OTHER, "4G", 5), mps_node.folder) | marked
        assert lives(pid_of(mps_node.folder, OTHER))


@on_loop
async def test_shares_of_several_cards_are_not_enforced_and_an_event_says_so(mps_node: MpsNode) -> None:
    both = pod("p", container("c", 100, 4096), annotations={ASSUMED: "true", RECORD + "c": "0,1", MULTIPLE: "2"})
    async with mps_node.running(both):
        got = await mps_node.run_container("p", "1", "2")
        assert got.env["NVIDIA_VISIBLE_DEVICES"] == f"{CARD},{OTHER}"
        assert not got.mounts
    (said,) = mps_node.unenforced
    assert said.startswith("p: the share of container c is not enforced: it has shares of 2 cards")


@on_loop
async def test_pod_whose_record_changes_while_its_daemon_starts_is_refused(mps_node: MpsNode) -> None:
    async with mps_node.running(decided("p", "0")):
        start = asyncio.create_task(mps_node.run_container("p", "1", "2"))
        await until(lambda: (mps_node.folder / CARD / "pipe").exists())
        mps_node.pods.take(decided("p", "1"))
        with pytest.raises(Refused, match="its allocation record has changed during the start"):
            await start
