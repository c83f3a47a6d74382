"""The cluster of `mgpu simulate` as it fills: holdings, usage and partitioned cards of every node.

`pipeline` and `mtgpupod_plans` change it. It answers what the scheduler's ranking asks of a cluster, so the scheduler's
own functions decide on it. There is one thread, and every plan for slices takes effect at once.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from mgpu.model.cards import CardState
from mgpu.model.compute_resources import Requests, add_requests, requests_of
from mgpu.model.gpu_requests import GpuRequest, Placement, Rejection
from mgpu.model.groups import GroupCard
from mgpu.model.ledger import Holding, Ledger, shares_of
from mgpu.model.pods import Pod, read_node
from mgpu.model.slice_names import Slice
from mgpu.presentation.card_views import NodePartitions
from mgpu.presentation.mtgpupod_tables import occupying
from mgpu.settings import Settings
from playground.simulate.partitioned_node import PartitionedNode
from playground.simulate.world import Raw, World
from scheduler.cluster.forecast import Forecast
from scheduler.cluster.node_snapshots import NodeSnapshot
from scheduler.cluster.node_usage import NodeUsage
from scheduler.engine import nvidia_plugin
from scheduler.engine.effort import full_budget
from scheduler.engine.partitioning.partitionable_node import (
    PartitionableNode,
    make_partitionable_node,
    plan_node,
    requested_slices,
)
from scheduler.engine.partitioning.slice_choice import assess_slices, rank_partitionable_nodes
from scheduler.engine.partitioning.slice_scores import NamedResourceUsage, named_resources, score_for_slices


class SimulatedCluster:
    """Implements `scheduler.decisions.scores.Cluster`.

    used: node → the sum of the requests of its pods.
    """

    def __init__(self, world: World, settings: Settings) -> None:
        self.raw = {name: world.nodes[name] for name in sorted(world.nodes)}
        self.nodes = {name: read_node(raw) for name, raw in self.raw.items()}
        self.used: dict[str, Requests] = {name: {} for name in self.raw}
        self.ledger = Ledger()
        self.forecast = Forecast(settings)
        self._moved = set(self.raw)
        self._usage = NodeUsage()
        self._slices = settings.dialects.slices
        self._named = NamedResourceUsage(named_resources(self._slices))
        self.partitioned = {name: PartitionedNode(node, world.cards[name]) for name, node in self.nodes.items()}
        for name, node in self.nodes.items():
            self.ledger.set_cards(name, self.partitioned[name].inventory())
            self.forecast.set_node(name, node, self.ledger.cards(name))

    def reserve(self, pod: Pod, raw: Raw, node: str) -> None:
        """Count the requests of a pod on a node; its cards are held apart."""
        self.used[node] = add_requests(self.used[node], requests_of(raw))
        self._moved.update(self._usage.put(pod.uid, node, pod.cpu_memory))
        self._named.follow(replace(pod, node=node))

    def hold(self, holding: Holding) -> None:
        self.ledger.hold(holding)
        self._moved.add(holding.node)

    def release(self, uid: str) -> None:
        held = self.ledger.release(uid)
        if held:
            self._moved.add(held.node)

    def place(self, pod: Pod, request: GpuRequest, placement: Placement, node: str) -> None:
        """Hold the cards of a placement."""
        dialect = nvidia_plugin.NVIDIA if nvidia_plugin.chooses_cards(self.nodes[node], request) else request.dialect
        shares = shares_of(request, placement)
        holding = Holding(pod.uid, pod.namespace, pod.name, node, dialect, shares, constraints=request.constraints)
        self.hold(occupying(holding, pod))

    def devices(self, node: str, without: str = "", gpuid: str = "") -> tuple[CardState, ...]:
        """Return the node's devices without the holding of a pod; with `gpuid`, as its occupy pod finds them."""
        cards = self.ledger.cards(node, without)
        if gpuid:
            cards = self.ledger.states_for_gpuid(node, gpuid, without)
        return (*cards, *self.ledger.others(node, without))

    def take_changed_nodes(self) -> Iterable[tuple[str, NodeSnapshot]]:
        """Return the nodes that have changed since the last call."""
        moved = [(name, self.node_snapshot(name, "")) for name in sorted(self._moved)]
        self._moved.clear()
        return moved

    def node_snapshot(self, node: str, uid: str) -> NodeSnapshot:
        known = self.nodes[node]
        cards = self.ledger.cards(node, uid)
        others = self.ledger.others(node, uid)
        free = known.allocatable.minus(self._usage.on(node, uid))
        return NodeSnapshot(
            known, cards, 0, free, available_cards=cards, other_devices=others, available_other_devices=others
        )

    def reservation(self, uid: str) -> None:  # noqa: ARG002
        """Return no reservation: each pod is bound before the next one comes."""
        return

    def group_cards(self, request: GpuRequest, without: str) -> tuple[GroupCard, ...]:
        return self.ledger.group_cards(request.constraints.same_card, without)

    def group_nodes(self, request: GpuRequest) -> frozenset[str]:
        return frozenset(held.node for group in request.constraints.groups for held in self.ledger.members(group))

    # Slices

    def partitionable_node(self, node: str, without: str) -> PartitionableNode | None:
        """Return the node's slices without the holding of a pod, or None where its cards are not partitioned."""
        partitioned = self.partitioned[node]
        if not partitioned.sliced:
            return None
        return make_partitionable_node(
            self.nodes[node],
            partitioned.found,
            partitioned.gpus,
            self.devices(node, without),
            [held for held in self.ledger.holdings(node) if held.uid != without],
            self._slices.geometries,
            room=self.node_snapshot(node, without).free_resources,
            named=self._named.on(node),
            problem=partitioned.problem,
        )

    def sliced(self) -> Mapping[str, NodePartitions]:
        nodes = self.partitioned.items()
        return {name: node.view(self.ledger.holdings(name)) for name, node in nodes if node.sliced}

    def restore_slices(self) -> None:
        """Make slices again that records name and that are missing, as after a reboot of the node."""
        for name in self.partitioned:
            target = self.partitionable_node(name, "")
            slices = plan_node(target, []) if target and target.missing and not target.problem else None
            if slices is not None and not isinstance(slices, Rejection):
                self._partition(name, slices)

    def slices_refusal(self, pod: Pod, request: GpuRequest, node: str) -> Rejection | None:
        """Return why the node's slices do not suffice; None where they do, or where the pod asks for no slices."""
        wanted, target = requested_slices(request), self.partitionable_node(node, pod.uid)
        if not wanted or target is None:
            return None
        answer = assess_slices(target, wanted, full_budget())
        if answer.rejection and answer.fits_repartitioned:
            return replace(answer.rejection, reason="its cards would have to be partitioned again")
        return answer.rejection

    def partition_for(self, pod: Pod, request: GpuRequest, nodes: Iterable[str]) -> str | None:
        """Partition the best of these nodes so that the pod fits. Return its name, or None where that is impossible."""
        wanted = requested_slices(request)
        targets = [self.partitionable_node(name, pod.uid) for name in nodes] if wanted else []
        able = [
            target
            for target in targets
            if target and not target.problem and request.unmet_requirement(target.node) is None
        ]
        for target in rank_partitionable_nodes(able, wanted, pod, self._slices):
            slices = plan_node(target, [wanted])
            if not isinstance(slices, Rejection):
                self._partition(target.node.name, slices)
                return target.node.name
        return None

    def slices_score(self, pod: Pod, request: GpuRequest, node: str) -> int | None:
        """Return 0 to 10, or None for a pod that asks for no slices."""
        wanted, target = requested_slices(request), self.partitionable_node(node, pod.uid)
        return score_for_slices(target, wanted, pod, self._slices) if wanted and target else None

    def _partition(self, node: str, slices: Iterable[Slice]) -> None:
        self.partitioned[node].partition(slices)
        self.ledger.set_cards(node, self.partitioned[node].inventory())
        self._moved.add(node)
