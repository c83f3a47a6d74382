"""Decides live resizes: whether the cards of a running pod have room for what its annotation `mgpu.io/resize` wants.

`mgpu.model.resizing` explains the protocol with the node's agent, and why no container ever has a limit above what the
ledger holds for it. `ResizeDecisions` makes the steps of the scheduler: it holds a larger share before it writes the
record, and frees a smaller one once the agent has put it into force. What is refused is tried again while the
annotation stays, because cards may come free. `scheduler.runtime` runs it on a thread.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mgpu import dialects
from mgpu.kube import Api, ApiError, Unreachable
from mgpu.kube.events import pod_reference
from mgpu.model.cards import GPU, CardState
from mgpu.model.errors import BadObject, RetryLater
from mgpu.model.ledger import Holding, Share
from mgpu.model.quantities import format_bytes
from mgpu.model.record_seals import SEAL, Subject
from mgpu.model.resizing import (
    APPLIED,
    RESIZE,
    Sizes,
    Step,
    held_shares,
    is_resizable,
    next_step,
    read_applied,
    read_sizes,
    read_wanted,
    shares_with,
    write_sizes,
)
from mgpu.settings import Settings
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.events import Warn
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.decisions.decider import pod_path
from scheduler.work_queue import MAX_PAUSE, Queue

log = logging.getLogger(__name__)

REASON = "MgpuResizeRefused"
_RETRY_SECONDS = 5.0
"""The interval at which a refused resize is tried again."""
_ATTEMPTS = 50
"""The most attempts at one decision, if the node changes during each of them."""


@dataclass(frozen=True, slots=True)
class _Resize:
    """A pod that is to be resized, as the cache has it.

    Attributes:
        shares: The shares as they were before any resize.
        sizes: The present sizes.
        wanted: The wanted bytes by container.
    """

    gpu_pod: GpuPod
    shares: tuple[Share, ...]
    sizes: Sizes
    wanted: Mapping[str, int]


class ResizeDecisions:
    """A work queue of the UIDs of pods, for one consumer thread. Any thread may call `add` and `wake`.

    Args:
        api: An API client that writes only while this replica leads (`mgpu.kube.fence`).
        warn: Creates an Event of type Warning.
        may_decide: Raises RetryLater while this replica must not decide.
    """

    def __init__(
        self,
        state: ClusterCache,
        api: Api,
        settings: Settings,
        warn: Warn,
        may_decide: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._api = api
        self._allowed = settings.scheduler.resize
        self._warn = warn
        self._may_decide = may_decide
        self._queue = Queue(clock)
        self._warned: dict[str, str] = {}  # By UID, the text of the annotation for which there was an Event.

    def add(self, uid: str, after: float = 0.0) -> None:
        """Queue this pod for `after` seconds from now, or leave it if it is queued for an earlier time."""
        self._queue.add(uid, after, self._namespace(uid))

    def _namespace(self, uid: str) -> str:
        """Return the namespace of a pod as its group in the queue, or "" if the pod is not known."""
        gpu_pod = self._state.gpu_pod(uid)
        return "" if gpu_pod is None else gpu_pod.pod.namespace

    def run(self, stop: threading.Event) -> None:
        """Process the pods that are due until `stop` is set. Call `wake` after setting it."""
        self._queue.run(self.process, stop)

    def wake(self) -> None:
        """Make `run` check its argument `stop`."""
        self._queue.wake()

    def work(self) -> None:
        """Process all pods that are due, and return."""
        while (uid := self._queue.next()) is not None:
            self.process(uid)

    def process(self, uid: str) -> None:
        """Make the next step for one pod. If it fails, retry it later, with growing pauses."""
        try:
            self._may_decide()
        except RetryLater:
            return  # The replica that decides next adds all pods that are being resized to its queue.
        try:
            again = self._attempt(uid)
        except (ApiError, Unreachable, RetryLater) as error:
            log.warning("a resize will be retried: %s", error, extra={"pod": uid})
            self._queue.add_again(uid, self._namespace(uid))
            return
        except Exception:
            # Nothing outside of this function handles errors. An error with one pod must not delay the others.
            log.exception("resize failed", extra={"pod": uid})
            again = MAX_PAUSE
        self._queue.done(uid)
        if again:
            self.add(uid, again)

    def _attempt(self, uid: str) -> float:
        """Make one step. Return the seconds until the next attempt, or 0 if the pod's next change is awaited."""
        for _ in range(_ATTEMPTS):
            gpu_pod = self._state.gpu_pod(uid)
            try:
                resize = None if gpu_pod is None else _read(gpu_pod)
            except BadObject as error:
                assert gpu_pod is not None
                self._refuse(gpu_pod, str(error))
                return MAX_PAUSE
            if resize is None or self._state.is_undecided(uid):
                self._warned.pop(uid, None)
                return 0
            snapshot = self._state.node_snapshot(resize.gpu_pod.pod.node, uid)
            # Cards that are kept free for nominated pods are not available.
            step = self._step(resize, snapshot.available_cards)
            if step.sizes != resize.sizes:
                held = _promised(resize.sizes, step.sizes)
                if not self._state.resizes.promise(resize.gpu_pod, held, snapshot.version):
                    continue
                self._write(resize, step.sizes)
            if step.refused:
                self._refuse(resize.gpu_pod, "; ".join(f"container {c}: {r}" for c, r in sorted(step.refused.items())))
                return _RETRY_SECONDS
            self._warned.pop(uid, None)
            return 0
        raise RetryLater("the node changes faster than a resize can be decided")

    def _step(self, resize: _Resize, cards: tuple[CardState, ...]) -> Step:
        requested = _requested(resize.shares, cards)
        refused = {
            name: reason
            for name, amount in sorted(resize.wanted.items())
            if (reason := self._forbidden(amount, requested.get(name)))
        }
        # What is refused is no reason to change the container at all.
        present = {name: size.limit for name, size in resize.sizes.containers.items()}
        wanted = {name: amount for name, amount in resize.wanted.items() if name not in refused}
        kept = {name: present.get(name, requested[name]) for name in refused if name in requested}
        step = next_step(
            resize.sizes,
            read_applied(resize.gpu_pod.pod.annotations),
            {**wanted, **kept},
            requested,
            lambda held: _no_room(resize, held, cards),
        )
        return Step(step.sizes, {**step.refused, **refused})

    def _forbidden(self, amount: int, requested: int | None) -> str | None:
        """Return why a container may not have this amount, however much is free."""
        if requested is None:
            return "it has no share of a card that can be resized"
        if self._allowed == "none":
            return "resizing is turned off (scheduler.resize)"
        if self._allowed == "within-request" and amount > requested:
            return f"it requests {format_bytes(requested)}, and may not have more (scheduler.resize)"
        return None

    def _write(self, resize: _Resize, sizes: Sizes) -> None:
        """Write the record with these sizes. Raises ApiError and Unreachable.

        The record is sealed again, with all of its annotations. The version of the pod is a precondition, so they are
        the ones on which the decision is based.
        """
        pod = resize.gpu_pod.pod
        # The cache stores valid records without their seals.
        record = {key: text for key, text in pod.annotations.items() if dialects.is_placement_annotation(key)}
        signed = self._state.records.sealed(
            Subject(pod.uid, pod.namespace, pod.name, pod.node), {**record, **write_sizes(sizes)}
        )
        written = {key: signed[key] for key in (*write_sizes(sizes), SEAL) if key in signed}
        meta: dict[str, Any] = {"uid": pod.uid, "resourceVersion": resize.gpu_pod.version}
        # If this fails, the promise stays: the record may have been written by this attempt or by an earlier one.
        self._api.patch(pod_path(pod.namespace, pod.name), {"metadata": {**meta, "annotations": written}})
        extra = {"pod": pod.uid, "node": pod.node, "serial": sizes.serial}
        log.info("resize written", extra=extra)

    def _refuse(self, gpu_pod: GpuPod, reason: str) -> None:
        """Create an Event, once for each text of the annotation."""
        pod = gpu_pod.pod
        text = pod.annotations.get(RESIZE, "")
        if self._warned.get(pod.uid) == text:
            return
        self._warned[pod.uid] = text
        self._warn(pod_reference(pod.namespace, pod.name, pod.uid), REASON, f"not resized: {reason}")


