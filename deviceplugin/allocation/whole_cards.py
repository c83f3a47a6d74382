"""Whole cards (`nvidia.com/gpu`): who serves them on this node, and which cards another plugin gave out.

NVIDIA's device plugin gives out any card, and nothing can veto it. So where it serves the resource, this agent does
not; and the cards that it gave out are reported to the scheduler (in an annotation of the Device) and count in the
capacity check before each start. The kubelet's checkpoint knows them, and PodResources where that file is missing.

`deviceplugin.reconciler` looks again whenever pods or the checkpoint change.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

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

OURS, NVIDIA = "mgpu", "nvidia"
_NVIDIA_SOCKETS = ("nvidia-gpu.sock", "nvidia.sock")
_UNKNOWN_SECONDS = 30.0
"""How long a pod that only the kubelet knows counts as one that the API server has not delivered yet."""
_SEEN = float("-inf")
"""Stands for the time since when a pod is missing if it was there before: such a pod has gone."""


class WholeCards:
    """Used on one event loop; attributes may be read from any thread.

    Args:
        setting: `deviceplugin.wholeCards`.
        folder: the kubelet's device-plugins folder.
        capacity: returns how many whole cards the Node has; None if the Node is not known yet.

    Attributes:
        server: who serves whole cards, `OURS` or `NVIDIA`; None if that is not known yet.
        reason: what shows that it is NVIDIA's plugin; None if it is not.
        held: what pods that have not ended hold by another plugin, or without a record.
        given: for the scheduler, the part of `held` that no allocation record says, and which pods without a record
            have nothing; None if that is not known yet.
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
        self._unrecorded = unrecorded
        self._capacity = capacity
        self._listed: tuple[CheckpointEntry, ...] | None = None
        self._stamp: tuple[int, int, int] | None = None
        self._entries: list[PodDevicesEntry] | None = None
        self._offered: frozenset[str] | None = None
        self._missing_since: dict[str, float] = {}
        self._problem: str | None = None
        self.server: str | None = NVIDIA if setting == NVIDIA else None
        self.reason: str | None = "deviceplugin.wholeCards is nvidia" if setting == NVIDIA else None
        self.held: tuple[CheckpointEntry, ...] = ()
        self.given: tuple[CheckpointEntry, ...] | None = None

    def not_served_reason(self) -> str | None:
        """Return why this agent does not serve whole cards now; None if it does."""
        if self.server == OURS:
            return None
        if self.server is None:
            return f"who serves {WHOLE_CARDS} is not known yet"
        return f"{WHOLE_CARDS} is left to NVIDIA's plugin: {self.reason}"

    @property
    def bare(self) -> frozenset[str]:
        """The UIDs of pods that run and are known to have been handed nothing."""
        return self._unrecorded.bare

    def is_undetermined(self) -> bool:
        """Return whether it is about to be found out what a pod without a record has."""
        given = {row.uid for row in self._listed or ()}
        return self._unrecorded.has_unchecked(given)

    def holdings(self) -> tuple[Holding, ...]:
        """Return by pod what another plugin gave out. It counts whatever an allocation record says."""
        present = self._pods.presences()
        found = []
        for uid, shares in shares_by_pod(self.held).items():
            key = present[uid][0] if uid in present else f"/pod {uid}"
            namespace, _, name = key.partition("/")
            found.append(Holding(uid, namespace, name, "", NVIDIA, shares))
        return tuple(found)

    async def look(self, *, synced: bool) -> bool:
        """Look again, and return whether anything is different.

        Args:
            synced: whether all pods of the node are known.
        """
        before = self.server, self.held, self.given
        # Before the checkpoint is read: the kubelet writes what a pod is given before the pod runs.
        missing = self._unrecorded.pods_without_record()
        current = await self._read(synced=synced)
        if synced:
            self._listed = self._given_by_others()
        if synced and self._listed is not None:
            sliced = self._sliced(missing.values()) if current else None
            await self._unrecorded.update(missing, {row.uid for row in self._listed}, sliced)
            self.held = tuple(sorted((*self._listed, *self._unrecorded.certain_rows)))
            rows = *self._listed, *self._unrecorded.rows()
            self.given = *sorted(row for row in rows if not self._has_record(row.uid)), no_devices_entry(UNLISTED_PODS)
        if self._setting != NVIDIA:
            self._find_server()
        if before[0] != self.server:
            log.info("server of whole cards", extra={"server": self.server, "reason": self.reason})
        return before != (self.server, self.held, self.given)

    def _has_record(self, uid: str) -> bool:
        known = self._pods.by_uid(uid)
        return known is not None and known.shares is not None

    def _sliced(self, pods: Iterable[GpuPod]) -> frozenset[str]:
        """Return the UIDs of these pods to which another plugin gave slices, by the kubelet's checkpoint."""
        some = [(known.pod.uid, known.request.others) for known in pods if known.request]
        asking = [(uid, RESOURCE_PREFIX + one.type) for uid, others in some for one in others]
        file, resources = self._folder / checkpoint.FILE, {resource for _, resource in asking}
        rows = {(row.uid, name) for name in resources for row in checkpoint.read_checkpoint(file, name) if not row.name}
        return frozenset(uid for uid, resource in asking if (uid, resource) in rows)

    async def _read(self, *, synced: bool) -> bool:
        """Read the checkpoint, and return whether it could be read as it is now.

        A file that is half written, or gone, takes nothing away from what was read before.
        """
        file = self._folder / checkpoint.FILE
        stamp = _stamp(file)
        if stamp is not None and stamp == self._stamp:
            return True
        try:
            self._entries, self._offered = checkpoint.read_entries(file, WHOLE_CARDS)
            self._stamp = stamp
            self._problem = None
        except RetryLater as error:
            if stamp is not None and str(error) != self._problem:
                self._problem = str(error)
                log.warning("%s", error)
            if self._entries is None and synced:
                await self._ask_kubelet()
            return False
        return True

    async def _ask_kubelet(self) -> None:
        try:
            owners = await self._owners.owners(WHOLE_CARDS)
        except RetryLater as error:
            log.info("whole cards that are given out are not known yet: %s", error)
            return
        uids = {key: uid for uid, (key, _) in self._pods.presences().items()}
        known = [(uids.get(f"{o.namespace}/{o.name}"), o) for o in owners if not _own_ids(o.ids)]
        # PodResources names pods. One that the API server has not delivered yet has no UID; the next look finds it.
        self._listed = tuple(CheckpointEntry(uid, o.container, WHOLE_CARDS, tuple(o.ids)) for uid, o in known if uid)

    def _given_by_others(self) -> tuple[CheckpointEntry, ...] | None:
        """Return what another plugin gave to pods that have not ended; None if that is not known yet."""
        if self._entries is None:
            return self._listed
        theirs = [entry for entry in self._entries if not entry.name]
        running = [entry for entry in theirs if self._runs(entry.uid)]
        self._missing_since = {
            uid: since for uid, since in self._missing_since.items() if any(entry.uid == uid for entry in theirs)
        }
        found = []
        for entry in running:
            gpu_pod = self._pods.by_uid(entry.uid)
            uid = gpu_pod.pod.uid if gpu_pod else entry.uid
            found.append(CheckpointEntry(uid, entry.container, WHOLE_CARDS, tuple(sorted(entry.ids))))
        return tuple(found)

    def _runs(self, uid: str) -> bool:
        """Return whether the pod may run: the checkpoint keeps what ended pods had until the next allocation."""
        present = self._pods.presences().get(uid)
        if present is not None:
            self._missing_since[uid] = _SEEN
            return not present[1]
        now = asyncio.get_running_loop().time()
        return now - self._missing_since.setdefault(uid, now) < _UNKNOWN_SECONDS

    def _find_server(self) -> None:
        reason = self._reason_for_nvidia()
        if reason is not None:
            self.server = NVIDIA
            self.reason = reason
        elif self._entries is not None or self._capacity() is not None:
            self.server = OURS
            self.reason = None

    def _reason_for_nvidia(self) -> str | None:
        """Return what shows that another plugin serves whole cards, or did so for pods that still run."""
        if name := next((name for name in _NVIDIA_SOCKETS if (self._folder / name).exists()), None):
            return f"its socket {name} is there"
        if self._offered and not _own_ids(self._offered):
            return f"the kubelet knows its devices, such as {min(self._offered)}"
        # The environment of a container shows nothing here, since its image may set it. The kubelet knows who gave it
        # cards. A pod with a record that does not count (for want of a key, for instance) got them from mgpu.
        theirs = (row.uid for row in self._listed or () if not self._is_placed_by_mgpu(row.uid))
        if holder := next(theirs, None):
            return f"pod {holder} has cards from it"
        if self._offered is None and self._capacity() and self.server != OURS:
            return f"the node has {self._capacity()} of it, which this agent has not registered"
        return None

    def _is_placed_by_mgpu(self, uid: str) -> bool:
        known = self._pods.by_uid(uid)
        return known is not None and known.finding is not None


def _own_ids(ids: Collection[str]) -> bool:
    """Return whether mgpu made these ids (`deviceplugin.kubelet.device_ids`); NVIDIA's are UUIDs by default."""
    return all(i.isdecimal() for i in ids)


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
