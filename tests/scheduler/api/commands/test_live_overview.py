"""The view of the cluster from the scheduler's cache is the one from lists of the API server, object for object."""

import gzip
import json
import random
from collections.abc import Iterable
from typing import Any

import pytest

from mgpu.model.device_object import write_device
from mgpu.model.pods import Node
from mgpu.presentation.answers import ClusterAnswer, decode_cluster
from mgpu.presentation.claim_views import read_claims
from mgpu.presentation.overview import Overview, make_overview
from mgpu.settings import load_settings
from mgpu.version import AGENT_ANNOTATION, AgentReport, IsolationReport, write_agent_report
from scheduler.api.commands.live_overview import EVERY_SECONDS, LiveOverview
from scheduler.cluster.cache import ClusterCache
from scheduler.decisions.filter import Filter
from scheduler.decisions.gang_outlook import GangOutlooks
from tests import builders as b
from tests.agent_pods import agent
from tests.claim_objects import CLASS, claim
from tests.clock import Clock
from tests.scheduler.fake import SETTINGS, Replica, cluster

Raw = dict[str, Any]
SLICES = load_settings("dialects: {slices: {enabled: true}}")
INDEX, ASSUMED = "vke.volcengine.com/gpu-index-container-c", "vke.volcengine.com/assumed"


def record(card: object) -> dict[str, str]:
    return {INDEX: str(card), ASSUMED: "true"}


def device(node: str, count: int = 2) -> Raw:
    return write_device(Node(node), "", b.cards(count, node=node))


def ran(raw: Raw) -> Raw:
    statuses = [{"name": c["name"], "started": True, "state": {"running": {}}} for c in raw["spec"]["containers"]]
    return {**raw, "status": {**raw["status"], "containerStatuses": statuses}}


def gated(raw: Raw) -> Raw:
    return {**raw, "spec": {**raw["spec"], "schedulingGates": [{"name": "team/quota"}]}}


class Objects:
    """The objects of a cluster, read in both ways."""

    def __init__(
        self,
        nodes: Iterable[Raw] = (),
        devices: Iterable[Raw] = (),
        pods: Iterable[Raw] = (),
        configmaps: Iterable[Raw] = (),
        mtgpupods: Iterable[Raw] = (),
        settings: Any = SETTINGS,
        claims: Iterable[Raw] = (),
    ) -> None:
        self.lists = [list(rows) for rows in (nodes, devices, pods, configmaps, mtgpupods)]
        self.claims = list(claims)
        self.settings = settings
        self.state = ClusterCache(settings)
        nodes, devices, pods, configmaps, mtgpupods = self.lists
        for rows, take in (
            (nodes, self.state.node_changed),
            (devices, self.state.device_changed),
            (configmaps, self.state.configmap_changed),
            (mtgpupods, self.state.mtgpupods.mtgpupod_changed),
            (pods, self.state.pod_changed),
            ([CLASS], self.state.claims.class_changed),
            (self.claims, self.state.claims.claim_changed),
        ):
            for raw in rows:
                raw["metadata"].setdefault("resourceVersion", "1")
                take(raw)

    def listed(self) -> Overview:
        nodes, devices, pods, configmaps, mtgpupods = self.lists
        claims = read_claims(self.claims, [CLASS])
        return make_overview(nodes, devices, pods, self.settings, configmaps, mtgpupods, claims)

    def live(self) -> Overview:
        return decoded(live_of(self.state, self.settings)).overview


def live_of(state: ClusterCache, settings: Any = SETTINGS, clock: Clock | None = None) -> LiveOverview:
    gangs = GangOutlooks(state, Filter(state, settings), settings)
    return LiveOverview(state, gangs, lambda: "", clock or Clock(), pace=lambda: None)


def decoded(live: LiveOverview) -> ClusterAnswer:
    return decode_cluster(gzip.decompress(live.answer().body))


