"""Stores which pods belong to which gang, and how many members of a gang have to be placed at the same time.

`ClusterCache` passes all pods on, and `scheduler.watches` the PodGroups. `decisions.gang_filter` asks for the gang of a
pod, and the web page and `mgpu explain` show gangs. `mgpu.model.gangs` says how pods name their gang.

A PodGroup may be unknown, because its kind is not served, or this process may not read it. Its pods are then placed one
by one, as without a gang, and the log says so once. A PodGroup that no watch has delivered yet is read
(`decisions.pod_groups`).
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from mgpu.model.gangs import (
    MAX_MIN_COUNT,
    MGPU,
    VOLCANO,
    Gang,
    GangName,
    describe_unknown_size,
    gang_name,
    labelled_size,
    read_pod_group,
)
from mgpu.model.pods import Pod

log = logging.getLogger(__name__)

Raw = Mapping[str, Any]

_MAX_LOGGED = 1000
"""The most gangs of which is remembered that the log names them."""


class Gangs:
    """The PodGroups and the members of gangs. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._min_counts: dict[GangName, int] = {}  # Of the PodGroups; 0 for a group that is no gang.
        self._members: dict[GangName, dict[str, bool]] = {}  # By UID, whether the member needs no place any more.
        self._name_of: dict[str, GangName] = {}
        self._logged: OrderedDict[GangName, None] = OrderedDict()

    def of(self, pod: Pod, read: Callable[[GangName], int | None] = lambda _: None) -> Gang | None:
        """Return the gang of the pod, for mgpu to place.

        Return None if the pod has none, if the size of its gang is not known, or if Volcano places it.

        Args:
            read: Returns the size of a gang whose PodGroup no watch has delivered; 0 if it is no gang, None if unknown.
        """
        name = gang_name(pod)
        if name is None or name.source == VOLCANO:
            return None
        known = self.min_count(name, pod)
        if known is None and name.source != MGPU:
            known = read(name)
        count = known or 0
        problem = ""
        if known is None:
            problem = describe_unknown_size(name)
        elif count > MAX_MIN_COUNT:
            problem = f"it needs more than {MAX_MIN_COUNT} members"
        if problem:
            self._log(name, problem)
            return None
        return Gang(name, count) if count > 1 else None

    def min_count(self, name: GangName, pod: Pod) -> int | None:
        """Return how many members the gang of this pod needs; 0 if its PodGroup is no gang, None if that is unknown."""
        if name.source == MGPU:
            return labelled_size(pod)
        with self._lock:
            return self._min_counts.get(name)

    def members(self, name: GangName) -> dict[str, bool]:
        """Return the UIDs of the members that exist, and whether each needs no place any more.

        That is so if it is bound, or if it requests no GPU, so that mgpu does not decide about it. Members that are
        being deleted are left out: if the gang has been started again, all its new members need places together.
        """
        with self._lock:
            return dict(self._members.get(name, {}))

    def pod_changed(self, pod: Pod, *, needs_cards: bool) -> None:
        """Store a pod that was added or modified."""
        name = gang_name(pod)
        if name is None and pod.uid not in self._name_of:
            return
        with self._lock:
            self._drop(pod.uid)
            if name is not None and not pod.deleting:
                self._name_of[pod.uid] = name
                is_placed = not pod.ended and (bool(pod.node) or not needs_cards)
                self._members.setdefault(name, {})[pod.uid] = is_placed

    def pod_gone(self, uid: str) -> None:
        if uid in self._name_of:
            with self._lock:
                self._drop(uid)

    def pod_group_changed(self, source: str, raw: Raw) -> None:
        """Store a PodGroup that was added or modified."""
        name, count = read_pod_group(source, raw)
        with self._lock:
            self._min_counts[name] = count

    def pod_group_gone(self, source: str, raw: Raw) -> None:
        with self._lock:
            self._min_counts.pop(read_pod_group(source, raw)[0], None)

    def _drop(self, uid: str) -> None:
        name = self._name_of.pop(uid, None)
        if name is not None:
            del self._members[name][uid]
            if not self._members[name]:
                del self._members[name]

    def _log(self, name: GangName, problem: str) -> None:
        with self._lock:
            is_new = name not in self._logged
            self._logged[name] = None
            while len(self._logged) > _MAX_LOGGED:
                self._logged.popitem(last=False)
        if is_new:
            log.warning("the pods of the gang %s are placed one by one: %s", name, problem)
