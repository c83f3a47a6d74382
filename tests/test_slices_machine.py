"""Scheduler and agents together, whatever dies between any two steps: all converges, nothing in use is destroyed, and
no pod is bound to a slice that is not there.

They meet in nothing but the API server's objects (tests/slices_rig.py). Watches lag; both may be killed before or after
any call; NVML fails; nodes reboot; somebody else writes into the annotation.
"""

import json
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from deviceplugin.mig.mig_driver import MigRefused
from mgpu.model import node_slices
from mgpu.model.errors import RetryLater
from mgpu.model.mig import invalid_reason, layout_of
from mgpu.model.mps_config import read_config
from mgpu.model.node_slices import ANNOTATION, NodeSlices, read_partitioning, read_slices
from mgpu.model.pods import read_node
from mgpu.model.slice_names import MIG, MPS, Slice, SliceCounts, count_slices, gigabytes
from scheduler.engine.partitioning.partitionable_node import can_be_partitioned_for, requested_slices
from tests import builders
from tests.examples import examples
from tests.slices_cards import How
from tests.slices_rig import OWN, Node, Raw, Rig, places_of

NODES = (("m1", MIG, 1), ("m2", MIG, 2), ("p1", MPS, 1))
SLICES = (
    "mig-1g.10gb",
    "mig-1g.10gb",
    "mig-2g.20gb",
    "mig-3g.40gb",
    "mig-4g.40gb",
    "mig-7g.80gb",
    "gpu-4gb",
    "gpu-30gb",
)
NAMES = [f"p{i}" for i in range(12)]
slices, which = st.sampled_from(SLICES), st.integers(0, 11)
nodes = st.sampled_from([name for name, *_ in NODES])
few = st.integers(1, 3)
specs = st.dictionaries(slices, st.integers(1, 2), max_size=2)
hows: st.SearchStrategy[How] = st.sampled_from(["before", "half", "after"])


