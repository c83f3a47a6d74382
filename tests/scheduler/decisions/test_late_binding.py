"""Pods that are bound without cards get them late, or fail."""

from typing import Any

import pytest

from mgpu.kube import ApiError, Unreachable
from mgpu.kube.fence import FencedApi
from scheduler.decisions.late_binding import REASON
from tests import builders as b
from tests.scheduler.fake import Replica, cluster

INDEX = "vke.volcengine.com/gpu-index-container-c"


@pytest.fixture
def replica() -> Replica:
    return Replica(cluster(("n1", 2)))


def arrive(replica: Replica, *pods: dict[str, Any]) -> None:
    for raw in pods:
        replica.api.put("pods", raw)
    replica.deliver()
    replica.late.work()
    replica.deliver()


def phase(replica: Replica, name: str) -> str:
    return str(replica.api.pod(name)["status"]["phase"])


def test_pod_created_with_a_node_gets_cards(replica: Replica) -> None:
    arrive(replica, b.share("p", 60, node="n1"), b.share("q", 60, node="n1"))
    assert [replica.api.annotations(name)[INDEX] for name in "pq"] == ["0", "1"]
    assert [h.bound for h in replica.state.holdings()] == [True, True]


def test_pod_that_does_not_fit_fails_with_the_reason(replica: Replica) -> None:
    arrive(replica, *(b.share(name, 60, node="n1") for name in "pqr"))
    status = replica.api.pod("r")["status"]
    assert (status["phase"], status["reason"]) == ("Failed", REASON)
    assert "2 cards: 2 core 20 percent short" in status["message"]
    assert ("r", REASON, status["message"]) in replica.events


def test_failed_pod_is_failed_again_after_kubelet_overwrites_it(replica: Replica) -> None:
    arrive(replica, *(b.share(name, 60, node="n1") for name in "pqr"))
    replica.api.remove("pods", "p")
    replica.api.edit_pod("r", lambda raw: raw["status"].update(phase="Pending"))
    replica.deliver()
    replica.late.work()
    assert phase(replica, "r") == "Failed"
    assert INDEX not in replica.api.annotations("r")


def test_malformed_pod_fails_with_its_problem(replica: Replica) -> None:
    arrive(replica, b.share("p", 150, node="n1"))
    assert "multiple of 100" in replica.api.pod("p")["status"]["message"]


def test_pod_on_excluded_node_fails(replica: Replica) -> None:
    replica.api.put("nodes", b.node("n1", labels={"vke.node.gpu.schedule": "none"}))
    arrive(replica, b.share("p", node="n1"))
    assert phase(replica, "p") == "Failed"


def test_unreadable_record_holds_all_cards_until_the_late_decision(replica: Replica) -> None:
    replica.api.put("pods", b.share("p", 60, annotations={INDEX: "banana"}, node="n1"))
    replica.deliver()
    assert replica.cards_held() == {"p": [(None, 600)]}
    assert replica.events[0][:2] == ("p", "UnreadableRecord")
    replica.late.work()
    replica.deliver()
    assert replica.api.annotations("p")[INDEX] == "0"
    assert replica.cards_held() == {"p": [(0, 600)]}


@pytest.mark.parametrize("change", [{"status": {"phase": "Running"}}, {"status": {"phase": "Succeeded"}}])
def test_pod_that_has_started_gets_no_decision(replica: Replica, change: dict[str, Any]) -> None:
    arrive(replica, {**b.share("p", node="n1"), **change})
    assert INDEX not in replica.api.annotations("p")


def with_a_proxy_that_runs() -> dict[str, Any]:
    proxy = b.container("proxy", restartPolicy="Always")
    raw = b.pod("p", b.container("c", 60, 1024), init=(b.container("prepare"), proxy), node="n1")
    done = {"name": "prepare", "containerID": "containerd://1", "state": {"terminated": {}}}
    runs = {"name": "proxy", "containerID": "containerd://2", "state": {"running": {}}}
    waits = {"name": "c", "state": {"waiting": {"reason": "CreateContainerConfigError"}}}
    raw["status"] |= {"initContainerStatuses": [done, runs], "containerStatuses": [waits]}
    return raw


def test_containers_without_request_may_have_run_before_the_decision(replica: Replica) -> None:
    arrive(replica, with_a_proxy_that_runs())
    assert replica.cards_held() == {"p": [(0, 600)]}
    assert replica.api.annotations("p")[INDEX] == "0"


def test_containers_without_request_may_run_at_a_write_conflict(replica: Replica) -> None:
    replica.api.put("pods", b.share("p", 60, node="n1"))
    replica.deliver()
    replica.api.edit_pod(
        "p", lambda raw: raw.update({key: with_a_proxy_that_runs()[key] for key in ("spec", "status")})
    )
    replica.late.work()
    assert replica.api.annotations("p")[INDEX] == "0"


def test_pod_waits_for_its_node_to_appear(replica: Replica) -> None:
    arrive(replica, b.share("p", 60, node="n2"))
    assert phase(replica, "p") == "Pending"
    other = cluster(("n2", 1))
    replica.api.put("nodes", other.nodes["n2"])
    replica.deliver()
    replica.late.work()
    assert phase(replica, "p") == "Pending"  # a node that starts has no Device yet
    replica.api.put("devices", other.devices["n2"])
    replica.deliver()
    replica.late.work()
    assert replica.api.annotations("p")[INDEX] == "0"


