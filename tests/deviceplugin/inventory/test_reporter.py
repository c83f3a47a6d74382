"""What the node says of itself; against an API server in test_agent.py."""

import threading
from dataclasses import replace
from typing import Any

import pytest

from deviceplugin.inventory.node_objects import PUBLISHED_ANNOTATION, NodeObjects
from deviceplugin.inventory.reporter import (
    NodeFacts,
    Reporter,
    agent_patch,
    capacity_patch,
    device_patch,
    known_indexes,
    labels_patch,
)
from deviceplugin.pods.node_pods import NodePods
from mgpu.dialects import gpushare
from mgpu.kube import Api, ApiError, Unreachable
from mgpu.model.cards import Card
from mgpu.model.device_checkpoints import CHECKPOINTS
from mgpu.model.device_object import write_device
from mgpu.model.errors import RetryLater
from mgpu.model.pods import read_node
from mgpu.settings import load_settings
from mgpu.version import AGENT_ANNOTATION, AgentReport, Toolkit, own_version, read_agent_report
from tests.builders import MEMORY, card, cards, node, share
from tests.deviceplugin.node import NODE, Node
from tests.waiting import until

OWNER = {"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "u1"}
NONE = "dialects: {mgpu: {enabled: false}, gpushare: {enabled: false}, koordinator: {enabled: false}}"
RDMA = {"type": "rdma", "id": "mlx5_0", "minor": 0, "health": True}


def wanted(*own: Any) -> dict[str, Any]:
    return write_device(read_node(node()), "u1", own or cards(2))


def seen(**changes: Any) -> dict[str, Any]:
    device = wanted()
    device["metadata"] = {**device["metadata"], "resourceVersion": "7", "labels": {"theirs": "x"}, **changes}
    return device


def test_nothing_to_do_where_all_is_said() -> None:
    assert device_patch(seen(), wanted()) is None


def test_a_change_is_made_for_the_version_that_was_seen() -> None:
    new = wanted(card(0), card(1, healthy=False))
    assert device_patch(seen(), new) == {"metadata": {"resourceVersion": "7"}, "spec": new["spec"]}


def test_devices_of_other_types_stay() -> None:
    device = seen()
    device["spec"]["devices"].append(RDMA)
    assert device_patch(device, wanted()) is None
    patch = device_patch(device, wanted(card(0)))
    assert patch is not None
    assert [d["id"] for d in patch["spec"]["devices"]] == ["GPU-n1-0", "mlx5_0"]


@pytest.mark.parametrize("found", [[], [{**OWNER, "uid": "of the node before"}]], ids=["none", "another node's"])
def test_the_node_owns_it_and_other_owners_stay(found: list[dict[str, str]]) -> None:
    other = {"apiVersion": "v1", "kind": "ConfigMap", "name": "c", "uid": "u2"}
    patch = device_patch(seen(ownerReferences=[*found, other]), wanted())
    assert patch == {"metadata": {"ownerReferences": [other, OWNER], "resourceVersion": "7"}}


def test_an_empty_object_is_filled() -> None:
    patch = device_patch({"metadata": {"name": "n1", "resourceVersion": "1"}}, wanted())
    assert patch is not None
    assert len(patch["spec"]["devices"]) == 2


def memory(capacity: dict[str, str], *, held: int = 0, own: Any = None) -> Any:
    raw = {"metadata": {}, "status": {"capacity": capacity}}
    patch = capacity_patch(raw, own or cards(2), load_settings(), lambda name: held if name == MEMORY else 0)
    return patch["status"]["capacity"].get(MEMORY) if patch and "status" in patch else None


def test_memory_is_summed_over_healthy_cards() -> None:
    assert memory({}) == "163840"
    assert memory({}, own=(card(0), card(1, healthy=False))) == "81920"


def test_it_is_never_less_than_pods_hold() -> None:
    assert memory({}, held=100_000, own=(card(0), card(1, healthy=False))) == "100000"


@pytest.mark.parametrize("value", ["163840", "160Ki"])
def test_what_is_there_is_not_written_again_however_it_is_spelled(value: str) -> None:
    assert memory({MEMORY: value}) is None


@pytest.mark.parametrize("value", ["0", "163839", "many"])
def test_what_the_kubelet_zeroed_or_another_wrote_is_asserted_again(value: str) -> None:
    assert memory({MEMORY: value}) == "163840"


def test_a_dialect_that_is_not_enabled_publishes_nothing() -> None:
    assert capacity_patch({}, cards(2), load_settings(NONE), lambda _: 0) is None


def test_what_is_no_device_id_is_in_the_nodes_status() -> None:
    devices = (*cards(2), Card(0, "mlx5_0", "", 0, type="rdma"), Card(0, "f", "", 0, type="fpga", healthy=False))
    patch = capacity_patch({}, devices, load_settings("dialects: {gpushare: {memoryUnit: MiB}}"), lambda _: 0)
    assert patch is not None
    assert patch["status"]["capacity"] == {
        MEMORY: "163840",
        "aliyun.com/gpu-mem": "163840",
        "aliyun.com/gpu-count": "2",
        "koordinator.sh/gpu-memory": str(160 << 30),
        "koordinator.sh/gpu.shared": "200",
        "koordinator.sh/rdma": "100",
        "koordinator.sh/fpga": "0",
    }
    assert patch["metadata"]["annotations"][PUBLISHED_ANNOTATION] == ",".join(sorted(patch["status"]["capacity"]))


def left(published: str, *, held: int = 0, text: str = NONE) -> Any:
    """What becomes of an amount of gpu-mem that was published before."""
    raw = {
        "metadata": {"annotations": {PUBLISHED_ANNOTATION: published}},
        "status": {"capacity": {"aliyun.com/gpu-mem": "9", "theirs.com/x": "1"}},
    }
    return capacity_patch(raw, cards(2), load_settings(text), lambda name: held if name == "aliyun.com/gpu-mem" else 0)


def test_what_was_published_goes_when_no_pod_holds_it_any_more() -> None:
    gone = {
        "status": {"capacity": {"aliyun.com/gpu-mem": None}},
        "metadata": {"annotations": {PUBLISHED_ANNOTATION: None}},
    }
    assert left("aliyun.com/gpu-mem") == gone
    assert left("aliyun.com/gpu-mem", held=4)["status"]["capacity"] == {"aliyun.com/gpu-mem": "4"}
    assert left("") is None, "nobody knows whose it is"


def test_what_is_served_as_ids_now_is_the_kubelets() -> None:
    only = "dialects: {mgpu: {enabled: false}, koordinator: {enabled: false}}"
    patch = left("aliyun.com/gpu-mem,aliyun.com/gpu-count", text=only)
    assert patch["status"]["capacity"] == {"aliyun.com/gpu-count": "2"}
    assert patch["metadata"]["annotations"] == {PUBLISHED_ANNOTATION: "aliyun.com/gpu-count"}
    held = left("aliyun.com/gpu-count,aliyun.com/gpu-mem", held=4, text=only)
    assert held == {"status": {"capacity": {"aliyun.com/gpu-count": "2"}}}, "not before the node is drained"


def test_what_another_plugin_gave_out_is_written_beside_what_others_wrote() -> None:
    device = seen(annotations={"theirs": "x"})
    assert device_patch(device, wanted(), None) is None
    assert device_patch(device, wanted(), "") is None
    patch = device_patch(device, wanted(), "[1]")
    assert patch == {"metadata": {"annotations": {CHECKPOINTS: "[1]"}, "resourceVersion": "7"}}
    device["metadata"]["annotations"][CHECKPOINTS] = "[1]"
    assert device_patch(device, wanted(), "[1]") is None
    assert device_patch(device, wanted(), None) is None
    patch = device_patch(device, wanted(), "")
    assert patch == {"metadata": {"annotations": {CHECKPOINTS: None}, "resourceVersion": "7"}}


def test_the_node_says_who_serves_whole_cards() -> None:
    label = "mgpu.io/whole-cards"
    assert labels_patch(node(), (), "", "nvidia") == {"metadata": {"labels": {label: "nvidia"}}}
    assert labels_patch(node(labels={label: "nvidia"}), (), "", "nvidia") is None
    assert labels_patch(node(labels={label: "nvidia"}), (), "", "") is None


def test_the_node_says_its_cards_model_and_driver() -> None:
    named = replace(card(0), model="NVIDIA A100-SXM4-80GB (x)")
    model, driver = "node.koordinator.sh/gpu-model", "node.koordinator.sh/gpu-driver-version"
    patch = labels_patch(node(), (named, card(1)), "570.86.15")
    assert patch == {"metadata": {"labels": {model: "NVIDIA-A100-SXM4-80GB-x", driver: "570.86.15"}}}
    there = node(labels=patch["metadata"]["labels"])
    assert labels_patch(there, (named,), "570.86.15") is None
    assert labels_patch(there, (), "") is None


class Devices(Api):
    """Answers each get with the next of these."""

    def __init__(self, *answers: dict[str, Any] | Exception) -> None:
        self.answers = list(answers)

    def get(self, path: str, **_: object) -> dict[str, Any]:
        assert path.endswith("/devices/n1")
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_the_agent_says_of_itself_what_is_different() -> None:
    said = AgentReport("0.1.0", None, 2, "mgpu")
    patch = agent_patch(node(), said)
    assert patch is not None
    told = {"metadata": {"name": "n1", **patch["metadata"]}}
    assert read_agent_report(told) == said
    assert agent_patch(told, said) is None
    toolkit = Toolkit(variable=True, mounts=False)
    for other in (said._replace(cdi=True), said._replace(toolkit=toolkit), said._replace(mps_unbounded=True)):
        patch = agent_patch(told, other)
        assert patch is not None
        assert read_agent_report({"metadata": {"name": "n1", **patch["metadata"]}}) == other


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"version": "1", "cdi": true, "cards": null}'])
def test_what_cannot_be_read_is_not_said(text: str) -> None:
    assert read_agent_report({"metadata": {"name": "n1", "annotations": {AGENT_ANNOTATION: text}}}) is None


