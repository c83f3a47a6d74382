"""Whole cards (`nvidia.com/gpu`): who serves them on this node, and which cards another plugin gave out.

NVIDIA's own plugin gives out what it likes, and nobody can veto it. So where it serves the resource, this agent does
not; and the cards that it gave out are told to the scheduler (the Device's annotation) and to the last line of defence.
The kubelet's checkpoint knows them, and where that is gone its PodResources.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from deviceplugin.allocation.id_owners import Owners
from deviceplugin.inventory.offers import WHOLE_CARDS
from deviceplugin.kubelet import checkpoint
from deviceplugin.kubelet.checkpoint import read_checkpoint
from deviceplugin.pods.gpu_pod import GpuPod
from deviceplugin.pods.node_pods import NodePods
from deviceplugin.pods.unrecorded_pods import UnrecordedPods
from mgpu.model.device_checkpoints import OTHERS, CheckpointEntry, no_devices_entry, shares_by_pod
from mgpu.model.errors import RetryLater
from mgpu.model.ledger import Holding
from mgpu.model.slice_names import RESOURCE_PREFIX

log = logging.getLogger(__name__)

OURS, NVIDIA = "mgpu", "nvidia"
_SOCKETS = ("nvidia-gpu.sock", "nvidia.sock")
_UNKNOWN_SECONDS = 30.0
"""So long a pod that only the kubelet knows is taken for one that the API server has not told of yet."""
_SEEN = float("-inf")
"""In place of the time since when a pod is missed: it was there, and has gone."""


class WholeCards:
    """On one event loop. `server`: who serves whole cards, OURS or NVIDIA; "": not known yet.

    setting: `deviceplugin.wholeCards`. folder: the kubelet's device-plugins folder. capacity: of whole cards as the
    Node has it; None: not known yet.
    held: what pods that have not ended hold by another plugin, or without a record. given: the part of it that no
    record of ours tells of, and which pods without a record have nothing, for the scheduler; None: not known yet.
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
        self._setting, self._folder, self._pods, self._owners = setting, folder, pods, owners
        self._unrecorded, self._capacity = unrecorded, capacity
        self._listed: tuple[CheckpointEntry, ...] | None = None
        self._stamp: tuple[int, int, int] | None = None
        self._rows: list[checkpoint.Given] | None = None
        self._offered: frozenset[str] | None = None
        self._since: dict[str, float] = {}
        self._problem = ""
        self.server = NVIDIA if setting == NVIDIA else ""
        self.why = "deviceplugin.wholeCards is nvidia" if setting == NVIDIA else ""
        self.held: tuple[CheckpointEntry, ...] = ()
        self.given: tuple[CheckpointEntry, ...] | None = None

    def left(self) -> str:
        """Why whole cards are not ours to serve now; "" where they are."""
        if self.server == OURS:
            return ""
        return f"{WHOLE_CARDS} is left to NVIDIA's plugin: {self.why}" if self.server else "who serves it is not known"

    @property
    def bare(self) -> frozenset[str]:
        """The UIDs of pods that run and are known to have been handed nothing."""
        return self._unrecorded.bare

    def is_undetermined(self) -> bool:
        """Return whether a pod runs without a record of which it is about to be found out what it has."""
        given = {row.uid for row in self._listed or ()}
        return self._unrecorded.has_unasked(given)

    def holdings(self) -> tuple[Holding, ...]:
        """What another plugin gave out, as the accounts have it; by pod. It holds, whatever a record says."""
        present = self._pods.present()
        keys = {uid: key.partition("/") for uid, (key, _) in present.items()}
        return tuple(
            Holding(uid, *keys.get(uid, ("", "", f"pod {uid}"))[::2], "", NVIDIA, shares)
            for uid, shares in shares_by_pod(self.held).items()
        )

    async def look(self, *, synced: bool) -> bool:
        """Look again; whether anything is different. synced: all pods of the node are known."""
        before = self.server, self.held, self.given
        missing = self._unrecorded.missing()
        current = await self._read(synced=synced)
        if synced:
            self._listed = self._foreign()
        if synced and self._listed is not None:
            sliced = self._sliced(missing.values()) if current else None
            await self._unrecorded.look(missing, {row.uid for row in self._listed}, sliced)
            self.held = tuple(sorted((*self._listed, *self._unrecorded.found)))
            told = *self._listed, *self._unrecorded.rows()
            self.given = *sorted(row for row in told if not self._recorded(row.uid)), no_devices_entry(OTHERS)
        if self._setting != NVIDIA:
            self._decide()
        if before[0] != self.server:
            log.info("whole cards are served by %s %s", self.server, self.why and f"({self.why})")
        return before != (self.server, self.held, self.given)

    def _is_placed_by_mgpu(self, uid: str) -> bool:
        """Return whether the pod has a record that does not count, for want of a key for instance: it had one."""
        known = self._pods.by_uid(uid)
        return known is not None and known.finding is not None

    def _recorded(self, uid: str) -> bool:
        known = self._pods.by_uid(uid)
        return known is not None and known.shares is not None

    def _sliced(self, pods: Iterable[GpuPod]) -> frozenset[str]:
        """Return the UIDs of those of these pods to which another plugin gave slices, by the kubelet's checkpoint."""
        some = [(known.pod.uid, known.request.others) for known in pods if known.request]
        asking = [(uid, RESOURCE_PREFIX + one.type) for uid, others in some for one in others]
        file, resources = self._folder / checkpoint.FILE, {resource for _, resource in asking}
        rows = {(row.uid, name) for name in resources for row in read_checkpoint(file, name) if not row.name}
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
            self._rows, self._offered = checkpoint.read_known(file, WHOLE_CARDS)
            self._stamp, self._problem = stamp, ""
        except RetryLater as error:
            if stamp is not None and str(error) != self._problem:
                self._problem = str(error)
                log.warning("%s", error)
            if self._rows is None and synced:
                await self._ask_kubelet()
            return False
        return True

    async def _ask_kubelet(self) -> None:
        try:
            owners = await self._owners.owners(WHOLE_CARDS)
        except RetryLater as error:
            log.info("which whole cards are given out is not known: %s", error)
            return
        uids = {key: uid for uid, (key, _) in self._pods.present().items()}
        known = [(uids.get(f"{o.namespace}/{o.name}"), o) for o in owners if not _own_ids(o.ids)]
        # Without a name that is the API server's no pod can be told; it is looked for again with the next look.
        self._listed = tuple(CheckpointEntry(uid, o.container, WHOLE_CARDS, tuple(o.ids)) for uid, o in known if uid)

    def _foreign(self) -> tuple[CheckpointEntry, ...] | None:
        """Of pods that have not ended."""
        if self._rows is None:
            return self._listed
        theirs = [row for row in self._rows if not row.name]
        others = [row for row in theirs if self._runs(row.uid)]
        self._since = {uid: at for uid, at in self._since.items() if any(row.uid == uid for row in theirs)}
        known = ((self._pods.by_uid(row.uid), row) for row in others)
        return tuple(
            CheckpointEntry(pod.pod.uid if pod else row.uid, row.container, WHOLE_CARDS, tuple(sorted(row.ids)))
            for pod, row in known
        )

    def _runs(self, uid: str) -> bool:
        """The checkpoint keeps what ended pods had until the next allocation."""
        present = self._pods.present().get(uid)
        if present is not None:
            self._since[uid] = _SEEN
            return not present[1]
        now = asyncio.get_running_loop().time()
        return now - self._since.setdefault(uid, now) < _UNKNOWN_SECONDS

    def _decide(self) -> None:
        why = self._other()
        if why:
            self.server, self.why = NVIDIA, why
        elif self._rows is not None or self._capacity() is not None:
            self.server, self.why = OURS, ""

    def _other(self) -> str:
        """What shows that another plugin serves whole cards, or did for pods that still run; "" where nothing does."""
        if name := next((name for name in _SOCKETS if (self._folder / name).exists()), ""):
            return f"its socket {name} is there"
        if self._offered and not _own_ids(self._offered):
            return f"the kubelet knows its devices, as {min(self._offered)}"
        # What a container shows by itself does not count: its image may say so. The kubelet knows who gave it cards.
        theirs = (row.uid for row in self._listed or () if not self._is_placed_by_mgpu(row.uid))
        if holder := next(theirs, ""):
            return f"pod {holder} has cards from it"
        if self._offered is None and self._capacity() and self.server != OURS:
            return f"the node has {self._capacity()} of it, which this agent has not registered"
        return ""


def _own_ids(ids: Collection[str]) -> bool:
    """Whether this agent made them (`deviceplugin.kubelet.device_ids`); NVIDIA's are UUIDs by default."""
    return all(i.isdecimal() for i in ids)


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
