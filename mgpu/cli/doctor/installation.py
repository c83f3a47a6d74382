"""The data of `mgpu doctor`: a snapshot of an installation, and the findings of the checks.

`collection` creates the Installation, and the checks only read it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, NamedTuple

from mgpu.dialects.record_verification import RecordVerifier
from mgpu.model import agent_pods
from mgpu.model.errors import BadObject
from mgpu.presentation.overview import Overview
from mgpu.settings import Settings

Raw = Mapping[str, Any]
COMPONENT = agent_pods.COMPONENT_LABEL
SCHEDULER, AGENT = "scheduler", agent_pods.COMPONENT
_PLUGIN_IMAGES = ("k8s-device-plugin", "nvidia-device-plugin")
_DISCOVERY = "gpu-feature-discovery"
_LEASE_AGE = timedelta(minutes=1)
"""A Lease that was last renewed longer ago is not regarded as held. A leader renews its Lease every few seconds, but
the clocks of two machines can differ."""


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


class Finding(NamedTuple):
    """A result of a check.

    Attributes:
        remedy: what the administrator can do about it; "" if there is nothing to do.
    """

    check: str
    level: Level
    message: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class DryRun:
    """The answer to the creation, as a dry run, of an object that mgpu must deny.

    Attributes:
        status: the HTTP status; 0 if there was no dry run.
        message: the message of the answer; "" if the object was admitted.
    """

    status: int = 0
    message: str = ""

    @property
    def is_denied(self) -> bool:
        """Whether one of mgpu's webhooks denied the object."""
        return '.mgpu.io" denied' in self.message


@dataclass(frozen=True, slots=True)
class CommandsAnswer:
    """What the scheduler has answered to a request of `mgpu inspect`.

    Attributes:
        problem: why there is no answer; "" if there is one.
        is_forbidden: whether the user may not ask the scheduler.
        is_other_version: whether the scheduler has another version than this command.
        note: why the replica that answered does not know reservations; "" if it does.
    """

    problem: str = ""
    is_forbidden: bool = False
    is_other_version: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class Sealing:
    """The verification of the allocation records.

    Attributes:
        records: the verifier with the installation's public keys.
        unproven: the pods whose records mgpu ignores because they fail the verification, each with the reason.
    """

    records: RecordVerifier
    unproven: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ClaimSupport:
    """What the cluster has of Dynamic Resource Allocation.

    Attributes:
        enabled: whether mgpu serves ResourceClaims (`dra.enabled`). If not, nothing else was read.
        served: whether the API server serves the API group.
        version: the version of the API server, such as (1, 36); None if it is not known.
        slice_dry_run: the answer to the dry run of a ResourceSlice as an agent publishes it.
        slice_stored: what the API server would have stored; {} if it refused.
    """

    enabled: bool = False
    served: bool = False
    version: tuple[int, int] | None = None
    slice_dry_run: DryRun = DryRun()
    slice_stored: Raw = field(default_factory=dict)
    slices: Sequence[Raw] = ()
    classes: Sequence[Raw] = ()


class Secret(NamedTuple):
    """A Secret with a serving certificate.

    Attributes:
        files: the data of the Secret, by file name.
        is_renewed_by_mgpu: whether the process itself renews the certificate. Otherwise the Deployment mounts the
            Secret, and another program such as cert-manager renews it.
    """

    name: str
    files: Mapping[str, bytes]
    is_renewed_by_mgpu: bool


@dataclass(frozen=True, slots=True)
class Installation:
    """A snapshot of an installation.

    Attributes:
        version: the version of the command `mgpu` that took the snapshot.
        pod_dry_run: the answer to the dry run of a Pod that uses two vocabularies.
        binding_dry_run: the answer to the dry run of a Binding of a Pod that does not exist.
        served: the names of the custom resources that the API server serves (`devices`, `mtgpupods`).
        configurations: the webhook configurations, by the plural name of their kind.
        secrets: the Secrets with the serving certificates, by the name of the Service. Secrets that the user may not
            read are left out.
        leases: the Leases of mgpu's schedulers in all namespaces.
        devices: the Devices, by the name of the node.
        pods: the Pods of mgpu and of NVIDIA's device plugin.
        workloads: mgpu's Deployments and DaemonSets, by name.
        hidden: the API server's message for each object or kind of objects that the user may not read.
        environment: the environment variables of the webhook and the scheduler that override the settings of their
            callers (`callers.environment_variables`).
        sealing: the verification of the records; None if the installation has no record keys, and the error if the
            keys are invalid.
        kueue: Kueue's configuration as YAML; "" if it was not found, and None if the cluster has no Kueue.
        commands: the scheduler's answer to the commands; None if it was not asked.
        claims: what the cluster has of Dynamic Resource Allocation; None if it was not read.
    """

    namespace: str
    now: datetime
    version: str
    settings: Settings
    pod_dry_run: DryRun = DryRun()
    binding_dry_run: DryRun = DryRun()
    served: frozenset[str] = frozenset()
    configurations: Mapping[str, Sequence[Raw]] = field(default_factory=dict)
    secrets: Mapping[str, Secret] = field(default_factory=dict)
    leases: Sequence[Raw] = ()
    nodes: Sequence[Raw] = ()
    devices: Mapping[str, Raw] = field(default_factory=dict)
    pods: Sequence[Raw] = ()
    overview: Overview = field(default_factory=lambda: Overview(()))
    workloads: Mapping[str, Raw] = field(default_factory=dict)
    hidden: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    sealing: Sealing | BadObject | None = None
    kueue: str | None = None
    commands: CommandsAnswer | None = None
    claims: ClaimSupport | None = None

    @property
    def kubectl(self) -> str:
        """The first words of the kubectl commands in remedies."""
        return f"kubectl -n {self.namespace}"

    def pods_of(self, component: str, *, include_deleted: bool = False) -> Iterator[Raw]:
        """Yield the Pods of a component.

        Args:
            include_deleted: whether to include Pods that are being deleted.
        """
        for pod in self.pods:
            meta = pod["metadata"]
            if meta.get("namespace") != self.namespace or (meta.get("labels") or {}).get(COMPONENT) != component:
                continue
            if include_deleted or not meta.get("deletionTimestamp"):
                yield pod

    def held_leases(self) -> Iterator[Raw]:
        """Yield the Leases that have a holder and were renewed within `_LEASE_AGE`."""
        for lease in self.leases:
            spec = lease.get("spec") or {}
            renewed = parse_time(spec.get("renewTime"))
            if spec.get("holderIdentity") and renewed and self.now - renewed < _LEASE_AGE:
                yield lease


def parse_time(text: object) -> datetime | None:
    """Return the time in a text of the API server such as `2026-01-31T12:00:00Z`; None for any other text."""
    try:
        return datetime.fromisoformat(str(text)).astimezone(UTC)
    except ValueError:
        return None


def webhooks_of(configuration: Raw) -> Sequence[Raw]:
    return configuration.get("webhooks") or ()


def is_nvidia_plugin(pod: Raw) -> bool:
    """Return whether the pod runs NVIDIA's device plugin.

    GPU feature discovery runs the same image, but only labels nodes, so its containers are ignored.
    """
    return any(
        plugin in str(container.get("image", "")) and not str(container["name"]).startswith(_DISCOVERY)
        for container in pod["spec"].get("containers") or ()
        for plugin in _PLUGIN_IMAGES
    )
