"""The label follows the deciding replica, and the lead follows the kube-scheduler in the same pod."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu.kube import ApiError, Unreachable
from mgpu.kube.leader import LABEL, LEASE_SECONDS, Leader
from scheduler.leadership import LeaderLabel, OwnKubeScheduler
from tests.mgpu.kube.test_leader import Leases

PATH = "/api/v1/namespaces/mgpu-system/pods"
OURS = {"app.kubernetes.io/name": "mgpu", "app.kubernetes.io/component": "scheduler"}
SELECTOR = "app.kubernetes.io/name=mgpu,app.kubernetes.io/component=scheduler"


class Pods:
    """An API server with pods.

    Attributes:
        breaks: The number of calls after which it stops answering.
        lost: Whether calls that are not answered take effect.
        between: Called once, after the next list.
    """

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.calls: list[str] = []
        self.version = 0
        self.breaks, self.lost = 1_000_000, False
        self.between: Callable[[], object] = bool

    def put(self, name: str, uid: str, **labels: str) -> None:
        self.version += 1
        meta = {"name": name, "uid": uid, "labels": {**OURS, **labels}, "resourceVersion": str(self.version)}
        self.pods[name] = {"metadata": meta}

    def patch(self, path: str, body: dict[str, Any]) -> None:
        name, told = path.removeprefix(f"{PATH}/"), body["metadata"]
        self._call(name, lambda: self._patch(name, told))

    def _patch(self, name: str, told: dict[str, Any]) -> None:
        if name not in self.pods:
            raise ApiError(404, "NotFound", name)
        meta = self.pods[name]["metadata"]
        if any(meta[key] != told[key] for key in ("uid", "resourceVersion") if key in told):
            raise ApiError(409, "Conflict", name)
        self.version += 1
        merged = meta["labels"] | told["labels"]
        meta |= {"labels": {k: v for k, v in merged.items() if v is not None}, "resourceVersion": str(self.version)}

    def _call(self, what: str, write: Callable[[], object] = bool) -> None:
        self.calls.append(what)
        self.breaks -= 1
        if self.breaks >= 0 or self.lost:
            write()
        if self.breaks < 0:
            raise Unreachable("no answer")

    def labelled(self) -> list[str]:
        return sorted(name for name, pod in self.pods.items() if LABEL in pod["metadata"]["labels"])

    def list(self, path: str, **query: object) -> tuple[list[dict[str, Any]], str]:
        assert (path, query) == (PATH, {"labelSelector": SELECTOR})
        self._call("list")
        found = copy.deepcopy([p for p in self.pods.values() if OURS.items() <= p["metadata"]["labels"].items()])
        between, self.between = self.between, bool
        between()
        return found, str(self.version)


class Replicas:
    """Replicas in pods `a`, `b`, … whose UID is the name doubled. leader: the replica that decides."""

    def __init__(self, names: str = "ab") -> None:
        self.api, self.now, self.leader = Pods(), 100.0, ""
        self.labels: dict[str, LeaderLabel] = {}
        for name in names:
            self.start(name)

    def start(self, name: str, uid: str = "") -> None:
        client: Any = self.api
        self.api.put(name, uid or 2 * name)
        self.labels[name] = LeaderLabel(
            client,
            "mgpu-system",
            uid or 2 * name,
            not_deciding_reason=lambda: None if self.leader == name else "another leads",
            clock=lambda: self.now,
        )

    def round(self, leader: str = "", later: float = 0.0) -> list[str]:
        """Run one round of every replica. Return the pods with the label."""
        self.leader = leader or self.leader
        self.now += later
        for replica in self.labels.values():
            replica.round()
        return self.api.labelled()


def test_only_the_pod_of_the_deciding_replica_has_the_label() -> None:
    replicas = Replicas("abc")
    assert replicas.round() == []
    assert replicas.round("b") == ["b"]
    assert replicas.round("a") == ["a"]
    assert replicas.round("b") == ["b"]


def test_labels_of_other_pods_are_untouched() -> None:
    replicas = Replicas()
    replicas.api.put("theirs", "x", **{LABEL: "true"})
    replicas.api.pods["theirs"]["metadata"]["labels"]["app.kubernetes.io/component"] = "webhook"
    assert replicas.round("a") == ["a", "theirs"]


def test_correct_labels_are_checked_but_not_written() -> None:
    replicas = Replicas()
    replicas.round("a")
    replicas.api.calls.clear()
    for _ in range(120):
        assert replicas.round(later=0.25) == ["a"]
    assert replicas.api.calls == ["list"] * 2


def test_edited_labels_are_corrected() -> None:
    replicas = Replicas()
    replicas.round("a")
    replicas.api.put("a", "aa")
    replicas.api.put("b", "bb", **{LABEL: "yes"})
    assert replicas.round(later=15) == ["a"]
    replicas.api.put("a", "aa", **{LABEL: "false"})
    replicas.round(later=15)
    assert replicas.api.pods["a"]["metadata"]["labels"][LABEL] == "true"


def test_crash_between_writes_leaves_no_pod_labelled() -> None:
    replicas = Replicas("abc")
    replicas.round("a")
    replicas.api.breaks = 2
    assert replicas.round("b") == []
    replicas.api.breaks = 1_000
    assert replicas.round("c") == ["c"]


def test_errors_are_logged_once_and_retried(caplog: Any) -> None:
    replicas = Replicas()
    replicas.api.breaks = 0
    for _ in range(10):
        assert replicas.round("a", later=0.5) == []
    assert len(replicas.api.calls) == 3
    assert [record.getMessage() for record in caplog.records] == ["cannot write label mgpu.io/leads: no answer"]
    replicas.api.breaks = 1_000
    assert replicas.round(later=2) == ["a"]


def test_written_is_true_only_for_the_deciding_replica() -> None:
    replicas = Replicas()
    replicas.round("a")
    assert {name: replica.written for name, replica in replicas.labels.items()} == {"a": True, "b": False}
    replicas.round("b")
    assert {name: replica.written for name, replica in replicas.labels.items()} == {"a": False, "b": True}
    replicas.api.breaks = 0
    replicas.round(later=15)
    assert {name: replica.written for name, replica in replicas.labels.items()} == {"a": False, "b": False}


def test_pod_deleted_meanwhile_is_no_error(caplog: Any) -> None:
    replicas = Replicas()
    replicas.round("a")
    replicas.api.between = lambda: replicas.api.pods.pop("a")
    assert replicas.round("b") == ["b"]
    assert not caplog.records


def test_recreated_pod_of_the_same_name_keeps_its_labels() -> None:
    replicas = Replicas()
    replicas.round("a")
    replicas.api.put("a", "new")
    assert replicas.round(later=15) == []
    replicas.api.put("a", "new", **{LABEL: "true"})
    replicas.labels["a"].end()
    assert replicas.api.labelled() == ["a"]
    assert replicas.round("b", later=15) == ["b"]


def test_pod_labelled_by_a_newer_leader_keeps_the_label() -> None:
    replicas = Replicas()
    replicas.round("b")
    replicas.api.between = lambda: replicas.api.put("b", "new", **{LABEL: "true"})
    assert replicas.round("a") == ["b"]
    assert replicas.round(later=2) == ["a"]


def test_former_leader_stops_writing() -> None:
    replicas = Replicas()
    replicas.leader = "a"
    replicas.api.between = lambda: replicas.round("b")
    replicas.labels["a"].round()
    assert replicas.api.labelled() == ["b"]


def test_written_is_false_if_the_replica_stops_deciding_while_it_writes() -> None:
    replicas = Replicas()
    replicas.leader = "a"

    def stop_deciding() -> None:
        replicas.leader = ""

    replicas.api.between = stop_deciding
    replicas.labels["a"].round()
    assert (replicas.api.labelled(), replicas.labels["a"].written) == ([], False)
    assert replicas.round("a", later=2) == ["a"]


def test_late_write_of_a_former_leader_is_corrected() -> None:
    replicas = Replicas()
    assert replicas.round("a") == ["a"]
    replicas.api._patch("b", {"labels": {LABEL: "true"}})
    assert replicas.round(later=15) == ["a"]


def test_ending_leader_releases_the_lease_before_the_label() -> None:
    replicas, stop, order = Replicas(), threading.Event(), []
    replicas.leader = "a"
    patch = replicas.api.patch

    def watched(path: str, body: dict[str, Any]) -> None:
        patch(path, body)
        order.append(replicas.api.labelled())
        stop.set()

    replicas.api.patch = watched  # type: ignore[method-assign]
    replicas.labels["a"].run(stop, lambda: order.append(["lease released"]))
    assert order == [["a"], ["lease released"], []]


def test_ending_follower_writes_nothing() -> None:
    replicas = Replicas()
    replicas.labels["a"].end()
    assert replicas.api.calls == []


STEPS = st.one_of(
    st.tuples(st.just("leads"), st.sampled_from("abc")),
    st.tuples(st.just("edited"), st.sampled_from("abc")),
    st.tuples(st.just("anew"), st.sampled_from("abc")),
    st.tuples(st.just("ends"), st.sampled_from("abc")),
    st.tuples(st.just("breaks"), st.integers(0, 3)),
    st.tuples(st.just("breaks, and takes effect"), st.integers(0, 3)),
)


@given(st.lists(STEPS, max_size=12), st.sampled_from("abc"))
def test_property_label_converges_to_the_deciding_replica(steps: list[tuple[str, Any]], last: str) -> None:
    replicas = Replicas("abc")
    for i, (what, of) in enumerate(steps):
        before = replicas.leader
        if what == "leads":
            replicas.leader = of
        elif what == "edited":
            replicas.api._patch(of, {"labels": {LABEL: None if of in replicas.api.labelled() else "true"}})
        elif what == "anew":
            replicas.start(of, uid=f"{of}{i}")
        elif what == "ends":
            replicas.labels[of].end()
        else:
            replicas.api.breaks, replicas.api.lost = of, "effect" in what
        replicas.round(later=3)
        replicas.api.breaks, replicas.api.lost = 1_000_000, False
        if replicas.leader != before:
            assert replicas.api.labelled() == [of]
    assert replicas.round(last, later=15) == [last]


NAMESPACE = "mgpu-system"
STEP = 2.0


class Pod:
    """The two processes of a pod; a process that is None does not run."""

    def __init__(self, election: "Election", name: str) -> None:
        self._election, self.name, self._started = election, name, 0
        self.start_kube()
        self.start_mgpu()

    def start_kube(self) -> None:
        """Start a kube-scheduler with a new identity. Both processes elect as client-go does."""
        self._started += 1
        api: Any = self._election.theirs
        identity = f"{self.name}_uuid-{self._started}"
        self.kube: Leader | None = Leader(api, NAMESPACE, "l", identity, self._election.clock, wait_for_writes=bool)

    def start_mgpu(self) -> None:
        api: Any = self._election.ours
        theirs: Any = self._election.theirs
        own = OwnKubeScheduler(theirs, NAMESPACE, "l", self.name, self._election.clock)
        identity = f"{self.name}-{self._started}"
        self.mgpu: Leader | None = Leader(
            api, NAMESPACE, "l", identity, self._election.clock, should_yield=own.elsewhere, wait_for_writes=bool
        )

    def round(self) -> None:
        for process in (self.kube, self.mgpu):
            if process:
                process.round()


class Election:
    """Pods with a kube-scheduler and mgpu each. theirs, ours: API servers with the one Lease of each."""

    def __init__(self, names: str = "ab") -> None:
        self.theirs, self.ours, self.now = Leases(), Leases(), 100.0
        self.pods = {name: Pod(self, name) for name in names}

    def clock(self) -> float:
        return self.now

    def round(self, order: str = "", seconds: float = STEP) -> str:
        """Run one round of every process. Return the pod whose mgpu leads; there are never two."""
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

    def kube_leader(self) -> str:
        """Return the pod whose kube-scheduler leads."""
        return "".join(name for name, pod in self.pods.items() if pod.kube and pod.kube.leading)


def crash(pod: Pod) -> None:
    pod.kube = pod.mgpu = None


def test_first_replica_leads_with_its_kube_scheduler() -> None:
    election = Election()
    assert election.round("ba") == election.kube_leader() == "b"
    assert election.rounds(60) == election.kube_leader() == "b"


def test_lead_moves_to_the_pod_of_the_leading_kube_scheduler() -> None:
    election = Election()
    a = election.pods["a"]
    kube, a.kube = a.kube, None
    assert election.round() == "a"  # no kube-scheduler led before that of `b` came
    assert election.kube_leader() == "b"
    a.kube = kube
    assert election.rounds(2 * STEP) == "b"


def test_ending_pod_passes_both_leases_to_the_same_pod() -> None:
    """The kube-scheduler ends first: its sidecar outlives it."""
    election = Election("abc")
    election.rounds(6)
    ending = election.pods["a"]
    assert ending.kube
    assert ending.mgpu
    ending.kube.release()
    ending.kube = None
    ending.mgpu.round()
    assert election.leading() == "a"  # it leads until another kube-scheduler leads
    ending.mgpu.release()
    ending.mgpu = None
    for name in "cb":
        mgpu = election.pods[name].mgpu
        assert mgpu
        mgpu.round()
    assert election.leading() == ""  # neither leads before a kube-scheduler does
    assert election.rounds(2 * STEP) == election.kube_leader()


def test_lost_pod_is_replaced_by_the_other_replica() -> None:
    election = Election()
    election.rounds(6)
    crash(election.pods["a"])
    assert election.rounds(LEASE_SECONDS + 2 * STEP) == election.kube_leader() == "b"


def test_crashed_kube_scheduler_does_not_stop_decisions() -> None:
    election = Election("a")
    election.rounds(6)
    election.pods["a"].kube = None
    for _ in range(30):
        assert election.round() == "a"
    election.pods["a"].start_kube()
    assert election.rounds(LEASE_SECONDS + 2 * STEP) == election.kube_leader() == "a"


def test_replica_leads_without_any_kube_scheduler() -> None:
    election = Election()
    election.pods["a"].kube = election.pods["b"].kube = None
    assert election.round() == "a"
    crash(election.pods["a"])
    assert election.rounds(LEASE_SECONDS + 2 * STEP) == "b"


def test_expired_kube_scheduler_lease_is_ignored() -> None:
    election = Election()
    election.rounds(6)
    election.pods["b"].kube = None
    crash(election.pods["a"])
    assert election.rounds(LEASE_SECONDS + 2 * STEP) == "b"


def test_forbidden_kube_scheduler_lease_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    election = Election()

    def forbidden(path: str) -> dict[str, Any]:
        raise ApiError(403, "Forbidden", f"{path} is forbidden")

    election.pods["a"].kube = election.pods["b"].kube = None
    election.theirs.get = forbidden  # type: ignore[method-assign]
    assert election.rounds(10) == "a"
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 2  # one from each replica
    assert all("cannot find out which kube-scheduler leads" in line for line in warnings)


ELECTION_STEPS = st.tuples(
    st.sampled_from(["crash", "kube crashes", "kube ends", "mgpu crashes", "mgpu ends", "up", "cut off", "nothing"]),
    st.sampled_from("abc"),
    st.permutations("abc"),
    st.sampled_from([0.1, 2.0, 2.2, 16.0]),
)


@given(st.lists(ELECTION_STEPS, max_size=14), st.sampled_from("abc"))
def test_property_at_most_one_leads_and_it_follows_the_kube_scheduler(steps: list[Any], last: str) -> None:
    election = Election("abc")
    for what, name, order, seconds in steps:
        pod = election.pods[name]
        election.ours.reachable = what != "cut off"
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
        election.round("".join(order), seconds)
    election.ours.reachable = True
    for name, pod in election.pods.items():
        if name == last and not pod.kube:
            pod.start_kube()
        if not pod.mgpu:
            pod.start_mgpu()
        if name != last:
            pod.kube = None
    assert election.rounds(3 * LEASE_SECONDS) == election.kube_leader() == last
