"""Volcano's plugin `extender` places gangs by cards, and a gang that does not fit holds none."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
from werkzeug.test import Client

from mgpu.model.errors import BadObject
from mgpu.model.node_slices import EXISTING, LABEL
from playground.scheduling.volcano_session import Job, Session
from scheduler.api.app import listeners
from scheduler.api.volcano import VolcanoExtender, make_app, read_token
from scheduler.decisions.filter import Filter
from tests import builders as b
from tests.scheduler.fake import SETTINGS, Replica, admitted, bind_all, cluster

TOKEN = "t" * 32


def wanting(name: str, core: int) -> dict[str, Any]:
    """Return a pod that requests a share of a card, or a whole one for 100."""
    return b.pod(name, b.container("c", core, None if core == 100 else 1024))


class Volcano:
    """A cluster whose scheduler is Volcano. Each call of `session` is one session.

    predicate: whether Volcano is configured with this verb.
    """

    predicate = True

    def __init__(self, *cards: tuple[str, int]) -> None:
        self.api = cluster(*cards)
        for (_, count), raw in zip(cards, self.api.nodes.values(), strict=True):
            raw["status"]["allocatable"] |= {b.CORE: str(100 * count), b.MEMORY: str(81920 * count)}
        self.replica = Replica(self.api)
        self.api.admit = admitted(self.replica)
        process: Any = self.replica
        self.client = Client(make_app(VolcanoExtender(process), TOKEN, 10))
        self.jobs: list[tuple[str, int, list[str]]] = []
        self.calls: list[str] = []

    def call(self, verb: str, body: dict[str, Any]) -> Any:
        self.calls.append(verb)
        reply = self.client.post(f"/{TOKEN}/{verb}", json=body)
        assert reply.status_code == 200
        return orjson.loads(reply.data)

    def job(self, name: str, count: int, core: int, minimum: int | None = None) -> None:
        names = [f"{name}-{i}" for i in range(count)]
        for pod in names:
            self.api.put("pods", wanting(pod, core))
        self.jobs.append((name, count if minimum is None else minimum, names))
        self.replica.deliver()

    def bound(self, name: str) -> int:
        pods = next(names for job, _, names in self.jobs if job == name)
        return sum(bool(self.api.pod(pod)["spec"].get("nodeName")) for pod in pods)

    def session(self, order: Sequence[str] = (), binpack: str = "", prefer: str = "") -> list[str]:
        """Run a session and post the Bindings. Return the bindings that were refused."""
        pods = [pod for pod in self.api.pods.values() if pod["spec"].get("nodeName")]
        nodes = self.api.nodes.values()
        session = Session(nodes, pods, self.call, binpack, predicate=self.predicate, prefer=prefer)
        decided: dict[str, str] = {}
        for name, minimum, names in sorted(self.jobs, key=lambda job: order.index(job[0]) if order else 0):
            decided |= session.place(Job(name, minimum, [self.api.pod(pod) for pod in names]))
        refused = bind_all(self.replica, decided)
        self.replica.suggestions.work()
        self.replica.deliver()
        return [*session.refused, *refused]

    def used(self, node: str) -> list[int]:
        """Return the core of each card that pods hold, in percent."""
        return [state.core_used // 10 for state in self.replica.state.node_snapshot(node, "").cards]


@pytest.fixture
def three() -> Volcano:
    return Volcano(("n1", 3))


def task(pod: dict[str, Any], node: str = "", status: int = 2) -> dict[str, Any]:
    meta = pod["metadata"]
    return {"UID": meta["uid"], "Name": meta["name"], "NodeName": node, "Status": status, "Pod": pod}


def test_pod_that_requests_no_gpu_passes_and_reserves_nothing(three: Volcano) -> None:
    plain = three.api.put("pods", b.pod("plain", b.container("c")))
    three.replica.deliver()
    assert three.call("predicate", {"task": task(plain), "node": {"Name": "n1"}}) == {}
    assert three.call("allocate", {"task": task(plain, "n1")}) == {"errorMessage": ""}
    assert three.call("prioritize", {"task": task(plain), "nodes": [{"Name": "n1"}]})["nodeScore"] == {"n1": 0.0}
    assert three.call("preemptable", {"evictor": task(plain), "evictees": None}) == {"status": 0, "victims": []}


def test_gpu_pods_are_bound_with_their_cards(three: Volcano) -> None:
    three.job("a", 3, 60)
    assert three.session() == []
    assert three.bound("a") == 3
    assert three.used("n1") == [60, 60, 60]


def test_gang_that_does_not_fit_by_cards_is_not_bound_at_all_and_holds_nothing(three: Volcano) -> None:
    three.job("a", 4, 60)
    assert [three.session() for _ in range(3)] == [[], [], []]
    assert three.bound("a") == 0
    assert three.used("n1") == [0, 0, 0]


def test_of_two_gangs_for_the_same_cards_one_is_bound_whole() -> None:
    volcano = Volcano(("n1", 3), ("n2", 3))
    for name in ("a", "b"):
        volcano.job(name, 4, 60)
    for order in (["a", "b"], ["b", "a"], ["a", "b"]):
        assert volcano.session(order) == []
    assert [volcano.bound("a"), volcano.bound("b")] == [4, 0]


def test_of_two_gangs_of_eight_on_twelve_cards_one_is_bound_whole() -> None:
    volcano = Volcano(*((f"n{i}", 4) for i in range(3)))
    volcano.job("a", 8, 60)
    volcano.job("b", 8, 60)
    assert volcano.session() + volcano.session() == []
    assert [volcano.bound("a"), volcano.bound("b")] == [8, 0]


def test_node_that_binpack_prefers_is_not_chosen_if_its_cards_do_not_suffice() -> None:
    volcano = Volcano(("n0", 2), ("n1", 1))
    volcano.job("old", 2, 60)
    volcano.session()
    assert volcano.used("n0") == [60, 60] or volcano.used("n1") == [60]
    volcano.job("new", 1, 60)
    assert volcano.session(binpack=b.CORE) == []
    assert volcano.bound("new") == 1


def test_pods_beyond_the_cards_are_not_chosen_for_a_node() -> None:
    volcano = Volcano(("n1", 8))
    volcano.job("a", 12, 60, minimum=1)
    assert volcano.session() == []
    assert volcano.bound("a") == 8
    volcano.calls.clear()
    assert volcano.session() == []
    assert set(volcano.calls) == {"predicate"}


def test_gang_of_whole_cards_waits_while_one_of_them_is_shared() -> None:
    volcano = Volcano(("n1", 4))
    volcano.job("small", 1, 10)
    volcano.session()
    volcano.job("a", 4, 100)
    assert volcano.session() == []
    assert volcano.bound("a") == 0
    assert volcano.used("n1") == [10, 0, 0, 0]
    volcano.api.remove("pods", "small-0")
    volcano.jobs.pop(0)
    volcano.replica.deliver()
    assert volcano.session() == []
    assert volcano.bound("a") == 4


def test_gang_that_was_given_up_for_minutes_is_bound_once_its_cards_are_free(three: Volcano) -> None:
    three.job("old", 1, 60)
    three.session()
    three.job("a", 3, 60)
    for _ in range(300):
        three.replica.clock.now += 1
        assert three.session() == []
    three.api.remove("pods", "old-0")
    three.jobs.pop(0)
    three.replica.deliver()
    assert three.session() == []
    assert three.bound("a") == 3


def test_reservation_that_a_binding_uses_is_not_withdrawn(three: Volcano) -> None:
    pod = three.api.put("pods", b.share("p", 60))
    three.replica.deliver()
    three.call("allocate", {"task": task(pod, "n1")})
    three.api.bind("p", "n1")
    three.call("deallocate", {"task": task(pod, "n1", 1)})  # The watch has not delivered the bound pod.
    assert three.used("n1") == [60, 0, 0]


@pytest.mark.parametrize(("node", "status"), [("n2", 1), ("", 1), ("n1", 32)])
def test_reservation_is_withdrawn_only_for_a_pending_task_on_its_node(three: Volcano, node: str, status: int) -> None:
    pod = three.api.put("pods", b.share("p", 60))
    three.replica.deliver()
    three.call("allocate", {"task": task(pod, "n1")})
    three.call("deallocate", {"task": task(pod, node, status)})
    assert three.used("n1") == [60, 0, 0]


@pytest.mark.parametrize("status", [1, 4, 16, 32, None])
def test_only_an_allocated_task_gets_a_reservation(three: Volcano, status: object) -> None:
    pod = three.api.put("pods", b.share("p", 60))
    three.replica.deliver()
    assert three.call("allocate", {"task": task(pod, "n1") | {"Status": status}}) == {"errorMessage": ""}
    assert three.used("n1") == [0, 0, 0]


def test_lost_deallocate_ends_with_the_time_of_the_reservation(three: Volcano) -> None:
    pod = three.api.put("pods", b.share("p", 60))
    three.replica.deliver()
    three.call("allocate", {"task": task(pod, "n1")})
    three.replica.clock.now += SETTINGS.scheduler.reservation_seconds + 1
    three.replica.decider.check_overdue()
    assert three.used("n1") == [0, 0, 0]


def test_pod_is_judged_by_its_uid_and_not_by_the_node_that_volcano_wrote_into_it(three: Volcano) -> None:
    pod = three.api.put("pods", b.share("p", 60))
    three.replica.deliver()
    thought = {**pod, "spec": {**pod["spec"], "nodeName": "n9"}}
    assert three.call("predicate", {"task": task(thought), "node": {"Name": "n1"}}) == {}


def test_predicate_tells_whether_an_eviction_can_help(three: Volcano) -> None:
    three.job("a", 3, 60)
    three.session()
    small, large = (
        three.api.put("pods", b.share(name, core, mib)) for name, core, mib in (("s", 60, 1024), ("l", 10, 90000))
    )
    three.replica.deliver()
    assert three.call("predicate", {"task": task(small), "node": {"Name": "n1"}})["code"] == 2
    assert three.call("predicate", {"task": task(large), "node": {"Name": "n1"}})["code"] == 3


def test_scores_are_those_of_kube_scheduler_in_volcanos_scale(three: Volcano) -> None:
    three.api.put("nodes", b.node("n2"))
    three.job("old", 3, 60)
    three.session()
    pod = three.api.put("pods", b.share("p", 20))
    three.replica.deliver()
    reply = three.call("prioritize", {"task": task(pod), "nodes": [{"Name": "n1"}, {"Name": "n2"}]})
    gpu_pod = three.replica.state.gpu_pod("uid-p")
    assert gpu_pod
    assert reply["nodeScore"] == {"n1": 10.0 * three.replica.filter.scores(gpu_pod, ["n1"])[0], "n2": 0.0}
    assert reply["nodeScore"]["n1"] > 0


@pytest.mark.parametrize("verb", ["preemptable", "reclaimable"])
def test_victims_are_the_tasks_whose_cards_the_evictor_needs(three: Volcano, verb: str) -> None:
    three.job("a", 3, 60)
    three.session()
    pod = three.api.put("pods", wanting("p", 100))
    plain = three.api.put("pods", b.pod("plain", b.container("c"), node="n1"))
    three.replica.deliver()
    evictees = [task(three.api.pod(name), "n1", 32) for name in ("a-1", "a-2")] + [task(plain, "n1", 32)]
    reply = three.call(verb, {"evictor": task(pod), "evictees": evictees})
    assert reply["status"] == 1
    assert [victim["Name"] for victim in reply["victims"]] in (["a-1"], ["a-2"])
    assert reply["victims"][0] in evictees
    large = three.api.put("pods", b.share("large", 10, 90000))
    three.replica.deliver()
    assert three.call(verb, {"evictor": task(large), "evictees": evictees}) == {"status": 1, "victims": []}


def test_slices_are_planned_for_a_pod_once_a_session_has_asked_for_all_nodes() -> None:
    volcano = Volcano(("n1", 1))
    volcano.api.put("nodes", b.node("n1", labels={LABEL: "mig"}, **{EXISTING: '{"cards": {"0": []}}'}))
    own = {"name": "c", "image": "cuda", "resources": {"limits": {"nvidia.com/mig-1g.10gb": "1"}}}
    pod = volcano.api.put("pods", b.pod("p", own))
    volcano.replica.deliver()
    planned: list[tuple[object, ...]] = []
    volcano.replica.filter = Filter(volcano.replica.state, SETTINGS)  # That of the fake requests plans itself.
    volcano.replica.planning.request_plan = lambda *asked: planned.append(asked[1:])  # type: ignore[method-assign]
    for _ in range(2):
        assert volcano.call("predicate", {"task": task(pod), "node": {"Name": "n1"}})["status"]
    assert planned == [(["n1"], [])]


BROKEN = [
    b"",
    b"[]",
    b"{}",
    b'{"task": {}}',
    b'{"task": {"Pod": {"metadata": {"name": 1}}}}',
    b'{"evictor": {"Pod": 1}}',
]


@pytest.mark.parametrize("verb", ["predicate", "allocate", "deallocate", "prioritize", "preemptable", "reclaimable"])
@pytest.mark.parametrize("body", BROKEN)
def test_malformed_body_is_answered_as_an_error_that_volcano_understands(
    three: Volcano, verb: str, body: bytes
) -> None:
    reply = three.client.post(f"/{TOKEN}/{verb}", data=body)
    assert reply.status_code == 200
    found = orjson.loads(reply.data)
    if verb == "predicate":
        assert (found["code"], bool(found["status"])) == (1, True)
    elif verb in ("preemptable", "reclaimable"):
        assert found == {"status": -1, "victims": []}
    else:
        assert found["errorMessage"]


def test_replica_that_does_not_decide_answers_with_an_error(three: Volcano) -> None:
    pod = three.api.put("pods", b.share("p", 60))
    three.replica.deliver()
    three.replica.leading = False
    assert three.call("predicate", {"task": task(pod), "node": {"Name": "n1"}})["code"] == 1
    assert "leads" in three.call("allocate", {"task": task(pod, "n1")})["errorMessage"]


def test_caller_without_the_token_learns_nothing(three: Volcano) -> None:
    assert three.client.post("/x/predicate", data=b"{}").status_code == 404
    assert three.client.post(f"/{TOKEN}é/predicate", data=b"{}").status_code == 404


def test_token_file_must_contain_a_token(tmp_path: Path) -> None:
    path = tmp_path / "token"
    for text in (None, b"short", b"\xff" * 40, b"a b" * 20):
        if text is not None:
            path.write_bytes(text)
        with pytest.raises(BadObject, match="volcanoTokenFile"):
            read_token(str(path))
    with pytest.raises(BadObject, match="is required"):
        read_token("")
    path.write_text(f"{TOKEN}\n")
    assert read_token(str(path)) == TOKEN


def test_verbs_are_served_only_if_the_port_is_set(three: Volcano, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    process: Any = three.replica
    assert len(listeners(process)) == 2
    own = SETTINGS.scheduler.model_copy(update={"volcano_port": 0, "volcano_token_file": str(tmp_path / "token")})
    process.settings = SETTINGS.model_copy(update={"scheduler": own})
    assert [listen.tls for listen in listeners(process)] == [True, False, False]
