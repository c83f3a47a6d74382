"""The data of `mgpu doctor`: a snapshot of an installation, and the findings of checks. Pure.

`collection` fills an Installation from the API; the check modules turn it into Findings.
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
_FRESH = timedelta(minutes=1)
"""A leader renews its Lease every few seconds; the rest is tolerance for clocks that differ."""


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


class Finding(NamedTuple):
    """The result of one check. remedy: what the administrator should do, "" for nothing."""

    check: str
    level: Level
    message: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class DryRun:
    """The answer to a dry-run create that mgpu must deny. status: of HTTP, 0 if it was not tried."""

    status: int = 0
    message: str = ""

    @property
    def denied(self) -> bool:
        """Whether one of mgpu's webhooks denied it."""
        return '.mgpu.io" denied' in self.message


@dataclass(frozen=True, slots=True)
class Sealing:
    """The verifier with the installation's public keys, and the pods whose allocation records it rejects."""

    records: RecordVerifier
    unproven: tuple[str, ...] = ()


class Secret(NamedTuple):
    """A Secret with a serving certificate. ours: the processes renew it themselves; otherwise cert-manager might."""

    name: str
    files: Mapping[str, bytes]
    ours: bool


@dataclass(frozen=True, slots=True)
class Installation:
    """A snapshot of an installation.

    Attributes:
        own: the version of this command.
        tried: the dry run of a Pod in two vocabularies. bound: the dry run of a Binding of a Pod that does not exist.
        served: the custom resources that the API server serves: `devices`, `mtgpupods`.
        configurations: the webhook configurations by kind (plural).
        secrets: by Service, the Secret with its certificate, as far as the user may read it.
        leases: the scheduler's, in all namespaces.
        pods: those of mgpu, and of other device plugins.
        given: all cards and the pods that hold them.
        workloads: mgpu's Deployments and DaemonSets by name.
        environment: variables of webhook and scheduler that override their settings.
        hidden: what the user may not read, with the API server's message.
        sealing: None if the installation has no record keys, BadObject if they are invalid.
    """

    namespace: str
    now: datetime
    own: str
    settings: Settings
    tried: DryRun = DryRun()
    bound: DryRun = DryRun()
    served: frozenset[str] = frozenset()
    configurations: Mapping[str, Sequence[Raw]] = field(default_factory=dict)
    secrets: Mapping[str, Secret] = field(default_factory=dict)
    leases: Sequence[Raw] = ()
    nodes: Sequence[Raw] = ()
    devices: Mapping[str, Raw] = field(default_factory=dict)
    pods: Sequence[Raw] = ()
    given: Overview = field(default_factory=lambda: Overview(()))
    workloads: Mapping[str, Raw] = field(default_factory=dict)
    hidden: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    sealing: Sealing | BadObject | None = None

    @property
    def kubectl(self) -> str:
        """The beginning of kubectl commands in remedies."""
        return f"kubectl -n {self.namespace}"

    def of_component(self, name: str, *, ending: bool = False) -> Iterator[Raw]:
        """Iterate over the Pods of a component. ending: include Pods that are being deleted."""
        for pod in self.pods:
            meta = pod["metadata"]
            mine = meta.get("namespace") == self.namespace and (meta.get("labels") or {}).get(COMPONENT) == name
            if mine and (ending or not meta.get("deletionTimestamp")):
                yield pod

    def leading(self) -> Iterator[Raw]:
        """Iterate over the Leases that a holder renews."""
        for lease in self.leases:
            spec = lease.get("spec") or {}
            renewed = parse_time(spec.get("renewTime"))
            if spec.get("holderIdentity") and renewed and self.now - renewed < _FRESH:
                yield lease


def parse_time(text: object) -> datetime | None:
    """Parse a time as the API writes it, with or without fractions of a second; None if it is not one."""
    try:
        return datetime.fromisoformat(str(text)).astimezone(UTC)
    except ValueError:
        return None


def webhooks_of(configuration: Raw) -> Sequence[Raw]:
    return configuration.get("webhooks") or ()


def is_nvidia_plugin(pod: Raw) -> bool:
    """Whether the pod is NVIDIA's device plugin. Its feature discovery runs the same image, but only labels nodes."""
    return any(
        plugin in str(container.get("image", "")) and not str(container["name"]).startswith(_DISCOVERY)
        for container in pod["spec"].get("containers") or ()
        for plugin in _PLUGIN_IMAGES
    )
