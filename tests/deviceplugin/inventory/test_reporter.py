"""The patches of the reporter. `tests/deviceplugin/test_agent.py` tests them with an API server."""

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
from mgpu.version import AGENT_ANNOTATION, AgentReport, IsolationReport, Toolkit, own_version, read_agent_report
from tests.builders import MEMORY, card, cards, node, share
from tests.deviceplugin.node import NODE, Node
from tests.waiting import until

OWNER = {"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "u1"}
NONE = "dialects: {mgpu: {enabled: false}, gpushare: {enabled: false}, koordinator: {enabled: false}}"
RDMA = {"type": "rdma", "id": "mlx5_0", "minor": 0, "health": True}


def desired(*own: Any) -> dict[str, Any]:
    return write_device(read_node(node()), "u1", own or cards(2))


def device(**changes: Any) -> dict[str, Any]:
    """Return the Device as the API server has it."""
    raw = desired()
    raw["metadata"] = {**raw["metadata"], "resourceVersion": "7", "labels": {"theirs": "x"}, **changes}
    return raw


def test_current_device_is_not_patched() -> None:
    assert device_patch(device(), desired()) is None


def test_device_patch_has_the_resource_version_as_precondition() -> None:
    new = desired(card(0), card(1, healthy=False))
    assert device_patch(device(), new) == {"metadata": {"resourceVersion": "7"}, "spec": new["spec"]}


def test_device_patch_keeps_devices_of_other_types() -> None:
    raw = device()
    raw["spec"]["devices"].append(RDMA)
    assert device_patch(raw, desired()) is None
    patch = device_patch(raw, desired(card(0)))
    assert patch is not None
    assert [d["id"] for d in patch["spec"]["devices"]] == ["GPU-n1-0", "mlx5_0"]


@pytest.mark.parametrize("owners", [[], [{**OWNER, "uid": "former node"}]], ids=["none", "another node's"])
def test_device_patch_sets_the_node_as_owner_and_keeps_other_owners(owners: list[dict[str, str]]) -> None:
    other = {"apiVersion": "v1", "kind": "ConfigMap", "name": "c", "uid": "u2"}
    patch = device_patch(device(ownerReferences=[*owners, other]), desired())
    assert patch == {"metadata": {"ownerReferences": [other, OWNER], "resourceVersion": "7"}}


def test_empty_device_gets_all_cards() -> None:
    patch = device_patch({"metadata": {"name": "n1", "resourceVersion": "1"}}, desired())
    assert patch is not None
    assert len(patch["spec"]["devices"]) == 2


def memory(capacity: dict[str, str], *, held: int = 0, own: Any = None) -> Any:
    raw = {"metadata": {}, "status": {"capacity": capacity}}
    patch = capacity_patch(raw, own or cards(2), load_settings(), lambda name: held if name == MEMORY else 0)
    return patch["status"]["capacity"].get(MEMORY) if patch and "status" in patch else None


ONE_UNHEALTHY = (card(0), card(1, healthy=False))


@pytest.mark.parametrize(
    ("capacity", "held", "own", "written"),
    [
        ({}, 0, None, "163840"),
        ({}, 0, ONE_UNHEALTHY, "81920"),
        ({}, 100_000, ONE_UNHEALTHY, "100000"),
        ({MEMORY: "163840"}, 0, None, None),
        ({MEMORY: "160Ki"}, 0, None, None),
        ({MEMORY: "0"}, 0, None, "163840"),
        ({MEMORY: "163839"}, 0, None, "163840"),
        ({MEMORY: "many"}, 0, None, "163840"),
    ],
    ids=[
        "sum of the cards",
        "healthy cards only",
        "at least what pods hold",
        "unchanged",
        "unchanged in another notation",
        "set to zero by the kubelet",
        "changed by another client",
        "no number",
    ],
)
def test_capacity_of_memory(capacity: dict[str, str], held: int, own: Any, written: str | None) -> None:
    assert memory(capacity, held=held, own=own) == written


def test_disabled_dialects_publish_nothing() -> None:
    assert capacity_patch({}, cards(2), load_settings(NONE), lambda _: 0) is None


def test_resources_without_ids_are_published_in_node_status() -> None:
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


def leaving(published: str, *, held: int = 0, text: str = NONE) -> Any:
    """Return the patch for an amount of gpu-mem that was published before."""
    raw = {
        "metadata": {"annotations": {PUBLISHED_ANNOTATION: published}},
        "status": {"capacity": {"aliyun.com/gpu-mem": "9", "theirs.com/x": "1"}},
    }
    return capacity_patch(raw, cards(2), load_settings(text), lambda name: held if name == "aliyun.com/gpu-mem" else 0)


def test_published_resource_is_removed_once_no_pod_holds_it() -> None:
    gone = {
        "status": {"capacity": {"aliyun.com/gpu-mem": None}},
        "metadata": {"annotations": {PUBLISHED_ANNOTATION: None}},
    }
    assert leaving("aliyun.com/gpu-mem") == gone
    assert leaving("aliyun.com/gpu-mem", held=4)["status"]["capacity"] == {"aliyun.com/gpu-mem": "4"}
    assert leaving("") is None, "another client has published it"


def test_resource_offered_as_ids_now_is_left_to_the_kubelet() -> None:
    only = "dialects: {mgpu: {enabled: false}, koordinator: {enabled: false}}"
    patch = leaving("aliyun.com/gpu-mem,aliyun.com/gpu-count", text=only)
    assert patch["status"]["capacity"] == {"aliyun.com/gpu-count": "2"}
    assert patch["metadata"]["annotations"] == {PUBLISHED_ANNOTATION: "aliyun.com/gpu-count"}
    held = leaving("aliyun.com/gpu-count,aliyun.com/gpu-mem", held=4, text=only)
    assert held == {"status": {"capacity": {"aliyun.com/gpu-count": "2"}}}, "the node is not drained yet"


def test_annotation_of_unrecorded_pods_is_written_beside_other_annotations() -> None:
    raw = device(annotations={"theirs": "x"})
    assert device_patch(raw, desired(), None) is None
    assert device_patch(raw, desired(), "") is None
    patch = device_patch(raw, desired(), "[1]")
    assert patch == {"metadata": {"annotations": {CHECKPOINTS: "[1]"}, "resourceVersion": "7"}}
    raw["metadata"]["annotations"][CHECKPOINTS] = "[1]"
    assert device_patch(raw, desired(), "[1]") is None
    assert device_patch(raw, desired(), None) is None
    patch = device_patch(raw, desired(), "")
    assert patch == {"metadata": {"annotations": {CHECKPOINTS: None}, "resourceVersion": "7"}}


def test_label_names_the_server_of_whole_cards() -> None:
    label = "mgpu.io/whole-cards"
    assert labels_patch(node(), (), "", "nvidia") == {"metadata": {"labels": {label: "nvidia"}}}
    assert labels_patch(node(labels={label: "nvidia"}), (), "", "nvidia") is None
    assert labels_patch(node(labels={label: "nvidia"}), (), "", "") is None


def test_labels_name_model_and_driver() -> None:
    named = replace(card(0), model="NVIDIA A100-SXM4-80GB (x)")
    model, driver = "node.koordinator.sh/gpu-model", "node.koordinator.sh/gpu-driver-version"
    patch = labels_patch(node(), (named, card(1)), "570.86.15")
    assert patch == {"metadata": {"labels": {model: "NVIDIA-A100-SXM4-80GB-x", driver: "570.86.15"}}}
    there = node(labels=patch["metadata"]["labels"])
    assert labels_patch(there, (named,), "570.86.15") is None
    assert labels_patch(there, (), "") is None


class FakeApi(Api):
    """Answers each GET with the next answer."""

    def __init__(self, *answers: dict[str, Any] | Exception) -> None:
        self.answers = list(answers)

    def get(self, path: str, **_: object) -> dict[str, Any]:
        assert path.endswith("/devices/n1")
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_agent_annotation_is_written_if_it_differs() -> None:
    report = AgentReport("0.1.0", None, 2, "mgpu")
    patch = agent_patch(node(), report)
    assert patch is not None
    raw = {"metadata": {"name": "n1", **patch["metadata"]}}
    assert read_agent_report(raw) == report
    assert agent_patch(raw, report) is None
    toolkit = Toolkit(variable=True, mounts=False)
    isolation = IsolationReport("driver", "it is too old", "managed memory escapes", hami_core=True)
    for other in (
        report._replace(cdi=True),
        report._replace(toolkit=toolkit),
        report._replace(mps_unbounded=True),
        report._replace(isolation=isolation),
        report._replace(isolation=IsolationReport("none")),
    ):
        patch = agent_patch(raw, other)
        assert patch is not None
        assert read_agent_report({"metadata": {"name": "n1", **patch["metadata"]}}) == other


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"version": "1", "cdi": true, "cards": null}'])
def test_invalid_agent_annotation_counts_as_none(text: str) -> None:
    assert read_agent_report({"metadata": {"name": "n1", "annotations": {AGENT_ANNOTATION: text}}}) is None


