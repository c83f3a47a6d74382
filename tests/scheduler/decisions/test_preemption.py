"""`/preempt` as kube-scheduler 1.36 calls it: Go keys, the pod with its priority, victims by uid or whole."""

from itertools import combinations
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from werkzeug.test import Client

from mgpu.model.device_object import write_device
from mgpu.model.errors import RetryLater
from mgpu.model.gpu_requests import Placement
from mgpu.model.pods import Node
from scheduler.engine.node_assessment import assess
from tests import builders as b
from tests.examples import examples
from tests.scheduler.fake import SETTINGS, Replica, clients, cluster

INDEX = "vke.volcengine.com/gpu-index-container-c"


@pytest.fixture
def replica() -> Replica:
    return Replica(cluster(("n1", 2), ("n2", 1)))


@pytest.fixture
def client(replica: Replica) -> Client:
    return clients(replica)[1]


def asking(name: str, core: int, **more: Any) -> dict[str, Any]:
    """Whole cards come with their memory."""
    return b.pod(name, b.container("c", core, 1024 if core % 100 else None), **more)


def wanting(core: int, priority: int = 10, cpu: str = "", **spec: Any) -> dict[str, Any]:
    pod = asking("p", core)
    if cpu:
        pod["spec"]["containers"][0]["resources"]["requests"]["cpu"] = cpu
    pod["spec"] |= {"priority": priority, "preemptionPolicy": "PreemptLowerPriority", **spec}
    return pod


def running(replica: Replica, name: str, core: int, card: object, priority: int, **changes: Any) -> dict[str, Any]:
    """A pod on n1, or on `node`; its uid is its name. changes: node, cpu, labels, started, deleting."""
    record = {"vke.volcengine.com/assumed": "true", INDEX: str(card)}
    pod = asking(name, core, annotations=record, uid=name, node=changes.get("node", "n1"), phase="Running")
    pod["spec"]["priority"] = priority
    pod["status"]["startTime"] = changes.get("started", "2026-01-01T00:00:00Z")
    pod["metadata"]["labels"] = changes.get("labels", {})
    if "cpu" in changes:
        pod["spec"]["containers"][0]["resources"]["requests"]["cpu"] = changes["cpu"]
    if changes.get("deleting"):
        pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    replica.api.put("pods", pod)
    replica.deliver()
    return pod


def preempt(
    client: Client, pod: dict[str, Any], violations: int = 0, **victims: str | list[str]
) -> dict[str, list[str]]:
    """node → uids of the victims, in the order answered."""
    asked = {
        node: {"Pods": [{"UID": uid} for uid in uids], "NumPDBViolations": violations} for node, uids in victims.items()
    }
    reply = client.post("/preempt", json={"Pod": pod, "NodeNameToVictims": None, "NodeNameToMetaVictims": asked})
    assert reply.status_code == 200, reply.text
    rows = orjson.loads(reply.data)["NodeNameToMetaVictims"]
    return {node: [row["UID"] for row in victims["Pods"]] for node, victims in rows.items()}


def two_full_cards(replica: Replica) -> None:
    for name, card, priority in (("a", 0, 1), ("c", 0, 3), ("x", 1, 2), ("y", 1, 1)):
        running(replica, name, 50, card, priority)


def test_victims_are_pods_of_one_card(replica: Replica, client: Client) -> None:
    """kube-scheduler spares the most important ones of the node, and frees two halves of two cards."""
    two_full_cards(replica)
    assert preempt(client, wanting(100), n1="ay") == {"n1": ["x", "y"]}


def test_victims_without_gpu_are_kept(replica: Replica, client: Client) -> None:
    two_full_cards(replica)
    assert preempt(client, wanting(100), n1=["web", "a", "y"]) == {"n1": ["x", "web", "y"]}
    assert preempt(client, wanting(100), n1=["a", "y", "web"]) == {"n1": ["x", "y", "web"]}


def test_victims_for_missing_cpu_are_kept(replica: Replica, client: Client) -> None:
    running(replica, "a", 50, 0, 3, cpu="60")
    running(replica, "b", 50, 1, 1)
    running(replica, "c", 50, 1, 1)
    assert preempt(client, wanting(100, cpu="2"), n1="a") == {"n1": ["b", "c"]}
    assert preempt(client, wanting(100, cpu="8"), n1="a") == {"n1": ["a"]}


