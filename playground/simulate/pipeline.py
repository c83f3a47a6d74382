"""Takes pod after pod through the pipeline: mutate, validate, filter, score, bind, allocate.

Every step calls the function that mgpu's process calls; `fit` stands in for kube-scheduler.
`simulate_command` calls `simulate`.
"""

from collections.abc import Callable
from dataclasses import replace

import jsonpatch

from mgpu import dialects
from mgpu.dialects import mtgpu
from mgpu.dialects.protocol import SHARE
from mgpu.dialects.registry import vocabularies, vocabulary_of
from mgpu.model.compute_resources import add_requests, allocatable, requests_of
from mgpu.model.errors import BadObject, Problem
from mgpu.model.gpu_requests import GpuRequest, Placement, Rejection
from mgpu.model.ledger import Holding
from mgpu.model.pods import Pod, read_pod
from mgpu.model.quantities import QuantityError
from mgpu.presentation.card_views import NodeView, view_nodes
from mgpu.presentation.overview import NO_RECORD, NVIDIA_PLUGIN, describe_missing_cards, read_claim, read_request
from mgpu.settings import Settings
from playground import fit
from playground.simulate.mtgpupod_plans import MtgpuPods
from playground.simulate.outcomes import Delivery, Outcome, Result
from playground.simulate.simulated_cluster import SimulatedCluster
from playground.simulate.world import Raw, World
from scheduler.cluster.gpu_pods import GpuPod, occupied_gpuid
from scheduler.decisions.scores import Ranking
from scheduler.engine import nvidia_plugin
from scheduler.engine.node_assessment import Foresight, assess, record, score
from webhook.mtgpupod_rules import validate_mtgpupod_create
from webhook.pod_mutation import mutate
from webhook.pod_rules import unknown_constraints, validate_create

_OPTIONAL = ("cpu", "memory", "ephemeral-storage", "pods")


def simulate(world: World, settings: Settings, note: Callable[[str], None]) -> Result:
    """Place the submitted pods of a world. `note` receives a line for everything odd about nodes and running pods."""
    simulation = _Simulation(world, settings, note)
    for name, node in simulation.cluster.partitioned.items():
        if node.problem:
            note(f"node {name}: its slices are ignored: {node.problem}")
    simulation.take_in(world)
    outcomes = [simulation.submit(raw) for raw in world.submitted]
    return Result(outcomes, simulation.node_views())


