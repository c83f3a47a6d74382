"""Observed nodes for tests of the node plan: what is held follows from the MtgpuPods and occupy pods."""

from collections.abc import Iterable, Mapping
from typing import Any

from mgpu.dialects import mtgpu
from mgpu.dialects.mtgpu import MtgpuPod
from mgpu.model.cards import Card
from mgpu.model.ledger import Holding, Share
from scheduler.mtgpupods.mtgpupod_status import Condition
from scheduler.mtgpupods.node_plan import NodePlan, plan_node
from scheduler.mtgpupods.observed_node import ObservedNode, OwnedPod
from scheduler.mtgpupods.occupy_pods import OccupyPod
from tests.builders import GIB, cards


def mtgpupod(name: str, gpuid: str = "zxcvb", request: int = 200, gib: int = 1, **more: Any) -> MtgpuPod:
    """request: milli. Those made first have the lower `created`, where the names are in that order."""
    named = {"created": "2026-11-21T00:00:00Z", **more}
    return MtgpuPod(
        named.pop("namespace", "default"), name, f"uid-{name}", "n1", gpuid, request, 1000, gib * GIB, **named
    )


def occupy(gpuid: str = "zxcvb", card: int | None = None, **more: Any) -> dict[str, OccupyPod]:
    """One that runs on a card, or with none yet."""
    phase = {"phase": "Pending" if card is None else "Running"}
    return {gpuid: OccupyPod(f"uid-occupy-{gpuid}", card=None if card is None else uuid(card), **(phase | more))}


def uuid(index: int) -> str:
    return f"GPU-n1-{index}"


def made(name: str, card: int = 0, **more: Any) -> dict[str, OwnedPod]:
    return {f"uid-{name}": OwnedPod(f"uid-pod-{name}", card=uuid(card), **more)}


def pool(card: int | None, name: str = "pool", core: int = 100, **more: Any) -> Holding:
    """What a pod holds that shares without a GPUID."""
    share = Share("c", card, whole=True) if card is None else Share("c", card, core, GIB)
    return Holding(f"uid-{name}", "default", name, "n1", more.pop("dialect", "mgpu"), (share,), **more)


def seen(
    *pods: MtgpuPod,
    occupy_pods: Mapping[str, OccupyPod] | None = None,
    has: Iterable[Card] | None = None,
    others: Iterable[Holding] = (),
    **more: Any,
) -> ObservedNode:
    has, occupy_pods = tuple(cards(2) if has is None else has), occupy_pods or {}
    kept = [kept_by(gpuid, pod) for gpuid, pod in occupy_pods.items() if pod.ours and not pod.ended and pod.card]
    found = ObservedNode("n1", pods, has, occupy_pods=occupy_pods, **more)
    users = [mtgpu.holding(pod, found.card_of(pod)) for pod in pods if found.holds(pod)]
    waiting = {
        uid: held
        for uid, held in found.reservations.items()
        if not any(pod.uid == uid and pod.card_uuid for pod in pods)
    }
    return ObservedNode("n1", pods, has, (*others, *users, *waiting.values(), *kept), occupy_pods=occupy_pods, **more)


def kept_by(gpuid: str, pod: OccupyPod) -> Holding:
    share = Share("occupy", pod.card, whole=True)
    name = mtgpu.occupy_name("n1", gpuid)
    return Holding(pod.uid, "kube-system", name, "n1", "nvidia", (share,), gpuid=gpuid, occupies=True)


def planned(*pods: MtgpuPod, **more: Any) -> NodePlan:
    return plan_node(seen(*pods, **more))


def said(plan: NodePlan, name: str, condition: str = "bound") -> Condition:
    found = getattr(plan.desired[f"uid-{name}"], condition)
    assert isinstance(found, Condition)
    return found


def reason(plan: NodePlan, name: str, condition: str = "bound") -> str:
    return said(plan, name, condition).reason


def cards_of(plan: NodePlan) -> dict[str, object]:
    """By name, the card that those who are admitted and not bound have; None: it is not known which."""
    return {held.name: held.shares[0].card for held in plan.reservations}
