"""What shall happen to the MtgpuPods of one node: pure, for the scheduler's controller and `mgpu simulate` alike."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mgpu.dialects.mtgpu import MtgpuPod
from mgpu.model.cards import Card
from mgpu.model.ledger import Holding
from mgpu.settings import Settings
from scheduler.mtgpu.occupy import Create, Delete, Occupy
from scheduler.mtgpu.pods import Made
from scheduler.mtgpu.verdict import Verdict

_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Broken:
    """An MtgpuPod that cannot be read. problems: why. What it is known to hold is among the holdings."""

    uid: str
    key: str
    problems: str
    deleting: bool = False


@dataclass(frozen=True, slots=True)
class Seen:
    """Everything about the MtgpuPods of one node at one moment.

    present: there is such a Node. stock: NVIDIA's plugin chooses the card of an occupy pod (scheduler/stock.py).
    pods: its MtgpuPods. cards: its GPUs that pods can be given. held: what anybody holds of them now.
    made: by the MtgpuPod's uid, its own Pod. conflicts: those whose name a Pod has that is not theirs.
    occupies: by GPUID, what has the name of its occupy pod. admitted: what those hold that have a reservation, and no
    BoundDeviceID yet.
    """

    node: str
    pods: tuple[MtgpuPod, ...] = ()
    cards: tuple[Card, ...] = ()
    held: tuple[Holding, ...] = ()
    present: bool = True
    unschedulable: bool = False
    stock: bool = False
    broken: tuple[Broken, ...] = ()
    made: Mapping[str, Made] = _NONE
    conflicts: frozenset[str] = frozenset()
    occupies: Mapping[str, Occupy] = _NONE
    admitted: Mapping[str, Holding] = _NONE


@dataclass(frozen=True, slots=True)
class Plan:
    """holdings: of those that are admitted and that the API does not show as bound yet, in the order of their turn.

    withdrawn: the uids of those that were admitted and are so no longer. verdicts: by uid. occupy: what shall happen to
    occupy pods, in order.
    """

    holdings: tuple[Holding, ...]
    withdrawn: tuple[str, ...]
    verdicts: Mapping[str, Verdict]
    occupy: tuple[Create | Delete, ...]


def plan(seen: Seen, settings: Settings) -> Plan:
    raise NotImplementedError
