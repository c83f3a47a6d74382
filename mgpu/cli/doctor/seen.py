"""What was seen of an installation, and what a check finds. Pure."""

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
"""A Lease is renewed every few seconds; clocks are not all alike."""


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


class Finding(NamedTuple):
    """check: which one. remedy: what to do; "": nothing."""

    check: str
    level: Level
    message: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Tried:
    """The answer to a dry-run create that must be denied. status 0: it was not tried."""

    status: int = 0
    message: str = ""

    @property
    def denied(self) -> bool:
        """Whether one of the suite's webhooks has denied it."""
        return '.mgpu.io" denied' in self.message


@dataclass(frozen=True, slots=True)
class Sealing:
    """records: as the public keys of the installation judge them. unproven: the pods whose records do not count."""

    records: RecordVerifier
    unproven: tuple[str, ...] = ()


class Secret(NamedTuple):
    """ours: made and renewed by the processes themselves, not by cert-manager or whoever."""

    name: str
    files: Mapping[str, bytes]
    ours: bool


@dataclass(frozen=True, slots=True)
class Seen:
    """All as the API has it.

    own: the version of this command. tried, bound: a Pod in two vocabularies, a Binding of a Pod that is not there.
    served: the custom resources that there are, `devices`, `mtgpupods`.
    configurations: kind (plural) → those webhook configurations.
    secrets: Service → the one with its certificate, of those that may be read.
    leases: of the scheduler, in whatever namespace. pods: the suite's own, and those of other device plugins.
    given: who holds which card, by the records of all pods.
    workloads: `mgpu-scheduler`, … → the Deployment or DaemonSet in the suite's namespace.
    environment: variables of webhook and scheduler that override their settings, by name.
    hidden: what could not be looked at, and why.
    sealing: which records count by the installation's keys; None: it has none. BadObject: they cannot be read.
    """

    namespace: str
    now: datetime
    own: str
    settings: Settings
    tried: Tried = Tried()
    bound: Tried = Tried()
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

    def of_component(self, name: str, *, ending: bool = False) -> Iterator[Raw]:
        """The Pods of a part of the suite; ending: those too that end."""
        for pod in self.pods:
            meta = pod["metadata"]
            mine = meta.get("namespace") == self.namespace and (meta.get("labels") or {}).get(COMPONENT) == name
            if mine and (ending or not meta.get("deletionTimestamp")):
                yield pod

    def leading(self) -> Iterator[Raw]:
        """The Leases that somebody holds and renews."""
        for lease in self.leases:
            spec = lease.get("spec") or {}
            renewed = when(spec.get("renewTime"))
            if spec.get("holderIdentity") and renewed and self.now - renewed < _FRESH:
                yield lease


def when(text: object) -> datetime | None:
    """A time as the API writes it, with or without fractions; None: it is none."""
    try:
        return datetime.fromisoformat(str(text)).astimezone(UTC)
    except ValueError:
        return None


def hooks(configuration: Raw) -> Sequence[Raw]:
    return configuration.get("webhooks") or ()


def serves_gpus(pod: Raw) -> bool:
    """Whether it is NVIDIA's own device plugin; its feature discovery, which only labels nodes, runs the same image."""
    return any(
        plugin in str(container.get("image", "")) and not str(container["name"]).startswith(_DISCOVERY)
        for container in pod["spec"].get("containers") or ()
        for plugin in _PLUGIN_IMAGES
    )
