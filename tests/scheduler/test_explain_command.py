"""`mgpu explain` explains pods of an API server as text and as JSON."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from mgpu.cli.kubectl import plugin
from mgpu.kube import Api
from playground.apiserver import ApiServer, User, running, self_signed, write_kubeconfig
from tests.builders import GIB, container, owned, pod
from tests.scheduler.explained_cluster import PODS, RECORD, SAYS, add, add_node, fill


class Cluster:
    def __init__(self, folder: Path, url: str, ca: bytes) -> None:
        self.kubeconfig = str(folder / "kubeconfig")
        write_kubeconfig(folder / "kubeconfig", url, ca, "admin")
        self.api = Api.connect(self.kubeconfig)

    def explain(self, *arguments: str) -> Result:
        return CliRunner().invoke(plugin, ["explain", *arguments, "--kubeconfig", self.kubeconfig])

    def found(self, *arguments: str) -> dict[str, Any]:
        result = self.explain(*arguments, "-o", "json")
        assert result.exit_code == 0, result.output
        return dict(json.loads(result.stdout))

    def verdict(self, *arguments: str) -> str:
        return " ".join(self.found(*arguments)["verdict"])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("api")
    tls = self_signed(folder)
    with running(ApiServer(tokens={"admin": User("admin", ("system:masters",))}), tls=tls) as url:
        cluster = Cluster(folder, url, Path(tls[0]).read_bytes())
        fill(cluster.api)
        half = {"name": "c", "image": "x", "resources": {"limits": {"koordinator.sh/gpu": "50"}}}
        add(cluster.api, pod("incomplete", half))
        yield cluster
        cluster.api.close()


def test_json_names_what_each_node_and_card_lacks(cluster: Cluster) -> None:
    found = cluster.found("too-large")
    assert found["requests"] == [{"container": "c", "request": "50% and 90.0 GiB of one card"}]
    assert found["verdict"] == ["Its cards fit on none of 3 nodes."]
    first, second, third = found["nodes"]
    assert [node["name"] for node in found["nodes"]] == ["n1", "n2", "n3"]
    assert [card["reason"] for card in first["cards"]] == [
        "memory 10.0 GiB short",
        "core 10 percent short and memory 70.0 GiB short",
    ]
    assert first["cards"][1]["holders"] == ["default/holder"]
    assert (first["cards"][1]["coreFree"], first["cards"][1]["memoryFree"]) == (40, 20 * GIB)
    assert first["unresolvable"]
    assert "2 memory 11.0 GiB short" in second["reason"]
    assert third == {**third, "reason": "node n3 has no GPU cards (no Device)", "cards": []}
    assert [row["message"] for row in found["conditions"]] == [SAYS]


def test_json_explains_containers_that_do_not_fit_together(cluster: Cluster) -> None:
    first, second, _ = cluster.found("two")["nodes"]
    assert first["reason"] == "each of the 2 GPU containers fits alone, but not all of them together"
    assert {card["reason"] for card in second["cards"]} == {"in use, but a whole card is requested"}


def test_json_refers_to_the_scheduler_if_cards_fit(cluster: Cluster) -> None:
    found = cluster.found("waits")
    assert [(node["name"], node["reason"]) for node in found["nodes"]][:2] == [("n1", None), ("n2", None)]
    assert found["verdict"] == [
        "Its cards fit on 2 of 3 nodes, so it does not wait for cards.",
        "The scheduler also considers taints, selectors, cpu and volumes; its message is below.",
    ]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("unseen", "No scheduler has reported on it: does default-scheduler run?"),
        ("gated", "It waits for its scheduling gates first: team/quota."),
        ("malformed", "It fits on no node for this reason. Create a new Pod"),
        ("incomplete", "It fits on no node for this reason. Create a new Pod"),
        ("plain", "It requests no GPU"),
        ("late", "It is bound to n2 without a valid allocation record, and waits for a late binding decision."),
        ("late", "It has not started: container c"),
        ("lost", "without a valid allocation record"),
        ("holder", "c is on card 1 of n1."),
        ("done", "It has succeeded, and holds no cards."),
        ("pod/holder", "c is on card 1 of n1."),
        ("mtgpupod/notebook", "GPUID zxcvb has no card of n2 yet; 0 of its 2 cards are healthy and idle."),
    ],
)
def test_verdict_names_the_main_reason(cluster: Cluster, name: str, said: str) -> None:
    assert said in cluster.verdict(name)


def test_json_names_problems_of_the_request(cluster: Cluster) -> None:
    (problem,) = cluster.found("malformed")["problems"]
    assert "above 100 must be a multiple of 100" in problem
    (problem,) = cluster.found("incomplete")["problems"]
    assert "delete and create the pod again, so that mgpu's webhook adds one" in problem


def test_json_marks_own_card_and_policy(cluster: Cluster) -> None:
    found = cluster.found("holder")
    ((node),) = found["nodes"]
    assert [card["own"] for card in node["cards"]] == [False, True]
    assert found["policy"].startswith("binpack: as full as possible")
    assert found["policy"].endswith("(the default of mgpu); nodes: binpack")


def test_policy_is_that_of_the_settings(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("nodePolicy: spread\ncardPolicy: spread\n")
    policy = cluster.found("waits", "--config", str(file))["policy"]
    assert policy == "spread: as even as possible (setting cardPolicy); nodes: spread"
    file.write_text("dialects: {mgpu: {enabled: false}}")
    assert "in the vocabulary mgpu" in cluster.verdict("waits", "--config", str(file))


def test_option_node_selects_nodes(cluster: Cluster) -> None:
    assert [node["name"] for node in cluster.found("two", "--node", "n2")["nodes"]] == ["n2"]
    result = cluster.explain("two", "--node", "n9")
    assert (result.exit_code, result.stderr) == (1, "Error: no node is named n9\n")


@pytest.mark.parametrize(("name", "own"), [("holder", "n1"), ("mtgpupod/notebook", "n2")])
def test_option_node_is_rejected_for_bound_objects(cluster: Cluster, name: str, own: str) -> None:
    assert cluster.verdict(name, "--node", own) == cluster.verdict(name)
    result = cluster.explain(name, "--node", own, "--node", "n3")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert f"is on node {own}; --node is for pods without a node" in result.stderr


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The field selectors with which a command lists pods."""
    selectors: list[str] = []

    def pages(self: Api, path: str, *, _pages: Any = Api.pages, **query: Any) -> Any:
        selectors.extend([str(query.get("fieldSelector"))] if path == "/api/v1/pods" else [])
        return _pages(self, path, **query)

    monkeypatch.setattr(Api, "pages", pages)
    return selectors


