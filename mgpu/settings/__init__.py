"""The settings: one YAML file, the environment over it, flags over both; parsed once into frozen objects.

Keys are spelled as in the dialects' own documents. A Volcano `volcano-scheduler.conf` is read too: its
`predicate.MGPU…` and `dynamicgpuslice.…` arguments are settings here, its other keys are Volcano's own.
"""

from collections.abc import Collection, Iterator, Mapping
from ipaddress import ip_address
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, Field, ValidationError, ValidationInfo, field_validator

from mgpu.model.card_policies import SELECTABLE
from mgpu.model.errors import BadObject, Problem
from mgpu.settings.fields import AddressBlocks, Block, Names, listed, lower
from mgpu.settings.slice_settings import SlicesSettings, impossible, with_weights

CARD_POLICIES = SELECTABLE
NODE_POLICIES = CARD_POLICIES

if TYPE_CHECKING:
    _Policy = str
else:
    _Policy = Literal[SELECTABLE]  # of the registry's names, so that this module repeats none of them
Policy = Annotated[_Policy, BeforeValidator(lower)]
MinMemory = Annotated[int, Field(ge=0)]
"""MiB that a share asks for at least, of each of its cards."""
Port = Annotated[int, Field(ge=0, le=65535)]
ExtraPort = Annotated[int, Field(ge=-1, le=65535)]
"""-1: nothing listens there."""
_SLICES = "dialects.slices"


class MgpuSettings(Block):
    """The seed's `predicate.*` keys without prefix, and `minGPUMemory` (MiB)."""

    enabled: bool = True
    mgpu_enable: bool = Field(True, alias="MGPUEnable")
    policy: Policy | None = Field(None, alias="MGPUPolicy")
    weight_of_core: Annotated[int, Field(ge=0, le=100)] = Field(20, alias="MGPUWeightOfCore")
    schedule_mode: Annotated[Literal["index", "id"], BeforeValidator(lower)] = Field("index", alias="MGPUScheduleMode")
    max_containers_per_card: Annotated[int, Field(ge=1)] = Field(16, alias="MGPUMaxContainersPerCard")
    max_containers_exact: Annotated[int, Field(ge=1)] | None = Field(None, alias="MGPUMaxContainersNumPolicyValid")
    min_gpu_memory: MinMemory = Field(256, alias="minGPUMemory")


def _unit(value: object) -> object:
    return {"gib": "GiB", "mib": "MiB"}.get(value.lower(), value) if isinstance(value, str) else value


class GpushareSettings(Block):
    """memoryUnit: what one `aliyun.com/gpu-mem` is, in every pod, annotation and node of the cluster."""

    enabled: bool = True
    memory_unit: Annotated[Literal["GiB", "MiB"], BeforeValidator(_unit)] = Field("GiB", alias="memoryUnit")
    policy: Policy | None = None
    min_gpu_memory: MinMemory = Field(1, alias="minGPUMemory")


class KoordinatorSettings(Block):
    """minGPUMemory holds for memory in bytes, minGPUMemoryRatio (percent) for memory in percent of a card."""

    enabled: bool = True
    policy: Policy | None = None
    min_gpu_memory: MinMemory = Field(1, alias="minGPUMemory")
    min_gpu_memory_ratio: Annotated[int, Field(ge=1, le=100)] = Field(1, alias="minGPUMemoryRatio")


