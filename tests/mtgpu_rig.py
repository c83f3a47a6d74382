"""A cluster with MtgpuPods, without threads: the real cache, decisions and controller on the playground's API server,
without its HTTP. The scheduler's process may die at any of its calls, and hears of what happens when it is let.

What is played is what lies around: kube-scheduler, kubelets with the plugin that serves whole cards, agents' reports,
garbage collection.
"""

from collections.abc import Iterator
from typing import Any, Protocol

from mgpu.dialects import mtgpu
from mgpu.kube import ApiError
from mgpu.model.cards import Card
from mgpu.model.device_checkpoints import CHECKPOINTS, DELETED_POD, CheckpointEntry, write_entries
from mgpu.model.device_object import WHOLE_CARDS_LABEL, write_device
from mgpu.model.errors import RetryLater
from mgpu.model.gpu_requests import Rejection
from mgpu.model.ledger import Share
from mgpu.model.pods import Node as ModelNode
from mgpu.settings import Settings, load_settings
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.events import MtgpuPodsAffected
from scheduler.decisions.decider import Decider
from scheduler.mtgpupods.mtgpupod_controller import MtgpuPodController
from scheduler.mtgpupods.mtgpupod_status import Transition
from tests import builders
from tests.clock import Clock
from tests.mtgpu_cluster import Cluster, Crash, Raw, Wire, pod_path

GIB = 1 << 30
SETTINGS = load_settings("dialects: {mtgpu: {occupyPriorityClass: ''}}")
PODS, ITEMS, DEVICES = "pods", "mtgpupods.lsalab.nthu", "devices.scheduling.koordinator.sh"
WHOLE = "nvidia.com/gpu"
_GONE = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC"}
_DEVICES = "/apis/scheduling.koordinator.sh/v1alpha1/devices"


class _Fed(Protocol):
    def __call__(self, raw: Raw, /) -> None: ...


class Scheduler:
    """A scheduler process: it has listed what there is, and hears of what happens since."""

    def __init__(self, cluster: Cluster, clock: Clock, settings: Settings) -> None:
        self._cluster, self.wire = cluster, Wire(cluster)
        self.leads = True
        self.told: list[tuple[str, Transition]] = []
        client: Any = self.wire
        sure: Any = cluster
        self.state = ClusterCache(settings, clock)
        self.controller = MtgpuPodController(self.state, client, settings, self._tell, self._may_decide, clock)
        self.decider = Decider(self.state, sure, settings)
        state = self.state
        state.subscribe(MtgpuPodsAffected, self.controller.affected)
        self._fed: dict[str, tuple[_Fed, _Fed]] = {
            "nodes": (state.node_changed, state.node_gone),
            DEVICES: (state.device_changed, state.device_gone),
            ITEMS: (state.mtgpupods.mtgpupod_changed, state.mtgpupods.mtgpupod_gone),
            PODS: (state.pod_changed, state.pod_gone),
        }
        for resource, (changed, _) in self._fed.items():
            for raw in cluster.all(resource):
                changed(raw)
        self._heard = dict.fromkeys(self._fed, cluster.storage.rv)
        self.controller.begin()

    def hear(self, resource: str = "", count: int = 1_000_000) -> None:
        """Of what has happened to objects of this kind, or all, the next `count` changes."""
        for name, (changed, gone) in self._fed.items():
            if resource in ("", name):
                for change in self._cluster.storage.collection(name).since(self._heard[name])[:count]:
                    self._heard[name] = change.rv
                    (gone if change.removed else changed)(change.new.obj)

    def lead(self) -> None:
        """A new term, after a fresh list."""
        self.hear()
        self.state.mtgpupods.drop_admissions()
        self.leads = True
        self.controller.begin()

    def _may_decide(self) -> None:
        if not self.leads:
            raise RetryLater("another replica leads")

    def _tell(self, regarding: Raw, what: Transition) -> None:
        self.told.append((regarding["name"], what))


class Node:
    """given: where NVIDIA's plugin serves whole cards, those that pods got of it, by uid. takes: which of the free ones
    it gives next. remnants: by uid, what Pods hold there that were deleted by force and still run.
    """

    def __init__(self, name: str, cards: tuple[Card, ...], *, stock: bool) -> None:
        self.name, self.cards, self.stock = name, cards, stock
        self.given: dict[str, str] = {}
        self.remnants: dict[str, CheckpointEntry] = {}
        self.takes = 0


