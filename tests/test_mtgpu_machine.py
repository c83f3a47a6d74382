"""MtgpuPods whatever comes between any two steps: a GPUID never spans two cards, no pod is ever moved, no card serves
them and anybody else at once, nothing is left behind, and those that wait are served in order.

All is checked on the API server's objects and on what kubelets gave out (tests/mtgpu_rig.py), not on what the scheduler
thinks. Watches lag; the scheduler dies before or after any call; occupy pods are deleted, fail, come back elsewhere.
"""

from collections.abc import Iterator
from functools import lru_cache

import orjson
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mgpu.dialects import mtgpu
from mgpu.dialects.mtgpu import MtgpuPod
from mgpu.model.pods import read_pod
from scheduler.cluster.gpu_pods import read_gpu_pod, recorded_shares
from tests import builders
from tests.examples import examples
from tests.mtgpu_cluster import Raw
from tests.mtgpu_rig import DEVICES, GIB, ITEMS, PODS, SETTINGS, WHOLE, Node, Rig

NODES = (("n1", 2, False), ("s1", 2, True))
MEMORY = 80 * GIB
names = st.sampled_from("abcdef")
gpuids = st.sampled_from(["x", "x", "y", "z"])
nodes = st.sampled_from([name for name, *_ in NODES])
requests = st.sampled_from(["0.1", "0.2", "0.3", "0.5", "1", "0"])
memories = st.sampled_from([GIB, 20 * GIB, 50 * GIB, MEMORY, MEMORY + 1])
which = st.integers(0, 11)
few = st.integers(1, 3)
kinds = st.sampled_from(["mgpu", "gpushare", "koordinator", "whole"])


