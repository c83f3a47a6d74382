"""Whatever happens in whatever order: no card over its size by mgpu's decisions, no group on two cards that shares
one, nothing reserved for ever.
"""

import contextlib
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, ClassVar

import orjson
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mgpu.dialects import is_placement_annotation
from mgpu.dialects.record_verification import UNSEALED, RecordVerifier
from mgpu.kube import ApiError
from mgpu.model.device_object import read_device, write_device
from mgpu.model.errors import BadObject, RetryLater
from mgpu.model.gpu_requests import Placement, peak
from mgpu.model.pods import Node, read_pod
from mgpu.model.record_seals import SEAL, Keys, Signer, Subject
from mgpu.serving.review import BadRequest
from scheduler.api.extender import Extender
from scheduler.api.volcano import VolcanoExtender
from scheduler.cluster.gpu_pods import read_gpu_pod, recorded_shares
from scheduler.engine.node_assessment import assess
from tests import builders as b
from tests.clock import Clock
from tests.examples import examples
from tests.scheduler.fake import SETTINGS, Replica, admitted, cluster, reader

INDEX = "vke.volcengine.com/gpu-index-container-"
NODES = {"n1": 2, "n2": 1}
names = st.sampled_from(["p", "q", "r", "s"])
nodes = st.sampled_from(sorted(NODES))
shapes = st.sampled_from([[20], [60], [60], [100], [30, 50], [60, 60], [200]])
fates = st.sampled_from(["lands", "lands", "refused", "dry run", "outage"])
kinds = st.sampled_from(["nodes", "devices", "pods", "pods", "pods"])
SAME, SPREAD = "mgpu.io/same-card-group", "mgpu.io/spread-group"
constraints = st.sampled_from([{}, {}, {SAME: "pair"}, {SAME: "pair"}, {SAME: "other"}, {SPREAD: "web"}])
Wished = dict[str, str]


def shape(cores: list[int]) -> list[dict[str, Any]]:
    made = [b.container(f"c{i}", core, None if core >= 100 else 1024) for i, core in enumerate(cores)]
    for container in made:
        container["resources"]["requests"]["cpu"] = "1"
    return made


