"""Reads the API objects of a cluster into a snapshot of nodes, cards and holdings.

`mgpu inspect`, `top`, `doctor` and `simulate` use it. It reads the same annotations by the same dialects as the
scheduler does, but without watches: one pass over lists. It never fails on an object; what cannot be read is in
`Overview.unclear`. Pure.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mgpu import dialects
from mgpu.model import device_object, node_slices
from mgpu.model.agent_pods import AgentPod, nodes_without_agent
from mgpu.model.cards import GPU, Card
from mgpu.model.device_checkpoints import UNLISTED_PODS, read_entries, shares_by_pod
from mgpu.model.errors import BadObject
from mgpu.model.gpu_requests import GpuRequest
from mgpu.model.groups import Group, GroupCard
from mgpu.model.ledger import Holding, Ledger, Share, missing_cards, unknown_shares
from mgpu.model.node_slices import NO_SLICES, NodeSlices, read_slices
from mgpu.model.pod_constraints import NO_CONSTRAINTS, Constraints
from mgpu.model.pods import Node, Pod, read_node, read_pod
from mgpu.model.slice_names import MIG, MPS
from mgpu.presentation.card_views import NodePartitions, NodeView, list_allocatable, view_nodes
from mgpu.presentation.mtgpupod_tables import MtgpuPods, MtgpuView, missing_card, occupying, read_mtgpupods
from mgpu.settings import Settings

Raw = Mapping[str, Any]
_SAID = (node_slices.ANNOTATION, node_slices.EXISTING, node_slices.PLANNED)


@dataclass(frozen=True, slots=True)
class GroupView:
    """A spread group or same-card group with pods that hold cards. pods: their `namespace/name`, sorted."""

    group: Group
    pods: tuple[str, ...]
    seats: tuple[GroupCard, ...]


@dataclass(frozen=True, slots=True)
class Overview:
    """A cluster.

    Attributes:
        nodes: sorted by name.
        pending: `namespace/name` of GPU pods without a node and of MtgpuPods without a card, sorted.
        unclear: `kind name` of each object that cannot be read or whose cards are unknown, with the reason.
        constraints: by `namespace/name`, of the GPU pods that have any.
        groups: by kind, namespace and name.
        mtgpupods: those that have not ended, by namespace and name.
        agents_not_ready: the nodes that get no new GPU pods because no Pod of their mgpu agent is ready.
    """

    nodes: tuple[NodeView, ...]
    pending: tuple[str, ...] = ()
    unclear: Mapping[str, str] = field(default_factory=dict)
    constraints: Mapping[str, Constraints] = field(default_factory=dict)
    groups: tuple[GroupView, ...] = ()
    mtgpupods: tuple[MtgpuView, ...] = ()
    agents_not_ready: Mapping[str, AgentPod] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Claim:
    """What a bound pod holds, or None. problem: the reason why its cards are unknown, "" where they are known."""

    holding: Holding | None = None
    problem: str = ""


NO_RECORD = "its cards are not decided yet"
_RUNS = "it runs without a record of its cards; its share is held on every card there"
_BARE = "it runs without a record of its cards, and was given none; it holds nothing"
NVIDIA_PLUGIN = "nvidia"
"""The dialect of holdings that NVIDIA's device plugin allocated."""


def read_claim(pod: Pod, request: GpuRequest | BadObject | None, given: tuple[Share, ...] = ()) -> Claim:
    """Return what a pod holds by its allocation record, or else by the kubelet's checkpoint (`given`).

    A pod whose record cannot be read holds its share on every card of the node, and all of every card if its request
    cannot be read either: nothing may be promised that it might use. An occupy pod holds its card for the MtgpuPods of
    its GPUID.
    """
    if not pod.node or pod.ended:
        return Claim()
    found = _recorded(pod, request)
    if given and (found.problem or not found.holding):
        found = Claim(Holding(pod.uid, pod.namespace, pod.name, pod.node, NVIDIA_PLUGIN, given))
    return replace(found, holding=occupying(found.holding, pod)) if found.holding else found


