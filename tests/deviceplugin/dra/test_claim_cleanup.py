"""When the record of a claim is removed although the kubelet has not had the claim unprepared."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from deviceplugin.dra.claim_cleanup import ClaimCleanup
from deviceplugin.dra.claim_status import ClaimApi
from mgpu.model.errors import RetryLater
from tests.deviceplugin.dra.claims import claim, claim_pod
from tests.deviceplugin.dra.rig import ClaimNode


class Runtime:
    """The container runtime.

    Attributes:
        live: The UIDs of the pods that run or may still start containers; None if it does not answer.
    """

    def __init__(self) -> None:
        self.live: frozenset[str] | None = frozenset()

    async def live_pods(self) -> frozenset[str]:
        if self.live is None:
            raise RetryLater("there is no container runtime")
        return self.live


class Site:
    """A node on which claim `a` was delivered, and of which nothing else is left."""

    def __init__(self, folder: Path) -> None:
        self.node = ClaimNode(folder)
        self.node.api.put(claim())
        self.node.take(claim_pod())
        self.node.prepare()
        self.node.api.remove("a")
        self.node.drop(claim_pod())
        self.runtime = Runtime()
        node = self.node
        self.cleanup = ClaimCleanup(node.claims, ClaimApi(node.api), node.pods, node.users, self.runtime)

    def rounds(self, count: int = 2) -> None:
        for _ in range(count):
            asyncio.run(self.cleanup.clean())

    def is_kept(self) -> bool:
        return bool(self.node.record_files()) and self.node.spec() is not None


@pytest.fixture
def site(folder: Path) -> Site:
    return Site(folder)


def test_record_that_nobody_knows_is_removed_in_the_second_round(site: Site) -> None:
    site.rounds(1)
    assert site.is_kept()
    site.rounds(1)
    assert not site.is_kept()
    assert site.node.claims.holdings() == ()


def still_allocated(site: Site) -> None:
    site.node.api.put(claim())


def unknown_to_the_api(site: Site) -> None:
    site.node.api.failing = 503


def with_its_pod(site: Site) -> None:
    site.node.take(claim_pod())


def with_running_containers(site: Site) -> None:
    site.runtime.live = frozenset({"uid-p"})


def with_a_pod_that_came_later(site: Site) -> None:
    """The kubelet does not have a claim prepared again for a second pod."""
    site.node.take(claim_pod("q"))


def with_containers_of_a_pod_that_was_deleted_by_force(site: Site) -> None:
    """It may be a second pod of the claim."""
    site.runtime.live = frozenset({"uid-q"})


def without_an_answer_of_the_runtime(site: Site) -> None:
    site.runtime.live = None


@pytest.mark.parametrize(
    "change",
    [
        still_allocated,
        unknown_to_the_api,
        with_its_pod,
        with_running_containers,
        with_a_pod_that_came_later,
        with_containers_of_a_pod_that_was_deleted_by_force,
        without_an_answer_of_the_runtime,
    ],
)
def test_record_stays_while_it_may_be_needed(site: Site, change: Callable[[Site], None]) -> None:
    change(site)
    site.rounds(3)
    assert site.is_kept()


def test_other_pods_of_the_node_do_not_matter(site: Site) -> None:
    site.node.take(claim_pod("q", claims=["b"]))
    site.runtime.live = frozenset({"uid-q"})
    site.rounds()
    assert not site.is_kept()


def test_claim_that_was_allocated_again_elsewhere_is_removed(site: Site) -> None:
    site.node.api.put(claim(node="n2"))
    site.rounds()
    assert not site.is_kept()


def test_claim_that_is_prepared_again_between_the_rounds_stays(site: Site) -> None:
    site.rounds(1)
    site.node.api.put(claim())
    site.node.take(claim_pod())
    site.node.prepare()
    site.rounds(1)
    assert site.is_kept()