class _Simulation:
    def __init__(self, world: World, settings: Settings, note: Callable[[str], None]) -> None:
        self._settings = settings
        self._note = note
        self.cluster = SimulatedCluster(world, settings)
        self._ranking = Ranking(self.cluster, settings)
        self._names: dict[str, Raw] = {}
        self._mtgpupods = MtgpuPods(self.cluster, settings, self._names, self.submit, self._unfit)

    def take_in(self, world: World) -> None:
        """Take in the running pods: first those with an allocation record, then late decisions for the others."""
        running = self._without_unneeded(world)
        nodes = self.cluster.partitioned.items()
        given = {name: {**world.given.get(name, {}), **node.reported_shares()} for name, node in nodes}
        unknown = {
            uid: Holding(uid, "", "", node, NVIDIA_PLUGIN, rows[uid]) for node, rows in given.items() for uid in rows
        }
        undecided: list[tuple[Pod, GpuRequest]] = []
        for raw in running:
            pod = read_pod(raw)
            request = read_request(pod, self._settings)
            unknown.pop(pod.uid, None)
            self._names[pod.key] = raw
            if isinstance(request, GpuRequest):
                self.cluster.forecast.pod_added(pod, request)
            if pod.ended:
                continue
            self.cluster.reserve(pod, raw, pod.node)
            found = read_claim(pod, request, given.get(pod.node, {}).get(pod.uid, ()))
            if found.holding:
                self._hold(pod, request, found.holding)
            if found.problem == NO_RECORD and isinstance(request, GpuRequest):
                undecided.append((pod, request))
            elif found.problem:
                self._note(f"pod {pod.key}: {found.problem}")
        for holding in unknown.values():
            self.cluster.hold(holding)
        self._mtgpupods.take_in(world.mtgpupods, running, self._note)
        self.cluster.restore_slices()
        for holding in (held for held in self.cluster.ledger.holdings() if held.dialect != mtgpu.NAME):
            odd = describe_missing_cards(holding, (state.card for state in self.cluster.devices(holding.node)))
            if odd:
                self._note(f"pod {holding.key}: {odd}")
        self._learn()
        for pod, request in undecided:
            self._decide_late(pod, request)
        for raw in running:
            self._mtgpupods.follow(read_pod(raw))
        self._mtgpupods.settle()

    def _hold(self, pod: Pod, request: GpuRequest | BadObject | None, holding: Holding) -> None:
        self.cluster.hold(holding)
        if isinstance(request, GpuRequest):
            self.cluster.forecast.pod_placed(pod, request)

    def _without_unneeded(self, world: World) -> list[Raw]:
        """Return the running pods without occupy pods that no MtgpuPod needs, which the controller deletes."""
        named = [read_pod(raw) for raw in (*world.mtgpupods, *world.submitted) if raw["kind"] == mtgpu.KIND]
        needed = {(pod.node, pod.annotations.get(mtgpu.GPUID)) for pod in named}
        running = []
        for raw in world.running:
            pod = read_pod(raw)
            found = mtgpu.occupy_target(pod)
            if found and found not in needed and mtgpu.enabled(self._settings):
                self._note(f"pod {pod.key}: is left out, because no MtgpuPod needs its card and it would be deleted")
            else:
                running.append(raw)
        return running

    def node_views(self) -> tuple[NodeView, ...]:
        """Return the nodes at the end of the simulation."""
        self._mtgpupods.name_containers()
        return view_nodes(self.cluster.ledger, self.cluster.partitions())

    def _unfit(self, raw: Raw, node: str, before: int) -> str:
        """Return why the kubelet would refuse a Pod that was created with a node, "" where it would not.

        Taints and cordons do not count, because no scheduler has checked them.
        """
        known = {**self.cluster.raw[node], "spec": {}}
        used = add_requests(self.cluster.used[node], {"pods": before})
        reasons = fit.fits(raw, known, used, _counted(known))
        return reasons[0] if reasons else ""

    def _decide_late(self, pod: Pod, request: GpuRequest) -> None:
        placement = self._assess(pod, request, pod.node)
        if isinstance(placement, Rejection) and self.cluster.partition_for(pod, request, [pod.node]):
            placement = self._assess(pod, request, pod.node)
        if isinstance(placement, Placement):
            self.cluster.place(pod, request, placement, pod.node)
            self.cluster.forecast.pod_placed(pod, request)
        else:
            self._note(f"pod {pod.key}: no cards on {pod.node}: {placement}")

    def _learn(self) -> None:
        if self.cluster.forecast.refresh():
            self._ranking.refresh()

    def submit(self, raw: Raw) -> Outcome:
        if raw["kind"] == mtgpu.KIND:
            return self._submit_mtgpupod(raw)
        outcome = Outcome(read_pod(raw))
        raw = self._admit(outcome, raw)
        if outcome.denied:
            return outcome
        self._names[outcome.pod.key] = raw
        request = dialects.read_request(outcome.pod, self._settings)
        if request is not None:
            self.cluster.forecast.pod_added(outcome.pod, request)
            self._learn()
        placements = self._filter(outcome, raw, request)
        if placements:
            node = min(placements, key=lambda name: (-outcome.scores.get(name, 0), name))
            self._bind(outcome, raw, request, placements[node], node)
            if request is not None:
                self.cluster.forecast.pod_placed(outcome.pod, request)
        message = "; ".join(f"{name}: {reason}" for name, reason in outcome.rejections.items())
        self._mtgpupods.follow(replace(outcome.pod, node=outcome.node), message)
        return outcome

    def _submit_mtgpupod(self, raw: Raw) -> Outcome:
        outcome = Outcome(read_pod(raw), dialect=mtgpu.NAME, kind=mtgpu.KIND)
        outcome.denied = validate_mtgpupod_create(raw, self._settings) or _unreadable(raw)
        if not outcome.denied:
            self._mtgpupods.submit(raw, outcome)
        return outcome

    def _admit(self, outcome: Outcome, raw: Raw) -> Raw:
        outcome.dialect = next(iter(vocabularies(outcome.pod)), None)
        outcome.patch = [dict(operation) for operation in mutate(raw, self._settings).patch]
        raw = jsonpatch.apply_patch(raw, outcome.patch)
        outcome.denied = validate_create(raw, self._settings) or _unreadable(raw)
        if outcome.pod.key in self._names and not outcome.denied:
            outcome.denied = [Problem("metadata.name", "is the name of a Pod that was created for an MtgpuPod")]
        for warning in unknown_constraints(raw, None):
            self._note(f"pod {outcome.pod.key}: {warning}")
        outcome.pod = read_pod(raw)
        return raw

    def _filter(self, outcome: Outcome, raw: Raw, request: GpuRequest | None) -> dict[str, Placement | None]:
        """Return the nodes that the pod fits, each with its placement; None for a pod without GPUs.

        The reasons of the other nodes go into the outcome. Where the pod fits no node, one is partitioned for it if
        that makes it fit.
        """
        placements: dict[str, Placement | None] = {}
        tried: list[str] = []
        for name, node in self.cluster.raw.items():
            reasons = fit.fits(raw, node, self.cluster.used[name], _counted(node))
            if reasons:
                outcome.rejections[name] = ", ".join(reasons)
            elif request is None and outcome.dialect:
                outcome.rejections[name] = f"no node serves {outcome.dialect} pods"
            elif request is None:
                placements[name] = None
            else:
                tried.append(name)
                self._try(outcome, request, name, placements)
        if request is not None and not placements:
            node_name = self.cluster.partition_for(outcome.pod, request, tried)
            if node_name:
                self._try(outcome, request, node_name, placements)
        points = self._ranking.points(GpuPod(outcome.pod, request), list(placements))
        if points is not None:
            outcome.scores = dict(zip(placements, points, strict=True))
        return placements

    def _try(self, outcome: Outcome, request: GpuRequest, name: str, placements: dict[str, Placement | None]) -> None:
        outcome.rejections.pop(name, None)
        found = self._assess(outcome.pod, request, name)
        if isinstance(found, Rejection):
            outcome.rejections[name] = str(found)
            return
        placements[name] = found
        points = self.cluster.slices_score(outcome.pod, request, name)
        if points is None:
            devices = self.cluster.devices(name, "", occupied_gpuid(outcome.pod, name))
            points = score(request, found, devices, self._settings)
        outcome.scores[name] = points

    def _assess(self, pod: Pod, request: GpuRequest, node: str) -> Placement | Rejection:
        gpuid = occupied_gpuid(pod, node)
        view, group_cards = self.cluster.node_snapshot(node, pod.uid), self.cluster.group_cards(request, pod.uid)
        known, devices = self.cluster.nodes[node], self.cluster.devices(node, pod.uid, gpuid)
        if nvidia_plugin.chooses_cards(known, request):
            ours = nvidia_plugin.indexes_used_by_mgpu(self.cluster.ledger, node, pod.uid, gpuid)
            refused = nvidia_plugin.rejection(request, known, view.cards, ours)
            return refused or assess(
                request, known, devices, self._settings
            )  # one of the choices that NVIDIA's plugin has
        refusal = request.unmet_requirement(known) is None and self.cluster.slices_refusal(pod, request, node)
        if refusal:
            return refusal
        foresight = Foresight(self.cluster.forecast.judges, view.free_resources, pod.cpu_memory)
        return assess(request, known, devices, self._settings, foresight, group_cards=group_cards)

    def _bind(
        self, outcome: Outcome, raw: Raw, request: GpuRequest | None, placement: Placement | None, node: str
    ) -> None:
        outcome.node = node
        self.cluster.reserve(outcome.pod, raw, node)
        if request is None or placement is None:
            return
        devices = self.cluster.devices(node)
        if not nvidia_plugin.chooses_cards(self.cluster.nodes[node], request):
            outcome.annotations = record(outcome.pod, request, placement, devices, self._settings, now_ns=0)
        self.cluster.place(outcome.pod, request, placement, node)
        cards, gpus = [state.card for state in devices], self.cluster.partitioned[node].gpus
        outcome.containers = Delivery(outcome.pod, request, placement, cards, gpus, self._settings).containers()


def _unreadable(raw: Raw) -> list[Problem]:
    """Return the problem of an amount that the API server would refuse."""
    try:
        requests_of(raw)
    except QuantityError as error:
        return [Problem("spec.containers", str(error))]
    return []


def _counted(node: Raw) -> Callable[[str], bool]:
    """Return whether `fit` compares a resource.

    GPU resources follow from cards and labels instead; cpu, memory and pods count where the Node has an amount.
    """
    there = allocatable(node)
    return lambda name: name != SHARE and vocabulary_of(name) is None and (name in there or name not in _OPTIONAL)
