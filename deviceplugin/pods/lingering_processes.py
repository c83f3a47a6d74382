"""Cards of pods that were deleted by force while they ran: a process that hangs in the driver outlives its container.

The container runtime says when containers have ended (`deviceplugin.pods.remnants`). Before the last share of such a
card is free, the agent also looks at the processes that NVML reports (docs/design/kubernetes.md, "Device manager").
Where others share the card, nobody can tell whose processes they are. Where NVML reports none, as in a container that
does not see the host's processes, there is nothing to wait for.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from threading import Thread

from deviceplugin.mig.mig_driver import MigCard, MigRefused
from deviceplugin.pods.capacity_check import holding
from deviceplugin.pods.identity import Refused
from deviceplugin.pods.node_pods import GpuPod, NodePods
from mgpu.dialects import mtgpu
from mgpu.model.cards import GPU, Card
from mgpu.model.errors import RetryLater
from mgpu.model.pod_references import named_to

log = logging.getLogger(__name__)

_LOOK_SECONDS, _ANSWER_SECONDS = 0.5, 2.0
_LONGEST_SECONDS = 300.0
"""What runs on the card after that may well be somebody's whom nobody here knows."""

_Read = Callable[[], Sequence[MigCard]]


class Leftovers:
    """On one event loop. read: all cards, and whether processes run on them, as `MigDriver.read`; from any thread."""

    def __init__(self, pods: NodePods, read: _Read) -> None:
        self._pods, self._read = pods, read
        self._since: dict[str, float] = {}
        self._asked: Future[Collection[str] | None] | None = None

    async def ended(self, known: GpuPod, cards: Sequence[Card], deadline: float) -> None:
        """Until no process of a pod that is gone runs on a card which this pod would be the only one on.

        Raises Refused at the deadline (the loop's time).
        """
        loop = asyncio.get_running_loop()
        while left := self._left(known, cards):
            busy = await self._busy()
            if busy is None:
                return
            for _, gone in left:
                if not any(card.uuid in busy for card in _cards_of(gone, cards)):
                    self._pods.forget(gone.pod.uid)
            running = [(card, gone) for card, gone in left if card.uuid in busy]
            if not running:
                return
            if loop.time() >= deadline:
                card, gone = running[0]
                who = named_to(known.pod.namespace, [(gone.pod.namespace, gone.pod.name)])
                why = f"processes of {who}, which was deleted by force, run on card {card.index} ({card.uuid})"
                raise Refused(f"{known.pod.key}: {why}", known.pod.uid)
            await asyncio.sleep(_LOOK_SECONDS)

    def _left(self, known: GpuPod, cards: Sequence[Card]) -> list[tuple[Card, GpuPod]]:
        """The cards in question, and who may have left something there."""
        now = asyncio.get_running_loop().time()
        self._since = {gone.pod.uid: self._since.get(gone.pod.uid, now) for gone in self._pods.lost()}
        for uid, since in self._since.items():
            if now - since > _LONGEST_SECONDS:
                self._pods.forget(uid)
        lost = [gone for gone in self._pods.lost() if not mtgpu.occupied(gone.pod)]  # they do nothing
        if not lost:
            return []
        running = [other for other in self._pods.all() if other.ran and not other.pod.ended]  # also this one itself
        shared = {card.uuid for other in running for card in _cards_of(other, cards)}
        shared |= {row.card for row in self._pods.limited()}
        wanted = [card for card in _cards_of(known, cards) if card.uuid not in shared]
        return [(card, gone) for card in wanted for gone in lost if card in _cards_of(gone, cards)]

    async def _busy(self) -> Collection[str] | None:
        """The UUIDs of the cards on which processes run; None where NVML does not say, or hangs."""
        if self._asked is None or self._asked.done():
            self._asked = Future()
            Thread(target=_ask, args=(self._read, self._asked), name="leftovers", daemon=True).start()
        await asyncio.wait([asyncio.wrap_future(self._asked)], timeout=_ANSWER_SECONDS)
        return self._asked.result() if self._asked.done() else None


def _ask(read: _Read, asked: Future[Collection[str] | None]) -> None:
    asked.set_running_or_notify_cancel()
    try:
        asked.set_result({card.uuid for card in read() if card.busy})
    except (RetryLater, MigRefused) as error:
        log.warning("which processes run on the cards is not known: %s", error)
        asked.set_result(None)


def _cards_of(known: GpuPod, cards: Sequence[Card]) -> list[Card]:
    """The whole cards of the node that the pod has, or had, a share of."""
    held = holding(known, cards)
    return [card for card in cards if card.type == GPU and held.is_known_on(card)]
