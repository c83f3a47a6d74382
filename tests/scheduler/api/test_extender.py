"""The extender translates kube-scheduler's protocol, and reports filtered pods to the controllers."""

import json
from typing import Any

import orjson
import pytest
from werkzeug.test import Client

from mgpu.model.node_slices import EXISTING, LABEL
from mgpu.settings import load_settings
from scheduler.announcements import ANNOTATION
from scheduler.cluster.events import NodeMayFit
from scheduler.decisions.filter import Filter
from tests import builders as b
from tests.scheduler.fake import Replica, admitted, clients, cluster

INDEX = "vke.volcengine.com/gpu-index-container-c"


@pytest.fixture
def replica() -> Replica:
    return Replica(cluster(("n1", 2), ("n2", 1), ("n3", 0)))


@pytest.fixture
def client(replica: Replica) -> Client:
    return clients(replica)[1]


def post(client: Client, path: str, **body: Any) -> Any:
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return orjson.loads(reply.data)


def place(replica: Replica, name: str, core: int, node: str, index: int = 0) -> None:
    record = {"vke.volcengine.com/assumed": "true", INDEX: str(index)}
    replica.api.put("pods", b.share(name, core, annotations=record, node=node))
    replica.deliver()


def test_filter_returns_passed_nodes_and_reasons(replica: Replica, client: Client) -> None:
    place(replica, "x", 60, "n2")
    found = post(client, "/filter", Pod=b.share("p", 60), NodeNames=["n3", "n2", "n1", "n9"])
    assert found["NodeNames"] == ["n1"]
    assert found["FailedNodes"] == {"n2": "insufficient GPU (1 card: 1 core 20 percent short)"}
    assert set(found["FailedAndUnresolvableNodes"]) == {"n3", "n9"}
    assert found["Error"] == ""


@pytest.mark.parametrize("passes", [True, False])
def test_many_reasons_are_sent_only_if_no_node_passes(client: Client, passes: bool) -> None:
    unknown = [f"x{i}" for i in range(101)]
    found = post(client, "/filter", Pod=b.share("p", 60), NodeNames=[*unknown, *(["n1"] if passes else [])])
    assert found["NodeNames"] == (["n1"] if passes else [])
    assert found["FailedAndUnresolvableNodes"].keys() == (set() if passes else set(unknown))


def test_filter_accepts_keys_in_any_case(client: Client) -> None:
    assert post(client, "/filter", pod=b.share("p"), nodenames=["n1"])["NodeNames"] == ["n1"]


def test_pod_of_cached_version_is_not_parsed_again(replica: Replica, client: Client) -> None:
    place(replica, "x", 60, "n2")
    replica.api.put("pods", b.share("p", 60))
    replica.deliver()
    meta = replica.api.pod("p")["metadata"]
    for version, fits in ((meta["resourceVersion"], []), (meta["resourceVersion"] + "0", ["n2"])):
        without_gpu = {"metadata": {**meta, "resourceVersion": version}, "spec": {"containers": []}}
        assert post(client, "/filter", Pod=without_gpu, NodeNames=["n2"])["NodeNames"] == fits


def test_filter_without_passed_nodes_returns_an_empty_list(client: Client) -> None:
    assert post(client, "/filter", Pod=b.share("p"), NodeNames=["n9"])["NodeNames"] == []


def test_filter_of_whole_nodes_returns_nodes(client: Client) -> None:
    nodes = {"items": [b.node("n1"), b.node("n9")]}
    found = post(client, "/filter", Pod=b.share("p"), Nodes=nodes, NodeNames=None)
    assert found["Nodes"] == {"items": [b.node("n1")]}
    assert set(found["FailedAndUnresolvableNodes"]) == {"n9"}


def test_pod_without_gpu_passes_all_nodes(client: Client) -> None:
    pod = b.pod("p", b.container("c"))
    assert post(client, "/filter", Pod=pod, NodeNames=["n1", "n9"])["NodeNames"] == ["n1", "n9"]
    assert {row["Score"] for row in post(client, "/prioritize", Pod=pod, NodeNames=["n1", "n9"])} == {0}


