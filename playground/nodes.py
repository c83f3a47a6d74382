"""The nodes of a playground and their simulated cards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mgpu.model.cards import Card
from mgpu.model.inventory import read_card_list

MGPU = {"vke.node.gpu.schedule": "mgpu"}
BURST = {**MGPU, "vke.volcengine.com/mgpu-compute-policy": "native-burst-share"}
_KINDS = (("A100-SXM4-80GB", "80Gi"), ("L40S", "46068Mi"), ("H100-80GB-HBM3", "80Gi"))


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """cards: rows as in a file of simulated cards (`read_card_list`); none: a node without GPUs, and without agent.

    stock: NVIDIA's own plugin serves `nvidia.com/gpu` there, beside our agent.
    """

    name: str
    cards: Sequence[Mapping[str, Any]] = ()
    labels: Mapping[str, str] = field(default_factory=lambda: dict(MGPU))
    stock: bool = False

    def known_cards(self) -> tuple[Card, ...]:
        """Raises BadObject."""
        return read_card_list(list(self.cards), self.name, f"cards of {self.name}")


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