@pytest.mark.parametrize("name", ["holder", "late", "done", "mtgpupod/notebook"])
def test_bound_object_reads_only_its_node(cluster: Cluster, asked: list[str], name: str) -> None:
    own = "n1" if name in ("holder", "done") else "n2"
    assert cluster.found(name)["object"].endswith(name.partition("/")[2] or name)
    assert asked == [f"spec.nodeName={own}", "spec.nodeName="]


@pytest.mark.parametrize("name", ["too-large", "two", "waits", "malformed"])
def test_selected_nodes_are_explained_as_in_the_whole_cluster(cluster: Cluster, asked: list[str], name: str) -> None:
    """A pod is nominated to n1, whose free card is kept for it."""
    add(cluster.api, pod("nominated", container("c", 100)))
    status = {"phase": "Pending", "nominatedNodeName": "n1"}
    cluster.api.patch(f"{PODS}/nominated/status", {"status": status})
    try:
        every = {row["name"]: row for row in cluster.found(name)["nodes"]}
        some = cluster.found(name, "--node", "n2", "--node", "n1", "--node", "n2")["nodes"]
    finally:
        cluster.api.delete(f"{PODS}/nominated")
    assert sorted(row["name"] for row in some) == ["n1", "n2"]
    assert every["n1"]["reason"]
    assert [{**row, "cards": []} for row in some] == [{**every[row["name"]], "cards": []} for row in some]
    assert asked == ["", "spec.nodeName=n2", "spec.nodeName=n1", "spec.nodeName="]


def test_groups_and_learning_policies_read_the_whole_cluster(
    cluster: Cluster, asked: list[str], tmp_path: Path
) -> None:
    """The pods of its group may be on other nodes, and a policy learns from all pods."""
    group = {"mgpu.io/same-card-group": "pair"}
    add(cluster.api, pod("first", container("c", 10, 1024), annotations={**RECORD, **group}, node="n1"))
    add(cluster.api, pod("second", container("c", 10, 1024), annotations=group))
    try:
        (row,) = cluster.found("second", "--node", "n2")["nodes"]
    finally:
        cluster.api.delete(f"{PODS}/first")
        cluster.api.delete(f"{PODS}/second")
    assert "same-card-group" in row["reason"]
    file = tmp_path / "settings.yaml"
    file.write_text("nodePolicy: fragmentation\n")
    cluster.found("waits", "--node", "n2", "--config", str(file))
    assert asked == ["", ""]


