"""In which order the MtgpuPods of a node are served. Pure."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

WRITES = 48
"""Writes of one attempt. Each takes 5 to 10 ms, so that other nodes, and other namespaces, wait for half a second."""
FINALIZERS = WRITES // 2
"""Of these, how many may begin something new; the rest is for what was begun before."""
SECONDS = 1.0
"""For the writes of one attempt: where each takes long, fewer are made."""


def in_turn(items: Iterable[T], namespace: Callable[[T], str], after: str | None) -> Iterator[T]:
    """Return the items, one of each namespace after the other, those of a namespace in their order.

    So what one tenant has a thousand times delays another tenant by one of them. after: the namespace that was served
    last; the next one begins.
    """
    queues: dict[str, deque[T]] = {}
    for item in items:
        queues.setdefault(namespace(item), deque()).append(item)
    names = sorted(queues)
    order = [*(n for n in names if after is not None and n > after), *(n for n in names if after is None or n <= after)]
    waiting = deque(queues[name] for name in order)
    while waiting:
        items_of_one = waiting.popleft()
        yield items_of_one.popleft()
        if items_of_one:
            waiting.append(items_of_one)
