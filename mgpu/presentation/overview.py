"""Nodes, cards and who holds what, as `mgpu simulate`, `mgpu inspect` and the demo show it. Pure."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mgpu import dialects
from mgpu.dialects import gpushare
from mgpu.model import device_object, node_slices
from mgpu.model.agent_pods import AgentPod, nodes_without_agent
from mgpu.model.cards import GPU, Card
from mgpu.model.device_checkpoints import OTHERS, read_entries, shares_by_pod
from mgpu.model.errors import BadObject
from mgpu.model.gpu_requests import GpuRequest
from mgpu.model.groups import Group, Seat
from mgpu.model.ledger import Holding, Ledger, Share, absent, unknown_shares
from mgpu.model.node_slices import NO_SLICES, NodeSlices, read_slices
from mgpu.model.pod_constraints import NONE, Constraints
from mgpu.model.pods import Node, Pod, read_node, read_pod
from mgpu.model.slice_names import MIG, MPS
from mgpu.presentation.card_views import NodeView, Sliced, inventory_of, views
from mgpu.presentation.mtgpupod_tables import Found, MtgpuView, missing_card, occupying, read_all
from mgpu.settings import Settings

Raw = Mapping[str, Any]
_SAID = (node_slices.ANNOTATION, node_slices.MADE, node_slices.PLANNED)


@dataclass(frozen=True, slots=True)
class GroupView:
    """A group that holds cards. pods: `namespace/name` of those of it that do, in order; seats: what they hold."""

    group: Group
    pods: tuple[str, ...]
    seats: tuple[Seat, ...]


@dataclass(frozen=True, slots=True)
class Overview:
    """nodes: by name. pending: GPU pods without a node. unclear: pod → why its cards are not known.

    mtgpupods: those that have not ended, by namespace and name; those of them without a card are pending too.
    wishes: those of GPU pods that have some, by `namespace/name`. groups: by kind, namespace and name.
    agents_not_ready: the nodes that get no new GPU pods, since no Pod of their mgpu agent is ready.
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
    """What a bound pod holds. holding None: nothing. problem: why it cannot be told which cards."""

    holding: Holding | None = None
    problem: str = ""


NO_RECORD = "its cards are not decided yet"
_RUNS = "it runs without a record of its cards; its share is held on every card there"
_BARE = "it runs without a record of its cards, and was given none; it holds nothing"
STOCK = "nvidia"
"""In place of a dialect: NVIDIA's own plugin gave the cards out."""


def claim(pod: Pod, request: GpuRequest | BadObject | None, given: tuple[Share, ...] = ()) -> Claim:
    """What `pod`, whose ask was read as `ask`, holds by its own record, else what the kubelet itself gave it (`given`).

    An unreadable record is held on every card of the node; so is all of every card where not even the ask can be read.
    An occupy pod holds what it does for the MtgpuPods of its GPUID.
    """
    if not pod.node or pod.ended:
        return Claim()
    found = _recorded(pod, request)
    if given and (found.problem or not found.holding):
        found = Claim(Holding(pod.uid, pod.namespace, pod.name, pod.node, STOCK, given))
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


def missing(holding: Holding, cards: Iterable[Card]) -> str:
    """Which cards a pod's record names that are not among `cards`, its node's of all types; "": none.

    What the kubelet gave out may be other devices altogether.
    """
    names = "" if holding.dialect == STOCK else ", ".join(absent(holding.shares, cards))
    return f"its record names {names}, which {holding.node} does not have" if names else ""


def request_of(pod: Pod, settings: Settings) -> GpuRequest | BadObject | None:
    """What the pod asks for, or why that cannot be read."""
    try:
        return dialects.read_request(pod, settings)
    except BadObject as error:
        return error


def _holding(pod: Pod, request: GpuRequest, shares: tuple[Share, ...]) -> Holding:
    return Holding(pod.uid, pod.namespace, pod.name, pod.node, request.dialect, shares, constraints=request.constraints)


