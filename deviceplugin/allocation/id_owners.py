"""Finds the containers that hold the device ids of a PreStartContainer call.

The allocator of each resource has an `IdOwners`, in which it records the name of every answer to Allocate. A start is
refused if it is not certain which containers hold the ids, so that no container gets the CDI file of another one.
`allocation.whole_cards` uses the protocol `Owners`.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from deviceplugin.kubelet.checkpoint import PodDevicesEntry, read_checkpoint
from deviceplugin.kubelet.pod_resources import Owner
from deviceplugin.pods.identity import Refused
from deviceplugin.pods.node_pods import NodePods
from mgpu.model.errors import RetryLater
from mgpu.model.pod_references import names_visible_to

_RETRY_SECONDS = 0.2
_REMEMBERED_ANSWERS = 4096
"""The most answers that are remembered. An older answer is treated like the answer of an earlier agent
(`_uncertainty_of_earlier_answer`)."""

Ids = frozenset[str]
"""The device ids of one call."""


class Owners(Protocol):
    """The part of `deviceplugin.kubelet.pod_resources.PodResources` that is used here."""

    async def owners(self, resource: str) -> list[Owner]:
        """Return all containers that hold ids of the resource. Raises RetryLater."""


class IdOwners:
    """The owners of one resource's ids. Use it on one event loop.

    The kubelet's checkpoint names the owners, but it may be out of date: two writers in the kubelet can overtake each
    other, and the file then contains the older state until the kubelet writes it again. An entry is current if it has
    the name of the last answer for its ids. While no entry is current, `resend` makes the kubelet write the file again.

    Args:
        resend: A function that sends the resource's device list to the kubelet again.
    """

    def __init__(
        self, resource: str, checkpoint: Path, pods: NodePods, owners: Owners, resend: Callable[[], None]
    ) -> None:
        self._resource = resource
        self._checkpoint = checkpoint
        self._pods = pods
        self._owners = owners
        self._resend = resend
        self._names: OrderedDict[Ids, str] = OrderedDict()

    def record_answer(self, ids: Ids, name: str) -> None:
        """Record the name of the answer to Allocate for these ids. Their previous owner does not hold them any more."""
        self._names[ids] = name
        self._names.move_to_end(ids)
        if len(self._names) > _REMEMBERED_ANSWERS:
            self._names.popitem(last=False)

    async def entries(self, ids: Ids, deadline: float) -> list[PodDevicesEntry]:
        """Return the checkpoint's entries of the containers that hold exactly these ids. They belong to one pod.

        There are several entries if the kubelet has reused an init container's ids for later containers of the pod.
        Raises Refused if the owner is still not certain at the deadline, a time of the event loop's clock.
        """
        loop = asyncio.get_running_loop()
        while True:
            entries = read_checkpoint(self._checkpoint, self._resource, ids)
            reason = await self._uncertainty(ids, entries)
            if reason is None:
                return entries
            if loop.time() >= deadline:
                raise Refused(reason)
            self._resend()
            await asyncio.sleep(_RETRY_SECONDS)

    async def _uncertainty(self, ids: Ids, entries: Sequence[PodDevicesEntry]) -> str | None:
        """Return why the containers of `entries` may not hold the ids, or None if they certainly do."""
        if not entries:
            return f"the kubelet's checkpoint names no owner of {len(ids)} ids of {self._resource}"
        name = self._names.get(ids)
        if name is None:
            return await self._uncertainty_of_earlier_answer(ids, entries[0].uid)
        if all(entry.name != name for entry in entries):
            return "the kubelet's checkpoint does not have the last answer for these ids yet"
        return None

    async def _uncertainty_of_earlier_answer(self, ids: Ids, uid: str) -> str | None:
        """Return why it is uncertain that the pod owns ids for which an earlier agent answered, or None.

        The checkpoint is trusted unless PodResources contradicts it. PodResources alone is not enough: it leaves out
        regular init containers, and it does not report the UIDs of pods.
        """
        gpu_pod = self._pods.by_uid(uid)
        if gpu_pod is None:
            return f"the API server has not delivered pod {uid} yet"
        try:
            owners = await self._owners.owners(self._resource)
        except RetryLater as error:
            return str(error)
        pod = gpu_pod.pod
        others = {(owner.namespace, owner.name) for owner in owners if owner.ids & ids} - {(pod.namespace, pod.name)}
        if not others:
            return None
        names = names_visible_to(pod.namespace, others)
        return f"the kubelet's checkpoint assigns the ids to {pod.key}, but PodResources to {names}"
