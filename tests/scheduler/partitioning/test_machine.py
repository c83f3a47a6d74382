"""Whatever happens in whatever order: no slice is given twice, no plan takes what is held, nothing that another one
wrote is lost, and in the end every pod has its slices for which there is room.
"""

import contextlib
import json
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mgpu.kube import ApiError
from mgpu.model import mig
from mgpu.model.errors import RetryLater
from mgpu.model.node_slices import ANNOTATION, read_partitioning
from mgpu.model.slice_names import MIG, MPS, Slice, gigabytes
from scheduler.cluster.gpu_pods import read_gpu_pod, recorded_shares
from scheduler.engine.partitioning.partitionable_node import slice_of_share
from tests.clock import Clock
from tests.examples import examples
from tests.scheduler.fake import SETTINGS, FakeApi, Replica, admitted
from tests.scheduler.partitioning.cluster import Agent, wants

MODES = {"m1": MIG, "m2": MIG, "s1": MPS}
NAMES = ["p", "q", "r", "s", "t"]
names, nodes = st.sampled_from(NAMES), st.sampled_from(sorted(MODES))
requests = st.sampled_from(
    [
        {"mig-1g.10gb": 1},
        {"mig-1g.10gb": 2},
        {"mig-2g.20gb": 1},
        {"mig-3g.40gb": 1},
        {"mig-4g.40gb": 1},
        {"gpu-10gb": 1},
        {"gpu-40gb": 1},
        {"gpu-30gb": 1},
    ]
)
often = st.sampled_from([True, True, False])
FOREIGN = "somebody.else/key"


