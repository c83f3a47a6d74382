"""The data of `mgpu doctor`: a snapshot of an installation, and the findings of the checks. Pure.

`collection` reads an Installation from the API server; the check modules return Findings.
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
"""The age up to which a Lease counts as renewed. A leader renews it every few seconds, but clocks can differ."""


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


class Finding(NamedTuple):
    """A result of a check. remedy: what the administrator can do, "" if there is nothing to do."""

    check: str
    level: Level
    message: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class DryRun:
    """The answer to a dry-run create that mgpu must deny. status: the HTTP status, 0 if there was no dry run."""

    status: int = 0
    message: str = ""

    @property
    def is_denied(self) -> bool:
        """Whether one of mgpu's webhooks denied the object."""
        return '.mgpu.io" denied' in self.message


@dataclass(frozen=True, slots=True)
class Sealing:
    """The verifier with the installation's public keys, and the pods whose allocation records it rejects."""

    records: RecordVerifier
    unproven: tuple[str, ...] = ()


class Secret(NamedTuple):
    """A Secret with a serving certificate. If mgpu does not renew it, cert-manager might."""

    name: str
    files: Mapping[str, bytes]
    is_renewed_by_mgpu: bool


@dataclass(frozen=True, slots=True)
class Installation:
    """A snapshot of an installation.

    Attributes:
        version: the version of this command.
        pod_dry_run: of a Pod that uses two vocabularies.
        binding_dry_run: of a Binding of a Pod that does not exist.
        served: the custom resources that the API server serves: `devices`, `mtgpupods`.
        configurations: the webhook configurations by kind (plural).
        secrets: the Secret with the certificate of each Service, if the user may read it.
        leases: the schedulers' Leases in all namespaces.
        pods: the Pods of mgpu and of other device plugins.
        overview: all cards and the pods that hold them.
        workloads: mgpu's Deployments and DaemonSets by name.
        environment: the variables of webhook and scheduler that override their settings.
        hidden: the API server's message for each kind of object that the user may not read.
        sealing: None if the installation has no record keys, BadObject if the keys are invalid.
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

    @property
    def kubectl(self) -> str:
        """The beginning of kubectl commands in remedies."""
        return f"kubectl -n {self.namespace}"

    def pods_of(self, component: str, *, include_deleted: bool = False) -> Iterator[Raw]:
        """Yield the Pods of a component. include_deleted: also the Pods that are being deleted."""
        for pod in self.pods:
            meta = pod["metadata"]
            if meta.get("namespace") != self.namespace or (meta.get("labels") or {}).get(COMPONENT) != component:
                continue
            if include_deleted or not meta.get("deletionTimestamp"):
                yield pod

    def held_leases(self) -> Iterator[Raw]:
        """Yield the Leases that a holder renews."""
        for lease in self.leases:
            spec = lease.get("spec") or {}
            renewed = parse_time(spec.get("renewTime"))
            if spec.get("holderIdentity") and renewed and self.now - renewed < _LEASE_AGE:
                yield lease


def parse_time(text: object) -> datetime | None:
    """Return the time in the API's format, with or without fractions of a second, or None if it cannot be parsed."""
    try:
        return datetime.fromisoformat(str(text)).astimezone(UTC)
    except ValueError:
        return None


def webhooks_of(configuration: Raw) -> Sequence[Raw]:
    return configuration.get("webhooks") or ()


def is_nvidia_plugin(pod: Raw) -> bool:
    """Return whether the pod is NVIDIA's device plugin. GPU feature discovery runs the same image, but labels nodes."""
    return any(
        plugin in str(container.get("image", "")) and not str(container["name"]).startswith(_DISCOVERY)
        for container in pod["spec"].get("containers") or ()
        for plugin in _PLUGIN_IMAGES
    )
