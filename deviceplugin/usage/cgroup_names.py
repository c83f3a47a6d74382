"""Finds the pod and the container in the name of a cgroup. The functions are pure.

The kubelet names the cgroup of a pod after the pod's UID, and the container runtime names the cgroup of a container
after the container's ID, in one of these forms:

    /kubepods/burstable/pod<uid>/<id>                                             cgroupfs, containerd
    /kubepods/burstable/pod<uid>/crio-<id>                                        cgroupfs, CRI-O
    /kubepods.slice/…/kubepods-burstable-pod<uid>.slice/cri-containerd-<id>.scope systemd; also crio-, docker-
    /system.slice/containerd.service/kubepods-burstable-pod<uid>.slice:cri-containerd:<id>
                                              a kubelet with the driver systemd, and containerd with another one

systemd's names have "_" instead of "-" in the UID. The UID of a static pod is a hash of 32 digits. A container may have
cgroups below its own (CRI-O with crun, systemd in a container), and the path may begin with `/..`, because the kernel
writes it relative to the reader's cgroup name space. So the first part that names a pod counts, and what follows it.
"""

import re
from typing import NamedTuple

_POD = re.compile(
    r"(?:^|.*-)pod(?P<uid>[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?"
    r"(?::(?P<prefix>[a-z-]+):(?P<id>[0-9a-f]{64}))?",
    re.ASCII,
)
_CONTAINER = re.compile(r"(?:(?:cri-containerd|crio|docker)-)?(?P<id>[0-9a-f]{64})(?:\.scope)?", re.ASCII)


class CgroupName(NamedTuple):
    """The container to which a cgroup belongs.

    Attributes:
        pod: The UID by which the kubelet knows the pod.
        container: The ID of the container, or of the sandbox; "" if the cgroup is that of the whole pod.
    """

    pod: str
    container: str


def find_container(text: str) -> CgroupName | None:
    """Return the container that /proc/PID/cgroup names; None if the process is in no pod.

    With cgroups of version 1 there is a line for each hierarchy. The first one that names a pod counts.
    """
    for line in text.splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3 and (found := _in_path(parts[2])):
            return found
    return None


def names_container(text: str) -> bool:
    """Return whether /proc/PID/cgroup names a container.

    A container of the reader's own pod counts too, of which only the last part is visible: `/../<id>`.
    """
    paths = [line.split(":", 2)[2] for line in text.splitlines() if line.count(":") > 1]
    return any(_in_path(path) or _is_beside(path) for path in paths)


def _is_beside(path: str) -> bool:
    parts = path.split("/")
    return parts[1:2] == [".."] and len(parts) > 2 and _CONTAINER.fullmatch(parts[2]) is not None


def _in_path(path: str) -> CgroupName | None:
    parts = path.split("/")
    for part, below in zip(parts, [*parts[1:], ""], strict=True):
        if match := _POD.fullmatch(part):
            container = match["id"] or ((inner := _CONTAINER.fullmatch(below)) and inner["id"]) or ""
            return CgroupName(match["uid"].replace("_", "-"), container)
    return None
