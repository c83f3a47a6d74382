"""Defines the settings of the three processes, and of allocation records.

`mgpu.settings.loader` parses them, and each process reads its own block. Users write the keys (docs/settings.md), so
the keys must not change.
"""

from collections.abc import Collection
from ipaddress import ip_address
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from mgpu.settings.fields import AddressBlocks, Block, ExtraPort, Names, Port, split_list, to_lower_case

_PROCESSES = ("scheduler", "deviceplugin", "webhook")


class WebhookSettings(Block):
    """The webhook: where /mutate, /rebuild and /validate are served.

    certDir: a folder with the certificate to serve (`tls.crt`, `tls.key`). If it is empty, the process makes a
    certificate for the names of the Service and for `names`. In a cluster it stores the certificate in a Secret, and
    signs it with the CA that the installation stored there. Elsewhere it stores the certificate in `selfSignedDir`, or
    in a private temporary folder if that is empty, and signs it with a CA of its own.
    identities: users that may write placement annotations and create the Pods of MtgpuPods. Empty: mgpu's service
    accounts in `namespace`.
    schedulerName: the schedulerName that new GPU pods get. Empty: they keep theirs.
    clientCa: a file of CA certificates; only clients with a certificate that one of them has signed are answered. If it
    is empty, clients need no certificate.
    apiServers: the addresses of the API servers; other peers get 403. If it is None, every peer with a certificate may
    call when `clientCa` is set, and only loopback otherwise.
    metricsPort: the port of /metrics, /healthz and /readyz in plain HTTP; -1: none.
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
        """The user name of mgpu's scheduler in a cluster."""
        return self._service_account("mgpu-scheduler")

    def _service_account(self, name: str) -> str:
        return f"system:serviceaccount:{self.namespace}:{name}"


class SchedulerSettings(Block):
    """The scheduler: binding admission over TLS on `port`, the extender over plain HTTP on `extenderPort` (loopback).

    clientCa, apiServers: as for the webhook, for the binding admission.
    extenderClientCa: the same for the extender, which is then served over TLS and may listen on any address.
    metricsPort: as for the webhook.
    webPort: the port of the page of the cluster's cards, in plain HTTP, for `kubectl port-forward`; -1: none.
    podUid: the uid of this process's own pod, from the downward API. While the process leads, its pod has the label
    that the Service selects. Empty: no pod is labelled.
    extenderTimeoutSeconds: the time that kube-scheduler waits for the extender (`httpTimeout`). The work for a call
    ends after that time.
    kubeSchedulerLease: the Lease of the kube-schedulers that run in the pods of mgpu-scheduler. The replica whose
    kube-scheduler holds it leads. Empty: no kube-scheduler runs in these pods.
    bindingUsers: users and groups that may bind GPU pods, the extender's own account among them if it binds. Empty:
    all.
    requireReadyAgents: whether a node is refused while the Pod of its agent is not ready.
    """

    host: str = "0.0.0.0"
    port: Port = 8444
    extender_client_ca: str = Field("", alias="extenderClientCa")  # precedes extender_host, whose validator reads it
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
    """The node agent.

    cards: a file of simulated cards; empty: NVML.
    healthPort: the port of /metrics and probes; 0: none.
    wholeCards: who serves `nvidia.com/gpu` on the node, this agent (`mgpu`) or NVIDIA's device plugin (`nvidia`).
    With `auto`, this agent does unless another plugin does. Change the setting only on a drained node.
    criSocket: the container runtime's socket. The agent asks the runtime whether deleted pods still run, and makes it
    stop them. It also asks about unrecorded pods that the kubelet's checkpoint does not have. If it is empty, the agent
    does not ask.
    enforce: with `mps`, an MPS control daemon (the program `mpsControl`, with folders below `mpsDir`) runs for each
    shared card, and limits each share to its memory and compute.
    mpsRequireMounts: whether an MPS daemon starts only if the folders that containers write to are mounts of their own.
    migManager: whether this agent may switch the MIG mode of cards.
    limitsDir: where the limits of a card's MtgpuPods are written, one file per card; empty: nowhere.
    deviceList: with `mounts`, NVIDIA's container toolkit learns a container's cards from mounts too. It can be
    configured to trust these alone, unlike the variable, which images can set.
    deviceNodes: whether the agent adds the device nodes of a container's cards, instead of leaving that to the toolkit.
    devDir: where the host's /dev is mounted.
    """

    node: str = ""
    cards: str = ""
    kubelet_dir: str = Field("/var/lib/kubelet", alias="kubeletDir")
    pod_resources: str = Field("", alias="podResources")
    cdi_dir: str = Field("/var/run/cdi", alias="cdiDir")
    cdi: bool = True
    health_port: Port = Field(0, alias="healthPort")
    cri_socket: str = Field("/run/containerd/containerd.sock", alias="criSocket")
    whole_cards: Annotated[Literal["auto", "mgpu", "nvidia"], BeforeValidator(to_lower_case)] = Field(
        "auto", alias="wholeCards"
    )
    enforce: Annotated[Literal["none", "mps"], BeforeValidator(to_lower_case)] = "none"
    mps_dir: str = Field("/run/mgpu/mps", alias="mpsDir")
    mps_control: str = Field("nvidia-cuda-mps-control", alias="mpsControl")
    mps_require_mounts: bool = Field(True, alias="mpsRequireMounts")
    mig_manager: bool = Field(True, alias="migManager")
    limits_dir: str = Field("/run/mgpu/limits", alias="limitsDir")
    device_list: Annotated[Literal["env", "mounts"], BeforeValidator(to_lower_case)] = Field("env", alias="deviceList")
    device_nodes: bool = Field(False, alias="deviceNodes")
    dev_dir: str = Field("/dev", alias="devDir")


class RecordSettings(Block):
    """Which allocation records count. Without the two paths, records are not sealed, and every readable one counts.

    signingKey: a file with the private key (Ed25519, PEM) with which the scheduler seals its decisions.
    publicKeys: a folder that the scheduler and the agents read. It contains the public keys whose seals count, in files
    `….pem`, and the file `since` with the time at which sealing came into force.
    peers: vocabularies whose records count without a seal, since another scheduler writes them.
    """

    signing_key: str = Field("", alias="signingKey")
    public_keys: str = Field("", alias="publicKeys")
    peers: Annotated[tuple[Literal["koordinator", "gpushare", "mtgpu"], ...], BeforeValidator(split_list)] = ()
