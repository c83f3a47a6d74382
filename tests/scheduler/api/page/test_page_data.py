"""Nodes and waiting pods are rendered as the JSON that the page reads."""

import json
from typing import Any

from mgpu.model.node_slices import EXISTING, LABEL
from scheduler.api.page.page_data import detail_json, node_json, why_json
from scheduler.decisions.filter import Filtered
from tests import builders as b
from tests.scheduler.fake import Replica, cluster

INDEX = "vke.volcengine.com/gpu-index-container-c"
RECORD = {"vke.volcengine.com/assumed": "true"}


def on_node(replica: Replica, name: str, core: int, index: int = 0, **more: Any) -> None:
    replica.api.put("pods", b.share(name, core, annotations=RECORD | {INDEX: str(index)}, node="n1", **more))
    replica.deliver()


def shown(replica: Replica, node: str = "n1") -> dict[str, Any]:
    found = replica.state.node_contents(node)
    assert found is not None
    told: dict[str, Any] = json.loads(json.dumps(node_json(found)))
    return told


def test_cards_name_pods_by_position() -> None:
    replica = Replica(cluster(("n1", 2)))
    on_node(replica, "a", 30)
    on_node(replica, "b", 20, namespace="team")
    told = shown(replica)
    assert told["pods"] == [{"name": "default/a", "dialect": "mgpu"}, {"name": "team/b", "dialect": "mgpu"}]
    first, second = told["cards"]
    assert first["uses"] == [[0, 300, b.GIB], [1, 200, b.GIB]]
    assert (first["core"], first["memory"]) == ([500, 1000], [2 * b.GIB, 80 * b.GIB])
    assert second["uses"] == []
    assert first["model"] == "A100-SXM4-80GB"


def test_empty_values_are_left_out() -> None:
    told = shown(Replica(cluster(("n1", 1))))
    assert told.keys() == {"name", "pods", "cards"}
    assert told["cards"][0].keys() == {"index", "model", "core", "memory", "uses"}


def test_unhealthy_card_and_reservation_are_marked() -> None:
    api = cluster(("n1", 1))
    for card in api.devices["n1"]["spec"]["devices"]:
        card["health"] = False
    assert shown(Replica(api))["cards"][0]["unhealthy"] is True
    replica = Replica(cluster(("n1", 1)))
    replica.api.put("pods", b.share("p"))
    replica.deliver()
    known = replica.state.gpu_pod("uid-p")
    assert known is not None
    replica.decider.decide(known, "n1")
    assert shown(replica)["pods"] == [{"name": "default/p", "dialect": "mgpu", "reserved": True}]


def test_pod_with_unreadable_record_is_unsure_on_every_card() -> None:
    replica = Replica(cluster(("n1", 2)))
    replica.api.put("pods", b.share("p", annotations=RECORD | {INDEX: "x"}, node="n1", phase="Running"))
    replica.deliver()
    told = shown(replica)
    assert told["pods"] == [{"name": "default/p", "dialect": "mgpu", "unsure": True}]
    assert [card["uses"][0][0] for card in told["cards"]] == [0, 0]


def test_card_of_gpuid_names_its_occupy_pod() -> None:
    api = cluster(("n1", 2))
    api.put("pods", b.occupy_pod(card=1))
    api.put("mtgpupods", b.mtgpupod(bound="GPU-n1-1"))
    told = shown(Replica(api))
    assert told["cards"][1]["gpuid"] == "zxcvb"
    assert "gpuid" not in told["cards"][0]
    assert [(pod["name"], pod["dialect"]) for pod in told["pods"]] == [("default/m", "mtgpu")]
    api.remove("mtgpupods", "m")
    (keeper,) = shown(Replica(api))["pods"]
    assert keeper["keeps"] == "zxcvb"


def test_slices_have_their_position_on_the_card() -> None:
    api = cluster(("n1", 1))
    made = [{"profile": "3g.40gb", "start": 4, "uuid": "MIG-1"}, {"profile": "1g.10gb", "start": 0, "uuid": "MIG-2"}]
    api.put("nodes", b.node(labels={LABEL: "mig"}, **{EXISTING: json.dumps({"cards": {"0": made}})}))
    (card,) = shown(Replica(api))["cards"]
    assert card["cut"] == "mig"
    assert card["slices"] == [["1g.10gb", 0, 125, -1], ["3g.40gb", 500, 500, -1]]


def test_unreadable_annotation_becomes_a_note() -> None:
    api = cluster(("n1", 1))
    api.put("nodes", b.node(labels={LABEL: "mig"}, **{EXISTING: "{"}))
    assert EXISTING in shown(Replica(api))["note"]


def test_details_have_uuids_containers_and_amounts() -> None:
    replica = Replica(cluster(("n1", 1)))
    on_node(replica, "a", 30)
    found = replica.state.node_contents("n1")
    assert found is not None
    (card,) = detail_json(found)["cards"]
    assert (card["uuid"], card["model"], card["healthy"]) == ("GPU-n1-0", "A100-SXM4-80GB", True)
    (use,) = card["uses"]
    assert (use["pod"], use["containers"], use["core"], use["memory"]) == ("default/a", ["c"], 300, b.GIB)


def test_reasons_are_grouped_by_frequency() -> None:
    found = Filtered(["n9"], {f"n{i}": "full" for i in range(5)}, {"n7": "no GPU cards"}, ["n1"])
    assert why_json(found, 17) == {
        "fits": 1,
        "of": 7,
        "recut": 1,
        "at": 17,
        "reasons": [
            {"text": "full", "nodes": 5, "examples": ["n0", "n1", "n2"]},
            {"text": "no GPU cards", "nodes": 1, "examples": ["n7"]},
        ],
    }


def test_rare_reasons_are_summed_up_without_losing_nodes() -> None:
    reasons = why_json(Filtered(failed={f"n{i}": f"reason {i}" for i in range(100)}), 0)["reasons"]
    assert len(reasons) < 20
    assert sum(row["nodes"] for row in reasons) == 100
