"""Random calls of kube-scheduler for two gangs and plain pods, with bindings, deletions, new nodes' cards and time."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mgpu.kube import ApiError
from mgpu.model.gangs import KUBERNETES
from tests.examples import examples
from tests.scheduler.gangs import GangCluster, in_own_gang, pod_group, wanting

NODES = (("n1", 2), ("n2", 3))
GANGS = ("a", "b", "c")
CORES = st.sampled_from([30, 60, 60, 100])


class Gangs(RuleBasedStateMachine):
    """Two gangs of PodGroups and one of mgpu's labels, which kube-scheduler itself does not know."""

    @initialize(
        cores=st.lists(CORES, min_size=3, max_size=3), sizes=st.lists(st.integers(2, 4), min_size=3, max_size=3)
    )
    def start(self, cores: list[int], sizes: list[int]) -> None:
        self.cluster = GangCluster(*NODES)
        self.sizes = dict(zip(GANGS, sizes, strict=True))
        for gang, core in zip("ab", cores, strict=False):
            self.cluster.gang(gang, 4, core, minimum=self.sizes[gang])
        pods = (in_own_gang(wanting(f"c-{i}", cores[2]), "c", self.sizes["c"]) for i in range(4))
        self.cluster.gangs["c"] = [self.cluster.create(pod) for pod in pods]
        self.plain = 0

    @rule(gang=st.sampled_from(GANGS), i=st.integers(0, 3), names=st.sampled_from([("n1",), ("n2",), ("n1", "n2")]))
    def call(self, gang: str, i: int, names: tuple[str, ...]) -> None:
        """Filter a member. Reservations of its gang are made for as many as it needs, or all withdrawn."""
        name = self.cluster.gangs[gang][i]
        pod = self.cluster.api.pods.get(("default", name))
        if pod is None or pod["spec"].get("nodeName") or "deletionTimestamp" in pod["metadata"]:
            return
        before = self.members(gang)
        passed = self.cluster.passed(name, *names)
        after = self.members(gang)
        assert not self.provisional(gang) or len(after) >= self.sizes[gang]
        if after - before:
            assert len(passed) == 1
            assert len(after) >= self.sizes[gang]
        if name in after and passed and len(after - {name}) < self.sizes[gang]:
            assert passed == [self.node(name)]
        if not passed and len(after) < self.sizes[gang]:
            assert not self.provisional(gang)
        if gang == "c" and passed:
            assert len(after | {name}) >= self.sizes[gang]

    @rule(core=CORES)
    def plain_pod(self, core: int) -> None:
        """A pod without a gang passes exactly where it gets cards, whatever places gangs have."""
        self.plain += 1
        name = self.cluster.create(wanting(f"plain-{self.plain}", core))
        free = [node for node, _ in NODES if any(used + core <= 100 for used in self.cluster.used(node))]
        assert self.cluster.passed(name) == free
        for node in free[:1]:
            self.bind(name, node)
            assert self.cluster.api.pod(name)["spec"]["nodeName"] == node

    @rule(gang=st.sampled_from(GANGS), i=st.integers(0, 3), node=st.sampled_from(["n1", "n2", ""]))
    def bind_member(self, gang: str, i: int, node: str) -> None:
        """Bind a member where its cards are reserved, or as another scheduler would, anywhere."""
        name = self.cluster.gangs[gang][i]
        if ("default", name) in self.cluster.api.pods:
            self.bind(name, node or self.node(name) or "n1")

    @rule(gang=st.sampled_from("ab"), is_stolen=st.booleans())
    def wait_in_permit(self, gang: str, is_stolen: bool) -> None:
        """Members wait in Permit until their reservations end. Then all of them are bound, or none."""
        pods = self.cluster.api.pods
        waiting = [name for name in self.cluster.gangs[gang] if ("default", name) in pods and not self.bound(name)]
        nodes = {name: passed[0] for name in waiting if (passed := self.cluster.passed(name))}
        ending = {name for name in waiting if "deletionTimestamp" in pods["default", name]["metadata"]}
        together = (self.provisional(gang) & {*nodes}) - ending  # The API server refuses the bindings of the others.
        self.wait(31)
        if is_stolen:
            self.plain_pod(60)
        for name in sorted(together):
            self.bind(name, nodes[name])
        assert sum(map(self.bound, together)) in (0, len(together))

    @rule(gang=st.sampled_from("ab"), size=st.integers(2, 4))
    def resize(self, gang: str, size: int) -> None:
        self.sizes[gang] = size
        self.cluster.replica.state.gangs.pod_group_changed(KUBERNETES, pod_group(gang, size))

    @rule(data=st.data(), late=st.booleans(), graceful=st.booleans())
    def delete(self, data: st.DataObject, late: bool, graceful: bool) -> None:
        """Delete a pod, which may go on running for a while. The scheduler may hear of it later."""
        names = sorted(name for _, name in self.cluster.api.pods)
        if names and graceful:
            name = data.draw(st.sampled_from(names))
            self.cluster.api.edit_pod(
                name, lambda raw: raw["metadata"].update(deletionTimestamp="2026-11-23T15:00:00Z")
            )
        elif names:
            self.cluster.api.remove("pods", data.draw(st.sampled_from(names)))
        if not late:
            self.cluster.replica.deliver()

    @rule(seconds=st.sampled_from([1, 20, 70]))
    def wait(self, seconds: float) -> None:
        self.cluster.replica.deliver()
        self.cluster.replica.clock.now += seconds
        self.cluster.replica.decider.check_overdue()

    @invariant()
    def no_card_is_given_twice(self) -> None:
        for node, _ in NODES:
            assert max(self.cluster.used(node)) <= 100

    def teardown(self) -> None:
        """Everything that is not bound ends."""
        replica: Any = self.cluster.replica
        replica.settle()
        assert all(holding.bound for holding in replica.state.holdings())

    def bind(self, name: str, node: str) -> None:
        try:
            self.cluster.api.bind(name, node)
        except ApiError as error:
            if error.status not in (404, 409):
                raise
        self.cluster.replica.deliver()

    def members(self, gang: str) -> set[str]:
        """Return the members with cards, reserved or held, that are not being deleted."""
        return self.cluster.held() & {name for name in self.cluster.gangs[gang] if not self.is_deleting(name)}

    def is_deleting(self, name: str) -> bool:
        pod = self.cluster.replica.state.gpu_pod(f"uid-{name}")
        return pod is None or pod.pod.deleting

    def bound(self, name: str) -> bool:
        return bool(self.cluster.api.pods.get(("default", name), {}).get("spec", {}).get("nodeName"))

    def provisional(self, gang: str) -> set[str]:
        """Return the members with reservations that no Binding has used."""
        reservations = self.cluster.replica.state._reservations
        return {name for name in self.cluster.gangs[gang] if reservations.is_provisional(f"uid-{name}")}

    def node(self, name: str) -> str:
        return next((h.node for h in self.cluster.replica.state.holdings() if h.name == name), "")


Gangs.TestCase.settings = examples(25, steps=25)
test_gangs = Gangs.TestCase