def overview(
    nodes: Iterable[Raw],
    devices: Iterable[Raw],
    pods: Iterable[Raw],
    settings: Settings,
    configmaps: Iterable[Raw] = (),
    mtgpupods: Iterable[Raw] = (),
) -> Overview:
    """From the API's objects as they are. What cannot be read is told in `unclear`, by `kind name`; never raises.

    configmaps: those that may list unhealthy cards (gpushare.md).
    """
    pods = tuple(pods)
    ledger, pending, constraints = Ledger(), [], {}
    unclear: dict[str, str] = {}
    inventories, given, listing = _inventories(devices, unclear)
    unhealthy = _unhealthy(configmaps, unclear)
    cut: dict[str, Sliced] = {}
    stocked: set[str] = set()
    for raw in nodes:
        node = read_node(raw)
        cards = inventories.get(node.name, device_object.equal_cards(node, gpushare.unit(settings)))
        cards = marked(cards, unhealthy.get(node.name, frozenset()))
        sliced, problem = sliced_of(node, cards)
        if problem:
            unclear[f"Node {node.name}"] = problem
        if sliced.found.mode:
            cut[node.name] = sliced
            given |= {uid: (node.name, shares) for uid, shares in node_slices.held(sliced.found).items()}
        ledger.set_cards(node.name, inventory_of(sliced.found, cards))
        stocked |= {node.name} if node.labels.get(device_object.WHOLE_CARDS_LABEL) == STOCK else set()
    for raw in pods:
        pod = read_pod(raw)
        request = request_of(pod, settings)
        if request is not None and not pod.node and not pod.ended:
            pending.append(pod.key)
            if isinstance(request, BadObject):
                unclear[f"Pod {pod.key}"] = str(request)
        if isinstance(request, GpuRequest) and request.constraints != NONE and not pod.ended:
            constraints[pod.key] = request.constraints
        told, theirs = given.pop(pod.uid, ("", ()))
        found = claim(pod, request, theirs)
        if found.problem and isinstance(request, GpuRequest) and dialects.has_run(pod, request):
            # NVIDIA's plugin asks for no record: that its node has not listed a pod yet does not mean anything.
            chosen = pod.node in stocked and any(container.stock for container in request.containers)
            found = _without_record(pod, request, found, listed=bool(told), bare=pod.node in listing and not chosen)
        if found.holding:
            ledger.hold(found.holding)
        problem = found.problem or (missing(found.holding, ledger.nodes().get(pod.node, ())) if found.holding else "")
        if problem:
            unclear[f"Pod {pod.key}"] = problem
    _hold_listed(given, ledger)
    named = read_all(mtgpupods, pods)
    pending += [view.pod.key for view in named.views if not view.pod.bound]
    unclear |= named.unclear
    _hold_named(named, ledger, unclear)
    return Overview(
        views(ledger, cut),
        tuple(sorted(pending)),
        dict(sorted(unclear.items())),
        dict(sorted(constraints.items())),
        groups(ledger),
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
    if (listed or bare) and dialects.waits(pod, request):
        return Claim(problem=found.problem)
    shares = () if listed or bare else unknown_shares(request, pod)
    return Claim(occupying(_holding(pod, request, shares), pod), _RUNS) if shares else Claim(problem=_BARE)


def _hold_listed(given: Mapping[str, tuple[str, tuple[Share, ...]]], ledger: Ledger) -> None:
    for uid, (name, shares) in given.items():
        if shares:
            ledger.hold(Holding(uid, "", "", name, STOCK, shares))


def _hold_named(named: Found, ledger: Ledger, unclear: dict[str, str]) -> None:
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
            if found.pop(OTHERS, None) is not None:
                listing.add(name)
            given |= {uid: (name, shares) for uid, shares in found.items()}
        except BadObject as error:
            unclear[f"Device {name}"] = str(error)
    return inventories, given, frozenset(listing)


def sliced_of(node: Node, cards: Iterable[Card]) -> tuple[Sliced, str]:
    """How the cards of a node are cut, and what cannot be read of that ("": nothing); of cards, the GPUs count."""
    try:
        found, problem = read_slices(node), ""
    except BadObject as error:
        label = node.labels.get(node_slices.LABEL, "")
        found, problem = (NodeSlices(label) if label in (MIG, MPS) else NO_SLICES), str(error)
    said = {key: node.annotations[key] for key in _SAID if found.mode and key in node.annotations}
    return Sliced(found, tuple(card for card in cards if card.type == GPU), said), problem


def _unhealthy(configmaps: Iterable[Raw], unclear: dict[str, str]) -> dict[str, frozenset[int]]:
    found = {}
    for raw in configmaps:
        node = gpushare.node_of_unhealthy(raw)
        if node is not None:
            try:
                found[node] = gpushare.unhealthy_cards(raw)
            except BadObject as error:
                unclear[f"ConfigMap {raw['metadata']['name']}"] = str(error)
    return found


def marked(cards: Iterable[Card], unhealthy: Collection[int]) -> tuple[Card, ...]:
    """The cards, those GPUs unhealthy whose indexes are listed."""
    return tuple(replace(c, healthy=False) if c.type == GPU and c.index in unhealthy else c for c in cards)


def groups(ledger: Ledger) -> tuple[GroupView, ...]:
    return tuple(
        GroupView(group, tuple(sorted(held.key for held in ledger.members(group))), ledger.seats(group))
        for group in ledger.groups()
    )
