"""Allocate and PreStartContainer for one resource: which container a call is for, and what that container gets.

What the kubelet does (docs/design/kubernetes.md, "Device manager"), and what follows from it:

1. When it admits a pod it calls Allocate for each container and resource, with device ids and no pod. Its sync loop
   waits for the answer without a timeout. So `Allocator.allocate` answers from memory, and does not need to be right:
   the answer names a CDI device that does not exist yet.
2. It writes its checkpoint: pod UID, container, ids and answer.
3. Before it creates a container it calls PreStartContainer with the container's ids, and waits up to 30 seconds.
   `Allocator.pre_start` finds the owner of the ids in the checkpoint, waits for the pod's allocation record, and writes
   the CDI file that the answer has named. The runtime cannot create a container whose CDI device has no file, so no
   container starts on cards that were not decided for it, whatever went wrong before.

A container that requests several resources gets its cards by the answer of one of them, its carrier. The answers of the
others carry nothing, so the order in which the kubelet asks and merges them does not matter; and since each of them has
to pass PreStartContainer, none starts a container that the carrier's call refuses.

The plugin server calls this module (`deviceplugin.plugin.plugin_server`). There is no gRPC in here, and no call to the
API server. `deviceplugin.allocation.allocator_without_cdi` has what differs where the runtime has no CDI.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from deviceplugin.allocation.id_owners import IdOwners, Owners
from deviceplugin.allocation.wait_budget import WaitBudget
from deviceplugin.delivery.cdi import CARRIER_VARIABLE, CdiFiles, Edits, new_name
from deviceplugin.delivery.exchange import RecordExchange
from deviceplugin.delivery.visibility import Exposure
from deviceplugin.event_loop import Wakeup
from deviceplugin.isolation.mps.clients import Mps
from deviceplugin.kubelet.checkpoint import PodDevicesEntry, read_checkpoint
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
"""How long a start waits for what is missing. The kubelet waits 30 s, and tries again 10 s after an error."""
_POLL_SECONDS = 0.5

Key = tuple[str, str]
"""Pod UID and container."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to Allocate for one container.

    name: fresh with every answer. It tells answers apart in the checkpoint, and is the name of the CDI device.
    mounts, nodes: as in `Edits`; only where the runtime has no CDI.
    """

    name: str
    env: Mapping[str, str]
    cdi: tuple[str, ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[tuple[str, str], ...] = ()
    nodes: tuple[str, ...] = ()


class Devices(Protocol):
    """`deviceplugin.node_devices.NodeDevices`."""

    def gpus(self) -> Sequence[Card]: ...
    def devices(self) -> Sequence[Card]: ...


class UnrecordedHoldings(Protocol):
    """What pods have without an allocation record that counts (`deviceplugin.allocation.whole_cards.WholeCards`)."""

    def holdings(self) -> Sequence[Holding]: ...
    def is_undetermined(self) -> bool: ...


class StartListener(Protocol):
    """Is notified of the decisions about starts. Called on the event loop; must not block."""

    def start_refused(self, gpu_pod: GpuPod, reason: str) -> None:
        """A container of this pod may not start now; the kubelet will try again."""

    def start_granted(self, gpu_pod: GpuPod) -> None:
        """A container of this pod starts on the cards of the pod's record."""


@dataclass(frozen=True, slots=True)
class AllocationContext:
    """The parts of the agent that the allocators of all resources share.

    checkpoint: the kubelet's file.
    changed: wakes when pods, cards or slices change.
    mps: holds containers to their shares; None where nothing does.
    exposure: device nodes and mounts that containers get beside their environment.
    lingering, remnants: None where nothing looks for what is left of deleted pods.
    guess_budget: how long the answers of all resources together may wait, where the runtime has no CDI.
    """

    pods: NodePods
    devices: Devices
    owners: Owners
    checkpoint: Path
    delivery: CdiFiles | RecordExchange
    grants: Grants
    changed: Wakeup
    listener: StartListener
    unrecorded: UnrecordedHoldings
    mps: Mps | None = None
    exposure: Exposure = field(default_factory=Exposure)
    lingering: LingeringProcesses | None = None
    remnants: Remnants | None = None
    guess_budget: WaitBudget = field(default_factory=WaitBudget)