def _recorded(pod: Pod, request: GpuRequest | BadObject | None) -> Claim:
    if request is None:
        return Claim()
    if isinstance(request, BadObject):
        if not any(map(dialects.is_placement_annotation, pod.annotations)):
            return Claim(problem=str(request))
        everything = (Share(pod.containers[0].name, None, whole=True),)
        return Claim(Holding(pod.uid, pod.namespace, pod.name, pod.node, "", everything), str(request))
    try:
        shares = dialects.read_placement(pod, request)
    except BadObject as error:
        return Claim(_holding(pod, request, unknown_shares(request)), str(error))
    return Claim(problem=NO_RECORD) if shares is None else Claim(_holding(pod, request, shares))


def describe_missing_cards(holding: Holding, cards: Iterable[Card]) -> str:
    """Return a sentence on the cards of a holding that are not among `cards`, its node's of all types, or "".

    Devices that NVIDIA's plugin allocated are not checked: they can be other than the Device object lists.
    """
    names = "" if holding.dialect == NVIDIA_PLUGIN else ", ".join(missing_cards(holding.shares, cards))
    return f"its record names {names}, which {holding.node} does not have" if names else ""


def read_request(pod: Pod, settings: Settings) -> GpuRequest | BadObject | None:
    """Return the pod's request, None for a pod without one, or the reason why it cannot be read."""
    try:
        return dialects.read_request(pod, settings)
    except BadObject as error:
        return error


def _holding(pod: Pod, request: GpuRequest, shares: tuple[Share, ...]) -> Holding:
    return Holding(pod.uid, pod.namespace, pod.name, pod.node, request.dialect, shares, constraints=request.constraints)


def make_overview(
    nodes: Iterable[Raw],
    devices: Iterable[Raw],
    pods: Iterable[Raw],
    settings: Settings,
    configmaps: Iterable[Raw] = (),
    mtgpupods: Iterable[Raw] = (),
) -> Overview:
    """Return the snapshot of a cluster from raw API objects. Never raises.

    Args:
        configmaps: those of gpushare that can list unhealthy cards (docs/design/gpushare.md).
    """
    pods = tuple(pods)
    ledger, pending, constraints = Ledger(), [], {}
    unclear: dict[str, str] = {}
    inventories, given, listing = _inventories(devices, unclear)
    unhealthy = _unhealthy(configmaps, unclear)
    cut: dict[str, NodePartitions] = {}
    stocked: set[str] = set()
    for raw in nodes:
        node = read_node(raw)
        cards = inventories.get(node.name, dialects.cards_from_capacity(node, settings))
        cards = mark_unhealthy(cards, unhealthy.get(node.name, frozenset()))
        sliced, problem = read_partitioning(node, cards)
        if problem:
            unclear[f"Node {node.name}"] = problem
        if sliced.found.mode:
            cut[node.name] = sliced
            given |= {uid: (node.name, shares) for uid, shares in node_slices.shares_by_pod(sliced.found).items()}
        ledger.set_cards(node.name, list_allocatable(sliced.found, cards))
        stocked |= {node.name} if node.labels.get(device_object.WHOLE_CARDS_LABEL) == NVIDIA_PLUGIN else set()
    for raw in pods:
        pod = read_pod(raw)
        request = read_request(pod, settings)
        if request is not None and not pod.node and not pod.ended:
            pending.append(pod.key)
            if isinstance(request, BadObject):
                unclear[f"Pod {pod.key}"] = str(request)
        if isinstance(request, GpuRequest) and request.constraints != NO_CONSTRAINTS and not pod.ended:
            constraints[pod.key] = request.constraints
        told, theirs = given.pop(pod.uid, ("", ()))
        found = read_claim(pod, request, theirs)
        if found.problem and isinstance(request, GpuRequest) and dialects.has_run(pod, request):
            # NVIDIA's device plugin allocates without a record, and the agent lists its pods with some delay: a pod
            # that is not listed yet may well have cards, so it is not taken for a bare pod.
            chosen = pod.node in stocked and any(container.is_nvidia_gpu for container in request.containers)
            found = _without_record(pod, request, found, listed=bool(told), bare=pod.node in listing and not chosen)
        if found.holding:
            ledger.hold(found.holding)
        problem = found.problem or (
            describe_missing_cards(found.holding, ledger.nodes().get(pod.node, ())) if found.holding else ""
        )
        if problem:
            unclear[f"Pod {pod.key}"] = problem
    _hold_listed(given, ledger)
    named = read_mtgpupods(mtgpupods, pods)
    pending += [view.pod.key for view in named.views if not view.pod.card_uuid]
    unclear |= named.unclear
    _hold_named(named, ledger, unclear)
    return Overview(
        view_nodes(ledger, cut),
        tuple(sorted(pending)),
        dict(sorted(unclear.items())),
        dict(sorted(constraints.items())),
        list_groups(ledger),
        named.views,
        nodes_without_agent(pods, settings.scheduler.namespace),
    )


