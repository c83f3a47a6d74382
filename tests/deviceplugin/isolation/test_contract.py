"""What holds for every isolation back end (`deviceplugin.isolation.backend.Backend`)."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from deviceplugin.delivery.cdi import Edits
from deviceplugin.isolation.backend import Ability, Backend, Unable
from deviceplugin.isolation.hami_core.backend import HamiCoreBackend
from deviceplugin.isolation.hami_core.folders import Folders, NoMounts
from deviceplugin.isolation.limits import LimitedContainer, limits_of
from deviceplugin.isolation.mps.clients import Mps
from deviceplugin.isolation.mps.daemons import Daemons
from deviceplugin.pods.identity import Target
from mgpu.model.isolation import STRONGEST_FIRST
from tests.builders import cards
from tests.deviceplugin.fake_node import FakeNode, FixedGpus
from tests.deviceplugin.isolation.driver.test_backend import Rig as DriverRig
from tests.deviceplugin.isolation.mps.fake import COMMAND, TIMES, on_loop
from tests.deviceplugin.records import decided

CARDS = cards(2)


@dataclass
class Site:
    """A node on which agents run one after the other.

    Attributes:
        make: A function that creates the back end of another agent.
    """

    node: FakeNode
    make: Callable[[], Backend]

    def container(self, name: str) -> LimitedContainer:
        gpu_pod = self.node.pods.by_uid(f"uid-{name}")
        assert gpu_pod is not None
        target = Target(gpu_pod, "c")
        return LimitedContainer(target, limits_of(target.shares, CARDS))


def mps_site(folder: Path, node: FakeNode) -> Site:
    def make() -> Backend:
        daemons = Daemons(folder / "mps", COMMAND, lambda _: None, node.changed.wake, TIMES)
        return Mps(daemons, folder / "mps", FixedGpus(CARDS), node.pods, set, node.changed)

    return Site(node, make)


def hami_core_site(folder: Path, node: FakeNode) -> Site:
    (folder / "libvgpu.so").touch()
    folders = Folders(folder / "hami", NoMounts())
    return Site(node, lambda: HamiCoreBackend(folder / "libvgpu.so", folders, FixedGpus(CARDS), lambda *_: None))


def driver_site(folder: Path, node: FakeNode) -> Site:
    (folder / "driver").mkdir()
    rig = DriverRig(folder / "driver")
    rig.pods = node.pods  # type: ignore[assignment]
    return Site(node, rig.restart)


@pytest.fixture(params=[mps_site, hami_core_site, driver_site], ids=["mps", "hami-core", "driver"])
def site(request: pytest.FixtureRequest, folder: Path) -> Site:
    node = FakeNode(folder)
    node.restart(decided("p", "0", core=10, mib=1024), decided("q", "1", core=10, mib=2048))
    found: Site = request.param(folder, node)
    return found


@asynccontextmanager
async def running(site: Site) -> AsyncIterator[Backend]:
    backend = site.make()
    site.node.changed.bind()
    task = asyncio.create_task(backend.run())
    try:
        yield backend
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with contextlib.suppress(ValueError):
            site.node.changed.unbind()


async def prepared(backend: Backend, *containers: LimitedContainer) -> list[Edits]:
    found = await backend.prepare(containers, asyncio.get_running_loop().time() + 60)
    assert [*found] == [container.target.key for container in containers]
    return [*found.values()]


def own_paths(edits: Edits) -> set[str]:
    return {mount.source for mount in edits.mounts if not mount.read_only}


@on_loop
async def test_back_end_has_a_name_that_settings_know_and_works_on_this_node(site: Site) -> None:
    backend = site.make()
    assert backend.name in STRONGEST_FIRST
    assert isinstance(backend.ability(), Ability)
    assert [*backend.measure()] == []


@on_loop
async def test_container_gets_the_same_whenever_it_starts(site: Site) -> None:
    async with running(site) as backend:
        first = await prepared(backend, site.container("p"), site.container("q"))
        backend.mark_started([("uid-p", "c"), ("uid-q", "c")])
        assert await prepared(backend, site.container("p"), site.container("q")) == first
    async with running(site) as backend:
        backend.recover({("uid-p", "c"): first[0].env, ("uid-q", "c"): first[1].env})
        assert await prepared(backend, site.container("p"), site.container("q")) == first


@on_loop
async def test_every_limit_in_the_environment_can_be_lifted(site: Site) -> None:
    """A container with a whole ResourceClaim also gets the variables of the requests of the claim."""
    async with running(site) as backend:
        (edits,) = await prepared(backend, site.container("p"))
        lifted = backend.lift(edits.env)
        assert lifted.keys() <= edits.env.keys()
        assert all(edits.env[name] != value for name, value in lifted.items())
        assert lifted.keys() >= {name for name in edits.env if "LIMIT" in name and "MEM" in name}


@on_loop
async def test_containers_on_different_cards_share_nothing_but_what_all_clients_share(site: Site) -> None:
    async with running(site) as backend:
        one, other = await prepared(backend, site.container("p"), site.container("q"))
        shared = own_paths(one) & own_paths(other)
        assert {Path(path).name for path in shared} <= {"shm"}  # of MPS, which docs/mps.md explains


@on_loop
async def test_containers_can_be_forgotten_at_any_time(site: Site) -> None:
    async with running(site) as backend:
        backend.keep_only([])
        backend.release([("uid-p", "c")])
        await prepared(backend, site.container("p"))
        backend.release([("uid-p", "c")])
        backend.keep_only([])
        backend.recover({})
        assert [*backend.measure()] == []
        await prepared(backend, site.container("p"))


@on_loop
async def test_container_that_does_not_run_cannot_be_resized(site: Site) -> None:
    backend = site.make()
    assert isinstance(await backend.resize(site.container("p")), Unable)