@pytest.mark.parametrize(
    "spec",
    [
        {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "v"}}]},
        {"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{}]}}},
        {"topologySpreadConstraints": [{"whenUnsatisfiable": "DoNotSchedule"}]},
        {"resourceClaims": [{"name": "r"}]},
        {"initContainers": [{"name": "i", "ports": [{"hostPort": 80}]}]},
        {"initContainers": [{"name": "i", "resources": {"requests": {"example.com/nic": "1"}}}]},
        {"resources": {"requests": {"hugepages-2Mi": "64Mi"}}},
    ],
)
def test_victims_for_possible_other_reasons_are_kept(replica: Replica, client: Client, spec: dict[str, Any]) -> None:
    two_full_cards(replica)
    assert preempt(client, wanting(100, **spec), n1="a") == {"n1": ["x", "a", "y"]}
    assert preempt(client, wanting(100, **spec), n1="c") == {"n1": ["c", "a"]}, "3 goes anyway, so one will do"
    harmless: dict[str, Any] = {"volumes": [{"name": "v", "emptyDir": {}}]}
    assert preempt(client, wanting(100, **harmless), n1="a") == {"n1": ["x", "y"]}


def test_victims_of_kube_scheduler_are_kept_if_a_card_is_unhealthy(replica: Replica, client: Client) -> None:
    """The sum of the node is short though a card is idle: only the pod on the lost card makes up for it."""
    replica.api.put("devices", write_device(Node("n1"), "", (b.card(0, healthy=False), b.card(1))))
    running(replica, "a", 100, 0, 1)
    assert preempt(client, wanting(100), n1="a") == {"n1": ["a"]}


def test_victims_are_kept_if_cards_are_free(replica: Replica, client: Client) -> None:
    running(replica, "a", 50, 0, 1)
    assert preempt(client, wanting(100), n1="a") == {"n1": ["a"]}


def test_nodes_where_no_eviction_helps_are_missing(replica: Replica, client: Client) -> None:
    running(replica, "a", 50, 0, 10)
    running(replica, "x", 50, 1, 11)
    running(replica, "y", 50, 1, 1)
    running(replica, "z", 10, 0, 1, node="n2")
    assert preempt(client, wanting(100), n1="y", n2="z", n9="z") == {"n2": ["z"]}


def test_terminating_pods_are_the_first_victims(replica: Replica, client: Client) -> None:
    running(replica, "a", 100, 0, 9, deleting=True)
    running(replica, "b", 100, 1, 1)
    assert preempt(client, wanting(100), n1="b") == {"n1": ["a"]}
    assert preempt(client, wanting(100, 9), n1="b") == {"n1": ["b"]}, "not for one that is as important"


def test_reserved_cards_have_no_victims(replica: Replica, client: Client) -> None:
    replica.api.put("pods", b.share("q", 60))
    running(replica, "a", 60, 0, 1, node="n2")
    running(replica, "b", 60, 1, 1)
    known = replica.state.gpu_pod("uid-q")
    assert known is not None
    replica.decider.decide(known, "n1")
    assert preempt(client, wanting(60), n1="b", n2="a") == {"n1": ["b"], "n2": ["a"]}
    assert preempt(client, wanting(200), n1="b") == {}


def test_cards_of_nominated_pods_are_not_given_twice(replica: Replica, client: Client) -> None:
    running(replica, "a", 100, 0, 3)
    running(replica, "b", 100, 1, 1, deleting=True)
    nominee = asking("first", 100)
    nominee["spec"]["priority"], nominee["status"]["nominatedNodeName"] = 10, "n1"
    for pod in (nominee, wanting(100), wanting(100, 11) | {"metadata": asking("q", 100)["metadata"]}):
        replica.api.put("pods", pod)
    replica.deliver()
    assert preempt(client, wanting(100), n1="b") == {"n1": ["a"]}
    assert preempt(client, replica.api.pod("q"), n1="b") == {"n1": ["b"]}, "the more important one may have it"


def test_victim_with_unknown_cards_frees_all_cards(replica: Replica, client: Client) -> None:
    running(replica, "a", 60, "?", 5)
    running(replica, "b", 50, 0, 1)
    assert preempt(client, wanting(100), n1="b") == {"n1": ["a"]}


