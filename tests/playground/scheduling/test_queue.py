"""The scheduling queue: order, back-off, and pods that wait for a change."""

from collections.abc import Callable

import pytest

from playground.scheduling.queue import Event, Queue
from tests.playground.fake_cluster import Json


@pytest.fixture
def queue() -> Queue:
    return Queue(first=0.001, longest=0.001)


def waiting(name: str, priority: int = 0) -> Json:
    return {"metadata": {"name": name, "uid": name}, "spec": {"priority": priority}}


def popped(queue: Queue) -> str:
    pod = queue.pop()
    return str(pod["metadata"]["name"]) if pod else ""


def test_queue_orders_by_priority_then_arrival(queue: Queue) -> None:
    for name, priority in (("a", 0), ("b", 0), ("high", 9)):
        queue.put(waiting(name, priority))
    assert [popped(queue) for _ in range(3)] == ["high", "a", "b"]


def _move(queue: Queue) -> None:
    queue.changed()


def _update(queue: Queue) -> None:
    queue.put(waiting("a", priority=1))


@pytest.mark.parametrize("event", [_move, _update])
def test_queue_refused_pod_waits_for_a_change(queue: Queue, event: Callable[[Queue], None]) -> None:
    queue.put(waiting("a"))
    popped(queue)
    queue.refused("a")
    queue.put(waiting("b"))
    assert popped(queue) == "b"
    event(queue)
    assert popped(queue) == "a"


def test_queue_change_during_an_attempt_is_not_missed(queue: Queue) -> None:
    queue.put(waiting("a"))
    popped(queue)
    queue.changed()
    queue.refused("a")
    assert popped(queue) == "a"


def test_queue_refused_pod_waits_for_the_events_that_it_wants(queue: Queue) -> None:
    queue.put(waiting("a"))
    queue.put(waiting("b"))
    for name in ("a", "b"):
        assert popped(queue) == name
    queue.changed(Event.CLAIM, lambda pod: bool(pod["metadata"]["name"] == "b"))
    for name in ("a", "b"):
        queue.refused(name, wanted=frozenset({Event.CLAIM}))
    assert popped(queue) == "b", "the event during the attempt concerned only this pod"
    queue.changed(Event.POD)
    queue.put(waiting("c"))
    assert popped(queue) == "c"
    queue.changed(Event.CLAIM)
    assert popped(queue) == "a"


def test_queue_refused_pod_is_tried_again_after_a_long_time() -> None:
    queue = Queue(first=0.001, longest=0.001, patience=0.02)
    queue.put(waiting("a"))
    popped(queue)
    queue.refused("a", wanted=frozenset())
    assert popped(queue) == "a"


def test_queue_pod_being_bound_is_not_returned_again(queue: Queue) -> None:
    queue.put(waiting("a"))
    popped(queue)
    queue.put(waiting("a", priority=1))
    queue.changed()
    queue.close()
    assert queue.pop() is None