class Cluster(RuleBasedStateMachine):
    """The API server is the truth; two replicas see it late, one of them decides."""

    records = UNSEALED

    def replica(self) -> Replica:
        return Replica(self.api, self.clock, records=self.records)

    @initialize()
    def begin(self) -> None:
        self.clock = Clock()
        self.known, self.steps = reader(self.records), 0
        self.api = cluster(*NODES.items())
        self.client: Any = self.api
        self.cards = {name: read_device(raw) for name, raw in self.api.devices.items()}
        self.created = 0
        self.replicas = [self.replica(), self.replica()]
        self.lead(0)

    def lead(self, which: int) -> None:
        """Make a replica the leader, which decides only after a new list, as in `Process._catch_up`."""
        for replica in self.replicas:
            replica.leading = False
        self.leader = self.replicas[which]
        self.leader.deliver()
        self.leader.leading = True
        for uid in self.leader.state.undecided_pods():
            self.leader.late.add(uid)
        self.api.admit = admitted(self.leader)

    def pod(
        self, name: str, cores: list[int], wished: Wished, node: str = "", *, again: bool = False
    ) -> dict[str, Any]:
        """Return the pod of this name. Create it if there is none, or if it is bound and not wanted `again`."""
        wished = {} if SAME in wished and cores == [200] else wished  # which admission denies
        found = self.api.pods.get(("default", name))
        if found and found["spec"].get("nodeName") and not again:
            self.api.remove("pods", name)
            found = None
        if not found:
            self.created += 1
            uid = f"{name}-{self.created}"
            self.api.put("pods", b.pod(name, *shape(cores), uid=uid, node=node, annotations=dict(wished)))
        return self.api.pod(name)

    @rule(name=names, cores=shapes, wished=constraints, node=nodes)
    def somebody_creates_a_pod_with_a_node(self, name: str, cores: list[int], wished: Wished, node: str) -> None:
        self.pod(name, cores, wished, node)

    @rule(name=names, cores=shapes, wished=constraints, node=nodes, fate=fates, again=st.booleans())
    def bind(self, name: str, cores: list[int], wished: Wished, node: str, fate: str, again: bool) -> None:
        """Any scheduler binds the pod. It may bind the pod again, on any node, if it got no answer."""
        self.pod(name, cores, wished, again=again)
        admit = self.api.admit
        self.api.refuse_bindings = fate == "refused"
        if fate == "outage":
            self.api.admit = None
        with contextlib.suppress(ApiError, RetryLater):
            self.api.bind(name, node, dry_run=fate == "dry run")
        self.api.refuse_bindings, self.api.admit = False, admit

    @rule(name=names, cores=shapes, wished=constraints, node=nodes, again=st.booleans())
    def the_extender_binds(self, name: str, cores: list[int], wished: Wished, node: str, again: bool) -> None:
        uid = self.pod(name, cores, wished, again=again)["metadata"]["uid"]
        body = {"PodName": name, "PodNamespace": "default", "PodUID": uid, "Node": node}
        leader: Any = self.leader
        extender = Extender(leader)
        with contextlib.suppress(RetryLater):
            extender.bind(orjson.dumps(body))

    @rule(name=names, cores=shapes, wished=constraints, node=nodes, verb=st.sampled_from(["allocate", "deallocate"]))
    def volcano_places_or_gives_up(self, name: str, cores: list[int], wished: Wished, node: str, verb: str) -> None:
        pod = self.pod(name, cores, wished, again=True)
        task = {"NodeName": node, "Status": 2 if verb == "allocate" else 1, "Pod": pod}
        leader: Any = self.leader
        with contextlib.suppress(RetryLater, BadRequest):
            getattr(VolcanoExtender(leader), verb)(orjson.dumps({"task": task}))

    @rule(name=names, what=st.sampled_from(["deleted", "ended", "Pending", "garbled"]))
    def a_pod_changes(self, name: str, what: str) -> None:
        if ("default", name) not in self.api.pods:
            return
        raw = self.api.pod(name)
        if what == "deleted":
            self.api.remove("pods", name)
        elif what == "ended":
            self.api.edit_pod(name, lambda raw: raw["status"].update(phase="Succeeded"))
        elif what == "Pending" and raw["status"]["phase"] != "Succeeded":  # the kubelet's, over whatever stood there
            self.api.edit_pod(name, lambda raw: raw["status"].update(phase="Pending"))
        elif what == "garbled" and raw["spec"].get("nodeName"):
            self.api.edit_pod(name, lambda raw: raw["metadata"]["annotations"].update({INDEX + "c0": "banana"}))

    @rule(name=names, cores=shapes, wished=constraints, node=nodes, priority=st.integers(0, 1))
    def a_pod_is_nominated(self, name: str, cores: list[int], wished: Wished, node: str, priority: int) -> None:
        self.pod(name, cores, wished)

        def change(raw: dict[str, Any]) -> None:
            raw["spec"]["priority"] = priority
            raw["status"]["nominatedNodeName"] = node

        self.api.edit_pod(name, change)

    @rule(what=st.sampled_from(["unhealthy", "no device", "no node", "back", "back", "back"]))
    def a_node_changes(self, what: str) -> None:
        node = "n1"
        device = write_device(Node(node), "", self.cards[node])
        if what == "no device" and node in self.api.devices:
            self.api.remove("devices", node)
        elif what == "no node" and node in self.api.nodes:
            self.api.remove("nodes", node)
        elif what == "back":
            self.api.put("nodes", b.node(node))
            self.api.put("devices", device)
        elif what == "unhealthy":
            device["spec"]["devices"][0]["health"] = False
            self.api.put("devices", device)

    @rule(kind=kinds, count=st.integers(1, 2), both=st.booleans())
    def events_arrive(self, kind: str, count: int, both: bool) -> None:
        for replica in self.replicas if both else [self.leader]:
            replica.deliver(kind, count)

    @rule(what=st.sampled_from(["work", "work", "wait", "wait in an outage", "another leads", "a fresh one leads"]))
    def time_passes(self, what: str) -> None:
        if what == "work":
            self.leader.late.work()
        elif what in ("wait", "wait in an outage"):
            self.api.reachable = what == "wait"
            self.clock.now += 31
            for replica in self.replicas:
                replica.decider.check_overdue()
                replica.late.work()
            self.api.reachable = True
        else:
            which = 1 - self.replicas.index(self.leader)
            if what == "a fresh one leads":
                self.api.watchers.clear()
                self.replicas[which] = self.replica()
                self.replicas[1 - which].watch()
            self.lead(which)

    @invariant()
    def no_card_is_over_its_size(self) -> None:
        for node, cards in self.cards.items():
            used: dict[int, int] = defaultdict(int)
            for raw in self.api.pods.values():
                pod = self.known(raw)
                if pod is None or pod.pod.node != node or pod.pod.ended:
                    continue
                with contextlib.suppress(BadObject):
                    shares = recorded_shares(pod) or ()
                    for card in cards:
                        used[card.index] += peak((s.stage, s.amount(card)) for s in shares if s.is_on(card)).core
            assert all(core <= 1000 for core in used.values()), (node, dict(used))

    @rule(name=names, core=st.sampled_from([20, 60]), node=nodes)
    def a_worker_avoids_the_others_of_its_group(self, name: str, core: int, node: str) -> None:
        uid = self.pod(name, [core], {SPREAD: "web"})["metadata"]["uid"]
        held, known = self.leader.state.reservation(uid), self.api.pod(name)
        self.leader.deliver()
        cards = self.leader.state.node_snapshot(node, uid).available_cards
        with contextlib.suppress(ApiError, RetryLater):
            self.api.bind(name, node)
        decision, request = self.leader.state.reservation(uid), read_gpu_pod(known, SETTINGS)
        if held or decision is None or request is None or decision.node != node or not request.constraints.spread:
            return
        if [c.core for c in decision.request.containers] != [10 * core]:
            return  # an earlier pod of this name
        with_others = {s.card.index for s in cards if request.constraints.spread in s.groups}
        able = {s.card.index for s in cards if s.card.healthy and s.core_free >= 10 * core}
        if able - with_others:
            assert with_others.isdisjoint(decision.placement.cards("c0"))

    @invariant()
    def no_group_that_shares_a_card_is_on_two(self) -> None:
        on: dict[str, set[object]] = defaultdict(set)
        for raw in self.api.pods.values():
            pod = self.known(raw)
            if pod is not None and pod.pod.node and not pod.pod.ended and pod.constraints.same_card:
                with contextlib.suppress(BadObject):
                    on[pod.constraints.same_card.name] |= {(pod.pod.node, s.card) for s in recorded_shares(pod) or ()}
        assert all(len(cards) <= 1 for cards in on.values()), dict(on)

    @invariant()
    def nothing_is_kept_that_is_not_there(self) -> None:
        for node in self.cards:
            view = self.leader.state.node_snapshot(node, "")
            for held, kept in zip(view.cards, view.available_cards, strict=True):
                assert held.core_used <= kept.core_used <= max(held.core_used, held.card.core)
                assert held == kept or held.card.healthy

    @invariant()
    def the_filter_says_what_the_engine_says(self) -> None:
        """The filter agrees with the engine on the present state of every node. It costs more than most steps."""
        self.steps += 1
        if self.steps % 3 == 0:
            self.check_filter()

    def check_filter(self) -> None:
        state = self.leader.state
        for cores, wished in (([60], {}), ([20], {SAME: "pair"})):
            known = self.known(b.pod("asking", *shape(cores), annotations=dict(wished)))
            assert known is not None
            assert known.request is not None
            found = self.leader.filter.filter(known, sorted(NODES))
            group_cards = state.group_cards(known.request, known.pod.uid)
            for node in sorted(NODES):
                view = state.node_snapshot(node, known.pod.uid)
                said = view.node and assess(
                    known.request, view.node, view.available_cards, SETTINGS, group_cards=group_cards
                )
                assert (node in found.passed) == isinstance(said, Placement), (node, found, said)

    def teardown(self) -> None:
        for node in NODES:
            self.api.put("nodes", b.node(node))
            self.api.put("devices", write_device(Node(node), "", self.cards[node]))
        for replica in self.replicas:
            replica.settle()
        self.check_rest()
        self.check_filter()

    def check_rest(self) -> None:
        """Nothing is reserved; the ledger is what a process that starts now would have."""
        rebuilt = self.replica()
        self.api.watchers.pop()
        for replica in self.replicas:
            replica.deliver()
            assert all(holding.bound for holding in replica.state.holdings())
            assert replica.state.holdings() == rebuilt.state.holdings()
            for node in NODES:
                here, there = replica.state.node_snapshot(node, ""), rebuilt.state.node_snapshot(node, "")
                assert (here.cards, here.free_resources) == (there.cards, there.free_resources)