class Machine(RuleBasedStateMachine):
    """cards: by the uid of an MtgpuPod the card that it was given, for ever. queue: who waited for a GPUID when all had
    come to rest; served: who did not. shaken: nodes of NVIDIA's plugin where somebody took an occupy pod away: who gets
    its card next is that plugin's choice.
    """

    @initialize()
    def begin(self) -> None:
        self.rig = Rig(*NODES)
        self.cards: dict[str, str] = {}
        self.queue: list[MtgpuPod] = []
        self.served: set[str] = set()
        self.shaken: set[str] = set()
        self.away: dict[str, Node] = {}
        self.created = 0

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.all_comes_to_rest()

    # MtgpuPods.

    @rule(name=names, gpuid=gpuids, node=nodes, request=requests, memory=memories)
    def an_mtgpupod_comes(self, name: str, gpuid: str, node: str, request: str, memory: int) -> None:
        """Of a name that may have been there before."""
        if not any(raw["metadata"]["name"] == name for raw in self.rig.items()):
            self.rig.create(name, gpuid, request, node=node, memory=memory)

    @rule(gpuid=gpuids, node=nodes)
    def some_of_one_gpuid_come(self, gpuid: str, node: str) -> None:
        for name in "abc":
            self.an_mtgpupod_comes(name, gpuid, node, "0.5", GIB)

    @rule(gpuid=gpuids, node=nodes)
    def a_small_one_comes_behind_a_large_one(self, gpuid: str, node: str) -> None:
        for name, request in (("a", "0.5"), ("b", "1")):
            self.an_mtgpupod_comes(name, gpuid, node, request, GIB)
        self.all_comes_to_rest()
        self.an_mtgpupod_comes("f", gpuid, node, "0.1", GIB)

    @rule(gpuid=gpuids, node=nodes, left=st.integers(1, 6), takes=st.integers(-1, 1))
    def some_get_their_cards_unheard(self, gpuid: str, node: str, left: int, takes: int) -> None:
        """left: as many calls as go well; takes: the card with which the occupy pod comes back, -1: it stays."""
        for name in "de":
            self.an_mtgpupod_comes(name, gpuid, node, "0.3", GIB)
        self.rig.round()
        self.rig.scheduler.hear()
        self.rig.scheduler.wire.fail(left)
        self.rig.control()
        self.rig.scheduler.wire.fail(None)
        occupy = self.rig.occupy(gpuid, node)
        if occupy and takes >= 0:
            self.comes_back(occupy, takes, heard=False)

    @rule(which=which, heard=st.booleans())
    def one_is_deleted(self, which: int, heard: bool) -> None:
        """heard: the scheduler hears of that, and of nothing else."""
        for raw in self.some(self.rig.items(), which):
            self.rig.delete(raw["metadata"]["name"])
            if heard:
                self.rig.scheduler.hear(ITEMS)
                self.rig.control()

    @rule(which=which, phase=st.sampled_from(["Succeeded", "Failed"]))
    def the_pod_of_one_ends(self, which: int, phase: str) -> None:
        for raw in self.some([raw for raw in self.own() if raw["status"]["phase"] == "Running"], which):
            self.rig.end(raw, phase)

    @rule(which=which, force=st.booleans())
    def somebody_deletes_the_pod_of_one(self, which: int, force: bool) -> None:
        for raw in self.some(self.own(), which):
            self.rig.kill(raw, force=force)

    @rule(name=names)
    def a_foreign_pod_has_the_name(self, name: str) -> None:
        if self.rig.pod(name) is None:
            self.rig.submit(builders.pod(name, {"name": "c", "image": "x"}))

    @rule(which=which)
    def a_foreign_pod_goes(self, which: int) -> None:
        foreign = [raw for raw in self.rig.cluster.all(PODS) if _is_foreign(raw)]
        for raw in self.some(foreign, which):
            self.rig.kill(raw, force=True)

    # Occupy pods.

    @rule(which=which, force=st.booleans(), takes=st.integers(0, 1))
    def an_occupy_pod_is_deleted(self, which: int, force: bool, takes: int) -> None:
        for raw in self.some(self.occupies(), which):
            self.shake(raw, takes)
            self.rig.kill(raw, force=force)

    @rule(which=which, takes=st.integers(0, 1))
    def an_occupy_pod_fails(self, which: int, takes: int) -> None:
        for raw in self.some([raw for raw in self.occupies() if raw["status"]["phase"] == "Running"], which):
            self.shake(raw, takes)
            self.rig.end(raw, "Failed")

    @rule(which=which, takes=st.integers(0, 1), heard=st.booleans())
    def an_occupy_pod_comes_back(self, which: int, takes: int, heard: bool) -> None:
        for raw in self.some(self.occupies(), which):
            self.comes_back(raw, takes, heard=heard)

    def comes_back(self, occupy: Raw, takes: int, *, heard: bool) -> None:
        """heard: whether the scheduler hears of MtgpuPods meanwhile."""
        self.shake(occupy, takes)
        self.rig.kill(occupy, force=True)
        for _ in range(3):
            for resource in ("nodes", DEVICES, PODS, *([ITEMS] if heard else [])):
                self.rig.scheduler.hear(resource)
            self.rig.control()
            self.rig.schedule()
            for name in self.rig.nodes:
                self.rig.run(name)
                self.rig.report(name)

    @rule(gpuid=gpuids, node=nodes)
    def a_foreign_pod_has_the_name_of_an_occupy_pod(self, gpuid: str, node: str) -> None:
        if self.rig.occupy(gpuid, node) is None:
            name = mtgpu.occupy_name(node, gpuid)
            self.rig.submit(builders.pod(name, {"name": "c", "image": "x"}, namespace="kube-system"))

    # Others' pods.

    @rule(kind=kinds, node=nodes)
    def a_pool_pod_comes(self, kind: str, node: str) -> None:
        self.created += 1
        raw = _pool(kind, f"{kind}-{self.created}")
        self.rig.submit({**raw, "metadata": {**raw["metadata"], "labels": {"test/node": node}}})
        self.rig.schedule()

    @rule(which=which)
    def a_pool_pod_goes(self, which: int) -> None:
        for raw in self.some([raw for raw in self.rig.cluster.all(PODS) if _is_pool(raw)], which):
            self.rig.kill(raw, force=True)

    # Nodes.

    @rule(node=nodes)
    def a_node_goes(self, node: str) -> None:
        if node in self.rig.nodes:
            self.away[node] = self.rig.remove_node(node)
            self.shaken |= {node} if self.away[node].stock else set()

    @rule(node=nodes)
    def a_node_comes_back(self, node: str) -> None:
        if node in self.away:
            self.rig.add_node(self.away.pop(node))

    @rule(node=nodes, on=st.booleans())
    def a_node_is_cordoned(self, node: str, on: bool) -> None:
        if node in self.rig.nodes:
            self.rig.cordon(node, on=on)

    # Who does his work, and how far.

    @rule(resource=st.sampled_from([ITEMS, PODS, DEVICES, "nodes", ""]), count=few)
    def the_scheduler_hears(self, resource: str, count: int) -> None:
        self.rig.scheduler.hear(resource, count)

    @rule()
    def the_controller_works(self) -> None:
        self.rig.control()

    @rule(left=st.integers(0, 5), crash=st.booleans(), after=st.booleans(), heard=st.booleans())
    def the_controller_fails(self, left: int, crash: bool, after: bool, heard: bool) -> None:
        if heard:
            self.rig.scheduler.hear()
        self.rig.scheduler.wire.fail(left, crash=crash, after=after)
        self.rig.control()
        self.rig.scheduler.wire.fail(None)

    @rule()
    def another_replica_leads(self) -> None:
        self.rig.take_over()

    @rule(left=st.integers(0, 4), heard=st.booleans(), back=st.booleans(), rounds=st.integers(0, 2))
    def another_one_leads_while_a_call_is_on_its_way(self, left: int, heard: bool, back: bool, rounds: int) -> None:
        """back: and then this one again."""
        if heard:
            self.rig.scheduler.hear()
        calls = iter(range(left + 1))

        def call(*asked: str) -> None:  # noqa: ARG001
            if next(calls, None) == left:
                self.rig.take_over()
                for _ in range(rounds):
                    self.rig.round()
                if back:
                    self.rig.take_over()

        self.rig.cluster.refuse = call
        self.rig.control()
        self.rig.cluster.refuse = lambda *_: None

    @rule()
    def the_scheduler_is_replaced(self) -> None:
        self.rig.restart()

    @rule()
    def pods_are_scheduled(self) -> None:
        self.rig.schedule()

    @rule(node=nodes, told=st.booleans())
    def a_kubelet_works(self, node: str, told: bool) -> None:
        if node in self.rig.nodes:
            self.rig.run(node)
            if told:
                self.rig.report(node)

    @rule()
    def garbage_is_collected(self) -> None:
        self.rig.collect()

    @rule()
    def time_passes(self) -> None:
        self.rig.clock.now += 100

    @rule(rounds=few)
    def all_do_their_work(self, rounds: int) -> None:
        for _ in range(rounds):
            self.rig.round()
            self.rig.clock.now += 100

    # What must hold at any time.

    @invariant()
    def a_gpuid_has_one_card_and_nobody_is_moved(self) -> None:
        found: dict[tuple[str, str], set[str | None]] = {}
        for pod in self.mtgpupods():
            if pod.card_uuid:
                assert self.cards.setdefault(pod.uid, pod.card_uuid) == pod.card_uuid, "it was moved"
            if self.holds(pod):
                found.setdefault((pod.node, pod.gpuid), set()).add(pod.card_uuid)
        assert all(len(cards) == 1 for cards in found.values()), f"a GPUID spans cards: {found}"

    @invariant()
    def a_pod_has_its_mtgpupod(self) -> None:
        there = {raw["metadata"]["uid"] for raw in self.rig.items()}
        for raw in self.own():
            assert raw["metadata"]["ownerReferences"][0]["uid"] in there, "a Pod without its MtgpuPod"

    @invariant()
    def nothing_is_over_the_card(self) -> None:
        held: dict[str | None, list[MtgpuPod]] = {}
        for pod in filter(self.holds, self.mtgpupods()):
            held.setdefault(pod.card_uuid, []).append(pod)
        for pods in held.values():
            assert sum(pod.request for pod in pods) <= 1000
            assert sum(pod.memory for pod in pods) <= MEMORY

    @invariant()
    def a_card_serves_one_gpuid_or_others(self) -> None:
        for name, node in {**self.rig.nodes, **self.away}.items():
            if name in self.shaken:
                continue
            users: dict[str | None, set[str]] = {}
            for pod in filter(self.holds, self.mtgpupods()):
                if pod.node == name:
                    users.setdefault(pod.card_uuid, set()).add(pod.gpuid)
            for raw in self.own():
                if raw["spec"].get("nodeName") == name and raw["status"]["phase"] in ("Pending", "Running"):
                    users.setdefault(_card_of(raw), set()).add(raw["metadata"]["annotations"][mtgpu.GPUID])
            for raw in self.rig.pods(name):
                occupied = _occupied(raw)
                if occupied or _is_pool(raw):
                    for card in self.cards_of(raw, node):
                        users.setdefault(card, set()).add(occupied or "somebody else")
            for uuid, who in users.items():
                assert len(who) == 1, f"card {uuid} serves {who}"

    @invariant()
    def those_that_waited_are_served_in_order(self) -> None:
        """An MtgpuPod that came later gets no share of a GPUID before one that already waited at the last rest."""
        now = {pod.uid: pod for pod in self.mtgpupods()}
        self.queue = [pod for pod in self.queue if pod.uid in now and not now[pod.uid].deleting]
        self.queue = [pod for pod in self.queue if not (now[pod.uid].card_uuid or self.is_barred(pod))]
        for pod in now.values():
            if pod.card_uuid and pod.uid not in self.served:
                for first in self.queue:
                    same = (first.node, first.gpuid) == (pod.node, pod.gpuid)
                    assert not (same and first.queue_key < pod.queue_key), f"{pod.key} was served before {first.key}"

    # What must hold once all have come to rest.

    @rule()
    def all_comes_to_rest(self) -> None:
        self.rig.settle()
        self.nothing_is_left_behind()
        self.whoever_leads_next_sees_the_same()
        self.who_waits_has_a_reason()

    def nothing_is_left_behind(self) -> None:
        items = {raw["metadata"]["uid"]: raw for raw in self.rig.items()}
        pods = {pod.uid: pod for pod in self.mtgpupods()}
        for uid, raw in items.items():
            assert "deletionTimestamp" not in raw["metadata"], f"{pods[uid].key} is stuck on its finalizer"
        needed = {(pod.node, pod.gpuid) for pod in pods.values() if self.holds(pod) or _is_admitted(items[pod.uid])}
        for raw in self.occupies():
            occupied = mtgpu.occupy_target(read_pod(raw))
            assert occupied in needed, f"nobody needs {raw['metadata']['name']}"
            assert occupied[0] in self.rig.nodes

    def whoever_leads_next_sees_the_same(self) -> None:
        before, held = self.rig.cluster.storage.rv, self.rig.scheduler.state.holdings()
        self.rig.restart()
        self.rig.control()
        assert self.rig.cluster.storage.rv == before, "a new leader writes"
        assert self.rig.scheduler.state.holdings() == held

    def who_waits_has_a_reason(self) -> None:
        """And its Pod runs once it is bound."""
        pods = sorted(self.mtgpupods(), key=lambda pod: pod.queue_key)
        self.queue, self.served = [], {pod.uid for pod in pods if pod.card_uuid}
        passed: set[tuple[str, str]] = set()
        for pod in pods:
            node = self.rig.nodes.get(pod.node)
            if node is None or pod.ended or pod.memory > MEMORY:
                continue
            barred = self.is_barred(pod)
            if pod.card_uuid:
                if not barred and pod.node not in self.shaken:
                    own = self.rig.pod(pod.name)
                    assert own is not None, f"{pod.key} has no Pod"
                    assert _card_of(own) == pod.card_uuid
                continue
            assert barred or pod.node in self.shaken or (pod.node, pod.gpuid) in passed or not self.is_free(pod, node)
            if not barred:
                self.queue.append(pod)
                passed.add((pod.node, pod.gpuid))

    def is_barred(self, pod: MtgpuPod) -> bool:
        """Return whether its node takes no pods, or a foreign pod has a name that it needs."""
        if pod.node not in self.rig.nodes or self.rig.cluster.get(f"/api/v1/nodes/{pod.node}")["spec"].get(_CORDON):
            return True
        own, occupy = self.rig.pod(pod.name), self.rig.occupy(pod.gpuid, pod.node)
        return (own is not None and _is_foreign(own)) or (occupy is not None and _is_foreign(occupy))

    def is_free(self, pod: MtgpuPod, node: Node) -> bool:
        """Return whether it fits on its GPUID's card, or, if the GPUID has none, whether a card is free."""
        its = [other for other in self.mtgpupods() if (other.node, other.gpuid) == (pod.node, pod.gpuid)]
        its = [other for other in its if self.holds(other)]
        if its:
            left = 1000 - sum(other.request for other in its), MEMORY - sum(other.memory for other in its)
            return pod.request <= left[0] and pod.memory <= left[1]
        taken = {other.card_uuid for other in self.mtgpupods() if self.holds(other)}
        theirs = {card for raw in self.rig.pods(pod.node) for card in self.cards_of(raw, node)}
        if node.stock and any(_is_pool(raw) and not _whole(raw) for raw in self.rig.pods(pod.node)):
            return False
        return any(card.uuid not in taken | theirs for card in node.cards)

    # What there is.

    def some(self, found: list[Raw], which: int) -> list[Raw]:
        return [found[which % len(found)]] if found else []

    def shake(self, raw: Raw, takes: int) -> None:
        """takes: which of the free cards NVIDIA's plugin gives next."""
        name = raw["spec"].get("nodeName") or ""
        if name in self.rig.nodes and self.rig.nodes[name].stock:
            self.shaken.add(name)
            self.rig.nodes[name].takes = takes

    def mtgpupods(self) -> list[MtgpuPod]:
        return [_mtgpupod(orjson.dumps(raw)) for raw in self.rig.items()]

    def holds(self, pod: MtgpuPod) -> bool:
        own = self.rig.pod(pod.name)
        lives = own is not None and own["metadata"]["uid"] == pod.pod_uid and own["status"]["phase"] not in _ENDED
        return bool(pod.card_uuid) and (not pod.ended or lives)

    def own(self) -> list[Raw]:
        return [raw for raw in self.rig.cluster.all(PODS) if raw["metadata"].get("ownerReferences")]

    def occupies(self) -> list[Raw]:
        return [raw for raw in self.rig.cluster.all(PODS) if _occupied(raw)]

    def cards_of(self, raw: Raw, node: Node) -> Iterator[str]:
        """Those that the pod of somebody else was given, or an occupy pod."""
        given = node.given.get(raw["metadata"]["uid"])
        if given:
            yield given
        known = read_gpu_pod(raw, SETTINGS)
        for share in (recorded_shares(known) or ()) if known else ():
            yield from (card.uuid for card in node.cards if share.is_on(card))


