import copy
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from mgpu.kube import ApiError, Unreachable
from mgpu.kube.leader import LEASE_SECONDS, Leader
from mgpu.version import VERSION_ANNOTATION, own_version

PATH = "/apis/coordination.k8s.io/v1/namespaces/mgpu-system/leases"


class Leases:
    """An API server with one Lease."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.reachable = True
        self.version = 0

    def get(self, path: str) -> dict[str, Any]:
        self._reach()
        assert path == f"{PATH}/l"
        if self.lease is None:
            raise ApiError(404, "NotFound", path)
        return copy.deepcopy(self.lease)

    def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self._reach()
        assert path == PATH
        if self.lease is not None:
            raise ApiError(409, "AlreadyExists", path)
        return self._put(body)

    def replace(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self._reach()
        assert self.lease is not None
        if body["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", path)
        return self._put(body)

    def _put(self, body: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        self.lease = copy.deepcopy(body)
        self.lease["metadata"]["resourceVersion"] = str(self.version)
        return self.lease

    def _reach(self) -> None:
        if not self.reachable:
            raise Unreachable("no answer")


class World:
    def __init__(self) -> None:
        self.api, self.now = Leases(), 100.0
        client: Any = self.api
        self.elsewhere = False
        self.landing: Callable[[], object] = bool
        self.a, self.b = (
            Leader(
                client,
                "mgpu-system",
                "l",
                name,
                lambda: self.now,
                should_yield=lambda _: self.elsewhere,
                wait_for_writes=lambda: self.landing(),
            )
            for name in "ab"
        )


@pytest.fixture
def world() -> World:
    return World()


def test_the_first_one_leads(world: World) -> None:
    world.a.round()
    world.b.round()
    assert (world.a.leading, world.b.leading) == (True, False)
    assert world.a.term == 1


def test_who_waits_for_the_lease_looks_more_often_than_who_has_it(world: World) -> None:
    waits: list[float] = []

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0)
            self.set()
            return True

    world.a.round()
    world.b.run(Stop())
    world.a.run(Stop())
    assert 2 * waits[0] < waits[1] < LEASE_SECONDS / 3


def test_never_two_at_once_while_the_leader_cannot_renew(world: World) -> None:
    world.a.round()
    world.b.round()
    for _ in range(LEASE_SECONDS + 5):
        world.now += 1
        world.b.round()
        assert not (world.a.leading and world.b.leading)
    assert world.b.leading


def test_a_leader_without_the_api_stops_before_its_lease_ends(world: World) -> None:
    world.a.round()
    world.api.reachable = False
    world.now += 10
    world.a.round()
    assert not world.a.leading


def test_a_leader_that_renews_stays(world: World) -> None:
    world.a.round()
    for _ in range(60):
        world.now += 2
        world.a.round()
        world.b.round()
    assert (world.a.leading, world.b.leading, world.a.term) == (True, False, 1)


def test_who_is_answered_what_is_no_lease_asks_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(world.api, "get", lambda _: {})
        world.a.round()
    assert not world.a.leading
    world.a.round()
    assert world.a.leading


def test_leading_again_after_a_pause_is_a_new_term(world: World) -> None:
    world.a.round()
    world.now += 12
    world.a.round()
    assert (world.a.leading, world.a.term) == (True, 2)


def test_so_it_is_where_the_pause_is_within_the_round_that_renews(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new term begins after the pause, so that work which was refused during the pause is tried again."""
    world.a.round()
    world.now += 9
    seen, get = [], world.api.get

    def slow(path: str) -> dict[str, Any]:
        world.now += 2
        seen.append(world.a.leading)
        return get(path)

    with monkeypatch.context() as patched:
        patched.setattr(world.api, "get", slow)
        world.a.round()
    assert seen == [False]
    assert (world.a.leading, world.a.term) == (True, 2)


def test_given_up_it_is_free_at_once(world: World) -> None:
    world.a.round()
    world.b.round()
    world.a.release()
    assert not world.a.leading
    world.b.round()
    assert world.b.leading
    assert world.api.lease is not None
    assert world.api.lease["spec"]["leaseTransitions"] == 2