def test_pod_on_node_without_cards_fails_after_a_while(replica: Replica) -> None:
    replica.api.put("nodes", b.node("n2"))
    arrive(replica, b.share("p", node="n2"))
    for _ in range(40):
        replica.clock.now += 1
        replica.late.work()
    assert phase(replica, "p") == "Failed"
    assert "no GPU cards" in replica.api.pod("p")["status"]["message"]


def test_conflict_is_retried_with_the_current_pod(replica: Replica) -> None:
    replica.api.put("pods", b.share("p", 60, node="n1"))
    replica.deliver()
    replica.api.edit_pod("p", lambda raw: raw["metadata"].update(labels={"kubelet": "was here"}))
    replica.late.work()
    assert replica.api.annotations("p")[INDEX] == "0"


def test_record_written_meanwhile_is_not_replaced(replica: Replica) -> None:
    replica.api.put("pods", b.share("p", 60, node="n1"))
    replica.deliver()
    record = {INDEX: "1", "vke.volcengine.com/assumed": "true"}
    replica.api.edit_pod("p", lambda raw: raw["metadata"].update(annotations=record))
    replica.late.work()
    replica.deliver()
    assert replica.api.annotations("p") == record
    assert replica.cards_held() == {"p": [(1, 600)]}


def test_recreated_pod_is_not_written(replica: Replica) -> None:
    replica.api.put("pods", b.share("p", 60, node="n1"))
    replica.deliver()
    replica.api.put("pods", b.share("p", 60, uid="second"))
    replica.late.work()
    assert replica.api.annotations("p") == {}


def test_outage_of_the_api_delays_the_decision(replica: Replica) -> None:
    replica.api.put("pods", b.share("p", 60, node="n1"))
    replica.deliver()
    replica.api.reachable = False
    for _ in range(20):
        replica.late.work()
        replica.clock.now += 31
    replica.api.reachable = True
    replica.late.work()
    assert replica.api.annotations("p")[INDEX] == "0"


def test_rejected_write_delays_the_decision(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: str, _: object) -> dict[str, Any]:
        raise ApiError(403, "Forbidden", path)

    replica.api.put("pods", b.share("p", 60, node="n1"))
    replica.deliver()
    with monkeypatch.context() as patched:
        patched.setattr(replica.api, "patch", refused)
        replica.late.work()
    replica.clock.now += 31
    replica.late.work()
    assert replica.api.annotations("p")[INDEX] == "0"


def test_replica_that_does_not_lead_writes_nothing(replica: Replica) -> None:
    replica.leading = False
    arrive(replica, b.share("p", 60, node="n1"))
    assert replica.api.annotations("p") == {}
    replica.leading = True
    for uid in replica.state.undecided_pods():
        replica.late.add(uid)
    replica.late.work()
    assert replica.api.annotations("p")[INDEX] == "0"


def test_terminating_pod_gets_no_decision(replica: Replica) -> None:
    raw = b.share("p", 60, node="n1")
    raw["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    arrive(replica, raw)
    assert replica.api.annotations("p") == {}
    assert replica.state.undecided_pods() == ()


def test_decision_of_former_leader_is_not_written(replica: Replica) -> None:
    """The replica was stopped between its decision and the write, and another one leads by now."""

    def fence() -> None:
        raise Unreachable("not sent: this replica does not lead any more")

    replica.late._api = FencedApi(replica.api, fence)  # type: ignore[arg-type]
    arrive(replica, b.share("p", 60, node="n1"), b.share("q", 150, node="n1"))
    assert INDEX not in replica.api.annotations("p")
    assert phase(replica, "q") == "Pending"


def test_pods_of_one_namespace_do_not_delay_another_namespace(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 pods with `nodeName` of one tenant delayed the pod of another by 12 s on a real API server."""
    looked_at: list[str] = []

    def attempt(uid: str) -> float:
        looked_at.append(uid)
        return 0.0

    monkeypatch.setattr(replica.late, "_attempt", attempt)
    for raw in (*(b.share(f"h{i}", 60, node="n1", namespace="hostile") for i in range(20)), b.share("p", 1, node="n1")):
        replica.api.put("pods", raw)
    replica.deliver()
    replica.late.work()
    assert len(looked_at) == 21
    assert "p" in str(looked_at[:2])


def test_cleanup_of_failed_pods_costs_in_proportion_to_their_number(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended pods stay by the thousand, and were all looked for with each pod that failed."""
    asked: list[str] = []
    real = replica.state.gpu_pod

    def gpu_pod(uid: str) -> Any:
        asked.append(uid)
        return real(uid)

    monkeypatch.setattr(replica.state, "gpu_pod", gpu_pod)
    many = 400
    arrive(replica, *(b.share(f"p{i}", 150, node="n1") for i in range(many)))
    assert phase(replica, f"p{many - 1}") == "Failed"
    assert len(asked) < 12 * many


def test_deleted_failed_pods_are_forgotten(replica: Replica) -> None:
    for start in range(0, 500, 100):
        names = [f"p{start + i}" for i in range(100)]
        arrive(replica, *(b.share(name, 150, node="n1") for name in names))
        for name in names:
            replica.api.remove("pods", name)
        replica.deliver()
    assert len(replica.late._failed) <= 200
