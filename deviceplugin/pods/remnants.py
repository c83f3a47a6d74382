"""Remnants: deleted pods whose containers still run. They hold the cards that they were given until they have ended.

Deleting a pod and then deleting it by force removes its object at once, while the kubelet lets the containers run for
the grace period of the first deletion: up to years, if they ignore SIGTERM. A stolen token can mark a pod as ended. So
the API does not decide when a card is free: the container runtime does. Where it is not asked or does not answer, such
a pod holds its cards for its grace period, at most `LONGEST_SECONDS`.

`Remnants` knows them, by receipts (`deviceplugin.pods.receipts`). `ForcedStops` kills those whose object has been gone
for `STOP_SECONDS`: a quota does not count such a pod, nothing can evict it, and it keeps its cards. `remove_gone_pods`
removes what else the agent keeps of pods, once they are neither in the API nor remnants. The agent runs all three.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from deviceplugin.event_loop import Wakeup
from deviceplugin.pods.gpu_pod import GRACE_SECONDS, GpuPod, is_static, kubelets_uid
from deviceplugin.pods.node_pods import NodePods
from deviceplugin.pods.receipts import Receipt, Receipts, device_rows, merge_by_card
from mgpu.model.cards import Card
from mgpu.model.device_checkpoints import DELETED_POD, CheckpointEntry
from mgpu.model.errors import RetryLater
from mgpu.model.ledger import Holding, Share

log = logging.getLogger(__name__)

LONGEST_SECONDS = 3600.0
"""Without an answer of the runtime. The author of a pod chooses its grace period and may have ended its containers
already: a longer bound would let one second of use hold a card for days."""
STOP_SECONDS = 60.0
"""After the object has gone. Force deletion promises a pod no time at all; this lets checkpoints be written."""
_POLL_SECONDS = 1.0
_MAX_QUERIES = 8
"""Concurrent queries to the runtime."""
_STOP_POLL_SECONDS = 5.0
_LONGEST_STOP_PAUSE = 60.0
_LIST_SECONDS = 5.0


class Runtime(Protocol):
    """What is needed of `deviceplugin.pods.container_runtime`."""

    async def is_running(self, uid: str, *, sandbox: bool) -> bool:
        """Return whether a container of the pod runs, or, with `sandbox`, may still be started. Raises RetryLater."""


class Remnants:
    """Used on one event loop; `holdings`, `rows` and `remains` from any thread.

    Args:
        receipts: what pods were given.
        pods: the pods of this node as the API has them.
        runtime: the container runtime.
        changed: is woken when a remnant appears or ends.

    Attributes:
        removed: how often remnants have ended so far.
    """

    def __init__(self, receipts: Receipts, pods: NodePods, runtime: Runtime, changed: Wakeup) -> None:
        self._receipts = receipts
        self._pods = pods
        self._runtime = runtime
        self._changed = changed
        self._resumed = False
        # When each remnant was first seen here, and when its object was first missing.
        self._since: dict[str, float] = {}
        self._missing_since: dict[str, float] = {}
        self._held: tuple[Receipt, ...] = ()
        self.removed = 0

    def recover(self) -> None:
        """Take over the receipts of the agent before this one."""
        self._receipts.read()

    def resume(self, given: Iterable[tuple[GpuPod, Sequence[Share]]], cards: Sequence[Card]) -> None:
        """Begin to look for remnants: all pods of the node are known now, so a receipt without a pod is a remnant's.

        Args:
            given: the pods that have run, with what they hold: an agent before receipts may have started them.
            cards: all devices of the node.
        """
        for gpu_pod, shares in given:
            if gpu_pod.pod.uid not in self._receipts.all():
                self.try_write_receipt(gpu_pod.pod.uid, shares, cards, gpu_pod)
        self._resumed = True
        self._changed.wake()

    def write_receipt(self, gpu_pod: GpuPod, shares: Sequence[Share], cards: Sequence[Card]) -> None:
        """Write down what the pod is given, before any of its containers can start with it. Raises OSError."""
        self._write(gpu_pod.pod.uid, shares, cards, gpu_pod)

    def try_write_receipt(
        self, uid: str, shares: Sequence[Share], cards: Sequence[Card], gpu_pod: GpuPod | None = None
    ) -> None:
        """Write down what a pod has from others: an earlier agent, another plugin, the controller of MtgpuPods.

        Args:
            gpu_pod: the pod, if it requests cards in a vocabulary that this agent serves.
        """
        try:
            self._write(uid, shares, cards, gpu_pod)
        except OSError as error:
            log.warning("receipt not written: %s", error, extra={"pod": uid})

    def remove_receipt(self, uid: str) -> None:
        """Remove the receipt of a bare pod."""
        if uid in self._receipts.all():
            self._receipts.remove(uid)

    def _write(self, uid: str, shares: Sequence[Share], cards: Sequence[Card], gpu_pod: GpuPod | None) -> None:
        mirrored = kubelets_uid(gpu_pod.pod.annotations, uid) if gpu_pod else uid
        grace = gpu_pod.grace if gpu_pod else GRACE_SECONDS
        self._receipts.write(Receipt(uid, mirrored, grace, merge_by_card(shares, cards)))

    def is_remnant(self, uid: str) -> bool:
        """Return whether this pod may still run although the API has no such pod that runs."""
        return uid in self._candidates()

    def uids(self) -> Collection[str]:
        """Return the UIDs of all pods that may still run although the API has no such pod that runs."""
        return self._candidates().keys()

    def holdings(self) -> tuple[Holding, ...]:
        """Return what remnants hold, including those about which the runtime has not been asked yet."""
        return tuple(Holding(uid, "", "", "", "", receipt.shares) for uid, receipt in self._candidates().items())

    def rows(self) -> tuple[CheckpointEntry, ...]:
        """Return the GPUs of remnants for the scheduler, once the runtime has confirmed them.

        Pods that ended as usual are left out, so that not every end of a pod writes the Device.
        """
        return tuple(row for receipt in self._held for row in device_rows(receipt.uid, DELETED_POD, receipt.shares))

    def overdue(self, seconds: float) -> tuple[str, ...]:
        """Return the UIDs of remnants whose object has been gone for that many seconds.

        Static pods are left out: the kubelet runs these without an object in the API. So are pods whose object is still
        there with a final phase: the kubelet ends these itself, and a stolen token can write a phase.
        """
        present, now = self._pods.presences(), _now()
        return tuple(
            receipt.uid
            for receipt in self._held
            if receipt.uid == receipt.kubelets_uid
            and not is_static(receipt.uid)
            and receipt.uid not in present
            and now - self._missing_since.get(receipt.uid, now) >= seconds
        )

    async def follow(self, rows_changed: Callable[[], None]) -> None:
        """Look for the ends of remnants, until cancelled.

        Args:
            rows_changed: is called when `rows` has changed.
        """
        while True:
            before = self._held
            await self.update()
            if self._held != before:
                rows_changed()
            await self._changed.wait(_POLL_SECONDS if self._candidates() else None)

    async def update(self) -> None:
        """Ask the runtime about each remnant, and forget those that have ended."""
        self._follow_grace()
        candidates, slots = self._candidates(), asyncio.Semaphore(_MAX_QUERIES)
        self._since = {uid: self._since.get(uid, _now()) for uid in candidates}
        present = self._pods.presences()
        missing = (uid for uid, receipt in candidates.items() if receipt.kubelets_uid not in present)
        self._missing_since = {uid: self._missing_since.get(uid, _now()) for uid in missing}

        async def holds(receipt: Receipt) -> bool:
            async with slots:
                return await self._holds(receipt)

        held = dict(zip(candidates, await asyncio.gather(*map(holds, candidates.values())), strict=True))
        self._held = tuple(receipt for uid, receipt in candidates.items() if held[uid])
        # Meanwhile a mirror pod may have been created again: its static pod is no remnant then, and keeps its receipt.
        ended = [uid for uid, still in held.items() if not still and uid in self._candidates()]
        for uid in ended:
            self._receipts.remove(uid)
        self._pods.forget_ended_before_except(self._receipts.all().keys())
        if ended:
            self.removed += 1
            self._changed.wake()

    def _follow_grace(self) -> None:
        """Write down the grace period of a deletion where it is longer than the pod's own."""
        for gpu_pod in (*self._pods.all(), *self._pods.vanished_pods()):
            receipt = self._receipts.all().get(gpu_pod.pod.uid)
            if receipt is not None and gpu_pod.grace > receipt.grace:
                try:
                    self._receipts.write(replace(receipt, grace=gpu_pod.grace))
                except OSError as error:
                    log.warning("receipt not written: %s", error, extra={"pod": gpu_pod.pod.uid})

    def _candidates(self) -> dict[str, Receipt]:
        if not self._resumed:
            return {}
        alive = {uid for uid, pod in self._pods.presences().items() if not pod.ended}
        return {uid: receipt for uid, receipt in self._receipts.all().items() if receipt.kubelets_uid not in alive}

    async def _holds(self, receipt: Receipt) -> bool:
        ended = receipt.kubelets_uid in self._pods.presences()
        try:
            # The pod of a deleted object may be between two containers. A pod that ended starts none any more, and its
            # sandbox stays for a moment.
            asked = {receipt.uid, receipt.kubelets_uid}
            return any([await self._runtime.is_running(uid, sandbox=not ended) for uid in sorted(asked)])
        except RetryLater as error:
            log.debug("whether pod %s still runs is not known: %s", receipt.uid, error)
        if ended or self._pods.had_ended_before(receipt.uid):
            return False
        return _now() - self._since[receipt.uid] < min(receipt.grace, LONGEST_SECONDS)


