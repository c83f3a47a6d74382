"""Answers Allocate and PreStartContainer for one resource.

`deviceplugin.plugin.plugin_server` calls the `Allocator`; `allocator_without_cdi` overrides what differs if the runtime
has no CDI. This module contains no gRPC and does not call the API server. Its design follows from the behavior of the
kubelet (docs/design/kubernetes.md, "Device manager"):

1. When the kubelet admits a pod, it calls Allocate for each container and resource. The call contains device ids, but
   does not name the pod. The kubelet's sync loop waits for the answer without a timeout. So `Allocator.allocate`
   answers from memory. The environment in the answer need not be right, because the answer also names a CDI device that
   does not exist yet, and whose file later overrides that environment.
2. The kubelet writes the pod's UID, the container, the ids and the answer into its checkpoint.
3. Before it creates a container it calls PreStartContainer with the container's ids, and waits up to 30 seconds.
   `Allocator.pre_start` finds the owner of the ids in the checkpoint, waits for the pod's allocation record, and writes
   the file of the CDI device. The runtime cannot create a container whose CDI device has no file. So no container
   starts on cards that were not decided for it.

If a container requests several resources, the answer for one of them, its carrier, brings the cards. The answers for
the other resources bring no cards, so the order in which the kubelet merges the answers does not matter. The kubelet
calls PreStartContainer for each resource, so a container that the carrier's allocator refuses does not start.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from deviceplugin.allocation.id_owners import IdOwners, Owners
from deviceplugin.allocation.wait_budget import WaitBudget
from deviceplugin.delivery.cdi import CARRIER_VARIABLE, CdiFiles, Edits, Mount, new_name
from deviceplugin.delivery.exchange import RecordExchange
from deviceplugin.delivery.visibility import Exposure
from deviceplugin.event_loop import Wakeup
from deviceplugin.isolation.isolation import Isolation
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
"""How long PreStartContainer waits for missing data. The kubelet waits 30 s for an answer, and retries 10 s after an
error."""
_POLL_SECONDS = 0.5

Key = tuple[str, str]
"""The UID of a pod, and the name of one of its containers."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to Allocate for one container.

    Attributes:
        name: The name of the CDI device. It is unique, so that it identifies the answer in the checkpoint.
        env: The environment variables of the container.
        cdi: The names of the CDI devices; empty if the runtime has no CDI.
        annotations: The annotations of the answer; without CDI, one of them stores `name` in the checkpoint.
        mounts: The mounts in the form of `Edits.mounts`; empty if the runtime has CDI.
        nodes: The device nodes in the form of `Edits.nodes`; empty if the runtime has CDI.
    """

    name: str
    env: Mapping[str, str]
    cdi: tuple[str, ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    nodes: tuple[str, ...] = ()


class Devices(Protocol):
    """The part of `deviceplugin.node_devices.NodeDevices` that is used here.

    `gpus` returns all GPUs of the node. `devices` returns the GPUs that are not partitioned, and the slices.
    """

    def gpus(self) -> Sequence[Card]: ...
    def devices(self) -> Sequence[Card]: ...


class UnrecordedHoldings(Protocol):
    """The part of `deviceplugin.allocation.whole_cards.WholeCards` that is used here."""

    def holdings(self) -> Sequence[Holding]: ...
    def is_undetermined(self) -> bool: ...


class StartListener(Protocol):
    """An object that allocators tell whether containers may start.

    The methods run on the event loop, so they must not block.
    """

    def start_refused(self, gpu_pod: GpuPod, reason: str) -> None:
        """Report that a container of this pod may not start now. The kubelet calls PreStartContainer again."""

    def start_granted(self, gpu_pod: GpuPod) -> None:
        """Record that a container of this pod may start on the cards of the pod's allocation record."""


