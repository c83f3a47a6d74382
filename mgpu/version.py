"""Which version of the suite runs where: each part says its own in the API, and `mgpu doctor` compares them."""

import json
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from typing import Any, NamedTuple

VERSION_ANNOTATION = "mgpu.io/version"
"""Annotation of the scheduler's Lease."""
VERSION_LABEL = "app.kubernetes.io/version"
"""Label of the pods of a Deployment, by the manifests."""
AGENT_ANNOTATION = "mgpu.io/agent"
"""Annotation of a Node: what its agent says of itself, as compact JSON (`AgentReport`)."""


@cache
def own_version() -> str:
    """This installation's. Raises PackageNotFoundError where mgpu is not installed as a package."""
    return version("mgpu")


class AgentReport(NamedTuple):
    """What an agent says of its node.

    cdi: whether the container runtime has CDI; None: not known. cards: how many GPUs. whole_cards: who serves them,
    `mgpu` or `nvidia`. toolkit: what NVIDIA's container toolkit heeds of unprivileged containers; None: not known.
    mps_unbounded: whether MPS folders that containers write lie on the node's own file system.
    """

    version: str
    cdi: bool | None
    cards: int
    whole_cards: str
    toolkit: "Toolkit | None" = None
    mps_unbounded: bool = False


class Toolkit(NamedTuple):
    """variable: NVIDIA_VISIBLE_DEVICES. mounts: those below /var/run/nvidia-container-devices."""

    variable: bool
    mounts: bool


def write_agent_report(said: AgentReport) -> str:
    row = {
        "version": said.version,
        "cdi": said.cdi,
        "cards": said.cards,
        "wholeCards": said.whole_cards,
        "toolkit": said.toolkit._asdict() if said.toolkit else None,
    }
    if said.mps_unbounded:
        row["mpsUnbounded"] = True
    return json.dumps(row, separators=(",", ":"))


def read_agent_report(node: Mapping[str, Any]) -> AgentReport | None:
    """Of a Node as the API has it; None: it says nothing that can be read."""
    text = (node["metadata"].get("annotations") or {}).get(AGENT_ANNOTATION, "")
    try:
        row = json.loads(text)
        cdi = row["cdi"]
        known = cdi if isinstance(cdi, bool) else None
        heeds = row.get("toolkit")
        toolkit = Toolkit(heeds["variable"] is True, heeds["mounts"] is True) if heeds else None
        whole, unbounded = str(row["wholeCards"]), row.get("mpsUnbounded") is True
        return AgentReport(str(row["version"]), known, int(row["cards"]), whole, toolkit, unbounded)
    except (ValueError, KeyError, TypeError):
        return None
