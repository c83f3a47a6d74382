"""The settings of the three processes, and of the records that they exchange (docs/settings.md)."""

from collections.abc import Collection
from ipaddress import ip_address
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from mgpu.settings.fields import AddressBlocks, Block, ExtraPort, Names, Port, listed, lower

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
