"""Reads the API objects of a cluster into a snapshot of nodes, cards and holdings.

`mgpu inspect`, `top`, `doctor` and `simulate` use it. The functions must read every annotation as the scheduler does,
so they use the same dialects. They do not verify seals (`mgpu.cli.doctor.records`). A request or an annotation that
cannot be read must not make the snapshot fail: the object is listed in `Overview.unclear`.
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
from mgpu.model.mig_devices import offers_of
from mgpu.model.node_slices import NO_SLICES, NodeSlices, read_slices
from mgpu.model.pod_constraints import NO_CONSTRAINTS, Constraints
from mgpu.model.pods import Node, Pod, read_node, read_pod
from mgpu.model.resource_claims import DRA
from mgpu.model.slice_names import MIG_CLAIMS
from mgpu.presentation.card_views import NodePartitions, NodeView, list_allocatable, view_nodes, with_isolation
from mgpu.presentation.claim_views import NO_CLAIMS, ClaimViews, holder_name
from mgpu.presentation.mtgpupod_tables import MtgpuPods, MtgpuView, missing_card, occupying, read_mtgpupods
from mgpu.settings import Settings

Raw = Mapping[str, Any]
_SLICE_ANNOTATIONS = (node_slices.ANNOTATION, node_slices.EXISTING, node_slices.PLANNED)


@dataclass(frozen=True, slots=True)
class GroupView:
    """A spread group or same-card group whose pods or claims hold cards.

    Attributes:
        pods: the pods as `namespace/name` and the claims as `claim namespace/name`, sorted.
    """

    group: Group
    pods: tuple[str, ...]
    cards: tuple[GroupCard, ...]


@dataclass(frozen=True, slots=True)
class Overview:
    """A snapshot of a cluster.

    Attributes:
        nodes: the nodes, sorted by name.
        pending: the GPU pods without a node and the MtgpuPods without a card, as `namespace/name`, and the
            ResourceClaims that pods wait for, as `claim namespace/name`, sorted.
        unclear: the reasons why objects cannot be read or their cards are unknown, by kind and name of the object (`Pod
            default/train`).
        constraints: the constraints of the GPU pods and claims that have some and have not ended, by these names.
        groups: the groups, sorted by constraint, namespace and name.
        mtgpupods: the MtgpuPods that have not ended or still hold a card, sorted by namespace and name.
        agents_not_ready: for each node whose agent is not ready, the Pod of the agent. These nodes get no new GPU pods.
        gated: the names of the scheduling gates of those pending pods that have gates, by `namespace/name`.
    """

    nodes: tuple[NodeView, ...]
    pending: tuple[str, ...] = ()
    unclear: Mapping[str, str] = field(default_factory=dict)
    constraints: Mapping[str, Constraints] = field(default_factory=dict)
    groups: tuple[GroupView, ...] = ()
    mtgpupods: tuple[MtgpuView, ...] = ()
    agents_not_ready: Mapping[str, AgentPod] = field(default_factory=dict)
    gated: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Claim:
    """What a pod holds. (It is no ResourceClaim.)

    Attributes:
        holding: the holding of the pod; None if it holds nothing.
        problem: the reason why its cards are unknown; "" if they are known.
    """

    holding: Holding | None = None
    problem: str = ""


NO_RECORD = "its cards are not decided yet"
UNRECORDED = "it runs without a record of its cards; its share is held on every card of the node"
BARE = "it runs without a record of its cards and was given no cards; it holds nothing"
NVIDIA_PLUGIN = "nvidia"
"""The dialect of holdings that an agent found without an allocation record, mainly those that NVIDIA's device plugin
allocated. It is also the value of `WHOLE_CARDS_LABEL` on NVIDIA device plugin nodes."""


def read_claim(pod: Pod, request: GpuRequest | BadObject | None, checkpoint: tuple[Share, ...] = ()) -> Claim:
    """Return what a pod holds according to its allocation record, or else according to the agent of its node.

    If the record cannot be read and the agent reports no cards, the pod holds its share on every card of the node,
    because it may use any card. If not even the request can be read, a pod with placement annotations holds all of
    every card.

    Args:
        request: the pod's request; the error if it cannot be read, and None for a pod without a request.
        checkpoint: the shares of this pod that the agent found without the record.
    """
    if not pod.node or pod.ended:
        return Claim()
    claim = _read_record(pod, request)
    if checkpoint and (claim.problem or not claim.holding):
        claim = Claim(Holding(pod.uid, pod.namespace, pod.name, pod.node, NVIDIA_PLUGIN, checkpoint))
    return replace(claim, holding=occupying(claim.holding, pod)) if claim.holding else claim


def _read_record(pod: Pod, request: GpuRequest | BadObject | None) -> Claim:
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


def describe_missing_cards(holding: Holding, cards: Iterable[Card]) -> str | None:
    """Return a problem if the record or allocation of a holding names cards that its node does not have, or None.

    Holdings that an agent found without a record are not checked, because the Device object need not list their cards.
    """
    names = "" if holding.dialect == NVIDIA_PLUGIN else ", ".join(missing_cards(holding.shares, cards))
    what = "allocation" if holding.dialect == DRA else "record"
    return f"its {what} names {names}, which {holding.node} does not have" if names else None


def possible_instances(mode: str, gpus: Iterable[Card]) -> tuple[Card, ...]:
    """Return the MIG instances that claims can have of the GPUs of a node with this partitioning mode."""
    return tuple(offer.as_card() for gpu in gpus for offer in offers_of(gpu)) if mode == MIG_CLAIMS else ()


def read_request(pod: Pod, settings: Settings) -> GpuRequest | BadObject | None:
    """Return the pod's request, None for a pod without a request, or the error if it cannot be read."""
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
    claims: ClaimViews = NO_CLAIMS,
) -> Overview:
    """Return the snapshot of a cluster from raw API objects.

    Raises BadObject only for a Pod that `read_pod` refuses, which no API server stores.

    Args:
        configmaps: the ConfigMaps of gpushare that can list unhealthy cards (docs/design/gpushare.md).
        claims: the ResourceClaims.
    """
    reader = _Reader(settings)
    reader.read_devices(devices)
    reader.read_nodes(nodes, reader.read_unhealthy(configmaps))
    pods = tuple(pods)
    for raw in pods:
        reader.read_pod(read_pod(raw))
    reader.hold_unknown_pods()
    mtgpu = read_mtgpupods(mtgpupods, pods)
    reader.read_mtgpupods(mtgpu)
    reader.read_claims(claims)
    return Overview(
        tuple(
            with_isolation(view, reader.nodes.get(view.name)) for view in view_nodes(reader.ledger, reader.partitions)
        ),
        tuple(sorted(reader.pending)),
        dict(sorted(reader.unclear.items())),
        dict(sorted(reader.constraints.items())),
        list_groups(reader.ledger),
        mtgpu.views,
        nodes_without_agent(pods, settings.scheduler.namespace),
        dict(sorted(reader.gated.items())),
    )


