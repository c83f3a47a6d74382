"""Defines snapshots of MtgpuPods: their holdings, why they wait, and what is left of the card of each GPUID.

Mainly `mgpu inspect`, `mgpu simulate` and the scheduler's web page use them. The accounting follows K8sGPUSharing
(docs/design/mtgpu.md, "Accounting"). Users' programs read the keys that the JSON functions return, so the keys must not
change.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mgpu.dialects import mtgpu
from mgpu.model.cards import Card
from mgpu.model.errors import BadObject
from mgpu.model.ledger import Holding, Share, missing_cards
from mgpu.model.pods import Pod, read_pod
from mgpu.presentation.card_views import NodeView, percent

Raw = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class MtgpuView:
    """An MtgpuPod that has not ended, or that still holds a card.

    Attributes:
        reason, message: the reason and the message of its condition `Bound`; "" without the condition.
        degraded: the message of its condition `Degraded`, or else the reason; "" if the condition is not true.
    """

    pod: mtgpu.MtgpuPod
    reason: str = ""
    message: str = ""
    degraded: str = ""


@dataclass(frozen=True, slots=True)
class MtgpuPods:
    """The MtgpuPods of a cluster.

    Attributes:
        views: the MtgpuPods that have not ended or still hold a card, sorted by namespace and name.
        holdings: what the MtgpuPods hold, including MtgpuPods that no longer exist but whose Pods still run.
        unclear: the reasons why MtgpuPods cannot be read, by `MtgpuPod namespace/name`.
    """

    views: tuple[MtgpuView, ...]
    holdings: tuple[Holding, ...]
    unclear: Mapping[str, str]


def read_mtgpupods(raws: Iterable[Raw], pods: Iterable[Raw]) -> MtgpuPods:
    """Read all MtgpuPods.

    An MtgpuPod with a card holds its share until both the MtgpuPod and its own Pod have ended, because the containers
    use the card until then. For the same reason a running Pod holds its share even if its MtgpuPod no longer exists, or
    has no card in its status.

    Args:
        raws: the MtgpuPods as decoded JSON.
        pods: all Pods of the cluster as decoded JSON, including those of MtgpuPods.
    """
    running = [raw for raw in pods if (raw.get("status") or {}).get("phase") not in ("Succeeded", "Failed")]
    alive = {str(raw["metadata"].get("uid")) for raw in running}
    made = {holding.uid: holding for raw in running for holding in _of_own_pod(raw)}
    views: list[MtgpuView] = []
    holdings: dict[str, Holding] = {}
    unclear: dict[str, str] = {}
    for raw in raws:
        try:
            pod = mtgpu.read_mtgpupod(raw)
        except BadObject as error:
            meta = raw["metadata"]
            unclear[f"MtgpuPod {meta.get('namespace', 'default')}/{meta['name']}"] = str(error)
            holdings |= {holding.uid: holding for holding in _of_unreadable(raw)}
            continue
        bound = pod.card_uuid or str(made[pod.uid].shares[0].card if pod.uid in made else "")
        if bound and not (pod.ended and pod.uid not in made and pod.pod_uid not in alive):
            holdings[pod.uid] = by_container(mtgpu.holding(pod, bound), read_pod(raw))
        if pod.uid in holdings or not pod.ended:
            views.append(_view(replace(pod, card_uuid=bound), raw))
    ordered = sorted(views, key=lambda v: (v.pod.namespace, v.pod.name, v.pod.uid))
    return MtgpuPods(tuple(ordered), tuple({**made, **holdings}.values()), unclear)


def _of_own_pod(raw: Raw) -> Iterator[Holding]:
    if mtgpu.controlling_mtgpupod(raw):
        pod = read_pod(raw)
        held = mtgpu.holding_of_pod(pod, raw)
        if held:
            yield by_container(held, pod)


def _of_unreadable(raw: Raw) -> Iterator[Holding]:
    """Yield a holding of a whole card for an MtgpuPod whose share cannot be read, since it may use the whole card."""
    bound = (raw.get("status") or {}).get("BoundDeviceID")
    try:
        pod = read_pod(raw)
    except BadObject:
        return
    if bound and isinstance(bound, str) and pod.node and not pod.ended:
        name = next((container.name for container in pod.containers), "")
        yield Holding(pod.uid, pod.namespace, pod.name, pod.node, mtgpu.NAME, (Share(name, bound, whole=True),))


def by_container(holding: Holding, pod: Pod) -> Holding:
    """Return the holding with a share for each container.

    The containers share one amount of compute and memory, which only the first share states.
    """
    if not pod.containers:
        return holding
    first = replace(holding.shares[0], container=pod.containers[0].name)
    return replace(holding, shares=(first, *(Share(c.name, first.card) for c in pod.containers[1:])))


def _view(pod: mtgpu.MtgpuPod, raw: Raw) -> MtgpuView:
    rows = (raw.get("status") or {}).get("conditions") or ()
    conditions = {str(row.get("type")): row for row in rows if isinstance(row, dict)}
    bound, degraded = conditions.get("Bound", {}), conditions.get("Degraded", {})
    reason = str(degraded.get("message") or degraded.get("reason") or "degraded")
    return MtgpuView(
        pod,
        str(bound.get("reason") or ""),
        str(bound.get("message") or ""),
        reason if degraded.get("status") == "True" else "",
    )


def occupying(holding: Holding, pod: Pod) -> Holding:
    """Return the holding, with `gpuid` and `occupies` set if `pod` is an occupy pod for the node of the holding."""
    node, gpuid = mtgpu.occupy_target(pod) or ("", "")
    return replace(holding, gpuid=gpuid, occupies=True) if node == holding.node else holding


def missing_card(view: MtgpuView, cards: Iterable[Card]) -> str | None:
    """Return a problem if the card of the MtgpuPod is not among the `cards` of its node; None otherwise."""
    names = ", ".join(missing_cards([Share("", view.pod.card_uuid)], cards)) if view.pod.card_uuid else ""
    return f"it is on {names}, which {view.pod.node} does not have" if names else None


@dataclass(frozen=True, slots=True)
class GpuidAccount:
    """What is left of the card of a GPUID.

    Attributes:
        card: the index of the card.
        core: the compute that is left, in thousandths of a card.
        memory: the memory that is left, in bytes.
    """

    gpuid: str
    card: int
    core: int
    memory: int


@dataclass(frozen=True, slots=True)
class NodeAccount:
    """The cards that MtgpuPods can use on a node.

    Attributes:
        free: the number of healthy idle cards that are not partitioned.
        gpuids: the account of each GPUID, sorted.
    """

    node: str
    free: int
    gpuids: tuple[GpuidAccount, ...]


def account_nodes(nodes: Sequence[NodeView]) -> tuple[NodeAccount, ...]:
    """Return the account of each node with cards.

    An occupy pod takes nothing of the account of its GPUID, but its card is not free.
    """
    return tuple(_account(node) for node in nodes if node.cards)


def _account(node: NodeView) -> NodeAccount:
    free = sum(card.state.idle and card.state.card.healthy and not card.mode for card in node.cards)
    states = sorted((card.state for card in node.cards if card.state.gpuid), key=lambda s: (s.gpuid, s.card.index))
    return NodeAccount(
        node.name, free, tuple(GpuidAccount(s.gpuid, s.card.index, s.core_left, s.memory_left) for s in states)
    )


def accounting_json(accounts: Iterable[NodeAccount]) -> dict[str, Any]:
    """Return the accounts by node, with core in percent."""
    return {
        account.node: {
            "free": account.free,
            "gpuids": [
                {"gpuid": left.gpuid, "card": left.card, "core": percent(left.core), "memory": left.memory}
                for left in account.gpuids
            ],
        }
        for account in accounts
    }


def mtgpupods_json(views: Iterable[MtgpuView]) -> dict[str, Any]:
    """Return the MtgpuPods by `namespace/name`, with null for missing values."""
    return {
        view.pod.key: {
            "node": view.pod.node,
            "gpuid": view.pod.gpuid,
            "card": view.pod.card_uuid or None,
            "phase": view.pod.phase,
            "reason": view.reason or None,
            "message": view.message or None,
            "degraded": view.degraded or None,
        }
        for view in views
    }
