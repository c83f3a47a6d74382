"""Which MtgpuPods of which namespace get the room that there is, and what they learn of each other."""

from typing import Any

from mgpu.dialects.mtgpu import MtgpuPod
from scheduler.mtgpupods.node_plan import NodePlan
from tests.scheduler.mtgpupods.scene import cards_of, mtgpupod, occupy, planned, pool, reason, said, uuid

BOUND: dict[str, Any] = {"card_uuid": uuid(0), "phase": "Running"}


def test_waiting_one_that_does_not_fit_holds_up_no_other_namespace() -> None:
    v1 = mtgpupod("v1", request=300, namespace="victim", **BOUND)
    a1 = mtgpupod("a1", request=1000, namespace="tenant", created="2026-11-21T00:00:01Z")
    v2 = mtgpupod("v2", request=200, namespace="victim", created="2026-11-21T00:00:02Z")
    found = planned(v1, a1, v2, occupy_pods=occupy(card=0))
    assert (reason(found, "a1"), reason(found, "v2")) == ("ResourceExceeded", "Bound")


def test_waiting_one_that_does_not_fit_holds_up_its_own_namespace() -> None:
    v1 = mtgpupod("v1", request=300, **BOUND)
    large = mtgpupod("large", request=1000, created="2026-11-21T00:00:01Z")
    small = mtgpupod("small", request=200, created="2026-11-21T00:00:02Z")
    found = planned(v1, large, small, occupy_pods=occupy(card=0))
    assert (reason(found, "large"), reason(found, "small")) == ("ResourceExceeded", "ResourceExceeded")


def waiting(namespace: str, count: int, at: int, request: int = 250) -> list[MtgpuPod]:
    created = f"2026-11-21T00:00:{at:02}Z"
    named = [f"{namespace}{i}" for i in range(count)]
    return [mtgpupod(name, request=request, namespace=namespace, created=created) for name in named]


def admitted(found: NodePlan) -> dict[str, int]:
    names = [held.namespace for held in found.reservations]
    return {name: names.count(name) for name in sorted(set(names))}


def test_many_of_one_namespace_leave_the_others_their_turns() -> None:
    """Those of tenant `a` came first, and would take the whole card in the order of their creation."""
    pods = [*waiting("a", 20, 1), *waiting("b", 2, 2), *waiting("c", 1, 3)]
    assert admitted(planned(*pods)) == {"a": 2, "b": 1, "c": 1}


def test_namespace_with_cards_comes_after_one_without() -> None:
    has = [mtgpupod(f"has{i}", request=250, namespace="a", **BOUND) for i in range(3)]
    pods = [*has, *waiting("a", 5, 1), *waiting("b", 1, 2)]
    found = planned(*pods, occupy_pods=occupy(card=0))
    assert set(cards_of(found)) == {"b0"}


def test_status_of_those_that_wait_stays_the_same_when_the_first_of_them_goes() -> None:
    """Else the end of one costs a write of each of the others, whose size a tenant chooses."""
    v1, first, *others = [mtgpupod(f"m{i}", request=1000, created=f"2026-11-21T00:00:0{i}Z") for i in range(5)]
    before, after = planned(v1, first, *others), planned(v1, *others)
    for i in (3, 4):
        assert said(before, f"m{i}") == said(after, f"m{i}")


def test_pod_on_the_card_is_named_to_its_own_namespace_alone() -> None:
    stranger = pool(0)  # of the namespace default
    users = [mtgpupod("mine", **BOUND), mtgpupod("theirs", namespace="other", **BOUND)]
    late = mtgpupod("late", namespace="other", created="2026-11-21T00:00:01Z")
    found = planned(*users, late, occupy_pods=occupy(card=0), others=[stranger])
    assert "default/pool is on its card" in said(found, "mine", "degraded").message
    for message in (said(found, "theirs", "degraded").message, said(found, "late").message):
        assert "default/pool" not in message
    assert "another pod is on its card" in said(found, "late").message


def test_how_full_a_card_is_is_told_to_namespaces_that_use_its_gpuid_alone() -> None:
    """A tenant may name any GPUID, and must not learn from the refusal how much of whose card is in use."""
    users = [mtgpupod("v", request=437, namespace="victim", **BOUND)]
    guess = mtgpupod("guess", request=600, namespace="tenant", created="2026-11-21T00:00:01Z")
    more = mtgpupod("more", request=600, namespace="victim", created="2026-11-21T00:00:01Z")
    found = planned(*users, guess, more, occupy_pods=occupy(card=0))
    assert "core 3.7 percent short" in said(found, "more").message
    assert reason(found, "guess") == "ResourceExceeded"
    assert "less of it is free than this MtgpuPod requests" in said(found, "guess").message
    assert "3.7" not in said(found, "guess").message
