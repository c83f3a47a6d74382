"""Puts live resizes into force on this node, and reports that to the scheduler.

`mgpu.model.resizing` explains the protocol. The agent says which containers of a pod can be resized as soon as the pod
wants it. Whenever the record has new limits, it puts them into force and writes their serial number. What fails is
tried again, and reported in an Event of the pod.
"""

import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

from deviceplugin.event_loop import Wakeup
from deviceplugin.isolation.backend import Unable
from deviceplugin.pods.capacity_check import holding
from deviceplugin.pods.gpu_pod import GpuPod
from deviceplugin.pods.identity import Target
from mgpu.model.cards import Card
from mgpu.model.errors import BadObject
from mgpu.model.ledger import Share
from mgpu.model.resizing import (
    RESIZE,
    RESIZED,
    Applied,
    Sizes,
    read_applied,
    read_sizes,
    read_wanted,
    write_applied,
)

log = logging.getLogger(__name__)

REASON = "MgpuResizeRefused"
_RETRY_SECONDS = 2.0
"""The interval at which a limit that could not be put into force is tried again: the use of a program may fall."""


class Pods(Protocol):
    """The part of `NodePods` that is used here. `all` returns the same object until something changes."""

    def all(self) -> tuple[GpuPod, ...]: ...
    def amend(self, gpu_pod: GpuPod, annotations: Mapping[str, str]) -> None: ...


class Limits(Protocol):
    """The part of `isolation.isolation.Isolation` that is used here."""

    def unresizable(self, target: Target) -> Unable | None: ...
    async def resize(self, target: Target) -> Unable | None: ...


class Receipts(Protocol):
    """The part of `Remnants` that is used here."""

    def write_receipt(
        self, uid: str, shares: Sequence[Share], cards: Sequence[Card], gpu_pod: GpuPod | None
    ) -> None: ...


class Writer(Protocol):
    """The part of `RecordWriter` that is used here."""

    def write(self, gpu_pod: GpuPod, annotations: Mapping[str, str]) -> None: ...


class Resizer:
    """The resizes of the pods of this node. Use it on one event loop.

    Args:
        cards: A function that returns the whole cards of the node, and its slices.
        offers_freed_amounts: A function that returns whether the node offers what pods have freed. Before that, the
            scheduler must not place pods there, because the kubelet would fail them.
        changed: A signal that wakes coroutines when pods change.
        refused: A function that reports that a pod is not resized, and why.
    """

    def __init__(
        self,
        pods: Pods,
        limits: Limits,
        receipts: Receipts,
        writer: Writer,
        cards: Callable[[], Sequence[Card]],
        offers_freed_amounts: Callable[[], bool],
        changed: Wakeup,
        refused: Callable[[GpuPod, str], None],
    ) -> None:
        self._pods = pods
        self._limits = limits
        self._receipts = receipts
        self._writer = writer
        self._cards = cards
        self._offers_freed_amounts = offers_freed_amounts
        self._changed = changed
        self._refused = refused
        self._said: dict[str, str] = {}

    def keep_only(self, uids: Collection[str]) -> None:
        self._said = {uid: text for uid, text in self._said.items() if uid in uids}

    async def run(self) -> None:
        """Put the limits of all records into force, until cancelled. Call this after all pods have been read."""
        while True:
            pods = self._pods.all()
            is_done = await self.reconcile(pods)
            if self._pods.all() is pods:  # No `await` may come between this check and the wait.
                await self._changed.wait(None if is_done else _RETRY_SECONDS)

    async def reconcile(self, pods: Iterable[GpuPod]) -> bool:
        """Return whether all is in force that these pods want and that their records have."""
        is_done = True
        for gpu_pod in pods:
            annotations = gpu_pod.pod.annotations
            if (RESIZE in annotations or RESIZED in annotations) and not gpu_pod.pod.ended and gpu_pod.shares:
                is_done = await self._reconcile(gpu_pod) and is_done
        return is_done

    async def _reconcile(self, gpu_pod: GpuPod) -> bool:
        sizes, applied = read_sizes(gpu_pod.pod.annotations), read_applied(gpu_pod.pod.annotations)
        resizable, problems = self._resizable(gpu_pod, applied.containers)
        problem = await self._apply(gpu_pod, sizes, applied) if sizes.containers else None
        problems += [problem] if problem else []
        is_done = problem is None and (applied.serial == sizes.serial or self._offers_freed_amounts())
        now = Applied(sizes.serial if is_done else max(0, applied.serial), resizable)
        if now != applied and resizable:
            annotations = write_applied(now)
            self._pods.amend(gpu_pod, annotations)
            self._writer.write(gpu_pod, annotations)
        self._report(gpu_pod, problems)
        return is_done and not problems

    def _resizable(self, gpu_pod: GpuPod, before: frozenset[str]) -> tuple[frozenset[str], list[str]]:
        """Return the containers that can be resized, and why others that should be resized cannot.

        A container that has not run yet is in neither. It is considered once it runs.
        """
        try:
            wanted = read_wanted(gpu_pod.pod.annotations.get(RESIZE, "")).keys()
        except BadObject:
            return before, []  # The scheduler reports that.
        found, problems = set(before), []
        for name in sorted(wanted & gpu_pod.started_containers - before):
            if unable := self._limits.unresizable(Target(gpu_pod, name)):
                problems.append(f"container {name}: {unable.reason}")
            else:
                found.add(name)
        return frozenset(found), problems

    async def _apply(self, gpu_pod: GpuPod, sizes: Sizes, applied: Applied) -> str | None:
        """Put the limits of the record into force, unless they are. Return why that fails, or None."""
        cards = self._cards()
        try:
            # The receipt comes first: if the pod is deleted, its containers go on using what they are allowed.
            self._receipts.write_receipt(gpu_pod.pod.uid, holding(gpu_pod, cards).shares, cards, gpu_pod)
        except OSError as error:
            return f"receipt not written: {error}"
        if applied.serial == sizes.serial:
            return None
        for name in sorted(sizes.containers):
            if unable := await self._limits.resize(Target(gpu_pod, name)):
                return unable.reason
        log.info("resized", extra={"pod": gpu_pod.pod.uid, "serial": sizes.serial})
        return None

    def _report(self, gpu_pod: GpuPod, problems: Sequence[str]) -> None:
        """Report problems once, until there are others. The amounts in the texts change all the time."""
        uid = gpu_pod.pod.uid
        if not problems:
            self._said.pop(uid, None)
            return
        text = "; ".join(problems)
        kind = re.sub(r"\d+", "0", text) + gpu_pod.pod.annotations.get(RESIZE, "")
        if self._said.get(uid) != kind:
            self._said[uid] = kind
            self._refused(gpu_pod, f"not resized: {text}")