def _without_record(pod: Pod, request: GpuRequest, found: Claim, *, listed: bool, bare: bool) -> Claim:
    """Return what a pod holds that runs without a readable record, and without cards that its node lists.

    Args:
        found: what its annotations say.
        listed: whether its node says of this pod that it was given nothing.
        bare: whether its node says so of all pods without a record that it does not list.
    """
    if found.problem != NO_RECORD and not listed:
        return found
    if (listed or bare) and dialects.has_waiting_container(pod, request):
        return Claim(problem=found.problem)
    shares = () if listed or bare else unknown_shares(request, pod)
    return Claim(occupying(_holding(pod, request, shares), pod), _RUNS) if shares else Claim(problem=_BARE)


def _hold_listed(given: Mapping[str, tuple[str, tuple[Share, ...]]], ledger: Ledger) -> None:
    for uid, (name, shares) in given.items():
        if shares:
            ledger.hold(Holding(uid, "", "", name, NVIDIA_PLUGIN, shares))


def _hold_named(named: MtgpuPods, ledger: Ledger, unclear: dict[str, str]) -> None:
    for holding in named.holdings:
        ledger.hold(holding)
    for view in named.views:
        problem = missing_card(view, ledger.nodes().get(view.pod.node, ()))
        if problem:
            unclear[f"MtgpuPod {view.pod.key}"] = problem


def _inventories(
    devices: Iterable[Raw], unclear: dict[str, str]
) -> tuple[dict[str, tuple[Card, ...]], dict[str, tuple[str, tuple[Share, ...]]], frozenset[str]]:
    """Return the cards by node, what was given out by pod, with its node, and the nodes that list all such pods."""
    inventories: dict[str, tuple[Card, ...]] = {}
    listing: set[str] = set()
    given: dict[str, tuple[str, tuple[Share, ...]]] = {}
    for raw in devices:
        name = str(raw["metadata"]["name"])
        try:
            inventories[name] = device_object.read_device(raw)
            found = shares_by_pod(read_entries(raw))
            if found.pop(UNLISTED_PODS, None) is not None:
                listing.add(name)
            given |= {uid: (name, shares) for uid, shares in found.items()}
        except BadObject as error:
            unclear[f"Device {name}"] = str(error)
    return inventories, given, frozenset(listing)


def read_partitioning(node: Node, cards: Iterable[Card]) -> tuple[NodePartitions, str]:
    """Return how a node's GPUs are partitioned, and the reason why its annotations cannot be read, or ""."""
    try:
        found, problem = read_slices(node), ""
    except BadObject as error:
        label = node.labels.get(node_slices.LABEL, "")
        found, problem = (NodeSlices(label) if label in (MIG, MPS) else NO_SLICES), str(error)
    said = {key: node.annotations[key] for key in _SAID if found.mode and key in node.annotations}
    return NodePartitions(found, tuple(card for card in cards if card.type == GPU), said), problem


def _unhealthy(configmaps: Iterable[Raw], unclear: dict[str, str]) -> dict[str, frozenset[int]]:
    found = {}
    for raw in configmaps:
        listed = dialects.unhealthy_list_of(raw)
        if listed is not None:
            node, lists = listed
            try:
                found[node] = lists.cards_of(raw)
            except BadObject as error:
                unclear[f"ConfigMap {raw['metadata']['name']}"] = str(error)
    return found


def mark_unhealthy(cards: Iterable[Card], unhealthy: Collection[int]) -> tuple[Card, ...]:
    """Return the cards with the GPUs of these indexes marked as unhealthy."""
    return tuple(replace(c, healthy=False) if c.type == GPU and c.index in unhealthy else c for c in cards)


def list_groups(ledger: Ledger) -> tuple[GroupView, ...]:
    """Return the groups that have pods with cards."""
    return tuple(
        GroupView(group, tuple(sorted(held.key for held in ledger.members(group))), ledger.group_cards(group))
        for group in ledger.groups()
    )