class Cluster(RuleBasedStateMachine):
    """The API server is the truth; one scheduler after the other sees it late, and so does the nodes' agent."""

    @initialize()
    def begin(self) -> None:
        self.clock, self.api, self.created = Clock(), FakeApi(), 0
        self.agents = {name: Agent(self.api, name, mode) for name, mode in MODES.items()}
        for name in MODES:
            self.api.annotate(name, **{ANNOTATION: json.dumps({FOREIGN: name})})
            self.agents[name].report()
        self.replicas: list[Replica] = []
        self.plans: dict[str, list[int]] = defaultdict(list)
        self.rebooted: set[str] = set()
        self.lead()

    def lead(self) -> None:
        """A new process, which begins with what the API says; the one before is dead or does not lead."""
        for before in self.replicas[-1:]:
            before.leading = False
        self.api.watchers.clear()
        self.leader = Replica(self.api, self.clock)
        self.replicas.append(self.leader)
        self.leader.planning.begin()
        for uid in self.leader.state.undecided_pods():
            self.leader.late.add(uid)
        self.api.admit = admitted(self.leader)

    def live(self, node: str = "") -> list[dict[str, Any]]:
        pods = [raw for raw in self.api.pods.values() if raw["status"]["phase"] not in ("Succeeded", "Failed")]
        return [raw for raw in pods if not node or raw["spec"].get("nodeName") == node]

    def places(self, node: str) -> dict[Slice, str]:
        """By records, who has which slice of a node."""
        found: dict[Slice, str] = {}
        for raw in self.live(node):
            known = read_gpu_pod(raw, SETTINGS)
            assert known
            for share in recorded_shares(known) or ():
                place = slice_of_share(share)
                assert place
                assert place not in found, f"{place} of {node} is given to two"
                found[place] = known.pod.uid
        return found

    # What happens.

    @rule(name=names, request=requests, node=nodes)
    def somebody_creates_a_pod_with_a_node(self, name: str, request: dict[str, int], node: str) -> None:
        self.create(name, request, node)

    def create(self, name: str, request: dict[str, int], node: str = "") -> None:
        found = self.api.pods.get(("default", name))
        if found and (found["status"]["phase"] in ("Succeeded", "Failed") or self.created % 2):
            self.go(name)
        if ("default", name) not in self.api.pods:
            self.created += 1
            self.api.put("pods", wants(name, request, uid=f"{name}-{self.created}", node=node))

    def schedule(self, name: str, some: list[str]) -> bool:
        raw = self.api.pods.get(("default", name))
        if not raw or raw["spec"].get("nodeName") or raw["status"]["phase"] in ("Succeeded", "Failed"):
            return False  # kube-scheduler tries neither
        known = self.leader.decider.read(raw)
        assert known
        passed = self.leader.filter.filter(known, some).passed
        if not passed:
            return False
        scores = self.leader.filter.scores(known, passed)
        _, node = max(zip(scores, passed, strict=True))
        with contextlib.suppress(ApiError, RetryLater):
            self.api.bind(name, node)
            return True
        return False

    @rule(come=st.dictionaries(names, requests, max_size=3), before=often, applied=often, after=often)
    def pods_come_and_all_are_tried(
        self, come: dict[str, dict[str, int]], before: bool, applied: bool, after: bool
    ) -> None:
        """before, after: whether the watch keeps up. applied: whether the agents are quick."""
        for name, request in come.items():
            self.create(name, request)
        if before:
            self.leader.deliver()
        for name in (*come, *NAMES):
            self.schedule(name, sorted(MODES))
        self.leader.planning.work()
        for node in MODES if applied else ():
            self.apply(node)
        if after:
            self.leader.deliver()

    @rule(name=names, node=nodes)
    def any_scheduler_binds(self, name: str, node: str) -> None:
        self.bind(name, node)

    def bind(self, name: str, node: str) -> None:
        raw = self.api.pods.get(("default", name))
        if raw and not raw["spec"].get("nodeName"):
            with contextlib.suppress(ApiError, RetryLater):
                self.api.bind(name, node)

    @rule(name=names, what=st.sampled_from(["deleted", "ended"]))
    def a_pod_goes(self, name: str, what: str) -> None:
        if what == "deleted":
            self.go(name)
        elif ("default", name) in self.api.pods:
            self.api.edit_pod(name, lambda raw: raw["status"].update(phase="Succeeded"))

    def go(self, name: str) -> None:
        if ("default", name) in self.api.pods:
            self.api.remove("pods", name)

    @rule(node=nodes, lost=st.booleans())
    def the_kubelet_starts_and_ends_containers(self, node: str, lost: bool) -> None:
        self.use(node, stale=lost)

    def use(self, node: str, *, stale: bool = False) -> None:
        """The agent reports who has what; with a version that is old, so that it has to write again."""
        agent, records = self.agents[node], self.places(node)
        agent.made = {s: records.get(s, "") for s in agent.made}
        agent.report(stale=stale)

    @rule(node=nodes, what=st.sampled_from(["apply", "apply", "apply", "refuse"]))
    def the_agent_works(self, node: str, what: str) -> None:
        agent = self.agents[node]
        if what == "refuse" and agent.found.has_pending_plan:
            agent.refuse()
        elif what == "apply":
            self.apply(node)

    def apply(self, node: str) -> None:
        agent, records = self.agents[node], self.places(node)
        found = agent.found
        if found.has_pending_plan and found.planned is not None and node not in self.rebooted:
            taken = records.keys() - {*found.planned}
            assert not taken, f"the plan of {node} takes {taken} from their pods"
        agent.made = {s: records.get(s, "") for s in agent.made}
        agent.apply()
        if not (records.keys() - agent.made.keys() or self.leader.waiting["nodes"]):
            self.rebooted.discard(node)

    @rule(kind=st.sampled_from(["nodes", "nodes", "pods", "configmaps", ""]), count=st.integers(1, 3))
    def events_arrive(self, kind: str, count: int) -> None:
        self.leader.deliver(kind, count)

    @rule(
        when=st.sampled_from(["the plan is made", "it is written"]),
        meanwhile=st.sampled_from(["bind", "bind", "use", "apply", "deliver", "go"]),
        node=nodes,
        name=names,
    )
    def the_controller_works(self, when: str, meanwhile: str, node: str, name: str) -> None:
        """meanwhile: what happens after it has seen the node, and before it has done what it does."""
        effects: dict[str, Callable[[], object]] = {
            "bind": lambda: self.bind(name, node),
            "use": lambda: self.use(node),
            "apply": lambda: self.apply(node),
            "deliver": self.leader.deliver,
            "go": lambda: self.go(name),
        }
        happens = effects[meanwhile]

        def now() -> float:
            self.leader.now = lambda: 1000
            happens()
            return 1000

        if when == "the plan is made":
            self.leader.now = now
        else:
            self.api.between = happens
        self.leader.planning.work()
        self.leader.now, self.api.between = (lambda: 1000), None

    @rule(what=st.sampled_from(["no answers", "no ConfigMaps", "late", "late", "wait", "wait", "crash", "reboot"]))
    def time_passes(self, what: str) -> None:
        if what == "crash":
            self.lead()
        elif what == "reboot":
            self.rebooted.add("m1")
            self.agents["m1"].reboot()
        elif what == "late":
            self.leader.late.work()
        elif what == "wait":
            self.clock.now += 31
            self.leader.decider.check_overdue()
        else:
            self.api.reachable, self.api.broken = what == "no ConfigMaps", {"configmaps"}
            self.leader.planning.work()
            self.api.reachable, self.api.broken = True, set()

    # What always holds.

    @invariant()
    def what_pods_have_lies_well(self) -> None:
        for node, mode in MODES.items():
            places = self.places(node)
            if mode == MIG:
                layout = mig.layout_of("A100-SXM4-80GB", 80 << 30)
                assert layout
                assert mig.invalid_reason(layout, [s.instance for s in places]) is None
            else:
                assert sum(gigabytes(s.name) for s in places) <= 80

    @invariant()
    def what_pods_have_is_there(self) -> None:
        """But for what a reboot took, as long as the scheduler does not know of it, or it is not made again."""
        for node in MODES.keys() - self.rebooted:
            assert self.places(node).keys() <= self.agents[node].made.keys()

    @invariant()
    def nobody_loses_what_another_one_wrote(self) -> None:
        for node, agent in self.agents.items():
            text = self.api.nodes[node]["metadata"]["annotations"][ANNOTATION]
            assert json.loads(text)[FOREIGN] == node
            said = read_partitioning(text)
            there: dict[str, int] = defaultdict(int)
            for counts in (*said.used.values(), *said.free.values()):
                for name, count in counts.items():
                    there[name] += count
            made: dict[str, int] = defaultdict(int)
            for s in {*agent.found.existing}:
                made[s.name] += 1
            assert there == made
            if said.plan is not None and self.plans[node][-1:] != [said.plan]:
                self.plans[node].append(said.plan)
            assert self.plans[node] == sorted(set(self.plans[node]))

    def teardown(self) -> None:
        if not hasattr(self, "leader"):
            return
        for seconds in (*[31] * 12, 0, 0, 0):  # at last nothing becomes due any more
            for node in MODES:
                self.use(node)
                self.apply(node)
            self.leader.deliver()
            self.leader.late.work()
            while [name for name in NAMES if self.schedule(name, sorted(MODES))]:
                self.leader.deliver()
            self.leader.planning.work()
            self.leader.deliver()
            self.clock.now += seconds
            self.leader.decider.check_overdue()
        self.check_rest()

    def check_rest(self) -> None:
        """No plan is under way, everybody has what it holds, and who waits could not be served by any plan."""
        state = self.leader.state
        assert state.partitions.plans() == ()
        assert all(holding.bound for holding in state.holdings())
        for node, agent in self.agents.items():
            assert not agent.found.has_pending_plan
            assert self.places(node).keys() <= {s.place for s in agent.found.existing if s.pod}
        for raw in self.live():
            known = self.leader.decider.read(raw)
            if known and not known.pod.node:
                found = self.leader.filter.filter(known, sorted(MODES))
                assert not found.passed
                assert not found.repartitionable, found.failed


TestCluster = Cluster.TestCase
TestCluster.settings = examples(8)
