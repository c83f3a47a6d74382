"""A partitioned node in memory: Node and pods, simulated NVML, CDI files, and a kubelet that receives ids."""

import copy
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from deviceplugin.delivery.cdi import CdiFiles, Edits
from deviceplugin.kubelet.checkpoint import PodDevicesEntry
from deviceplugin.mig.mig_driver import NvmlMig
from deviceplugin.mig.mode_manager import ModeManager
from deviceplugin.partitioning.claimed_cards import ClaimedCards
from deviceplugin.partitioning.mig_partitioner import MigPartitioner
from deviceplugin.partitioning.mps_partitioner import MpsPartitioner
from deviceplugin.partitioning.node_partitions import NodePartitions
from deviceplugin.partitioning.node_status import NodeStatusWriter
from deviceplugin.partitioning.partition_worker import PartitionInputs, PartitionWorker
from deviceplugin.partitioning.partitioner import Partitioner
from deviceplugin.pods.node_pods import NodePods
from deviceplugin.pods.slice_usage import PLACES_VARIABLE
from mgpu.dialects.slices import GIVEN
from mgpu.kube import ApiError
from mgpu.model.cards import Card
from mgpu.model.errors import RetryLater
from mgpu.model.ledger import Holding
from mgpu.model.mig import Instance
from mgpu.model.mps_config import write_config
from mgpu.model.node_slices import ANNOTATION, LABEL, PLANNED, NodeSlices, read_slices, with_spec, write_planned
from mgpu.model.pods import read_node
from mgpu.model.slice_names import Slice, count_slices, resource_of
from mgpu.settings import load_settings
from playground.nvml_state import register
from playground.simulated_nvml import SimulatedNvml
from tests.builders import node, pod
from tests.deviceplugin.fake_node import FixedCards, NoRemnants
from tests.deviceplugin.mig.rig import GPU, Flaky, gpu, instance

Json = dict[str, Any]


def place(text: str, card: int = 0) -> Slice:
    """`2g.20gb@4`, `4gb@0`"""
    found = instance(text)
    return Slice(card, found.start, found.profile)


def places(*texts: str, card: int = 0) -> tuple[Slice, ...]:
    return tuple(sorted(place(text, card) for text in texts))


def slice_pod(name: str, *on: Slice, phase: str = "Running") -> Json:
    """Return a pod whose allocation record names these places for its container."""
    amounts: dict[str, int] = {}
    given: dict[str, list[str]] = {}
    for s in on:
        resource = resource_of(s.name)
        amounts[resource] = amounts.get(resource, 0) + 1
        given.setdefault(resource.removeprefix("nvidia.com/"), []).append(f"{s.card}:{s.start}")
    texts = {resource: str(n) for resource, n in amounts.items()}
    container = {"name": "c", "image": "cuda", "resources": {"requests": texts, "limits": dict(texts)}}
    record = {GIVEN: json.dumps({"c": given})}
    return pod(name, container, annotations=record, node="n1", phase=phase)


class Kubelet:
    """A kubelet. If it is `slow` it does not know the last offer yet. `held` are the entries of its checkpoint."""

    def __init__(self) -> None:
        self.offered: tuple[Slice, ...] = ()
        self.unhealthy: set[Slice] = set()
        self.slow = False
        self.held: dict[str, list[PodDevicesEntry]] = {}

    def entries(self, resources: Iterable[str]) -> list[PodDevicesEntry]:
        return [entry for name in resources for entry in self.held.get(name, ())]

    def offer(self, slices: Collection[Slice], unhealthy: Collection[Slice]) -> None:
        self.offered, self.unhealthy = tuple(slices), {*unhealthy}

    def is_registered(self, name: str) -> bool:  # noqa: ARG002
        return not self.slow


class Nodes:
    """The Node in the API server. `on_patch` runs before the next write, as a concurrent write."""

    def __init__(self, raw: Json) -> None:
        self.raw, self.version, self.patches = raw, 1, 0
        self.on_patch: Callable[[], object] | None = None
        raw["metadata"]["resourceVersion"] = "1"

    def get(self, path: str) -> Json:
        assert path == "/api/v1/nodes/n1"
        return copy.deepcopy(self.raw)

    @property
    def node(self) -> Json:
        return self.get("/api/v1/nodes/n1")

    def wrote_node(self, before: Json, after: Json) -> None:
        """Do nothing: the watch delivers every write at once."""

    def patch(self, path: str, body: Mapping[str, Any]) -> Json:
        meanwhile, self.on_patch = self.on_patch, None
        if meanwhile:
            meanwhile()
        if body["metadata"]["resourceVersion"] != self.raw["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", "the object has been modified")
        self.patches += 1
        self.annotate(**body["metadata"]["annotations"])
        return self.get(path)

    def annotate(self, **annotations: str | None) -> None:
        merged = {**self.raw["metadata"]["annotations"], **annotations}
        self.raw["metadata"]["annotations"] = {key: text for key, text in merged.items() if text is not None}
        self.version += 1
        self.raw["metadata"]["resourceVersion"] = str(self.version)


