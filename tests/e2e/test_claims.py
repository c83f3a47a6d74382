"""ResourceClaims beside the pods of the vocabularies: what runs on which cards, and what an outage changes."""

import io
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from rich.console import Console

from mgpu.cli.main import main
from mgpu.kube import ApiError
from mgpu.kube.client import JSON_PATCH
from mgpu.model.device_object import DEVICE_API
from mgpu.model.resource_claims import CLASSES, SLICES
from mgpu.settings import load_settings
from playground import container_runtime
from playground.cluster import Cluster
from playground.demo import Demo
from playground.kubelet.dra import DraConfig
from playground.nodes import MGPU, NodeSpec
from playground.processes import free_port
from playground.samples import example, templates_for
from tests.e2e.bench import PODS, Bench, asking, share
from tests.e2e.claimed import HOST, NAMED, TEMPLATES, Claimed, wanted
from tests.e2e.clusters import patient
from tests.waiting import until

pytestmark = pytest.mark.kubernetes(1, 35)

A100 = {"model": "NVIDIA A100-SXM4-80GB", "memory": "80Gi", "count": 2}
NODES = [NodeSpec("n1", [{**A100, "numa": numa} for numa in (0, 1)], dict(MGPU)), NodeSpec("n2", [A100], dict(MGPU))]
CARDS = 6
WEBHOOK = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
UUID, NUMA = "gpu.mgpu.io/uuid", "gpu.mgpu.io/numa"
SECONDS = 30.0
"""The time within which a burst must be bound on a busy machine. An idle one needs less than 5 s."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # A kubelet tries to prepare the claims of a pod again only after 60 to 90 seconds.
    kubelet = {"retry_seconds": 0.2, "dra": DraConfig(prepare_retry_seconds=0.5)}
    with patient(NODES, components=("dra", "dra-whole-cards", "dra-convert"), kubelet=kubelet) as made:
        yield made


@pytest.fixture
def claimed(bench: Bench) -> Iterator[Claimed]:
    """Claims of the cluster. After the test no card is held, and the agents have no CDI files of claims."""
    found = Claimed(bench)
    yield found
    found.clear()
    until(lambda: all(use == (0, 0) for node in ("n1", "n2") for use in found.used(node)))
    until(lambda: not any(list((bench.cluster.folder / node / "cdi").iterdir()) for node in ("n1", "n2")))


def _on(node: str, pod: dict[str, Any]) -> dict[str, Any]:
    return {**pod, "spec": {**pod["spec"], "nodeSelector": {HOST: node}}}


def test_claims_and_other_pods_fill_one_card_exactly(claimed: Claimed) -> None:
    claimed.template("share", wanted(cores=30, memory="20Gi"))
    for name in ("first", "second"):
        claimed.pod(name, template="share", node="n2")
        claimed.exact(name)
    claimed.bench.create(_on("n2", share("classic", core=40, mib=40 << 10)))
    claimed.bench.exact("classic")
    assert sorted(claimed.used("n2")) == [(0, 0), (100, 80)]
    claimed.pod("third", template="share", node="n2")
    claimed.exact("third")
    assert sorted(claimed.used("n2")) == [(30, 20), (100, 80)]


def test_the_demo_notices_a_container_with_other_cards_than_its_claim(
    claimed: Claimed, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo = Demo(claimed.bench.cluster, Console(file=io.StringIO()), load_settings())
    demo.show_placed(example("claim"), templates_for("claim"))
    assert demo.problems == []
    claimed.bench.delete("claim")
    wrong = container_runtime.Edits({"NVIDIA_VISIBLE_DEVICES": "GPU-x"})
    monkeypatch.setattr("playground.container_runtime.resolve", lambda *_: wrong)
    demo.show_placed(example("claim"))
    assert any("claim: container infer must see NVIDIA_VISIBLE_DEVICES=GPU-n" in problem for problem in demo.problems)


def test_each_container_sees_the_cards_of_its_request(claimed: Claimed) -> None:
    claimed.template("two", wanted("large", 80, "8Gi"), wanted("small", 40, "4Gi"))
    claimed.pod("p", template="two", node="n2", train="large", evaluate="small", both="")
    seen = claimed.exact("p")
    assert sorted(seen["train"] + seen["evaluate"]) == seen["both"] == [0, 1]


def test_several_cards_of_a_request_are_different(claimed: Claimed) -> None:
    claimed.template("pair", wanted(cores=40, memory="8Gi", count=2))
    claimed.pod("p", template="pair")
    assert len(set(claimed.exact("p")["c"])) == 2


def test_match_attribute_keeps_cards_together(claimed: Claimed) -> None:
    """Card 0 has no room, so cards 2 and 3 are the only two of one NUMA node. The cards of n2 have none."""
    claimed.bench.create(_on("n1", asking("classic", core=80, ratio=10)))
    claimed.bench.exact("classic")
    assert claimed.bench.cards("classic") == {"c": [0]}
    rows = [{"matchAttribute": NUMA}, {"distinctAttribute": UUID}]
    claimed.template("near", wanted(cores=40, memory="8Gi", count=2), constraints=rows)
    claimed.pod("p", template="near")
    assert claimed.exact("p") == {"c": [2, 3]}
    assert claimed.bench.pod("p").spec.node_name == "n1"


def test_a_selector_decides_the_card(claimed: Claimed) -> None:
    claimed.template("third", wanted(cores=10, memory="1Gi", selector='device.attributes["gpu.mgpu.io"].index == 2'))
    claimed.pod("p", template="third")
    assert claimed.exact("p") == {"c": [2]}
    assert claimed.bench.pod("p").spec.node_name == "n1"


def test_the_second_alternative_is_used_where_the_first_one_does_not_fit(claimed: Claimed) -> None:
    for i in range(CARDS):
        claimed.bench.create(share(f"fill-{i}", core=60, mib=10 << 10))
        claimed.bench.exact(f"fill-{i}")
    rows = [wanted("large", cores=80, memory="8Gi"), wanted("small", cores=20, memory="4Gi")]
    alternatives = [{"name": row["name"], **row["exactly"]} for row in rows]
    claimed.template("either", {"name": "gpu", "firstAvailable": alternatives})
    claimed.pod("p", template="either")
    assert len(claimed.exact("p")["c"]) == 1
    (claim,) = claimed.of("p")
    assert [(result.request, result.core) for result in claim.results] == [("gpu/small", 200)]


def test_pods_that_share_a_claim_hold_it_once_until_the_last_one_ends(claimed: Claimed) -> None:
    claimed.create("common", wanted(cores=60, memory="8Gi"))
    for name in ("a", "b"):
        claimed.pod(name, claim="common")
    assert claimed.exact("a") == claimed.exact("b")
    node = claimed.bench.pod("a").spec.node_name
    assert sorted(claimed.used(node))[-1] == (60, 8)
    claimed.bench.delete("a")
    claimed.exact("b")
    assert sorted(claimed.used(node))[-1] == (60, 8)
    claimed.bench.delete("b")
    until(lambda: set(claimed.used(node)) == {(0, 0)})


def test_a_claim_that_is_deleted_holds_its_card_until_its_pod_ends(claimed: Claimed) -> None:
    claimed.create("common", wanted(cores=60, memory="8Gi"))
    claimed.pod("p", claim="common", node="n2")
    claimed.exact("p")
    claimed.api.delete(f"{NAMED}/common")
    assert claimed.get("common")["metadata"]["deletionTimestamp"]
    assert sorted(claimed.used("n2")) == [(0, 0), (60, 8)]
    claimed.bench.delete("p")
    until(lambda: set(claimed.used("n2")) == {(0, 0)})


def test_nvidia_gpu_is_a_claim_for_a_whole_card(claimed: Claimed) -> None:
    claimed.bench.create(_on("n2", share("classic")))
    claimed.bench.exact("classic")
    claimed.bench.create(_on("n2", asking("whole", nvidia=1)))
    claimed.bench.runs("whole")
    assert sorted(claimed.used("n2")) == [(30, 4), (100, 80)]
    (index,) = (i for i, use in enumerate(claimed.used("n2")) if use == (100, 80))
    assert claimed.bench.environment("whole", "c")["NVIDIA_VISIBLE_DEVICES"] == f"GPU-n2-{index}"
    claimed.bench.create(_on("n2", asking("more", nvidia=1)))
    assert claimed.bench.waits("more")


def test_converted_pods_get_their_shares_by_claims(claimed: Claimed) -> None:
    for name, pod in (("mgpu", share("mgpu", core=30, mib=8192)), ("gpushare", asking("gpushare", gpu_mem=4))):
        pod["metadata"]["labels"] = {"mgpu.io/dra": "convert"}
        claimed.bench.create(pod)
        assert len(claimed.exact(name)["c"]) == 1
        assert claimed.bench.cards(name) == {}
    env = claimed.bench.environment("mgpu", "c")
    assert (env["MGPU_CORE_PERCENT"], env["MGPU_MEMORY_BYTES"]) == ("30", str(8 << 30))


def test_a_killed_agent_knows_its_claims_afterwards(claimed: Claimed) -> None:
    claimed.template("share", wanted(cores=60, memory="8Gi"))
    claimed.pod("before", template="share", node="n2")
    before = claimed.exact("before")
    claimed.bench.cluster.processes["deviceplugin-n2"].kill()
    claimed.pod("meanwhile", template="share", node="n2")
    claimed.bench.cluster.restart("deviceplugin-n2")
    assert claimed.exact("meanwhile") != before
    assert claimed.exact("before") == before
    claimed.bench.delete("before")
    claimed.pod("after", template="share", node="n2")
    assert claimed.exact("after") == before


def test_a_restarted_kubelet_keeps_containers_and_gets_new_slices(claimed: Claimed) -> None:
    claimed.template("share", wanted(cores=60, memory="8Gi"))
    claimed.pod("before", template="share", node="n2")
    before = claimed.exact("before")
    container = claimed.bench.pod("before").status.container_statuses[0].container_id
    uid = _slice_uid(claimed, "n2")
    kubelet = claimed.bench.cluster.kubelets["n2"]
    kubelet.stop()
    kubelet.start()
    until(lambda: _slice_uid(claimed, "n2") not in ("", uid))
    claimed.pod("after", template="share", node="n2")
    assert claimed.exact("after") != before
    assert claimed.exact("before") == before
    assert claimed.bench.pod("before").status.container_statuses[0].container_id == container


def _slice_uid(claimed: Claimed, node: str) -> str:
    found = [raw for raw in claimed.api.list(SLICES)[0] if raw["spec"].get("nodeName") == node]
    return str(found[0]["metadata"]["uid"]) if found else ""


def test_without_the_scheduler_no_claim_is_allocated(claimed: Claimed) -> None:
    claimed.template("share", wanted(cores=60, memory="8Gi"))
    claimed.bench.cluster.processes["scheduler"].kill()
    claimed.pod("p", template="share")
    claimed.bench.create({"metadata": {"name": "plain"}, "spec": {"containers": [{"name": "c", "image": "busybox"}]}})
    claimed.bench.runs("plain")
    assert not claimed.bench.raw("p")["spec"].get("nodeName")
    assert not any(claim.allocated for claim in claimed.of("p"))
    claimed.bench.cluster.restart("scheduler")
    claimed.exact("p")


def test_no_claim_is_allocated_while_only_the_admission_does_not_answer(claimed: Claimed) -> None:
    path = f"{WEBHOOK}/mgpu-claims"
    url = claimed.api.get(path)["webhooks"][0]["clientConfig"]["url"]
    where = {"op": "replace", "path": "/webhooks/0/clientConfig/url"}
    claimed.api.patch(path, [{**where, "value": f"https://127.0.0.1:{free_port()}/claim-admission"}], JSON_PATCH)
    claimed.template("share", wanted(cores=60, memory="8Gi"))
    claimed.pod("p", template="share")
    until(lambda: any("failed calling webhook" in text for text in claimed.bench.events("p", "FailedScheduling")))
    assert not claimed.of("p")[0].allocated
    assert not claimed.bench.raw("p")["spec"].get("nodeName")
    claimed.api.patch(path, [{**where, "value": url}], JSON_PATCH)
    claimed.exact("p")


@pytest.fixture
def unasked(claimed: Claimed) -> Iterator[Claimed]:
    """Claims whose allocations are written without mgpu, until the end of the test."""
    path = f"{WEBHOOK}/mgpu-claims"
    hooks = claimed.api.get(path)
    claimed.api.delete(path)
    yield claimed
    meta = {key: value for key, value in hooks["metadata"].items() if key in ("name", "labels", "annotations")}
    claimed.api.create(WEBHOOK, {**hooks, "metadata": meta})


def test_an_allocation_without_mgpu_moves_unless_it_is_delivered(unasked: Claimed) -> None:
    unasked.create("first", wanted(cores=70, memory="8Gi"))
    unasked.allocate("first", "n2", 0, 70, "8Gi")
    unasked.pod("first", claim="first")
    assert unasked.exact("first") == {"c": [0]}
    version = unasked.get("first")["status"]["allocation"]
    unasked.create("second", wanted(cores=70, memory="8Gi"))
    unasked.allocate("second", "n2", 0, 70, "8Gi")
    unasked.pod("second", claim="second")
    assert unasked.exact("second") == {"c": [1]}
    assert unasked.exact("first") == {"c": [0]}
    assert unasked.get("first")["status"]["allocation"] == version
    assert unasked.used("n2") == [(70, 8), (70, 8)]


def test_a_burst_of_claims_and_other_pods_fills_all_cards(claimed: Claimed) -> None:
    claimed.template("tenth", wanted(cores=20, memory="16Gi"))
    names = [f"{kind}-{i}" for i in range(CARDS * 5 // 2 + 2) for kind in ("claim", "classic")]
    for name in names:
        if name.startswith("claim"):
            claimed.pod(name, template="tenth")
        else:
            claimed.bench.create(share(name, core=20, mib=16 << 10))
    created = time.monotonic()
    until(lambda: claimed.bench.count_bound() == CARDS * 5, SECONDS)
    print(f"{CARDS * 5} pods were bound {time.monotonic() - created:.2f} s after the last creation")
    assert claimed.bench.within_capacity()
    bound = [pod.metadata.name for pod in claimed.bench.bound()]
    for name in bound:
        if name.startswith("claim"):
            claimed.exact(name)
        else:
            claimed.bench.exact(name)
    assert {use for node in ("n1", "n2") for use in claimed.used(node)} == {(100, 80)}
    for name in names:
        if name not in bound:
            assert claimed.bench.waits(name)


def test_simulation_agrees_with_the_cluster(claimed: Claimed) -> None:
    """The pods are created one after the other. Then `mgpu simulate` gets them without their cards."""
    claimed.template("share", wanted(cores=30, memory="20Gi"))
    claimed.template("pair", wanted(cores=40, memory="10Gi", count=2), constraints=[{"matchAttribute": NUMA}])
    claimed.template("two", wanted("a", 60, "8Gi"), wanted("b", 50, "4Gi"))
    claimed.template("whole", wanted())
    claimed.create("common", wanted(cores=20, memory="1Gi", selector='device.attributes["gpu.mgpu.io"].index == 1'))
    names = []
    for i, kind in enumerate(("share", "classic", "pair", "common", "whole", "two", "share", "common", "share")):
        names.append(f"{kind}-{i}")
        if kind == "classic":
            claimed.bench.create(share(names[-1], core=50, mib=8 << 10))
        else:
            claimed.pod(names[-1], **({"claim": kind} if kind == "common" else {"template": kind}))
        claimed.bench.runs(names[-1])
    found = _simulated(claimed, names)
    for row in found["pods"]:
        node = claimed.bench.pod(row["name"]).spec.node_name
        assert (row["name"], row["node"]) == (row["name"], node)
        cards = {container: given["cards"] for container, given in row["containers"].items()}
        name = row["name"]
        actual = claimed.bench.cards(name) if name.startswith("classic") else claimed.exact(name)
        assert {container: sorted(set(indexes)) for container, indexes in cards.items()} == actual, name

    for node, cards in _simulated(claimed)["nodes"].items():
        used = [(card["core"]["used"], card["memory"]["used"] >> 30) for card in cards["cards"]]
        assert used == claimed.used(node)


def _simulated(claimed: Claimed, names: Sequence[str] = ()) -> Any:
    """Return the output of `mgpu simulate` for the cluster as it is, or as if none of these pods had been placed."""
    objects: list[Any] = [{**raw, "kind": kind} for kind, path in _LISTS.items() for raw in claimed.api.list(path)[0]]
    claims = claimed.api.list(NAMED)[0]
    if names:
        unowned = [raw for raw in claims if not raw["metadata"].get("ownerReferences")]
        objects += [{**raw, "kind": "ResourceClaim", "status": {}} for raw in unowned]
    else:
        objects += [{**raw, "kind": "ResourceClaim"} for raw in claims]
        objects += [{**raw, "kind": "Pod"} for raw in claimed.api.list(PODS)[0]]
    for name in names:
        raw = claimed.bench.raw(name)
        spec = {key: value for key, value in raw["spec"].items() if key != "nodeName"}
        objects.append({"kind": "Pod", "metadata": {"name": name}, "spec": spec})
    ran = CliRunner().invoke(main, ["simulate", "-", "-o", "json"], input=yaml.safe_dump_all(objects))
    assert ran.exit_code == 0, ran.output
    return json.loads(ran.stdout)


_LISTS = {
    "Node": "/api/v1/nodes",
    "Device": f"/apis/{DEVICE_API}/devices",
    "DeviceClass": CLASSES,
    "ResourceClaimTemplate": TEMPLATES,
}
"""The objects that `mgpu simulate` gets besides pods and claims."""


def test_an_invalid_annotation_denies_the_allocation_with_its_rule(claimed: Claimed) -> None:
    devices = {"requests": [wanted(cores=10, memory="1Gi")]}
    meta = {"name": "odd", "annotations": {"mgpu.io/card-policy": "wat"}}
    claimed.api.create(NAMED, {"metadata": meta, "spec": {"devices": devices}})
    claimed.pod("p", claim="odd")
    until(lambda: any("card-policy" in text for text in claimed.bench.events("p", "FailedScheduling")))
    assert "allocation" not in claimed.get("odd").get("status", {})


def test_ended_pods_free_their_cards(claimed: Claimed) -> None:
    claimed.template("all", wanted(count=2))
    claimed.pod("first", template="all", node="n2")
    claimed.exact("first")
    claimed.pod("second", template="all", node="n2")
    assert claimed.bench.waits("second")
    claimed.bench.delete("first")
    claimed.exact("second")
    with pytest.raises(ApiError):
        claimed.get("first")
