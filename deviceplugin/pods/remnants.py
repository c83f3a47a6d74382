"""Finds remnants: deleted pods whose containers still run. They hold their cards until the containers have ended.

If a pod is deleted and then deleted by force, its object disappears at once, but the kubelet lets the containers run
for the grace period of the first deletion, which may be years. A stolen token can set a final phase on a running pod,
which then counts as a remnant too. So the container runtime, and not the API, decides when a card is free. If the
runtime does not answer, a deleted pod holds its cards for its grace period, at most `LONGEST_SECONDS`.

`Remnants` finds these pods by their receipts. `ForcedStops` kills the containers of a pod `STOP_SECONDS` after its
object has disappeared, since a ResourceQuota does not count such a pod and nothing can evict it.
`deviceplugin.reconciler` runs the coroutines of this module.
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
"""How long a deleted pod can hold its cards if the runtime does not answer. A pod's author chooses its grace period,
and the containers may have ended already. Without this limit, a pod that used a card for a second could hold it for
days."""
STOP_SECONDS = 60.0
"""The time from the removal of the object until the containers are killed. Force deletion guarantees containers no time
to end; this time lets applications save their work."""
_POLL_SECONDS = 1.0
_MAX_QUERIES = 8
"""The maximum number of concurrent queries to the runtime."""
_STOP_POLL_SECONDS = 5.0
_LONGEST_STOP_PAUSE = 60.0
_LIST_SECONDS = 5.0


class Runtime(Protocol):
    """The part of `ContainerRuntime` that `Remnants` needs."""

    async def is_running(self, uid: str, *, sandbox: bool) -> bool:
        """Return whether a container of the pod runs, or with `sandbox` may still start. Raises RetryLater."""


class Remnants:
    """The remnants of the node, found by receipts.

    A pod with a receipt counts as a remnant while its object is missing or has a final phase, until `update` removes
    the receipt. Use it on one event loop; any thread may call `holdings`, `rows` and `is_remnant`.

    Args:
        changed: The signal that pods have changed (`NodeState.pods_changed`), on which `follow` calls `update`. This
            object sends it too, when it starts to look for remnants and when remnants have ended.

    Attributes:
        removed: A counter that is incremented whenever remnants have ended.
    """

    def __init__(self, receipts: Receipts, pods: NodePods, runtime: Runtime, changed: Wakeup) -> None:
        self._receipts = receipts
        self._pods = pods
        self._runtime = runtime
        self._changed = changed
        self._resumed = False
        # By UID, when `update` first found the remnant, and when it first found that the remnant's object is missing.
        self._since: dict[str, float] = {}
        self._missing_since: dict[str, float] = {}
        self._held: tuple[Receipt, ...] = ()
        self.removed = 0

    def recover(self) -> None:
        """Read the receipts that earlier agents have written."""
        self._receipts.read()

    def resume(self, given: Iterable[tuple[GpuPod, Sequence[Share]]], cards: Sequence[Card]) -> None:
        """Start to look for remnants.

        Call this after all pods have been listed, because a pod with a receipt counts as a remnant while its object is
        missing.

        Args:
            given: The pods that have run, with their shares. They get receipts, since agents of versions without
                receipts may have started them.
        """
        for gpu_pod, shares in given:
            if gpu_pod.pod.uid not in self._receipts.all():
                self.try_write_receipt(gpu_pod.pod.uid, shares, cards, gpu_pod)
        self._resumed = True
        self._changed.wake()

    @property
    def is_resumed(self) -> bool:
        """Whether `resume` has been called, so that `holdings` names all remnants."""
        return self._resumed

    def write_receipt(self, uid: str, shares: Sequence[Share], cards: Sequence[Card], gpu_pod: GpuPod | None) -> None:
        """Write the receipt of a pod before a container starts on its cards. Raises OSError.

        Args:
            gpu_pod: The pod; None if it is not read as a GPU pod.
        """
        mirrored = kubelets_uid(gpu_pod.pod.annotations, uid) if gpu_pod else uid
        grace = gpu_pod.grace if gpu_pod else GRACE_SECONDS
        self._receipts.write(Receipt(uid, mirrored, grace, merge_by_card(shares, cards)))

    def try_write_receipt(
        self, uid: str, shares: Sequence[Share], cards: Sequence[Card], gpu_pod: GpuPod | None = None
    ) -> None:
        """Write the receipt of a pod that may run already, such as a pod with cards from another plugin.

        A failure is logged. The arguments are those of `write_receipt`.
        """
        try:
            self.write_receipt(uid, shares, cards, gpu_pod)
        except OSError as error:
            log.warning("receipt not written: %s", error, extra={"pod": uid})

    def remove_receipt(self, uid: str) -> None:
        if uid in self._receipts.all():
            self._receipts.remove(uid)

    def is_remnant(self, uid: str) -> bool:
        return uid in self._candidates()

    def uids(self) -> Collection[str]:
        return self._candidates().keys()

    def holdings(self) -> tuple[Holding, ...]:
        """Return what remnants hold, including remnants that `update` has not examined yet."""
        return tuple(Holding(uid, "", "", "", "", receipt.shares) for uid, receipt in self._candidates().items())

    def rows(self) -> tuple[CheckpointEntry, ...]:
        """Return rows for the Device with the GPUs of the remnants that the last `update` has confirmed.

        Other remnants are left out, because otherwise the Device would be written at the end of every pod.
        """
        return tuple(row for receipt in self._held for row in device_rows(receipt.uid, DELETED_POD, receipt.shares))

    def overdue(self, seconds: float) -> tuple[str, ...]:
        """Return the UIDs of confirmed remnants whose object has been missing for at least `seconds`.

        Static pods are left out, because the kubelet runs them without an API object. Pods whose object still exists
        with a final phase are left out too: the kubelet ends these itself, and a stolen token can write a phase.
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
        """Call `update` repeatedly until cancelled.

        Args:
            rows_changed: A function that is called when the result of `rows` has changed.
        """
        while True:
            before = self._held
            await self.update()
            if self._held != before:
                rows_changed()
            await self._changed.wait(_POLL_SECONDS if self._candidates() else None)

    async def update(self) -> None:
        """Ask the runtime about each remnant, and remove the receipts of those that have ended."""
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
        # A mirror pod may have been created again meanwhile. Its static pod is no remnant then, and the receipt stays.
        ended = [uid for uid, still in held.items() if not still and uid in self._candidates()]
        for uid in ended:
            self._receipts.remove(uid)
        self._pods.forget_ended_before_except(self._receipts.all().keys())
        if ended:
            self.removed += 1
            self._changed.wake()

    def _follow_grace(self) -> None:
        """Update receipts of pods whose deletion has a longer grace period than the pod's spec."""
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
            # If the object is gone, the pod may start another container while its sandbox is ready. A pod with a final
            # phase starts no container any more, so it holds nothing although its sandbox is ready for a moment longer.
            uids = {receipt.uid, receipt.kubelets_uid}
            return any([await self._runtime.is_running(uid, sandbox=not ended) for uid in sorted(uids)])
        except RetryLater as error:
            log.debug("cannot find out whether pod %s still runs: %s", receipt.uid, error)
        if ended or self._pods.had_ended_before(receipt.uid):
            return False
        return _now() - self._since[receipt.uid] < min(receipt.grace, LONGEST_SECONDS)


