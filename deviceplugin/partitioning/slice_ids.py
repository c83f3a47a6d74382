"""The device ids of a type of slices: one per slice, of no slice in particular. Pure.

Pods keep the ids that they hold. An id is never used again for what comes later, so that one which the kubelet knows
stands for the list that it was first in, and not for an older one.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import count


def slice_ids(
    slices: Iterable[tuple[str, bool]], before: Iterable[str], held: Mapping[str, str], fresh: Iterator[int]
) -> dict[str, bool]:
    """Every id and whether it is healthy. slices: of each the UID of the pod that has it, "" for none, and its health.

    before: the ids so far; those that are free stay as long as they are needed. held: id → UID of the pod that holds
    it. An unhealthy slice's id is one that its pod holds, else a free one.
    """
    rows = sorted(slices)
    free = sorted({*before} - held.keys(), key=in_order)[: max(0, len(rows) - len(held))]
    free += (str(next(fresh)) for _ in range(len(rows) - len(held) - len(free)))
    ids = dict.fromkeys([*sorted(held, key=in_order), *free], True)
    for pod, healthy in rows:
        if not healthy:
            own = (i for i in ids if ids[i] and held.get(i, "") == pod)
            found = next(own, None) or next((i for i in reversed(ids) if ids[i]), None)
            if found is not None:
                ids[found] = False
    return ids


def after(ids: Iterable[str]) -> Iterator[int]:
    """Numbers above all of these."""
    return count(1 + max((int(i) for i in ids if i.isdecimal()), default=-1))


def in_order(name: str) -> tuple[int, str]:
    return len(name), name
