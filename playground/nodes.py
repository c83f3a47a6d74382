"""Defines the nodes of a playground and their simulated cards.

`playground.cluster` starts a node for each `NodeSpec`. `playground_command` chooses the nodes of `mgpu demo` and
`mgpu playground`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mgpu.model.cards import Card
from mgpu.model.device_object import read_card_list
from mgpu.model.node_slices import LABEL, NodeSlices, unpartitioned_cards
from mgpu.model.slice_names import MIG, MPS

MGPU = {"vke.node.gpu.schedule": "mgpu"}
"""The labels of a node that serves pods of Volcano mGPU."""
BURST = {**MGPU, "vke.volcengine.com/mgpu-compute-policy": "native-burst-share"}
"""The labels of a node that also serves pods of Volcano mGPU with several cards per container."""
TWO_CARDS = "mtgpu-1"
"""The name of the node for MtgpuPods. The MtgpuPods in `examples/` contain this name."""
# The model and the memory of each kind of card.
_KINDS = (("A100-SXM4-80GB", "80Gi"), ("L40S", "46068Mi"), ("H100-80GB-HBM3", "80Gi"))


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """The description of one node.

    Attributes:
        name: The name of the node.
        cards: The cards, in rows as in a file of simulated cards (`read_card_list`). A node without cards has no agent.
        labels: The labels of the node, without the label that `partitioning` adds (`all_labels`).
        nvidia_plugin: Whether NVIDIA's own plugin serves `nvidia.com/gpu` on the node, in addition to mgpu's agent.
        partitioning: How the cards are partitioned: "mig", "mps", or "" for whole and shared cards.
    """

    name: str
    cards: Sequence[Mapping[str, Any]] = ()
    labels: Mapping[str, str] = field(default_factory=lambda: dict(MGPU))
    nvidia_plugin: bool = False
    partitioning: str = ""

    def known_cards(self) -> tuple[Card, ...]:
        """Return the cards that `cards` describes. Raises BadObject if a row is malformed."""
        return read_card_list(list(self.cards), self.name, f"cards of {self.name}")

    def whole_cards(self) -> tuple[Card, ...]:
        """Return the cards that are not reserved for slices. Raises BadObject if a row is malformed."""
        return unpartitioned_cards(NodeSlices(self.partitioning), self.known_cards())

    @property
    def all_labels(self) -> dict[str, str]:
        return {**self.labels, **({LABEL: self.partitioning} if self.partitioning else {})}


def make_nodes(count: int, cards: int) -> list[NodeSpec]:
    """Return `count` nodes with `cards` equal cards each. They are called `node-1`, `node-2` and so on.

    Neighboring nodes have different card models. If there are several nodes, the last one has the labels `BURST`.
    """
    return [
        NodeSpec(
            f"node-{i + 1}",
            [{"count": cards, "model": model, "memory": memory}],
            dict(BURST if 0 < i == count - 1 else MGPU),
        )
        for i in range(count)
        for model, memory in [_KINDS[i % len(_KINDS)]]
    ]


def slice_nodes() -> list[NodeSpec]:
    """Return a node whose card is partitioned into MIG instances, and one whose card has MPS shares."""
    model, memory = _KINDS[0]
    card = {"model": f"NVIDIA {model}", "memory": memory}
    return [NodeSpec(f"{kind}-1", [card], {}, partitioning=kind) for kind in (MIG, MPS)]


def two_cards() -> NodeSpec:
    """Return the node `TWO_CARDS`, which has two cards."""
    model, memory = _KINDS[0]
    return NodeSpec(TWO_CARDS, [{"count": 2, "model": f"NVIDIA {model}", "memory": memory}], {})
