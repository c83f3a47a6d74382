"""Finds out which cards the pods without an allocation record have.

Such a pod may have cards from another plugin or from the time before mgpu was installed. It may also have cards from
this agent, if its record was lost later. Otherwise it is a bare pod, which has no cards: if no plugin offers the
resource that a container requests, the kubelet starts the container without calling a plugin. The sources are the
kubelet's checkpoint, the CDI files, and the container runtime, which knows the environments of containers. A pod whose
cards cannot be found out counts on every card, so that no card is given out twice. `allocation.whole_cards` calls
`UnrecordedPods.update`, and the agent reports the rows in the Device (`mgpu.model.device_checkpoints.CHECKPOINTS`).
"""

import asyncio
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from deviceplugin.cards import NodeGpus
from deviceplugin.inventory.offers import WHOLE_CARDS
from deviceplugin.pods.capacity_check import Grants
from deviceplugin.pods.gpu_pod import GpuPod, kubelets_uid
from deviceplugin.pods.identity import VISIBLE
from deviceplugin.pods.node_pods import NodePods
from deviceplugin.pods.receipts import device_rows, merge_by_card
from mgpu.model.device_checkpoints import CheckpointEntry, no_devices_entry
from mgpu.model.errors import RetryLater
from mgpu.model.gpu_requests import GpuRequest
from mgpu.model.ledger import Share, share_of, unknown_shares

log = logging.getLogger(__name__)

_RETRY_SECONDS = 10.0
_NONE = ("", "none", "void")


class Environments(Protocol):
    """The part of `ContainerRuntime` that is needed here."""

    async def environments(self, uid: str) -> Mapping[str, Mapping[str, str]]:
        """Return the environments of containers that run or have run, by container. Raises RetryLater."""


