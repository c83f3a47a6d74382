"""Pods with scheduling gates get no cards, and `inspect`, the page and `explain` show that they are gated."""

from collections.abc import Callable
from typing import Any

import orjson
import pytest

from mgpu.dialects.mtgpu import read_mtgpupod
from mgpu.kube import ApiError
from mgpu.model.errors import BadObject
from mgpu.model.gpu_requests import Rejection
from mgpu.model.pods import GATED, MAX_GATES, read_pod
from mgpu.settings import load_settings
from scheduler.api.page.waiting_list import Waiting
from scheduler.api.volcano import TaskStatus, VolcanoExtender
from scheduler.background import Pace
from scheduler.cluster.gpu_pods import read_gpu_pod
from scheduler.cluster.reservations import Reservation
from scheduler.decisions.explanation import Explainer
from scheduler.decisions.gang_outlook import GangOutlooks
from scheduler.explain_command import _json as explanation_json
from tests import builders as b
from tests.scheduler.fake import SETTINGS, Replica, admitted, clients, cluster

GATE = "kueue.x-k8s.io/admission"
Raw = dict[str, Any]


@pytest.fixture
def replica() -> Replica:
    return Replica(cluster(("n1", 1), ("n2", 1)))


def gated(name: str, *gates: str) -> Raw:
    raw = b.share(name, 60)
    raw["spec"]["schedulingGates"] = [{"name": gate} for gate in gates or (GATE,)]
    return raw


def bind_by_a_scheduler(replica: Replica, raw: Raw) -> str:
    replica.api.admit = admitted(replica)
    with pytest.raises(ApiError) as refused:
        replica.api.bind(raw["metadata"]["name"], "n1")
    return str(refused.value)


def bind_by_the_extender(replica: Replica, raw: Raw) -> str:
    meta = raw["metadata"]
    body = {"PodName": meta["name"], "PodNamespace": meta["namespace"], "PodUID": meta["uid"], "Node": "n1"}
    answer = clients(replica)[1].post("/bind", json=body).json
    assert answer is not None
    return str(answer["Error"])


def allocate_by_volcano(replica: Replica, raw: Raw) -> str:
    meta: Raw = raw["metadata"]
    names = {"UID": meta["uid"], "Name": meta["name"], "Namespace": meta["namespace"], "Job": "j"}
    task = {**names, "NodeName": "n1", "Status": TaskStatus.ALLOCATED, "Pod": raw}
    process: Any = replica
    return str(VolcanoExtender(process).allocate(orjson.dumps({"task": task}))["errorMessage"])


