"""Loads the settings from a YAML file, environment variables and flags.

Mainly `mgpu.cli.process_settings` calls `load_settings`. The file may be Volcano's `volcano-scheduler.conf`, of which
only the plugin arguments `predicate.MGPU…` and `dynamicgpuslice.…` are read.
"""

from collections.abc import Iterator, Mapping
from typing import Any, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError

from mgpu.model.errors import BadObject, Problem, raise_if_any
from mgpu.settings.component_settings import (
    DevicePluginSettings,
    DraSettings,
    RecordSettings,
    SchedulerSettings,
    WebhookSettings,
)
from mgpu.settings.dialect_settings import DialectSettings, MgpuSettings
from mgpu.settings.fields import Block, Policy
from mgpu.settings.slice_settings import SlicesSettings, find_impossible_geometries, nest_weights

_SLICES = "dialects.slices"


class Settings(Block):
    """The settings of all processes.

    Attributes:
        card_policy: The policy that chooses the cards of a node; None for the default of each dialect.
        node_policy: The policy that scores nodes.
        card_policy_flag: The value of the flag `--card-policy`, which a file cannot contain.
    """

    card_policy: Policy | None = Field(None, alias="cardPolicy")
    node_policy: Policy = Field("binpack", alias="nodePolicy")
    dialects: DialectSettings = DialectSettings()
    webhook: WebhookSettings = WebhookSettings()  # type: ignore[call-arg]
    scheduler: SchedulerSettings = SchedulerSettings()  # type: ignore[call-arg]
    deviceplugin: DevicePluginSettings = DevicePluginSettings()  # type: ignore[call-arg]
    records: RecordSettings = RecordSettings()  # type: ignore[call-arg]
    dra: DraSettings = DraSettings()  # type: ignore[call-arg]
    card_policy_flag: Policy | None = Field(None, alias="cardPolicyFlag", exclude=True)

    def card_policy_for(self, dialect_setting: str | None, dialect_default: str) -> str:
        """Return the first that is set: the flag, the dialect's setting, `cardPolicy`, or the dialect's default."""
        return self.card_policy_flag or dialect_setting or self.card_policy or dialect_default