class Allocator:
    """The allocator of one resource, where the runtime has CDI. Used on one event loop."""

    def __init__(
        self,
        resource: str,
        context: AllocationContext,
        resend: Callable[[], None],
        wait_seconds: float | None = None,
    ) -> None:
        self._resource = resource
        self._context = context
        self._resend = resend
        self._wait_seconds = WAIT_SECONDS if wait_seconds is None else wait_seconds
        self._owners = IdOwners(resource, context.checkpoint, context.pods, context.owners, resend)
        self._served: set[Key] = set()
        self._corrected: set[Key] = set()
        self._resumed = False

    def resume(self) -> None:
        """Let containers start: from here on all pods of the node, and its cards, are known."""
        self._resumed = True

    def keep_only(self, uids: Collection[str]) -> None:
        """Forget all other pods."""
        self._served = {key for key in self._served if key[0] in uids}
        self._corrected = {key for key in self._corrected if key[0] in uids}

    async def allocate(self, ids: Sequence[str]) -> Answer:
        """Answer at once, from memory. Raises Refused where the runtime has no CDI."""
        name = new_name()
        answer = Answer(name, self._environment_of_only_candidate(len(ids)), cdi=(name,))
        self._owners.answered(frozenset(ids), name)
        return answer

    async def pre_start(self, ids: Sequence[str]) -> GpuPod:
        """Let the containers that hold these ids have what the allocation record of their pod says. Raises Refused."""
        deadline = asyncio.get_running_loop().time() + self._wait_seconds
        entries = await self._owners.entries(frozenset(ids), deadline)
        gpu_pod = await self._pod(entries[0].uid, deadline)
        if any(self._is_carrier(Target(gpu_pod, entry.container)) for entry in entries):
            gpu_pod = await self._until_decided(gpu_pod, entries, deadline)
            gpu_pod = await self._until_slices_exist(gpu_pod, entries, deadline)
        try:
            if self._context.lingering is not None:
                await self._context.lingering.wait_until_ended(gpu_pod, self._context.devices.devices(), deadline)
            await self._until_cards_free(gpu_pod, deadline)
            limits = await self._prepare_mps(gpu_pod, entries, deadline)
            self._start(gpu_pod, entries, limits)
        except Refused as error:
            self._context.listener.start_refused(gpu_pod, str(error))
            raise
        return gpu_pod

    # Allocate

    def _candidates(self, amount: int) -> Iterator[Target]:
        return candidates(self._context.pods.all(), self._resource, amount, self._served)

    def _environment_of_only_candidate(self, amount: int) -> Mapping[str, str]:
        """Return the environment of the container that the call is for, if only one can be meant; `void` otherwise.

        A wrong answer does no harm: the edits of the CDI device, which PreStartContainer writes, take precedence.
        """
        found = self._candidates(amount)
        target = next(found, None)
        if target is None or next(found, None) is not None:
            return VOID
        env: Mapping[str, str] = {}
        try:
            if self._is_carrier(target):
                env = environment(target, self._context.devices.devices(), self._context.devices.gpus())
        except Refused:
            return VOID  # not decided yet, or an invalid record: PreStartContainer waits, or says what is wrong
        self._served.add(target.key)
        return env

    def _is_carrier(self, target: Target) -> bool:
        """Return whether the container's cards come by this resource's answers.

        A container whose cards no resource can bring counts as carried by all, so that each of them reports it.
        """
        return target.carrier in (self._resource, "")

    # PreStartContainer: what a start waits for

    async def _pod(self, uid: str, deadline: float) -> GpuPod:
        """Wait for the pod to arrive from the API server: the kubelet may see it first. Raises Refused."""
        while True:
            gpu_pod = self._context.pods.by_uid(uid)
            if self._resumed and gpu_pod is not None:
                return gpu_pod
            if not await self._changed_before(deadline):
                if not self._resumed:
                    raise Refused("the pods and cards of this node are not known yet", uid)
                raise Refused(f"pod {uid} is not known from the API server yet")

    async def _until_decided(self, gpu_pod: GpuPod, entries: Sequence[PodDevicesEntry], deadline: float) -> GpuPod:
        """Wait for the pod's allocation record, which a late binding decision may write only now. Raises Refused."""
        while not (gpu_pod := self._with_kept_cards(gpu_pod, entries)).is_decided:
            if not await self._changed_before(deadline):
                limit = f"within {self._wait_seconds:g} s"
                why = f"; {gpu_pod.finding.message}" if gpu_pod.finding else ""
                uid = gpu_pod.pod.uid
                raise Refused(f"{gpu_pod.pod.key}: no cards have been decided for the pod {limit}{why}", uid)
            gpu_pod = await self._pod(gpu_pod.pod.uid, deadline)
        return gpu_pod

    async def _until_slices_exist(self, gpu_pod: GpuPod, entries: Sequence[PodDevicesEntry], deadline: float) -> GpuPod:
        """Wait until the slices that the record names are made. At the deadline `_start` refuses with the reason."""
        while any(lacks_slice(Target(gpu_pod, entry.container), self._context.devices.devices()) for entry in entries):
            if not await self._changed_before(deadline):
                break
            gpu_pod = await self._pod(gpu_pod.pod.uid, deadline)
        return gpu_pod

    async def _until_cards_free(self, gpu_pod: GpuPod, deadline: float) -> None:
        """Wait until nothing that is about to go holds the pod's cards. At the deadline `_start` refuses.

        Both kinds of holder are outside the API's accounts: deleted pods whose containers still run, and pods without a
        record, which hold everything until it is found out what they were handed (mostly nothing).
        """
        loop = asyncio.get_running_loop()
        while gpu_pod.shares is not None and self._may_become_free(gpu_pod) and loop.time() < deadline:
            await self._context.changed.wait(max(0.0, min(_POLL_SECONDS, deadline - loop.time())))

    def _may_become_free(self, gpu_pod: GpuPod) -> bool:
        if self._held_by_remnants(gpu_pod) is not None:
            return True
        return self._context.unrecorded.is_undetermined() and bool(self._over_capacity(gpu_pod))

    async def _prepare_mps(
        self, gpu_pod: GpuPod, entries: Sequence[PodDevicesEntry], deadline: float
    ) -> Mapping[Key, Edits]:
        """Return the edits of the containers that MPS holds to their shares, once its daemons run. Raises Refused."""
        if self._context.mps is None:
            return {}
        targets = [Target(gpu_pod, entry.container) for entry in entries if entry.device]
        carried = [target for target in targets if self._is_carrier(target)]
        limits = await self._context.mps.ready(carried, deadline)
        # A daemon takes seconds to start. The limits of a record that has changed meanwhile are wrong.
        now = self._latest(gpu_pod)
        if limits and (now is None or now.shares != gpu_pod.shares):
            raise Refused(f"{gpu_pod.pod.key}: its record has changed meanwhile", gpu_pod.pod.uid)
        return limits

    async def _changed_before(self, deadline: float) -> bool:
        """Wait for a change; return False at the deadline."""
        return await self._context.changed.wait(max(0.0, deadline - asyncio.get_running_loop().time()))

    def _with_kept_cards(self, gpu_pod: GpuPod, entries: Sequence[PodDevicesEntry]) -> GpuPod:
        """Return the pod with the cards that these containers were handed before, if its record does not count.

        Whatever made the record void (a key that this agent does not have, a stolen token, a scheduler of a version
        without seals), a container that has run starts again on what it had, and on nothing else. CDI files say what
        that was: only root can write them, and agents write one only for a record that counts.
        """
        if gpu_pod.finding is None or not gpu_pod.started_containers:
            return gpu_pod
        shares = self._context.grants.delivered_shares(gpu_pod, self._context.devices.devices())
        containers_with_cards = {share.container for share in shares}
        carried = {entry.container for entry in entries if self._is_carrier(Target(gpu_pod, entry.container))}
        return replace(gpu_pod, shares=shares) if carried <= containers_with_cards else gpu_pod

    def _latest(self, gpu_pod: GpuPod) -> GpuPod | None:
        """Return the pod as the API server has it by now, with the cards that it has kept; None if it is gone."""
        now = self._context.pods.by_uid(gpu_pod.pod.uid)
        if now is None or now.finding is None or gpu_pod.finding is None:
            return now
        return replace(now, shares=gpu_pod.shares)

    # PreStartContainer: the decision. Nothing from here on waits, so that no other call comes in between.

    def _start(self, gpu_pod: GpuPod, entries: Sequence[PodDevicesEntry], limits: Mapping[Key, Edits]) -> None:
        """Deliver to all containers that hold the ids. Raises Refused if none of them may start.

        The kubelet gives an init container's ids to later containers of the pod again, and does not say which of them
        it is about to start. Each gets the file that its own answer has named.
        """
        ready: list[tuple[PodDevicesEntry, Edits]] = []
        refused: list[tuple[PodDevicesEntry, Refused]] = []
        is_carried = False
        for entry in entries:
            target = Target(gpu_pod, entry.container)
            try:
                if self._is_carrier(target):
                    env = self._environment(target, entry)
                    is_carried = True
                else:
                    env = self._environment_beside_carrier(target, entry)
                limit = limits.get(target.key, Edits())
                shown = self._exposed(target, env)
                ready.append((entry, Edits({**env, **limit.env}, (*limit.mounts, *shown.mounts), shown.nodes)))
            except Refused as error:
                refused.append((entry, error))
        if not ready:
            raise refused[0][1]
        if not is_carried:
            self._deliver(gpu_pod, ready, refused)
            return
        gpu_pod = self._latest(gpu_pod) or gpu_pod
        if reason := self._over_capacity(gpu_pod) or self._held_by_remnants(gpu_pod):
            raise Refused(f"{gpu_pod.pod.key}: {reason}", gpu_pod.pod.uid)
        # The receipt comes first: an agent that dies in between must not forget that the pod may hold its cards.
        self._write_receipt(gpu_pod)
        self._deliver(gpu_pod, ready, refused)
        self._context.grants.grant(gpu_pod, self._context.devices.devices())
        if self._context.mps is not None:
            self._context.mps.mark_started(limits)
        self._context.listener.start_granted(gpu_pod)

    def _over_capacity(self, gpu_pod: GpuPod, remnants: Sequence[Holding] = ()) -> str | None:
        """Return why the pod does not fit beside what else has been handed out on this node, whatever records say."""
        foreign = (*self._context.unrecorded.holdings(), *remnants)
        pods, cards = self._context.pods.all(), self._context.devices.devices()
        return self._context.grants.refusal(gpu_pod, pods, cards, foreign)

    def _held_by_remnants(self, gpu_pod: GpuPod) -> str | None:
        """Return why the pod must not start beside deleted pods that still run.

        Those pods may be another tenant's, so the text names cards only.
        """
        remnants = self._context.remnants.holdings() if self._context.remnants is not None else ()
        if not remnants or self._over_capacity(gpu_pod, remnants) is None:
            return None
        cards = self._context.devices.devices()
        wanted = holding(gpu_pod, cards)
        shared = [card for card in cards if wanted.is_on(card) and any(held.is_on(card) for held in remnants)]
        named = ", ".join(f"{noun(card.type)} {card.index} ({card.uuid})" for card in shared)
        return (
            f"{named}: containers of a deleted pod still run there; the start is tried again, and succeeds once the "
            "container runtime reports that they have ended"
        )

    def _write_receipt(self, gpu_pod: GpuPod) -> None:
        """Raises Refused."""
        if self._context.remnants is None:
            return
        cards = self._context.devices.devices()
        try:
            self._context.remnants.write_receipt(gpu_pod, holding(gpu_pod, cards).shares, cards)
        except OSError as error:
            raise Refused(f"{gpu_pod.pod.key}: receipt not written: {error}", gpu_pod.pod.uid) from error

    # PreStartContainer: what a container gets

    def _environment(self, target: Target, entry: PodDevicesEntry) -> Mapping[str, str]:
        """Return the environment of a container that this resource carries. Raises Refused."""
        env = environment(target, self._context.devices.devices(), self._context.devices.gpus())
        # An answer from the time before the runtime had CDI stands in the checkpoint for good, and no file corrects it.
        if not entry.device and dict(entry.env) != env:
            raise Refused(f"{target} was admitted without CDI and given other cards", target.gpu_pod.pod.uid)
        self._count_correction(target, entry, env)
        return env

    def _count_correction(self, target: Target, entry: PodDevicesEntry, env: Mapping[str, str]) -> None:
        """Count an answer that named other cards; once for each container, which may start again."""
        if entry.env.get(VISIBLE) not in (VOID[VISIBLE], env[VISIBLE], None) and target.key not in self._corrected:
            self._corrected.add(target.key)
            CORRECTIONS.labels("answer").inc()

    def _environment_beside_carrier(self, target: Target, entry: PodDevicesEntry) -> Mapping[str, str]:
        """Return what this resource brings a container that another one carries. Raises Refused.

        The kubelet ignores requests for a resource that the node does not have at all, and starts the container
        nevertheless. So this call must not pass unless the carrier's ids were given out too.
        """
        uid = target.gpu_pod.pod.uid
        carried = read_checkpoint(self._context.checkpoint, target.carrier)
        if not any((row.uid, row.container) == (entry.uid, entry.container) for row in carried):
            self._resend()  # the file may be older than the carrier's answer
            missing = f"none of {target.carrier}, which brings its cards"
            raise Refused(f"{target}: the kubelet gave it ids of {self._resource}, but {missing}", uid)
        if not entry.device and VISIBLE in entry.env:
            raise Refused(f"{target}: at admission the cards of another pod were given to it", uid)
        # CDI accepts no device without edits.
        return {CARRIER_VARIABLE: target.carrier}

    def _exposed(self, target: Target, env: Mapping[str, str]) -> Edits:
        """Return the environment with the mounts and device nodes that the settings ask for. Raises Refused."""
        shown = self._context.exposure.edits(target, env, self._context.devices.devices(), self._context.devices.gpus())
        return Edits(env, shown.mounts, shown.nodes)

    def _deliver(
        self,
        gpu_pod: GpuPod,
        ready: Sequence[tuple[PodDevicesEntry, Edits]],
        refused: Sequence[tuple[PodDevicesEntry, Refused]],
    ) -> None:
        """Write the CDI files of the containers that are ready, and remove those of the refused ones. Raises Refused.

        Without its file the runtime cannot create a refused container, which holds the same ids as one that is ready.
        """
        files, uid = self._context.delivery, gpu_pod.pod.uid
        assert isinstance(files, CdiFiles)
        try:
            for entry, edits in ready:
                if entry.device:
                    files.write(entry.name, uid, entry.container, edits.env, edits.mounts, edits.nodes)
        except OSError as error:
            raise Refused(f"{gpu_pod.pod.key}: CDI file not written: {error}", uid) from error
        for entry, _ in refused:
            if entry.device:
                files.remove(entry.name, uid, entry.container)
        for reason in pending(gpu_pod, refused):
            self._context.listener.start_refused(gpu_pod, str(reason))


def pending(gpu_pod: GpuPod, refused: Sequence[tuple[PodDevicesEntry, Refused]]) -> list[Refused]:
    """Return the refusals that matter: an init container that has ended well is not started again."""
    return [error for entry, error in refused if entry.container not in gpu_pod.completed_init_containers]
