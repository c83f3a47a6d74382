"""Finds out which plugin serves whole cards (`nvidia.com/gpu`) on this node, and which cards another plugin gave out.

NVIDIA's device plugin may give out any card, and mgpu cannot prevent that. So if NVIDIA's plugin serves the resource,
this agent does not. The cards that NVIDIA's plugin gave out are reported to the scheduler (in an annotation of the
Device) and count in the capacity check before each start. They are read from the kubelet's checkpoint, or from
PodResources until a version of the checkpoint could be read. `deviceplugin.reconciler` calls `WholeCards.update` after
every change and twice a second.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from deviceplugin.allocation.checkpoint_pods import CheckpointPods
from deviceplugin.allocation.id_owners import Owners
from deviceplugin.inventory.offers import WHOLE_CARDS
from deviceplugin.kubelet import checkpoint
from deviceplugin.kubelet.checkpoint import PodDevicesEntry
from deviceplugin.pods.gpu_pod import GpuPod
from deviceplugin.pods.node_pods import NodePods
from deviceplugin.pods.unrecorded_pods import UnrecordedPods
from mgpu.model.device_checkpoints import UNLISTED_PODS, CheckpointEntry, no_devices_entry, shares_by_pod
from mgpu.model.errors import RetryLater
from mgpu.model.ledger import Holding
from mgpu.model.slice_names import RESOURCE_PREFIX

log = logging.getLogger(__name__)

OURS, NVIDIA, CLAIMS = "mgpu", "nvidia", "dra"
_NVIDIA_SOCKETS = ("nvidia-gpu.sock", "nvidia.sock")


class WholeCards:
    """The server of whole cards, and the cards that pods got from another plugin or have without a record.

    Use it on one event loop. Any thread may read the attributes and call `holdings`.

    Args:
        setting: The setting `deviceplugin.wholeCards`.
        capacity: A function that returns how many whole cards the Node advertises, or None if the Node has not been
            read yet.

    Attributes:
        server: Who serves whole cards: the device plugin `OURS` or `NVIDIA`, or `CLAIMS` if kube-scheduler makes
            ResourceClaims of them; None before that is known.
        reason: The evidence that NVIDIA's plugin serves whole cards; None if there is no evidence.
        held: The devices of pods that have not ended, if another plugin gave them out or the pod has no allocation
            record.
        unrecorded_rows: The rows that the agent reports to the scheduler: the devices that pods without an allocation
            record have or may have, a row for each bare pod, and a row that says that all other pods have none. None
            before they are known.
    """

    def __init__(
        self,
        setting: str,
        folder: Path,
        pods: NodePods,
        owners: Owners,
        unrecorded: UnrecordedPods,
        capacity: Callable[[], int | None],
    ) -> None:
        self._setting = setting
        self._folder = folder
        self._pods = pods
        self._owners = owners
        self._unrecorded_pods = unrecorded
        self._capacity = capacity
        self._checkpoint_pods = CheckpointPods(pods)
        self._by_others: tuple[CheckpointEntry, ...] | None = None
        self._stamp: tuple[int, int, int] | None = None
        self._entries: list[PodDevicesEntry] | None = None
        self._registered_ids: frozenset[str] | None = None
        self._problem: str | None = None
        self.server: str | None = setting if setting in (NVIDIA, CLAIMS) else None
        self.reason: str | None = "deviceplugin.wholeCards is nvidia" if setting == NVIDIA else None
        self.held: tuple[CheckpointEntry, ...] = ()
        self.unrecorded_rows: tuple[CheckpointEntry, ...] | None = None

    def not_served_reason(self) -> str | None:
        """Return why this agent does not serve whole cards now, or None if it does."""
        if self.server == OURS:
            return None
        if self.server is None:
            return f"it is not known yet which plugin serves {WHOLE_CARDS}"
        if self.server == CLAIMS:
            return f"kube-scheduler allocates {WHOLE_CARDS} by ResourceClaims (deviceplugin.wholeCards: {CLAIMS})"
        return f"NVIDIA's plugin serves {WHOLE_CARDS}: {self.reason}"

    @property
    def bare(self) -> frozenset[str]:
        return self._unrecorded_pods.bare

    def is_undetermined(self) -> bool:
        """Return whether there are unrecorded pods that have not been examined yet."""
        return self._unrecorded_pods.has_unchecked({row.uid for row in self._by_others or ()})

    def holdings(self) -> tuple[Holding, ...]:
        """Return what pods hold according to `held`, whatever their allocation records contain."""
        present = self._pods.presences()
        holdings = []
        for uid, shares in shares_by_pod(self.held).items():
            key = present[uid][0] if uid in present else f"/pod {uid}"
            namespace, _, name = key.partition("/")
            holdings.append(Holding(uid, namespace, name, "", NVIDIA, shares))
        return tuple(holdings)

    async def update(self, *, synced: bool) -> bool:
        """Read the current state, and return whether `server`, `held` or `unrecorded_rows` has changed.

        Args:
            synced: Whether all pods of the node have been read.
        """
        before = self.server, self.held, self.unrecorded_rows
        # These pods must be listed before the checkpoint is read (`UnrecordedPods.pods_without_record`).
        without_record = self._unrecorded_pods.pods_without_record()
        is_current = await self._read(synced=synced)
        if synced:
            self._by_others = self._given_by_others()
        if synced and self._by_others is not None:
            with_slices = self._pods_with_slices(without_record.values()) if is_current else None
            await self._unrecorded_pods.update(without_record, {row.uid for row in self._by_others}, with_slices)
            self.held = tuple(sorted((*self._by_others, *self._unrecorded_pods.certain_rows)))
            rows = *self._by_others, *self._unrecorded_pods.rows()
            self.unrecorded_rows = (
                *sorted(row for row in rows if not self._has_record(row.uid)),
                no_devices_entry(UNLISTED_PODS),
            )
        if self._setting != NVIDIA:
            self._find_server()
        if before[0] != self.server:
            log.info("server of whole cards", extra={"server": self.server, "reason": self.reason})
        return before != (self.server, self.held, self.unrecorded_rows)

    def _has_record(self, uid: str) -> bool:
        gpu_pod = self._pods.by_uid(uid)
        return gpu_pod is not None and gpu_pod.shares is not None

    def _pods_with_slices(self, pods: Iterable[GpuPod]) -> frozenset[str]:
        """Return the UIDs of the pods that got slices from another plugin according to the kubelet's checkpoint."""
        file = self._folder / checkpoint.FILE
        requests = {
            (pod.pod.uid, RESOURCE_PREFIX + other.type) for pod in pods if pod.request for other in pod.request.others
        }
        resources = {resource for _, resource in requests}
        rows = {(row.uid, name) for name in resources for row in checkpoint.read_checkpoint(file, name) if not row.name}
        return frozenset(uid for uid, _ in requests & rows)

    async def _read(self, *, synced: bool) -> bool:
        """Read the checkpoint, and return whether its current version could be read.

        If the file is incomplete or missing, the entries that were read before stay.
        """
        file = self._folder / checkpoint.FILE
        stamp = _stamp(file)
        if stamp is not None and stamp == self._stamp:
            return True
        try:
            self._entries, self._registered_ids = checkpoint.read_entries(file, WHOLE_CARDS)
            self._stamp = stamp
            self._problem = None
        except RetryLater as error:
            if stamp is not None and str(error) != self._problem:
                self._problem = str(error)
                log.warning("%s", error)
            if self._entries is None and synced:
                await self._query_pod_resources()
            return False
        return True

    async def _query_pod_resources(self) -> None:
        try:
            owners = await self._owners.owners(WHOLE_CARDS)
        except RetryLater as error:
            log.info("the whole cards that another plugin gave out are not known yet: %s", error)
            return
        uids = {key: uid for uid, (key, _) in self._pods.presences().items()}
        rows = [(uids.get(f"{o.namespace}/{o.name}"), o) for o in owners if not _are_own_ids(o.ids)]
        # PodResources reports no UIDs. A pod that the API server has not delivered yet is found by a later call.
        self._by_others = tuple(CheckpointEntry(uid, o.container, WHOLE_CARDS, tuple(o.ids)) for uid, o in rows if uid)

    def _given_by_others(self) -> tuple[CheckpointEntry, ...] | None:
        """Return the devices that another plugin gave to pods that may still run; None if they are not known yet."""
        if self._entries is None:
            return self._by_others
        entries = [entry for entry in self._entries if not entry.name]
        running = self._checkpoint_pods.running((e.uid for e in entries), asyncio.get_running_loop().time())
        rows = []
        for entry in entries:
            if entry.uid in running:
                gpu_pod = self._pods.by_uid(entry.uid)
                uid = gpu_pod.pod.uid if gpu_pod else entry.uid
                rows.append(CheckpointEntry(uid, entry.container, WHOLE_CARDS, tuple(sorted(entry.ids))))
        return tuple(rows)

    def _find_server(self) -> None:
        reason = self._reason_for_nvidia()
        if self._setting == CLAIMS:
            self.reason = reason
        elif reason is not None:
            self.server = NVIDIA
            self.reason = reason
        elif self._entries is not None or self._capacity() is not None:
            self.server = OURS
            self.reason = None

    def _reason_for_nvidia(self) -> str | None:
        """Return the evidence that another plugin serves whole cards, or None."""
        if name := next((name for name in _NVIDIA_SOCKETS if (self._folder / name).exists()), None):
            return f"its socket {name} exists"
        if self._registered_ids and not _are_own_ids(self._registered_ids):
            return f"the kubelet knows its devices, such as {min(self._registered_ids)}"
        # The environment of a container proves nothing, since its image may set it, but the checkpoint does. A pod
        # whose record is ignored (because a key is missing, for example) got its cards from mgpu.
        holders = (row.uid for row in self._by_others or () if not self._is_placed_by_mgpu(row.uid))
        if holder := next(holders, None):
            return f"pod {holder} has cards from it"
        if self._registered_ids is None and self._capacity() and self.server != OURS:
            return f"the node has {self._capacity()} of the resource, which this agent has not registered"
        return None

    def _is_placed_by_mgpu(self, uid: str) -> bool:
        gpu_pod = self._pods.by_uid(uid)
        return gpu_pod is not None and gpu_pod.finding is not None


def _are_own_ids(ids: Collection[str]) -> bool:
    """Return whether all these ids are mgpu's (`deviceplugin.kubelet.device_ids`). NVIDIA's plugin uses UUIDs."""
    return all(i.isdecimal() for i in ids)


def _stamp(file: Path) -> tuple[int, int, int] | None:
    """Return a value that changes whenever the file is replaced or written; None if the file is missing."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
