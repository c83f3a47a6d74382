"""Answers Allocate and PreStartContainer for one resource without CDI (setting `deviceplugin.cdi`).

Without CDI nothing can correct an answer to Allocate: the kubelet keeps the answer for the life of the container. So
`allocate` assumes that the call is for the oldest pod that waits for this amount and whose cards are decided. If there
is no such pod, it waits briefly, and then refuses. If the assumption was wrong, pods with equal requests exchange their
allocation records before the container starts (`deviceplugin.delivery.exchange`). If their requests differ although the
amounts of the resource are equal, the start is refused. Slices and MPS need CDI. `allocation.make_allocator` chooses
this allocator, and `plugin.plugin_server` calls it.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence

from deviceplugin.allocation.allocator import Allocator, Answer, relevant_refusals
from deviceplugin.delivery.cdi import ANSWER_ANNOTATION, Edits, new_name
from deviceplugin.delivery.exchange import RecordExchange
from deviceplugin.kubelet.checkpoint import PodDevicesEntry, read_checkpoint
from deviceplugin.pods.gpu_pod import GpuPod
from deviceplugin.pods.identity import Refused, Target, environment

log = logging.getLogger(__name__)


class AllocatorWithoutCdi(Allocator):
    """The allocator of one resource for a runtime without CDI. Use it on one event loop."""

    @property
    def _exchange(self) -> RecordExchange:
        assert isinstance(self._context.delivery, RecordExchange)
        return self._context.delivery

    def resume(self) -> None:
        """Let containers start, and make the allocation records agree with the answers of earlier agents.

        The answers are in the kubelet's checkpoint. All records that agree with their answers are confirmed first, so
        that only containers whose answer and record differ take part in an exchange.
        """
        super().resume()
        mismatched = []
        for entry in read_checkpoint(self._context.checkpoint, self._resource):
            gpu_pod = self._context.pods.by_uid(entry.uid)
            if gpu_pod is not None and not gpu_pod.pod.ended:
                target = Target(gpu_pod, entry.container)
                self._served.add(target.key)
                is_decided = gpu_pod.shares is not None and self._is_carrier(target)
                if is_decided and not self._exchange.confirm(target, entry.env):
                    mismatched.append(entry)
        for entry in mismatched:
            gpu_pod = self._context.pods.by_uid(entry.uid)
            if gpu_pod is not None:
                try:
                    self._exchange.reconcile(Target(gpu_pod, entry.container), entry.env, self._served)
                except Refused as error:
                    log.warning(
                        "the allocation record could not be changed to agree with the answer to Allocate: %s",
                        error,
                        extra={"pod": entry.uid},
                    )

    async def allocate(self, ids: Sequence[str]) -> Answer:
        """Return an answer with the cards of the oldest candidate that has cards. Raises Refused.

        If there is no such candidate, the method waits for one within the `WaitBudget`.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            deadline = began + self._context.wait_budget.allowance()
            edits = await self._edits_of_oldest_candidate(len(ids), deadline)
        finally:
            self._context.wait_budget.spend(loop.time() - began)
        name = new_name()
        self._owners.record_answer(frozenset(ids), name)
        return Answer(name, edits.env, (), {ANSWER_ANNOTATION: name}, edits.mounts, edits.nodes)

    async def _edits_of_oldest_candidate(self, amount: int, deadline: float) -> Edits:
        while True:
            reason = f"no pod on this node waits for this amount of {self._resource}"
            for target in self._candidates(amount) if self._resumed else ():
                try:
                    edits = self._edits(target) if self._is_carrier(target) else Edits()
                except Refused as error:
                    reason = str(error)
                else:
                    self._served.add(target.key)
                    return edits
            if not await self._changed_before(deadline):
                raise Refused(reason)

    def _edits(self, target: Target) -> Edits:
        if target.requests_slices:
            raise Refused(f"{target}: slices need a container runtime with CDI", target.gpu_pod.pod.uid)
        return self._with_exposure(target, environment(target, self._context.devices.devices()))

    def _with_kept_cards(self, gpu_pod: GpuPod, entries: Sequence[PodDevicesEntry]) -> GpuPod:  # noqa: ARG002
        """Return the pod unchanged: without CDI files nothing trustworthy says which cards the pod had."""
        return gpu_pod

    def _environment(self, target: Target, entry: PodDevicesEntry) -> Mapping[str, str]:
        """Make the record agree with the answer to Allocate, and return the environment. Raises Refused."""
        self._exchange.reconcile(target, entry.env, self._served)
        now = self._context.pods.by_uid(target.gpu_pod.pod.uid) or target.gpu_pod
        target = Target(now, target.container)
        env = environment(target, self._context.devices.devices(), self._context.devices.gpus())
        self._count_correction(target, entry, env)
        return env

    def _deliver(
        self,
        gpu_pod: GpuPod,
        ready: Sequence[tuple[PodDevicesEntry, Edits]],  # noqa: ARG002
        refused: Sequence[tuple[PodDevicesEntry, Refused]],
    ) -> None:
        """Raise Refused for all containers if one is refused: only a failed call keeps a container from starting.

        The refusal of an init container that has succeeded is ignored.
        """
        for refusal in relevant_refusals(gpu_pod, refused):
            raise refusal