_CORDON = "unschedulable"
_ENDED = ("Succeeded", "Failed")


@lru_cache(maxsize=1024)
def _mtgpupod(text: bytes) -> MtgpuPod:
    """All invariants ask after each step, so equal ones are read once."""
    return mtgpu.read_mtgpupod(orjson.loads(text))


def _occupied(raw: Raw) -> str:
    return _occupied_gpuid(orjson.dumps(raw))


@lru_cache(maxsize=1024)
def _occupied_gpuid(text: bytes) -> str:
    occupied = mtgpu.occupy_target(read_pod(orjson.loads(text)))
    return occupied[1] if occupied else ""


def _whole(raw: Raw) -> bool:
    return WHOLE in raw["spec"]["containers"][0].get("resources", {}).get("limits", {})


def _is_pool(raw: Raw) -> bool:
    return "test/node" in (raw["metadata"].get("labels") or {})


def _is_foreign(raw: Raw) -> bool:
    return not (raw["metadata"].get("ownerReferences") or _occupied(raw) or _is_pool(raw))


def _is_admitted(raw: Raw) -> bool:
    rows = (raw.get("status") or {}).get("conditions") or ()
    return any(row["type"] == "Bound" and row["reason"] == "Occupying" for row in rows)


def _card_of(own: Raw) -> str:
    rows = own["spec"]["containers"][0]["env"]
    return str(next(row["value"] for row in rows if row["name"] == mtgpu.VISIBLE))


def _pool(kind: str, name: str) -> Raw:
    if kind == "mgpu":
        return builders.share(name, 30)
    amounts = {"gpushare": {"aliyun.com/gpu-mem": "8"}, "koordinator": {"koordinator.sh/gpu": "50"}}
    asked = amounts.get(kind, {WHOLE: "1"})
    return builders.pod(name, {"name": "c", "image": "x", "resources": {"requests": asked, "limits": asked}})


TestMachine = Machine.TestCase
TestMachine.settings = examples(20, steps=30)