def test_indexes_are_read_from_the_device() -> None:
    down = Unreachable("no answer")
    assert known_indexes(FakeApi(down, desired(card(3), card(5))), "n1") == {"GPU-n1-3": 3, "GPU-n1-5": 5}
    assert known_indexes(FakeApi(ApiError(404, "NotFound", "")), "n1") == {}
    assert known_indexes(FakeApi(down), "n1", seconds=-1) == {}
    assert known_indexes(FakeApi({"spec": {"devices": [{"type": "gpu"}]}}), "n1") == {}


def published(node: Node) -> list[str]:
    annotations = node.api.get(NODE)["metadata"].get("annotations") or {}
    return str(annotations.get(PUBLISHED_ANNOTATION, "")).split(",")


def test_published_amount_stays_until_the_pods_are_listed(node: Node) -> None:
    """The pods may be listed long after the Node."""
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


@pytest.mark.parametrize("kind", ["node", "device"])
def test_stale_event_does_not_replace_the_answer_to_a_write(node: Node, kind: str) -> None:
    """The watch also delivers the versions before the write, perhaps after the answer to it."""
    objects: Any = NodeObjects(node.api, "n1")
    take, wrote = getattr(objects, f"_take_{kind}"), getattr(objects, f"wrote_{kind}")
    first, second, written, later = (
        {"metadata": {"uid": "u", "resourceVersion": version}} for version in ("8", "9", "10", "11")
    )
    take(first)
    wrote(first, written)
    take(second)
    assert getattr(objects, kind) is written
    recreated = {"metadata": {"uid": "v", "resourceVersion": "9"}}
    for raw in (later, recreated, None):
        take(raw)
        assert getattr(objects, kind) is raw


def test_pods_that_are_not_admitted_do_not_raise_the_capacity() -> None:
    """Any user can create a pod that names this node and requests more than it has."""
    pods = NodePods(load_settings(), lambda: None)
    capacity = {}
    for phase, started in (("Pending", ""), ("Failed", "2026-11-22T00:00:00Z"), ("Running", "2026-11-22T00:00:00Z")):
        raw = share("p", mib=3_000_000_000, uid=f"uid-{phase}", phase=phase)
        raw["status"] |= {"startTime": started} if started else {}
        pods.take(raw)
        patch = capacity_patch({"metadata": {}, "status": {}}, cards(2), load_settings(), pods.held_amount)
        capacity[phase] = patch["status"]["capacity"][MEMORY] if patch else None
    assert capacity == {"Pending": "163840", "Failed": "163840", "Running": "3000000000"}