def pods_in_every_state() -> list[Raw]:
    half = b.share("half", 50, node="n1", phase="Running", annotations=record("GPU-n1-0"))
    init = (b.container("i", 80, 2048),)
    return [
        ran(b.share("runs", 30, node="n1", phase="Running", annotations=record(1) | {"mgpu.io/spread-group": "web"})),
        ran(half),
        ran(b.pod("init", b.container("c", 10, 1024), init=init, node="n3", phase="Running", annotations=record(0))),
        b.share("unreadable", node="n2", annotations={INDEX: "x"}),
        ran(b.share("unreadable-and-runs", node="n2", phase="Running", annotations={INDEX: "x"})),
        b.share("absent", node="n2", annotations=record(9)),
        b.share("undecided", node="n2"),
        ran(b.share("unrecorded", node="n2", phase="Running")),
        b.share("ended", node="n1", annotations=record(0), phase="Succeeded"),
        b.share("waits", annotations={"mgpu.io/card-models": "H100"}),
        gated(b.share("gated")),
        b.pod("malformed", b.container("c", 120)),
        b.share("elsewhere", node="gone", annotations=record(0)),
        b.pod("plain", {"name": "c", "image": "x"}, node="n1"),
        agent("n1", waiting="CrashLoopBackOff", ready=False),
        agent("n2"),
    ]


def test_pods_in_every_state_are_shown_as_from_lists() -> None:
    nodes = [b.node(name) for name in ("n1", "n2", "n3", "bare")]
    report = AgentReport("1", None, 2, "mgpu", isolation=IsolationReport("driver"))
    nodes[0]["metadata"]["annotations"][AGENT_ANNOTATION] = write_agent_report(report)
    devices = [device("n1"), device("n2"), device("n3", 8), device("no-node")]
    found = Objects(nodes, devices, pods_in_every_state())
    assert found.live() == found.listed()
    assert [node.isolation for node in found.live().nodes] == ["", "driver", "", ""]
    assert set(found.live().unclear) >= {"Pod default/unreadable", "Pod default/absent", "Pod default/undecided"}


def test_claims_are_shown_as_from_lists() -> None:
    claims = [
        claim("one", 0),
        claim("wide", 0, 1, annotations={"mgpu.io/spread-group": "web"}),
        claim("waits", of_pod="uid-p", annotations={"mgpu.io/card-models": "H100"}),
        claim("unused"),
        claim("lost", 9),
        claim("nic", 0, driver="nics.example.com"),
        claim("odd", 1, node="n2", annotations={"mgpu.io/card-policy": "unknown"}),
    ]
    nodes = [b.node(name) for name in ("n1", "n2")]
    found = Objects(nodes, [device("n1"), device("n2")], pods_in_every_state(), claims=claims)
    assert found.live() == found.listed()
    assert {"claim ml/one", "claim ml/wide"} <= {use.pod for use in found.live().nodes[0].cards[0].uses}
    assert "claim ml/waits" in found.live().pending
    assert "ResourceClaim ml/lost" in found.live().unclear


def test_a_node_that_lists_all_pods_with_cards_shows_bare_pods_as_from_lists() -> None:
    listing = write_device(Node("n1"), "", b.cards(2))
    entries: Raw = {"PodDeviceEntries": [], "RegisteredDevices": {}}
    listing["metadata"].setdefault("annotations", {})["scheduling.koordinator.sh/devices-checkpoints"] = json.dumps(
        entries
    )
    pods = [ran(b.share("bare", node="n1", phase="Running")), b.share("starts", node="n1")]
    found = Objects([b.node("n1")], [listing], pods)
    assert found.live() == found.listed()


def test_unreadable_devices_and_lists_are_named_as_from_lists() -> None:
    broken = device("n1")
    broken["spec"]["devices"][0]["resources"] = {"koordinator.sh/gpu-core": "many"}
    found = Objects([b.node("n1")], [broken])
    assert found.live() == found.listed()
    assert list(found.live().unclear) == ["Device n1"]