def test_until_what_was_begun_has_landed_nobody_leads(world: World) -> None:
    world.a.round()
    seen = []

    def landing() -> None:
        world.b.round()
        seen.append((world.a.leading, world.b.leading))

    world.landing = landing
    world.a.release()
    world.b.round()
    assert seen == [(False, False)]
    assert world.b.leading


def test_another_ones_turn(world: World) -> None:
    """Who does not seek the lease knows all the same for how long it has stood still, when its own turn comes."""
    world.a.round()
    world.elsewhere = True
    world.b.round()
    world.now += LEASE_SECONDS
    world.b.round()
    assert [world.b.leading, world.b.term] == [False, 0]
    world.elsewhere = False
    world.b.round()
    assert [world.b.leading, world.b.term] == [True, 1]
    world.elsewhere = True
    world.b.round()
    assert [world.b.leading, world.b.term] == [False, 1]
    assert world.api.lease is not None
    assert world.api.lease["spec"]["holderIdentity"] == ""


def test_the_slower_of_two_writers_does_not_lead(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.a.round()
    world.a.release()
    stale = world.api.get(f"{PATH}/l")
    world.b.round()
    with monkeypatch.context() as patched:
        patched.setattr(world.api, "get", lambda _: stale)
        world.a.round()
    assert (world.a.leading, world.b.leading) == (False, True)


def test_a_clock_in_the_record_is_not_believed(world: World) -> None:
    world.a.round()
    assert world.api.lease is not None
    world.api.lease["spec"]["renewTime"] = "1999-01-01T00:00:00Z"
    world.b.round()
    assert not world.b.leading


def test_duration_in_the_record_is_not_believed(world: World) -> None:
    world.a.round()
    assert world.api.lease is not None
    world.api.lease["spec"] |= {"holderIdentity": "stolen", "leaseDurationSeconds": (1 << 31) - 1}
    world.b.round()
    world.now += LEASE_SECONDS + 1
    world.b.round()
    assert world.b.leading


def test_number_of_transitions_that_cannot_be_counted_on_begins_anew(world: World) -> None:
    world.a.round()
    assert world.api.lease is not None
    world.api.lease["spec"] |= {"holderIdentity": "", "leaseTransitions": (1 << 31) - 1}
    world.b.round()
    assert (world.b.leading, world.api.lease["spec"]["leaseTransitions"]) == (True, 0)


def test_the_leader_says_its_version_beside_what_others_say(world: World) -> None:
    world.a.round()
    assert world.api.lease is not None
    world.api.lease["metadata"]["annotations"] = {"theirs": "x", VERSION_ANNOTATION: "0.0.1"}
    world.a.round()
    assert world.api.lease["metadata"]["annotations"] == {"theirs": "x", VERSION_ANNOTATION: own_version()}


def test_machine_that_was_suspended_does_not_lead_although_its_monotonic_clock_stood_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clocks = {time.CLOCK_BOOTTIME: 100.0, time.CLOCK_MONOTONIC: 50.0}
    monkeypatch.setattr(time, "clock_gettime", clocks.__getitem__)
    monkeypatch.setattr(time, "monotonic", lambda: clocks[time.CLOCK_MONOTONIC])
    client: Any = Leases()
    leader = Leader(client, "mgpu-system", "l", "a")
    leader.round()
    assert (leader.leading, leader.may_write) == (True, True)
    clocks[time.CLOCK_BOOTTIME] += LEASE_SECONDS
    assert (leader.leading, leader.may_write) == (False, False)


def test_writes_go_on_while_the_lease_is_given_up_and_end_with_it(world: World) -> None:
    world.a.round()
    during: list[tuple[bool, bool]] = []
    world.landing = lambda: during.append((world.a.leading, world.a.may_write))
    world.a.release()
    assert during == [(False, True)]
    assert not world.a.may_write


def test_leader_that_lost_its_lease_writes_nothing_more(world: World) -> None:
    world.a.round()
    world.now += LEASE_SECONDS + 1
    assert not world.a.may_write
    world.b.round()
    world.now += LEASE_SECONDS + 1
    world.b.round()
    assert world.b.may_write
    world.a.round()
    assert not world.a.may_write


def test_release_of_a_lease_whose_spec_was_removed_writes_nothing(world: World) -> None:
    world.a.round()
    assert world.api.lease is not None
    del world.api.lease["spec"]
    world.a.release()
    assert not world.a.leading
    assert "spec" not in world.api.lease