class Mps:
    """The ConfigMap, and the daemons of the partitioned cards."""

    def __init__(self) -> None:
        self.config: str | None = ""
        self.silent: set[str] = set()
        self.cards: tuple[str, ...] = ()

    def text(self) -> tuple[str, str]:
        if self.config is None:
            raise RetryLater("the ConfigMap is not known yet")
        return self.config, "ConfigMap m data[n1]"

    def set_partitioned_cards(self, cards: Collection[str]) -> None:
        self.cards = tuple(sorted(cards))

    def is_healthy(self, card: str) -> bool:
        return card not in self.silent


class Rig:
    """A node with an agent. `reconcile` is its next reconciliation; after `restart` only files remain."""

    def __init__(self, folder: Path, mode: str = "mig", cards: tuple[Card, ...] = (gpu(),)) -> None:
        self.folder, self.cards = folder, cards
        self.nodes = Nodes(node("n1", labels={LABEL: mode} if mode else {}))
        self.file = folder / "mig.json"
        self.flaky = Flaky(SimulatedNvml(self.file, cards))
        self.cdi, self.kubelet, self.mps = CdiFiles(folder / "cdi"), Kubelet(), Mps()
        self.pods = NodePods(load_settings(), lambda: None)
        self.synced = True
        self.bare: frozenset[str] = frozenset()
        self.warnings: list[str] = []
        self.owned: set[tuple[str, Instance]] = set()  # the instances of claims
        self.restart()

    def restart(self) -> "Rig":
        self.flaky.heal()
        driver, manager = NvmlMig(self.flaky), ModeManager(NvmlMig(self.flaky))
        inputs = PartitionInputs(
            watch=self.nodes,
            cards=FixedCards(self.cards),
            pods=self.pods,
            pod_list=self,
            files=self.cdi,
            unrecorded=self,
            remnants=NoRemnants(),
            warn=self.warnings.append,
            changed=lambda: None,
        )
        partitioners: dict[str, Partitioner] = {
            "mig": MigPartitioner(driver, manager),
            "mps": MpsPartitioner(self.mps, self.mps, manager),
            "mig-claims": ClaimedCards(driver, manager, lambda: self.owned),
        }
        status = NodeStatusWriter(self.nodes, "n1", self.nodes)  # type: ignore[arg-type]
        self.partitions = NodePartitions(enabled=True)
        self.worker = PartitionWorker(inputs, self.partitions, partitioners, self.kubelet, status)
        return self

    def holdings(self) -> tuple[Holding, ...]:
        """Return nothing: no pod holds cards without a record."""
        return ()

    def reconcile(self, times: int = 1) -> "Rig":
        for _ in range(times):
            self.worker.reconcile()
        return self

    def plan(self, plan: int, *wanted: Slice, placed: bool = True) -> "Rig":
        """Write a plan as the scheduler does; with placements if `placed`."""
        annotations = self.nodes.raw["metadata"]["annotations"]
        spec = with_spec(annotations.get(ANNOTATION), count_slices(wanted), plan)
        self.nodes.annotate(**{ANNOTATION: spec, PLANNED: write_planned(wanted, plan) if placed else None})
        return self

    def configure(self, *wanted: Slice) -> "Rig":
        self.mps.config = write_config(count_slices(wanted))
        return self

    def label(self, mode: str | None) -> "Rig":
        self.nodes.raw["metadata"]["labels"] = {} if mode is None else {LABEL: mode}
        return self

    def take(self, name: str, *on: Slice, phase: str = "Running") -> "Rig":
        self.pods.take(slice_pod(name, *on, phase=phase))
        return self

    def hand_out(self, name: str, *on: Slice, **env: str) -> "Rig":
        """Write a CDI file for the pod's container with these slices."""
        slices = {
            "MGPU_SLICES": ",".join(s.name for s in on),
            PLACES_VARIABLE: ",".join(f"{s.card}:{s.start}" for s in on),
        }
        self.cdi.write("mgpu.io/card=1", f"uid-{name}", "c", Edits({**(slices if on else {}), **env}))
        return self

    def run_on(self, s: Slice, pid: int = 7) -> None:
        register(self.file, self.made(s.card)[s], pid)

    def made(self, card: int = 0) -> dict[Slice, str]:
        """Return the instances of a card and their UUIDs, as NVML lists them."""
        found = NvmlMig(SimulatedNvml(self.file, self.cards)).read()[card]
        return {Slice(card, made.instance.start, made.instance.profile): made.uuid for made in found.instances}

    def make(self, *wanted: Slice) -> "Rig":
        """Create instances as an administrator does."""
        driver = NvmlMig(SimulatedNvml(self.file, self.cards))
        for card in sorted({s.card for s in wanted}):
            driver.set_mode(self.cards[card].uuid, on=True)
        for s in wanted:
            driver.create(self.cards[s.card].uuid, s.instance)
        return self

    @property
    def reported(self) -> NodeSlices:
        """The annotations of the Node as the scheduler reads them."""
        return read_slices(read_node(self.nodes.raw))

    @property
    def users(self) -> dict[Slice, str]:
        """Place → the UID of its pod, as the Node reports it."""
        return {s.place: s.pod for s in self.reported.existing}

    @property
    def annotation(self) -> dict[str, int]:
        return dict(json.loads(self.nodes.raw["metadata"]["annotations"].get(ANNOTATION, "{}")))


__all__ = ["GPU", "Rig", "gpu", "place", "places", "slice_pod"]