class StoppingRuntime(Protocol):
    """What is needed of `deviceplugin.pods.container_runtime` to stop pods."""

    async def stop_containers(self, uid: str) -> int:
        """Kill the containers of the pod that run, and return how many. Raises RetryLater."""


class PodList(Protocol):
    """The Reflector that feeds `NodePods`."""

    def refresh(self, seconds: float) -> bool:
        """List the pods again within so many seconds, and return whether that succeeded. Blocks."""


class ForcedStops:
    """Kills the containers of remnants through CRI. Used on one event loop.

    Args:
        remnants: the pods that hold cards although their object has gone.
        runtime: the container runtime.
        pods: lists the pods of the node again.
        warn: reports what fails, whenever that changes.
    """

    def __init__(
        self, remnants: Remnants, runtime: StoppingRuntime, pods: PodList, warn: Callable[[str], None]
    ) -> None:
        self._remnants = remnants
        self._runtime = runtime
        self._pods = pods
        self._warn = warn
        self._reported: frozenset[str] = frozenset()

    async def follow(self) -> None:
        """Stop what is overdue, until cancelled. After a failure the pauses grow."""
        pause = _STOP_POLL_SECONDS
        while True:
            failures = await self.stop_overdue()
            if failures - self._reported:
                self._warn("; ".join(sorted(failures)))
            self._reported = failures
            pause = min(pause * 2, _LONGEST_STOP_PAUSE) if failures else _STOP_POLL_SECONDS
            await asyncio.sleep(pause)

    async def stop_overdue(self) -> frozenset[str]:
        """Stop what is overdue, and return what failed.

        The watch may be behind, or the API server out of reach for longer than the time that has passed. So the pods
        are listed again first, and only what the API server itself does not have any more is stopped.
        """
        if not self._remnants.overdue(STOP_SECONDS):
            return frozenset()
        if not await asyncio.to_thread(self._pods.refresh, _LIST_SECONDS):
            return frozenset({"deleted pods still run here; they are stopped once the API server lists the pods again"})
        uids = self._remnants.overdue(STOP_SECONDS)
        return frozenset(problem for problem in await asyncio.gather(*map(self._stop, uids)) if problem is not None)

    async def _stop(self, uid: str) -> str | None:
        try:
            stopped = await self._runtime.stop_containers(uid)
        except RetryLater as error:
            return f"containers of the deleted pod {uid} are not stopped: {error}"
        if stopped:
            log.warning("stopped %d containers: their pod was deleted by force", stopped, extra={"pod": uid})
        return None


class PodStore(Protocol):
    """A part of the agent that keeps something of each pod: CDI files, grants, MPS clients, answers."""

    def keep_only(self, uids: Collection[str]) -> None:
        """Forget all pods but these."""


class RemainingPods(Protocol):
    """What is needed of `Remnants` to remove what is kept of other pods."""

    removed: int

    def uids(self) -> Collection[str]: ...


async def remove_gone_pods(
    pods: NodePods, remnants: RemainingPods, stores: Sequence[PodStore], changed: Wakeup
) -> None:
    """Remove from the stores the pods that are gone and no remnants, until cancelled.

    The agent starts it once all pods are known, so it also removes what earlier agents left. A pod may come, be served
    and go between two looks, so counters of removals are compared and not sets of pods.
    """
    done = None
    while True:
        now = pods.dropped, remnants.removed
        if now != done:
            done = now
            alive = {gpu_pod.pod.uid for gpu_pod in pods.all()} | {*remnants.uids()}
            for store in stores:
                store.keep_only(alive)
        await changed.wait()


def _now() -> float:
    return asyncio.get_running_loop().time()