def test_the_indexes_are_what_the_device_said() -> None:
    down = Unreachable("no answer")
    assert known_indexes(Devices(down, wanted(card(3), card(5))), "n1") == {"GPU-n1-3": 3, "GPU-n1-5": 5}
    assert known_indexes(Devices(ApiError(404, "NotFound", "")), "n1") == {}
    assert known_indexes(Devices(down), "n1", seconds=-1) == {}
    assert known_indexes(Devices({"spec": {"devices": [{"type": "gpu"}]}}), "n1") == {}


def published(node: Node) -> list[str]:
    annotations = node.api.get(NODE)["metadata"].get("annotations") or {}
    return str(annotations.get(PUBLISHED_ANNOTATION, "")).split(",")


def test_amount_held_before_the_pods_are_known_is_not_taken_away(node: Node) -> None:
    """The pods of a node may be listed long after the node itself."""
    api, pods_synced, held = node.api, threading.Event(), dict[str, int]()
    until(lambda: api.list("/api/v1/nodes")[0])
    api.patch(NODE, {"metadata": {"annotations": {PUBLISHED_ANNOTATION: gpushare.MEMORY}}})

    def facts() -> NodeFacts:
        if not pods_synced.is_set():
            raise RetryLater("the pods of this node have not been listed yet")
        return NodeFacts(cards(2), "", cards(2), "mgpu", "")

    def not_drained_reason() -> str:
        amount = held.get(gpushare.MEMORY, 0)
        return str(objects.not_drained_reason(gpushare.MEMORY, pods_synced=pods_synced.is_set(), held=amount))

    objects = NodeObjects(api, "n1")
    reporter = Reporter(api, objects, load_settings(), facts, lambda name: held.get(name, 0))
    objects.on_node_change.append(reporter.update)
    objects.on_device_change.append(reporter.update)
    assert "n1 has not been listed yet" in not_drained_reason()
    objects.start()
    reporter.start()
    try:
        until(lambda: "have not been listed" in str(reporter.problem) and objects.node)
        assert "not been listed" in not_drained_reason()
        assert published(node) == [gpushare.MEMORY]
        assert read_agent_report(api.get(NODE)) is None
        held[gpushare.MEMORY] = 8138
        pods_synced.set()
        until(lambda: not reporter.problem)
        assert gpushare.MEMORY in published(node)
        assert read_agent_report(api.get(NODE)) == AgentReport(own_version(), None, 2, "mgpu")
        assert "pods still hold" in not_drained_reason()
        held.clear()
        assert not_drained_reason() == "None"
    finally:
        reporter.stop()
        objects.stop()


def test_pods_that_the_kubelet_has_not_admitted_change_no_amount_of_the_node() -> None:
    """Anybody who may create pods can name this node, and ask for more than any node has."""
    pods = NodePods(load_settings(), lambda: None)
    capacity = {}
    for phase, started in (("Pending", ""), ("Failed", "2026-11-22T00:00:00Z"), ("Running", "2026-11-22T00:00:00Z")):
        raw = share("p", mib=3_000_000_000, uid=f"uid-{phase}", phase=phase)
        raw["status"] |= {"startTime": started} if started else {}
        pods.take(raw)
        patch = capacity_patch({"metadata": {}, "status": {}}, cards(2), load_settings(), pods.held_amount)
        capacity[phase] = patch["status"]["capacity"][MEMORY] if patch else None
    assert capacity == {"Pending": "163840", "Failed": "163840", "Running": "3000000000"}
