"""Finds the folder of a container's cgroup. The functions are pure.

The OCI spec of a container names its cgroup in one of two forms, which depend on the cgroup driver of the runtime
(opencontainers/runc, docs/systemd.md):

    /kubepods/burstable/pod<uid>/<id>                              cgroupfs: the path itself
    kubepods-burstable-pod<uid>.slice:cri-containerd:<id>          systemd: the slice, a prefix and a name

systemd puts the slice `a-b.slice` into the slice `a.slice`, and the unit of a container into its slice as a scope.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def cgroup_folder(root: Path, path: str) -> Path | None:
    """Return the folder of the cgroup that an OCI spec names; None if it names none, or one outside of `root`.

    Args:
        root: The root of the cgroups (version 2) of the host.
        path: The field `linux.cgroupsPath` of the spec.
    """
    parts = [*_of_systemd(path)] if path.count(":") == 2 else [*PurePosixPath(path.lstrip("/")).parts]
    return root.joinpath(*parts) if parts and ".." not in parts else None


def _of_systemd(path: str) -> Iterator[str]:
    slice_, prefix, name = path.split(":")
    if "/" in path:
        return
    words = slice_.removesuffix(".slice").split("-") if slice_ not in ("", "-.slice") else []
    for i in range(len(words)):
        yield f"{'-'.join(words[: i + 1])}.slice"
    yield name if name.endswith(".slice") else f"{prefix}-{name}.scope" if prefix else f"{name}.scope"