class MtgpuSettings(Block):
    """occupyImage: what occupy pods run; it needs `sleep`. The suite's own image is on every GPU node already.

    occupyPriorityClass: theirs; empty: the cluster's default. maxGPUIDsPerNamespace: how many GPUIDs, each of which
    has a card of its own, one namespace may use at once; None: any number.
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


_PROCESSES = ("scheduler", "deviceplugin", "webhook")


class WebhookSettings(Block):
    """Where /mutate and /validate are served.

    certDir: certificates to read (`tls.crt`, `tls.key`); empty: made by the process itself, for the Service's names and
    `names`. In a cluster they are kept in a Secret under a CA that the installation has put there, else in
    `selfSignedDir` (empty: a private temporary one) under a CA of the process's own.
    identities: the users that may write placement annotations, and make the Pods of MtgpuPods; empty: the suite's
    service accounts in `namespace`.
    schedulerName: what new GPU pods get as theirs (Koordinator's upgrade webhook); empty: what they have.
    clientCa: a file of certificates; then only clients that one of them vouches for are answered (the API server's).
    apiServers: the addresses from which the API servers call; all other peers get 403. None: with clientCa every peer
    that has a certificate, else loopback alone.
    metricsPort: /metrics, /healthz and /readyz in plain HTTP; -1: nowhere.
    """

    host: str = "0.0.0.0"
    port: Port = 8443
    workers: Annotated[int, Field(ge=1, le=64)] = 2
    cert_dir: str = Field("", alias="certDir")
    self_signed_dir: str = Field("", alias="selfSignedDir")
    names: Names = ()
    identities: Names = ()
    service: str = "mgpu-webhook"
    configuration: str = "mgpu-webhook"
    namespace: str = "mgpu-system"
    scheduler_name: str = Field("", alias="schedulerName")
    client_ca: str = Field("", alias="clientCa")
    api_servers: AddressBlocks | None = Field(None, alias="apiServers")
    metrics_host: str = Field("0.0.0.0", alias="metricsHost")
    metrics_port: ExtraPort = Field(-1, alias="metricsPort")

    @property
    def trusted_users(self) -> Collection[str]:
        """The users that may write placement annotations and create the Pods of MtgpuPods."""
        return self.identities or [self._service_account(f"mgpu-{name}") for name in _PROCESSES]

    @property
    def scheduler_user(self) -> str:
        """The user that mgpu's own scheduler is in a cluster."""
        return self._service_account("mgpu-scheduler")

    def _service_account(self, name: str) -> str:
        return f"system:serviceaccount:{self.namespace}:{name}"


class SchedulerSettings(Block):
    """Binding admission over TLS on `port`, the extender over plain HTTP on `extenderPort` (loopback by default).

    clientCa, apiServers: as the webhook's, of the binding admission. extenderClientCa: the same of the extender, which
    is served over TLS then, and may listen on other addresses than loopback.
    metricsPort: as the webhook's. webPort: the page of the cluster's cards, in plain HTTP; `kubectl port-forward`
    reaches it on loopback; -1: nowhere.
    podUid: this process's own pod's, by the downward API: while it decides that pod has the label that the Service
    chooses by; empty: no pod is labelled.
    extenderTimeoutSeconds: how long kube-scheduler waits for the extender (`httpTimeout`): work for a call ends then.
    kubeSchedulerLease: of the kube-schedulers in this process's and its replicas' pods; the replica leads whose own has
    it; empty: there are none.
    bindingUsers: the users or groups that may bind GPU pods (with an extender that binds, its own account is one of
    them); empty: anybody.
    requireReadyAgents: whether a node is refused while the Pod of its mgpu agent is not ready.
    """

    host: str = "0.0.0.0"
    port: Port = 8444
    extender_client_ca: str = Field("", alias="extenderClientCa")  # before the host, whose rule depends on it
    extender_host: str = Field("127.0.0.1", alias="extenderHost")
    extender_port: Port = Field(8888, alias="extenderPort")
    cert_dir: str = Field("", alias="certDir")
    self_signed_dir: str = Field("", alias="selfSignedDir")
    names: Names = ()
    service: str = "mgpu-scheduler"
    configuration: str = "mgpu-scheduler"
    namespace: str = "mgpu-system"
    leader_elect: bool = Field(True, alias="leaderElect")
    pod_uid: str = Field("", alias="podUid")
    kube_scheduler_lease: str = Field("", alias="kubeSchedulerLease")
    extender_timeout_seconds: Annotated[float, Field(gt=0)] = Field(10, alias="extenderTimeoutSeconds")
    reservation_seconds: Annotated[float, Field(gt=0)] = Field(30, alias="reservationSeconds")
    binding_users: Names = Field((), alias="bindingUsers")
    require_ready_agents: bool = Field(True, alias="requireReadyAgents")
    client_ca: str = Field("", alias="clientCa")
    api_servers: AddressBlocks | None = Field(None, alias="apiServers")
    metrics_host: str = Field("0.0.0.0", alias="metricsHost")
    metrics_port: ExtraPort = Field(-1, alias="metricsPort")
    web_host: str = Field("127.0.0.1", alias="webHost")
    web_port: ExtraPort = Field(-1, alias="webPort")

    @field_validator("extender_host")
    @classmethod
    def _closed(cls, host: str, found: ValidationInfo) -> str:
        if not (found.data.get("extender_client_ca") or _is_loopback(host)):
            raise ValueError(
                "must be a loopback address, since anybody who reaches it may bind; or set extenderClientCa"
            )
        return host


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class DevicePluginSettings(Block):
    """`cards`: a file of simulated cards; empty: NVML. `healthPort` 0: no HTTP server.

    wholeCards: who serves `nvidia.com/gpu` on the node, this agent or NVIDIA's own plugin; auto: this agent, unless
    another plugin does (then it never does, whatever is set). It changes on a drained node.
    criSocket: the container runtime's. It is asked whether deleted pods still run and stops them, and about pods that
    run without a record and that the kubelet's checkpoint does not know. Empty: not asked.
    enforce: `mps`: cards that are shared run an MPS control daemon (the program `mpsControl`, directories below
    `mpsDir`), which holds each share to its memory and compute.
    mpsRequireMounts: an MPS daemon starts only where the folders that containers write are mounts of their own.
    migManager: whether this agent may switch the MIG mode of cards.
    limitsDir: where the limits of a card's MtgpuPods are written, a file per UUID; empty: nowhere.
    deviceList: `mounts`: NVIDIA's container toolkit is told a container's cards by mounts too, which it can be set to
    heed of all containers, unlike the variable. deviceNodes: containers get the nodes of their cards from here, not by
    the toolkit alone; devDir: where the host's /dev is seen.
    """

    node: str = ""
    cards: str = ""
    kubelet_dir: str = Field("/var/lib/kubelet", alias="kubeletDir")
    pod_resources: str = Field("", alias="podResources")
    cdi_dir: str = Field("/var/run/cdi", alias="cdiDir")
    cdi: bool = True
    health_port: Port = Field(0, alias="healthPort")
    cri_socket: str = Field("/run/containerd/containerd.sock", alias="criSocket")
    whole_cards: Annotated[Literal["auto", "mgpu", "nvidia"], BeforeValidator(lower)] = Field(
        "auto", alias="wholeCards"
    )
    enforce: Annotated[Literal["none", "mps"], BeforeValidator(lower)] = "none"
    mps_dir: str = Field("/run/mgpu/mps", alias="mpsDir")
    mps_control: str = Field("nvidia-cuda-mps-control", alias="mpsControl")
    mps_require_mounts: bool = Field(True, alias="mpsRequireMounts")
    mig_manager: bool = Field(True, alias="migManager")
    limits_dir: str = Field("/run/mgpu/limits", alias="limitsDir")
    device_list: Annotated[Literal["env", "mounts"], BeforeValidator(lower)] = Field("env", alias="deviceList")
    device_nodes: bool = Field(False, alias="deviceNodes")
    dev_dir: str = Field("/dev", alias="devDir")


class RecordSettings(Block):
    """Which placement records count. Empty paths: records are not sealed, and every one that can be read counts.

    signingKey: a file with the private key (Ed25519, PEM) that the scheduler seals its decisions with. publicKeys: a
    folder with the file `since`, the time at which sealing came into force, and the public keys whose seals count, in
    files `….pem`; the scheduler and the agents read it. peers: the vocabularies whose records count without a seal,
    since another scheduler writes them.
    """

    signing_key: str = Field("", alias="signingKey")
    public_keys: str = Field("", alias="publicKeys")
    peers: Annotated[tuple[Literal["koordinator", "gpushare", "mtgpu"], ...], BeforeValidator(listed)] = ()


class Settings(Block):
    """Everything that can be set. Which card policy holds for a pod: `card_policy_for`."""

    card_policy: Policy | None = Field(None, alias="cardPolicy")
    node_policy: Policy = Field("binpack", alias="nodePolicy")
    dialects: DialectSettings = DialectSettings()
    webhook: WebhookSettings = WebhookSettings()  # type: ignore[call-arg]
    scheduler: SchedulerSettings = SchedulerSettings()  # type: ignore[call-arg]
    deviceplugin: DevicePluginSettings = DevicePluginSettings()  # type: ignore[call-arg]
    records: RecordSettings = RecordSettings()  # type: ignore[call-arg]
    card_policy_flag: Policy | None = Field(None, alias="cardPolicyFlag", exclude=True)

    def card_policy_for(self, dialect_setting: str | None, dialect_default: str) -> str:
        """The flag, else the dialect's setting, else `cardPolicy`, else the dialect's default (design.md)."""
        return self.card_policy_flag or dialect_setting or self.card_policy or dialect_default


def load_settings(
    text: str = "",
    source: str = "settings",
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Settings:
    """Settings from YAML `text` (named `source` in errors), `MGPU_*` variables and flags.

    Environment: `MGPU_CARD_POLICY`, `MGPU_NODE_POLICY`, and below the top level the path with `__` between its keys,
    any case: `MGPU_WEBHOOK__PORT`, `MGPU_DIALECTS__MGPU__MGPUPOLICY`. (Not `MGPU_WEBHOOK_PORT`: Kubernetes itself sets
    that in every pod beside a Service of this name.)
    flags: dotted path (`webhook.port`) → value; None: not given. `cardPolicy` holds over the dialects' settings too.
    Raises BadObject: every problem with the path of its key, and the allowed values.
    """
    tree = _parse(text, source)
    problems = []
    for name, value in (environ or {}).items():
        path = _environment_path(name)
        if path and not _put(tree, path, value):
            problems.append(Problem(name, "names no setting"))
    for dotted, value in (flags or {}).items():
        if value is not None:
            _put(tree, ["cardPolicyFlag"] if dotted == "cardPolicy" else dotted.split("."), value)
    try:
        settings = Settings.model_validate(tree, by_alias=True, by_name=False)
    except ValidationError as error:
        problems += [_problem(source, e) for e in error.errors(include_url=False)]
    else:
        problems += impossible(settings.dialects.slices, f"{source}: {_SLICES}")
    if problems:
        raise BadObject(problems)
    return settings


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice: what is below the first one would be lost without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands twice", key.start_mark)
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
        raise BadObject([Problem(source, "must be an object with the settings' keys")])
    if "cardPolicyFlag" in tree:  # where the flag is kept; a file has `cardPolicy`
        raise BadObject([Problem(f"{source}: cardPolicyFlag", f"unknown; allowed: {_keys(Settings)}")])
    tree = _from_volcano(tree, source) if "tiers" in tree else tree
    match tree:
        case {"dialects": {"slices": dict(block)} as blocks}:
            return {**tree, "dialects": {**blocks, "slices": with_weights(block, f"{source}: {_SLICES}")}}
    return tree


_VOLCANO: Mapping[str, tuple[str, type[BaseModel]]] = {
    "predicate.MGPU": ("mgpu", MgpuSettings),
    "dynamicgpuslice.": ("slices", SlicesSettings),
}
"""How arguments begin that are settings of a dialect. Keys of ours alone have no alias."""


def _from_volcano(tree: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The arguments of a Volcano scheduler configuration that are settings here (the seeds that have one)."""
    own = sorted(field.alias or name for name, field in Settings.model_fields.items())
    beside = next((key for key in own if key in tree), None)
    if beside:
        text = f"cannot stand beside tiers: of a Volcano configuration its {' and '.join(_VOLCANO)}… arguments alone"
        raise BadObject([Problem(f"{source}: {beside}", f"{text} are read")])
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
    """Set the value at a path whose keys are matched in any case; False where no setting is there."""
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
            return True  # reported by the validation
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
