"""The result of a simulation: the node of each submitted pod and the devices of its containers.

`pipeline` and `mtgpupod_plans` fill in an `Outcome` for each pod, and `simulate_command` prints the `Result`.
docs/design/simulate.md documents the keys of `result_json`, which must not change.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deviceplugin.isolation.limits import Unenforceable, limits_of
from deviceplugin.isolation.mps.limits import client_edits, share_client, slice_client_of
from mgpu import dialects
from mgpu.model.cards import Card
from mgpu.model.errors import Problem
from mgpu.model.gpu_requests import ContainerRequest, GpuRequest, Placement, cards_by_index
from mgpu.model.isolation import MPS
from mgpu.model.ledger import shares_of
from mgpu.model.pods import Pod
from mgpu.model.slice_names import RESOURCE_PREFIX, is_slice, place_of, slice_of_resource
from mgpu.presentation.card_views import NodeView, nodes_json, percent
from mgpu.settings import Settings
from playground.simulate.documents import Raw


@dataclass(slots=True)
class Outcome:
    """The result for one submitted pod.

    Attributes:
        pod: The pod or the MtgpuPod.
        dialect: The name of the vocabulary in which the pod requests GPUs, `dra` if it uses ResourceClaims, or None if
            it requests none.
        denied: The problems for which the pod was denied at admission.
        patch: The JSON patch of the admission webhook.
        node: The name of the node, or "" for a denied or pending pod.
        rejections: The reason why the pod does not run on a node, by the name of the node.
        scores: The scores, from 0 to 10, of the nodes that the pod fits.
        annotations: The annotations that the placement adds to the pod.
        containers: The devices and the environment of each container (`Delivery.containers`).
        claims: The ResourceClaims of the pod (`simulated_claims.claim_rows`).
        kind: `MtgpuPod`, or "" for a Pod.
        phase: The phase in the status of an MtgpuPod, or "" for a Pod.
        reason: The reason in the status of an MtgpuPod, or "" for a Pod.
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
    claims: list[Raw] = field(default_factory=list)
    kind: str = ""
    phase: str = ""
    reason: str = ""

    @property
    def pending(self) -> bool:
        return not self.denied and not self.node


@dataclass(frozen=True, slots=True)
class Result:
    """The outcomes of the submitted pods in file order, and the nodes at the end of the simulation."""

    outcomes: Sequence[Outcome]
    nodes: Sequence[NodeView]


def result_json(result: Result) -> dict[str, Any]:
    """Return the output of `mgpu simulate -o json`."""
    return {"pods": [_row(outcome) for outcome in result.outcomes], "nodes": nodes_json(result.nodes)}


def _row(outcome: Outcome) -> dict[str, Any]:
    of_mtgpupod = {"kind": outcome.kind, "phase": outcome.phase or None, "reason": outcome.reason or None}
    return {
        **(of_mtgpupod if outcome.kind else {}),
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
        **({"claims": outcome.claims} if outcome.claims else {}),
        "containers": outcome.containers,
    }


@dataclass(frozen=True, slots=True)
class Delivery:
    """A placed pod and the devices of its node.

    Attributes:
        devices: The devices of all types that pods can get: cards, slices and others.
        gpus: All GPUs of the node, whether they are partitioned or not.
    """

    pod: Pod
    request: GpuRequest
    placement: Placement
    devices: Sequence[Card]
    gpus: Sequence[Card]
    settings: Settings

    def containers(self) -> dict[str, Raw]:
        """Return the devices of each container, by the name of the container.

        Each value has the keys `cards` (indexes), `core` (percent), `memory` (bytes) and `env`. A container with slices
        also has `profile`, and a container with other devices has `others`.
        """
        found: dict[str, Raw] = {}
        for container_request in self.request.containers:
            found[container_request.container] = self._cards(container_request)
        for name in dict.fromkeys(other.container for other in self.request.others if is_slice(other.type)):
            found[name] = self._slices(name)
        for type, name, indexes in self.placement.others:
            if not is_slice(type):
                row = found.setdefault(name, {"cards": [], "core": [], "memory": [], "env": {}})
                row.setdefault("others", {})[type] = list(indexes)
        return found

    def _cards(self, request: ContainerRequest) -> Raw:
        known = cards_by_index(self.devices)
        cards = [known[index] for index in self.placement.cards(request.container)]
        amounts = [request.amount_on(card) for card in cards]
        return {
            "cards": [card.index for card in cards],
            "core": [percent(amount.core) for amount in amounts],
            "memory": [amount.memory for amount in amounts],
            "env": self._environment(request.container, cards),
        }

    def _slices(self, name: str) -> Raw:
        """Return the value of `containers` for a container with slices. Its lists have an entry for each slice."""
        slices = sorted(self._slices_of(name), key=lambda card: (card.type, card.index))
        names = dict.fromkeys(slice_of_resource(RESOURCE_PREFIX + s.type) or s.type for s in slices)
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
        """Return the environment variables that the node agent would give to a container."""
        own = self.settings.deviceplugin
        env = dialects.environment_of(self.pod, self.request, name, devices, self.gpus)
        shares = [share for share in shares_of(self.request, self.placement) if share.container == name]
        try:
            client = slice_client_of(shares, self.gpus)
            limits = limits_of(shares, self.gpus) if own.isolation == MPS else ()
        except Unenforceable:
            return env  # The node agent enforces nothing, or does not start the container.
        if client is None and len(limits) == 1:
            client = share_client(limits[0])
        return {**env, **(client_edits(client, Path(own.mps_dir)).env if client else {})}
