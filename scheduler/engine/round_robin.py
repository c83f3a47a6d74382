"""Groups take turns: one item of each group after the other. Pure."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def by_turns(items: Iterable[T], group: Callable[[T], str], rank: Callable[[str], Any]) -> Iterator[T]:
    """Return the items, one of each group after the other, those of a group in their order.

    What one group has a thousand times delays another group by one item. rank: the group of the lowest rank begins.
    """
    queues: dict[str, deque[T]] = {}
    for item in items:
        queues.setdefault(group(item), deque()).append(item)
    waiting = deque(queues[name] for name in sorted(queues, key=rank))
    while waiting:
        items_of_one = waiting.popleft()
        yield items_of_one.popleft()
        if items_of_one:
            waiting.append(items_of_one)
