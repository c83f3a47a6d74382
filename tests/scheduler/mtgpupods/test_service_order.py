"""The MtgpuPods of one namespace do not keep those of another waiting."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu.kube import ApiError, Unreachable
from scheduler.cluster.events import MtgpuPodsAffected
from scheduler.mtgpupods.fairness import WRITES, in_turn
from tests import builders as b
from tests.mtgpu_rig import Rig, items_path

ITEMS = st.lists(st.tuples(st.sampled_from("abc"), st.integers()), unique=True)


@given(ITEMS, st.sampled_from([None, "a", "b", "c", "z"]))
def test_in_turn_keeps_the_order_of_each_namespace_and_loses_none(items: Any, after: str | None) -> None:
    found = list(in_turn(items, lambda item: item[0], after))
    assert sorted(found) == sorted(items)
    for name in "abc":
        assert [item for item in found if item[0] == name] == [item for item in items if item[0] == name]


@given(ITEMS, st.sampled_from([None, "a", "b", "c"]))
def test_in_turn_serves_the_nth_of_a_namespace_before_the_next_of_any_other(items: Any, after: str | None) -> None:
    found = list(in_turn(items, lambda item: item[0], after))
    rounds = [sum(other[0] == item[0] for other in found[:i]) for i, item in enumerate(found)]
    assert rounds == sorted(rounds)


def test_in_turn_begins_after_the_namespace_that_was_served_last() -> None:
    items = [("a", 1), ("a", 2), ("b", 1), ("c", 1)]
    assert list(in_turn(items, lambda item: item[0], "a")) == [("b", 1), ("c", 1), ("a", 1), ("a", 2)]


def create(rig: Rig, namespace: str, name: str, gpuid: str, request: str = "0.001") -> None:
    if namespace != "default" and rig.cluster.storage.get("namespaces", "", namespace) is None:
        rig.cluster.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
    raw = b.mtgpupod(name, gpuid, request, namespace=namespace, memory=1 << 20)
    rig.cluster.create(items_path(namespace), {key: raw[key] for key in raw if key != "status"})


def writes(rig: Rig) -> list[str]:
    """The paths of what is written from now on, as it is written."""
    found: list[str] = []

    def record(verb: str, path: str) -> None:
        if verb != "get":
            found.append(path)

    rig.cluster.refuse = record
    return found


@pytest.mark.parametrize("victim", ["another", "victim"], ids=["before the tenant", "after the tenant"])
def test_an_mtgpupod_beside_many_of_another_namespace_is_served_in_the_first_attempt(rig: Rig, victim: str) -> None:
    for i in range(3 * WRITES):
        create(rig, "tenant", f"m{i:04}", "x", "1")
    create(rig, victim, "v", "y", "0.5")
    rig.scheduler.hear()
    found = writes(rig)
    rig.scheduler.controller.reconcile("n1")
    assert any(f"/{victim}/mtgpupods/v/status" in path for path in found)
    assert len(found) <= WRITES + 8


def test_many_mtgpupods_are_all_served_in_the_end(rig: Rig) -> None:
    for i in range(2 * WRITES):
        create(rig, "default", f"m{i:04}", "x")
    rig.settle()
    assert {raw["status"]["conditions"][0]["status"] for raw in rig.items()} == {"True"}


def test_a_pod_that_is_forbidden_is_tried_again_after_pauses_that_grow(rig: Rig) -> None:
    """A tenant makes any number of them, by a priority class that does not exist."""
    for i in range(10):
        create(rig, "default", f"m{i}", "x")
    rig.cluster.refuse = lambda verb, path: forbid() if verb == "create" and path.endswith("default/pods") else None
    rig.settle()
    tried: list[str] = []

    def count(verb: str, path: str) -> None:
        if verb == "create" and path.endswith("default/pods"):
            tried.append(path)
            forbid()

    rig.cluster.refuse = count
    for _ in range(20):
        rig.scheduler.controller.affected(MtgpuPodsAffected("n1"))
        rig.control()
    assert len(tried) <= 10
    rig.cluster.refuse = lambda *_: None
    rig.settle()
    assert all(rig.pod(f"m{i}") for i in range(10))


def slow(rig: Rig, part: str, seconds: float, error: Exception | None) -> list[str]:
    """Let each write of a path with this part take so long; return those paths, as they are written."""
    found: list[str] = []

    def refuse(verb: str, path: str) -> None:
        if verb != "get" and part in path:
            found.append(path)
            rig.clock.now += seconds
            if error is not None:
                raise error

    rig.cluster.refuse = refuse
    return found


def bound(rig: Rig, namespace: str, name: str) -> bool:
    status = rig.cluster.get(f"{items_path(namespace)}/{name}").get("status") or {}
    return bool(status.get("BoundDeviceID"))


ERRORS = [Unreachable("Read timed out"), ApiError(504, "Timeout", ""), None]


@pytest.mark.parametrize("error", ERRORS, ids=["no answer", "refused", "answered"])
def test_slow_writes_of_a_tenant_leave_another_tenant_two_thirds_of_the_time(rig: Rig, error: Exception | None) -> None:
    for i in range(20):
        create(rig, "tenant", f"m{i:04}", "x", "1")
    create(rig, "victim", "v", "y", "0.5")
    tried = slow(rig, "/tenant/", 10.0, error)
    begun = rig.clock.now
    for _ in range(6):
        rig.round()
        rig.clock.now += 1
    assert bound(rig, "victim", "v")
    for _ in range(100):
        rig.round()
        rig.clock.now += 1
    assert 0 < 10 * len(tried) <= 0.4 * (rig.clock.now - begun)


def test_one_whose_writes_time_out_is_tried_after_pauses_that_grow(rig: Rig) -> None:
    """Its node and the other MtgpuPods of its namespace are served meanwhile."""
    for name in "ab":
        create(rig, "default", name, name, "1")
    tried = slow(rig, "/mtgpupods/a/status", 10.0, Unreachable("Read timed out"))
    begun = rig.clock.now
    for _ in range(300):
        rig.round()
        rig.clock.now += 1
    assert bound(rig, "default", "b")
    assert 3 <= len(tried) <= (rig.clock.now - begun) / 60 + 6
    rig.cluster.refuse = lambda *_: None
    rig.settle()
    assert bound(rig, "default", "a")


def test_mtgpupod_that_changes_all_the_time_puts_off_nobody(rig: Rig) -> None:
    create(rig, "tenant", "a", "x", "1")
    create(rig, "victim", "v", "y", "1")

    def conflict(verb: str, path: str) -> None:
        if verb == "patch" and "/tenant/" in path:
            raise ApiError(409, "Conflict", "the object has been modified")

    rig.cluster.refuse = conflict
    for _ in range(4):
        rig.round()
    assert bound(rig, "victim", "v")
    assert not bound(rig, "tenant", "a")


def forbid() -> None:
    raise ApiError(403, "Forbidden", "no PriorityClass with name nope was found")
