"""Which containers hold the ids of a `PreStartContainer`: certain, or not said at all."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from deviceplugin.kubelet.checkpoint import Given, read_checkpoint
from deviceplugin.kubelet.pod_resources import Owner
from deviceplugin.pods.identity import Refused
from deviceplugin.pods.node_pods import NodePods
from mgpu.model.errors import RetryLater
from mgpu.model.pod_references import named_to

_RETRY_SECONDS = 0.2
_REMEMBERED = 4096

Ids = frozenset[str]


class Owners(Protocol):
    async def owners(self, resource: str) -> list[Owner]:
        """All containers that hold ids of `resource`. Raises RetryLater."""


class Whose:
    """Of one resource. The kubelet's checkpoint says it, once it is known to be no older than the ids' last answer.

    Two writers of the kubelet can overtake each other, so that an older state of the checkpoint stands in the file;
    `resend` (the device list, once more) makes it write anew.
    """

    def __init__(
        self, resource: str, checkpoint: Path, pods: NodePods, owners: Owners, resend: Callable[[], None]
    ) -> None:
        self._resource, self._checkpoint = resource, checkpoint
        self._pods, self._owners, self._resend = pods, owners, resend
        self._answered: OrderedDict[Ids, str] = OrderedDict()

    def answered(self, ids: Ids, name: str) -> None:
        """Allocate answered for these ids, under a fresh name: whoever held them before does no longer."""
        self._answered[ids] = name
        self._answered.move_to_end(ids)
        if len(self._answered) > _REMEMBERED:
            self._answered.popitem(last=False)

    async def holders(self, ids: Ids, deadline: float) -> list[Given]:
        """The containers, of one pod, that hold exactly `ids`. Raises Refused at the deadline (the loop's time).

        Several where the kubelet gave an init container's ids to later containers of its pod again.
        """
        loop = asyncio.get_running_loop()
        while True:
            given = read_checkpoint(self._checkpoint, self._resource, ids)
            doubt = await self._doubt(ids, given)
            if not doubt:
                return given
            if loop.time() >= deadline:
                raise Refused(doubt)
            self._resend()
            await asyncio.sleep(_RETRY_SECONDS)

    async def _doubt(self, ids: Ids, given: list[Given]) -> str:
        """Why `given` may not be who holds the ids; "" where it is certain."""
        if not given:
            return f"the kubelet's checkpoint names no owner of {len(ids)} ids of {self._resource}"
        latest = self._answered.get(ids)
        if latest is not None:
            names = {row.name for row in given}
            return "" if latest in names else "the kubelet's checkpoint does not have the last answer for these ids yet"
        # An agent before this one answered. Then the kubelet itself must not say otherwise now.
        known = self._pods.by_uid(given[0].uid)
        if known is None:
            return f"pod {given[0].uid} is not known from the API server yet"
        try:
            owners = await self._owners.owners(self._resource)
        except RetryLater as error:
            return str(error)
        pod = known.pod
        pods = {(o.namespace, o.name) for o in owners if o.ids & ids} - {(pod.namespace, pod.name)}
        if not pods:
            return ""
        return f"the kubelet's checkpoint gives the ids to {pod.key}, PodResources to {named_to(pod.namespace, pods)}"
