"""gpushare's users and their tools are served as before, without the faults of gpushare's own extender.

Each fault in the list of docs/design/gpushare.md has a test, here or in
tests/deviceplugin/allocation/test_gpushare_pods.py.
"""

import threading
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import orjson
import pytest
from werkzeug.test import Client

from mgpu.dialects import gpushare
from mgpu.kube.reflector import Reflector
from mgpu.model.cards import Card
from mgpu.model.device_object import write_device
from mgpu.model.pods import Node
from mgpu.settings import load_settings
from tests import builders as b
from tests.scheduler.fake import FakeApi, Replica, admitted, clients, cluster
from tests.scheduler.gpushare import allocated, asking, container

PATH = "/gpushare-scheduler"
GIB, MIB = load_settings(), load_settings("dialects: {gpushare: {memoryUnit: MiB}}")


@pytest.fixture
def replica() -> Replica:
    """`n1` with one card of 80 GiB, behind the binding webhook."""
    made = Replica(cluster(("n1", 1)))
    made.api.admit = admitted(made)
    return made


@pytest.fixture
def client(replica: Replica) -> Client:
    return clients(replica)[1]


def post(client: Client, verb: str, **body: Any) -> Any:
    reply = client.post(f"{PATH}/{verb}", json=body)
    assert reply.status_code == 200, reply.text
    return orjson.loads(reply.data)


def fits(client: Client, units: object, node: str = "n1") -> bool:
    passed = post(client, "filter", Pod=asking("probe", units), NodeNames=[node])["NodeNames"]
    return bool(passed == [node])


def bind(client: Client, name: str, node: str = "n1") -> str:
    answer = post(client, "bind", PodName=name, PodNamespace="default", PodUID=f"uid-{name}", Node=node)
    return str(answer["Error"])


def put(replica: Replica, raw: dict[str, Any]) -> None:
    replica.api.put("pods", raw)
    replica.deliver()


def listed(replica: Replica, name: str, namespace: str = "kube-system", **data: object) -> None:
    """Put a ConfigMap with a list of unhealthy cards."""
    replica.api.put("configmaps", {"metadata": {"namespace": namespace, "name": name}, "data": data})
    replica.deliver()


def resize(replica: Replica, gib: int, count: int = 1) -> None:
    replica.api.put("devices", write_device(Node("n1"), "", b.cards(count, gib)))
    replica.deliver()


def used(client: Client, node: str = "n1") -> list[int]:
    """Return the units in use of each card by `/inspect`."""
    (row,) = orjson.loads(client.get(f"{PATH}/inspect/{node}").data)["nodes"]
    return [device["usedGPU"] for device in row["devs"]]


