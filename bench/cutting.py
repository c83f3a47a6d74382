"""Filter, scores and the plan for one pod with slices on 5,000 nodes, of which 1,000 can be partitioned.

Everything runs in this process. The cache reads the slices of the nodes before the measurements, as the scheduler does
in the background.
"""

from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from time import process_time
from typing import Any

from bench.rows import Options, Row
from mgpu.model.device_object import write_device
from mgpu.model.mig import Instance, layout_of, possible_instances
from mgpu.model.node_slices import ANNOTATION, EXISTING, LABEL, with_status, write_existing
from mgpu.model.pods import Node
from mgpu.model.slice_names import MIG, Slice
from mgpu.settings import load_settings
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.gpu_pods import GpuPod, read_gpu_pod
from scheduler.cluster.slice_state import PartitionPlan
from scheduler.decisions.filter import Filter
from scheduler.partitioning.partition_controller import PartitionController
from tests import builders as b

NODES, CUT, CARDS = 5_000, 1_000, 8
ASKS = ({"mig-2g.20gb": 1}, {"mig-4g.40gb": 1}, {"mig-1g.10gb": 2, "mig-3g.40gb": 1}, {"mig-7g.80gb": 1})
SETTINGS = load_settings()


class _Unwritten:
    """A `PlanWriter` that writes nothing and reports a problem, so that the controller drops each plan."""

    def write_plan(self, plan: PartitionPlan) -> str:
        return f"plan {plan.id} was made only to measure the time"


def rows(_: Options) -> Iterator[Row]:
    state = _state()
    state.partitions.refresh()
    names = [f"node-{i}" for i in range(NODES)]
    for request in ASKS:
        pod = _pod(request)
        filter_ = Filter(state, SETTINGS)
        filtering, found = _timed(partial(filter_.filter, pod, names))
        scoring, _ = _timed(partial(filter_.scores, pod, found.passed))
        text = ", ".join(f"{count} × {name}" for name, count in request.items())
        fit = f"{len(found.passed)} nodes fit, {len(found.repartitionable)} would fit after partitioning"
        yield Row(what=f"filter, {text}", value=filtering, unit="ms CPU", remark=fit)
        yield Row(what=f"prioritize, {text}", value=scoring, unit="ms CPU")
        yield Row(what=f"plan, {text}", value=_planned(state, pod, found.repartitionable), unit="ms CPU")


def _planned(state: ClusterCache, pod: GpuPod, nodes: list[str]) -> float:
    """Return the CPU milliseconds that the partition controller needs for a plan for the pod."""
    writer: Any = _Unwritten()
    planning = PartitionController(state, writer, SETTINGS, lambda *_: None, lambda: None)
    planning.request_plan(pod, nodes)
    return _timed(planning.work)[0]


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    began = process_time()
    found = call()
    return 1000 * (process_time() - began), found


def _pod(request: dict[str, int]) -> GpuPod:
    amounts = {f"nvidia.com/{name}": str(count) for name, count in request.items()}
    raw = b.pod("p", {"name": "c", "resources": {"requests": amounts, "limits": amounts}})
    known = read_gpu_pod(raw, SETTINGS)
    assert known
    return known


def _state() -> ClusterCache:
    state, random = ClusterCache(SETTINGS), Random(1)
    for i in range(NODES):
        name = f"node-{i}"
        raw = b.node(name)
        if i < CUT:
            slices = [s for card in range(CARDS) for s in _slices(random, name, card)]
            raw["metadata"]["labels"][LABEL] = MIG
            raw["metadata"]["annotations"] = {
                ANNOTATION: with_status(None, slices, None),
                EXISTING: write_existing(slices, range(CARDS), None),
            }
        state.node_changed(raw)
        state.device_changed(write_device(Node(name), "", b.cards(CARDS, node=name)))
    return state


def _slices(random: Random, node: str, card: int) -> list[Slice]:
    """Return up to four slices of a card. A pod uses a slice with a probability of 70 %."""
    layout, made = layout_of("A100-SXM4-80GB", 80 << 30), list[Instance]()
    assert layout
    for _ in range(random.randint(0, 4)):
        made += random.sample(possible_instances(layout, made), 1) if possible_instances(layout, made) else []
    used = (f"{node}-{card}-{one.start}" if random.random() < 0.7 else "" for one in made)
    return [Slice(card, one.start, one.profile, pod=pod) for one, pod in zip(made, used, strict=True)]
