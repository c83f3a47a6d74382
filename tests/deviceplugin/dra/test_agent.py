"""The agent as a DRA plugin between a kubelet, a runtime and an API server."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from deviceplugin.agent import Agent
from mgpu.model.node_slices import EXISTING
from mgpu.model.resource_claims import SLICES, claim_path
from mgpu.model.resource_slices import WAKE, slice_name
from tests.deviceplugin.dra.claims import allocation, claim_pod, request, result
from tests.deviceplugin.node import PODS, Node
from tests.deviceplugin.partitioning.rig import places
from tests.deviceplugin.partitioning.test_agent import label, made, plan
from tests.deviceplugin.records import decided
from tests.waiting import until

Json = dict[str, Any]
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
SLICE = f"{SLICES}/{slice_name('n1')}"


@contextmanager
def dra(node: Node, **settings: Any) -> Iterator[Agent]:
    with node.agent(**{"dra.enabled": True, **settings}) as agent:
        yield agent


def published(node: Node) -> Json | None:
    found = [raw for raw in node.api.list(SLICES)[0] if raw["metadata"]["name"] == slice_name("n1")]
    return found[0] if found else None


def devices(node: Node) -> Mapping[str, Json]:
    raw = until(lambda: published(node))
    return {device["name"]: device for device in raw["spec"]["devices"]}


def free(node: Node, device: str) -> tuple[str, str]:
    capacity = devices(node)[device]["capacity"]
    return capacity["cores"]["value"], capacity["memory"]["value"]


def allocate(node: Node, name: str, pod: Json, card: int = 0, cores: int = 30, *, of: Json | None = None) -> Json:
    """Create a claim, and allocate it for the pod as kube-scheduler does."""
    wanted = of or request(cores=cores)
    raw = node.api.create(
        CLAIMS,
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"name": name},
            "spec": {"devices": {"requests": [wanted]}},
        },
    )
    reserved = {"resource": "pods", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}
    status = {"allocation": allocation([result(card, wanted)]), "reservedFor": [reserved]}
    return node.api.replace(f"{claim_path('default', name)}/status", {**raw, "status": status})


def deploy(node: Node, name: str, card: int = 0, cores: int = 30) -> None:
    """Create a pod with a claim of its own, allocate the claim, and bind the pod, in the order of kube-scheduler."""
    pod = node.create(claim_pod(name, claims=[f"of-{name}"], node=""))
    allocate(node, f"of-{name}", pod, card, cores)
    bind(node, name)


def bind(node: Node, name: str) -> None:
    body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": {"kind": "Node", "name": "n1"}}
    node.api.create(f"{PODS}/{name}/binding", body)


def claim_status(node: Node, name: str) -> Json:
    status: Json = node.api.get(claim_path("default", name))["status"]
    return status


def test_cards_are_published(node: Node) -> None:
    with dra(node):
        found = devices(node)
        assert [*found] == ["card-0", "card-1"]
        assert found["card-0"]["allowMultipleAllocations"] is True
        assert found["card-0"]["attributes"]["uuid"] == {"string": "GPU-n1-0"}
        assert free(node, "card-1") == ("100", "80Gi")
        owners = node.api.get(SLICE)["metadata"]["ownerReferences"]
        assert owners[0]["uid"] == node.api.get("/api/v1/nodes/n1")["metadata"]["uid"]


def test_pods_without_claims_reduce_what_is_published(node: Node) -> None:
    with dra(node):
        node.create(decided("p", "0", 40, node="n1"))
        node.runs("p")
        until(lambda: free(node, "card-0") == ("60", "79Gi"))
        assert free(node, "card-1") == ("100", "80Gi")
        # kube-scheduler takes the first device that fits, so the fullest card comes first.
        assert next(iter(devices(node))) == "card-0"
        node.api.delete(f"{PODS}/p")
        until(lambda: free(node, "card-0") == ("100", "80Gi"))


def test_claims_do_not_reduce_what_is_published(node: Node) -> None:
    with dra(node):
        devices(node)
        version = node.api.get(SLICE)["metadata"]["resourceVersion"]
        deploy(node, "p")
        node.runs("p")
        assert node.api.get(SLICE)["metadata"]["resourceVersion"] == version


def test_unhealthy_card_has_a_taint(node: Node) -> None:
    with dra(node):
        devices(node)
        node.set_cards([{"memory": "80Gi"}, {"memory": "80Gi", "healthy": False}])
        taints = until(lambda: devices(node)["card-1"].get("taints"))
        assert [(taint["key"], taint["effect"]) for taint in taints] == [("mgpu.io/unhealthy", "NoSchedule")]


def test_deleted_slice_is_published_again(node: Node) -> None:
    """The kubelet deletes the slices of its node whenever it starts."""
    with dra(node):
        before = until(lambda: published(node))["metadata"]["uid"]
        node.api.delete(SLICE)
        until(lambda: (now := published(node)) and now["metadata"]["uid"] != before)


def test_annotations_of_others_stay(node: Node) -> None:
    with dra(node):
        devices(node)
        node.api.patch(SLICE, {"metadata": {"annotations": {WAKE: "7"}}})
        node.create(decided("p", "0", 40, node="n1"))
        until(lambda: free(node, "card-0") == ("60", "79Gi"))
        assert node.api.get(SLICE)["metadata"]["annotations"][WAKE] == "7"


def test_slice_is_removed_when_dra_is_disabled(node: Node) -> None:
    with dra(node):
        devices(node)
    assert published(node)
    with node.agent():
        until(lambda: published(node) is None)


def test_pod_with_a_claim_runs_with_its_card(node: Node) -> None:
    with dra(node):
        deploy(node, "p", card=1)
        node.runs("p")
        expected = {"NVIDIA_VISIBLE_DEVICES": "GPU-n1-1", "MGPU_CARDS": "1", "MGPU_CORE_PERCENT": "30"}
        assert node.env("p").items() >= expected.items()
        assert claim_status(node, "of-p")["devices"][0]["conditions"][0]["type"] == "Prepared"
        uid = node.api.get(claim_path("default", "of-p"))["metadata"]["uid"]
        assert (node.folder / "cdi" / f"mgpu_{uid}.json").exists()
        node.api.delete(f"{PODS}/p")
        until(lambda: not (node.folder / "cdi" / f"mgpu_{uid}.json").exists())


def test_claims_appear_among_the_holdings(node: Node) -> None:
    with dra(node) as agent:
        deploy(node, "p")
        node.runs("p")
        (held,) = agent.card_holdings().held
        assert (held.key, held.dialect) == ("default/of-p", "dra")


def test_pod_without_a_claim_waits_until_a_claim_is_unprepared(node: Node, brief: None) -> None:  # noqa: ARG001
    with dra(node):
        deploy(node, "p", cores=60)
        node.runs("p")
        node.create(decided("q", "0", 60, node="n1"))
        until(lambda: "insufficient capacity" in node.waits("q"))
        node.api.delete(f"{PODS}/p")
        node.runs("q")


def test_claim_waits_until_a_pod_without_a_claim_has_ended(node: Node) -> None:
    with dra(node) as agent:
        node.create(decided("q", "0", 60, node="n1"))
        node.runs("q")
        deploy(node, "p", cores=60)
        uid = node.api.get(claim_path("default", "of-p"))["metadata"]["uid"]
        until(lambda: agent._state.claims.is_preparing(uid))
        assert node.pod("p")["status"]["phase"] == "Pending"
        node.api.delete(f"{PODS}/q")
        node.runs("p")


def test_claims_survive_the_agent(node: Node) -> None:
    with dra(node):
        deploy(node, "p", cores=60)
        node.runs("p")
    with dra(node) as agent:
        assert [held.key for held in agent.card_holdings().held] == ["default/of-p"]
        node.api.delete(f"{PODS}/p")
        until(lambda: not agent.card_holdings().held)


def test_agent_that_takes_over_prepares_claims(node: Node) -> None:
    with dra(node), dra(node):
        deploy(node, "p")
        node.runs("p")


def test_slice_stays_while_another_agent_takes_over(node: Node) -> None:
    """The kubelet would delete it 30 s after it has lost the driver."""
    with dra(node) as first:
        uid = until(lambda: published(node))["metadata"]["uid"]
        with dra(node) as second:
            until(lambda: not second.not_ready_reason() and not first.not_ready_reason())
            deploy(node, "p")
            node.runs("p")
            now = published(node)
            assert now is not None
            assert now["metadata"]["uid"] == uid


def test_kubelet_that_restarts_finds_the_driver_again(node: Node) -> None:
    with dra(node) as agent:
        node.kubelet.stop()
        until(agent.not_ready_reason)
        node.kubelet.start()
        until(lambda: not agent.not_ready_reason())
        deploy(node, "p")
        node.runs("p")


def test_whole_cards_are_left_to_claims(node: Node) -> None:
    with dra(node, wholeCards="dra"):
        until(lambda: node.api.get("/api/v1/nodes/n1")["metadata"]["labels"].get("mgpu.io/whole-cards") == "dra")
        assert node.kubelet.devices.capacity()[1].get("nvidia.com/gpu", 0) == 0


def test_card_of_a_claim_is_not_partitioned_until_the_claim_is_unprepared(node: Node) -> None:
    node.set_cards([{"model": "A100-SXM4-80GB", "memory": "80Gi"}])
    with dra(node):
        deploy(node, "p")
        node.runs("p")
        label(node, "mig")
        taints = until(lambda: devices(node)["card-0"].get("taints"))
        assert [taint["key"] for taint in taints] == ["mgpu.io/partitioned"]
        assert free(node, "card-0") == ("0", "0")
        plan(node, 1, *places("2g.20gb@0"))
        assert not made(node)
        node.api.delete(f"{PODS}/p")
        until(lambda: made(node))


def instance_taints(node: Node, card: int = 0) -> set[str] | None:
    """Return the taints of all MIG instances of a card together; None if none is published."""
    rows = [row for raw in node.api.list(SLICES)[0] for row in raw["spec"].get("devices") or ()]
    own = [row for row in rows if row["name"].startswith(f"card-{card}-mig-")]
    return {taint["key"] for row in own for taint in row.get("taints") or ()} if own else None


def test_instances_of_a_card_are_not_offered_before_the_share_of_a_claim_has_ended(node: Node) -> None:
    node.set_cards([{"model": "A100-SXM4-80GB", "memory": "80Gi"}] * 2)
    with dra(node):
        deploy(node, "p")
        node.runs("p")
        label(node, "mig-claims")
        until(lambda: instance_taints(node, 1) == set())
        assert instance_taints(node, 0) == {"mgpu.io/in-use", "mgpu.io/not-in-mig-mode"}
        reported = node.api.get("/api/v1/nodes/n1")["metadata"]["annotations"][EXISTING]
        assert reported == '{"cards": {"1": []}}'
        node.api.delete(f"{PODS}/p")
        until(lambda: instance_taints(node, 0) == set())


def test_claim_is_not_prepared_on_a_card_that_is_reserved_for_slices(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deviceplugin.dra.claim_service.WAIT_SECONDS", 0.5)
    node.set_cards([{"model": "A100-SXM4-80GB", "memory": "80Gi"}])
    with dra(node):
        label(node, "mig")
        until(lambda: devices(node)["card-0"].get("taints"))
        deploy(node, "p")
        events = until(
            lambda: [e for e in node.api.list("/api/v1/events")[0] if "is partitioned, or will be" in e["message"]]
        )
        assert events[0]["involvedObject"]["name"] == "p"


def test_agent_is_not_ready_while_the_kubelet_does_not_register_the_driver(node: Node) -> None:
    with dra(node) as agent:
        assert agent._claims is not None
        agent._claims._registration.problem = "the kubelet does not register the DRA plugin: no handler"
        assert "no handler" in (agent.not_ready_reason() or "")
