"""Pods that run without a record, and what of the node's cards they have all the same.

Such a pod may have cards: from another plugin, from before mgpu came, or from this agent, where its record was lost
since. It may as well have none, since the kubelet starts a container whose resource no plugin offers without asking
anybody. So the node reports which it is (`device_checkpoints.OTHERS`) by the kubelet's checkpoint, by what this agent
handed out, and by the container runtime, which knows what containers were created with. A pod about which nothing can
be found out is held on every card, as a pod that has been handed something must never lose it.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from deviceplugin.inventory.offers import WHOLE_CARDS
from deviceplugin.pods.identity import VISIBLE
from deviceplugin.pods.node_pods import GpuPod, NodePods, kubelets_uid
from deviceplugin.pods.receipts import rows_of, summed
from mgpu.model.cards import Card
from mgpu.model.device_checkpoints import CheckpointEntry, no_devices_entry
from mgpu.model.errors import RetryLater
from mgpu.model.gpu_requests import GpuRequest
from mgpu.model.ledger import Share, share_of, unknown_shares

log = logging.getLogger(__name__)

_RETRY_SECONDS = 10.0
_NONE = ("", "none", "void")


class Environments(Protocol):
    async def environments(self, uid: str) -> Mapping[str, Mapping[str, str]]:
        """Container → environment, of a pod's containers that run or have run. Raises RetryLater."""


