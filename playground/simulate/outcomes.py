"""What became of the submitted pods, and simulate.md's JSON of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mgpu.cli.views import NodeView, nodes_json
from mgpu.model.errors import Problem
from mgpu.model.pods import Pod
from playground.simulate.documents import Raw


@dataclass(slots=True)
class Outcome:
    """What became of one submitted pod. node "": denied, or it waits.

    kind: of an MtgpuPod; "": a Pod. phase, reason: an MtgpuPod's, as its status says; "": it has none.
    """

    pod: Pod
    dialect: str | None = None
    denied: list[Problem] = field(default_factory=list)
    patch: list[Raw] = field(default_factory=list)
    node: str = ""
    rejections: dict[str, str] = field(default_factory=dict)
    scores: dict[str, int] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    containers: dict[str, Any] = field(default_factory=dict)
    kind: str = ""
    phase: str = ""
    reason: str = ""

    @property
    def pending(self) -> bool:
        return not self.denied and not self.node


@dataclass(frozen=True, slots=True)
class Result:
    """outcomes: of the submitted pods, in file order."""

    outcomes: Sequence[Outcome]
    nodes: Sequence[NodeView]


def result_json(result: Result) -> dict[str, Any]:
    """simulate.md's JSON output, every key present."""
    return {"pods": [_row(outcome) for outcome in result.outcomes], "nodes": nodes_json(result.nodes)}


def _row(outcome: Outcome) -> dict[str, Any]:
    named = {"kind": outcome.kind, "phase": outcome.phase or None, "reason": outcome.reason or None}
    return {
        **(named if outcome.kind else {}),
        "namespace": outcome.pod.namespace,
        "name": outcome.pod.name,
        "admitted": not outcome.denied,
        "denied": [{"field": p.field, "message": p.message} for p in outcome.denied],
        "patch": outcome.patch,
        "dialect": outcome.dialect,
        "node": outcome.node or None,
        "rejections": outcome.rejections,
        "scores": outcome.scores if outcome.node else {},
        "annotations": outcome.annotations,
        "containers": outcome.containers,
    }
