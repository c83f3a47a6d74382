"""Static SM partitions: a client of MPS has its own chunks of SMs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from fractions import Fraction
from pathlib import Path

import pytest

from deviceplugin.isolation.backend import Ability
from deviceplugin.isolation.limits import CardLimit, LimitedContainer, limits_of
from deviceplugin.isolation.mps.clients import Mps
from deviceplugin.isolation.mps.control import option_sets
from deviceplugin.isolation.mps.daemons import Daemons
from deviceplugin.isolation.mps.partitions import Partitions, chunks_of, read_added, read_listed
from deviceplugin.pods.identity import Refused, Target
from tests.builders import GIB, cards
from tests.deviceplugin.fake_node import FakeNode, FixedGpus
from tests.deviceplugin.isolation.mps.fake import CARD, COMMAND, TIMES, kill, on_loop, pid_of, until
from tests.deviceplugin.records import decided

CARDS = cards(2)
REAL = "GPU-74d43ed3-cdf7-e667-3644-bf5b4f46ed65"
ID = "Dx4AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
WITH_SLASHES = "D/79e/DgwYMDAAAAAAAAAAAAAAAAAAAAAAAA"
DOCUMENTED = f"""GPU Partition free used free used clients
chunk chunk SM SM
GPU-74d43ed3 - 3 7 24 56 -
GPU-74d43ed3 {ID} - 7 - 56 -
"""
IN_PRACTICE = f"""GPU          Partition                            free   used   free  used  clients
                                                  chunks chunks SM    SM
GPU-74                                            5      10     52    80
GPU-74       {WITH_SLASHES}                              10           80    Yes
GPU-9                                             15     0      132   0
"""


@pytest.mark.parametrize("id_", [ID, WITH_SLASHES])
@pytest.mark.parametrize("form", ["{}\n", "Partition {} created\n", "Partition {} created."])
def test_added_partition_is_found_in_the_answers_of_all_versions(form: str, id_: str) -> None:
    assert read_added(form.format(f"{REAL}/{id_}"), REAL) == id_


@pytest.mark.parametrize("text", ["", "Failed to create a partition", f"{REAL}", "GPU-other/x\n", f"{REAL}/\n"])
def test_other_answers_are_errors(text: str) -> None:
    assert read_added(text, REAL) is None


def test_tables_of_the_documentation_and_of_the_program_are_read() -> None:
    assert read_listed(DOCUMENTED, REAL) == Partitions(chunks=10, free=3, ids=frozenset({ID}))
    assert read_listed(IN_PRACTICE, REAL) == Partitions(chunks=15, free=5, ids=frozenset({WITH_SLASHES}))
    assert read_listed(DOCUMENTED, "GPU-another") is None
    assert read_listed("Unknown command 'lspart'\n", REAL) is None
    assert read_listed("GPU-74d43ed3 - x 7 24 56 -\n", REAL) is None


@pytest.mark.parametrize(("part", "chunks"), [(1000, 16), (500, 8), (99, 1), (130, 2), (1, 1)])
def test_share_has_whole_chunks_and_at_least_one(part: int, chunks: int) -> None:
    assert chunks_of(Fraction(part, 1000), 16) == chunks


class Site:
    """A node on which agents with static partitions run one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "mps"
        self.card = self.folder / CARD
        self.card.mkdir(parents=True)
        self.node = FakeNode(folder)
        self.node.restart(
            *(decided(name, "0", core=core, mib=1024) for name, core in {"p": 30, "q": 50, "r": 40}.items())
        )

    @asynccontextmanager
    async def agent(self, *, partitions: bool = True) -> AsyncIterator[Mps]:
        attempts = option_sets("auto", partitions=partitions)
        self.daemons = Daemons(self.folder, COMMAND, lambda _: None, self.node.changed.wake, TIMES, attempts=attempts)
        gpus = FixedGpus(CARDS)
        mps = Mps(self.daemons, self.folder, gpus, self.node.pods, set, self.node.changed, partitions=partitions)
        self.node.changed.bind()
        task = asyncio.create_task(mps.run())
        try:
            yield mps
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self.node.changed.unbind()

    async def env(self, mps: Mps, name: str, limit: CardLimit | None = None) -> dict[str, str]:
        """Let the container start, and return its environment."""
        gpu_pod = self.node.pods.by_uid(f"uid-{name}")
        assert gpu_pod is not None
        target = Target(gpu_pod, "c")
        container = LimitedContainer(target, (limit,) if limit else limits_of(target.shares, CARDS))
        found = await mps.prepare([container], asyncio.get_running_loop().time() + 60)
        mps.mark_started([target.key])
        return dict(found[target.key].env)

    async def listed(self) -> Partitions:
        found = await self.daemons.partitionable()[CARD].partitions(20)
        assert isinstance(found, Partitions)
        return found