class HandedOut(Protocol):
    """`deviceplugin.pods.capacity_check.Grants`."""

    def kept(self, known: GpuPod, cards: Sequence[Card]) -> tuple[Share, ...]:
        """What was handed out to containers of the pod."""

    def has_handed(self, uid: str) -> bool:
        """Whether anything was."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """What was found out of a pod.

    ran: its containers that had run by then. shares: what it has; None: not known. checked: whether the kubelet's
    checkpoint could be read then, without which a pod cannot be said to have nothing.
    """

    ran: frozenset[str]
    shares: tuple[Share, ...] | None
    checked: bool

    def stands(self, known: GpuPod, *, checkable: bool) -> bool:
        """Return whether asking again would tell nothing else."""
        if self.ran != known.ran or self.shares is None:
            return False
        return bool(self.shares) or self.checked or not checkable


class Unrecorded:
    """On one event loop; `bare`, `found` and `unknown` may be read from any thread.

    bare: the UIDs of such pods that have nothing. found, unknown: rows of those that have something, and that may.

    A pod is asked about until its cards are found, and again when another container of it has run. What was found
    stays while the pod has no record.

    Args:
        runtime: the container runtime.
        pods: the pods of the node.
        cards: its GPUs, those that are cut into slices too.
        handed: what this agent and those before it handed out.
        tells_slices: whether the node says of its slices by itself which pods have them, since its cards are cut.
    """

    def __init__(
        self,
        runtime: Environments,
        pods: NodePods,
        cards: Callable[[], Sequence[Card]],
        handed: HandedOut,
        tells_slices: Callable[[], bool] = lambda: False,
    ) -> None:
        self._runtime, self._pods, self._cards, self._handed = runtime, pods, cards, handed
        self._tells_slices = tells_slices
        self._answers: dict[str, _Answer] = {}
        self._retry_at: dict[str, float] = {}
        self.bare: frozenset[str] = frozenset()
        self.found: tuple[CheckpointEntry, ...] = ()
        self.unknown: tuple[CheckpointEntry, ...] = ()

    def has_unasked(self, given: Collection[str]) -> bool:
        """Return whether there is such a pod that has not been asked about yet.

        Args:
            given: as of `look`.
        """
        missing = ((uid, known) for uid, known in self.missing().items() if uid not in given)
        return any(uid not in self._answers or self._answers[uid].ran != known.ran for uid, known in missing)

    def rows(self) -> tuple[CheckpointEntry, ...]:
        """Return the rows for the scheduler: what such pods have, may have, or that they have nothing."""
        return (*self.found, *self.unknown, *(no_devices_entry(uid) for uid in sorted(self.bare)))

    def missing(self) -> dict[str, GpuPod]:
        """Return the pods that run without a record, by UID.

        To be asked before the checkpoint is read: the kubelet writes what a pod is given before the pod runs.
        """
        return {known.pod.uid: known for known in self._pods.all() if _runs_without_record(known)}

    async def look(self, missing: Mapping[str, GpuPod], given: Collection[str], sliced: Collection[str] | None) -> None:
        """Look at such pods again.

        Args:
            missing: as of before the kubelet's checkpoint was read.
            given: the UIDs of pods to which another plugin gave cards, by the checkpoint.
            sliced: the same of slices; None: the checkpoint cannot be read, so nobody can be said to have nothing.
        """
        self._answers = {uid: answer for uid, answer in self._answers.items() if uid in missing}
        self._retry_at = {uid: at for uid, at in self._retry_at.items() if uid in missing}
        now = asyncio.get_running_loop().time()
        for uid, known in missing.items():
            before, checkable = self._answers.get(uid), sliced is not None
            if uid in given or (before and before.stands(known, checkable=checkable)):
                continue
            silent = before is not None and before.ran == known.ran and before.shares is None
            if silent and now < self._retry_at.get(uid, now):
                continue
            self._retry_at[uid] = now + _RETRY_SECONDS
            self._answers[uid] = _Answer(known.ran, await self._shares(known, sliced or ()), checkable)
        self._tell({uid: known for uid, known in missing.items() if uid not in given})

    def _tell(self, missing: Mapping[str, GpuPod]) -> None:
        found: list[CheckpointEntry] = []
        unknown: list[CheckpointEntry] = []
        bare: set[str] = set()
        for uid, known in sorted(missing.items()):
            answer = self._answers[uid]
            if answer.shares:
                found += self._rows(known, answer.shares)
            elif answer.shares is not None and answer.checked:
                bare.add(uid)
            else:
                unknown += self._rows(known, self._anything(known))
        self.found, self.unknown, self.bare = tuple(found), tuple(unknown), frozenset(bare)

    def _anything(self, known: GpuPod) -> tuple[Share, ...]:
        """What a pod holds of which nothing is known: its share on every card."""
        if known.request is None or (self._tells_slices() and not known.request.containers):
            return ()
        if not known.request.containers:
            return (Share("", None, whole=True),)
        return unknown_shares(replace(known.request, others=()), known.pod)

    def _rows(self, known: GpuPod, shares: Sequence[Share]) -> Iterator[CheckpointEntry]:
        """One row for all cards of which the pod holds the same, however many containers it has."""
        resource = next((known.carriers[name] for name in sorted(known.ran) if name in known.carriers), WHOLE_CARDS)
        container = next(iter(known.ran)) if len(known.ran) == 1 else None
        return rows_of(known.pod.uid, resource, summed(shares, self._cards()), container)

    async def _shares(self, known: GpuPod, sliced: Collection[str]) -> tuple[Share, ...] | None:
        """What it has; (): nothing; None: not known."""
        request, uid = known.request, known.pod.uid
        if request is None:
            return None
        if kept := self._handed.kept(known, self._cards()):
            return kept
        if not request.containers:
            # Slices are handed out by this agent, or by another plugin and the kubelet's checkpoint says so.
            given = self._handed.has_handed(uid) or uid in sliced
            return None if given else ()
        return await self._ask(known, request)

    async def _ask(self, known: GpuPod, request: GpuRequest) -> tuple[Share, ...] | None:
        uid = known.pod.uid
        try:
            environments = await self._runtime.environments(kubelets_uid(known.pod.annotations, uid))
        except RetryLater as error:
            log.warning("%s runs without a record, on cards that are not known: %s", known.pod.key, error)
            return None
        shares = tuple(share for name, env in environments.items() for share in self._shown(request, name, env))
        # A container that the runtime does not list may be about to start again, on what it had.
        return shares if shares or known.ran <= {*environments, *known.done} else None

    def _shown(self, request: GpuRequest, container: str, env: Mapping[str, str]) -> Iterator[Share]:
        """What the container's environment shows of the cards that it asked for.

        More cards than it asked for were not handed to it: images and ConfigMaps bring such a variable too.
        """
        wanted = next((one for one in request.containers if one.container == container), None)
        visible = env.get(VISIBLE, "")
        if wanted is None or visible in _NONE:
            return
        cards = self._cards()
        names = [card.uuid for card in cards] if visible == "all" else visible.split(",")
        shown = {card.uuid for card in cards if {card.uuid, str(card.index), f"minor:{card.minor}"} & {*names}}
        if len(names) <= wanted.cards:
            yield from (share_of(wanted, uuid) for uuid in sorted(shown))


def _runs_without_record(known: GpuPod) -> bool:
    return bool(known.ran and known.request and known.shares is None and not known.problem and not known.pod.ended)
