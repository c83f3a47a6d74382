"""A cluster with partitionable nodes: an agent that carries out each plan, and pods that request slices."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from mgpu.kube import ApiError
from mgpu.model.device_object import write_device
from mgpu.model.node_slices import ANNOTATION, EXISTING, LABEL, NodeSlices, read_slices, with_status, write_existing
from mgpu.model.pods import Node, read_node
from mgpu.model.slice_names import MIG, MPS, Slice
from scheduler.cluster.gpu_pods import GpuPod
from tests import builders as b
from tests.scheduler.fake import SETTINGS, FakeApi, Replica

Raw = dict[str, Any]


def wants(name: str, *containers: dict[str, int], **more: Any) -> Raw:
    """`wants("p", {"mig-2g.20gb": 1})`: a pod of containers a, b, …"""
    made = []
    for letter, amounts in zip("abc", containers, strict=False):
        resources = {f"nvidia.com/{key}": str(amount) for key, amount in amounts.items()}
        made.append({"name": letter, "resources": {"requests": {**resources, "cpu": "1"}, "limits": resources}})
    return b.pod(name, *made, **more)


class Agent:
    """The node's agent: what is made lives here, what is said of it on the Node."""

    def __init__(self, api: FakeApi, name: str = "n1", mode: str = MIG, cards: int = 1, gib: int = 80) -> None:
        self.api, self.name, self.mode = api, name, mode
        self.made: dict[Slice, str] = {}
        self._count = cards
        self.refused: tuple[int, str] | None = None
        api.put("nodes", b.node(name, labels={LABEL: mode}))
        api.put("devices", write_device(Node(name), "", b.cards(cards, gib, node=name)))
        self.report()

    @property
    def cards(self) -> Iterable[int]:
        """That can be cut; under MPS those that are."""
        return range(self._count) if self.mode == MIG else {s.card for s in self.made}

    @property
    def found(self) -> NodeSlices:
        """What the Node says now."""
        return read_slices(read_node(self.api.nodes[self.name]))

    @property
    def said(self) -> str:
        """The seed's annotation."""
        return str(self.api.nodes[self.name]["metadata"]["annotations"][ANNOTATION])

    def make(self, *slices: Slice, pod: str = "") -> None:
        for s in slices:
            self.made[s] = pod
        self.report()

    def give(self, pod: str, *slices: Slice) -> None:
        """What PodResources says: the slices that a pod holds."""
        for s, owner in self.made.items():
            if s in slices or owner == pod:
                self.made[s] = pod if s in slices else ""
        self.report()

    def apply(self) -> None:
        """The plan that the Node has, unless it would destroy what is in use."""
        found = self.found
        if found.planned is None or not found.has_pending_plan:
            return
        kept = {*found.planned}
        if any(pod and s not in kept for s, pod in self.made.items()):
            self.refused = (found.partitioning.plan or 0, "in use")
            self.report()
            return
        self.made = {s: self.made.get(s, "") for s in found.planned}
        self.refused = None
        self.report(found.partitioning.plan)

    def refuse(self, why: str = "no room") -> None:
        self.refused = (self.found.partitioning.plan or 0, why)
        self.report()

    def reboot(self) -> None:
        self.made = {}
        self.report()

    def report(self, applied: int | None = None, *, stale: bool = False) -> None:
        """stale: by a resourceVersion that is not the newest."""
        slices = [replace(s, uuid=f"MIG-{self.name}-{s.index}", pod=pod) for s, pod in self.made.items()]
        while True:
            node = self.api.nodes[self.name]
            meta = node["metadata"]
            said = {
                ANNOTATION: with_status(meta["annotations"].get(ANNOTATION), slices, applied),
                EXISTING: write_existing(slices, self.cards, self.refused),
            }
            version = "0" if stale else meta["resourceVersion"]
            try:
                body = {"metadata": {"resourceVersion": version, "annotations": said}}
                self.api.patch(f"/api/v1/nodes/{self.name}", body)
            except ApiError:
                stale = False
                continue
            return


def slices(*places: tuple[int, int, str]) -> tuple[Slice, ...]:
    return tuple(Slice(*place) for place in places)


def cluster(*agents: tuple[str, str, int], settings: Any = SETTINGS) -> tuple[Replica, dict[str, Agent]]:
    """`cluster(("n1", MIG, 2))`: nodes with the label and so many cards of 80 GiB."""
    api = FakeApi()
    made = {name: Agent(api, name, mode, cards) for name, mode, cards in agents}
    return Replica(api, settings=settings), made


def submit(replica: Replica, *pods: Raw) -> list[GpuPod]:
    for raw in pods:
        replica.api.put("pods", raw)
    replica.deliver()
    return [known(replica, raw["metadata"]["name"]) for raw in pods]


def known(replica: Replica, name: str) -> GpuPod:
    found = replica.state.gpu_pod(f"uid-{name}")
    assert found is not None
    return found


def turn(replica: Replica, agents: Iterable[Agent] = ()) -> None:
    """The controller works, the agents do, and everybody hears of it."""
    replica.planning.work()
    for agent in agents:
        agent.apply()
    replica.deliver()


__all__ = ["MIG", "MPS", "Agent", "cluster", "known", "slices", "submit", "turn", "wants"]