def test_preempt_accepts_whole_pods_and_keys_of_any_case(replica: Replica, client: Client) -> None:
    """nodeCacheCapable: false."""
    two_full_cards(replica)
    pods = [replica.api.pod("a"), replica.api.pod("y")]
    body = {"pod": wanting(100), "nodeNameToVictims": {"n1": {"pods": pods, "numPDBViolations": 0}}}
    answer = orjson.loads(client.post("/preempt", json=body).data)
    assert answer == {"NodeNameToMetaVictims": {"n1": {"Pods": [{"UID": "x"}, {"UID": "y"}], "NumPDBViolations": 0}}}


def test_preempt_for_pod_without_gpu_returns_the_proposal(client: Client) -> None:
    assert preempt(client, b.pod("p", b.container("c")), n1="zb", n9="a") == {"n1": ["z", "b"], "n9": ["a"]}
    assert preempt(client, wanting(150), n1="a") == {}, "a malformed ask fits nowhere"


def test_victims_without_budget_violation_are_preferred(replica: Replica, client: Client) -> None:
    budget = {
        "metadata": {"namespace": "default", "name": "web"},
        "spec": {"selector": {"matchLabels": {"app": "web"}}},
        "status": {"disruptionsAllowed": 0},
    }
    running(replica, "a", 100, 0, 1, labels={"app": "web"})
    running(replica, "b", 100, 1, 2)
    assert preempt(client, wanting(100), n1="a") == {"n1": ["a"]}
    replica.disruption_budgets.changed(budget)
    assert preempt(client, wanting(100), n1="a") == {"n1": ["b"]}
    asked = {"n1": {"Pods": [{"UID": "web"}, {"UID": "a"}], "NumPDBViolations": 2}}
    for core, violations in ((100, 1), (200, 2)):
        reply = client.post("/preempt", json={"Pod": wanting(core), "NodeNameToMetaVictims": asked})
        assert orjson.loads(reply.data)["NodeNameToMetaVictims"]["n1"]["NumPDBViolations"] == violations


@pytest.mark.parametrize("body", [{"Pod": 1}, {}, {"Pod": {}, "NodeNameToMetaVictims": {"n1": {"Pods": [{}]}}}])
def test_preempt_with_malformed_body_is_bad_request(client: Client, body: Any) -> None:
    assert client.post("/preempt", json=body).status_code == 400


def test_preempt_before_sync_is_unavailable(replica: Replica, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_yet() -> None:
        raise RetryLater("not in sync yet")

    monkeypatch.setattr(replica, "may_answer", not_yet)
    assert client.post("/preempt", json={"Pod": wanting(1)}).status_code == 503


@examples(8)
@given(st.data())
def test_property_no_smaller_or_less_important_victims_suffice(data: st.DataObject) -> None:
    """Whatever kube-scheduler proposes."""
    replica = Replica(cluster(("n1", 2)))
    free, priorities = [100, 100], {}
    for i in range(data.draw(st.integers(1, 6))):
        core, card = data.draw(st.sampled_from((20, 30, 50))), data.draw(st.integers(0, 1))
        if core <= free[card]:
            free[card] -= core
            priorities[f"u{i}"] = data.draw(st.integers(0, 4))
            running(replica, f"u{i}", core, card, priorities[f"u{i}"])
    pod = wanting(data.draw(st.sampled_from((40, 60, 100, 200))), 4)
    replica.api.put("pods", pod)
    replica.deliver()
    known, lower = replica.state.gpu_pod("uid-p"), [uid for uid, priority in priorities.items() if priority < 4]
    assert known is not None
    assert known.request is not None
    proposed = data.draw(st.lists(st.sampled_from(lower), min_size=1, unique=True)) if lower else ["web"]

    def fits(gone: Any) -> bool:
        left = Replica(cluster(("n1", 2)))
        for uid in priorities.keys() - set(gone):
            left.api.put("pods", replica.api.pod(uid))
        left.deliver()
        view = left.state.node_snapshot("n1", "")
        assert view.node is not None
        assert known is not None
        assert known.request is not None
        return isinstance(assess(known.request, view.node, view.cards, SETTINGS), Placement)

    def badness(uids: Any) -> tuple[int, int, int]:
        return max(priorities[u] for u in uids), len(uids), sum(priorities[u] for u in uids)

    sets = [chosen for n in range(1, len(lower) + 1) for chosen in combinations(lower, n) if fits(chosen)]
    found = preempt(clients(replica)[1], pod, n1=proposed)
    if fits(()):
        assert sorted(found["n1"]) == sorted(proposed), "they are in the way of something else"
    elif not sets:
        assert found == {}
    else:
        assert badness(found["n1"]) == min(map(badness, sets))
        assert fits(found["n1"])
