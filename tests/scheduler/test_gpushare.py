"""gpushare pods through the scheduler: the seed's examples, its paths and its ConfigMap."""

from importlib.metadata import version
from typing import Any

import orjson
import pytest
from werkzeug.test import Client

from mgpu.dialects import gpushare
from mgpu.model.cards import Card
from mgpu.model.device_object import write_device
from mgpu.model.pods import Node
from mgpu.settings import load_settings
from tests import builders as b
from tests.scheduler.fake import FakeApi, Replica, admitted, clients, cluster
from tests.scheduler.gpushare import allocated, asking, container

PATH = "/gpushare-scheduler"
GIB, MIB = load_settings(), load_settings("dialects: {gpushare: {memoryUnit: MiB}}")


def node_of(api: FakeApi, name: str, *mib: int) -> None:
    api.put("nodes", b.node(name))
    made = tuple(Card(i, f"GPU-{name}-{i}", "P100", size << 20, minor=i) for i, size in enumerate(mib))
    api.put("devices", write_device(Node(name), "", made))


def with_free(api: FakeApi, name: str, *free: int) -> None:
    """A node whose cards of 16,276 MiB have so much left, by pods of the peer's own scheduler."""
    node_of(api, name, *(16276 for _ in free))
    for card, left in enumerate(free):
        if left < 16276:
            api.put("pods", allocated(f"{name}-{card}", 16276 - left, name, card))


def post(client: Client, verb: str, **body: Any) -> Any:
    reply = client.post(f"{PATH}/{verb}", json=body)
    assert reply.status_code == 200, reply.text
    return orjson.loads(reply.data)


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


def test_the_seeds_example_of_a_choice() -> None:
    """Of 12207, 8138, 4069 and 16276 MiB free, the second is the least that fits 8138."""
    api = FakeApi()
    with_free(api, "n1", 12207, 8138, 4069, 16276)
    record = bound(Replica(api, settings=MIB), asking("p", 8138), "n1")
    assert (record[gpushare.INDEX], record[gpushare.OF_CARD], record[gpushare.OF_POD]) == ("1", "16276", "8138")


def test_the_seeds_example_of_a_filter() -> None:
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


def test_equal_cards_give_the_first() -> None:
    replica = Replica(cluster(("n1", 3)))
    assert [bound(replica, asking(name, 50), "n1")[gpushare.INDEX] for name in "pqr"] == ["0", "1", "2"]


def test_cards_of_different_sizes_count_at_their_own() -> None:
    api = FakeApi()
    node_of(api, "n1", 22919, 12196, 40960)
    replica = Replica(api)
    assert bound(replica, asking("p", 12), "n1")[gpushare.INDEX] == "0"
    assert bound(replica, asking("q", 11), "n1")[gpushare.INDEX] == "1"
    assert bound(replica, asking("r", 40), "n1")[gpushare.OF_CARD] == "40"


def test_a_container_that_asks_for_more_than_any_card_holds_fits_nowhere() -> None:
    replica = Replica(cluster(("n1", 2)))
    found = post(clients(replica)[1], "filter", Pod=asking("p", 81), NodeNames=["n1"])
    assert found["NodeNames"] == []
    assert "memory" in {**found["FailedNodes"], **found["FailedAndUnresolvableNodes"]}["n1"]


def test_several_containers_each_have_their_card_and_record() -> None:
    replica = Replica(cluster(("n1", 2)))
    raw = b.pod("p", container("a", 50), container("b", 60), container("none", 0) | {"resources": {}})
    record = bound(replica, raw, "n1")
    assert orjson.loads(record[gpushare.ALLOCATION]) == {"a": {"0": 50}, "b": {"1": 60}}
    assert record[gpushare.OF_POD] == "110"
    assert [state.memory_free >> 30 for state in replica.state.node_snapshot("n1", "").cards] == [30, 20]


def test_the_policy_of_the_dialect_may_be_set() -> None:
    api = cluster(("n1", 2))
    api.put("pods", allocated("x", 10, "n1", 0))
    spread = load_settings("dialects: {gpushare: {policy: spread}}")
    assert bound(Replica(api, settings=spread), asking("p", 10), "n1")[gpushare.INDEX] == "1"


