"""The isolation back ends: which of them holds containers to their shares, and what each of them can hold.

The agent chooses a back end for its node (`deviceplugin.isolation`) and reports it in the node's Device. The scheduler
reads the report for pods that name a back end. docs/isolation.md compares the back ends.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

NONE, MPS, HAMI_CORE, DRIVER, AUTO = "none", "mps", "hami-core", "driver", "auto"
STRONGEST_FIRST = (DRIVER, HAMI_CORE, MPS)
"""The back ends in the order in which `auto` prefers them. The driver's limits are the only ones that a program in the
container cannot remove."""

CHOICES = (NONE, MPS, HAMI_CORE, DRIVER, AUTO)
"""The values of the setting `deviceplugin.isolation` and of the label `ISOLATION_LABEL` of a Node."""

ISOLATION_LABEL = "mgpu.io/isolation"
"""The label of a Node that overrides the setting `deviceplugin.isolation`. On a Device, the label names the back end
that the agent has chosen: `none` or one of `STRONGEST_FIRST`."""

AVAILABLE_ANNOTATION = "mgpu.io/isolation-available"
"""The annotation of a Device that lists the back ends which the node can apply to a pod that names one, separated by
commas."""


@dataclass(frozen=True, slots=True)
class NodeIsolation:
    """What the agent of a node reports about isolation.

    Attributes:
        chosen: The back end of pods that name none: `none` or one of `STRONGEST_FIRST`; "" if it is unknown.
        available: The back ends that the node can apply to a pod that names one.
    """

    chosen: str = ""
    available: frozenset[str] = frozenset()


def read_isolation(device: Mapping[str, Any]) -> NodeIsolation:
    """Return what a Device (decoded JSON) reports. Unknown names of back ends are left out."""
    meta = device.get("metadata") or {}
    chosen = (meta.get("labels") or {}).get(ISOLATION_LABEL, "")
    listed = str((meta.get("annotations") or {}).get(AVAILABLE_ANNOTATION, ""))
    return NodeIsolation(
        chosen if chosen in (NONE, *STRONGEST_FIRST) else "", frozenset(listed[:256].split(",")) & {*STRONGEST_FIRST}
    )


def write_available(available: Collection[str]) -> str:
    """Return the value of `AVAILABLE_ANNOTATION`."""
    return ",".join(name for name in STRONGEST_FIRST if name in available)