def test_malformed_pod_passes_no_node(client: Client) -> None:
    found = post(client, "/filter", Pod=b.share("p", 150), NodeNames=["n1"])
    assert "multiple of 100" in found["FailedAndUnresolvableNodes"]["n1"]


def test_filter_rejects_containers_that_do_not_fit_together(replica: Replica, client: Client) -> None:
    pod = b.pod("p", *(b.container(name, 60, 1024) for name in "abc"))
    found = post(client, "/filter", Pod=pod, NodeNames=["n1"])
    assert "not all of them together" in {**found["FailedNodes"], **found["FailedAndUnresolvableNodes"]}["n1"]
    replica.api.put("devices", cluster(("n1", 3)).devices["n1"])
    replica.deliver()
    assert post(client, "/filter", Pod=pod, NodeNames=["n1"])["NodeNames"] == ["n1"]


def test_filter_counts_decided_cards(replica: Replica, client: Client) -> None:
    for name in "pq":
        replica.api.put("pods", b.share(name, 60, uid=name))
    replica.deliver()
    assert post(client, "/filter", Pod=b.share("q", 60, uid="q"), NodeNames=["n2"])["NodeNames"] == ["n2"]
    assert post(client, "/bind", PodName="p", PodNamespace="default", PodUID="p", Node="n2") == {"Error": ""}
    assert post(client, "/filter", Pod=b.share("q", 60, uid="q"), NodeNames=["n2"])["NodeNames"] == []


def test_filter_ignores_own_reservation(replica: Replica, client: Client) -> None:
    """Its binding was refused after the decision; it comes again."""
    replica.api.put("pods", b.share("p", 60))
    replica.deliver()
    known = replica.state.gpu_pod("uid-p")
    assert known is not None
    replica.decider.decide(known, "n2")
    assert post(client, "/filter", Pod=b.share("p", 60), NodeNames=["n2"])["NodeNames"] == ["n2"]
    other = post(client, "/filter", Pod=b.share("q", 60), NodeNames=["n2"])
    assert other["NodeNames"] == []


def test_prioritize_returns_integers_and_prefers_the_fuller_node(replica: Replica, client: Client) -> None:
    place(replica, "x", 40, "n2")
    rows = post(client, "/prioritize", Pod=b.share("p", 50, 40 * 1024), NodeNames=["n1", "n2", "n9"])
    assert [row["Host"] for row in rows] == ["n1", "n2", "n9"]
    assert all(type(row["Score"]) is int for row in rows)
    low, high, unknown = (row["Score"] for row in rows)
    assert unknown == 0 <= low < high <= 10


def test_bind_posts_the_allocation_record(replica: Replica, client: Client) -> None:
    replica.api.admit = admitted(replica)
    replica.api.put("pods", b.share("p"))
    replica.deliver()
    assert post(client, "/bind", PodName="p", PodNamespace="default", PodUID="uid-p", Node="n1") == {"Error": ""}
    assert replica.api.annotations("p")[INDEX] == "0"


@pytest.mark.parametrize(
    ("changes", "error"),
    [({"PodUID": "other"}, "no pod"), ({"PodName": "gone"}, "no pod"), ({"Node": "n3"}, "no GPU cards")],
)
def test_bind_that_is_impossible_returns_an_error(
    replica: Replica, client: Client, changes: dict[str, str], error: str
) -> None:
    replica.api.put("pods", b.share("p"))
    replica.deliver()
    body = {"PodName": "p", "PodNamespace": "default", "PodUID": "uid-p", "Node": "n1", **changes}
    assert error in post(client, "/bind", **body)["Error"]
    assert replica.state.holdings() == ()


