"""What a kubelet is told at its start."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Order = Literal["arrival", "created", "random"]


@dataclass(frozen=True, slots=True)
class KubeletConfig:
    """One node. All times are in seconds.

    root: the kubelet's folder; its sockets are `device-plugins/kubelet.sock` and `pod-resources/kubelet.sock`.
    admission: in which order pods that wait together are admitted. Every chance (that order, the ids, the order of a
    container's resources, which of two conflicting variables wins) comes from `seed`.
    retry_seconds: until a container that could not start is tried again (the real kubelet: about 10).
    removal_grace: until the resource of a gone plugin is removed.
    status_seconds: how often the node's status is looked at even where nothing seems to have changed.
    """

    node: str
    root: Path
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    capacity: Mapping[str, str] = field(
        default_factory=lambda: {"cpu": "64", "memory": "256Gi", "pods": "250", "ephemeral-storage": "1Ti"}
    )
    admission: Order = "arrival"
    seed: int = 0
    retry_seconds: float = 1.0
    removal_grace: float = 300.0
    status_seconds: float = 10.0
    max_message: int = 4 << 20
    queries_per_second: float = 100.0
    query_burst: int = 10

    @property
    def plugins(self) -> Path:
        return self.root / "device-plugins"

    @property
    def pod_resources(self) -> Path:
        return self.root / "pod-resources"
