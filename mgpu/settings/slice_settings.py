"""Defines the settings of slices: the `dynamicgpuslice.*` keys of a Volcano configuration without their prefix.

The scheduler's partition planner and the agent's MPS partitioner read them. Users write the keys (docs/slices.md), so
the keys must not change.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from mgpu.model.errors import BadObject, Problem, raise_if_any
from mgpu.model.mig import canonical, invalid_geometry_reason
from mgpu.model.slice_names import MIG, mode_of, read_name
from mgpu.settings.fields import Block, Names, split_list, to_lower_case

_WEIGHT, _OF = "weight.", "resources."
Weight = Annotated[int, Field(ge=0)]

Geometries = Mapping[str, Sequence[Mapping[str, int]]]
"""The allowed geometries by model. A geometry is the number of instances by profile.

Cards of a model that is missing may have any geometry.
"""


def _each_one(value: object) -> object:
    """Return the weight 1 for each name in a list or in a text with commas, and any other value unchanged.

    `weight.resources.<name>` overrides this weight for one resource.
    """
    names = split_list(value)
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        return names  # the validation reports an invalid value
    return dict.fromkeys(names, 1)


class WeightSettings(Block):
    """The weight of each resource in the score of a node.

    Attributes:
        gpu: The weight of the cards' memory.
        resources: The weights of extended resources, by name.
    """

    cpu: Weight = 1
    memory: Weight = 1
    gpu: Weight = 1
    resources: Annotated[Mapping[str, Weight], BeforeValidator(_each_one)] = Field(default_factory=dict)

    @property
    def of(self) -> dict[str, int]:
        """The weights above 0 by resource, with cpu, memory and gpu first."""
        weights = {"cpu": self.cpu, "memory": self.memory, "gpu": self.gpu, **self.resources}
        return {name: weight for name, weight in weights.items() if weight}

    @model_validator(mode="after")
    def _sound(self) -> "WeightSettings":
        twice = sorted({"cpu", "memory", "gpu"} & {*self.resources})
        if twice:
            raise ValueError(f"resources names {twice[0]}, which has a weight of its own")
        if not self.of:
            raise ValueError("at least one weight must be above 0")
        return self


def _profile(name: str) -> str:
    found = read_name(name)
    if found is None or mode_of(found) != MIG:
        raise ValueError("is not a MIG profile such as 2g.20gb")
    return found


def _named_once(row: object) -> object:
    if isinstance(row, dict) and len({canonical(str(name)) for name in row}) < len(row):
        raise ValueError("names a profile twice")
    return row


Count = Annotated[int, Field(ge=1, strict=True)]
Geometry = Annotated[
    dict[Annotated[str, AfterValidator(_profile)], Count], Field(min_length=1), BeforeValidator(_named_once)
]


class GeometrySettings(Block):
    """The allowed geometries of some card models.

    A name matches card models in the same way as in constraints (`mgpu.model.pod_constraints.matches_model`).
    """

    models: Annotated[Names, Field(min_length=1)]
    allowed: Annotated[tuple[Geometry, ...], Field(alias="allowedGeometries", min_length=1)]


class SlicesSettings(Block):
    """The settings of slices.

    Keys:
        enabled: Whether mgpu serves pods of this vocabulary.
        schedulePolicy: Whether full nodes (`binpack`) or empty nodes (`spread`) get the higher score.
        scheduleWeight: The weight of that score.
        weight: The weight of each resource in that score.
        DevicePluginCMName, DevicePluginCMNamespace: The ConfigMap with the MPS partitions of nodes.
        mpsIdleSeconds: The time after which unused MPS shares of a card are removed. They stay if it is 0.
        KnowGeometries: The allowed geometries of MIG cards. Cards of a model without an entry may have any geometry.
    """

    enabled: bool = True
    schedule_policy: Annotated[Literal["binpack", "spread"], BeforeValidator(to_lower_case)] = Field(
        "binpack", alias="schedulePolicy"
    )
    schedule_weight: Annotated[int, Field(ge=0)] = Field(10, alias="scheduleWeight")
    weight: WeightSettings = Field(WeightSettings(), alias="weight")
    config_map: Annotated[str, Field(min_length=1)] = Field("mps-configmap", alias="DevicePluginCMName")
    config_map_namespace: Annotated[str, Field(min_length=1)] = Field("mgpu-system", alias="DevicePluginCMNamespace")
    mps_idle_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(60, alias="mpsIdleSeconds")
    know_geometries: tuple[GeometrySettings, ...] = Field((), alias="KnowGeometries")

    @property
    def weights(self) -> Mapping[str, int]:
        """The weights above 0 by resource (`cpu`, `memory`, `gpu` and others). At least one weight is above 0."""
        return self.weight.of

    @property
    def geometries(self) -> Geometries:
        """The allowed geometries by model in the order of the file. Entries of the same model are merged."""
        found: dict[str, tuple[Mapping[str, int], ...]] = {}
        for entry in self.know_geometries:
            for model in dict.fromkeys(entry.models):
                found[model] = (*found.get(model, ()), *entry.allowed)
        return found


def find_impossible_geometries(settings: SlicesSettings, path: str) -> Iterator[Problem]:
    """Yield a problem for each geometry that the cards of one of its models cannot have, with a path below `path`."""
    for i, entry in enumerate(settings.know_geometries):
        for j, geometry in enumerate(entry.allowed):
            reason = next(filter(None, (invalid_geometry_reason(model, geometry) for model in entry.models)), None)
            if reason is not None:
                yield Problem(f"{path}.KnowGeometries.{i}.allowedGeometries.{j}", reason)


def nest_weights(block: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the block with the flat keys (`weight.cpu`, `weight.resources.<name>`) merged into `weight`.

    Args:
        block: The block `dialects.slices` of a file, which is not validated yet.
        path: The path of the block, for errors.

    Raises:
        BadObject: A flat key has the weight of a resource that `weight.resources` does not list, or the block also has
            the key `weight`.
    """
    flat = {key.removeprefix(_WEIGHT): value for key, value in block.items() if str(key).startswith(_WEIGHT)}
    if not flat:
        return dict(block)
    rest = {key: value for key, value in block.items() if not str(key).startswith(_WEIGHT)}
    if "weight" in rest:
        raise BadObject([Problem(f"{path}.weight", "cannot be combined with weight.…; use one of the two forms")])
    of = {key.removeprefix(_OF): value for key, value in flat.items() if key.startswith(_OF)}
    weight = {key: value for key, value in flat.items() if not key.startswith(_OF)}
    resources = _each_one(weight.get("resources", ()))
    if not isinstance(resources, dict):
        return {**rest, "weight": weight}  # the validation reports the invalid value of `resources`
    problems = [
        Problem(f"{path}.{_WEIGHT}{_OF}{name}", f"{name!r} is not listed in weight.resources")
        for name in of
        if name not in resources
    ]
    raise_if_any(problems)
    return {**rest, "weight": {**weight, "resources": resources | of}}