class StoppingRuntime(Protocol):
    """The part of `ContainerRuntime` that `ForcedStops` needs."""

    async def stop_containers(self, uid: str) -> int:
        """Kill the running containers of the pod, and return their number. Raises RetryLater."""


class PodList(Protocol):
    """The part of the pod watch (`NodeState.pod_watch`) that `ForcedStops` needs."""

    def refresh(self, seconds: float) -> bool:
        """List the pods again, and return whether that succeeded within `seconds`. Blocks."""


class ForcedStops:
    """A loop that stops the containers of remnants through CRI. Use it on one event loop.

    Args:
        warn: A function that is called with the text of all failures, whenever there is a new one.
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
        """Stop the containers of overdue remnants until cancelled. After a failure the pauses grow."""
        pause = _STOP_POLL_SECONDS
        while True:
            failures = await self.stop_overdue()
            if failures - self._reported:
                self._warn("; ".join(sorted(failures)))
            self._reported = failures
            pause = min(pause * 2, _LONGEST_STOP_PAUSE) if failures else _STOP_POLL_SECONDS
            await asyncio.sleep(pause)

    async def stop_overdue(self) -> frozenset[str]:
        """Stop the containers of overdue remnants, and return the failures.

        The watch may be late, or the API server may have been out of reach. So the pods are listed again first, and
        only the containers of pods that are not in the list are stopped.
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
    """A part of the agent that stores data of each pod, such as CDI files, grants or MPS clients."""

    def keep_only(self, uids: Collection[str]) -> None:
        """Remove the data of all pods except those with these UIDs."""


class RemainingPods(Protocol):
    """The part of `Remnants` that `remove_gone_pods` needs. `NodeState` adds claims to it."""

    @property
    def removed(self) -> int: ...

    def uids(self) -> Collection[str]: ...


async def remove_gone_pods(
    pods: NodePods, remnants: RemainingPods, stores: Sequence[PodStore], changed: Wakeup
) -> None:
    """Remove the data of pods that are neither GPU pods in the API nor remnants from the stores, until cancelled.

    Start it after all pods have been listed, since it also removes the data that earlier agents have stored. It
    compares counters of removals and not sets of pods, because a pod may appear and disappear between two passes.
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
