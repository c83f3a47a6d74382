"""Defines the settings of the three processes, and of allocation records.

`mgpu.settings.loader` reads the blocks. Users write the keys (docs/settings.md), so the keys must not change.
"""

from collections.abc import Collection
from ipaddress import ip_address
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from mgpu.settings.fields import AddressBlocks, Block, ExtraPort, Names, Policy, Port, split_list, to_lower_case

_PROCESSES = ("scheduler", "deviceplugin", "webhook")


class WebhookSettings(Block):
    """The settings of the webhook, which serves /mutate, /rebuild and /validate on `host` and `port`.

    Keys:
        workers: The number of worker processes.
        certDir: A folder with the certificate to serve (`tls.crt`, `tls.key`). If it is empty, the process makes a
            certificate for the names of the Service and for `names`. In a cluster it stores the certificate in a
            Secret, and signs it with the CA that the installation stored there. Elsewhere it stores the certificate in
            `selfSignedDir`, or in a private temporary folder if that is empty, and signs it with a CA of its own.
        names: Further DNS names and addresses for that certificate.
        identities: The users that may write placement annotations and create the Pods of MtgpuPods. If it is empty,
            these are mgpu's service accounts in `namespace`.
        service: The Service of the webhook. Its names are in the certificate.
        configuration: The name of the webhook configurations that refer to this Service.
        namespace: The namespace of the Service, of the Secret and of mgpu's service accounts.
        schedulerName: The `schedulerName` that new GPU pods get. If it is empty, they keep their own.
        clientCa: A file of CA certificates. Only clients with a certificate that one of them has signed are answered.
            If it is empty, clients need no certificate.
        apiServers: The addresses of the API servers. Other peers get 403. If the key is missing, every peer with a
            certificate may call if `clientCa` is set, and only loopback addresses may call if `clientCa` is empty.
        metricsHost: The address on which /metrics, /healthz and /readyz are served, in plain HTTP.
        metricsPort: The port of these endpoints. They are not served if it is -1.
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
        """The users in `identities`, or mgpu's service accounts if it is empty."""
        return self.identities or [self._service_account(f"mgpu-{name}") for name in _PROCESSES]

    @property
    def scheduler_user(self) -> str:
        """The user name of mgpu's scheduler in a cluster."""
        return self._service_account("mgpu-scheduler")

    def _service_account(self, name: str) -> str:
        return f"system:serviceaccount:{self.namespace}:{name}"


