"""Defines the settings of the vocabularies: each vocabulary has a block of keys.

`mgpu.settings.loader` reads the blocks under the key `dialects`; `slice_settings` defines the block of slices.
Users write the keys (docs/settings.md), so the keys must not change. Keys that come from a vocabulary are spelled as in
its documents.
"""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from mgpu.settings.fields import Block, Policy, to_lower_case
from mgpu.settings.slice_settings import SlicesSettings

MinMemory = Annotated[int, Field(ge=0)]
"""The minimum memory of a share on each of its cards, in MiB."""


class MgpuSettings(Block):
    """The settings of Volcano mGPU: Volcano's `predicate.*` keys without their prefix, `enabled` and `minGPUMemory`.

    Keys:
        enabled, MGPUEnable: Whether mgpu serves pods of this vocabulary. Both must be true.
        MGPUPolicy: The card policy for pods of this vocabulary. If it is None, `cardPolicy` applies.
        MGPUWeightOfCore: The weight of compute in the score of a card, in percent. Memory has the rest.
        MGPUScheduleMode: Whether allocation records name cards by index or by UUID (`id`).
        MGPUMaxContainersPerCard: The most shares on one card.
        MGPUMaxContainersNumPolicyValid: The number of containers above which the search for a pod's placement may end
            before it has found the best one.
    """

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

    Keys:
        enabled: Whether mgpu serves pods of this vocabulary.
        memoryUnit: The unit of `aliyun.com/gpu-mem` in all pods, annotations and nodes of the cluster.
        policy: The card policy for pods of this vocabulary. If it is None, `cardPolicy` applies.
    """

    enabled: bool = True
    memory_unit: Annotated[Literal["GiB", "MiB"], BeforeValidator(_unit)] = Field("GiB", alias="memoryUnit")
    policy: Policy | None = None
    min_gpu_memory: MinMemory = Field(1, alias="minGPUMemory")


class KoordinatorSettings(Block):
    """The settings of Koordinator.

    Keys:
        enabled: Whether mgpu serves pods of this vocabulary.
        policy: The card policy for pods of this vocabulary. If it is None, `cardPolicy` applies.
        minGPUMemory: The minimum memory, in MiB on each card, of a share that is requested in bytes.
        minGPUMemoryRatio: The minimum memory, in percent of each card, of a share that is requested in percent.
    """

    enabled: bool = True
    policy: Policy | None = None
    min_gpu_memory: MinMemory = Field(1, alias="minGPUMemory")
    min_gpu_memory_ratio: Annotated[int, Field(ge=1, le=100)] = Field(1, alias="minGPUMemoryRatio")


class MtgpuSettings(Block):
    """The settings of MtgpuPods.

    Keys:
        enabled: Whether mgpu serves MtgpuPods.
        occupyImage: The image of occupy pods, which must contain `sleep`. The default is mgpu's own image, because it
            is already on every GPU node.
        occupyPriorityClass: The priority class of occupy pods. If it is empty, the cluster's default applies.
        maxGPUIDsPerNamespace: The most GPUIDs that the MtgpuPods of a namespace may use at the same time. Each GPUID
            takes a whole card. There is no limit if it is None.
    """

    enabled: bool = True
    occupy_image: str = Field("mgpu", alias="occupyImage")
    occupy_priority_class: str = Field("mgpu-occupy", alias="occupyPriorityClass")
    max_gpuids: Annotated[int, Field(ge=1)] | None = Field(None, alias="maxGPUIDsPerNamespace")


class DialectSettings(Block):
    mgpu: MgpuSettings = MgpuSettings()  # type: ignore[call-arg]
    gpushare: GpushareSettings = GpushareSettings()  # type: ignore[call-arg]
    koordinator: KoordinatorSettings = KoordinatorSettings()  # type: ignore[call-arg]
    slices: SlicesSettings = SlicesSettings()  # type: ignore[call-arg]
    mtgpu: MtgpuSettings = MtgpuSettings()  # type: ignore[call-arg]