def test_bind_that_is_rejected_releases_the_cards(replica: Replica, client: Client) -> None:
    replica.api.put("pods", b.share("p"))
    replica.deliver()
    replica.api.refuse_bindings = True
    answer = post(client, "/bind", PodName="p", PodNamespace="default", PodUID="uid-p", Node="n1")
    assert "refused" in answer["Error"]
    assert replica.state.holdings() == ()
    replica.api.refuse_bindings = False
    assert post(client, "/bind", PodName="p", PodNamespace="default", PodUID="uid-p", Node="n1") == {"Error": ""}


def test_repeated_bind_keeps_the_cards(replica: Replica, client: Client) -> None:
    replica.api.put("pods", b.share("p"))
    replica.deliver()
    body = {"PodName": "p", "PodNamespace": "default", "PodUID": "uid-p", "Node": "n1"}
    assert post(client, "/bind", **body) == {"Error": ""}
    assert "refused" in post(client, "/bind", **body)["Error"]  # its event has not come yet
    assert replica.cards_held() == {"p": [(0, 500)]}


def test_replica_that_does_not_lead_closes_connections(replica: Replica, client: Client) -> None:
    body = {"Pod": b.pod("p", b.container("c")), "NodeNames": ["n1"]}
    assert "Connection" not in client.post("/filter", json=body).headers
    replica.leading = False
    reply = client.post("/filter", json=body)
    assert (reply.status_code, reply.headers["Connection"]) == (200, "close")


@pytest.mark.parametrize(
    ("path", "arguments"),
    [("/filter", {"NodeNames": ["n1"]}), ("/prioritize", {"NodeNames": ["n1"]}), ("/preempt", {})],
)
def test_replica_that_does_not_lead_chooses_no_node_for_a_gpu_pod(
    replica: Replica, client: Client, path: str, arguments: dict[str, object]
) -> None:
    replica.leading = False
    reply = client.post(path, json={"Pod": b.share("p"), **arguments})
    assert (reply.status_code, reply.headers["Connection"]) == (503, "close")
    assert "another replica leads" in reply.text
    assert client.post(path, json={"Pod": b.pod("p", b.container("c")), **arguments}).status_code == 200


def test_replica_that_does_not_lead_binds_without_a_decision(replica: Replica, client: Client) -> None:
    leader = Replica(replica.api)
    replica.api.admit = admitted(leader)

    replica.leading = False
    replica.api.put("pods", b.share("p"))
    replica.deliver()
    assert post(client, "/bind", PodName="p", PodNamespace="default", PodUID="uid-p", Node="n1") == {"Error": ""}
    assert replica.api.annotations("p")[INDEX] == "0"
    assert replica.state.reservation("uid-p") is None


@pytest.mark.parametrize("path", ["/filter", "/prioritize", "/bind"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"Pod": 3, "NodeNames": []}',
        b'{"Pod": {}, "NodeNames": "n1"}',
        b'{"Pod": {}, "NodeNames": [1]}',
        b'{"Pod": {}, "Nodes": {"items": [3]}}',
        b'{"Pod": {"spec": {"containers": "x"}}, "NodeNames": []}',
        b'{"PodName": 3, "PodNamespace": "default", "PodUID": "x", "Node": "n1"}',
        b"\xff\xfe",
    ],
)
def test_malformed_body_is_a_bad_request(client: Client, path: str, body: bytes) -> None:
    reply = client.post(path, data=body, content_type="application/json")
    assert reply.status_code == 400
    assert "Traceback" not in reply.text


def test_empty_name_is_a_bad_request_that_says_so(client: Client) -> None:
    body = b'{"PodName": "", "PodNamespace": "default", "PodUID": "", "Node": "n1"}'
    reply = client.post("/bind", data=body, content_type="application/json")
    assert (reply.status_code, "PodName must not be empty" in reply.text) == (400, True)


def test_extender_serves_probes(client: Client) -> None:
    assert client.get("/healthz").status_code == 200
    assert client.get("/readyz").status_code == 200


def of_koordinator(**more: Any) -> dict[str, Any]:
    return b.pod("p", {"name": "c", "resources": {"limits": {"koordinator.sh/gpu": "25", **more}}})


