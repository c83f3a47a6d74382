"""Static SM partitions: a client of MPS has its own chunks of SMs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from deviceplugin.isolation.limits import LimitedContainer, limits_of
from deviceplugin.isolation.mps.clients import Mps
from deviceplugin.isolation.mps.daemons import Daemons, option_sets
from deviceplugin.isolation.mps.partitions import Partitions, chunks_of, read_added, read_listed
from deviceplugin.pods.identity import Refused, Target
from tests.builders import cards
from tests.deviceplugin.fake_node import FakeNode, FixedGpus
from tests.deviceplugin.isolation.mps.fake import CARD, COMMAND, TIMES, on_loop, until
from tests.deviceplugin.records import decided

CARDS = cards(2)
REAL = "GPU-74d43ed3-cdf7-e667-3644-bf5b4f46ed65"
ID = "Dx4AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
LISTED = f"""GPU Partition free used free used clients
chunk chunk SM SM
GPU-74d43ed3 - 3 7 24 56 -
GPU-74d43ed3 {ID} - 7 - 56 -
"""


@pytest.mark.parametrize("text", [f"{REAL}/{ID}\n", f"Partition {REAL}/{ID} created\n"])
def test_added_partition_is_found_in_the_answers_of_all_versions(text: str) -> None:
    assert read_added(text, REAL) == ID


@pytest.mark.parametrize("text", ["", "Failed to create a partition", f"{REAL}", "GPU-other/x\n", f"{REAL}/\n"])
def test_other_answers_are_errors(text: str) -> None:
    assert read_added(text, REAL) is None


def test_table_of_the_documentation_is_read() -> None:
    assert read_listed(LISTED, REAL) == Partitions(chunks=10, free=3, ids=frozenset({ID}))
    assert read_listed(LISTED, "GPU-another") is None
    assert read_listed("Unknown command 'lspart'\n", REAL) is None
    assert read_listed("GPU-74d43ed3 - x 7 24 56 -\n", REAL) is None


@pytest.mark.parametrize(("compute", "chunks"), [(1000, 16), (500, 8), (99, 1), (130, 2), (1, 1)])
def test_share_has_whole_chunks_and_at_least_one(compute: int, chunks: int) -> None:
    assert chunks_of(compute, 1000, 16) == chunks


class Site:
    """A node on which agents with static partitions run one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "mps"
        self.node = FakeNode(folder)
        self.set_pods({"p": 30, "q": 50, "r": 40})

    def set_pods(self, cores: dict[str, int]) -> None:
        self.node.restart(*(decided(name, "0", core=core, mib=1024) for name, core in cores.items()))

    @asynccontextmanager
    async def agent(self) -> AsyncIterator[Mps]:
        attempts = option_sets("auto", partitions=True)
        self.daemons = Daemons(self.folder, COMMAND, lambda _: None, self.node.changed.wake, TIMES, attempts=attempts)
        gpus = FixedGpus(CARDS)
        mps = Mps(self.daemons, self.folder, gpus, self.node.pods, set, self.node.changed, partitions=True)
        self.node.changed.bind()
        task = asyncio.create_task(mps.run())
        try:
            yield mps
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self.node.changed.unbind()

    async def env(self, mps: Mps, name: str) -> dict[str, str]:
        """Let the container start, and return its environment."""
        gpu_pod = self.node.pods.by_uid(f"uid-{name}")
        assert gpu_pod is not None
        target = Target(gpu_pod, "c")
        container = LimitedContainer(target, limits_of(target.shares, CARDS))
        found = await mps.prepare([container], asyncio.get_running_loop().time() + 60)
        mps.mark_started([target.key])
        return dict(found[target.key].env)

    async def listed(self) -> Partitions:
        found = await self.daemons.partitions(CARD)
        assert found is not None
        return found


@pytest.fixture
def site(folder: Path) -> Site:
    return Site(folder)


@on_loop
async def test_container_has_its_own_chunks_in_place_of_a_percentage(site: Site) -> None:
    async with site.agent() as mps:
        env = await site.env(mps, "p")
        assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in env
        listed = await site.listed()
        (id_,) = listed.ids
        assert env["CUDA_MPS_SM_PARTITION"] == f"{CARD}/{id_}"
        assert listed == Partitions(chunks=16, free=12, ids=frozenset({id_}))
        assert env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=1024M"
        assert await site.env(mps, "p") == env, "a container that starts again keeps its partition"
        assert mps.ability().caution == ""  # type: ignore[union-attr]


@on_loop
async def test_container_for_which_no_chunks_are_left_does_not_start(site: Site) -> None:
    async with site.agent() as mps:
        await site.env(mps, "p")
        await site.env(mps, "q")
        with pytest.raises(Refused, match="default/r container c: SM partition of 6 chunks on card"):
            await site.env(mps, "r")


@on_loop
async def test_next_agent_keeps_the_partitions_of_its_containers_and_removes_all_others(site: Site) -> None:
    async with site.agent() as mps:
        env = await site.env(mps, "p")
        await site.env(mps, "q")  # The agent dies before it has written the CDI file of this container.
    async with site.agent() as mps:
        mps.recover({("uid-p", "c"): env})
        site.node.changed.wake()
        async with asyncio.timeout(60):
            while len((await site.listed()).ids) > 1:
                site.node.changed.wake()
                await asyncio.sleep(0.02)
        assert await site.env(mps, "p") == env
        mps.keep_only([])
        site.node.changed.wake()
        await until(lambda: not (site.folder / CARD / "pipe" / "control").exists())


@on_loop
async def test_program_without_partitions_limits_by_percentages(site: Site) -> None:
    (site.folder / CARD).mkdir(parents=True)
    (site.folder / CARD / "old").touch()
    async with site.agent() as mps:
        env = await site.env(mps, "p")
        assert env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "30"
        assert "CUDA_MPS_SM_PARTITION" not in env
        assert "the control program has no static SM partitions" in mps.ability().caution  # type: ignore[union-attr]