class Noting(RecordVerifier):
    """Records that note what the scheduler has decided, apart from any seal."""

    decided: ClassVar[set[tuple[Subject, frozenset[tuple[str, str]]]]] = set()

    def sealed(self, subject: Subject, record: Mapping[str, str]) -> dict[str, str]:
        self.decided.add((subject, frozenset(record.items())))
        return super().sealed(subject, record)


class UnderAttack(Cluster):
    """Beside them a tenant writes any record into new pods, and nothing keeps him from it: admission is away."""

    _signer = Signer(Ed25519PrivateKey.from_private_bytes(bytes(32)))
    _public: ClassVar = {_signer.id: _signer.key.public_key()}
    records = Noting(Keys("2020-01-01T00:00:00Z", _public, _signer))
    agents = RecordVerifier(Keys("2020-01-01T00:00:00Z", _public))

    @rule(name=names, cores=shapes, node=nodes, victim=names, forged=st.sampled_from(["copied", "card 0", "no seal"]))
    def a_tenant_creates_a_pod_with_a_record(
        self, name: str, cores: list[int], node: str, victim: str, forged: str
    ) -> None:
        there = self.api.pods.get(("default", victim), {"metadata": {}})
        record = {
            key: value
            for key, value in (there["metadata"].get("annotations") or {}).items()
            if is_placement_annotation(key) and (key, forged) != (SEAL, "no seal")
        }
        if forged == "card 0":
            record |= {f"{INDEX}c{i}": "0" for i in range(len(cores))}
        self.pod(name, cores, record, node)

    @rule(name=names, victim=names)
    def a_tenant_copies_a_record_into_a_pod(self, name: str, victim: str) -> None:
        if ("default", name) in self.api.pods and ("default", victim) in self.api.pods:
            there = self.api.pod(victim)["metadata"]["annotations"]
            copied = {key: value for key, value in there.items() if is_placement_annotation(key)}
            self.api.edit_pod(name, lambda raw: raw["metadata"]["annotations"].update(copied))

    @invariant()
    def only_records_count_that_were_decided(self) -> None:
        """Both for the scheduler and for agents, which cannot sign."""
        for raw in self.api.pods.values():
            pod = read_pod(raw)
            for records in (self.records, self.agents):
                counts, _ = records.judge(pod)
                record = {k: v for k, v in counts.annotations.items() if is_placement_annotation(k) and k != SEAL}
                if pod.node and record:
                    subject = Subject(pod.uid, pod.namespace, pod.name, pod.node)
                    assert (subject, frozenset(record.items())) in Noting.decided, raw

    @invariant()
    def nothing_is_held_by_a_record_that_was_not_decided(self) -> None:
        """Once the leader has all events, each pod holds what was decided, or nothing."""
        state = self.leader.state
        for holding in state.holdings():
            known = state.gpu_pod(holding.uid)
            if known is not None and known.finding is not None and state.reservation(holding.uid) is None:
                assert known.pod.started, holding


TestCluster = Cluster.TestCase
TestCluster.settings = examples(10)
TestUnderAttack = UnderAttack.TestCase
TestUnderAttack.settings = examples(9)
