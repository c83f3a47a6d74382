"""Namespaces whose pods were deleted by force and still run get no further cards."""

import json
from typing import Any

import pytest

from mgpu.model.device_checkpoints import DELETED_POD
from scheduler.cluster import remnants
from scheduler.cluster.events import Publisher, RemnantsEnded
from scheduler.cluster.remnants import WAIT_SECONDS, Remnants
from tests import builders as b
from tests.scheduler.fake import FakeApi, Replica, admitted, clients, cluster, review

Raw = dict[str, Any]
KEY = "node.koordinator.sh/devices-checkpoints"
RUNS = {
    "podUID": "uid-old",
    "containerName": "0",
    "resourceName": DELETED_POD,
    "deviceIDs": ["GPU-n1-0"],
    "share": {"core": 300, "memory": 1 << 30, "ratio": None},
}
BINDING = {
    "apiVersion": "v1",
    "kind": "Binding",
    "metadata": {"name": "next", "namespace": "default"},
    "target": {"kind": "Node", "name": "n2"},
}
RECORD = {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": "0"}


def told(api: FakeApi, *rows: Raw, node: str = "n1") -> None:
    device = json.loads(json.dumps(api.devices[node]))
    device["metadata"]["annotations"] = {KEY: json.dumps(rows)}
    api.put("devices", device)


def passed(replica: Replica, raw: Raw) -> tuple[list[str], str]:
    """The nodes that the filter passes, and why it refuses n2."""
    answer = clients(replica)[1].post("/filter", json={"Pod": raw, "NodeNames": ["n1", "n2"]}).get_json()
    refused = {**(answer["FailedNodes"] or {}), **(answer["FailedAndUnresolvableNodes"] or {})}
    return answer["NodeNames"] or [], refused.get("n2", "")


@pytest.fixture
def api() -> FakeApi:
    return cluster(("n1", 2), ("n2", 2))


@pytest.fixture
def replica(api: FakeApi) -> Replica:
    """One that has seen pod default/old run on n1, and its deletion by force."""
    api.put("pods", b.share("old", 30, annotations=RECORD, node="n1", phase="Running"))
    replica = Replica(api)
    api.remove("pods", "old")
    replica.deliver()
    return replica


def test_namespace_of_a_remnant_gets_no_cards_on_any_node_until_it_has_ended(api: FakeApi, replica: Replica) -> None:
    told(api, RUNS)
    replica.deliver()
    nodes, why = passed(replica, b.share("next", 30))
    assert nodes == []
    assert "pod default/old was deleted by force and still runs on n1" in why
    told(api)
    replica.deliver()
    assert passed(replica, b.share("next", 30))[0] == ["n1", "n2"]


def test_other_namespaces_get_cards_beside_a_remnant(api: FakeApi, replica: Replica) -> None:
    told(api, RUNS)
    replica.deliver()
    assert passed(replica, b.share("next", 30, namespace="other"))[0] == ["n1", "n2"]


def test_binding_of_a_pod_of_that_namespace_is_denied(api: FakeApi, replica: Replica) -> None:
    told(api, RUNS)
    api.put("pods", b.share("next", 30))
    replica.deliver()
    answer = admitted(replica)(review(BINDING, name="next"))["response"]
    assert not answer["allowed"]
    assert "was deleted by force" in answer["status"]["message"]


def test_pod_that_is_bound_already_waits_and_does_not_fail(api: FakeApi, replica: Replica) -> None:
    told(api, RUNS)
    api.put("pods", b.share("next", 30, node="n2"))
    replica.deliver()
    replica.settle()
    assert api.pod("next")["status"].get("phase") != "Failed"
    assert replica.state.undecided_pods() == ("uid-next",)


def test_node_cannot_name_the_namespace_of_a_pod_that_was_never_seen(api: FakeApi, replica: Replica) -> None:
    told(api, {**RUNS, "podUID": "uid-unknown"})
    replica.deliver()
    assert passed(replica, b.share("next", 30))[0] == ["n1", "n2"]


def test_node_cannot_name_a_pod_that_was_deleted_on_another_node(api: FakeApi, replica: Replica) -> None:
    """A stolen token of one agent would stop any namespace."""
    told(api, {**RUNS, "deviceIDs": ["GPU-n2-0"]}, node="n2")
    replica.deliver()
    assert passed(replica, b.share("next", 30))[0] == ["n1", "n2"]


def test_pod_that_ended_before_its_deletion_is_no_remnant(api: FakeApi) -> None:
    api.put("pods", b.share("old", 30, annotations=RECORD, node="n1", phase="Succeeded"))
    replica = Replica(api)
    api.remove("pods", "old")
    told(api, RUNS)
    replica.deliver()
    assert passed(replica, b.share("next", 30))[0] == ["n1", "n2"]


def test_remnant_in_kube_system_does_not_keep_occupy_pods_from_their_cards(api: FakeApi) -> None:
    """They are made for MtgpuPods of all namespaces."""
    api.put("pods", b.share("old", 30, annotations=RECORD, node="n1", phase="Running", namespace="kube-system"))
    replica = Replica(api)
    api.remove("pods", "old", "kube-system")
    told(api, RUNS)
    replica.deliver()
    occupy = b.occupy_pod("x", "n2")
    assert passed(replica, occupy)[0] == ["n1", "n2"]
    del occupy["metadata"]["labels"]
    assert passed(replica, occupy)[0] == []


def test_remnant_that_does_not_end_stops_its_namespace_for_a_while_only() -> None:
    now = 0.0
    found = Remnants(Publisher(), lambda: now)
    found.deleted("u", "team", "old", "n1")
    found.hold("u", "n1")
    assert found.problem("team")
    now = WAIT_SECONDS
    assert found.problem("team") is None


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Remnants:
    """Which remembers two deleted pods that no node reports."""
    monkeypatch.setattr(remnants, "_MAX_UNREPORTED", 2)
    return Remnants(Publisher(), lambda: 0.0)


def delete(found: Remnants, *uids: str) -> None:
    for uid in uids:
        found.deleted(uid, f"of-{uid}", uid, "n1")


def held_up(found: Remnants, *uids: str) -> list[bool]:
    return [found.problem(f"of-{uid}") is not None for uid in uids]


def test_memory_of_deleted_pods_is_bounded(found: Remnants) -> None:
    delete(found, "a", "b", "c")
    for uid in ("a", "b", "c"):
        found.hold(uid, "n1")
    assert held_up(found, "a", "b", "c") == [False, True, True]


def test_remnant_is_not_forgotten_for_later_deletions(found: Remnants) -> None:
    """A tenant would delete as many small pods by force, and be given cards again."""
    delete(found, "a")
    found.hold("a", "n1")
    delete(found, "b", "c", "d", "e")
    assert held_up(found, "a") == [True]
    found.release("a")
    assert held_up(found, "a") == [False]


def test_remnant_whose_report_changes_stays_one(found: Remnants) -> None:
    delete(found, "a")
    for _ in range(3):
        found.hold("a", "n1")
        found.release("a")
    found.hold("a", "n1")
    assert held_up(found, "a") == [True]


def test_end_of_the_last_remnant_of_a_namespace_is_published() -> None:
    events = Publisher()
    ended: list[str] = []
    events.subscribe(RemnantsEnded, lambda event: ended.append(event.namespace))
    found = Remnants(events, lambda: 0.0)
    for uid in ("a", "b"):
        found.deleted(uid, "team", uid, "n1")
        found.hold(uid, "n1")
    found.release("a")
    assert ended == []
    found.release("b")
    found.release("b")
    assert ended == ["team"]


def test_seconds_are_those_of_the_latest_remnant() -> None:
    now = 0.0
    found = Remnants(Publisher(), lambda: now)
    for uid in ("a", "b"):
        found.deleted(uid, "team", uid, "n1")
        now += 100
    assert found.seconds("team") == 0, "no node reports any"
    found.hold("a", "n1")
    assert found.seconds("team") == WAIT_SECONDS - 200
    found.hold("b", "n1")
    assert found.seconds("team") == WAIT_SECONDS - 100
    now = WAIT_SECONDS + 100
    assert (found.seconds("team"), found.problem("team")) == (0, None)