def test_mtgpupods_are_shown_as_from_lists() -> None:
    bound = b.mtgpupod("bound", node="n1", bound="GPU-n1-0", phase="Running")
    waits = b.mtgpupod("waits", gpuid="other", node="n1")
    lost = b.mtgpupod("lost", gpuid="lost", node="n1", bound="GPU-n1-9", phase="Running")
    occupies = b.occupy_pod(card=0, phase="Running")
    found = Objects([b.node("n1")], [device("n1")], [occupies], mtgpupods=[bound, waits, lost])
    assert found.live() == found.listed()
    assert [view.pod.name for view in found.live().mtgpupods] == ["bound", "lost", "waits"]


@pytest.mark.parametrize("mode", ["mig", "mps"])
def test_partitioned_nodes_are_shown_as_from_lists(mode: str) -> None:
    slices = {
        "cards": {"0": [{"profile": "1g.10gb", "start": 0}] if mode == "mig" else [{"profile": "10gb", "start": 0}]}
    }
    annotations = {"mgpu.io/slices": json.dumps(slices)}
    node = b.node("n1", labels={"gpu.partitioning": mode}, **annotations)
    found = Objects([node], [device("n1")], settings=SLICES)
    assert found.live() == found.listed()


def test_random_clusters_are_shown_as_from_lists() -> None:
    for seed in range(30):
        pick = random.Random(seed)
        names = [f"n{i}" for i in range(4)]
        pods = [random_pod(pick, f"p{i}", names) for i in range(24)]
        found = Objects(map(b.node, names), [device(name, pick.choice([1, 2, 8])) for name in names], pods)
        assert found.live() == found.listed(), seed


def random_pod(pick: random.Random, name: str, nodes: list[str]) -> Raw:
    node = pick.choice([*nodes, ""])
    annotations = pick.choice([{}, record(pick.randrange(9)), record("x"), {"mgpu.io/same-card-group": "g"}])
    if pick.random() < 0.3:
        annotations = {**annotations, "mgpu.io/spread-group": pick.choice("hw")}
    phase = pick.choice(["Running", "Running", "Succeeded"]) if node else "Pending"
    containers = [
        b.container(one, pick.choice([10, 50] if node else [10, 120]), 1024) for one in pick.choice(["c", "cd"])
    ]
    raw = b.pod(name, *containers, node=node, phase=phase, annotations=annotations)
    return ran(raw) if phase == "Running" and pick.random() < 0.7 else raw


def test_a_reservation_is_shown_before_the_pod_is_bound() -> None:
    replica = Replica(cluster(("n1", 2)))
    replica.api.put("pods", b.share("p"))
    replica.deliver()
    replica.decider.decide(replica.state.gpu_pod("uid-p"), "n1")  # type: ignore[arg-type]
    (node,) = decoded(live_of(replica.state)).overview.nodes
    assert [use.pod for card in node.cards for use in card.uses] == ["default/p"]


def test_an_answer_is_shared_for_a_second_and_then_has_only_what_is_still_there() -> None:
    clock = Clock()
    found = Objects([b.node("n1"), b.node("n2")], [device("n1")])
    live = live_of(found.state, clock=clock)
    first = live.answer()
    found.state.node_gone(b.node("n2"))
    found.state.pod_changed({**b.share("p"), "metadata": {**b.share("p")["metadata"], "resourceVersion": "2"}})
    assert live.answer() is first
    clock.now += EVERY_SECONDS
    assert live.answer().tag != first.tag
    overview = decoded(live).overview
    assert ([node.name for node in overview.nodes], overview.pending) == (["n1"], ("default/p",))


def test_an_unchanged_cluster_keeps_its_tag() -> None:
    clock = Clock()
    found = Objects([b.node("n1")], [device("n1")], [b.share("p")])
    live = live_of(found.state, clock=clock)
    first = live.answer().tag
    clock.now += EVERY_SECONDS
    assert live.answer().tag == first
