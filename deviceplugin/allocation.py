"""What Allocate and PreStartContainer answer for one resource; no gRPC in here."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from deviceplugin.cdi import CdiFiles, new_name
from deviceplugin.identity import VOID, Refused, Target, candidates, environment
from deviceplugin.podresources import Owner, read_checkpoint
from deviceplugin.pods import GpuPod, NodePods, next_to_start
from deviceplugin.wakeup import Wakeup
from mgpu.model.cards import Card
from mgpu.model.errors import RetryLater
from mgpu.model.pods import Stage

log = logging.getLogger(__name__)

WAIT_SECONDS = 5.0
"""The kubelet gives 30 s, and tries again after about 10 when told why not (kubernetes.md, "Device manager")."""
GUESS_SECONDS = 1.0
"""Without CDI. The kubelet admits no other pod meanwhile."""
_RETRY_SECONDS = 0.1
_REMEMBERED = 4096

Ids = frozenset[str]


class Owners(Protocol):
    async def owners(self, resource: str) -> list[Owner]:
        """All containers that hold ids of `resource`. Raises RetryLater."""


@dataclass(frozen=True, slots=True)
class Answer:
    env: dict[str, str]
    cdi: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Node:
    """What the answers are made from. cdi None: the runtime has no CDI. changed: wakes when pods or cards change."""

    pods: NodePods
    cards: Callable[[], Sequence[Card]]
    owners: Owners
    checkpoint: Path
    cdi: CdiFiles | None
    changed: Wakeup
    refused: Callable[[GpuPod, str], None]


class Allocations:
    """Used on one event loop only."""

    def __init__(
        self,
        resource: str,
        node: Node,
        wait_seconds: float = WAIT_SECONDS,
        guess_seconds: float = GUESS_SECONDS,
    ) -> None:
        self._resource, self._node = resource, node
        self._wait_seconds, self._guess_seconds = wait_seconds, guess_seconds
        self._served: dict[str, set[str]] = {}
        self._started: dict[str, set[str]] = {}
        self._answers: OrderedDict[Ids, list[Answer]] = OrderedDict()
        self._delivered: set[Ids] = set()

    async def allocate(self, ids: Sequence[str]) -> Answer:
        """Answers at once, from memory. Only where there is no CDI to set things right later it may wait and refuse.

        Raises Refused.
        """
        if self._node.cdi is None:
            answer = await self._guess(len(ids))
        else:
            answer = Answer(self._certain(self._waiting(len(ids))), (new_name(),))
        self._remember(frozenset(ids), answer)
        return answer

    async def pre_start(self, ids: Sequence[str]) -> Target:
        """Give the container that owns `ids` what its pod's record says; it is certain now. Raises Refused."""
        wanted = frozenset(ids)
        deadline = asyncio.get_running_loop().time() + self._wait_seconds
        owners = await self._owners(wanted, deadline)
        target = await self._starting(owners, wanted, deadline)
        try:
            env = environment(target, self._node.cards())
            self._deliver(target, wanted, env)
        except Refused as error:
            self._node.refused(target.known, str(error))
            raise
        if wanted in self._answers:
            self._delivered.add(wanted)
        uid = target.known.pod.uid
        self._served.setdefault(uid, set()).add(target.container)
        self._started.setdefault(uid, set()).add(target.container)
        return target

    def forget(self, uid: str) -> None:
        """The pod is gone."""
        self._served.pop(uid, None)
        self._started.pop(uid, None)

    def _certain(self, found: Iterator[Target]) -> dict[str, str]:
        """The environment of the only container that can be meant, as far as the watch knows; else `void`."""
        target, other = next(found, None), next(found, None)
        if target is None or other is not None:
            return VOID
        try:
            env = environment(target, self._node.cards())
        except Refused:
            return VOID  # PreStartContainer waits for the decision, or says what is wrong
        self._serve(target)
        return env

    async def _guess(self, amount: int) -> Answer:
        """Without CDI what is said now stands: the oldest decision of this amount. Raises Refused.

        The kubelet may have seen the pod before this agent has, and waits: so a little, and only for the first one.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._guess_seconds
        while True:
            why = f"no pod on this node waits for this amount of {self._resource}"
            for target in self._waiting(amount):
                try:
                    answer = Answer(environment(target, self._node.cards()))
                except Refused as error:
                    why = str(error)
                else:
                    self._serve(target)
                    return answer
            if not await self._node.changed.wait(max(0.0, deadline - loop.time())):
                raise Refused(why)

    def _waiting(self, amount: int) -> Iterator[Target]:
        return candidates(self._node.pods.all(), self._resource, amount, self._served)

    def _serve(self, target: Target) -> None:
        self._served.setdefault(target.known.pod.uid, set()).add(target.container)

    def _remember(self, ids: Ids, answer: Answer) -> None:
        """An init container's ids are given to later containers of its pod again, before any of them starts.

        So all answers for the same ids stay until one was delivered; what comes then is for another pod.
        """
        if ids in self._delivered:
            self._delivered.remove(ids)
            del self._answers[ids]
        self._answers.setdefault(ids, []).append(answer)
        self._answers.move_to_end(ids)
        if len(self._answers) > _REMEMBERED:
            oldest, _ = self._answers.popitem(last=False)
            self._delivered.discard(oldest)

    async def _owners(self, ids: Ids, deadline: float) -> list[Owner]:
        """Who holds exactly these ids: by PodResources, else by the checkpoint. Raises Refused at the deadline."""
        loop = asyncio.get_running_loop()
        while True:
            why = f"the kubelet names no owner of {len(ids)} ids of {self._resource}"
            try:
                owners = [o for o in await self._node.owners.owners(self._resource) if o.ids == ids]
            except RetryLater as error:
                owners, why = [], str(error)
            owners = owners or self._by_checkpoint(ids)
            if owners:
                return owners
            if loop.time() >= deadline:
                raise Refused(why)
            await asyncio.sleep(_RETRY_SECONDS)

    def _by_checkpoint(self, ids: Ids) -> list[Owner]:
        """Of pods that are known to be here: the file may still list those of pods that are gone."""
        found = read_checkpoint(self._node.checkpoint, self._resource)
        return [o for o in found if o.ids == ids and self._node.pods.by_uid(o.uid) is not None]

    async def _starting(self, owners: Sequence[Owner], ids: Ids, deadline: float) -> Target:
        """The container that starts now, once its pod's cards have been decided. Raises Refused at the deadline."""
        loop = asyncio.get_running_loop()
        while True:
            found = self._find(owners, ids)
            if isinstance(found, Target):
                return found
            if not await self._node.changed.wait(max(0.0, deadline - loop.time())):
                raise Refused(found)

    def _find(self, owners: Sequence[Owner], ids: Ids) -> Target | str:
        """The container, or what is being waited for."""
        owner = owners[0]
        known = self._node.pods.by_uid(owner.uid) if owner.uid else self._node.pods.get(owner.namespace, owner.name)
        if known is None:
            return f"pod {owner.uid or f'{owner.namespace}/{owner.name}'} is not known from the API server yet"
        containers = {o.container for o in owners}
        if any(c.stage is Stage.INIT for c, _ in known.asking(self._resource)):
            containers |= {o.container for o in self._by_checkpoint(ids) if o.uid == known.pod.uid}
        name = next_to_start(known, containers, self._started.get(known.pod.uid, set()))
        if name is None:
            return f"{known.pod.key}: which of {', '.join(sorted(containers))} starts is not known yet"
        if not known.decided:
            return f"{known.pod.key}: no cards have been decided for the pod within {self._wait_seconds:g} s"
        return Target(known, name)

    def _deliver(self, target: Target, ids: Ids, env: dict[str, str]) -> None:
        # After a restart of the agent only the kubelet knows what was answered.
        answers = self._answers.get(ids) or [Answer(dict(o.env), o.cdi) for o in self._by_checkpoint(ids)]
        uid = target.known.pod.uid
        if not answers:
            why = f"{target}: neither this agent nor the kubelet's checkpoint knows what Allocate answered"
            raise Refused(why, uid)
        if self._node.cdi is None:
            if all(answer.env != env for answer in answers):
                raise Refused(f"{target}: the runtime has no CDI, and at admission other cards were given to it", uid)
            return
        names = [name for answer in answers for name in answer.cdi]
        try:
            for name in names:
                self._node.cdi.write(name, uid, env)
        except OSError as error:
            raise Refused(f"{target}: CDI file not written: {error}", uid) from error
