"""What was decided for a pod."""

from collections.abc import Mapping
from dataclasses import dataclass

from mgpu.model.asks import Ask, Placement
from mgpu.model.requests import NOTHING, Room


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """Cards reserved for a pod on a node until it appears there. annotations: what its Binding is to carry.

    needs: what the pod reserves of the node's cpu and memory.
    """

    uid: str
    namespace: str
    name: str
    node: str
    ask: Ask
    placement: Placement
    annotations: Mapping[str, str]
    needs: Room = NOTHING
