"""Lets groups, such as namespaces, take turns, so that no group can delay the others by many items.

The MtgpuPod controller and the partition controller use it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def by_turns(items: Iterable[T], group: Callable[[T], str], rank: Callable[[str], Any]) -> Iterator[T]:
    """Yield the items, one from each group in turn. The items of a group keep their order.

    Args:
        group: The function that returns the group of an item.
        rank: The function that returns the rank of a group. Groups with a lower rank come first in each turn.
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
