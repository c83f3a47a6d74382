"""Places the pods of a cluster again, with their own shares and with the shares that they need, by mgpu's engine.

The pods are placed one after the other on nodes that hold only what cannot be placed again: pods without shares of
cards (their cpu and memory count), pods with slices, and MtgpuPods with their Pods.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from mgpu import dialects
from mgpu.dialects import mtgpu
from mgpu.model.cards import GPU
from mgpu.model.gpu_requests import GpuRequest
from mgpu.model.pods import read_pod
from mgpu.model.slice_names import is_slice
from mgpu.presentation.card_views import NodeView
from mgpu.presentation.overview import read_request
from mgpu.settings import Settings
from playground.simulate.documents import Raw
from playground.simulate.pipeline import Simulation
from playground.simulate.right_sizing.workloads import Owner, Workload, owner_of
from playground.simulate.world import World

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Packing:
    """How full the cluster is.

    Attributes:
        free_nodes: the nodes with cards, none of which is in use.
        free_cards: the healthy cards that are not in use.
        unplaced: the pods that fit on no node, as `namespace/name`.
        further: how many further pods of each workload would fit, if only they came.
    """

    free_nodes: int
    free_cards: int
    unplaced: tuple[str, ...] = ()
    further: Mapping[Owner, int] | None = None


def split_world(world: World, settings: Settings, note: Note) -> tuple[World, list[Workload]]:
    """Return the world without the pods that are placed again, and these pods in the order of the files."""
    simulation = Simulation(world, settings, note)
    movable: list[Workload] = []
    running = []
    for raw in world.running:
        workload = _movable(raw, settings)
        if workload:
            movable.append(workload)
        else:
            running.append(raw)
    for raw in world.submitted:
        admitted = simulation.admitted(raw) if raw["kind"] != mtgpu.KIND else None
        workload = _movable(admitted, settings) if admitted else None
        if workload:
            movable.append(workload)
        else:
            note(f"{raw['kind']} {read_pod(raw).key} is left out: it has no shares of cards, or is denied")
    return replace(world, running=running, submitted=[]), movable


def _movable(raw: Raw, settings: Settings) -> Workload | None:
    """Return a pod that can be placed again, without its node and its record; None for any other pod."""
    pod = read_pod(raw)
    request = read_request(pod, settings)
    if not isinstance(request, GpuRequest) or pod.ended or mtgpu.occupy_target(pod) is not None:
        return None
    if not request.containers or any(is_slice(one.type) for one in request.others) or _is_of_an_mtgpupod(raw):
        return None
    meta = raw["metadata"]
    annotations = {
        key: text for key, text in (meta.get("annotations") or {}).items() if not dialects.is_placement_annotation(key)
    }
    spec = {key: value for key, value in raw["spec"].items() if key != "nodeName"}
    return Workload(owner_of(raw), {**raw, "metadata": {**meta, "annotations": annotations}, "spec": spec}, request)


def _is_of_an_mtgpupod(raw: Raw) -> bool:
    return any(row.get("kind") == mtgpu.KIND for row in raw["metadata"].get("ownerReferences") or ())


def as_it_runs(world: World, settings: Settings, note: Note) -> Packing:
    """Return how full the cluster is with the pods that run, where they run."""
    simulation = Simulation(replace(world, submitted=[]), settings, note)
    simulation.take_in(replace(world, submitted=[]))
    return _packing(simulation.node_views())


def pack(rest: World, workloads: Sequence[Workload], requests: Sequence[GpuRequest], settings: Settings) -> Packing:
    """Place the pods with these requests, and count how many further pods of each workload fit then."""
    simulation = Simulation(rest, settings, _quiet)
    simulation.take_in(rest)
    unplaced = []
    first: dict[Owner, tuple[Raw, GpuRequest]] = {}
    for workload, request in zip(workloads, requests, strict=True):
        first.setdefault(workload.owner, (workload.raw, request))
        if simulation.place(workload.raw, request) is None:
            unplaced.append(read_pod(workload.raw).key)
    found = _packing(simulation.node_views(), unplaced)
    further = {owner: simulation.count_further(raw, request) for owner, (raw, request) in first.items()}
    return replace(found, further=further)


def _quiet(_: str) -> None:
    """Print nothing: the notes about the rest of the world have been printed before."""


def _packing(views: Sequence[NodeView], unplaced: Sequence[str] = ()) -> Packing:
    served = [[card.state for card in view.cards if card.state.card.type == GPU] for view in views if view.cards]
    return Packing(
        sum(all(state.idle for state in cards) for cards in served),
        sum(state.idle and state.card.healthy for cards in served for state in cards),
        tuple(unplaced),
    )