class SliceReports(Protocol):
    """The part of `NodePartitions` that is needed here."""

    @property
    def reports_users(self) -> bool:
        """Whether the Node's annotations may say which pods use which slices."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """The cards that were found for a pod.

    Attributes:
        ran: The containers that had run when the pod was examined.
        shares: The shares of the pod; empty if it has no cards, None if its cards could not be found out.
        checked: Whether the kubelet's checkpoint could be read. If it could not, the pod is not taken for a bare pod.
    """

    ran: frozenset[str]
    shares: tuple[Share, ...] | None
    checked: bool

    def is_final(self, gpu_pod: GpuPod, *, checkable: bool) -> bool:
        """Return whether another query, which can read the checkpoint if `checkable`, would give the same answer."""
        if self.ran != gpu_pod.started_containers or self.shares is None:
            return False
        return bool(self.shares) or self.checked or not checkable


class UnrecordedPods:
    """The pods that run without a record, and their cards.

    Use it on one event loop; any thread may read the attributes.

    A pod is examined until it is certain which cards it has, and again when another of its containers has run. The
    result is stored while the pod has no record.

    Args:
        gpus: The GPUs of the node, including partitioned ones.
        grants: The devices that agents have delivered. `UnrecordedPods` also sets `Grants.bare`.

    Attributes:
        bare: The UIDs of bare pods.
        certain_rows: The rows for the Device of the pods that have cards.
        possible_rows: The rows for the Device of the pods that may have cards.
    """

    def __init__(
        self,
        runtime: Environments,
        pods: NodePods,
        gpus: NodeGpus,
        grants: Grants,
        slices: SliceReports,
    ) -> None:
        self._runtime = runtime
        self._pods = pods
        self._node = gpus
        self._grants = grants
        self._slices = slices
        self._answers: dict[str, _Answer] = {}
        self._retry_at: dict[str, float] = {}
        self.bare: frozenset[str] = frozenset()
        self.certain_rows: tuple[CheckpointEntry, ...] = ()
        self.possible_rows: tuple[CheckpointEntry, ...] = ()

    def has_unchecked(self, given: Collection[str]) -> bool:
        """Return whether a pod without a record has not been examined, or not since another of its containers has run.

        Args:
            given: As in `update`. These pods are ignored.
        """
        missing = ((uid, gpu_pod) for uid, gpu_pod in self.pods_without_record().items() if uid not in given)
        return any(
            uid not in self._answers or self._answers[uid].ran != gpu_pod.started_containers for uid, gpu_pod in missing
        )

    def rows(self) -> tuple[CheckpointEntry, ...]:
        """Return the rows for the Device: the cards that pods have or may have, and which pods have none."""
        return (*self.certain_rows, *self.possible_rows, *(no_devices_entry(uid) for uid in sorted(self.bare)))

    def pods_without_record(self) -> dict[str, GpuPod]:
        """Return the pods that have run without a record and have not ended, by UID.

        Call this before reading the checkpoint. The kubelet writes the devices of a pod into the checkpoint before the
        pod runs, so a pod that runs now and is not in a checkpoint that is read later got no devices.
        """
        return {gpu_pod.pod.uid: gpu_pod for gpu_pod in self._pods.all() if _runs_without_record(gpu_pod)}

    async def update(
        self, missing: Mapping[str, GpuPod], given: Collection[str], sliced: Collection[str] | None
    ) -> None:
        """Examine the pods without a record, and publish the result in the attributes.

        Args:
            missing: The result of `pods_without_record` before the kubelet's checkpoint was read.
            given: The UIDs of pods to which another plugin gave cards. They are not examined.
            sliced: The UIDs of pods to which another plugin gave slices, according to the checkpoint. None if the
                checkpoint cannot be read; in that case no further pod is taken for a bare pod.
        """
        self._answers = {uid: answer for uid, answer in self._answers.items() if uid in missing}
        self._retry_at = {uid: at for uid, at in self._retry_at.items() if uid in missing}
        now = asyncio.get_running_loop().time()
        for uid, gpu_pod in missing.items():
            before, checkable = self._answers.get(uid), sliced is not None
            if uid in given or (before and before.is_final(gpu_pod, checkable=checkable)):
                continue
            silent = before is not None and before.ran == gpu_pod.started_containers and before.shares is None
            if silent and now < self._retry_at.get(uid, now):
                continue
            self._retry_at[uid] = now + _RETRY_SECONDS
            self._answers[uid] = _Answer(
                gpu_pod.started_containers, await self._shares(gpu_pod, sliced or ()), checkable
            )
        self._publish({uid: gpu_pod for uid, gpu_pod in missing.items() if uid not in given})

    def _publish(self, missing: Mapping[str, GpuPod]) -> None:
        found: list[CheckpointEntry] = []
        unknown: list[CheckpointEntry] = []
        bare: set[str] = set()
        for uid, gpu_pod in sorted(missing.items()):
            answer = self._answers[uid]
            if answer.shares:
                found += self._rows(gpu_pod, answer.shares)
            elif answer.shares is not None and answer.checked:
                bare.add(uid)
            else:
                unknown += self._rows(gpu_pod, self._possible_shares(gpu_pod))
        self.certain_rows = tuple(found)
        self.possible_rows = tuple(unknown)
        self.bare = self._grants.bare = frozenset(bare)

    def _possible_shares(self, gpu_pod: GpuPod) -> tuple[Share, ...]:
        """Return shares on unknown cards, for a pod whose cards could not be found out.

        A pod that requests only slices gets none if the Node's annotations say which pods use which slices.
        """
        if gpu_pod.request is None or (self._slices.reports_users and not gpu_pod.request.containers):
            return ()
        if not gpu_pod.request.containers:
            return (Share("", None, whole=True),)
        return unknown_shares(replace(gpu_pod.request, others=()), gpu_pod.pod)

    def _rows(self, gpu_pod: GpuPod, shares: Sequence[Share]) -> Iterator[CheckpointEntry]:
        resource = next(
            (gpu_pod.carriers[name] for name in sorted(gpu_pod.started_containers) if name in gpu_pod.carriers),
            WHOLE_CARDS,
        )
        container = next(iter(gpu_pod.started_containers)) if len(gpu_pod.started_containers) == 1 else None
        return device_rows(gpu_pod.pod.uid, resource, merge_by_card(shares, self._node.gpus), container)

    async def _shares(self, gpu_pod: GpuPod, sliced: Collection[str]) -> tuple[Share, ...] | None:
        """Return the pod's shares; empty if it has no cards, None if that cannot be found out."""
        request = gpu_pod.request
        uid = gpu_pod.pod.uid
        if request is None:
            return None
        if kept := self._grants.delivered_shares(gpu_pod, self._node.gpus):
            return kept
        if not request.containers:
            # Slices come from this agent, or from another plugin. The kubelet's checkpoint shows the latter.
            given = self._grants.has_delivered(uid) or uid in sliced
            return None if given else ()
        return await self._query_runtime(gpu_pod, request)

    async def _query_runtime(self, gpu_pod: GpuPod, request: GpuRequest) -> tuple[Share, ...] | None:
        uid = gpu_pod.pod.uid
        try:
            environments = await self._runtime.environments(kubelets_uid(gpu_pod.pod.annotations, uid))
        except RetryLater as error:
            log.warning("cannot find out the cards of %s, which has no record: %s", gpu_pod.pod.key, error)
            return None
        shares = tuple(
            share for name, env in environments.items() for share in self._shares_in_environment(request, name, env)
        )
        # A container that the runtime does not list may start again soon, on the cards that it had.
        return (
            shares
            if shares or gpu_pod.started_containers <= {*environments, *gpu_pod.completed_init_containers}
            else None
        )

    def _shares_in_environment(self, request: GpuRequest, container: str, env: Mapping[str, str]) -> Iterator[Share]:
        """Yield the container's shares of the cards in its environment.

        An environment that names more cards than the container requests comes from an image or a ConfigMap, and is
        ignored.
        """
        requested = next((one for one in request.containers if one.container == container), None)
        visible = env.get(VISIBLE, "")
        if requested is None or visible in _NONE:
            return
        cards = self._node.gpus
        names = [card.uuid for card in cards] if visible == "all" else visible.split(",")
        found = {card.uuid for card in cards if {card.uuid, str(card.index), f"minor:{card.minor}"} & {*names}}
        if len(names) <= requested.cards:
            yield from (share_of(requested, uuid) for uuid in sorted(found))


def _runs_without_record(gpu_pod: GpuPod) -> bool:
    return bool(
        gpu_pod.started_containers
        and gpu_pod.request
        and gpu_pod.shares is None
        and gpu_pod.problem is None
        and not gpu_pod.pod.ended
    )