@pytest.mark.parametrize("bind", [bind_by_a_scheduler, bind_by_the_extender, allocate_by_volcano])
def test_binding_of_a_gated_pod_reserves_nothing(
    replica: Replica, bind: Callable[[Replica, Raw], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved: list[str] = []
    reserve = replica.state.reservations.reserve

    def count(decision: Reservation, *given: Any, **more: Any) -> bool:
        reserved.append(decision.name)
        return reserve(decision, *given, **more)

    monkeypatch.setattr(replica.state.reservations, "reserve", count)
    raw = replica.api.put("pods", gated("p"))
    replica.deliver()
    assert GATED in bind(replica, raw)
    assert reserved == []
    free = replica.api.put("pods", b.share("q", 60))
    replica.deliver()
    known = read_gpu_pod(free, SETTINGS)
    assert known is not None
    assert not isinstance(replica.decider.decide(known, "n1"), Rejection)
    assert reserved == ["q"]


def test_binding_of_a_gated_pod_that_no_watch_has_delivered_is_rejected(replica: Replica) -> None:
    raw = replica.api.put("pods", gated("p"))
    assert GATED in bind_by_a_scheduler(replica, raw)
    assert replica.cards_held() == {}


def test_gated_pod_needs_no_late_binding_decision(replica: Replica) -> None:
    replica.api.put("pods", gated("p"))
    replica.settle()
    assert (replica.state.undecided_pods(), replica.cards_held(), replica.events) == ((), {}, [])
    assert replica.api.annotations("p") == {}


def test_mtgpupod_with_gates_is_invalid_and_holds_nothing() -> None:
    """The Pod of an MtgpuPod is created with a node, which Kubernetes forbids for a Pod with gates."""
    raw = b.mtgpupod()
    raw["spec"]["schedulingGates"] = [{"name": GATE}]
    with pytest.raises(BadObject, match=r"spec\.schedulingGates: must be empty"):
        read_mtgpupod(raw)
    api = cluster(("n1", 1))
    api.put("mtgpupods", raw)
    assert Replica(api, settings=load_settings("dialects: {mtgpu: {enabled: true}}")).cards_held() == {}


def test_names_of_gates_are_bounded() -> None:
    gates = read_pod(gated("p", *(f"{i}/{'x' * 1000}" for i in range(1000)))).gates
    assert len(gates) == MAX_GATES
    assert sum(map(len, gates)) < 3000


def waiting(replica: Replica) -> dict[str, tuple[bool, str]]:
    """Return for each waiting pod of the web page whether it is gated, and its first reason."""
    gangs = GangOutlooks(replica.state, replica.filter, SETTINGS)
    page = Waiting(replica.state, replica.filter, gangs, Pace(0), lambda work: work())
    page.json(["n1", "n2"], 1)
    answer = page.json(["n1", "n2"], 1)
    texts = [" ".join(row["text"] for row in why["reasons"]) for why in answer["whys"]]
    return {pod["name"]: (pod.get("gated", False), texts[pod["why"]]) for pod in answer["pods"]}


def test_page_tells_gated_pods_from_equal_pods_that_wait_for_cards(replica: Replica) -> None:
    """Pods with equal requests share a reason, which the filter computes. For it, a gated pod fits on no node."""
    taken = {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": "0"}
    for name in ("n1", "n2"):
        replica.api.put("pods", b.share(f"on-{name}", 60, node=name, annotations=taken))
    for raw in (gated("a-gated"), b.share("b-waits", 60)):
        replica.api.put("pods", raw)
    replica.deliver()
    found = waiting(replica)
    assert list(found) == ["default/b-waits", "default/a-gated"]
    assert found["default/b-waits"] == (False, "insufficient GPU (1 card: 1 core 20 percent short)")
    assert found["default/a-gated"][0]
    assert GATE in found["default/a-gated"][1]
    assert "Kueue has not admitted it" in found["default/a-gated"][1]


def explained(replica: Replica, raw: Raw) -> Raw:
    """Return the JSON of `mgpu explain` for a pod."""
    return explanation_json(Explainer(replica.state, SETTINGS).pod(raw, ["n1", "n2"], []))


def test_explain_names_the_gates(replica: Replica) -> None:
    raw = replica.api.put("pods", gated("p", "team/quota", GATE))
    replica.deliver()
    found = explained(replica, raw)
    assert found["gates"] == ["team/quota", GATE]
    meaning = "Kueue has not admitted it; its Workload has the reason"
    assert found["verdict"] == [
        f"It waits for its scheduling gates first: team/quota, {GATE} ({meaning}).",
        "Its cards fit on 2 of 2 nodes, so it does not wait for cards.",
    ]


@pytest.mark.parametrize(
    ("host", "verdict"),
    [
        ("n2", "Its cards fit on 1 of 2 nodes, so it does not wait for cards."),
        (
            "n1",
            "Its nodeSelector allows only n1, where its cards do not fit: "
            "insufficient GPU (1 card: 1 core 20 percent short).",
        ),
    ],
)
def test_explain_of_a_pod_that_is_pinned_to_a_host_is_about_that_node(
    replica: Replica, host: str, verdict: str
) -> None:
    taken = {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": "0"}
    replica.api.put("pods", b.share("on-n1", 60, node="n1", annotations=taken))
    raw = b.share("p", 60)
    raw["spec"]["nodeSelector"] = {"kubernetes.io/hostname": host}
    replica.api.put("pods", raw)
    replica.deliver()
    found = explained(replica, raw)
    assert (found["verdict"][0], found["gates"]) == (verdict, [])
