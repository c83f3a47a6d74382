"""Defines how the processes report their versions in the API, and what agents report about their nodes.

The leader annotates its Lease, an agent annotates its Node, and the manifests label the Pods of Deployments. `mgpu
doctor` compares the versions and reads the reports. A cluster may run several versions at once, so no field may be
removed from an agent's report, and `read_agent_report` must accept reports without a new field.
"""

import json
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from typing import Any, NamedTuple

from mgpu.model.usage_problems import UsageProblem

VERSION_ANNOTATION = "mgpu.io/version"
"""The annotation of the scheduler's Lease with the version of the leader."""
VERSION_LABEL = "app.kubernetes.io/version"
"""The label with the version that the manifests set on the Pods of a Deployment."""
AGENT_ANNOTATION = "mgpu.io/agent"
"""The annotation of a Node with the report of its agent (`AgentReport`) as compact JSON."""
_MOST_TEXT = 512
"""The most characters of a text in a report that is shown. A compromised node could write a very long one."""


@cache
def own_version() -> str:
    """Return the installed version of mgpu. Raises PackageNotFoundError if mgpu is not installed as a package."""
    return version("mgpu")


class AgentReport(NamedTuple):
    """An agent's report about its node.

    Attributes:
        cdi: whether the container runtime supports CDI; None if unknown.
        cards: the number of GPUs.
        whole_cards: whose device plugin serves `nvidia.com/gpu`: `mgpu` or `nvidia`.
        toolkit: how NVIDIA's container toolkit is configured; None if unknown.
        mps_unbounded: whether containers can write to MPS folders that are on the node's own file system.
        isolation: what holds containers to their shares; None if unknown.
        usage_problem: why it is not known what containers use of the cards; None if nothing is missing.
    """

    version: str
    cdi: bool | None
    cards: int
    whole_cards: str
    toolkit: "Toolkit | None" = None
    mps_unbounded: bool = False
    isolation: "IsolationReport | None" = None
    usage_problem: UsageProblem | None = None


class IsolationReport(NamedTuple):
    """What holds containers to their shares on a node (docs/isolation.md).

    Attributes:
        backend: the name of the isolation back end, or `none`.
        problem: why it does not limit containers as the administrator wants, as a clause; "" if it does.
        caution: what users of the back end should know, as a clause; "" for nothing.
        hami_core: whether a pod that names HAMi-core can have it.
    """

    backend: str
    problem: str = ""
    caution: str = ""
    hami_core: bool = False


class Toolkit(NamedTuple):
    """How unprivileged containers can request GPUs from NVIDIA's container toolkit.

    Attributes:
        variable: whether they can do so by the variable NVIDIA_VISIBLE_DEVICES.
        mounts: whether they can do so by mounts below /var/run/nvidia-container-devices.
    """

    variable: bool
    mounts: bool


def write_agent_report(report: AgentReport) -> str:
    row: dict[str, Any] = {
        "version": report.version,
        "cdi": report.cdi,
        "cards": report.cards,
        "wholeCards": report.whole_cards,
        "toolkit": report.toolkit._asdict() if report.toolkit else None,
    }
    if report.mps_unbounded:
        row["mpsUnbounded"] = True
    if report.isolation is not None:
        found = report.isolation
        texts = {"problem": found.problem, "caution": found.caution}
        row["isolation"] = {"backend": found.backend, **{key: text for key, text in texts.items() if text}}
        if found.hami_core:
            row["isolation"]["hamiCore"] = True
    if report.usage_problem is not None:
        row["usageProblem"] = report.usage_problem.value
    return json.dumps(row, separators=(",", ":"))


def read_agent_report(node: Mapping[str, Any]) -> AgentReport | None:
    """Return the report in the annotation of a Node (decoded JSON), or None if there is no readable one."""
    return parse_agent_report((node["metadata"].get("annotations") or {}).get(AGENT_ANNOTATION, ""))


def parse_agent_report(text: str) -> AgentReport | None:
    """Return the report in the text of the annotation, or None if it cannot be read."""
    try:
        row = json.loads(text)
        cdi = row["cdi"]
        toolkit = row.get("toolkit")
        return AgentReport(
            version=str(row["version"]),
            cdi=cdi if isinstance(cdi, bool) else None,
            cards=int(row["cards"]),
            whole_cards=str(row["wholeCards"]),
            toolkit=Toolkit(toolkit["variable"] is True, toolkit["mounts"] is True) if toolkit else None,
            mps_unbounded=row.get("mpsUnbounded") is True,
            isolation=_read_isolation(row.get("isolation")),
            usage_problem=_read_usage_problem(row.get("usageProblem")),
        )
    except (ValueError, KeyError, TypeError):
        return None


def _read_isolation(row: Mapping[str, Any] | None) -> IsolationReport | None:
    if row is None:
        return None
    backend, problem, caution = (str(row.get(key, ""))[:_MOST_TEXT] for key in ("backend", "problem", "caution"))
    return IsolationReport(backend, problem, caution, hami_core=row.get("hamiCore") is True)


def _read_usage_problem(value: object) -> UsageProblem | None:
    """Return the problem; None also for one that only later versions know."""
    return next((problem for problem in UsageProblem if problem == value), None)
