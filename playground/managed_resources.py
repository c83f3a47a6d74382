"""The resources for whose pods the one-machine kube-scheduler calls mgpu's extender, as in the manifests."""

from mgpu.model.mig import LAYOUTS
from mgpu.model.resource_claims import MARK
from mgpu.model.slice_names import resource_of

_MOST_GIGABYTES = 192  # the largest MPS share that the extender manages
CORE, MEMORY = "vke.volcengine.com/mgpu-core", "vke.volcengine.com/mgpu-memory"
MANAGED = {
    CORE: False,
    MEMORY: True,
    "aliyun.com/gpu-mem": False,
    "aliyun.com/gpu-count": False,
    "koordinator.sh/gpu": True,
    "koordinator.sh/gpu-core": False,
    "koordinator.sh/gpu-memory": True,
    "koordinator.sh/gpu-memory-ratio": False,
    "koordinator.sh/gpu.shared": True,
    "koordinator.sh/rdma": False,
    "koordinator.sh/fpga": False,
    "nvidia.com/gpu": False,
    MARK: True,  # Pods with claims have it with the amount 0.
    # A node may have no slices until a pod requests some.
    **{resource_of(profile.name): True for layout in LAYOUTS for profile in layout.profiles},
    **{resource_of(f"{gigabytes}gb"): True for gigabytes in range(1, _MOST_GIGABYTES + 1)},
}
"""The extender's managedResources, each with its `ignoredByScheduler`: if true, kube-scheduler does not check it. A
test compares them with the manifests."""
