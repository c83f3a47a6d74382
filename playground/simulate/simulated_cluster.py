"""The state of the cluster in `mgpu simulate`: the holdings, the usage and the partitioned cards of every node.

It implements the Protocol through which the scheduler's ranking reads a cluster, so that `mgpu simulate` can call the
scheduler's own functions. It is not thread-safe. `pipeline` and `mtgpupod_plans` use it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from mgpu.model.cards import Card, CardState
from mgpu.model.compute_resources import Requests, add_requests, requests_of
from mgpu.model.gpu_requests import GpuRequest, Placement, Rejection
from mgpu.model.groups import GroupCard
from mgpu.model.ledger import Holding, Ledger, shares_of
from mgpu.model.pods import Pod, read_node
from mgpu.model.slice_names import MIG_CLAIMS, Slice
from mgpu.presentation.card_views import NodePartitions
from mgpu.presentation.mtgpupod_tables import occupying
from mgpu.settings import Settings
from playground.simulate.documents import Raw
from playground.simulate.partitioned_node import PartitionedNode
from playground.simulate.world import World
from scheduler.cluster.forecast import Forecast
from scheduler.cluster.node_snapshots import NodeSnapshot, mig_cards_of
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

    Attributes:
        raw: The Node objects, by name.
        nodes: The same nodes, parsed by `read_node`.
        used: For each node, the sum of the requests of its pods.
        ledger: The holdings of the pods.
        forecast: What the learning node policies have learned from the pods.
        partitioned: For each node, its cards and their slices.
    """

    def __init__(self, world: World, settings: Settings) -> None:
        self.raw = {name: world.nodes[name] for name in sorted(world.nodes)}
        self.nodes = {name: read_node(raw) for name, raw in self.raw.items()}
        self.used: dict[str, Requests] = {name: {} for name in self.raw}
        self.ledger = Ledger()
        self.forecast = Forecast(settings)
        self._changed = set(self.raw)
        self._usage = NodeUsage()
        self._slices = settings.dialects.slices
        self._named_resources = NamedResourceUsage(named_resources(self._slices))
        self.partitioned = {name: PartitionedNode(node, world.cards[name]) for name, node in self.nodes.items()}
        for name, node in self.nodes.items():
            self.ledger.set_cards(name, self.partitioned[name].available_devices())
            self.forecast.set_node(name, node, self.ledger.cards(name))

    def reserve(self, pod: Pod, raw: Raw, node: str) -> None:
        """Count the cpu, the memory and the other requests of a pod on a node. `hold` and `place` count its cards."""
        self.used[node] = add_requests(self.used[node], requests_of(raw))
        self._changed.update(self._usage.put(pod.uid, node, pod.cpu_memory))
        self._named_resources.follow(replace(pod, node=node))

    def hold(self, holding: Holding) -> None:
        self.ledger.hold(holding)
        self._changed.add(holding.node)

    def release(self, uid: str) -> None:
        """Remove the holding of a pod from the ledger, if there is one."""
        held = self.ledger.release(uid)
        if held:
            self._changed.add(held.node)

    def place(self, pod: Pod, request: GpuRequest, placement: Placement, node: str) -> None:
        """Enter the cards of a pod's placement in the ledger."""
        dialect = nvidia_plugin.NVIDIA if nvidia_plugin.chooses_cards(self.nodes[node], request) else request.dialect
        shares = shares_of(request, placement)
        holding = Holding(pod.uid, pod.namespace, pod.name, node, dialect, shares, constraints=request.constraints)
        self.hold(occupying(holding, pod))

    def devices(self, node: str, without: str = "", gpuid: str = "") -> tuple[CardState, ...]:
        """Return the state of the node's devices, as if the pod with the UID `without` held nothing.

        If `gpuid` is given, the GPUs are those that the occupy pod of this GPUID may get (`Ledger.states_for_gpuid`).
        """
        cards = self.ledger.cards(node, without)
        if gpuid:
            cards = self.ledger.states_for_gpuid(node, gpuid, without)
        return (*cards, *self.ledger.others(node, without))

    def take_changed_nodes(self, most: int) -> Sequence[tuple[str, NodeSnapshot]]:
        """Return the name and the snapshot of nodes that have changed since they were last returned, at most `most`."""
        names = sorted(self._changed)[:most]
        self._changed.difference_update(names)
        return [(name, self.node_snapshot(name, "")) for name in names]

    def node_snapshot(self, node: str, uid: str) -> NodeSnapshot:
        """Return a snapshot of the node, as if the pod with this UID held nothing."""
        known = self.nodes[node]
        cards = self.ledger.cards(node, uid)
        others = self.ledger.others(node, uid)
        free = known.allocatable.minus(self._usage.on(node, uid))
        partitioned = self.partitioned[node]
        mig_cards = mig_cards_of(partitioned.slices, partitioned.gpus, self.ledger.holdings(node), uid)
        return NodeSnapshot(
            known,
            cards,
            0,
            free,
            available_cards=cards,
            other_devices=others,
            available_other_devices=others,
            mig_cards=mig_cards,
        )

    def cards_for_instances(self) -> Iterator[Card]:
        """Yield the cards of the nodes on which claims get MIG instances."""
        for partitioned in self.partitioned.values():
            yield from partitioned.gpus if partitioned.slices.mode == MIG_CLAIMS else ()

    def reservation(self, uid: str) -> None:  # noqa: ARG002
        """Return None. There are no reservations, because each pod is bound before the next one is scheduled."""
        return

    def group_cards(self, request: GpuRequest, without: str) -> tuple[GroupCard, ...]:
        """Return the cards of the group with which the pod must share a card, as if the pod `without` held nothing."""
        return self.ledger.group_cards(request.constraints.same_card, without)

    def group_nodes(self, request: GpuRequest) -> frozenset[str]:
        """Return the names of the nodes on which members of the groups in the pod's constraints hold cards."""
        return frozenset(held.node for group in request.constraints.groups for held in self.ledger.members(group))

    # Slices

    def partitionable_node(self, node: str, without: str) -> PartitionableNode | None:
        """Return the node's slices, as if the pod `without` held nothing, or None if its cards are not partitioned."""
        partitioned = self.partitioned[node]
        if not partitioned.is_partitioned or partitioned.slices.mode == MIG_CLAIMS:
            return None
        return make_partitionable_node(
            self.nodes[node],
            partitioned.slices,
            partitioned.gpus,
            self.devices(node, without),
            [held for held in self.ledger.holdings(node) if held.uid != without],
            self._slices.geometries,
            room=self.node_snapshot(node, without).free_resources,
            named=self._named_resources.on(node),
            problem=partitioned.problem,
        )

    def partitions(self) -> Mapping[str, NodePartitions]:
        """Return the slices of each node whose cards are partitioned, by the name of the node."""
        nodes = self.partitioned.items()
        return {name: node.view(self.ledger.holdings(name)) for name, node in nodes if node.is_partitioned}

    def restore_slices(self) -> None:
        """Create the slices that allocation records name but that do not exist. A reboot of a node removes slices."""
        for name in self.partitioned:
            target = self.partitionable_node(name, "")
            slices = plan_node(target, []) if target and target.missing and not target.problem else None
            if slices is not None and not isinstance(slices, Rejection):
                self._partition(name, slices)

    def slices_refusal(self, pod: Pod, request: GpuRequest, node: str) -> Rejection | None:
        """Return why the node's existing slices do not suffice for the pod.

        Return None if they suffice, if the pod requests no slices, or if the node's cards are not partitioned.
        """
        requested, target = requested_slices(request), self.partitionable_node(node, pod.uid)
        if not requested or target is None:
            return None
        answer = assess_slices(target, requested, full_budget())
        if answer.rejection and answer.fits_repartitioned:
            return replace(answer.rejection, reason="its cards would have to be partitioned again")
        return answer.rejection

    def partition_for(self, pod: Pod, request: GpuRequest, nodes: Iterable[str]) -> str | None:
        """Partition the best of `nodes` so that the pod fits, and return its name.

        Return None if no node can be partitioned so that the pod fits, or if the pod requests no slices.
        """
        requested = requested_slices(request)
        targets = [self.partitionable_node(name, pod.uid) for name in nodes] if requested else []
        candidates = [
            target
            for target in targets
            if target and not target.problem and request.unmet_requirement(target.node) is None
        ]
        for target in rank_partitionable_nodes(candidates, requested, pod, self._slices):
            slices = plan_node(target, [requested])
            if not isinstance(slices, Rejection):
                self._partition(target.node.name, slices)
                return target.node.name
        return None

    def slices_score(self, pod: Pod, request: GpuRequest, node: str) -> int | None:
        """Return the node's score for the pod, from 0 to 10.

        Return None if the pod requests no slices or the node's cards are not partitioned.
        """
        requested, target = requested_slices(request), self.partitionable_node(node, pod.uid)
        return score_for_slices(target, requested, pod, self._slices) if requested and target else None

    def _partition(self, node: str, slices: Iterable[Slice]) -> None:
        """Give the node these slices, and make them known to the ledger."""
        self.partitioned[node].partition(slices)
        self.ledger.set_cards(node, self.partitioned[node].available_devices())
        self._changed.add(node)