@pytest.mark.parametrize(("settings", "each"), [(GIB, 80), (MIB, 80 * 1024)])
def test_eight_cards_of_80_gib_in_either_unit(settings: Any, each: int) -> None:
    replica = Replica(cluster(("n1", 8)), settings=settings)
    given = [bound(replica, asking(f"p{i}", each // 2), "n1")[gpushare.INDEX] for i in range(16)]
    assert given == [str(i // 2) for i in range(16)]
    client = clients(replica)[1]
    assert post(client, "filter", Pod=asking("q", 1), NodeNames=["n1"])["NodeNames"] == []
    (node,) = orjson.loads(client.get(f"{PATH}/inspect/n1").data)["nodes"]
    assert (node["totalGPU"], node["usedGPU"]) == (8 * each, 8 * each)


def test_a_change_of_the_unit_leaves_running_pods_their_bytes() -> None:
    replica = Replica(cluster(("n1", 1)), settings=GIB)
    bound(replica, asking("p", 50), "n1")
    later = Replica(replica.api, settings=MIB)
    assert [state.memory_used >> 30 for state in later.state.node_snapshot("n1", "").cards] == [50]


def test_both_forms_of_nodes() -> None:
    client = clients(Replica(cluster(("n1", 1))))[1]
    whole = post(client, "filter", Pod=asking("p", 80), Nodes={"items": [b.node("n1"), b.node("n9")]})
    assert [node["metadata"]["name"] for node in whole["Nodes"]["items"]] == ["n1"]
    assert post(client, "filter", pod=asking("p", 80), nodenames=["n1"])["NodeNames"] == ["n1"]
    assert post(client, "prioritize", Pod=asking("p", 80), NodeNames=["n1"])[0]["Host"] == "n1"


def test_inspect_lists_cards_and_who_holds_them() -> None:
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


def test_inspect_answers_node_by_node() -> None:
    """With 5,000 nodes and their pods the whole answer was in memory, once for each caller."""
    api = cluster(*((f"n{i}", 2) for i in range(50)))
    reply = clients(Replica(api))[1].get(f"{PATH}/inspect")
    pieces = list(reply.iter_encoded())
    assert max(piece.count(b'"devs"') for piece in pieces) == 1
    assert len(orjson.loads(b"".join(pieces))["nodes"]) == 50


def test_inspect_has_nothing_free_on_a_card_with_a_gpuid() -> None:
    api = cluster(("n1", 1))
    api.put("mtgpupods", b.mtgpupod(bound="GPU-n1-0", memory=b.GIB))
    (node,) = orjson.loads(clients(Replica(api))[1].get(f"{PATH}/inspect").data)["nodes"]
    assert node["devs"] == [
        {"id": 0, "totalGPU": 80, "usedGPU": 80, "pods": [{"name": "m", "namespace": "default", "usedGPU": 1}]}
    ]


def test_version() -> None:
    assert clients(Replica(cluster()))[1].get("/version").text == version("mgpu")


def listed(replica: Replica, name: str, namespace: str = "kube-system", **data: str) -> None:
    replica.api.put("configmaps", {"metadata": {"namespace": namespace, "name": name}, "data": data})
    replica.deliver()


def healthy(replica: Replica) -> list[int]:
    return [state.card.index for state in replica.state.node_snapshot("n1", "").cards if state.card.healthy]


def test_cards_listed_as_unhealthy_are_not_given_until_they_are_listed_no_more() -> None:
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


def test_what_device_and_list_call_unhealthy_is_so_whoever_comes_first() -> None:
    replica = Replica(FakeApi())
    listed(replica, "unhealthy-gpu-n1", gpus="0")
    device = write_device(Node("n1"), "", (b.card(0), b.card(1, healthy=False), b.card(2)))
    replica.api.put("devices", device)
    replica.api.put("nodes", b.node("n1"))
    replica.deliver()
    assert healthy(replica) == [2]


@pytest.mark.parametrize("gpus", [{}, {"gpus": ""}, {"gpus": " "}, {"other": "0"}])
def test_a_list_of_nothing_marks_nothing(gpus: dict[str, str]) -> None:
    replica = Replica(cluster(("n1", 1)))
    listed(replica, "unhealthy-gpu-n1", **gpus)
    assert (healthy(replica), replica.events) == ([0], [])


def test_other_configmaps_mean_nothing() -> None:
    replica = Replica(cluster(("n1", 1)))
    listed(replica, "unhealthy-gpu-n1", namespace="default", gpus="0")
    listed(replica, "unhealthy-gpus", gpus="0")
    listed(replica, "coredns", gpus="x")
    assert (healthy(replica), replica.events) == ([0], [])
