"""Computes what a container gets so that HAMi-core limits it. The functions are pure.

The variables and paths are those of HAMi-core (src/multiprocess/multiprocess_memory_limit.c, src/utils.c; commit
8f3a89c6, June 2026) and of HAMi's device plugin (pkg/device-plugin/nvidiadevice/nvinternal/plugin/server.go; commit
4707fb02, August 2026):

- `CUDA_DEVICE_MEMORY_LIMIT_<i>` and `CUDA_DEVICE_SM_LIMIT_<i>` are the limits of the container's i-th card. Libraries
  of earlier versions know only `CUDA_DEVICE_SM_LIMIT`, for all cards.
- `GPU_CORE_UTILIZATION_POLICY=force` limits compute also while no other container uses the card.
- `CUDA_DEVICE_MEMORY_SHARED_CACHE` is the file that the processes of the container share.
- The library locks /tmp/vgpulock/lock, and reads variables from a file /overrideEnv, which an image could contain. So
  /dev/null is mounted there.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from deviceplugin.delivery.cdi import Edits, Mount
from deviceplugin.isolation.limits import CardLimit

LIBRARY = "libvgpu.so"
PRELOAD = "ld.so.preload"
LIBRARY_IN_CONTAINER = f"/usr/local/vgpu/{LIBRARY}"
_CACHE_IN_CONTAINER = "/run/mgpu-hami-core"
CACHE_VARIABLE = "CUDA_DEVICE_MEMORY_SHARED_CACHE"
CACHE = "region.cache"
LOCK, SHARED = "lock", "shared"
"""The folders of a container: for the lock, and for the file that its processes share."""
_MIB = 1 << 20


def unlimited(variables: Iterable[str]) -> dict[str, str]:
    """Return values with which these variables limit nothing: HAMi-core takes 0 for no limit (`get_limit_from_env`)."""
    return {name: "0" for name in variables if name.startswith(("CUDA_DEVICE_MEMORY_LIMIT", "CUDA_DEVICE_SM_LIMIT"))}


def container_edits(limits: Sequence[CardLimit], library: Path, preload: Path, folder: Path) -> Edits:
    """Return the edits of a container with these limits, which are in the order of its cards.

    Args:
        library: The library on the host.
        preload: The file on the host that names the library in the container.
        folder: The folder of the container on the host, with the folders `LOCK` and `SHARED`.
    """
    env = {CACHE_VARIABLE: f"{_CACHE_IN_CONTAINER}/{CACHE}"}
    percents = [max(1, 100 * limit.compute // limit.card.core) for limit in limits if limit.compute is not None]
    if percents:
        env["CUDA_DEVICE_SM_LIMIT"] = str(min(percents))
        env["GPU_CORE_UTILIZATION_POLICY"] = "force"
    for i, limit in enumerate(limits):
        if limit.memory is not None:
            env[f"CUDA_DEVICE_MEMORY_LIMIT_{i}"] = f"{max(1, limit.memory // _MIB)}m"
        if limit.compute is not None:
            env[f"CUDA_DEVICE_SM_LIMIT_{i}"] = str(max(1, 100 * limit.compute // limit.card.core))
    mounts = (
        Mount(str(library), LIBRARY_IN_CONTAINER, read_only=True),
        Mount(str(preload), f"/etc/{PRELOAD}", read_only=True),
        Mount("/dev/null", "/overrideEnv", read_only=True),
        Mount(str(folder / LOCK), "/tmp/vgpulock"),
        Mount(str(folder / SHARED), _CACHE_IN_CONTAINER),
    )
    return Edits(env, mounts)