class _Reader:
    """The state of `make_overview` while it reads objects: Devices first, then Nodes, Pods and MtgpuPods.

    Attributes:
        cards: the cards that the Device of each node lists, by node.
        checkpoints: the node and the shares of the pods whose cards an agent found without a record, by UID. The shares
            are () for a pod that was given nothing.
        complete: the nodes whose agents list all pods that hold cards without a record (`UNLISTED_PODS`).
        nvidia_nodes: the names of the NVIDIA device plugin nodes.
        nodes: the Nodes that can be read, by name.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.ledger = Ledger()
        self.pending: list[str] = []
        self.gated: dict[str, tuple[str, ...]] = {}
        self.constraints: dict[str, Constraints] = {}
        self.unclear: dict[str, str] = {}
        self.cards: dict[str, tuple[Card, ...]] = {}
        self.checkpoints: dict[str, tuple[str, tuple[Share, ...]]] = {}
        self.complete: set[str] = set()
        self.partitions: dict[str, NodePartitions] = {}
        self.nvidia_nodes: set[str] = set()
        self.nodes: dict[str, Node] = {}

    def read_devices(self, devices: Iterable[Raw]) -> None:
        for raw in devices:
            node = str(raw["metadata"]["name"])
            try:
                self.cards[node] = device_object.read_device(raw)
                shares_of = shares_by_pod(read_entries(raw))
            except BadObject as error:
                self.unclear[f"Device {node}"] = str(error)
                continue
            if shares_of.pop(UNLISTED_PODS, None) is not None:
                self.complete.add(node)
            self.checkpoints |= {uid: (node, shares) for uid, shares in shares_of.items()}

    def read_unhealthy(self, configmaps: Iterable[Raw]) -> dict[str, frozenset[int]]:
        """Return the indexes of the unhealthy cards by node."""
        unhealthy = {}
        for raw in configmaps:
            match = dialects.unhealthy_list_of(raw)
            if match is not None:
                node, card_list = match
                try:
                    unhealthy[node] = card_list.cards_of(raw)
                except BadObject as error:
                    self.unclear[f"ConfigMap {raw['metadata']['name']}"] = str(error)
        return unhealthy

    def read_nodes(self, nodes: Iterable[Raw], unhealthy: Mapping[str, frozenset[int]]) -> None:
        for raw in nodes:
            try:
                node = read_node(raw)
            except BadObject as error:
                self.unclear[f"Node {raw['metadata']['name']}"] = str(error)
                continue
            cards = self.cards.get(node.name, dialects.cards_from_capacity(node, self.settings))
            cards = mark_unhealthy(cards, unhealthy.get(node.name, frozenset()))
            partitions, problem = read_partitioning(node, cards)
            if problem:
                self.unclear[f"Node {node.name}"] = problem
            if partitions.slices.mode:
                self.partitions[node.name] = partitions
                held = node_slices.shares_by_pod(partitions.slices)
                self.checkpoints |= {uid: (node.name, shares) for uid, shares in held.items()}
            self.nodes[node.name] = node
            self.ledger.set_cards(node.name, list_allocatable(partitions.slices, cards))
            if node.labels.get(device_object.WHOLE_CARDS_LABEL) == NVIDIA_PLUGIN:
                self.nvidia_nodes.add(node.name)

    def read_pod(self, pod: Pod) -> None:
        request = read_request(pod, self.settings)
        if request is not None and not pod.node and not pod.ended:
            self.pending.append(pod.key)
            if pod.gated:
                self.gated[pod.key] = pod.gates
            if isinstance(request, BadObject):
                self.unclear[f"Pod {pod.key}"] = str(request)
        if isinstance(request, GpuRequest) and request.constraints != NO_CONSTRAINTS and not pod.ended:
            self.constraints[pod.key] = request.constraints
        node, shares = self.checkpoints.pop(pod.uid, ("", ()))
        claim = read_claim(pod, request, shares)
        if claim.problem and isinstance(request, GpuRequest) and dialects.has_run(pod, request):
            claim = self._claim_unrecorded(pod, request, claim, is_listed=bool(node))
        problem: str | None = claim.problem
        if claim.holding:
            self.ledger.hold(claim.holding)
            problem = problem or describe_missing_cards(claim.holding, self.ledger.nodes().get(pod.node, ()))
        if problem:
            self.unclear[f"Pod {pod.key}"] = problem

    def _claim_unrecorded(self, pod: Pod, request: GpuRequest, claim: Claim, *, is_listed: bool) -> Claim:
        """Return the claim of a running pod that has no readable record, and for which no agent found cards.

        Args:
            claim: the claim according to the pod's annotations.
            is_listed: whether the agent reports that this pod was given nothing.
        """
        if claim.problem != NO_RECORD and not is_listed:
            return claim
        # NVIDIA's device plugin allocates without a record, and the agent lists its pods with some delay. So a pod that
        # is not listed yet may have cards, and is not a bare pod.
        may_be_listed_later = pod.node in self.nvidia_nodes and any(c.is_nvidia_gpu for c in request.containers)
        is_bare = is_listed or (pod.node in self.complete and not may_be_listed_later)
        if is_bare and dialects.has_waiting_container(pod, request):
            return Claim(problem=claim.problem)
        shares = () if is_bare else unknown_shares(request, pod)
        return Claim(occupying(_holding(pod, request, shares), pod), UNRECORDED) if shares else Claim(problem=BARE)

    def hold_unknown_pods(self) -> None:
        """Hold the shares that agents report for pods that no longer exist. Call it after all pods are read."""
        for uid, (node, shares) in self.checkpoints.items():
            if shares:
                self.ledger.hold(Holding(uid, "", "", node, NVIDIA_PLUGIN, shares))

    def read_mtgpupods(self, mtgpupods: MtgpuPods) -> None:
        self.pending += [view.pod.key for view in mtgpupods.views if not view.pod.card_uuid]
        self.unclear |= mtgpupods.unclear
        for holding in mtgpupods.holdings:
            self.ledger.hold(holding)
        for view in mtgpupods.views:
            problem = missing_card(view, self.ledger.nodes().get(view.pod.node, ()))
            if problem:
                self.unclear[f"MtgpuPod {view.pod.key}"] = problem

    def read_claims(self, claims: ClaimViews) -> None:
        self.pending += claims.waiting
        self.constraints |= claims.constraints
        self.unclear |= claims.unclear
        for holding in claims.holdings:
            self.ledger.hold(holding)
            partitions = self.partitions.get(holding.node)
            instances = possible_instances(partitions.slices.mode, partitions.gpus) if partitions else ()
            problem = describe_missing_cards(holding, (*self.ledger.nodes().get(holding.node, ()), *instances))
            if problem:
                self.unclear[f"ResourceClaim {holding.key}"] = problem


def read_partitioning(node: Node, cards: Iterable[Card]) -> tuple[NodePartitions, str]:
    """Return the slices of a node's GPUs, and the reason why they cannot be read, or ""."""
    problem = ""
    try:
        slices = read_slices(node)
    except BadObject as error:
        label = node.labels.get(node_slices.LABEL, "")
        slices = NodeSlices(label) if label in node_slices.MODES else NO_SLICES
        problem = str(error)
    gpus = tuple(card for card in cards if card.type == GPU)
    return NodePartitions(slices, gpus, slice_annotations(node, slices)), problem


def slice_annotations(node: Node, slices: NodeSlices) -> dict[str, str]:
    """Return the annotations of a node that describe its slices."""
    return {key: node.annotations[key] for key in _SLICE_ANNOTATIONS if slices.mode and key in node.annotations}


def mark_unhealthy(cards: Iterable[Card], unhealthy: Collection[int]) -> tuple[Card, ...]:
    """Return the cards, with the GPUs that have one of these indexes marked as unhealthy."""
    return tuple(replace(c, healthy=False) if c.type == GPU and c.index in unhealthy else c for c in cards)


def list_groups(ledger: Ledger) -> tuple[GroupView, ...]:
    return tuple(
        GroupView(group, tuple(sorted(map(holder_name, ledger.members(group)))), ledger.group_cards(group))
        for group in ledger.groups()
    )