class Machine(RuleBasedStateMachine):
    """there: UID of a pod → the MIG devices that were there when it was bound and that must stay, by place.

    shaken: nodes that lost slices by somebody else's plan or a reboot, of which the scheduler may not have heard yet.
    """

    @initialize(slices=st.lists(slices, max_size=5))
    def begin(self, slices: list[str]) -> None:
        """Some pods are there and run already."""
        self.rig = Rig(*NODES)
        self.rig.round()
        self.there: dict[str, dict[Slice, str]] = {}
        self.plans: dict[str, int] = {}
        self.shaken: set[str] = set()
        self.specs: dict[tuple[str, int], SliceCounts] = {}
        self.theirs = dict.fromkeys(self.rig.nodes, 1)
        self.created = 0
        for slice_ in slices:
            self.a_pod_comes(slice_, 1)
            self.all_do_their_work()

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.settle()

    # What happens.

    @rule(slice_=slices, count=st.sampled_from([1, 1, 1, 2]))
    def a_pod_comes(self, slice_: str, count: int) -> None:
        """Of a name that may have been there before."""
        name = next((name for name in NAMES if ("default", name) not in self.rig.api.pods), "")
        if name:
            amounts = {f"nvidia.com/{slice_}": str(1 if slice_.startswith("gpu") else count)}
            self.created += 1
            own = {"name": "c", "image": "x", "resources": {"limits": amounts, "requests": amounts}}
            self.rig.api.put("pods", builders.pod(name, own, uid=f"{name}-{self.created}"))
            self.schedule(self.rig.api.pod(name))

    @rule(wanted=st.lists(slices, min_size=2, max_size=4))
    def pods_come_at_once(self, wanted: list[str]) -> None:
        for slice_ in wanted:
            self.a_pod_comes(slice_, 1)

    @rule(heard=st.booleans())
    def pods_are_scheduled(self, heard: bool) -> None:
        """kube-scheduler asks again about those that wait."""
        if heard:
            self.rig.scheduler.deliver()
        for raw in self.waiting():
            self.schedule(raw)

    @rule(left=few, crash=st.booleans(), after=st.booleans())
    def the_planner_fails(self, left: int, crash: bool, after: bool) -> None:
        self.rig.wire.fail(left - 1, crash=crash, after=after)
        self.rig.plan()

    @rule()
    def the_planner_works(self) -> None:
        self.rig.plan()

    @rule()
    def the_scheduler_is_replaced(self) -> None:
        self.rig.start_scheduler()

    @rule(count=few)
    def the_scheduler_hears(self, count: int) -> None:
        self.rig.scheduler.deliver(count=count)

    @rule(node=nodes, left=few, how=hows, error=st.sampled_from([None, None, MigRefused, RetryLater]))
    def a_change_of_a_card_fails_or_the_agent_dies_in_it(self, node: str, left: int, how: How, error: Any) -> None:
        self.rig.nodes[node].mig.fail(left - 1, how, error)
        self.rig.nodes[node].look()

    @rule(node=nodes, crash=st.booleans(), after=st.booleans())
    def the_agents_report_fails(self, node: str, crash: bool, after: bool) -> None:
        self.rig.nodes[node].wire.fail(0, crash=crash, after=after)
        self.rig.nodes[node].look()

    @rule(node=nodes)
    def the_agent_looks(self, node: str) -> None:
        self.rig.nodes[node].look()

    @rule(node=nodes)
    def the_agent_is_replaced(self, node: str) -> None:
        self.rig.nodes[node].start_agent()

    @rule(node=nodes, count=few)
    def the_agent_hears(self, node: str, count: int) -> None:
        self.rig.nodes[node].deliver(count)

    @rule(node=nodes)
    def the_kubelet_hears(self, node: str) -> None:
        self.rig.nodes[node].kubelet_hears()

    @rule(node=nodes)
    def pods_start(self, node: str) -> None:
        for raw in list(self.rig.pods(node)):
            if self.rig.nodes[node].start(raw):
                self.rig.phase(raw["metadata"]["name"], "Running")

    @rule(which=which)
    def a_pod_ends(self, which: int) -> None:
        running = [raw for raw in self.rig.pods() if raw["status"]["phase"] == "Running"]
        if running:
            raw = running[which % len(running)]
            self.node_of(raw).end(raw["metadata"]["uid"])
            self.rig.phase(raw["metadata"]["name"], "Succeeded")

    @rule(which=which, force=st.booleans())
    def a_pod_is_deleted(self, which: int, force: bool) -> None:
        """By force while its container runs on, for a while."""
        pods = list(self.rig.api.pods.values())
        if pods:
            raw = pods[which % len(pods)]
            if raw["spec"].get("nodeName") and not force:
                self.node_of(raw).end(raw["metadata"]["uid"])
            self.rig.api.remove("pods", raw["metadata"]["name"])

    @rule(node=nodes)
    def what_was_deleted_by_force_ends(self, node: str) -> None:
        for uid in self.gone(self.rig.nodes[node]):
            self.rig.nodes[node].end(uid)
        self.rig.nodes[node].clean()

    @rule(node=nodes)
    def a_node_reboots(self, node: str) -> None:
        self.rig.nodes[node].reboot()
        self.shaken.add(node)
        for raw in list(self.rig.pods(node)):
            self.there.pop(raw["metadata"]["uid"], None)
            self.rig.phase(raw["metadata"]["name"], "Pending")

    def somebody_else_writes(self) -> None:
        for node in self.rig.nodes:
            self.theirs[node] += 1
            text = json.dumps({**json.loads(self.annotation(node)), "theirs": self.theirs[node]})
            self.rig.api.annotate(node, **{ANNOTATION: text})

    @rule(node=nodes, card=st.integers(0, 1), spec=specs, heard=st.booleans())
    def somebody_plans_by_hand(self, node: str, card: int, spec: dict[str, int], heard: bool) -> None:
        """Without a look at what is in use, and whether it can be made at all."""
        self.plan_by_hand(node, card, spec)
        if heard:
            self.rig.nodes[node].deliver()
            self.rig.nodes[node].look()

    @rule(node=nodes, card=st.integers(0, 1), spec=specs, slice_=slices)
    def somebody_plans_by_hand_while_the_planner_writes(
        self, node: str, card: int, spec: dict[str, int], slice_: str
    ) -> None:
        self.a_pod_comes(slice_, 1)
        self.rig.wire.meanwhile = lambda: self.plan_by_hand(node, card, spec)
        self.rig.plan()

    def plan_by_hand(self, node: str, card: int, spec: dict[str, int]) -> None:
        mode = self.rig.nodes[node].mode
        wanted = {name.split("-")[1]: n for name, n in spec.items() if name.startswith("mig") == (mode == MIG)}
        plan = (self.said(node).partitioning.plan or 0) + 1
        self.shaken.add(node)
        self.rig.api.annotate(node, **{ANNOTATION: node_slices.with_spec(self.annotation(node), {card: wanted}, plan)})

    @rule(node=nodes, slice_=slices)
    def an_agent_reports_while_the_planner_writes(self, node: str, slice_: str) -> None:
        self.a_pod_comes(slice_, 1)
        self.rig.wire.meanwhile = self.rig.nodes[node].look
        self.rig.plan()

    @rule(node=nodes, slice_=slices)
    def the_planner_writes_while_an_agent_reports(self, node: str, slice_: str) -> None:
        self.a_pod_comes(slice_, 1)
        self.rig.nodes[node].wire.meanwhile = self.rig.plan
        self.rig.nodes[node].look()

    @rule(slice_=slices)
    def somebody_else_writes_while_both_do(self, slice_: str) -> None:
        self.a_pod_comes(slice_, 1)
        self.rig.wire.meanwhile = self.somebody_else_writes
        self.rig.plan()
        for node in self.rig.nodes.values():
            node.deliver()
            node.wire.meanwhile = self.somebody_else_writes
            node.look()

    @rule(seconds=st.sampled_from([16, 70]))
    def time_passes(self, seconds: int) -> None:
        """Reservations of pods expire, and MPS slices that are not in use are removed."""
        self.rig.clock.now += seconds

    @rule()
    def all_do_their_work(self) -> None:
        self.rig.round()
        self.pods_are_scheduled(True)

    # What must hold.

    def bound(self, raw: Raw) -> None:
        """Check that the pod is bound to slices that exist and that no other pod has."""
        node, uid, places = self.rig.nodes[raw["spec"]["nodeName"]], raw["metadata"]["uid"], places_of(raw)
        assert places, "a pod is bound without a record"
        assert not {*places} & self.in_use(node, uid), "a slice is given away while it is in use"
        if node.mode == MIG and node.name not in self.shaken:
            made = node.mig.whole()
            assert {*places} <= made.keys(), f"{raw['metadata']['name']} is bound to slices that are not there"
            self.there[uid] = {place: made[place] for place in places}

    @invariant()
    def nothing_in_use_is_destroyed(self) -> None:
        if not hasattr(self, "rig"):
            return
        if not self.rig.scheduler.waiting["nodes"]:
            self.shaken = {name for name in self.shaken if self.rig.nodes[name].unsaid}
        for node in self.rig.nodes.values():
            assert not node.mig.destroyed_in_use, "the agent tried to destroy what is in use"
            made = node.mig.whole()
            for uid, places in self.held(node).items():
                for place in places if node.mode == MIG else ():
                    known = self.there.get(uid, {}).get(place)
                    assert known in (None, made.get(place)), f"{place} of {uid} was destroyed"
            self.is_sound(node)

    def is_sound(self, node: Node) -> None:
        """Check that the slices of pods and of remnants fit on the cards together."""
        records = [place for raw in self.rig.pods(node.name) for place in places_of(raw)]
        held = {place for places in self.held(node).values() for place in places}
        for card in node.gpus:
            own = [place for place in records if place.card == card.index]
            assert len({*own}) == len(own), f"a slice of {node.name} has two pods"
            layout = layout_of(card.model, card.memory)
            assert layout
            if node.mode == MIG:
                assert not invalid_reason(
                    layout, [place.instance for place in sorted(held) if place.card == card.index]
                )
            else:
                assert sum(gigabytes(place.name) for place in own) <= card.memory >> 30

    @invariant()
    def no_writer_loses_what_the_other_wrote(self) -> None:
        if not hasattr(self, "rig"):
            return
        for name in self.rig.nodes:
            assert json.loads(self.annotation(name))["theirs"] == self.theirs[name]
            found = read_partitioning(self.annotation(name))
            plan = found.plan or 0
            assert plan >= self.plans.get(name, 0), "a plan was taken back"
            self.plans[name] = plan
            assert self.specs.setdefault((name, plan), found.spec) == found.spec, "two plans have one id"
            assert found.applied is None or found.applied <= plan
            said = self.said(name)
            assert said.planned is None or count_slices(said.planned) == said.partitioning.spec

    def settle(self) -> None:
        """Nothing fails any more, so all comes to its end: no plan is left open, and who can have slices gets them."""
        for _ in range(5):  # a Pod that did not come for its slices gets no plan for five minutes at most
            for node in self.rig.nodes.values():
                for uid in self.gone(node):
                    node.end(uid)
            self.all_do_all_their_work()
            self.rig.clock.now += 100
        self.all_do_all_their_work()
        self.nothing_in_use_is_destroyed()
        self.no_writer_loses_what_the_other_wrote()
        for node in self.rig.nodes.values():
            self.is_settled(node)
        for raw in self.waiting():
            self.waits_for_good_reason(raw)

    def all_do_all_their_work(self) -> None:
        for _ in range(4):
            before = self.rig.api.version
            self.all_do_their_work()
            if self.rig.api.version == before:
                return

    def schedule(self, raw: Raw) -> None:
        name = raw["metadata"]["name"]
        if not self.rig.schedule(name):
            self.bound(self.rig.api.pod(name))

    def is_settled(self, node: Node) -> None:
        found = self.said(node.name)
        # A plan that was refused, by a card that said so for good, stays so while nobody needs another.
        assert not found.has_pending_plan, f"plan {found.partitioning.plan} of {node.name} never ends"
        if found.partitioning.plan is not None and not found.refused:
            assert found.partitioning.applied == found.partitioning.plan
            assert count_slices(found.existing) == found.partitioning.spec
            if found.planned is not None:
                assert {s.place for s in found.existing} == {*found.planned}
        if node.mode == MIG:
            assert {s.place: s.uuid for s in found.existing} == node.mig.whole()
        elif found.partitioning.plan is not None:
            text = self.rig.api.configmaps[OWN.config_map]["data"][node.name]
            assert read_config(text) == found.partitioning.spec
        held = {place: raw["metadata"]["uid"] for raw in self.rig.pods(node.name) for place in places_of(raw)}
        assert {s.place: s.pod for s in found.existing if s.pod} == held
        said = read_partitioning(self.annotation(node.name))
        assert said.used == count_slices(s for s in found.existing if s.pod)
        assert said.free == count_slices(s for s in found.existing if not s.pod)
        for raw in self.rig.pods(node.name):
            assert raw["metadata"]["uid"] in node.running, f"{raw['metadata']['name']} never starts"

    def waits_for_good_reason(self, raw: Raw) -> None:
        known = self.rig.known(raw)
        assert known.request is not None
        for name in self.rig.nodes:
            target = self.rig.scheduler.state.partitions.get(name, known.pod.uid)
            assert target is not None
            if known.request.unmet_requirement(target.node) is None:
                assert not target.fits(requested_slices(known.request))
                assert not can_be_partitioned_for(target, requested_slices(known.request)), (
                    f"{known.pod.name} waits, and {name} could be cut for it"
                )

    # What is known.

    def held(self, node: Node) -> dict[str, tuple[Slice, ...]]:
        """By UID, what pods have by their records, and what containers have that were left behind: of those under MPS
        it is unknown whose processes they are.
        """
        records = {raw["metadata"]["uid"]: places_of(raw) for raw in self.rig.pods(node.name)}
        return {**(node.running if node.mode == MIG else {}), **records}

    def in_use(self, node: Node, without: str) -> set[Slice]:
        """As far as a scheduler can know: by records, and of containers left behind those that it still has by a record
        or that a look of the agent has seen.
        """
        # A pod that is deleted by force before such a look takes its record with it: nothing in the API says any more
        # that its container runs, the node still calls the slice free, and a scheduler that starts now lists that.
        state, waiting = self.rig.scheduler.state, self.rig.scheduler.waiting["nodes"]
        (heard,) = state.nodes([node.name])
        assert heard
        said = {s.place for s in read_slices(heard).existing if s.pod}
        lags = any(raw["metadata"]["name"] == node.name for _, raw in waiting)
        there = {raw["metadata"]["uid"] for raw in self.rig.pods(node.name)} | (set() if lags else node.seen)
        return {
            place
            for uid, places in self.held(node).items()
            for place in places
            if uid != without and (uid in there or state.gpu_pod(uid) or place in said)
        }

    def waiting(self) -> list[Raw]:
        return [raw for raw in self.rig.api.pods.values() if not raw["spec"].get("nodeName")]

    def node_of(self, raw: Raw) -> Node:
        return self.rig.nodes[raw["spec"]["nodeName"]]

    def gone(self, node: Node) -> list[str]:
        there = {raw["metadata"]["uid"] for raw in self.rig.pods(node.name)}
        return [uid for uid in node.running if uid not in there]

    def annotation(self, node: str) -> str:
        return str(self.rig.api.nodes[node]["metadata"]["annotations"][ANNOTATION])

    def said(self, node: str) -> NodeSlices:
        return read_slices(read_node(self.rig.api.nodes[node]))


def test_a_container_left_behind_keeps_its_slice_from_schedulers_that_never_heard_of_its_pod() -> None:
    rig = Rig(("m1", MIG, 1))
    own = {"name": "c", "image": "x", "resources": {"limits": {"nvidia.com/mig-7g.80gb": "1"}}}
    rig.round()
    rig.api.put("pods", builders.pod("a", own, uid="a"))
    assert rig.schedule("a")
    rig.round()
    assert not rig.schedule("a")
    rig.round()
    assert {*rig.nodes["m1"].running} == rig.nodes["m1"].seen == {"a"}

    rig.api.remove("pods", "a")
    rig.start_scheduler()
    rig.api.put("pods", builders.pod("b", own, uid="b"))
    for _ in range(3):
        assert rig.schedule("b")
        rig.round()
    rig.nodes["m1"].end("a")
    rig.round()
    assert not rig.schedule("b")


TestSlices = Machine.TestCase
TestSlices.settings = examples(12, steps=50)
