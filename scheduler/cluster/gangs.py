"""Stores which pods belong to which gang, and how many members of a gang have to be placed at the same time.

`ClusterCache` passes all pods on, and the watches of `scheduler.runtime` the PodGroups. `decisions.gang_filter` asks
for the gang of a pod. A pod names its gang in one of three ways:

- `spec.schedulingGroup.podGroupName` names a PodGroup of Kubernetes, whose `gang.minCount` counts. Without `gang` the
  policy of the group is `basic`, and its pods are placed one by one.
- A label of the coscheduling plugin names a PodGroup of that plugin, whose `minMember` counts.
- The label `mgpu.io/gang` is the name itself, and `mgpu.io/gang-size` is the number.

A PodGroup may be unknown, because its kind is not served, or this process may not read it. Its pods are then placed one
by one, as without a gang, and the log says so once.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

from mgpu.model.pods import Pod
from mgpu.model.raw_objects import is_integer, table_at

log = logging.getLogger(__name__)

Raw = Mapping[str, Any]

KUBERNETES = "scheduling.k8s.io"
COSCHEDULING = "scheduling.x-k8s.io"
MGPU = "mgpu.io"
POD_GROUP_PATHS = {
    KUBERNETES: f"/apis/{KUBERNETES}/v1alpha2/podgroups",
    COSCHEDULING: f"/apis/{COSCHEDULING}/v1alpha1/podgroups",
}
"""The collections of PodGroups, by API group."""
GANG = f"{MGPU}/gang"
GANG_SIZE = f"{MGPU}/gang-size"
_COSCHEDULING_LABELS = (f"{COSCHEDULING}/pod-group", "pod-group.scheduling.sigs.k8s.io/name")

MAX_MIN_COUNT = 1000
"""The most members that a gang may need. The pods of a larger gang are placed one by one."""
_MAX_LOGGED = 1000
"""The most gangs of which is remembered that the log names them."""


class GangName(NamedTuple):
    """Identifies a gang. `source` is KUBERNETES, COSCHEDULING or MGPU."""

    source: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Gang(NamedTuple):
    """A gang of which `min_count` members, at least 2, have to be placed at the same time."""

    name: GangName
    min_count: int

    @property
    def waits(self) -> bool:
        """Whether the scheduler itself lets placed members wait for the others. For the labels of mgpu it does not."""
        return self.name.source != MGPU


def gang_name(pod: Pod) -> GangName | None:
    """Return the name of the gang that the pod names, or None."""
    if pod.scheduling_group:
        return GangName(KUBERNETES, pod.namespace, pod.scheduling_group)
    labels = pod.labels
    if labels:
        for label in _COSCHEDULING_LABELS:
            if labels.get(label):
                return GangName(COSCHEDULING, pod.namespace, labels[label])
        if labels.get(GANG):
            return GangName(MGPU, pod.namespace, labels[GANG])
    return None


class Gangs:
    """The PodGroups and the members of gangs. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._min_counts: dict[GangName, int] = {}  # Of the PodGroups; 0 for a group that is no gang.
        self._members: dict[GangName, dict[str, bool]] = {}  # By UID, whether the member needs no place any more.
        self._name_of: dict[str, GangName] = {}
        self._logged: OrderedDict[GangName, None] = OrderedDict()

    def of(self, pod: Pod) -> Gang | None:
        """Return the gang of the pod. Return None if the pod has none, or if the size of its gang is not known."""
        name = gang_name(pod)
        if name is None:
            return None
        if name.source == MGPU:
            count, problem = _size(pod.labels.get(GANG_SIZE, ""))
        else:
            with self._lock:
                known = self._min_counts.get(name)
            count = known or 0
            problem = f"its PodGroup ({name.source}) is not known" if known is None else ""
        if count > MAX_MIN_COUNT:
            problem = f"it needs more than {MAX_MIN_COUNT} members"
        if problem:
            self._log(name, problem)
            return None
        return Gang(name, count) if count > 1 else None

    def members(self, name: GangName) -> dict[str, bool]:
        """Return the UIDs of the members that exist, and whether each needs no place any more.

        That is so if it is bound, or if it requests no GPU, so that mgpu does not decide about it.
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
            if name is not None:
                self._name_of[pod.uid] = name
                is_placed = not pod.ended and (bool(pod.node) or not needs_cards)
                self._members.setdefault(name, {})[pod.uid] = is_placed

    def pod_gone(self, uid: str) -> None:
        if uid in self._name_of:
            with self._lock:
                self._drop(uid)

    def pod_group_changed(self, source: str, raw: Raw) -> None:
        """Store a PodGroup that was added or modified."""
        if source == KUBERNETES:
            count = table_at(raw, "spec", "schedulingPolicy", "gang").get("minCount")
        else:
            count = table_at(raw, "spec").get("minMember")
        with self._lock:
            self._min_counts[_name_of_group(source, raw)] = count if is_integer(count, 1, 1 << 31) else 0

    def pod_group_gone(self, source: str, raw: Raw) -> None:
        with self._lock:
            self._min_counts.pop(_name_of_group(source, raw), None)

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


def _size(text: str) -> tuple[int, str]:
    """Return the number in `mgpu.io/gang-size`, or the reason why it cannot be read."""
    if text.isascii() and text.isdecimal():
        return int(text), ""
    return 0, f"its label {GANG_SIZE} must be a number"


def _name_of_group(source: str, raw: Raw) -> GangName:
    meta = raw["metadata"]
    return GangName(source, meta["namespace"], meta["name"])
