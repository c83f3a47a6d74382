"""Pods that already run without a record, and that the kubelet's checkpoint does not know either: the upgrade case.

What is left is the environment of their containers (koordinator.md, "Flow"). Their cards are held as another plugin's.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Protocol

from deviceplugin.identity import VISIBLE
from deviceplugin.offers import WHOLE_CARDS
from deviceplugin.pods import GpuPod, NodePods, kubelets_uid
from mgpu.model.cards import Card
from mgpu.model.errors import RetryLater
from mgpu.model.given import Given

log = logging.getLogger(__name__)

_RETRY_SECONDS = 10.0
_NONE = ("", "none", "void")


class Environments(Protocol):
    async def environments(self, uid: str) -> Mapping[str, Mapping[str, str]]:
        """Container → environment, of a pod's containers that run. Raises RetryLater."""


class Unrecorded:
    """On one event loop. A pod is asked about until its cards are found; they stay its while it has no record."""

    def __init__(self, runtime: Environments, pods: NodePods, cards: Callable[[], Sequence[Card]]) -> None:
        self._runtime, self._pods, self._cards = runtime, pods, cards
        self._found: dict[str, tuple[Given, ...]] = {}
        self._retry_at: dict[str, float] = {}

    async def look(self, listed: Collection[str]) -> tuple[Given, ...]:
        """What such pods have. listed: the UIDs of those that are known otherwise."""
        missing = {
            known.pod.uid: known
            for known in self._pods.all()
            if known.ran
            and known.ask
            and known.ask.containers
            and known.shares is None
            and not known.problem
            and not known.pod.ended
        }
        self._found = {uid: rows for uid, rows in self._found.items() if uid in missing}
        self._retry_at = {uid: at for uid, at in self._retry_at.items() if uid in missing}
        now = asyncio.get_running_loop().time()
        for uid, known in missing.items():
            if uid not in listed and uid not in self._found and now >= self._retry_at.get(uid, now):
                self._retry_at[uid] = now + _RETRY_SECONDS
                if rows := await self._ask(known):
                    self._found[uid] = rows
        return tuple(sorted(row for uid, rows in self._found.items() if uid not in listed for row in rows))

    async def _ask(self, known: GpuPod) -> tuple[Given, ...]:
        uid = known.pod.uid
        try:
            environments = await self._runtime.environments(kubelets_uid(known.pod.annotations, uid))
        except RetryLater as error:
            log.warning("%s runs without a record, on cards that are not known: %s", known.pod.key, error)
            return ()
        return tuple(self._rows(known, environments))

    def _rows(self, known: GpuPod, environments: Mapping[str, Mapping[str, str]]) -> Iterator[Given]:
        for container, env in environments.items():
            visible = env.get(VISIBLE, "")
            if known.container_ask(container) is None or visible in _NONE:
                continue
            names = [card.uuid for card in self._cards()] if visible == "all" else visible.split(",")
            resource = known.carriers.get(container, WHOLE_CARDS)
            yield Given(known.pod.uid, container, resource, tuple(sorted(names)))
