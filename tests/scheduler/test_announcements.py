"""Announcements make kube-scheduler retry pods when cards come free, and stay rare."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mgpu.kube import ApiError, Unreachable
from mgpu.model.cards import Card
from mgpu.model.device_object import has_gained_capacity, write_device
from mgpu.model.errors import RetryLater
from mgpu.model.gpu_requests import ContainerRequest, GpuRequest, Placement
from mgpu.model.pods import Node
from scheduler.announcements import ANNOTATION, NODE_PAUSE_SECONDS, PAUSE_SECONDS, WATCH_LAG_SECONDS, Announcements
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.events import CardsFreed, NodeMayFit
from scheduler.cluster.reservations import Reservation
from tests import builders as b
from tests.clock import Clock
from tests.scheduler.fake import SETTINGS


class NodesApi:
    """Takes patches of nodes; `error`: what it raises instead; `gone`: the nodes that it does not find."""

    def __init__(self) -> None:
        self.patched: list[str] = []
        self.error: Exception | None = None
        self.gone: set[str] = set()

    def patch(self, path: str, body: dict[str, Any]) -> None:
        if self.error:
            raise self.error
        if path.rpartition("/")[2] in self.gone:
            raise ApiError(404, "NotFound", path)
        assert list(body["metadata"]["annotations"]) == [ANNOTATION]
        self.patched.append(path.rpartition("/")[2])


class Announcing:
    """A state with a node of two cards, and its announcements; events as if the process was in sync."""

    def __init__(self) -> None:
        self.clock, self.api, self.leading = Clock(), NodesApi(), False
        api: Any = self.api
        self.announcements = Announcements(api, self.may_decide, self.clock)
        self.state = ClusterCache(SETTINGS, self.clock)
        self.state.subscribe(CardsFreed, self.announcements.cards_freed)
        self.state.subscribe(NodeMayFit, self.announcements.node_may_fit)
        self.state.node_changed(b.node("n1"))
        self.device(*b.cards(2))
        self.leading = True

    def may_decide(self) -> None:
        if not self.leading:
            raise RetryLater("another replica leads")

    def device(self, *cards: Card) -> None:
        self.state.device_changed(write_device(Node("n1"), "", cards))

    def announced(self, after: float = 0.0) -> list[str]:
        self.clock.now += after
        self.announcements.work()
        patched, self.api.patched = self.api.patched, []
        return patched


@pytest.fixture
def one() -> Announcing:
    return Announcing()


FIRST, SECOND = b.cards(2)
ILL = replace(FIRST, healthy=False)


@pytest.mark.parametrize(
    ("before", "after", "more"),
    [
        ((ILL, SECOND), (FIRST, SECOND), True),
        ((FIRST,), (FIRST, SECOND), True),
        ((FIRST,), (replace(FIRST, memory=FIRST.memory * 2),), True),
        ((FIRST, SECOND), (FIRST, SECOND), False),
        ((FIRST, SECOND), (FIRST,), False),
        ((FIRST, SECOND), (ILL, SECOND), False),
        ((FIRST,), (replace(FIRST, memory=FIRST.memory // 2),), False),
    ],
)
def test_device_gain_is_more_or_better_cards(before: tuple[Card, ...], after: tuple[Card, ...], more: bool) -> None:
    assert has_gained_capacity(before, after) is more


def test_card_that_is_healthy_again_is_announced(one: Announcing) -> None:
    one.device(ILL, SECOND)
    assert one.announced() == []
    one.device(FIRST, SECOND)
    assert one.announced() == ["n1"]


def test_released_reservation_is_announced(one: Announcing) -> None:
    request = GpuRequest("mgpu", (ContainerRequest("c", core=500),))
    decision = Reservation("uid-p", "default", "p", "n1", request, Placement((("c", (0,)),)), {})
    assert one.state.reservations.reserve(decision, one.state.node_snapshot("n1", "").version)
    one.state.reservations.cancel(decision)
    assert one.announced() == ["n1"]


def test_starting_process_announces_nothing(one: Announcing) -> None:
    assert one.announced() == []


def test_flapping_card_is_announced_once_per_pause(one: Announcing) -> None:
    announced = []
    for _ in range(10):
        one.device(ILL, SECOND)
        one.device(FIRST, SECOND)
        announced += one.announced(NODE_PAUSE_SECONDS / 10)
    assert announced == ["n1"]
    assert one.announced(NODE_PAUSE_SECONDS) == ["n1"]
    assert one.announced(NODE_PAUSE_SECONDS) == []


def test_replica_that_does_not_decide_announces_nothing(one: Announcing) -> None:
    one.leading = False
    one.device(ILL, SECOND)
    one.device(FIRST, SECOND)
    one.leading = True
    assert one.announced(NODE_PAUSE_SECONDS) == []


@pytest.mark.parametrize(
    "error", [Unreachable("no answer"), ApiError(503, "ServiceUnavailable", ""), ApiError(429, "TooManyRequests", "")]
)
def test_announcement_after_transient_error_is_retried(one: Announcing, error: Exception) -> None:
    one.device(ILL, SECOND)
    one.device(FIRST, SECOND)
    one.api.error = error
    assert one.announced() == []
    one.api.error = None
    assert one.announced(NODE_PAUSE_SECONDS) == ["n1"]


@pytest.mark.parametrize("error", [ApiError(404, "NotFound", "n1"), ApiError(403, "Forbidden", "")])
def test_announcement_after_permanent_error_is_dropped(one: Announcing, error: Exception) -> None:
    """The node is gone, or the right to patch it was never given."""
    one.device(ILL, SECOND)
    one.device(FIRST, SECOND)
    one.api.error = error
    assert one.announced() == []
    one.api.error = None
    assert one.announced(NODE_PAUSE_SECONDS) == []


def bound(name: str = "p", phase: str = "Running", node: str = "n1") -> dict[str, Any]:
    record = {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": "0"}
    return b.share(name, annotations=record, node=node, phase=phase)


def nominated(name: str = "p") -> dict[str, Any]:
    raw = b.share(name)
    raw["status"]["nominatedNodeName"] = "n1"
    return raw


@pytest.mark.parametrize(
    ("before", "what"),
    [
        (bound(), lambda state: state.pod_gone(bound())),
        (bound(), lambda state: state.pod_changed(bound(phase="Succeeded"))),
        (nominated(), lambda state: state.pod_gone(nominated())),
        (nominated(), lambda state: state.pod_changed(bound(node="n2"))),
        (bound(), lambda state: state.node_changed(b.node("n1", labels={"gpu": "yes"}))),
    ],
)
def test_change_after_a_rejection_is_announced(
    one: Announcing, before: dict[str, Any], what: Callable[[ClusterCache], None]
) -> None:
    one.state.pod_changed(before)
    one.announced()
    one.announcements.pod_rejected(0.0)
    one.clock.now += WATCH_LAG_SECONDS - 1
    assert one.announced() == []
    what(one.state)
    assert one.announced() == ["n1"]


def test_change_during_a_rejection_is_announced(one: Announcing) -> None:
    one.state.pod_changed(bound())
    one.announced()
    one.state.pod_gone(bound())
    one.announcements.pod_rejected(0.0)
    assert one.announced() == ["n1"]


def test_change_during_a_slow_filter_is_announced(one: Announcing) -> None:
    one.state.pod_changed(bound())
    one.announced()
    one.clock.now += 1
    one.state.pod_gone(bound())
    one.clock.now += 8
    one.announcements.pod_rejected(9.0)
    assert one.announced() == ["n1"]


def test_change_before_the_filter_began_is_not_announced(one: Announcing) -> None:
    one.state.pod_changed(bound())
    one.announced()
    one.state.pod_gone(bound())
    one.clock.now += 0.1
    one.announcements.pod_rejected(0.05)
    assert one.announced() == []


def test_deleted_node_is_not_announced_and_delays_no_other(one: Announcing) -> None:
    one.state.node_changed(b.node("n2"))
    for pod in (bound("p", node="n1"), bound("q", node="n2")):
        one.state.pod_changed(pod)
    one.state.node_gone(b.node("n1"))
    one.announced()
    one.announcements.pod_rejected(0.0)
    one.state.pod_gone(bound("p", node="n1"))
    one.state.pod_gone(bound("q", node="n2"))
    assert one.announced() == ["n2"]


def test_change_long_after_a_rejection_is_not_announced(one: Announcing) -> None:
    one.state.pod_changed(bound())
    one.announced()
    one.announcements.pod_rejected(0.0)
    one.clock.now += WATCH_LAG_SECONDS
    one.state.pod_gone(bound())
    assert one.announced(PAUSE_SECONDS) == []
    one.announcements.pod_rejected(0.0)
    assert one.announced() == []


def test_many_changes_are_announced_once_per_second(one: Announcing) -> None:
    for i in range(9):
        one.announcements.pod_rejected(0.0)
        one.announcements.node_may_fit(NodeMayFit(f"n{i}"))
    assert one.announced() == ["n0"]
    one.announcements.node_may_fit(NodeMayFit("n9"))
    assert one.announced() == []
    assert one.announced(PAUSE_SECONDS) == ["n9"]


def test_cards_of_many_nodes_are_announced_once(one: Announcing) -> None:
    for i in range(9):
        one.announcements.cards_freed(CardsFreed(f"n{i}"))
    assert one.announced() == ["n0"]
    assert one.announced(2 * NODE_PAUSE_SECONDS) == []
    one.announcements.cards_freed(CardsFreed("n1"))
    one.announcements.cards_freed(CardsFreed("n2"))
    assert one.announced() == ["n1"]


def test_deleted_node_is_replaced_by_another(one: Announcing) -> None:
    one.api.gone = {"n1", "n2"}
    for i in (1, 2, 3, 4):
        one.announcements.cards_freed(CardsFreed(f"n{i}"))
    assert one.announced() == ["n3"]


def test_all_nodes_are_retried_after_a_transient_error(one: Announcing) -> None:
    for i in (1, 2):
        one.announcements.cards_freed(CardsFreed(f"n{i}"))
    one.api.error = Unreachable("no answer")
    assert one.announced() == []
    one.api.error = None
    one.api.gone = {"n1"}
    assert one.announced(NODE_PAUSE_SECONDS) == ["n2"]
