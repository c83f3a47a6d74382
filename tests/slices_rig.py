"""A cluster whose nodes are given out in slices, without threads: the real scheduling side and the real agents' side on
one API server, each of which can die at any of its calls.

What is played is what lies around them: kubelet and runtime (`Node`), and the cards (tests/slices_cards.py).
"""

import copy
import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from deviceplugin.kubelet.checkpoint import PodDevicesEntry
from deviceplugin.mig.mode_manager import ModeManager
from deviceplugin.partitioning.mig_partitioner import MigPartitioner
from deviceplugin.partitioning.mps_partitioner import MpsPartitioner
from deviceplugin.partitioning.node_partitions import NodePartitions
from deviceplugin.partitioning.node_status import NodeStatusWriter
from deviceplugin.partitioning.partition_worker import PartitionInputs, PartitionWorker
from deviceplugin.partitioning.partitioner import Partitioner
from deviceplugin.pods.node_pods import NodePods
from mgpu.dialects import slices
from mgpu.kube import ApiError, Unreachable
from mgpu.model.cards import Card
from mgpu.model.device_object import write_device
from mgpu.model.errors import RetryLater
from mgpu.model.ledger import Holding
from mgpu.model.mps_config import config_of
from mgpu.model.node_slices import LABEL
from mgpu.model.pods import Node as ModelNode
from mgpu.model.slice_names import MIG, MPS, Slice, slice_of_resource
from scheduler.cluster.gpu_pods import GpuPod
from tests import builders
from tests.clock import Clock
from tests.scheduler.fake import SETTINGS, FakeApi, Replica, admitted, reader
from tests.slices_cards import Crash, MigCards

Raw = dict[str, Any]
GIB = 1 << 30
OWN = SETTINGS.dialects.slices
_read = reader()