def test_pod_of_disabled_vocabulary_passes_only_nodes_with_its_resource() -> None:
    """kube-scheduler does not count it and the kubelet drops it: the pod would run and see every card."""
    replica = Replica(
        cluster(("n1", 2), ("n2", 2)), settings=load_settings("dialects: {koordinator: {enabled: false}}")
    )
    node = b.node("n2")
    node["status"]["capacity"]["koordinator.sh/gpu"] = "200"
    replica.api.put("nodes", node)
    replica.deliver()
    client = clients(replica)[1]
    found = post(client, "/filter", Pod=of_koordinator(), NodeNames=["n1", "n2", "n9"])
    assert found["NodeNames"] == ["n2", "n9"]
    why = "no koordinator.sh/gpu, which mgpu does not serve: dialects.koordinator.enabled is false"
    assert found["FailedAndUnresolvableNodes"] == {"n1": why}


def test_pod_with_unrelated_resource_passes_all_nodes(client: Client) -> None:
    plain = b.pod("p", {"name": "c", "resources": {"limits": {"example.com/x": "1"}}})
    assert post(client, "/filter", Pod=plain, NodeNames=["n1", "n2"])["NodeNames"] == ["n1", "n2"]


def test_filter_for_slices_requests_a_plan(replica: Replica, client: Client) -> None:
    replica.filter = Filter(replica.state, replica.settings)  # the fake one plans by itself
    replica.api.put("nodes", b.node("n1", labels={LABEL: "mig"}, **{EXISTING: json.dumps({"cards": {"0": []}})}))
    slices = {"name": "c", "image": "cuda", "resources": {"limits": {"nvidia.com/mig-1g.10gb": "1"}}}
    pod = replica.api.put("pods", b.pod("p", slices))
    replica.deliver()
    assert post(client, "/filter", Pod=pod, NodeNames=["n1"])["NodeNames"] == []
    replica.planning.work()
    assert [plan.node for plan in replica.state.partitions.plans()] == ["n1"]


@pytest.mark.parametrize(("core", "announced"), [(50, False), (100, True)])
def test_filter_that_passes_no_node_leads_to_an_announcement(
    replica: Replica, client: Client, core: int, announced: bool
) -> None:
    """kube-scheduler may have observed before the filter that a pod has left the node."""
    place(replica, "x", 40, "n2")
    post(client, "/filter", Pod=b.share("p", core), NodeNames=["n2"])
    replica.announcements.node_may_fit(NodeMayFit("n2"))
    replica.announcements.work()
    assert (ANNOTATION in replica.api.nodes["n2"]["metadata"]["annotations"]) == announced


def naming_one(**settings: str) -> tuple[Replica, Client]:
    """Return a replica whose filter names one node, and a client of its extender."""
    chosen = load_settings(json.dumps({"scheduler": {"filteredNodes": 1}, **settings}))
    replica = Replica(cluster(("n1", 2), ("n2", 1)), settings=chosen)
    return replica, clients(replica)[1]


@pytest.mark.parametrize("node_policy", ["binpack", "spread"])
def test_filter_names_the_node_with_the_best_score(node_policy: str) -> None:
    replica, client = naming_one(nodePolicy=node_policy)
    place(replica, "x", 40, "n2")
    body = {"Pod": b.share("p", 20), "NodeNames": ["n1", "n2"]}
    scored = {row["Host"]: row["Score"] for row in post(client, "/prioritize", **body)}
    assert len(set(scored.values())) == 2
    assert post(client, "/filter", **body)["NodeNames"] == [max(scored, key=lambda name: scored[name])]


def test_filter_names_all_nodes_for_a_pod_with_preferences() -> None:
    _, client = naming_one()
    pod = b.share("p", 20)
    pod["spec"]["topologySpreadConstraints"] = [{"whenUnsatisfiable": "ScheduleAnyway"}]
    assert post(client, "/filter", Pod=pod, NodeNames=["n1", "n2"])["NodeNames"] == ["n1", "n2"]
