"""What became of each submitted pod, and its JSON (docs/design/simulate.md)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deviceplugin.isolation.mps.limits import Unenforceable, client_of, edits
from mgpu import dialects
from mgpu.model.cards import Card
from mgpu.model.errors import Problem
from mgpu.model.gpu_requests import ContainerRequest, GpuRequest, Placement, by_index
from mgpu.model.ledger import shares_of
from mgpu.model.pods import Pod
from mgpu.model.slices import RESOURCE_PREFIX, is_slice, place_of, slice_named
from mgpu.presentation.card_views import NodeView, nodes_json, percent
from mgpu.settings import Settings
from playground.simulate.world import Raw


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


Given = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Delivery:
    """A pod with its ask and where it is put. devices: the node's, of all types; gpus: all its cards, cut or not."""

    pod: Pod
    request: GpuRequest
    placement: Placement
    devices: Sequence[Card]
    gpus: Sequence[Card]
    settings: Settings

    def containers(self) -> dict[str, Given]:
        """By name, in the order of the ask: `{"cards", "core", "memory", "env"}`, of slices `profile` too, and the
        devices of other types.
        """
        found: dict[str, Given] = {}
        for asked in self.request.containers:
            found[asked.container] = self._cards(asked)
        for name in dict.fromkeys(other.container for other in self.request.others if is_slice(other.type)):
            found[name] = self._slices(name)
        for type, name, indexes in self.placement.others:
            if not is_slice(type):
                told = found.setdefault(name, {"cards": [], "core": [], "memory": [], "env": {}})
                told.setdefault("others", {})[type] = list(indexes)
        return found

    def _cards(self, asked: ContainerRequest) -> Given:
        known = by_index(self.devices)
        cards = [known[index] for index in self.placement.cards(asked.container)]
        amounts = [asked.takes(card) for card in cards]
        return {
            "cards": [card.index for card in cards],
            "core": [percent(amount.core) for amount in amounts],
            "memory": [amount.memory for amount in amounts],
            "env": self._environment(asked.container, cards),
        }

    def _slices(self, name: str) -> Given:
        """The cards that its slices are of, one for each slice, and what the slice is of it."""
        slices = sorted(self._slices_of(name), key=lambda card: (card.type, card.index))
        names = dict.fromkeys(slice_named(RESOURCE_PREFIX + s.type) or s.type for s in slices)
        return {
            "profile": ",".join(names),
            "cards": [place_of(s.index)[0] for s in slices],
            "core": [percent(s.core) for s in slices],
            "memory": [s.memory for s in slices],
            "env": self._environment(name, slices),
        }

    def _slices_of(self, name: str) -> Iterator[Card]:
        known = {(card.type, card.index): card for card in self.devices}
        for type, container, indexes in self.placement.others:
            if container == name and is_slice(type):
                yield from (known[type, index] for index in indexes)

    def _environment(self, name: str, devices: Sequence[Card]) -> dict[str, str]:
        own = self.settings.deviceplugin
        env = dialects.environment_of(self.pod, self.request, name, devices, self.gpus)
        shares = [share for share in shares_of(self.request, self.placement) if share.container == name]
        try:
            client = client_of(shares, self.gpus, enforce=own.enforce == "mps")
        except Unenforceable:
            return env  # its node refuses to start it; where it is put is the same
        return {**env, **(edits(client, Path(own.mps_dir)).env if client else {})}