class Wire:
    """The API server as one process reaches it, until it dies or cannot.

    left: calls that go well; None: all. Then: `crash` or Unreachable, `after` the call has come through or before it.
    meanwhile: what somebody else does between a question of this process and its next write.
    """

    def __init__(self, api: FakeApi) -> None:
        self._api = api
        self.meanwhile: Callable[[], object] = _nothing
        self.fail(None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def fail(self, left: int | None, *, crash: bool = False, after: bool = False) -> None:
        self.left, self.crash, self.after = left, crash, after

    def get(self, path: str) -> Raw:
        return self._call(lambda: self._api.get(path))

    def patch(self, path: str, body: Raw) -> Raw:
        meanwhile, self.meanwhile = self.meanwhile, _nothing
        meanwhile()
        return self._call(lambda: self._api.patch(path, body))

    def create(self, path: str, body: Raw) -> Raw:
        return self._call(lambda: self._api.create(path, body))

    def _call(self, call: Callable[[], Raw]) -> Raw:
        if self.left is None:
            return call()
        self.left -= 1
        if self.left >= 0:
            return call()
        if self.after:
            call()
        if self.crash:
            raise Crash
        self.left = None
        raise Unreachable("no answer")


def _nothing() -> None:
    """Do nothing."""


class Plugins:
    """Of the device plugins what the kubelet knows: it hears of new ids when it is let."""

    def __init__(self) -> None:
        self.offered: dict[str, int] = {}
        self.heard: dict[str, int] = {}

    def entries(self, resources: Iterable[str]) -> list[PodDevicesEntry]:  # noqa: ARG002
        return []

    def offer(self, slices: Collection[Slice], unhealthy: Collection[Slice]) -> None:  # noqa: ARG002
        names = [s.name for s in slices]
        self.offered = {name: names.count(name) for name in names}

    def is_registered(self, name: str) -> bool:
        return self.heard.get(name) == self.offered.get(name)


class Node:
    """A node. What survives its agent: the cards, what containers were handed (CDI files), what the kubelet knows.

    running: UID of a pod → the places of its container, from its start until its end. seen: those of them that were
    there at a look that went through, by an agent that had heard all of its Node. unsaid: since a reboot the agent has
    not said what there is.
    """

    def __init__(self, api: FakeApi, name: str, mode: str, cards: Sequence[Card]) -> None:
        self.api, self.name, self.mode, self.gpus = api, name, mode, tuple(cards)
        self.mig = MigCards(cards)
        self.plugins = Plugins()
        self.handed: dict[tuple[str, str], dict[str, str]] = {}
        self.running: dict[str, tuple[Slice, ...]] = {}
        self.seen: set[str] = set()
        self.unsaid = False
        self.warned: list[str] = []
        self._pids = itertools.count(1)
        self._pid_of: dict[str, int] = {}
        self.ticks = 0.0
        self.start_agent()

    def start_agent(self) -> None:
        """A new process: it lists what the API server has, and knows nothing else."""
        self.events: deque[tuple[str, str, Raw]] = deque()
        self.raw = copy.deepcopy(self.api.nodes[self.name])
        self.config = copy.deepcopy(self.api.configmaps.get(OWN.config_map))
        self.pods = NodePods(SETTINGS, lambda: None)
        for raw in self.api.pods.values():
            if raw["spec"].get("nodeName") == self.name:
                self.pods.take(copy.deepcopy(raw))
        self.wire = Wire(self.api)
        inputs = PartitionInputs(
            watch=self,
            cards=self,
            pods=self.pods,
            pod_list=self,
            files=self,
            unrecorded=self,
            remnants=self,
            warn=self.warned.append,
            changed=lambda: None,
        )
        manager = ModeManager(self.mig, lambda: self.ticks)
        partitioners: dict[str, Partitioner] = {
            MIG: MigPartitioner(self.mig, manager),
            MPS: MpsPartitioner(self, self, manager),
        }
        client: Any = self.wire
        self.partitions = NodePartitions(enabled=True)
        status = NodeStatusWriter(client, self.name, self)
        self.agent = PartitionWorker(inputs, self.partitions, partitioners, self.plugins, status)

    # The other parts of the agent, as the worker reads them.

    bare: frozenset[str] = frozenset()
    synced = True

    @property
    def node(self) -> Raw | None:
        return self.raw

    @property
    def cards(self) -> tuple[Card, ...]:
        return self.gpus

    def environments(self) -> Mapping[tuple[str, str], Mapping[str, str]]:
        return self.handed

    def holdings(self) -> tuple[Holding, ...]:
        return ()

    def is_remnant(self, uid: str) -> bool:  # noqa: ARG002
        return False

    def wrote_node(self, before: Raw, after: Raw) -> None:
        if self.raw is before:
            self.raw = copy.deepcopy(after)

    def hear(self, kind: str, what: str, raw: Raw) -> None:
        """A watch event is under way."""
        self.events.append((kind, what, raw))

    def deliver(self, count: int = 1_000_000) -> None:
        for _ in range(min(count, len(self.events))):
            kind, what, raw = self.events.popleft()
            if kind == "nodes" and raw["metadata"]["name"] == self.name:
                self.raw = raw
            elif kind == "configmaps" and raw["metadata"]["name"] == OWN.config_map:
                self.config = raw if what == "changed" else None
            elif kind == "pods" and raw["spec"].get("nodeName") == self.name:
                (self.pods.take if what == "changed" else self.pods.drop)(raw)

    def look(self) -> None:
        """Run one pass of the agent. The agent retries a pass that fails."""
        heard = not any(kind == "nodes" and raw["metadata"]["name"] == self.name for kind, _, raw in self.events)
        try:
            self.agent.reconcile()
        except Crash:
            self.start_agent()
        except (RetryLater, ApiError, Unreachable):
            pass
        else:
            self.unsaid = False
            self.seen |= self.running.keys() if heard else set()
        self.wire.fail(None)
        self.wire.meanwhile = _nothing
        self.mig.fail(None)
        self.ticks += 1000

    def kubelet_hears(self) -> None:
        self.plugins.heard = dict(self.plugins.offered)

    def start(self, raw: Raw) -> bool:
        """A pod's container: it sees its slices if the agent knows them all; False: it waits."""
        uid, places = raw["metadata"]["uid"], places_of(raw)
        there = {(card.type, card.index): card.uuid for card in self.partitions.devices(self.gpus)}
        uuids = [there.get((device_type(place), place.index)) for place in places]
        if uid in self.running or not all(uuids) or raw["status"]["phase"] != "Pending":
            return False
        seen = [
            str(uuid) if self.mode == MIG else self.gpus[place.card].uuid
            for uuid, place in zip(uuids, places, strict=True)
        ]
        self.handed[uid, "c"] = {
            "NVIDIA_VISIBLE_DEVICES": ",".join(seen),
            "MGPU_SLICES": ",".join(place.name for place in places),
            "MGPU_PLACES": ",".join(f"{place.card}:{place.start}" for place in places),
        }
        assert self.mode == MPS or set(seen) <= set(self.mig.whole().values()), (
            "a container got a device that is not there"
        )
        self.running[uid], self._pid_of[uid] = places, next(self._pids)
        for uuid in seen if self.mode == MIG else ():
            self.mig.clients.setdefault(uuid, set()).add(self._pid_of[uid])
        return True

    def end(self, uid: str) -> None:
        """The container's process ends."""
        self.seen.discard(uid)
        seen = self.handed.get((uid, "c"), {}).get("NVIDIA_VISIBLE_DEVICES", "").split(",")
        for uuid in seen if self.running.pop(uid, None) and self.mode == MIG else ():
            self.mig.clients[uuid].discard(self._pid_of[uid])

    def clean(self) -> None:
        """CDI files go with their pods."""
        there = {raw["metadata"]["uid"] for raw in self.api.pods.values()}
        self.handed = {key: env for key, env in self.handed.items() if key[0] in there or key[0] in self.running}

    def reboot(self) -> None:
        for uid in list(self.running):
            self.end(uid)
        self.mig.reboot()
        self.unsaid = True
        self.start_agent()

    # The ConfigMap and the MPS daemons, as MpsPartitioner uses them.

    def text(self) -> tuple[str, str]:
        said = config_of((self.config or {}).get("data") or {}, self.name)
        return (said[1], "ConfigMap") if said else ("", "ConfigMap")

    def set_partitioned_cards(self, cards: Collection[str]) -> None:
        """All daemons are there at once."""

    def is_healthy(self, card: str) -> bool:  # noqa: ARG002
        return True


class Rig:
    """Nodes with their agents, and a scheduler with a deputy."""

    def __init__(self, *nodes: tuple[str, str, int]) -> None:
        """nodes: (name, mode, number of cards)."""
        self.api, self.clock = FakeApi(), Clock()
        for name, mode, count in nodes:
            self.api.put("nodes", builders.node(name, labels={LABEL: mode}, dynamicgpuslice='{"theirs": 1}'))
            self.api.put("devices", write_device(ModelNode(name), "", _cards(name, count)))
        self.nodes = {n: Node(self.api, n, mode, _cards(n, count)) for n, mode, count in nodes}
        for node in self.nodes.values():
            self.api.watchers.append(node.hear)
        self._watchers = list(self.api.watchers)
        self.start_scheduler()

    def start_scheduler(self) -> None:
        """A new process; the old one is gone."""
        self.api.watchers = list(self._watchers)
        self.wire = Wire(self.api)
        client: Any = self.wire
        self.scheduler = Replica(client, self.clock)
        for uid in self.scheduler.state.undecided_pods():
            self.scheduler.late.add(uid)
        self.scheduler.planning.begin()
        self.api.admit = admitted(self.scheduler)

    def schedule(self, name: str) -> dict[str, str]:
        """kube-scheduler's turn with a pod; why it waits, by node; {}: it is bound."""
        raw = self.api.pod(name)
        known = self.known(raw)
        found = self.scheduler.filter.filter(known, sorted(self.nodes))
        if not found.passed:
            return {**found.failed, **found.hopeless}
        try:
            uid, target = raw["metadata"]["uid"], {"kind": "Node", "name": found.passed[0]}
            self.api.bind(name, found.passed[0], {"metadata": {"name": name, "uid": uid}, "target": target})
        except (ApiError, RetryLater) as error:
            return {found.passed[0]: str(error)}
        return {}

    def known(self, raw: Raw) -> GpuPod:
        known = _read(raw)
        assert known is not None
        return known

    def plan(self) -> None:
        """One pass of the planning thread."""
        try:
            self.scheduler.planning.work()
        except Crash:
            self.start_scheduler()
        self.wire.fail(None)
        self.wire.meanwhile = _nothing

    def pods(self, node: str = "") -> Iterator[Raw]:
        """Those that are bound, to this node, and have not ended."""
        for raw in self.api.pods.values():
            if raw["spec"].get("nodeName", "") in ((node,) if node else self.nodes) and raw["status"]["phase"] in (
                "Pending",
                "Running",
            ):
                yield raw

    def round(self) -> None:
        """Everybody does what he has to do, once."""
        self.scheduler.deliver()
        self.scheduler.late.work()
        self.plan()
        for node in self.nodes.values():
            node.clean()
            node.deliver()
            node.look()
            node.kubelet_hears()
            for raw in list(self.pods(node.name)):
                if places_of(raw) and node.start(raw):
                    self.phase(raw["metadata"]["name"], "Running")
            node.deliver()
            node.look()
        self.scheduler.deliver()

    def phase(self, name: str, phase: str) -> None:
        self.api.edit_pod(name, lambda raw: raw["status"].update(phase=phase))


def _cards(node: str, count: int) -> tuple[Card, ...]:
    return tuple(Card(i, f"GPU-{node}-{i}", "NVIDIA A100-SXM4-80GB", 80 * GIB, minor=i) for i in range(count))


def device_type(place: Slice) -> str:
    return f"gpu-{place.name}" if place.name[:-2].isdecimal() else f"mig-{place.name}"


def places_of(raw: Raw) -> tuple[Slice, ...]:
    """What a pod's record names."""
    known = _read(raw)
    assert known is not None
    assert known.request is not None
    shares = slices.read_placement(known.pod, known.request) or ()
    return tuple(
        Slice(*divmod(int(str(share.card)), 100), str(slice_of_resource(f"nvidia.com/{share.type}")))
        for share in shares
    )