class SchedulerSettings(Block):
    """The settings of the scheduler.

    The binding admission is served over TLS on `host` and `port`, and the extender on `extenderHost` and
    `extenderPort`. The keys that are not explained here have the same meaning as for the webhook.

    Keys:
        extenderClientCa: The same as `clientCa`, for the extender. If it is set, the extender is served over TLS and
            may listen on any address. If it is empty, the extender is served in plain HTTP on a loopback address.
        podUid: The UID of this process's own pod, from the downward API. While the process leads, its pod has the label
            that the Service selects. If it is empty, no pod is labelled.
        kubeSchedulerLease: The Lease of the kube-schedulers that run in the pods of mgpu-scheduler. The replica whose
            kube-scheduler holds it leads. If it is empty, no kube-scheduler runs in these pods.
        leaderElect: Whether the replicas elect a leader.
        extenderTimeoutSeconds: The time that kube-scheduler waits for the extender (`httpTimeout`). After that time the
            scheduler stops working on the call.
        filteredNodes: The most nodes that `filter` names for a pod that prefers no nodes by affinity or topology
            spread: those with the best scores. kube-scheduler then scores few nodes. If it is 0, all nodes on which the
            pod fits are named.
        reservationSeconds: The time after which the scheduler looks up the pod of a reservation whose binding it has
            not observed, and releases the reservation if the pod is not bound.
        bindingUsers: The users and groups that may bind GPU pods. If mgpu's extender binds pods, the list must contain
            the service account mgpu-scheduler. If the list is empty, every user with the right to bind pods may do so.
        requireReadyAgents: Whether a node is refused while the Pod of its agent is not ready.
        resize: Which live resizes are allowed (`mgpu.io/resize`): `none`; `within-request`, up to what the container
            requests; or `any`, which lets a pod hold more than its ResourceQuota counts.
        clientCa, apiServers: The same as for the webhook. They limit who may call the binding admission.
        webHost: The address of the web page with the cluster's cards, in plain HTTP, for `kubectl port-forward`.
        webPort: The port of the web page. It is not served if the port is -1.
        volcanoHost: The address of the verbs for Volcano's plugin `extender`, in plain HTTP, because the plugin can
            neither send a client certificate nor trust a certificate authority of its own.
        volcanoPort: The port of these verbs. They are not served if it is -1.
        volcanoTokenFile: A file with the token that the path of every call must begin with. Everyone who knows it can
            reserve cards for pods that exist, but not bind pods.
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
    filtered_nodes: Annotated[int, Field(ge=0)] = Field(100, alias="filteredNodes")
    reservation_seconds: Annotated[float, Field(gt=0)] = Field(30, alias="reservationSeconds")
    binding_users: Names = Field((), alias="bindingUsers")
    require_ready_agents: bool = Field(True, alias="requireReadyAgents")
    resize: Annotated[Literal["none", "within-request", "any"], BeforeValidator(to_lower_case)] = "within-request"
    client_ca: str = Field("", alias="clientCa")
    api_servers: AddressBlocks | None = Field(None, alias="apiServers")
    metrics_host: str = Field("0.0.0.0", alias="metricsHost")
    metrics_port: ExtraPort = Field(-1, alias="metricsPort")
    web_host: str = Field("127.0.0.1", alias="webHost")
    web_port: ExtraPort = Field(-1, alias="webPort")
    volcano_host: str = Field("0.0.0.0", alias="volcanoHost")
    volcano_port: ExtraPort = Field(-1, alias="volcanoPort")
    volcano_token_file: str = Field("", alias="volcanoTokenFile")

    @field_validator("extender_host")
    @classmethod
    def _closed(cls, host: str, found: ValidationInfo) -> str:
        if not (found.data.get("extender_client_ca") or _is_loopback(host)):
            raise ValueError(
                "must be a loopback address unless extenderClientCa is set, because everyone who can reach it may bind "
                "pods"
            )
        return host


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class DevicePluginSettings(Block):
    """The settings of the node agent.

    Keys:
        node: The name of the node. If it is empty, `$NODE_NAME` or else the name of the host applies.
        cards: A file of simulated cards. If it is empty, the agent finds the cards by NVML.
        kubeletDir: The folder of the kubelet, with its sockets and its checkpoint.
        podResources: The PodResources socket. If it is empty, `pod-resources/kubelet.sock` in `kubeletDir` applies.
        cdiDir: The folder in which the container runtime looks for CDI files.
        cdi: Whether the container runtime supports CDI.
        healthPort: The port of /metrics, /healthz and /readyz. They are not served if it is 0.
        criSocket: The socket of the container runtime. The agent asks the runtime whether deleted pods still run, and
            makes it stop them. It also asks about unrecorded pods that the kubelet's checkpoint does not have. If it is
            empty, the agent does not ask.
        wholeCards: Who serves `nvidia.com/gpu` on the node: this agent (`mgpu`), NVIDIA's device plugin (`nvidia`), or
            no device plugin (`dra`): kube-scheduler then makes ResourceClaims of it, which need `dra.enabled`. With
            `auto`, this agent serves it unless another plugin does. Change the setting only on a drained node.
        isolation: The isolation back end that holds containers to their shares; with `auto`, the strongest one that
            works on the node. The label `mgpu.io/isolation` of a Node overrides it.
        isolationRequired: Whether a container starts only if all of its limits are in force.
        memoryLimitHook: The hook of NVIDIA's container toolkit that sets memory limits (`nvidia-cdi-hook`), as a path
            on the host. With `auto`, the agent takes it from the CDI specs that the toolkit has generated; with `none`,
            the agent sets the limits itself.
        cgroupDir: The root of the host's cgroups (version 2), as the agent sees it.
        hamiCoreDir: The folder on the host in which the administrator provides HAMi-core's `libvgpu.so`. The agent sees
            it at the same path. If it is empty, the node does not offer HAMi-core.
        hamiCoreStateDir: The folder that has a folder for each container that HAMi-core limits.
        hamiCoreRequireMounts: Whether these folders are separate mounts of limited size, which the agent makes.
        hamiCoreDisable: What happens if a container sets CUDA_DISABLE_CONTROL to true: `refuse` limits it
            nevertheless, and `heed` does not limit it.
        mpsDir: The folder that has a folder for each MPS daemon.
        mpsControl: The program of the MPS control daemon.
        mpsMultiUser: Whether an MPS daemon accepts clients of several users at the same time (option `-M`). With
            `auto`, it does unless its program does not start with the option.
        mpsPartitions: Whether a share of compute under MPS is a static SM partition (option `-S`), if the program of
            the control daemon has them, and not a percentage of the threads.
        mpsRequireMounts: Whether an MPS daemon starts only if the folders that containers write to are separate mounts.
        migManager: Whether this agent may switch the MIG mode of cards.
        limitsDir: The folder of the files with the limits of MtgpuPods, one file for each card. If it is empty, no such
            files are written.
        deviceList: With `mounts`, the agent also names a container's cards by mounts. NVIDIA's container toolkit can be
            configured to trust only these mounts, and not the environment variable, which images can set.
        deviceNodes: Whether the agent adds the device nodes of a container's cards. If not, the toolkit adds them.
        devDir: The folder at which the host's /dev is mounted.
        usageSeconds: The interval at which the agent measures what containers use of the cards. If it is 0, the agent
            does not measure it.
        usageSeries: The most pairs of a container and a card for which the agent serves metrics. If it is 0, it serves
            the metrics of the cards only.
    """

    node: str = ""
    cards: str = ""
    kubelet_dir: str = Field("/var/lib/kubelet", alias="kubeletDir")
    pod_resources: str = Field("", alias="podResources")
    cdi_dir: str = Field("/var/run/cdi", alias="cdiDir")
    cdi: bool = True
    health_port: Port = Field(0, alias="healthPort")
    cri_socket: str = Field("/run/containerd/containerd.sock", alias="criSocket")
    whole_cards: Annotated[Literal["auto", "mgpu", "nvidia", "dra"], BeforeValidator(to_lower_case)] = Field(
        "auto", alias="wholeCards"
    )
    isolation: Annotated[Literal["none", "mps", "hami-core", "driver", "auto"], BeforeValidator(to_lower_case)] = "none"
    isolation_required: bool = Field(False, alias="isolationRequired")
    memory_limit_hook: str = Field("auto", alias="memoryLimitHook")
    cgroup_dir: str = Field("/sys/fs/cgroup", alias="cgroupDir")
    hami_core_dir: str = Field("", alias="hamiCoreDir")
    hami_core_state_dir: str = Field("/run/mgpu/hami-core", alias="hamiCoreStateDir")
    hami_core_require_mounts: bool = Field(True, alias="hamiCoreRequireMounts")
    hami_core_disable: Annotated[Literal["refuse", "heed"], BeforeValidator(to_lower_case)] = Field(
        "refuse", alias="hamiCoreDisable"
    )
    mps_dir: str = Field("/run/mgpu/mps", alias="mpsDir")
    mps_control: str = Field("nvidia-cuda-mps-control", alias="mpsControl")
    mps_multi_user: Annotated[Literal["auto", "always", "never"], BeforeValidator(to_lower_case)] = Field(
        "auto", alias="mpsMultiUser"
    )
    mps_partitions: bool = Field(False, alias="mpsPartitions")
    mps_require_mounts: bool = Field(True, alias="mpsRequireMounts")
    mig_manager: bool = Field(True, alias="migManager")
    limits_dir: str = Field("/run/mgpu/limits", alias="limitsDir")
    device_list: Annotated[Literal["env", "mounts"], BeforeValidator(to_lower_case)] = Field("env", alias="deviceList")
    device_nodes: bool = Field(False, alias="deviceNodes")
    dev_dir: str = Field("/dev", alias="devDir")
    usage_seconds: Annotated[float, Field(ge=0, le=3600)] = Field(15, alias="usageSeconds")
    usage_series: Annotated[int, Field(ge=0)] = Field(512, alias="usageSeries")


class DraSettings(Block):
    """The settings of Dynamic Resource Allocation (docs/dra.md).

    Keys:
        enabled: Whether mgpu serves ResourceClaims of its driver: the agents publish their cards in ResourceSlices, and
            the scheduler decides the cards of claims. Needs Kubernetes 1.36, or 1.35 with feature gates.
        cardPolicy: The policy that chooses the cards of claims. If it is not set, that of the cluster applies, or else
            `binpack`.
        convert: Whether the scheduler creates the ResourceClaimTemplates of pods that the webhook has converted from
            other vocabularies (docs/dra-convert.md).
        convertCardMemory: The memory of a card in MiB to which percentages refer in pods that are converted, because a
            claim requests memory in bytes. If it is 0, pods that request a percentage of memory are denied.
    """

    enabled: bool = False
    card_policy: Policy | None = Field(None, alias="cardPolicy")
    convert: bool = False
    convert_card_memory: Annotated[int, Field(ge=0, le=1 << 30)] = Field(0, alias="convertCardMemory")


class RecordSettings(Block):
    """The settings that determine which allocation records count.

    If `publicKeys` is empty, records are not sealed, and every readable record counts.

    Keys:
        signingKey: A file with the private key (Ed25519, PEM) with which the scheduler seals its decisions.
        publicKeys: A folder that the scheduler and the agents read. It contains the public keys whose seals count, in
            files `….pem`, and the file `since` with the time at which sealing came into force.
        peers: The vocabularies whose records count without a seal, because another scheduler writes them.
    """

    signing_key: str = Field("", alias="signingKey")
    public_keys: str = Field("", alias="publicKeys")
    peers: Annotated[tuple[Literal["koordinator", "gpushare", "mtgpu"], ...], BeforeValidator(split_list)] = ()
