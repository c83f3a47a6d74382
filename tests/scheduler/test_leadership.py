"""Which pod is labelled, whatever happens while somebody comes to lead."""

import copy
import threading
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mgpu.kube import ApiError, Unreachable
from mgpu.kube.leader import LABEL
from scheduler.leadership import LeaderLabel

PATH = "/api/v1/namespaces/mgpu-system/pods"
OURS = {"app.kubernetes.io/name": "mgpu", "app.kubernetes.io/component": "scheduler"}
SELECTOR = "app.kubernetes.io/name=mgpu,app.kubernetes.io/component=scheduler"


class Pods:
    """An API server with pods. breaks: before how many more calls it answers no longer; `lost`: what it was told
    last took effect all the same. between: done once, after the next list.
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


class World:
    """Replicas in pods `a`, `b`, … whose uid is the name doubled; who of them decides is said here."""

    def __init__(self, names: str = "ab") -> None:
        self.api, self.now, self.leader = Pods(), 100.0, ""
        self.replicas: dict[str, LeaderLabel] = {}
        for name in names:
            self.start(name)

    def start(self, name: str, uid: str = "") -> None:
        client: Any = self.api
        self.api.put(name, uid or 2 * name)
        self.replicas[name] = LeaderLabel(
            client,
            "mgpu-system",
            uid or 2 * name,
            not_deciding_reason=lambda: None if self.leader == name else "another leads",
            clock=lambda: self.now,
        )

    def round(self, leader: str = "", later: float = 0.0) -> list[str]:
        """One of every replica; who is labelled then."""
        self.leader = leader or self.leader
        self.now += later
        for replica in self.replicas.values():
            replica.round()
        return self.api.labelled()


def test_only_the_pod_of_the_deciding_replica_has_the_label() -> None:
    world = World("abc")
    assert world.round() == []
    assert world.round("b") == ["b"]
    assert world.round("a") == ["a"]
    assert world.round("b") == ["b"]


def test_labels_of_other_pods_are_untouched() -> None:
    world = World()
    world.api.put("theirs", "x", **{LABEL: "true"})
    world.api.pods["theirs"]["metadata"]["labels"]["app.kubernetes.io/component"] = "webhook"
    assert world.round("a") == ["a", "theirs"]


def test_correct_labels_are_checked_but_not_written() -> None:
    world = World()
    world.round("a")
    world.api.calls.clear()
    for _ in range(120):
        assert world.round(later=0.25) == ["a"]
    assert world.api.calls == ["list"] * 2


def test_edited_labels_are_corrected() -> None:
    world = World()
    world.round("a")
    world.api.put("a", "aa")
    world.api.put("b", "bb", **{LABEL: "yes"})
    assert world.round(later=15) == ["a"]
    world.api.put("a", "aa", **{LABEL: "false"})
    world.round(later=15)
    assert world.api.pods["a"]["metadata"]["labels"][LABEL] == "true"


def test_crash_between_writes_leaves_no_pod_labelled() -> None:
    world = World("abc")
    world.round("a")
    world.api.breaks = 2
    assert world.round("b") == []
    world.api.breaks = 1_000
    assert world.round("c") == ["c"]


def test_errors_are_logged_once_and_retried(caplog: Any) -> None:
    world = World()
    world.api.breaks = 0
    for _ in range(10):
        assert world.round("a", later=0.5) == []
    assert len(world.api.calls) == 3
    assert [record.getMessage() for record in caplog.records] == ["cannot write label mgpu.io/leads: no answer"]
    world.api.breaks = 1_000
    assert world.round(later=2) == ["a"]


def test_written_is_true_only_for_the_deciding_replica() -> None:
    world = World()
    world.round("a")
    assert {name: replica.written for name, replica in world.replicas.items()} == {"a": True, "b": False}
    world.round("b")
    assert {name: replica.written for name, replica in world.replicas.items()} == {"a": False, "b": True}
    world.api.breaks = 0
    world.round(later=15)
    assert {name: replica.written for name, replica in world.replicas.items()} == {"a": False, "b": False}


def test_pod_deleted_meanwhile_is_no_error(caplog: Any) -> None:
    world = World()
    world.round("a")
    world.api.between = lambda: world.api.pods.pop("a")
    assert world.round("b") == ["b"]
    assert not caplog.records


def test_recreated_pod_of_the_same_name_keeps_its_labels() -> None:
    world = World()
    world.round("a")
    world.api.put("a", "new")
    assert world.round(later=15) == []
    world.api.put("a", "new", **{LABEL: "true"})
    world.replicas["a"].end()
    assert world.api.labelled() == ["a"]
    assert world.round("b", later=15) == ["b"]


def test_pod_labelled_by_a_newer_leader_keeps_the_label() -> None:
    world = World()
    world.round("b")
    world.api.between = lambda: world.api.put("b", "new", **{LABEL: "true"})
    assert world.round("a") == ["b"]
    assert world.round(later=2) == ["a"]


def test_former_leader_stops_writing() -> None:
    world = World()
    world.leader = "a"
    world.api.between = lambda: world.round("b")
    world.replicas["a"].round()
    assert world.api.labelled() == ["b"]


def test_late_write_of_a_former_leader_is_corrected() -> None:
    world = World()
    assert world.round("a") == ["a"]
    world.api._patch("b", {"labels": {LABEL: "true"}})
    assert world.round(later=15) == ["a"]


def test_ending_leader_releases_the_lease_before_the_label() -> None:
    world, stop, order = World(), threading.Event(), []
    world.leader = "a"
    patch = world.api.patch

    def watched(path: str, body: dict[str, Any]) -> None:
        patch(path, body)
        order.append(world.api.labelled())
        stop.set()

    world.api.patch = watched  # type: ignore[method-assign]
    world.replicas["a"].run(stop, lambda: order.append(["lease given up"]))
    assert order == [["a"], ["lease given up"], []]


def test_ending_follower_writes_nothing() -> None:
    world = World()
    world.replicas["a"].end()
    assert world.api.calls == []


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
    world = World("abc")
    for i, (what, of) in enumerate(steps):
        before = world.leader
        if what == "leads":
            world.leader = of
        elif what == "edited":
            world.api._patch(of, {"labels": {LABEL: None if of in world.api.labelled() else "true"}})
        elif what == "anew":
            world.start(of, uid=f"{of}{i}")
        elif what == "ends":
            world.replicas[of].end()
        else:
            world.api.breaks, world.api.lost = of, "effect" in what
        world.round(later=3)
        world.api.breaks, world.api.lost = 1_000_000, False
        if world.leader != before:
            assert world.api.labelled() == [of]
    assert world.round(last, later=15) == [last]