class Rig:
    def __init__(self, *nodes: tuple[str, int, bool]) -> None:
        """nodes: (name, number of cards, whether NVIDIA's plugin is there)."""
        self.scheduler: Scheduler
        self.follower: Scheduler | None = None
        self.cluster, self.clock, self.settings = Cluster(), Clock(), SETTINGS
        self.nodes: dict[str, Node] = {}
        for name, count, stock in nodes:
            self.add_node(Node(name, builders.cards(count, node=name), stock=stock))
        self.restart()

    # What people and other processes do.

    def take_over(self) -> None:
        """The other replica leads, with what it has heard by then; this one follows."""
        follows = self.scheduler
        follows.leads = False
        self.scheduler = self.follower or Scheduler(self.cluster, self.clock, self.settings)
        self.follower = follows
        self.scheduler.lead()

    def restart(self) -> None:
        """A new scheduler process leads; the old one is gone."""
        self.scheduler = Scheduler(self.cluster, self.clock, self.settings)

    def add_node(self, node: Node) -> None:
        raw = builders.node(node.name, labels={WHOLE_CARDS_LABEL: "nvidia"} if node.stock else None)
        self.nodes[node.name] = node
        self.cluster.create("/api/v1/nodes", {"metadata": raw["metadata"], "status": raw["status"]})
        if not any(raw["metadata"]["name"] == node.name for raw in self.cluster.all(DEVICES)):
            self.cluster.create(_DEVICES, self._device(node))
        self.report(node.name)

    def remove_node(self, name: str) -> Node:
        """Its containers are gone with it; the Device goes with the Node."""
        self.cluster.delete(f"/api/v1/nodes/{name}")
        self.cluster.delete(f"{_DEVICES}/{name}")
        node = self.nodes.pop(name)
        node.given.clear()
        node.remnants.clear()
        return node

    def cordon(self, name: str, *, on: bool) -> None:
        self.cluster.patch(f"/api/v1/nodes/{name}", {"spec": {"unschedulable": on or None}})

    def create(self, name: str, gpuid: str, request: str = "0.2", **more: Any) -> Raw:
        """An MtgpuPod."""
        raw = builders.mtgpupod(name, gpuid, request, **more)
        raw["spec"]["terminationGracePeriodSeconds"] = 30
        return self.cluster.create(items_path("default"), {key: raw[key] for key in raw if key != "status"})

    def delete(self, name: str) -> None:
        self.cluster.delete(f"{items_path('default')}/{name}")

    def submit(self, raw: Raw) -> Raw:
        """A Pod."""
        meta = {key: value for key, value in raw["metadata"].items() if key != "uid"}
        namespace = meta.get("namespace", "default")
        return self.cluster.create(f"/api/v1/namespaces/{namespace}/pods", {**raw, "metadata": meta})

    def kill(self, raw: Raw, *, force: bool = False) -> None:
        """Delete a Pod."""
        self.cluster.delete(pod_path(raw), {"gracePeriodSeconds": 0} if force else None)

    def abandon(self, raw: Raw) -> None:
        """Delete the Pod of an MtgpuPod by force, while its containers run on until `stop_remnants`."""
        self.count_as_remnant(raw)
        self.kill(raw, force=True)

    def count_as_remnant(self, raw: Raw) -> None:
        """The node's agent takes this Pod for one that was deleted and still runs, in its next report."""
        uid, node = raw["metadata"]["uid"], self.nodes[raw["spec"]["nodeName"]]
        request, _, memory = mtgpu.read_share(raw["metadata"]["annotations"])
        share = Share("0", None, request, memory)
        node.remnants[uid] = CheckpointEntry(uid, "0", DELETED_POD, (mtgpu.visible_card(raw) or "",), share)

    def stop_remnants(self, node: str) -> None:
        """The node's agent ends them, and reports it."""
        self.nodes[node].remnants.clear()
        self.report(node)

    def end(self, raw: Raw, phase: str) -> None:
        self.cluster.patch(f"{pod_path(raw)}/status", {"status": {"phase": phase}})
        for node in self.nodes.values():
            node.given.pop(raw["metadata"]["uid"], None)

    # What is there.

    def pods(self, node: str = "") -> Iterator[Raw]:
        """Those that have not ended, on this node."""
        for raw in self.cluster.all(PODS):
            if raw["status"]["phase"] in ("Pending", "Running") and node in ("", raw["spec"].get("nodeName")):
                yield raw

    def items(self) -> list[Raw]:
        return self.cluster.all(ITEMS)

    def item(self, name: str) -> Raw:
        return self.cluster.get(f"{items_path('default')}/{name}")

    def pod(self, name: str, namespace: str = "default") -> Raw | None:
        found = self.cluster.storage.get(PODS, namespace, name)
        return found.obj if found else None

    def occupy(self, gpuid: str, node: str = "n1") -> Raw | None:
        return self.pod(mtgpu.occupy_name(node, gpuid), mtgpu.OCCUPY_NAMESPACE)

    # Who does his work.

    def control(self) -> None:
        """The controller's thread does what is due."""
        try:
            self.scheduler.controller.work()
        except Crash:
            self.restart()

    def schedule(self) -> None:
        """kube-scheduler tries each pod that waits."""
        for raw in list(self.pods()):
            node = _wanted(raw)
            if node in self.nodes and not raw["spec"].get("nodeName"):
                self.bind(raw, node)

    def bind(self, raw: Raw, node: str) -> str:
        """Bind the pod to the node. Return why that is impossible, or "" if it is bound."""
        cordoned = self.cluster.get(f"/api/v1/nodes/{node}")["spec"].get("unschedulable")
        if cordoned and not raw["spec"].get("affinity"):
            return "cordoned"
        if sum(map(_whole, self.pods(node))) + _whole(raw) > len(self.nodes[node].cards):
            return "Insufficient nvidia.com/gpu"
        meta, decided = raw["metadata"], self.scheduler.decider
        try:
            found = decided.find(meta["namespace"], meta["name"], meta["uid"])
            assert found is not None
            assert found.gpu_pod is not None
            decision = decided.decide(found.gpu_pod, node)
            if isinstance(decision, Rejection):
                return str(decision)
            self.cluster.bind(raw, node, decision.annotations)
        except (ApiError, RetryLater) as error:
            return str(error)
        return ""

    def run(self, name: str) -> None:
        """Do what the kubelet of this node has to do now."""
        node = self.nodes[name]
        for raw in self.cluster.all(PODS):
            if raw["spec"].get("nodeName") != name:
                continue
            if "deletionTimestamp" in raw["metadata"]:
                if raw["status"]["phase"] == "Running":
                    self.end(raw, "Failed")  # as kubelets do from 1.27 on
                else:
                    self.kill(raw, force=True)
            elif raw["status"]["phase"] == "Pending":
                self.cluster.patch(f"{pod_path(raw)}/status", {"status": {"phase": self._start(node, raw)}})
        there = {raw["metadata"]["uid"] for raw in self.pods(name)}
        node.given = {uid: card for uid, card in node.given.items() if uid in there}

    def _start(self, node: Node, raw: Raw) -> str:
        """Its phase then."""
        if not (node.stock and _whole(raw)):
            return "Running"
        there = {raw["metadata"]["uid"] for raw in self.pods(node.name)}
        taken = {card for uid, card in node.given.items() if uid in there}
        free = [card.uuid for card in node.cards if card.uuid not in taken]
        if not free:
            return "Failed"
        node.given[raw["metadata"]["uid"]] = free[node.takes % len(free)]
        return "Running"

    def report(self, name: str) -> None:
        """The node's agent says what the kubelet gave out, where that has changed."""
        path, wanted = f"{_DEVICES}/{name}", self._device(self.nodes[name])
        said = self.cluster.get(path)["metadata"].get("annotations")
        if said != wanted["metadata"].get("annotations"):
            self.cluster.patch(path, {"metadata": {"annotations": wanted["metadata"]["annotations"]}})

    def _device(self, node: Node) -> Raw:
        raw = write_device(ModelNode(node.name), "", node.cards)
        names = {raw["metadata"]["uid"]: raw["spec"]["containers"][0]["name"] for raw in self.cluster.all(PODS)}
        rows = [CheckpointEntry(uid, names[uid], WHOLE, (card,)) for uid, card in node.given.items() if uid in names]
        text = {CHECKPOINTS: write_entries([*rows, *node.remnants.values()])}
        meta = {"name": raw["metadata"]["name"], "annotations": {**(raw["metadata"].get("annotations") or {}), **text}}
        return {**raw, "metadata": meta}

    def collect(self) -> None:
        """Garbage collection: Pods whose owner is gone, and those on nodes that are gone."""
        owners = {raw["metadata"]["uid"] for raw in self.items()}
        for raw in self.cluster.all(PODS):
            of = {owner["uid"] for owner in raw["metadata"].get("ownerReferences") or ()}
            node = raw["spec"].get("nodeName")
            if node and node not in self.nodes:
                if raw["status"]["phase"] in ("Pending", "Running"):
                    self.cluster.patch(
                        f"{pod_path(raw)}/status", {"status": {"phase": "Failed", "conditions": [_GONE]}}
                    )
                else:
                    self.kill(raw, force=True)
            elif of and not of & owners and "deletionTimestamp" not in raw["metadata"]:
                self.kill(raw)

    def round(self) -> None:
        """Everybody hears of everything and does what he has to do, once."""
        self.scheduler.hear()
        self.control()
        self.scheduler.hear()
        self.schedule()
        for name in self.nodes:
            self.run(name)
            self.report(name)
        self.collect()
        self.scheduler.decider.check_overdue()

    def settle(self, enough: int = 3) -> None:
        """Until nothing happens any more, for so many rounds; what failed is tried again after three at most."""
        quiet = 0
        for _ in range(60):
            before = self.cluster.storage.rv
            self.round()
            self.clock.now += 100
            quiet = quiet + 1 if self.cluster.storage.rv == before else 0
            if quiet == enough:
                return
        raise AssertionError("it does not come to rest")


def items_path(namespace: str) -> str:
    return f"/apis/{mtgpu.API_VERSION}/namespaces/{namespace}/mtgpupods"


def _whole(raw: Raw) -> int:
    """How many whole cards it asks for."""
    amounts = [c.get("resources", {}).get("limits", {}).get(WHOLE, 0) for c in raw["spec"]["containers"]]
    return sum(map(int, amounts))


def _wanted(raw: Raw) -> str:
    """Where kube-scheduler is to put it: by the affinity of an occupy pod, else by a label of the test's."""
    affinity = raw["spec"].get("affinity")
    if affinity:
        terms = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        return str(terms[0]["matchFields"][0]["values"][0])
    return str((raw["metadata"].get("labels") or {}).get("test/node", ""))