def load_settings(
    text: str = "",
    source: str = "settings",
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Settings:
    """Return the settings from YAML, `MGPU_*` environment variables and flags.

    Flags override the environment, and the environment overrides the YAML text.

    Args:
        text: The content of the YAML file.
        source: The name of the file in errors.
        environ: The environment variables. `MGPU_CARD_POLICY` and `MGPU_NODE_POLICY` set the two policies. The variable
            for any other setting is named after its path with `__` between the keys, such as `MGPU_WEBHOOK__PORT` or
            `MGPU_DIALECTS__MGPU__MGPUPOLICY`; the case of the keys does not matter. A single `_` cannot separate keys,
            because Kubernetes sets `MGPU_WEBHOOK_PORT` in every pod of a namespace with a Service `mgpu-webhook`.
        flags: The values by dotted path (`webhook.port`); None for a flag that is not given. The flag `cardPolicy` also
            overrides the card policies in the settings of the dialects.

    Raises:
        BadObject: The settings are not valid. The error names the invalid keys.
    """
    tree = _parse(text, source)
    problems = []
    for name, value in (environ or {}).items():
        path = _environment_path(name)
        if path and not _put(tree, path, value):
            problems.append(Problem(name, "is not the name of a setting"))
    for dotted, value in (flags or {}).items():
        if value is not None:
            _put(tree, ["cardPolicyFlag"] if dotted == "cardPolicy" else dotted.split("."), value)
    try:
        settings = Settings.model_validate(tree, by_alias=True, by_name=False)
    except ValidationError as error:
        problems += [_problem(source, e) for e in error.errors(include_url=False)]
    else:
        problems += find_impossible_geometries(settings.dialects.slices, f"{source}: {_SLICES}")
    raise_if_any(problems)
    return settings


class _Loader(yaml.SafeLoader):
    """A YAML loader that rejects duplicate keys, of which PyYAML would silently ignore all but the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is a duplicate key", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _parse(text: str, source: str) -> dict[str, Any]:
    try:
        tree = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BadObject([Problem(source, f"is not YAML: {' '.join(str(error).split())}")]) from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise BadObject([Problem(source, "must be an object whose keys are settings")])
    if "cardPolicyFlag" in tree:  # this field is for the flag; a file has `cardPolicy`
        raise BadObject([Problem(f"{source}: cardPolicyFlag", f"unknown; allowed: {_keys(Settings)}")])
    tree = _from_volcano(tree, source) if "tiers" in tree else tree
    match tree:
        case {"dialects": {"slices": dict(block)} as blocks}:
            return {**tree, "dialects": {**blocks, "slices": nest_weights(block, f"{source}: {_SLICES}")}}
    return tree


_VOLCANO: Mapping[str, tuple[str, type[BaseModel]]] = {
    "predicate.MGPU": ("mgpu", MgpuSettings),
    "dynamicgpuslice.": ("slices", SlicesSettings),
}
"""The dialect and the class of its settings, by the prefix of the Volcano arguments.

Only fields with an alias are accepted in a Volcano configuration.
"""


def _from_volcano(tree: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the settings in the arguments of a Volcano scheduler configuration."""
    own = sorted(field.alias or name for name, field in Settings.model_fields.items())
    beside = next((key for key in own if key in tree), None)
    if beside:
        text = (
            "cannot be combined with tiers: in a Volcano configuration, mgpu reads only the plugin arguments that "
            f"begin with {' or '.join(_VOLCANO)}"
        )
        raise BadObject([Problem(f"{source}: {beside}", text)])
    found: dict[str, dict[str, Any]] = {}
    for path, arguments in _arguments(tree, source):
        for key, value in arguments.items():
            prefix = next((prefix for prefix in _VOLCANO if str(key).startswith(prefix)), None)
            if prefix is None:
                continue
            (dialect, block), name = _VOLCANO[prefix], str(key).partition(".")[2]
            allowed = [field.alias for field in block.model_fields.values() if field.alias]
            if name.partition(".")[0] not in allowed:
                raise BadObject([Problem(f"{path}.{key}", f"unknown; allowed: {', '.join(allowed)}")])
            found.setdefault(dialect, {})[name] = value
    return {"dialects": found}


def _arguments(tree: Mapping[str, Any], source: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        for i, tier in enumerate(tree["tiers"] or ()):
            for j, plugin in enumerate(tier.get("plugins") or ()):
                yield f"{source}: tiers[{i}].plugins[{j}].arguments", dict(plugin.get("arguments") or {})
    except (AttributeError, TypeError, ValueError) as error:
        raise BadObject([Problem(f"{source}: tiers", "is not a Volcano scheduler configuration")]) from error


def _environment_path(name: str) -> list[str]:
    known = {"MGPU_CARD_POLICY": ["cardPolicy"], "MGPU_NODE_POLICY": ["nodePolicy"]}
    if name in known:
        return known[name]
    return name.removeprefix("MGPU_").split("__") if name.startswith("MGPU_") and "__" in name else []


def _put(tree: dict[str, Any], path: list[str], value: object) -> bool:
    """Set the value at a path, ignoring the case of its keys. Return False if no setting has this path."""
    block: type[BaseModel] | None = Settings
    for i, part in enumerate(path):
        match = next(
            (
                (field.alias or name, field.annotation)
                for name, field in (block.model_fields.items() if block else ())
                if part.lower() in ((field.alias or name).lower(), name)
            ),
            None,
        )
        if match is None:
            return False
        key, kind = match
        if i == len(path) - 1:
            tree[key] = value
            return True
        block = kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None
        if block is None:
            return False
        inner = tree.setdefault(key, {})
        if not isinstance(inner, dict):
            return True  # the validation reports that this is not a block
        tree = inner
    return False


def _keys(block: type[BaseModel]) -> str:
    return ", ".join(f.alias or name for name, f in block.model_fields.items() if not f.exclude)


def _problem(source: str, error: Any) -> Problem:
    path = ".".join(str(part) for part in error["loc"] if part != "tagged-union")
    if error["type"] == "extra_forbidden":
        block: Any = Settings
        for part in error["loc"][:-1]:
            if isinstance(part, int):
                (block, *_) = get_args(block)
            else:
                block = next(f.annotation for n, f in block.model_fields.items() if part in (n, f.alias))
        return Problem(f"{source}: {path}", f"unknown; allowed: {_keys(block)}")
    return Problem(f"{source}: {path}", f"{error['msg'].removeprefix('Value error, ')}, not {error['input']!r}")
