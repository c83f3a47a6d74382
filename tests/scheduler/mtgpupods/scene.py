"""A node as `plan` sees it, from MtgpuPods and occupy pods: what is held follows from them, as in State."""

from collections.abc import Iterable, Mapping
from typing import Any

from mgpu.dialects import mtgpu
from mgpu.dialects.mtgpu import MtgpuPod
from mgpu.model.cards import Card
from mgpu.model.ledger import Holding, Share
from scheduler.mtgpupods.node_plan import Plan, plan
from scheduler.mtgpupods.observed_node import Seen
from scheduler.mtgpupods.occupy_pods import Occupy
from scheduler.mtgpupods.outcome import Said
from scheduler.mtgpupods.owned_pods import Made
from tests.builders import GIB, cards


def mtgpupod(name: str, gpuid: str = "zxcvb", request: int = 200, gib: int = 1, **more: Any) -> MtgpuPod:
    """request: milli. Those made first have the lower `created`, where the names are in that order."""
    named = {"created": "2026-11-21T00:00:00Z", **more}
    return MtgpuPod(
        named.pop("namespace", "default"), name, f"uid-{name}", "n1", gpuid, request, 1000, gib * GIB, **named
    )


def occupy(gpuid: str = "zxcvb", card: int | None = None, **more: Any) -> dict[str, Occupy]:
    """One that runs on a card, or with none yet."""
    phase = {"phase": "Pending" if card is None else "Running"}
    return {gpuid: Occupy(f"uid-occupy-{gpuid}", card="" if card is None else uuid(card), **(phase | more))}


def uuid(index: int) -> str:
    return f"GPU-n1-{index}"


def made(name: str, card: int = 0, **more: Any) -> dict[str, Made]:
    return {f"uid-{name}": Made(f"uid-pod-{name}", card=uuid(card), **more)}


def pool(card: int | None, name: str = "pool", core: int = 100, **more: Any) -> Holding:
    """What a pod holds that shares without a GPUID."""
    share = Share("c", card, whole=True) if card is None else Share("c", card, core, GIB)
    return Holding(f"uid-{name}", "default", name, "n1", more.pop("dialect", "mgpu"), (share,), **more)


def seen(
    *pods: MtgpuPod,
    occupies: Mapping[str, Occupy] | None = None,
    has: Iterable[Card] | None = None,
    others: Iterable[Holding] = (),
    **more: Any,
) -> Seen:
    has, occupies = tuple(cards(2) if has is None else has), occupies or {}
    kept = [kept_by(gpuid, pod) for gpuid, pod in occupies.items() if pod.ours and not pod.ended and pod.card]
    found = Seen("n1", pods, has, occupies=occupies, **more)
    users = [mtgpu.holding(pod, found.card_of(pod)) for pod in pods if found.holds(pod)]
    waiting = {
        uid: held for uid, held in found.admitted.items() if not any(pod.uid == uid and pod.bound for pod in pods)
    }
    return Seen("n1", pods, has, (*others, *users, *waiting.values(), *kept), occupies=occupies, **more)


def kept_by(gpuid: str, pod: Occupy) -> Holding:
    share = Share("occupy", pod.card, whole=True)
    name = mtgpu.occupy_name("n1", gpuid)
    return Holding(pod.uid, "kube-system", name, "n1", "nvidia", (share,), gpuid=gpuid, occupies=True)


def planned(*pods: MtgpuPod, **more: Any) -> Plan:
    return plan(seen(*pods, **more))


def said(plan: Plan, name: str, condition: str = "bound") -> Said:
    found = getattr(plan.verdicts[f"uid-{name}"], condition)
    assert isinstance(found, Said)
    return found


def reason(plan: Plan, name: str, condition: str = "bound") -> str:
    return said(plan, name, condition).reason


def cards_of(plan: Plan) -> dict[str, object]:
    """By name, the card that those who are admitted and not bound have; None: it is not known which."""
    return {held.name: held.shares[0].card for held in plan.holdings}
