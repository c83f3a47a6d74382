"""Defines gangs: pods of which a number has to be placed at the same time, and how pods and PodGroups name them.

The scheduler places gangs (`scheduler.cluster.gangs`, `scheduler.decisions.gang_filter`). The commands and the web page
show them (`mgpu.presentation.gang_views`). All functions are pure. A pod names its gang in one of four ways:

- `spec.schedulingGroup.podGroupName` names a PodGroup of Kubernetes, whose `gang.minCount` counts. Without `gang` the
  policy of the group is `basic`, and its pods are placed one by one.
- A label of the coscheduling plugin names a PodGroup of that plugin, whose `minMember` counts.
- The label `mgpu.io/gang` is the name itself, and `mgpu.io/gang-size` is the number.
- An annotation names a PodGroup of Volcano, whose `minMember` counts. Volcano itself places these gangs.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from mgpu.model.pods import Pod
from mgpu.model.raw_objects import is_integer, table_at

Raw = Mapping[str, Any]

KUBERNETES = "scheduling.k8s.io"
COSCHEDULING = "scheduling.x-k8s.io"
MGPU = "mgpu.io"
VOLCANO = "scheduling.volcano.sh"
POD_GROUP_APIS = {
    KUBERNETES: f"/apis/{KUBERNETES}/v1alpha2",
    COSCHEDULING: f"/apis/{COSCHEDULING}/v1alpha1",
    VOLCANO: f"/apis/{VOLCANO}/v1beta1",
}
"""The API of PodGroups, by API group."""
POD_GROUP_PATHS = {source: f"{api}/podgroups" for source, api in POD_GROUP_APIS.items()}
"""The collections of all PodGroups, by API group."""
GANG = f"{MGPU}/gang"
GANG_SIZE = f"{MGPU}/gang-size"
_COSCHEDULING_LABELS = (f"{COSCHEDULING}/pod-group", "pod-group.scheduling.sigs.k8s.io/name")

MAX_MIN_COUNT = 1000
"""The most members that a gang may need. The pods of a larger gang are placed one by one."""


class GangName(NamedTuple):
    """Identifies a gang. `source` is KUBERNETES, COSCHEDULING, MGPU or VOLCANO."""

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
    return GangName(VOLCANO, pod.namespace, pod.volcano_group) if pod.volcano_group else None


def labelled_size(pod: Pod) -> int | None:
    """Return the number in `mgpu.io/gang-size`; None if the label is no number."""
    text = pod.labels.get(GANG_SIZE, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS else None


def describe_unknown_size(name: GangName) -> str:
    """Return why the size of a gang is not known."""
    if name.source == MGPU:
        return f"its label {GANG_SIZE} must be a number"
    return f"its PodGroup ({name.source}) is not known"


_MOST_DIGITS = 63  # The length of the longest label. It bounds the time that `int` takes.


def read_pod_group(source: str, raw: Raw) -> tuple[GangName, int]:
    """Return the name of a PodGroup, and how many members it needs; 0 if it is no gang.

    Args:
        source: the API group of the PodGroup.
    """
    if source == KUBERNETES:
        count = table_at(raw, "spec", "schedulingPolicy", "gang").get("minCount")
    else:
        count = table_at(raw, "spec").get("minMember")
    meta = raw["metadata"]
    name = GangName(source, meta["namespace"], meta["name"])
    return name, count if is_integer(count, 1, 1 << 31) else 0
