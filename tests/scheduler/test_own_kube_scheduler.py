"""Whose mgpu leads, where each replica has a kube-scheduler in its pod: the one whose kube-scheduler leads."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu.kube import ApiError
from mgpu.kube.leader import LEASE_SECONDS, Leader
from scheduler.leadership import OwnKubeScheduler
from tests.mgpu.kube.test_leader import Leases

NAMESPACE = "mgpu-system"
STEP = 2.0


class Pod:
    """Both processes of a pod; one that is None does not run."""

    def __init__(self, world: "World", name: str) -> None:
        self._world, self.name, self._started = world, name, 0
        self.start_kube()
        self.start_mgpu()

    def start_kube(self) -> None:
        """Anew, under another uuid. It elects as ours does, both as client-go does."""
        self._started += 1
        api: Any = self._world.theirs
        identity = f"{self.name}_uuid-{self._started}"
        self.kube: Leader | None = Leader(api, NAMESPACE, "l", identity, self._world.clock, wait_for_writes=bool)

    def start_mgpu(self) -> None:
        api: Any = self._world.ours
        theirs: Any = self._world.theirs
        own = OwnKubeScheduler(theirs, NAMESPACE, "l", self.name, self._world.clock)
        identity = f"{self.name}-{self._started}"
        self.mgpu: Leader | None = Leader(
            api, NAMESPACE, "l", identity, self._world.clock, should_yield=own.elsewhere, wait_for_writes=bool
        )

    def round(self) -> None:
        for process in (self.kube, self.mgpu):
            if process:
                process.round()


class World:
    """theirs, ours: API servers with the one lease each."""

    def __init__(self, names: str = "ab") -> None:
        self.theirs, self.ours, self.now = Leases(), Leases(), 100.0
        self.pods = {name: Pod(self, name) for name in names}

    def clock(self) -> float:
        return self.now

    def round(self, order: str = "", seconds: float = STEP) -> str:
        """One of every process, each after some time; who leads then, never two."""
        for name in order or self.pods:
            self.now += seconds / len(self.pods)
            self.pods[name].round()
            assert len(self.leading()) < 2
        return self.leading()

    def rounds(self, seconds: float) -> str:
        for _ in range(round(seconds / STEP)):
            self.round()
        return self.leading()

    def leading(self) -> str:
        return "".join(name for name, pod in self.pods.items() if pod.mgpu and pod.mgpu.leading)

    def asking(self) -> str:
        """The pod whose kube-scheduler leads."""
        return "".join(name for name, pod in self.pods.items() if pod.kube and pod.kube.leading)


def crash(pod: Pod) -> None:
    pod.kube = pod.mgpu = None


def test_first_replica_leads_with_its_kube_scheduler() -> None:
    world = World()
    assert world.round("ba") == world.asking() == "b"
    assert world.rounds(60) == world.asking() == "b"


def test_lead_moves_to_the_pod_of_the_leading_kube_scheduler() -> None:
    world = World()
    a = world.pods["a"]
    kube, a.kube = a.kube, None
    assert world.round() == "a"  # no kube-scheduler led before that of `b` came
    assert world.asking() == "b"
    a.kube = kube
    assert world.rounds(2 * STEP) == "b"


def test_ending_pod_passes_both_leases_to_the_same_pod() -> None:
    """The kube-scheduler ends first: its sidecar outlives it."""
    world = World("abc")
    world.rounds(6)
    ending = world.pods["a"]
    assert ending.kube
    assert ending.mgpu
    ending.kube.release()
    ending.kube = None
    ending.mgpu.round()
    assert world.leading() == "a"  # who leads does so until somebody else's turn has come
    ending.mgpu.release()
    ending.mgpu = None
    for name in "cb":
        mgpu = world.pods[name].mgpu
        assert mgpu
        mgpu.round()
    assert world.leading() == ""  # neither is first by chance
    assert world.rounds(2 * STEP) == world.asking()


def test_lost_pod_is_replaced_by_the_other_replica() -> None:
    world = World()
    world.rounds(6)
    crash(world.pods["a"])
    assert world.rounds(LEASE_SECONDS + 2 * STEP) == world.asking() == "b"


def test_crashed_kube_scheduler_does_not_stop_decisions() -> None:
    world = World("a")
    world.rounds(6)
    world.pods["a"].kube = None
    for _ in range(30):
        assert world.round() == "a"
    world.pods["a"].start_kube()
    assert world.rounds(LEASE_SECONDS + 2 * STEP) == world.asking() == "a"


def test_replica_leads_without_any_kube_scheduler() -> None:
    world = World()
    world.pods["a"].kube = world.pods["b"].kube = None
    assert world.round() == "a"
    crash(world.pods["a"])
    assert world.rounds(LEASE_SECONDS + 2 * STEP) == "b"


def test_expired_kube_scheduler_lease_is_ignored() -> None:
    world = World()
    world.rounds(6)
    world.pods["b"].kube = None
    crash(world.pods["a"])
    assert world.rounds(LEASE_SECONDS + 2 * STEP) == "b"


def test_forbidden_kube_scheduler_lease_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    world = World()

    def forbidden(path: str) -> dict[str, Any]:
        raise ApiError(403, "Forbidden", f"{path} is forbidden")

    world.pods["a"].kube = world.pods["b"].kube = None
    world.theirs.get = forbidden  # type: ignore[method-assign]
    assert world.rounds(10) == "a"
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 2  # once each
    assert all("cannot find out which kube-scheduler leads" in line for line in told)


STEPS = st.tuples(
    st.sampled_from(["crash", "kube crashes", "kube ends", "mgpu crashes", "mgpu ends", "up", "cut off", "nothing"]),
    st.sampled_from("abc"),
    st.permutations("abc"),
    st.sampled_from([0.1, 2.0, 2.2, 16.0]),
)


@given(st.lists(STEPS, max_size=14), st.sampled_from("abc"))
def test_property_at_most_one_leads_and_it_follows_the_kube_scheduler(steps: list[Any], last: str) -> None:
    world = World("abc")
    for what, name, order, seconds in steps:
        pod = world.pods[name]
        world.ours.reachable = what != "cut off"
        if what in ("crash", "kube crashes"):
            pod.kube = None
        if what in ("crash", "mgpu crashes"):
            pod.mgpu = None
        if what == "kube ends" and pod.kube:
            pod.kube.release()
            pod.kube = None
        if what == "mgpu ends" and pod.mgpu:
            pod.mgpu.release()
            pod.mgpu = None
        if what == "up" and not pod.kube:
            pod.start_kube()
        if what == "up" and not pod.mgpu:
            pod.start_mgpu()
        world.round("".join(order), seconds)
    world.ours.reachable = True
    for name, pod in world.pods.items():
        if name == last and not pod.kube:
            pod.start_kube()
        if not pod.mgpu:
            pod.start_mgpu()
        if name != last:
            pod.kube = None
    assert world.rounds(3 * LEASE_SECONDS) == world.asking() == last
