"""The queue hands out names in turns between groups."""

from scheduler.work_queue import Queue
from tests.clock import Clock


def handed_out(queue: Queue) -> list[str]:
    found = []
    while (name := queue.next()) is not None:
        found.append(name)
    return found


def test_names_of_one_group_come_in_the_order_in_which_they_are_due() -> None:
    queue = Queue(clock := Clock(0))
    for name, after in (("c", 3), ("a", 1), ("b", 2)):
        queue.add(name, after)
    assert queue.next() is None
    clock.now = 2
    assert handed_out(queue) == ["a", "b"]
    clock.now = 3
    assert handed_out(queue) == ["c"]


def test_many_names_of_one_group_delay_another_group_by_one_turn() -> None:
    queue = Queue(Clock(0))
    for i in range(1000):
        queue.add(f"hostile-{i}", group="hostile")
    queue.add("first", group="ordinary")
    queue.add("second", group="ordinary")
    assert {"first", "second"} < set(handed_out(queue)[:4])


def test_name_that_is_added_again_for_an_earlier_time_is_handed_out_once() -> None:
    queue = Queue(clock := Clock(0))
    queue.add("a", 5, group="x")
    queue.add("a", 1, group="x")
    clock.now = 9
    assert handed_out(queue) == ["a"]