def _read(gpu_pod: GpuPod) -> _Resize | None:
    """Return what is to be resized, or None if the pod does not hold cards of a record. Raises BadObject."""
    pod = gpu_pod.pod
    if not pod.node or pod.ended or pod.deleting or gpu_pod.request is None or gpu_pod.finding is not None:
        return None
    if APPLIED not in pod.annotations:
        return None  # The agent has not seen the wish yet, or it cannot resize any container of the pod.
    shares = dialects.by_name(gpu_pod.request.dialect).read_placement(pod, gpu_pod.request)
    if shares is None:
        return None
    return _Resize(gpu_pod, shares, read_sizes(pod.annotations), read_wanted(pod.annotations.get(RESIZE, "")))


def _requested(shares: tuple[Share, ...], cards: tuple[CardState, ...]) -> dict[str, int]:
    """Return the bytes that each container that can be resized requests of each of its cards."""
    if any(is_resizable(share) and not (share.core or share.memory or share.ratio) for share in shares):
        return {}  # The record states the amounts of several containers together.
    found: dict[str, int] = {}
    for share in shares:
        amounts = [share.amount(state.card).memory for state in cards if share.is_on(state.card)]
        if is_resizable(share) and share.card is not None and amounts and max(amounts):
            found[share.container] = max(found.get(share.container, 0), *amounts)
    return found


def _promised(before: Sizes, after: Sizes) -> dict[str, int]:
    """Return what the containers hold until it is certain which of the two sizes they have."""
    return {
        name: max(size.held, before.containers[name].held if name in before.containers else 0)
        for name, size in after.containers.items()
    }


def _no_room(resize: _Resize, held: Mapping[str, int], cards: tuple[CardState, ...]) -> str | None:
    """Return which card has too little memory for these amounts, or None.

    Args:
        cards: The cards of the node, without what the pod itself holds.
    """
    before = _holding(held_shares(resize.shares, resize.sizes))
    after = _holding(shares_with(resize.shares, held))
    for state in cards:
        use = after.uses(state.card)
        is_more = use.memory > before.uses(state.card).memory
        if is_more and (use.memory > state.memory_free or use.ratio > state.ratio_free):
            free, wanted = format_bytes(state.memory_free), format_bytes(use.memory)
            return f"card {state.card.index} has {free} free for the pod, which would hold {wanted} of it"
    return None


def _holding(shares: tuple[Share, ...]) -> Holding:
    return Holding("", "", "", "", "", tuple(share for share in shares if share.type == GPU))
