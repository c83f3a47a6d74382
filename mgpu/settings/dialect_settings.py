"""Defines the settings of the dialects, one block each.

Each dialect reads its own block, and `mgpu.settings.loader` parses all of them. Keys are API and spelled as in the
vocabularies' own documents (docs/settings.md).
"""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from mgpu.settings.fields import Block, Policy, to_lower_case
from mgpu.settings.slice_settings import SlicesSettings

MinMemory = Annotated[int, Field(ge=0)]
"""The minimum memory of a share on each of its cards, in MiB."""


class MgpuSettings(Block):
    """The settings of Volcano mGPU: Volcano's `predicate.*` keys without prefix, and `minGPUMemory` in MiB."""

    enabled: bool = True
    mgpu_enable: bool = Field(True, alias="MGPUEnable")
    policy: Policy | None = Field(None, alias="MGPUPolicy")
    weight_of_core: Annotated[int, Field(ge=0, le=100)] = Field(20, alias="MGPUWeightOfCore")
    schedule_mode: Annotated[Literal["index", "id"], BeforeValidator(to_lower_case)] = Field(
        "index", alias="MGPUScheduleMode"
    )
    max_containers_per_card: Annotated[int, Field(ge=1)] = Field(16, alias="MGPUMaxContainersPerCard")
    max_containers_exact: Annotated[int, Field(ge=1)] | None = Field(None, alias="MGPUMaxContainersNumPolicyValid")
    min_gpu_memory: MinMemory = Field(256, alias="minGPUMemory")


def _unit(value: object) -> object:
    return {"gib": "GiB", "mib": "MiB"}.get(value.lower(), value) if isinstance(value, str) else value


class GpushareSettings(Block):
    """The settings of gpushare.

    memoryUnit: the unit of `aliyun.com/gpu-mem` in all pods, annotations and nodes of the cluster.
    """

    enabled: bool = True
    memory_unit: Annotated[Literal["GiB", "MiB"], BeforeValidator(_unit)] = Field("GiB", alias="memoryUnit")
    policy: Policy | None = None
    min_gpu_memory: MinMemory = Field(1, alias="minGPUMemory")


class KoordinatorSettings(Block):
    """The settings of Koordinator.

    minGPUMemory, minGPUMemoryRatio: the minimum of requests in bytes, and of requests in percent of a card.
    """

    enabled: bool = True
    policy: Policy | None = None
    min_gpu_memory: MinMemory = Field(1, alias="minGPUMemory")
    min_gpu_memory_ratio: Annotated[int, Field(ge=1, le=100)] = Field(1, alias="minGPUMemoryRatio")


class MtgpuSettings(Block):
    """The settings of MtgpuPods.

    occupyImage: the image of occupy pods, which needs `sleep`. mgpu's own image is already on every GPU node.
    occupyPriorityClass: the priority class of occupy pods; empty: the cluster's default.
    maxGPUIDsPerNamespace: the most GPUIDs, each with a card of its own, that a namespace may use; None: no limit.
    """

    enabled: bool = True
    occupy_image: str = Field("mgpu", alias="occupyImage")
    occupy_priority_class: str = Field("mgpu-occupy", alias="occupyPriorityClass")
    max_gpuids: Annotated[int, Field(ge=1)] | None = Field(None, alias="maxGPUIDsPerNamespace")


class DialectSettings(Block):
    """The settings of all dialects."""

    mgpu: MgpuSettings = MgpuSettings()  # type: ignore[call-arg]
    gpushare: GpushareSettings = GpushareSettings()  # type: ignore[call-arg]
    koordinator: KoordinatorSettings = KoordinatorSettings()  # type: ignore[call-arg]
    slices: SlicesSettings = SlicesSettings()  # type: ignore[call-arg]
    mtgpu: MtgpuSettings = MtgpuSettings()  # type: ignore[call-arg]