def partition(env: dict[str, str]) -> str:
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in env
    return env["CUDA_MPS_SM_PARTITION"].removeprefix(f"{CARD}/")


def caution(mps: Mps) -> str:
    ability = mps.ability()
    assert isinstance(ability, Ability)
    return ability.caution


@pytest.fixture
def site(folder: Path) -> Site:
    return Site(folder)


@on_loop
async def test_container_has_its_own_chunks_in_place_of_a_percentage(site: Site) -> None:
    async with site.agent() as mps:
        env = await site.env(mps, "p")
        assert await site.listed() == Partitions(chunks=16, free=12, ids=frozenset({partition(env)}))
        assert env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=1024M"
        assert await site.env(mps, "p") == env, "a container that starts again keeps its partition"
        assert caution(mps) == ""


@on_loop
async def test_container_without_a_share_of_compute_has_a_partition_too(site: Site) -> None:
    """A client without one could not start beside the others."""
    async with site.agent() as mps:
        env = await site.env(mps, "p", CardLimit(CARDS[0], 20 * GIB, None))
        assert await site.listed() == Partitions(chunks=16, free=12, ids=frozenset({partition(env)}))


@on_loop
async def test_container_starts_once_the_chunks_of_ended_ones_are_free(site: Site) -> None:
    async with site.agent() as mps:
        await site.env(mps, "p")
        await site.env(mps, "q")
        why = "default/r container c: the MPS daemon of card .*: it needs 6 chunks of SMs, and 4 of 16 are free"
        with pytest.raises(Refused, match=why):
            await site.env(mps, "r")
        await site.listed()  # The look that the refusal has caused is over.
        site.node.pods.take(decided("q", "0", phase="Succeeded"))
        assert partition(await site.env(mps, "r"))


@on_loop
async def test_partition_that_still_has_clients_is_removed_later(site: Site) -> None:
    async with site.agent() as mps:
        await site.env(mps, "p")
        ended = partition(await site.env(mps, "q"))
        (site.card / "in-use").write_text(ended)
        mps.keep_only(["uid-p"])
        await asyncio.sleep(0.1)
        assert ended in (await site.listed()).ids
        (site.card / "in-use").unlink()
        async with asyncio.timeout(60):
            while ended in (await site.listed()).ids:
                await asyncio.sleep(0.02)


@on_loop
async def test_next_agent_keeps_the_partitions_of_its_containers_and_removes_all_others(site: Site) -> None:
    async with site.agent() as mps:
        env = await site.env(mps, "p")
        await site.env(mps, "q")  # The agent dies before it has written the CDI file of this container.
    async with site.agent(partitions=False) as mps:
        mps.recover({("uid-p", "c"): env})
        site.node.changed.wake()
        await until(lambda: site.daemons.is_healthy(CARD))
        async with asyncio.timeout(60):
            while (await site.listed()).ids != {partition(env)}:
                await asyncio.sleep(0.02)
        assert await site.env(mps, "p") == env
        assert partition(await site.env(mps, "q")), "the daemon has partitions, whatever the setting is by now"
        mps.keep_only([])
        site.node.changed.wake()
        await until(lambda: not (site.card / "pipe" / "control").exists())


@on_loop
async def test_containers_have_different_partitions_after_the_daemon_was_restarted(site: Site) -> None:
    async with site.agent() as mps:
        before = partition(await site.env(mps, "p"))
        kill(pid_of(site.folder))
        await until(lambda: not site.daemons.is_healthy(CARD))
        assert partition(await site.env(mps, "p", CardLimit(CARDS[0], None, 300))) == before
        kill(pid_of(site.folder))
        await until(lambda: not site.daemons.is_healthy(CARD))
        other = partition(await site.env(mps, "q", CardLimit(CARDS[0], None, 300)))
        assert other == before, "the daemon gives the same name again"
        env = await site.env(mps, "q")
        assert partition(env) == other
        mps.recover({("uid-p", "c"): env, ("uid-q", "c"): env})  # The file of the former container is still there.
        assert partition(await site.env(mps, "p")) != other


@pytest.mark.parametrize("file", ["old", "unpartitionable"])
@on_loop
async def test_daemon_that_cannot_partition_the_card_limits_by_percentages(site: Site, file: str) -> None:
    (site.card / file).touch()
    async with site.agent() as mps:
        env = await site.env(mps, "p")
        assert env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "30"
        assert "CUDA_MPS_SM_PARTITION" not in env
        assert "a daemon has no static SM partitions" in caution(mps)
        assert ("several users" in caution(mps)) is (file == "old")