def test_pod_deleted_meanwhile_is_an_error(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mgpu.cli.cluster_objects.whole_pods", lambda *_: iter(()))
    result = cluster.explain("waits")
    wanted = "Error: pod default/waits was deleted while the cluster was read; run the command again\n"
    assert (result.exit_code, result.stderr) == (1, wanted)


def test_explain_mtgpupod_names_the_card_of_its_gpuid(cluster: Cluster) -> None:
    """An MtgpuPod of another namespace has a card there under the same GPUID."""
    path = "/apis/lsalab.nthu/v1/namespaces/team/mtgpupods"
    cluster.api.create("/api/v1/namespaces", {"metadata": {"name": "team"}})
    raw = cluster.api.get("/apis/lsalab.nthu/v1/namespaces/default/mtgpupods/notebook")
    meta = {"name": "first", "namespace": "team", "annotations": raw["metadata"]["annotations"]}
    made = cluster.api.create(path, {**raw, "metadata": meta})
    cluster.api.replace(f"{path}/first/status", {**made, "status": {"phase": "Running", "BoundDeviceID": "GPU-n2-1"}})
    try:
        assert "GPUID zxcvb has card 1 of n2, and 50% and" in cluster.verdict("mtgpupod/notebook")
        assert "It is on card 1 of n2 (GPU-n2-1)." in cluster.verdict("mtgpupod/first", "-n", "team")
    finally:
        cluster.api.delete(f"{path}/first")


def test_explain_pod_of_an_mtgpupod_refers_to_it(cluster: Cluster) -> None:
    raw = pod("made", {"name": "c", "image": "x"}, node="n2")
    raw["metadata"]["ownerReferences"] = [owned("notebook")]
    raw["metadata"]["labels"] = {"lsalab.nthu/mtgpupod": "notebook"}
    add(cluster.api, raw)
    assert "explain mtgpupod/notebook" in cluster.verdict("made")


def test_text_groups_nodes_by_their_reasons(cluster: Cluster) -> None:
    for i in range(9):
        add_node(cluster.api, f"small-{i}", 1)
    try:
        text = cluster.explain("too-large").stdout
        assert "9 nodes: insufficient GPU (1 card: 1 memory 10.0 GiB short)" in text
        assert "small-0, small-1, small-2, small-3 and 5 more" in " ".join(text.split())
        assert "--node NAME lists the cards of one node." in text
        fits = " ".join(cluster.explain("waits").stdout.split())
        assert (
            "11 nodes fit, best first (points of 10): n1 (4), small-0 (1), small-1 (1), small-2 (1) and 7 more" in fits
        )
    finally:
        for i in range(9):
            cluster.api.delete(f"/api/v1/nodes/small-{i}")
            cluster.api.delete(f"/apis/scheduling.koordinator.sh/v1alpha1/devices/small-{i}")


def test_text_contains_all_parts(cluster: Cluster) -> None:
    text = " ".join(cluster.explain("too-large").stdout.split())
    for part in (
        "Pod default/too-large: Pending",
        "requests as mgpu c: 50% and 90.0 GiB of one card",
        "Its cards fit on none of 3 nodes.",
        "(evicting pods cannot help)",
        "1 node: the node has no GPU cards (no Device) n3",
        "PodScheduled False (Unschedulable): 0/3 nodes are available",
    ):
        assert part in text
    assert "✔ its own" in cluster.explain("holder").stdout


def test_option_namespace_selects_the_namespace(cluster: Cluster) -> None:
    result = cluster.explain("waits", "-n", "other")
    assert (result.exit_code, result.stderr) == (1, 'Error from server (NotFound): pods "waits" not found\n')


def test_cluster_without_crd_is_an_error(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mgpu.dialects.mtgpu.API_VERSION", "nowhere.nthu/v1")
    result = cluster.explain("mtgpupod/notebook")
    assert (result.exit_code, result.stderr) == (1, "Error: this cluster has no MtgpuPods: their CRD is missing\n")


def test_kubeconfig_sets_namespace_and_context(cluster: Cluster, tmp_path: Path) -> None:
    tree = yaml.safe_load(Path(cluster.kubeconfig).read_text())
    there = tree["contexts"][0]["context"]
    tree["contexts"] += [{"name": "elsewhere", "context": {**there, "namespace": "other"}}]
    tree["current-context"] = "elsewhere"
    file = tmp_path / "kubeconfig"
    file.write_text(yaml.safe_dump(tree))
    options = ["explain", "waits", "--kubeconfig", str(file)]
    assert CliRunner().invoke(plugin, options).exit_code == 1
    assert CliRunner().invoke(plugin, [*options, "-n", "default"]).exit_code == 0
    assert CliRunner().invoke(plugin, [*options, "--context", "mgpu-playground"]).exit_code == 0


@pytest.mark.parametrize("name", ["job/x", "a/b/c", "pod/"])
def test_malformed_name_is_reported_in_one_line(cluster: Cluster, name: str) -> None:
    result = cluster.explain(name)
    assert (result.exit_code, result.stderr) == (2, f"{name}: must be NAME, pod/NAME, mtgpupod/NAME or claim/NAME\n")


def test_unknown_context_is_an_error(cluster: Cluster) -> None:
    result = cluster.explain("waits", "--context", "nowhere")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "nowhere" in result.stderr