@dataclass(frozen=True, slots=True)
class AllocationContext:
    """The parts of the agent that the allocators of all resources share.

    Attributes:
        delivery: The CDI files, or the exchange of records that replaces them if the container runtime has no CDI.
        changed: A signal that wakes coroutines when pods, cards, slices or remnants change.
        unrecorded: The holdings of pods that got cards from another plugin or have no allocation record.
        isolation: The part that limits containers to their shares; None if the container runtime has no CDI.
        lingering: The check for processes that outlive their containers; None to skip it.
        remnants: The remnants of the node; None to ignore them.
        claims: A function that returns what ResourceClaims hold of the node's cards (`dra.prepared_claims`).
        wait_budget: The limit for the time that answers to Allocate wait if the container runtime has no CDI.
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
    isolation: Isolation | None = None
    exposure: Exposure = field(default_factory=Exposure)
    lingering: LingeringProcesses | None = None
    remnants: Remnants | None = None
    claims: Callable[[], Sequence[Holding]] = lambda: ()
    wait_budget: WaitBudget = field(default_factory=WaitBudget)


class Allocator:
    """The allocator of one resource, for a container runtime with CDI. Use it on one event loop.

    Args:
        resend: A function that sends the resource's device list to the kubelet again. The kubelet then writes its
            checkpoint.
        wait_seconds: How long PreStartContainer waits for missing data; `WAIT_SECONDS` if None.
    """

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
        """Let containers start from now on. Call this after all pods and cards of the node have been read."""
        self._resumed = True

    def keep_only(self, uids: Collection[str]) -> None:
        self._served = {key for key in self._served if key[0] in uids}
        self._corrected = {key for key in self._corrected if key[0] in uids}

    async def allocate(self, ids: Sequence[str]) -> Answer:
        """Return the answer for a container that gets these ids.

        `AllocatorWithoutCdi` may raise Refused; this method does not.
        """
        name = new_name()
        answer = Answer(name, self._environment_of_only_candidate(len(ids)), cdi=(name,))
        self._owners.record_answer(frozenset(ids), name)
        return answer

    async def pre_start(self, ids: Sequence[str]) -> GpuPod:
        """Deliver the cards of the pod's allocation record to the containers that hold these ids; return the pod.

        The method waits for missing data until `wait_seconds` have passed. Raises Refused if none of the containers may
        start.
        """
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
            limits = await self._prepare_limits(gpu_pod, entries, deadline)
            self._start(gpu_pod, entries, limits)
        except Refused as error:
            self._context.listener.start_refused(gpu_pod, str(error))
            raise
        return gpu_pod

    # Allocate

    def _candidates(self, amount: int) -> Iterator[Target]:
        return candidates(self._context.pods.all(), self._resource, amount, self._served)

    def _environment_of_only_candidate(self, amount: int) -> Mapping[str, str]:
        """Return the environment of the only container that the call can be for.

        The result is `VOID` if there is no such container, if there are several, or if the container may not start yet.
        A wrong answer does no harm: the edits of the CDI device, which PreStartContainer writes, take precedence.
        """
        targets = self._candidates(amount)
        target = next(targets, None)
        if target is None or next(targets, None) is not None:
            return VOID
        env: Mapping[str, str] = {}
        try:
            if self._is_carrier(target):
                env = environment(target, self._context.devices.devices(), self._context.devices.gpus())
        except Refused:
            return VOID  # Without a decision PreStartContainer waits, and for an invalid record it reports the reason.
        self._served.add(target.key)
        return env

    def _is_carrier(self, target: Target) -> bool:
        """Return whether this resource is the carrier of the container.

        If no resource can be the carrier, every resource counts as one, so that each of them reports the problem.
        """
        return target.carrier in (self._resource, "")

    # PreStartContainer: the data that a start waits for

    async def _pod(self, uid: str, deadline: float) -> GpuPod:
        """Wait for the pod, which the kubelet may observe before the watch delivers it. Raises Refused."""
        while True:
            gpu_pod = self._context.pods.by_uid(uid)
            if self._resumed and gpu_pod is not None:
                return gpu_pod
            if not await self._changed_before(deadline):
                if not self._resumed:
                    raise Refused("the pods and cards of this node have not been read yet", uid)
                raise Refused(f"the API server has not delivered pod {uid} yet")

    async def _until_decided(self, gpu_pod: GpuPod, entries: Sequence[PodDevicesEntry], deadline: float) -> GpuPod:
        """Wait for the allocation record, which a late binding decision may write after the pod. Raises Refused."""
        while not (gpu_pod := self._with_kept_cards(gpu_pod, entries)).is_decided:
            if not await self._changed_before(deadline):
                limit = f"within {self._wait_seconds:g} s"
                cause = f"; {gpu_pod.finding.message}" if gpu_pod.finding else ""
                uid = gpu_pod.pod.uid
                raise Refused(f"{gpu_pod.pod.key}: no cards have been decided for the pod {limit}{cause}", uid)
            gpu_pod = await self._pod(gpu_pod.pod.uid, deadline)
        return gpu_pod

    async def _until_slices_exist(self, gpu_pod: GpuPod, entries: Sequence[PodDevicesEntry], deadline: float) -> GpuPod:
        """Wait until the slices of the record exist. If one is still missing at the deadline, `_start` refuses."""
        while any(lacks_slice(Target(gpu_pod, entry.container), self._context.devices.devices()) for entry in entries):
            if not await self._changed_before(deadline):
                break
            gpu_pod = await self._pod(gpu_pod.pod.uid, deadline)
        return gpu_pod

    async def _until_cards_free(self, gpu_pod: GpuPod, deadline: float) -> None:
        """Wait until no temporary holding keeps the pod from its cards. If one does at the deadline, `_start` refuses.

        Two kinds of holdings are temporary: those of remnants, and those of unrecorded pods, which hold a share of
        every card until the agent has found out which cards they were given.
        """
        loop = asyncio.get_running_loop()
        while gpu_pod.shares is not None and self._may_become_free(gpu_pod) and loop.time() < deadline:
            await self._context.changed.wait(max(0.0, min(_POLL_SECONDS, deadline - loop.time())))

    def _may_become_free(self, gpu_pod: GpuPod) -> bool:
        if self._held_by_remnants(gpu_pod) is not None:
            return True
        return self._context.unrecorded.is_undetermined() and bool(self._over_capacity(gpu_pod))

    async def _prepare_limits(
        self, gpu_pod: GpuPod, entries: Sequence[PodDevicesEntry], deadline: float
    ) -> Mapping[Key, Edits]:
        """Wait for the limits of the containers, and return the edits of those that are limited. Raises Refused."""
        if self._context.isolation is None:
            return {}
        targets = [Target(gpu_pod, entry.container) for entry in entries if entry.device]
        carried = [target for target in targets if self._is_carrier(target)]
        limits = await self._context.isolation.ready(carried, deadline)
        # An MPS daemon takes seconds to start. The limits are wrong if the record has changed in this time.
        now = self._latest(gpu_pod)
        if limits and (now is None or now.limited_shares != gpu_pod.limited_shares):
            raise Refused(f"{gpu_pod.pod.key}: its allocation record has changed during the start", gpu_pod.pod.uid)
        return limits

    async def _changed_before(self, deadline: float) -> bool:
        """Wait for a change. Return False if there is none before the deadline."""
        return await self._context.changed.wait(max(0.0, deadline - asyncio.get_running_loop().time()))

    def _with_kept_cards(self, gpu_pod: GpuPod, entries: Sequence[PodDevicesEntry]) -> GpuPod:
        """Return the pod with the cards that these containers got before, if its allocation record does not count.

        A container that has run may start again on the cards that it had, whether its record has no seal, or a seal of
        an unknown key, or was forged. The grants and the CDI files name these cards. They can be trusted: only root can
        write the files, and agents write them only for records that count.
        """
        if gpu_pod.finding is None or not gpu_pod.started_containers:
            return gpu_pod
        shares = self._context.grants.delivered_shares(gpu_pod, self._context.devices.devices())
        containers_with_cards = {share.container for share in shares}
        carried = {entry.container for entry in entries if self._is_carrier(Target(gpu_pod, entry.container))}
        return replace(gpu_pod, shares=shares) if carried <= containers_with_cards else gpu_pod

    def _latest(self, gpu_pod: GpuPod) -> GpuPod | None:
        """Return the current version of the pod, or None if it is gone.

        If neither version has a record that counts, the result has the cards of `gpu_pod` (`_with_kept_cards`).
        """
        now = self._context.pods.by_uid(gpu_pod.pod.uid)
        if now is None or now.finding is None or gpu_pod.finding is None:
            return now
        return replace(now, shares=gpu_pod.shares)

    # PreStartContainer: the decision. `_start` does not await, so no other call can run between its steps.

    def _start(self, gpu_pod: GpuPod, entries: Sequence[PodDevicesEntry], limits: Mapping[Key, Edits]) -> None:
        """Deliver the cards to all containers that hold the ids. Raises Refused if none of them may start.

        The kubelet reuses an init container's ids for later containers of the pod, and the call does not say which
        container will start. So each container gets the file that its own answer has named.
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
                    env = self._environment_without_cards(target, entry)
                ready.append((entry, self._with_exposure(target, env) | limits.get(target.key, Edits())))
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
        # The receipt comes first: if the agent dies after it, the next one knows that the pod may hold its cards.
        self._write_receipt(gpu_pod)
        self._deliver(gpu_pod, ready, refused)
        self._context.grants.grant(gpu_pod, self._context.devices.devices())
        if self._context.isolation is not None:
            self._context.isolation.mark_started(limits)
        self._context.listener.start_granted(gpu_pod)

    def _over_capacity(self, gpu_pod: GpuPod, remnants: Sequence[Holding] = ()) -> str | None:
        """Return why the pod does not fit on its cards beside the pods that were given cards before, or None.

        The allocation records of pods that have not started do not count.
        """
        foreign = (*self._context.unrecorded.holdings(), *self._context.claims(), *remnants)
        pods, cards = self._context.pods.all(), self._context.devices.devices()
        return self._context.grants.refusal(gpu_pod, pods, cards, foreign)

    def _held_by_remnants(self, gpu_pod: GpuPod) -> str | None:
        """Return why the pod must not start beside the remnants on this node, or None.

        Remnants may belong to another tenant, so the text names only cards.
        """
        remnants = self._context.remnants.holdings() if self._context.remnants is not None else ()
        if not remnants or self._over_capacity(gpu_pod, remnants) is None:
            return None
        cards = self._context.devices.devices()
        own = holding(gpu_pod, cards)
        shared = [card for card in cards if own.is_on(card) and any(remnant.is_on(card) for remnant in remnants)]
        names = ", ".join(f"{noun(card.type)} {card.index} ({card.uuid})" for card in shared)
        return (
            f"{names}: containers of a deleted pod still run there; the start is retried, and succeeds once the "
            "container runtime reports that they have ended"
        )

    def _write_receipt(self, gpu_pod: GpuPod) -> None:
        """Write the receipt of the pod. Raises Refused if that fails."""
        if self._context.remnants is None:
            return
        cards = self._context.devices.devices()
        try:
            self._context.remnants.write_receipt(gpu_pod.pod.uid, holding(gpu_pod, cards).shares, cards, gpu_pod)
        except OSError as error:
            raise Refused(f"{gpu_pod.pod.key}: receipt not written: {error}", gpu_pod.pod.uid) from error

    # PreStartContainer: the edits of a container

    def _environment(self, target: Target, entry: PodDevicesEntry) -> Mapping[str, str]:
        """Return the environment of a container whose carrier is this resource. Raises Refused."""
        env = environment(target, self._context.devices.devices(), self._context.devices.gpus())
        # The kubelet keeps an answer that the agent gave without CDI (`--no-cdi`), and no CDI file can correct it.
        if not entry.device and dict(entry.env) != env:
            raise Refused(f"{target} was admitted without CDI and given other cards", target.gpu_pod.pod.uid)
        self._count_correction(target, entry, env)
        return env

    def _count_correction(self, target: Target, entry: PodDevicesEntry, env: Mapping[str, str]) -> None:
        """Count an answer that named other cards than `env`, at most once for each container."""
        if entry.env.get(VISIBLE) not in (VOID[VISIBLE], env[VISIBLE], None) and target.key not in self._corrected:
            self._corrected.add(target.key)
            CORRECTIONS.labels("answer").inc()

    def _environment_without_cards(self, target: Target, entry: PodDevicesEntry) -> Mapping[str, str]:
        """Return the environment of a container whose carrier is another resource. Raises Refused.

        The kubelet ignores requests for a resource that the node does not advertise, and starts the container
        nevertheless. So this call must not succeed unless the kubelet has allocated ids of the carrier too.
        """
        uid = target.gpu_pod.pod.uid
        of_carrier = read_checkpoint(self._context.checkpoint, target.carrier)
        if not any((row.uid, row.container) == (entry.uid, entry.container) for row in of_carrier):
            self._resend()  # the file may be older than the answer for the carrier
            missing = f"none of {target.carrier}, which brings its cards"
            raise Refused(f"{target}: the kubelet gave it ids of {self._resource}, but {missing}", uid)
        if not entry.device and VISIBLE in entry.env:
            raise Refused(f"{target} was given the cards of another container at admission", uid)
        # A CDI device must have at least one edit.
        return {CARRIER_VARIABLE: target.carrier}

    def _with_exposure(self, target: Target, env: Mapping[str, str]) -> Edits:
        """Return the environment, with mounts and device nodes if the settings require them. Raises Refused."""
        devices = self._context.devices
        return self._context.exposure.edits(target, env, devices.devices(), devices.gpus())

    def _deliver(
        self,
        gpu_pod: GpuPod,
        ready: Sequence[tuple[PodDevicesEntry, Edits]],
        refused: Sequence[tuple[PodDevicesEntry, Refused]],
    ) -> None:
        """Write the CDI files of the containers that are ready, and remove those of the refused ones. Raises Refused.

        PreStartContainer succeeds even if some of the containers are refused. They cannot start without their files.
        """
        files, uid = self._context.delivery, gpu_pod.pod.uid
        assert isinstance(files, CdiFiles)
        try:
            for entry, edits in ready:
                if entry.device:
                    files.write(entry.name, uid, entry.container, edits)
        except OSError as error:
            raise Refused(f"{gpu_pod.pod.key}: CDI file not written: {error}", uid) from error
        for entry, _ in refused:
            if entry.device:
                files.remove(entry.name, uid, entry.container)
        for refusal in relevant_refusals(gpu_pod, refused):
            self._context.listener.start_refused(gpu_pod, str(refusal))


def relevant_refusals(gpu_pod: GpuPod, refused: Sequence[tuple[PodDevicesEntry, Refused]]) -> list[Refused]:
    """Return the refusals, except those of init containers that have succeeded, because these do not start again."""
    return [error for entry, error in refused if entry.container not in gpu_pod.completed_init_containers]
