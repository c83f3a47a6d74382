"""Delays the start of a container while processes of a pod that was deleted by force still run on the same card.

Such processes may hang in the driver after their container has ended; `deviceplugin.pods.remnants` only waits for the
end of the container. `LingeringProcesses` therefore also waits until NVML reports no processes on the card
(docs/design/kubernetes.md, "Device manager"). It waits only for a card that no other pod shares, because NVML does not
report which pod a process belongs to. If the agent cannot see the processes of the host, NVML reports none to it, and
starts are not delayed. `allocation.allocator` calls `wait_until_ended` before a container starts.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from threading import Thread
from typing import Protocol

from deviceplugin.mig.mig_driver import MigCard, MigRefused
from deviceplugin.pods.capacity_check import holding
from deviceplugin.pods.gpu_pod import GpuPod
from deviceplugin.pods.identity import Refused
from deviceplugin.pods.node_pods import NodePods
from mgpu.dialects import mtgpu
from mgpu.model.cards import GPU, Card
from mgpu.model.errors import RetryLater
from mgpu.model.ledger import Holding
from mgpu.model.pod_references import names_visible_to

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
_ANSWER_SECONDS = 2.0
_LONGEST_SECONDS = 300.0
"""How long one vanished pod can delay starts. A process that still runs after this time does not belong to that pod, or
never ends."""


class CardReader(Protocol):
    """The part of `MigDriver` that reports on which cards processes run."""

    def read(self) -> Sequence[MigCard]:
        """Return the cards that answer. Thread-safe. Raises RetryLater and MigRefused."""


class LingeringProcesses:
    """The check for processes of vanished pods. Use it on one event loop.

    Args:
        claims: A function that returns what ResourceClaims hold of the cards.
    """

    def __init__(
        self, pods: NodePods, driver: CardReader, claims: Callable[[], Sequence[Holding]] = lambda: ()
    ) -> None:
        self._claims = claims
        self._pods = pods
        self._driver = driver
        self._since: dict[str, float] = {}
        self._answer: Future[Collection[str] | None] | None = None

    async def wait_until_ended(self, gpu_pod: GpuPod, cards: Sequence[Card], deadline: float) -> None:
        """Wait while processes run on a card that a vanished pod had and that only this pod has now.

        If NVML fails or hangs, the method does not wait. Raises Refused if processes still run at the deadline, a time
        of the event loop's clock.
        """
        loop = asyncio.get_running_loop()
        while suspects := self._suspects(gpu_pod, cards):
            busy = await self._busy_cards()
            if busy is None:
                return
            for _, gone in suspects:
                if not any(card.uuid in busy for card in _cards_of(gone, cards)):
                    self._pods.forget_vanished(gone.pod.uid)
            running = [(card, gone) for card, gone in suspects if card.uuid in busy]
            if not running:
                return
            if loop.time() >= deadline:
                card, gone = running[0]
                who = names_visible_to(gpu_pod.pod.namespace, [(gone.pod.namespace, gone.pod.name)])
                reason = f"processes of {who}, which was deleted by force, run on card {card.index} ({card.uuid})"
                raise Refused(f"{gpu_pod.pod.key}: {reason}", gpu_pod.pod.uid)
            await asyncio.sleep(_POLL_SECONDS)

    def _suspects(self, gpu_pod: GpuPod, cards: Sequence[Card]) -> list[tuple[Card, GpuPod]]:
        """Return each card that only this pod has, paired with each vanished pod that had a share of it."""
        now = asyncio.get_running_loop().time()
        self._since = {gone.pod.uid: self._since.get(gone.pod.uid, now) for gone in self._pods.vanished_pods()}
        for uid, since in self._since.items():
            if now - since > _LONGEST_SECONDS:
                self._pods.forget_vanished(uid)
        # An occupy pod only keeps other pods off its card (docs/mtgpu.md), and runs no process on it.
        vanished = [gone for gone in self._pods.vanished_pods() if not mtgpu.occupy_target(gone.pod)]
        if not vanished:
            return []
        # This pod itself may have run before. In that case its card counts as shared: the processes may be its own.
        running = [other for other in self._pods.all() if other.started_containers and not other.pod.ended]
        shared = {card.uuid for other in running for card in _cards_of(other, cards)}
        shared |= {limited.card for limited in self._pods.limited_pods()}
        shared |= {card.uuid for held in self._claims() for card in cards if held.is_on(card)}
        alone = [card for card in _cards_of(gpu_pod, cards) if card.uuid not in shared]
        return [(card, gone) for card in alone for gone in vanished if card in _cards_of(gone, cards)]

    async def _busy_cards(self) -> Collection[str] | None:
        """Return the UUIDs of the cards on which processes run; None if NVML fails or hangs.

        A call into the driver may hang forever, so it runs on a daemon thread. Only one such thread runs at a time.
        """
        if self._answer is None or self._answer.done():
            self._answer = Future()
            arguments = self._driver, self._answer
            Thread(target=_query, args=arguments, name="lingering-processes", daemon=True).start()
        await asyncio.wait([asyncio.wrap_future(self._answer)], timeout=_ANSWER_SECONDS)
        return self._answer.result() if self._answer.done() else None


def _query(driver: CardReader, answer: Future[Collection[str] | None]) -> None:
    answer.set_running_or_notify_cancel()
    try:
        answer.set_result({card.uuid for card in driver.read() if card.busy})
    except (RetryLater, MigRefused) as error:
        log.warning("cannot read which processes run on the cards: %s", error)
        answer.set_result(None)


def _cards_of(gpu_pod: GpuPod, cards: Sequence[Card]) -> list[Card]:
    """Return the GPUs of which the pod's record names a share."""
    held = holding(gpu_pod, cards)
    return [card for card in cards if card.type == GPU and held.is_known_on(card)]
