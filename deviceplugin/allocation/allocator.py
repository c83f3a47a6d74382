"""What Allocate and PreStartContainer answer for one resource; no gRPC in here, and no call to the API server.

Of a container with several such resources only one is its carrier: its answer brings the cards. The others' answers
say nothing, so that the order in which the kubelet asks and merges them does not matter; and since every one of them
has to pass PreStartContainer, none starts a container that the carrier's refuses.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from deviceplugin.allocation.id_owners import Owners, Whose
from deviceplugin.allocation.wait_budget import Patience
from deviceplugin.delivery.cdi import ANSWER_ANNOTATION, CARRIER_VARIABLE, CdiFiles, Edits, new_name
from deviceplugin.delivery.exchange import Exchange
from deviceplugin.delivery.visibility import Exposure
from deviceplugin.event_loop import Wakeup
from deviceplugin.isolation.mps.clients import Mps
from deviceplugin.kubelet.checkpoint import Given, read_checkpoint
from deviceplugin.metrics import CORRECTIONS
from deviceplugin.pods.capacity_check import Grants, holding
from deviceplugin.pods.gpu_pod import GpuPod
from deviceplugin.pods.identity import VISIBLE, VOID, Refused, Target, candidates, environment, lacks_slice
from deviceplugin.pods.lingering_processes import LingeringProcesses
from deviceplugin.pods.node_pods import NodePods
from deviceplugin.pods.remnants import Remnants
from mgpu.model.cards import Card, noun
from mgpu.model.ledger import Holding

log = logging.getLogger(__name__)

WAIT_SECONDS = 5.0
"""The kubelet waits for 30 s, and tries again 10 s after an error (docs/design/kubernetes.md, "Device manager")."""
_LOOK_SECONDS = 0.5
GUESS_SECONDS = 1.0
"""Without CDI, of all answers together (`Patience`). The kubelet admits no other pod meanwhile."""


@dataclass(frozen=True, slots=True)
class Answer:
    """To Allocate. name: fresh with every answer; it tells answers apart, and where there is CDI it is the device's.

    mounts, nodes: as of `Edits`, where there is no CDI.
    """

    name: str
    env: Mapping[str, str]
    cdi: tuple[str, ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[tuple[str, str], ...] = ()
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Node:
    """What the answers are made from. delivery: CDI files, or where the runtime has none the exchange of records.

    cards: those that are whole, and slices. gpus: all, those too that are cut into slices.
    changed: wakes when pods or cards change. resend: sends the device list of a resource to the kubelet once more.
    given: hears of every pod that may start on its cards. foreign: what another plugin gave out.
    mps: holds containers to their shares; None: nothing does. exposure: what tells the runtime of their cards.
    leftovers: waits for what is left of pods that are gone; None: nothing does.
    remnants: pods that were deleted and still run; None: nobody looks for them.
    undetermined: whether it is being found out of a pod what it runs on.
    patience: of the answers of all resources that wait while the kubelet does.
    """

    pods: NodePods
    cards: Callable[[], Sequence[Card]]
    gpus: Callable[[], Sequence[Card]]
    owners: Owners
    checkpoint: Path
    delivery: CdiFiles | Exchange
    grants: Grants
    changed: Wakeup
    refused: Callable[[GpuPod, str], None]
    resend: Callable[[str], None]
    given: Callable[[GpuPod], None]
    foreign: Callable[[], Sequence[Holding]]
    mps: Mps | None = None
    exposure: Exposure = field(default_factory=Exposure)
    leftovers: LingeringProcesses | None = None
    remnants: Remnants | None = None
    undetermined: Callable[[], bool] = lambda: False
    patience: Patience = field(default_factory=lambda: Patience(2 * GUESS_SECONDS, time.monotonic))


class Allocations:
    """Used on one event loop only."""

    def __init__(
        self,
        resource: str,
        node: Node,
        wait_seconds: float | None = None,
        guess_seconds: float = GUESS_SECONDS,
    ) -> None:
        self._resource, self._node = resource, node
        self._wait_seconds = WAIT_SECONDS if wait_seconds is None else wait_seconds
        self._guess_seconds = guess_seconds
        self._whose = Whose(resource, node.checkpoint, node.pods, node.owners, lambda: node.resend(resource))
        self._served: set[tuple[str, str]] = set()
        self._corrected: set[tuple[str, str]] = set()
        self._resumed = False

    def resume(self) -> None:
        """From here on all pods of the node, and its cards, are known: only then can anything start.

        Without CDI what an agent before this one answered counts, and is settled.
        """
        self._resumed = True
        delivery, mismatched = self._node.delivery, []
        if not isinstance(delivery, Exchange):
            return
        for given in self._rows(self._resource):
            known = self._node.pods.by_uid(given.uid)
            if known is not None and not known.pod.ended:
                target = Target(known, given.container)
                self._served.add(target.key)
                if known.shares is not None and self._carries(target) and not delivery.agrees(target, given.env):
                    mismatched.append(given)
        for given in mismatched:
            known = self._node.pods.by_uid(given.uid)
            if known is not None:
                try:
                    delivery.settle(Target(known, given.container), given.env, self._served)
                except Refused as error:
                    log.warning("not settled: %s", error, extra={"pod": given.uid})

    def keep_only(self, uids: Collection[str]) -> None:
        """All other pods are gone."""
        self._served = {key for key in self._served if key[0] in uids}
        self._corrected = {key for key in self._corrected if key[0] in uids}

    async def allocate(self, ids: Sequence[str]) -> Answer:
        """Answers at once, from memory. Only where there is no CDI to set things right later it may wait and refuse.

        Raises Refused.
        """
        name = new_name()
        if isinstance(self._node.delivery, CdiFiles):
            answer = Answer(name, self._certain(self._waiting(len(ids))), cdi=(name,))
        else:
            own = await self._guess(len(ids))
            answer = Answer(name, own.env, (), {ANSWER_ANNOTATION: name}, own.mounts, own.nodes)
        self._whose.answered(frozenset(ids), name)
        return answer

    async def pre_start(self, ids: Sequence[str]) -> GpuPod:
        """Let the containers that hold `ids` have what their pod's record says. Raises Refused."""
        deadline = asyncio.get_running_loop().time() + self._wait_seconds
        given = await self._whose.holders(frozenset(ids), deadline)
        known = await self._known(given[0].uid, deadline)
        if any(self._carries(Target(known, row.container)) for row in given):
            known = await self._decided(known, given, deadline)
            known = await self._sliced(known, given, deadline)
        try:
            if self._node.leftovers is not None:
                await self._node.leftovers.ended(known, self._node.cards(), deadline)
            await self._freed(known, deadline)
            self._start(known, given, await self._limits(known, given, deadline))
        except Refused as error:
            self._node.refused(known, str(error))
            raise
        return known

    def _certain(self, found: Iterator[Target]) -> Mapping[str, str]:
        """The environment of the only container that can be meant, as far as the watch knows; else `void`."""
        target, other = next(found, None), next(found, None)
        if target is None or other is not None:
            return VOID
        env: Mapping[str, str] = {}
        try:
            if self._carries(target):
                env = environment(target, self._node.cards(), self._node.gpus())
        except Refused:
            return VOID  # PreStartContainer waits for the decision, or says what is wrong
        self._served.add(target.key)
        return env

    async def _guess(self, amount: int) -> Edits:
        """Without CDI what is said now stands: the oldest decision of this amount. Raises Refused.

        The kubelet may have seen the pod before this agent has, and waits: so a little, while there is patience.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            return await self._guessed(amount, began + min(self._guess_seconds, self._node.patience.left()))
        finally:
            self._node.patience.spend(loop.time() - began)

    async def _guessed(self, amount: int, deadline: float) -> Edits:
        loop = asyncio.get_running_loop()
        while True:
            why = f"no pod on this node waits for this amount of {self._resource}"
            for target in self._waiting(amount) if self._resumed else ():
                try:
                    own = self._whole(target) if self._carries(target) else Edits()
                except Refused as error:
                    why = str(error)
                else:
                    self._served.add(target.key)
                    return own
            if not await self._node.changed.wait(max(0.0, deadline - loop.time())):
                raise Refused(why)

    def _whole(self, target: Target) -> Edits:
        """What a container gets without CDI. Raises Refused."""
        if target.sliced:
            raise Refused(f"{target}: slices need a container runtime with CDI", target.known.pod.uid)
        return self._exposed(target, environment(target, self._node.cards()))

    def _exposed(self, target: Target, env: Mapping[str, str]) -> Edits:
        """The environment, and what tells the runtime of the cards beside it. Raises Refused."""
        shown = self._node.exposure.edits(target, env, self._node.cards(), self._node.gpus())
        return Edits(env, shown.mounts, shown.nodes)

    def _waiting(self, amount: int) -> Iterator[Target]:
        return candidates(self._node.pods.all(), self._resource, amount, self._served)

    def _carries(self, target: Target) -> bool:
        """Whether the container's cards come by this resource's answers; what no resource can bring is told here."""
        return target.carrier in (self._resource, "")

    async def _known(self, uid: str, deadline: float) -> GpuPod:
        """Raises Refused at the deadline."""
        loop = asyncio.get_running_loop()
        while True:
            known = self._node.pods.by_uid(uid)
            if self._resumed and known is not None:
                return known
            if not await self._node.changed.wait(max(0.0, deadline - loop.time())):
                if not self._resumed:
                    raise Refused("the pods and cards of this node are not known yet", uid)
                raise Refused(f"pod {uid} is not known from the API server yet")

    def _kept(self, known: GpuPod, given: Sequence[Given]) -> GpuPod:
        """Return the pod with the cards that these containers were handed before, where its record does not count.

        Whatever made the record void (a key that this agent does not know, an agent's stolen token, a scheduler from
        before seals), a container that has run starts again on what it had, and on nothing else. CDI files say what
        that was: root alone can write them, and agents write one for a record that counts.
        """
        if known.finding is None or not known.ran or not isinstance(self._node.delivery, CdiFiles):
            return known
        shares = self._node.grants.kept(known, self._node.cards())
        had = {share.container for share in shares}
        carried = {row.container for row in given if self._carries(Target(known, row.container))}
        return replace(known, shares=shares) if carried <= had else known

    def _now(self, known: GpuPod) -> GpuPod | None:
        """Return the pod as the API server tells of it by now, with the cards that it has kept; None: it is gone."""
        now = self._node.pods.by_uid(known.pod.uid)
        if now is None or now.finding is None or known.finding is None:
            return now
        return replace(now, shares=known.shares)

    async def _decided(self, known: GpuPod, given: Sequence[Given], deadline: float) -> GpuPod:
        """The pod, once its cards have been decided. Raises Refused at the deadline."""
        loop = asyncio.get_running_loop()
        while not (known := self._kept(known, given)).decided:
            if not await self._node.changed.wait(max(0.0, deadline - loop.time())):
                limit = f"within {self._wait_seconds:g} s"
                why = f"; {known.finding.message}" if known.finding else ""
                raise Refused(f"{known.pod.key}: no cards have been decided for the pod {limit}{why}", known.pod.uid)
            known = await self._known(known.pod.uid, deadline)
        return known

    async def _sliced(self, known: GpuPod, given: Sequence[Given], deadline: float) -> GpuPod:
        """The pod, once the slices that its record names are made, or at the deadline."""
        loop = asyncio.get_running_loop()
        while any(lacks_slice(Target(known, row.container), self._node.cards()) for row in given):
            if not await self._node.changed.wait(max(0.0, deadline - loop.time())):
                break
            known = await self._known(known.pod.uid, deadline)
        return known

    async def _limits(self, known: GpuPod, given: Sequence[Given], deadline: float) -> Mapping[tuple[str, str], Edits]:
        """Of those of the containers that MPS holds to their shares. Raises Refused where it cannot now."""
        if self._node.mps is None:
            return {}
        targets = [Target(known, row.container) for row in given if row.device]
        limits = await self._node.mps.ready([target for target in targets if self._carries(target)], deadline)
        now = self._now(known)
        if limits and (now is None or now.shares != known.shares):
            raise Refused(f"{known.pod.key}: its record has changed meanwhile", known.pod.uid)
        return limits

    def _start(self, known: GpuPod, given: Sequence[Given], limits: Mapping[tuple[str, str], Edits]) -> None:
        """All that share the ids are served, since any of them may be the one that starts; each by its own answer.

        Raises Refused where none of them may start.
        """
        ready: list[tuple[Given, Edits]] = []
        refused: list[tuple[Given, Refused]] = []
        carried = False
        for row in given:
            target = Target(known, row.container)
            try:
                env = self._environment(target, row) if self._carries(target) else self._beside(target, row)
                carried = carried or self._carries(target)
                own = limits.get(target.key, Edits())
                shown = self._exposed(target, env)
                ready.append((row, Edits({**env, **own.env}, (*own.mounts, *shown.mounts), shown.nodes)))
            except Refused as error:
                refused.append((row, error))
        if not ready:
            raise refused[0][1]
        if not carried:
            self._deliver(known, ready, refused)
            return
        cards = self._node.cards()
        known = self._now(known) or known
        if short := self._node.grants.refusal(known, self._node.pods.all(), cards, self._node.foreign()):
            raise Refused(f"{known.pod.key}: {short}", known.pod.uid)
        if why := self._held_by_deleted(known):
            raise Refused(f"{known.pod.key}: {why}", known.pod.uid)
        self._write_receipt(known, cards)
        self._deliver(known, ready, refused)
        self._node.grants.grant(known, cards)
        if self._node.mps is not None:
            self._node.mps.given(limits)
        self._node.given(known)

    async def _freed(self, known: GpuPod, deadline: float) -> None:
        """Wait until no deleted pod that still runs holds the pod's cards, or until the deadline.

        Nor a pod without a record, which holds everything until it is found out what it was handed: mostly nothing.
        """
        loop = asyncio.get_running_loop()
        while known.shares is not None and self._may_be_freed(known) and loop.time() < deadline:
            await self._node.changed.wait(max(0.0, min(_LOOK_SECONDS, deadline - loop.time())))

    def _may_be_freed(self, known: GpuPod) -> bool:
        if self._held_by_deleted(known):
            return True
        pods, cards, foreign = self._node.pods.all(), self._node.cards(), self._node.foreign()
        return self._node.undetermined() and bool(self._node.grants.refusal(known, pods, cards, foreign))

    def _held_by_deleted(self, known: GpuPod) -> str | None:
        """Return why the pod must not start beside deleted pods that still run; None where it may.

        Those pods may be another tenant's, so the text names cards only.
        """
        remnants = self._node.remnants.holdings() if self._node.remnants is not None else ()
        if not remnants:
            return None
        cards, pods, foreign = self._node.cards(), self._node.pods.all(), self._node.foreign()
        if not self._node.grants.refusal(known, pods, cards, (*foreign, *remnants)):
            return None
        wanted = holding(known, cards)
        on = [card for card in cards if wanted.is_on(card) and any(held.is_on(card) for held in remnants)]
        named = ", ".join(f"{noun(card.type)} {card.index} ({card.uuid})" for card in on)
        return (
            f"{named}: containers of a deleted pod still run there; the start is tried again, and succeeds once the "
            "container runtime reports that they have ended"
        )

    def _write_receipt(self, known: GpuPod, cards: Sequence[Card]) -> None:
        """Raises Refused."""
        if self._node.remnants is not None:
            try:
                self._node.remnants.give(known, holding(known, cards).shares, cards)
            except OSError as error:
                raise Refused(f"{known.pod.key}: receipt not written: {error}", known.pod.uid) from error

    def _beside(self, target: Target, given: Given) -> Mapping[str, str]:
        """What this resource brings a container that another one carries. Raises Refused.

        The kubelet gives no ids of a resource that the node does not have at all, and starts the container even so.
        """
        uid, carrier = target.known.pod.uid, target.carrier
        if not any((row.uid, row.container) == (given.uid, given.container) for row in self._rows(carrier)):
            self._node.resend(self._resource)
            why = (
                f"{target}: the kubelet gave it ids of {self._resource}, but none of {carrier}, which brings its cards"
            )
            raise Refused(why, uid)
        if not given.device and VISIBLE in given.env:
            raise Refused(f"{target}: at admission the cards of another pod were given to it", uid)
        return {CARRIER_VARIABLE: carrier}

    def _rows(self, resource: str) -> list[Given]:
        return read_checkpoint(self._node.checkpoint, resource)

    def _environment(self, target: Target, given: Given) -> Mapping[str, str]:
        delivery = self._node.delivery
        if isinstance(delivery, Exchange):
            delivery.settle(target, given.env, self._served)
            known = self._node.pods.by_uid(target.known.pod.uid) or target.known
            target = Target(known, target.container)
        env = environment(target, self._node.cards(), self._node.gpus())
        if isinstance(delivery, CdiFiles) and not given.device and dict(given.env) != env:
            raise Refused(f"{target} was admitted without CDI and given other cards", target.known.pod.uid)
        if given.env.get(VISIBLE) not in (VOID[VISIBLE], env[VISIBLE], None) and target.key not in self._corrected:
            self._corrected.add(target.key)  # it may start again
            CORRECTIONS.labels("answer").inc()
        return env

    def _deliver(
        self,
        known: GpuPod,
        ready: Sequence[tuple[Given, Edits]],
        refused: Sequence[tuple[Given, Refused]],
    ) -> None:
        delivery, uid = self._node.delivery, known.pod.uid
        pending = [error for row, error in refused if row.container not in known.done]
        if isinstance(delivery, Exchange):
            # Nothing can keep one of several back: what is refused for one holds for all.
            if pending:
                raise pending[0]
            return
        try:
            for row, edits in ready:
                if row.device:
                    delivery.write(row.name, uid, row.container, edits.env, edits.mounts, edits.nodes)
        except OSError as error:
            raise Refused(f"{known.pod.key}: CDI file not written: {error}", uid) from error
        for row, _ in refused:
            if row.device:
                delivery.remove(row.name, uid, row.container)
        for why in pending:
            self._node.refused(known, str(why))
