"""Pods whose containers still run although the API does not say so any more. They hold the cards that they were given.

Deleting a pod and then deleting it by force removes its object at once, while the kubelet lets the containers run for
the grace period of the first deletion: up to years, if they ignore SIGTERM. A stolen token can mark a pod as ended. So
the API does not decide when a card is free: the container runtime does. Where it is not asked or does not answer, such
a pod holds its cards for its grace period, at most `LONGEST_SECONDS`.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from deviceplugin.event_loop import Wakeup
from deviceplugin.pods.node_pods import GRACE_SECONDS, GpuPod, NodePods, is_static, kubelets_uid
from deviceplugin.pods.receipts import Receipt, Receipts, rows_of, summed
from mgpu.model.cards import Card
from mgpu.model.device_checkpoints import DELETED_POD, CheckpointEntry
from mgpu.model.errors import RetryLater
from mgpu.model.ledger import Holding, Share

log = logging.getLogger(__name__)

LONGEST_SECONDS = 3600.0
"""Without an answer of the runtime. The author of a pod chooses its grace period and may have ended its containers
already: a longer bound would let one second of use hold a card for days."""
_LOOK_SECONDS = 1.0
_AT_ONCE = 8
"""Questions to the runtime at the same time."""


class Runtime(Protocol):
    async def runs(self, uid: str, *, sandbox: bool) -> bool:
        """Return whether a container of the pod runs, or, with `sandbox`, may still be started. Raises RetryLater."""


class Remnants:
    """Used on one event loop; `holdings`, `rows` and `remains` from any thread.

    Args:
        receipts: what pods were given.
        pods: the pods of this node as the API has them.
        runtime: the container runtime.
        changed: is woken when a remnant appears or ends.
    """

    def __init__(self, receipts: Receipts, pods: NodePods, runtime: Runtime, changed: Wakeup) -> None:
        self._receipts, self._pods, self._runtime, self._changed = receipts, pods, runtime, changed
        self._resumed = False
        self._since: dict[str, float] = {}
        self._gone: dict[str, float] = {}
        self._held: tuple[Receipt, ...] = ()
        self.removed = 0

    def recover(self) -> None:
        """Take over the receipts of the agent before this one."""
        self._receipts.read()

    def resume(self, given: Iterable[tuple[GpuPod, Sequence[Share]]], cards: Sequence[Card]) -> None:
        """All pods of the node are known from here on: whoever has a receipt and is not among them is a remnant.

        Args:
            given: the pods that have run, with what they hold: an agent before receipts may have started them.
            cards: all devices of the node.
        """
        for known, shares in given:
            if known.pod.uid not in self._receipts.all():
                self.note(known.pod.uid, shares, cards, known)
        self._resumed = True
        self._changed.wake()

    def give(self, known: GpuPod, shares: Sequence[Share], cards: Sequence[Card]) -> None:
        """Write down what the pod is given, before any of its containers can start with it. Raises OSError."""
        self._write(known.pod.uid, shares, cards, known)

    def note(self, uid: str, shares: Sequence[Share], cards: Sequence[Card], known: GpuPod | None = None) -> None:
        """Write down what a pod has that others gave it: an earlier agent, another plugin, the controller of MtgpuPods.

        Args:
            known: the pod, if it asks for cards in a vocabulary that this agent serves.
        """
        try:
            self._write(uid, shares, cards, known)
        except OSError as error:
            log.warning("receipt not written: %s", error, extra={"pod": uid})

    def clear(self, uid: str) -> None:
        """Remove the receipt of a pod that turned out to have been handed nothing."""
        if uid in self._receipts.all():
            self._receipts.remove(uid)

    def _write(self, uid: str, shares: Sequence[Share], cards: Sequence[Card], known: GpuPod | None) -> None:
        mirrored = kubelets_uid(known.pod.annotations, uid) if known else uid
        grace = known.grace if known else GRACE_SECONDS
        self._receipts.write(Receipt(uid, mirrored, grace, summed(shares, cards)))

    def remains(self, uid: str) -> bool:
        """Return whether this pod may still run although the API has no such pod that runs."""
        return uid in self._candidates()

    def uids(self) -> Collection[str]:
        """Return the UIDs of all pods that may still run although the API has no such pod that runs."""
        return self._candidates().keys()

    def holdings(self) -> tuple[Holding, ...]:
        """Return what they hold, those about which the runtime has not been asked yet included."""
        return tuple(Holding(uid, "", "", "", "", receipt.shares) for uid, receipt in self._candidates().items())

    def rows(self) -> tuple[CheckpointEntry, ...]:
        """Return the GPUs that those hold that have been looked at, for the scheduler.

        Pods that ended as usual are not among them, so that no Device is written for each of these.
        """
        return tuple(row for receipt in self._held for row in rows_of(receipt.uid, DELETED_POD, receipt.shares))

    def overdue(self, seconds: float) -> tuple[str, ...]:
        """Return the UIDs of pods that still hold cards although their object has been gone for that many seconds.

        Static pods are not among them: the kubelet runs these without an object in the API. Neither are pods whose
        object is still there with a final phase: the kubelet ends these itself, and a stolen token can write a phase.
        """
        there, now = self._pods.present(), _now()
        return tuple(
            receipt.uid
            for receipt in self._held
            if receipt.uid == receipt.kubelets_uid
            and not is_static(receipt.uid)
            and receipt.uid not in there
            and now - self._gone.get(receipt.uid, now) >= seconds
        )

    async def follow(self, tell: Callable[[], None]) -> None:
        """Look for the ends of remnants, until cancelled. tell: is called when `rows` has changed."""
        while True:
            before = self._held
            await self.look()
            if self._held != before:
                tell()
            await self._changed.wait(_LOOK_SECONDS if self._candidates() else None)

    async def look(self) -> None:
        """Ask the runtime about each remnant, and forget those that have ended."""
        self._follow_grace()
        candidates, room = self._candidates(), asyncio.Semaphore(_AT_ONCE)
        self._since = {uid: self._since.get(uid, _now()) for uid in candidates}
        there = self._pods.present()
        gone = (uid for uid, receipt in candidates.items() if receipt.kubelets_uid not in there)
        self._gone = {uid: self._gone.get(uid, _now()) for uid in gone}

        async def holds(receipt: Receipt) -> bool:
            async with room:
                return await self._holds(receipt)

        held = dict(zip(candidates, await asyncio.gather(*map(holds, candidates.values())), strict=True))
        self._held = tuple(receipt for uid, receipt in candidates.items() if held[uid])
        ended = [uid for uid, still in held.items() if not still and uid in self._candidates()]
        for uid in ended:
            self._receipts.remove(uid)
        self._pods.keep_over(self._receipts.all().keys())
        if ended:
            self.removed += 1
            self._changed.wake()

    def _follow_grace(self) -> None:
        """Write down the grace period of a deletion where it is longer than the pod's own."""
        for known in (*self._pods.all(), *self._pods.lost()):
            receipt = self._receipts.all().get(known.pod.uid)
            if receipt is not None and known.grace > receipt.grace:
                try:
                    self._receipts.write(replace(receipt, grace=known.grace))
                except OSError as error:
                    log.warning("receipt not written: %s", error, extra={"pod": known.pod.uid})

    def _candidates(self) -> dict[str, Receipt]:
        if not self._resumed:
            return {}
        present = self._pods.present()
        lives = {uid for uid, (_, ended) in present.items() if not ended}
        return {uid: receipt for uid, receipt in self._receipts.all().items() if receipt.kubelets_uid not in lives}

    async def _holds(self, receipt: Receipt) -> bool:
        ended = receipt.kubelets_uid in self._pods.present()
        try:
            # The pod of a deleted object may be between two containers. A pod that ended starts none any more, and its
            # sandbox stays for a moment.
            asked = {receipt.uid, receipt.kubelets_uid}
            return any([await self._runtime.runs(uid, sandbox=not ended) for uid in sorted(asked)])
        except RetryLater as error:
            log.debug("whether pod %s still runs is not known: %s", receipt.uid, error)
        if ended or self._pods.is_over(receipt.uid):
            return False
        return _now() - self._since[receipt.uid] < min(receipt.grace, LONGEST_SECONDS)


def _now() -> float:
    return asyncio.get_running_loop().time()
