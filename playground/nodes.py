"""The nodes of a playground and their simulated cards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mgpu.model.cards import Card
from mgpu.model.inventory import read_card_list
from mgpu.model.partitioning import LABEL, NodeSlices, undivided
from mgpu.model.slices import MIG, MPS

MGPU = {"vke.node.gpu.schedule": "mgpu"}
BURST = {**MGPU, "vke.volcengine.com/mgpu-compute-policy": "native-burst-share"}
TWO_CARDS = "mtgpu-1"
"""The node of the seed's story of MtgpuPods."""
_KINDS = (("A100-SXM4-80GB", "80Gi"), ("L40S", "46068Mi"), ("H100-80GB-HBM3", "80Gi"))


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """cards: rows as in a file of simulated cards (`read_card_list`); none: a node without GPUs, and without agent.

    stock: NVIDIA's own plugin serves `nvidia.com/gpu` there, beside our agent.
    partitioning: how its cards are given out in slices, MIG or MPS; "": they are not.
    """

    name: str
    cards: Sequence[Mapping[str, Any]] = ()
    labels: Mapping[str, str] = field(default_factory=lambda: dict(MGPU))
    stock: bool = False
    partitioning: str = ""

    def known_cards(self) -> tuple[Card, ...]:
        """Raises BadObject."""
        return read_card_list(list(self.cards), self.name, f"cards of {self.name}")

    def whole_cards(self) -> tuple[Card, ...]:
        """Those that are not for slices, before any is cut. Raises BadObject."""
        return undivided(NodeSlices(self.partitioning), self.known_cards())

    @property
    def all_labels(self) -> dict[str, str]:
        return {**self.labels, **({LABEL: self.partitioning} if self.partitioning else {})}


def make_nodes(count: int, cards: int) -> list[NodeSpec]:
    """`node-1` … with `cards` equal cards each, of another model from node to node.

    The last of several has the compute policy that pods with several cards per container need.
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
    """A node whose card is given out in MIG instances, and one whose card is shared under MPS."""
    model, memory = _KINDS[0]
    card = {"model": f"NVIDIA {model}", "memory": memory}
    return [NodeSpec(f"{kind}-1", [card], {}, partitioning=kind) for kind in (MIG, MPS)]


def two_cards() -> NodeSpec:
    """The node of the MtgpuPods of `examples/`."""
    model, memory = _KINDS[0]
    return NodeSpec(TWO_CARDS, [{"count": 2, "model": f"NVIDIA {model}", "memory": memory}], {})
