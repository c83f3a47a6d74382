"""In which order the MtgpuPods of a node are served. Pure."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from scheduler.engine.round_robin import by_turns

T = TypeVar("T")

WRITES = 48
"""Writes of one attempt. Each takes 5 to 10 ms, so that other nodes, and other namespaces, wait for half a second."""
FINALIZERS = WRITES // 2
"""Of these, how many may begin something new; the rest is for what was begun before."""
SECONDS = 1.0
"""For the writes of one attempt: where each takes long, fewer are made."""


def in_turn(items: Iterable[T], namespace: Callable[[T], str], after: str | None) -> Iterator[T]:
    """Return the items by turns of their namespaces. after: the namespace that was served last; the next one begins."""
    return by_turns(items, namespace, lambda name: (after is not None and name <= after, name))