def test_terminating_pod_holds_its_card(replica: Replica, client: Client) -> None:
    raw = allocated("p", 60, "n1", 0)
    raw["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    put(replica, raw)
    assert not fits(client, 30)
    replica.api.remove("pods", "p")
    replica.deliver()
    assert fits(client, 80)


def test_overcommitted_card_has_nothing_free(replica: Replica, client: Client) -> None:
    put(replica, allocated("p", 60, "n1", 0))
    resize(replica, 40)
    assert not fits(client, 1)
    put(replica, asking("q", 1))
    assert "no cards" in bind(client, "q")
    assert used(client) == [60]


def test_replica_that_does_not_lead_cannot_overcommit_a_card(replica: Replica, client: Client) -> None:
    other = Replica(replica.api)

    other.leading = False
    for name in "pq":
        put(replica, asking(name, 50))
    other.deliver()
    assert bind(client, "p") == ""
    assert "no cards" in bind(clients(other)[1], "q")  # the leader's decision is not in its cache
    assert "nodeName" not in replica.api.pod("q")["spec"]


def test_next_leader_counts_the_holdings_of_the_last(replica: Replica, client: Client) -> None:
    put(replica, asking("p", 50))
    assert bind(client, "p") == ""
    put(replica, asking("q", 50))
    assert "no cards" in bind(clients(Replica(replica.api))[1], "q")


def test_changed_device_counts_at_once(replica: Replica, client: Client) -> None:
    assert not fits(client, 100)
    resize(replica, 141)
    assert fits(client, 100)
    resize(replica, 141, count=2)
    assert used(client) == [0, 0]


def test_changed_capacity_of_node_without_device_counts_at_once() -> None:
    replica = Replica(cluster())
    for units, fit in (("16", False), ("32", True)):
        raw = b.node("n1")
        raw["status"]["capacity"] |= {gpushare.MEMORY: units, gpushare.COUNT: "1"}
        replica.api.put("nodes", raw)
        replica.deliver()
        assert fits(clients(replica)[1], 20) is fit


def test_node_with_gpu_count_alone_has_no_cards() -> None:
    replica = Replica(cluster())
    client = clients(replica)[1]
    raw = b.node("n1")
    raw["status"]["capacity"] |= {gpushare.COUNT: "2"}
    replica.api.put("nodes", raw)
    replica.deliver()
    assert orjson.loads(client.get(f"{PATH}/inspect").data) == {"nodes": []}
    raw["status"]["capacity"] |= {gpushare.MEMORY: "32"}
    replica.api.put("nodes", raw)
    replica.deliver()
    (node,) = orjson.loads(client.get(f"{PATH}/inspect").data)["nodes"]
    assert [device["totalGPU"] for device in node["devs"]] == [16, 16]
    assert fits(client, 16)


def test_recreated_pod_does_not_leak_the_old_share(replica: Replica, client: Client) -> None:
    put(replica, allocated("p", 60, "n1", 0, uid="first"))
    replica.api.remove("pods", "p")
    replica.api.put("pods", allocated("p", 10, "n1", 0, uid="second"))
    replica.deliver()
    assert used(client) == [10]
    assert fits(client, 70)


def test_recreated_pod_before_deletion_event_does_not_leak_the_old_share(replica: Replica, client: Client) -> None:
    """A new list delivers new pods before deleted ones."""
    old = allocated("p", 60, "n1", 0, uid="first")
    put(replica, old)
    replica.state.pod_changed(allocated("p", 10, "n1", 0, uid="second"))
    replica.state.pod_gone(old)
    assert used(client) == [10]


class Lists:
    """An API server whose watches never deliver an event."""

    def __init__(self, replica: Replica) -> None:
        self._replica, self.lists = replica, 0

    def pages(self, _: str) -> Iterator[tuple[list[dict[str, Any]], str]]:
        self.lists += 1
        yield list(self._replica.api.pods.values()), str(self.lists)

    def watch(self, *_: str) -> "Lists":
        return self

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        return iter(())

    def close(self) -> None:
        """Nothing is open."""

    end = close


def test_pod_deleted_while_the_watch_was_down_does_not_leak(replica: Replica, client: Client) -> None:
    lists: Any = Lists(replica)
    watch = Reflector(lists, "/api/v1/pods", replica.state.pod_changed, replica.state.pod_gone)
    replica.api.put("pods", asking("p", 60))
    watch.start()
    try:
        assert watch.wait_synced(20)
        assert bind(client, "p") == ""  # no event of it is delivered
        assert used(client) == [60]
        replica.api.remove("pods", "p")
        assert watch.refresh(20)
    finally:
        watch.stop()
    assert used(client) == [0]
    assert fits(client, 80)


def test_pod_on_missing_node_does_not_prevent_the_start() -> None:
    api = cluster(("n1", 1))
    api.put("pods", allocated("lost", 60, "gone", 0))
    api.put("pods", allocated("p", 20, "n1", 0))
    replica = Replica(api)
    client = clients(replica)[1]
    assert used(client) == [20]
    assert fits(client, 60)
    api.put("nodes", b.node("gone"))
    api.put("devices", write_device(Node("gone"), "", b.cards(1, node="gone")))
    replica.deliver()
    assert used(client, "gone") == [60]


@pytest.mark.parametrize("gpus", ["x", "0,x", ",", "1.5", "-1", "0;1", 3, "٣"])
def test_malformed_unhealthy_list_marks_no_card_and_is_reported(replica: Replica, client: Client, gpus: object) -> None:
    listed(replica, "unhealthy-gpu-n1", gpus=gpus)
    assert fits(client, 80)
    ((name, reason, message),) = replica.events
    assert (name, reason) == ("n1", "BadUnhealthyList")
    assert "unhealthy-gpu-n1 marks no card: data.gpus" in message


def test_requests_during_many_deletions_are_all_answered() -> None:
    replica = Replica(cluster(("n1", 8), ("n2", 8)))
    names = [f"p{i}" for i in range(200)]
    for i, name in enumerate(names):
        replica.api.put("pods", allocated(name, 3, f"n{i % 2 + 1}", i % 8))
    replica.deliver()
    failed: list[object] = []
    answered, over = [0] * 4, threading.Event()

    def request(me: int, client: Client) -> None:
        try:
            while not over.is_set() or answered[me] < 3:
                post(client, "filter", Pod=asking("probe", 60), NodeNames=["n1", "n2"])
                post(client, "prioritize", Pod=asking("probe", 60), NodeNames=["n1", "n2"])
                assert client.get(f"{PATH}/inspect").status_code == 200
                answered[me] += 1
        except BaseException as error:
            failed.append(error)
            raise

    # The apps are made here because Python before 3.11.8 may raise "AST constructor recursion depth mismatch" where two
    # threads compile at a time (CPython issue 106905). Werkzeug compiles its rules.
    threads = [threading.Thread(target=request, args=(i, clients(replica)[1])) for i in range(len(answered))]
    for thread in threads:
        thread.start()
    for name in names:
        replica.api.remove("pods", name)
        replica.deliver("pods")
    over.set()
    for thread in threads:
        thread.join(60)
    assert failed == []
    assert min(answered) >= 3
    client = clients(replica)[1]
    assert used(client) == used(client, "n2") == [0] * 8


def test_inspect_of_unknown_node_is_not_found(client: Client) -> None:
    reply = client.get(f"{PATH}/inspect/n9")
    assert reply.status_code == 404
    assert orjson.loads(reply.data) == {"error": "there is no node n9"}


def test_filter_answers_while_a_binding_is_under_way(replica: Replica, client: Client) -> None:
    put(replica, asking("p", 60))
    inside, go_on = threading.Event(), threading.Event()
    create = replica.api.create

    def slowly(path: str, body: dict[str, Any]) -> dict[str, Any]:
        inside.set()
        assert go_on.wait(60)
        return create(path, body)

    replica.api.create = slowly  # type: ignore[method-assign]
    answers: list[str] = []
    binding = threading.Thread(target=lambda: answers.append(bind(clients(replica)[1], "p")))
    binding.start()
    try:
        assert inside.wait(60)
        assert fits(client, 20)  # answered while the binding is on its way,
        assert not fits(client, 30)  # and counts what it will take
        assert used(client) == [60]
    finally:
        go_on.set()
        binding.join(60)
    assert answers == [""]


@pytest.mark.parametrize("key", [gpushare.INDEX, gpushare.OF_POD, gpushare.OF_CARD, gpushare.ALLOCATION])
@pytest.mark.parametrize("value", ["", "x", "-1", "1e1", "0x1", "99999999999999999999"])
def test_unreadable_annotation_does_not_count_as_0(replica: Replica, client: Client, key: str, value: str) -> None:
    raw = allocated("p", 60, "n1", 0, phase="Running")
    raw["metadata"]["annotations"][key] = value
    put(replica, raw)
    assert not fits(client, 30)
    assert fits(client, 20)
    assert ("p", "UnknownCards") in [event[:2] for event in replica.events]


def test_unreadable_card_index_holds_every_card() -> None:
    replica = Replica(cluster(("n1", 3)))
    raw = allocated("p", 60, "n1", "x", phase="Running")
    put(replica, raw)
    assert not fits(clients(replica)[1], 30)


def test_init_containers_count(replica: Replica, client: Client) -> None:
    raw = b.pod("p", container("c", 10), init=(container("i", 60),))
    assert not post(client, "filter", Pod=asking("x", 81), NodeNames=["n1"])["NodeNames"]
    put(replica, raw)
    assert bind(client, "p") == ""
    replica.deliver()
    assert used(client) == [60]
    assert not fits(client, 30)
    assert fits(client, 20)


def test_restartable_init_containers_are_added(replica: Replica, client: Client) -> None:
    raw = b.pod("p", container("c", 50), init=({**container("i", 40), "restartPolicy": "Always"},))
    put(replica, raw)
    assert "no cards" in bind(client, "p")
    assert replica.state.holdings() == ()


def node_of(api: FakeApi, name: str, *mib: int) -> None:
    api.put("nodes", b.node(name))
    made = tuple(Card(i, f"GPU-{name}-{i}", "P100", size << 20, minor=i) for i, size in enumerate(mib))
    api.put("devices", write_device(Node(name), "", made))


def with_free(api: FakeApi, name: str, *free: int) -> None:
    """Add a node whose cards of 16,276 MiB have so much free beside pods of gpushare's own scheduler."""
    node_of(api, name, *(16276 for _ in free))
    for card, left in enumerate(free):
        if left < 16276:
            api.put("pods", allocated(f"{name}-{card}", 16276 - left, name, card))


def bound(replica: Replica, raw: dict[str, Any], node: str) -> dict[str, str]:
    """The record of a pod that is bound by the extender."""
    replica.api.admit = admitted(replica)
    replica.api.put("pods", raw)
    replica.deliver()
    meta = raw["metadata"]
    body = {"PodName": meta["name"], "PodNamespace": "default", "PodUID": meta["uid"], "Node": node}
    assert post(clients(replica)[1], "bind", **body) == {"Error": ""}
    replica.deliver()
    return replica.api.annotations(meta["name"])


def test_choice_equals_the_example_of_the_seed() -> None:
    """Of 12207, 8138, 4069 and 16276 MiB free, the second is the least that fits 8138."""
    api = FakeApi()
    with_free(api, "n1", 12207, 8138, 4069, 16276)
    record = bound(Replica(api, settings=MIB), asking("p", 8138), "n1")
    assert (record[gpushare.INDEX], record[gpushare.OF_CARD], record[gpushare.OF_POD]) == ("1", "16276", "8138")


def test_filter_equals_the_example_of_the_seed() -> None:
    """N1 has 4069 MiB left, N2 twice 4069 on two cards, N3 8138 on one."""
    api = FakeApi()
    with_free(api, "n1", 0, 4069)
    with_free(api, "n2", 4069, 4069)
    with_free(api, "n3", 8138, 0)
    client = clients(Replica(api, settings=MIB))[1]
    found = post(client, "filter", Pod=asking("p", 8138), NodeNames=["n1", "n2", "n3"])
    assert found["NodeNames"] == ["n3"]
    assert found["FailedNodes"]["n2"] == "insufficient GPU (2 cards: 2 memory 4.0 GiB short)"
    assert set(found["FailedNodes"]) == {"n1", "n2"}


def test_first_of_equal_cards_is_chosen() -> None:
    replica = Replica(cluster(("n1", 3)))
    assert [bound(replica, asking(name, 50), "n1")[gpushare.INDEX] for name in "pqr"] == ["0", "1", "2"]


def test_cards_of_different_sizes_count_with_their_own_size() -> None:
    api = FakeApi()
    node_of(api, "n1", 22919, 12196, 40960)
    replica = Replica(api)
    assert bound(replica, asking("p", 12), "n1")[gpushare.INDEX] == "0"
    assert bound(replica, asking("q", 11), "n1")[gpushare.INDEX] == "1"
    assert bound(replica, asking("r", 40), "n1")[gpushare.OF_CARD] == "40"


def test_each_container_has_its_card_and_record() -> None:
    replica = Replica(cluster(("n1", 2)))
    raw = b.pod("p", container("a", 50), container("b", 60), container("none", 0) | {"resources": {}})
    record = bound(replica, raw, "n1")
    assert orjson.loads(record[gpushare.ALLOCATION]) == {"a": {"0": 50}, "b": {"1": 60}}
    assert record[gpushare.OF_POD] == "110"
    assert [state.memory_free >> 30 for state in replica.state.node_snapshot("n1", "").cards] == [30, 20]


def test_policy_of_the_dialect_is_configurable() -> None:
    api = cluster(("n1", 2))
    api.put("pods", allocated("x", 10, "n1", 0))
    spread = load_settings("dialects: {gpushare: {policy: spread}}")
    assert bound(Replica(api, settings=spread), asking("p", 10), "n1")[gpushare.INDEX] == "1"


@pytest.mark.parametrize(("settings", "each"), [(GIB, 80), (MIB, 80 * 1024)])
def test_eight_cards_are_filled_in_either_unit(settings: Any, each: int) -> None:
    replica = Replica(cluster(("n1", 8)), settings=settings)
    given = [bound(replica, asking(f"p{i}", each // 2), "n1")[gpushare.INDEX] for i in range(16)]
    assert given == [str(i // 2) for i in range(16)]
    client = clients(replica)[1]
    assert post(client, "filter", Pod=asking("q", 1), NodeNames=["n1"])["NodeNames"] == []
    (node,) = orjson.loads(client.get(f"{PATH}/inspect/n1").data)["nodes"]
    assert (node["totalGPU"], node["usedGPU"]) == (8 * each, 8 * each)


def test_routes_accept_both_forms_of_nodes() -> None:
    client = clients(Replica(cluster(("n1", 1))))[1]
    whole = post(client, "filter", Pod=asking("p", 80), Nodes={"items": [b.node("n1"), b.node("n9")]})
    assert [node["metadata"]["name"] for node in whole["Nodes"]["items"]] == ["n1"]
    assert post(client, "filter", pod=asking("p", 80), nodenames=["n1"])["NodeNames"] == ["n1"]
    assert post(client, "prioritize", Pod=asking("p", 80), NodeNames=["n1"])[0]["Host"] == "n1"


def test_inspect_lists_cards_and_their_holders() -> None:
    api = cluster(("n1", 2), ("n0", 1), ("none", 0))
    api.put("pods", allocated("p", 20, "n1", 1))
    record = {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": "1"}
    api.put("pods", b.share("m", 50, 1500, node="n1", annotations=record))
    client = clients(Replica(api))[1]
    nodes = orjson.loads(client.get(f"{PATH}/inspect").data)["nodes"]
    assert [node["name"] for node in nodes] == ["n0", "n1"]
    assert nodes[1] == {
        "name": "n1",
        "totalGPU": 160,
        "usedGPU": 22,
        "devs": [
            {"id": 0, "totalGPU": 80, "usedGPU": 0, "pods": []},
            {
                "id": 1,
                "totalGPU": 80,
                "usedGPU": 22,
                "pods": [
                    {"name": "m", "namespace": "default", "usedGPU": 2},
                    {"name": "p", "namespace": "default", "usedGPU": 20},
                ],
            },
        ],
    }
    assert orjson.loads(client.get(f"{PATH}/inspect/n1").data)["nodes"] == nodes[1:]


def test_inspect_streams_node_by_node() -> None:
    """With 5,000 nodes and their pods the whole answer was in memory, once for each caller."""
    api = cluster(*((f"n{i}", 2) for i in range(50)))
    reply = clients(Replica(api))[1].get(f"{PATH}/inspect")
    pieces = list(reply.iter_encoded())
    assert max(piece.count(b'"devs"') for piece in pieces) == 1
    assert len(orjson.loads(b"".join(pieces))["nodes"]) == 50


def test_inspect_has_nothing_free_on_card_with_gpuid() -> None:
    api = cluster(("n1", 1))
    api.put("mtgpupods", b.mtgpupod(bound="GPU-n1-0", memory=b.GIB))
    (node,) = orjson.loads(clients(Replica(api))[1].get(f"{PATH}/inspect").data)["nodes"]
    assert node["devs"] == [
        {"id": 0, "totalGPU": 80, "usedGPU": 80, "pods": [{"name": "m", "namespace": "default", "usedGPU": 1}]}
    ]


def test_version_is_served() -> None:
    assert clients(Replica(cluster()))[1].get("/version").text == version("mgpu")


def healthy(replica: Replica) -> list[int]:
    return [state.card.index for state in replica.state.node_snapshot("n1", "").cards if state.card.healthy]


def test_cards_listed_as_unhealthy_are_not_given() -> None:
    replica = Replica(cluster(("n1", 3)))
    listed(replica, "unhealthy-gpu-n1", gpus="0, 1,7")
    assert healthy(replica) == [2]
    assert bound(replica, asking("p", 1), "n1")[gpushare.INDEX] == "2"
    listed(replica, "unhealthy-gpu-n1", gpus="1")
    assert healthy(replica) == [0, 2]
    replica.api.remove("configmaps", "unhealthy-gpu-n1")
    replica.deliver()
    assert healthy(replica) == [0, 1, 2]
    assert replica.events == []


def test_unhealthy_cards_of_device_and_list_are_merged() -> None:
    replica = Replica(FakeApi())
    listed(replica, "unhealthy-gpu-n1", gpus="0")
    device = write_device(Node("n1"), "", (b.card(0), b.card(1, healthy=False), b.card(2)))
    replica.api.put("devices", device)
    replica.api.put("nodes", b.node("n1"))
    replica.deliver()
    assert healthy(replica) == [2]


@pytest.mark.parametrize("gpus", [{}, {"gpus": ""}, {"gpus": " "}, {"other": "0"}])
def test_empty_unhealthy_list_marks_no_card(gpus: dict[str, str]) -> None:
    replica = Replica(cluster(("n1", 1)))
    listed(replica, "unhealthy-gpu-n1", **gpus)
    assert (healthy(replica), replica.events) == ([0], [])


def test_other_configmaps_are_ignored() -> None:
    replica = Replica(cluster(("n1", 1)))
    listed(replica, "unhealthy-gpu-n1", namespace="default", gpus="0")
    listed(replica, "unhealthy-gpus", gpus="0")
    listed(replica, "coredns", gpus="x")
    assert (healthy(replica), replica.events) == ([0], [])
