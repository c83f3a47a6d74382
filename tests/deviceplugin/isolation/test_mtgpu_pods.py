"""MtgpuPods on a node: occupy pods get their cards, and the Pods of MtgpuPods get limits."""

from typing import Any

import pytest

from mgpu.dialects import mtgpu
from playground.nvidia_device_plugin import NvidiaPlugin
from tests.builders import share
from tests.deviceplugin.allocation.test_whole_cards import label, listed
from tests.deviceplugin.mtgpu import GIB, WHOLE, occupy_pod, pod_of
from tests.deviceplugin.node import PODS, Node
from tests.deviceplugin.records import recorded
from tests.waiting import until

UUID = "GPU-n1-1"
OCCUPY = mtgpu.occupy_name("n1", "zxcvb")
SYSTEM = "/api/v1/namespaces/kube-system/pods"


def run_occupy_pod(node: Node, raw: dict[str, Any]) -> str:
    """Run an occupy pod, and return its UID."""
    meta = {k: v for k, v in raw["metadata"].items() if k != "uid"}
    uid: str = node.api.create(SYSTEM, {**raw, "metadata": meta})["metadata"]["uid"]
    until(lambda: node.api.get(f"{SYSTEM}/{OCCUPY}")["status"]["phase"] == "Running")
    return uid


def wait_for_limits(node: Node, text: str, card: str = UUID) -> None:
    file = node.limits / card
    until(lambda: file.exists() and file.read_text() == text)


def line(name: str, request: str = "0.2") -> str:
    return f"default/{name} {request} 1 {GIB}\n"


def test_occupy_pod_gets_the_card_of_its_record(node: Node) -> None:
    with node.agent():
        until(lambda: node.allocatable().get(WHOLE) == "2")
        run_occupy_pod(node, recorded(occupy_pod(), {"c": 1}))
        assert node.visible(OCCUPY) == UUID
        assert not listed(node)
        # The whole card belongs to the Pods of MtgpuPods, which add nothing to what the occupy pod holds.
        for name, request in (("a", "0.6"), ("b", "0.4")):
            node.create(pod_of(name, UUID, request, memory=40 * GIB, node="n1"))
            node.runs(name)
            assert node.visible(name) == UUID
        # No other pod may use the card.
        node.create(recorded(share("q", node="n1"), {"c": 1}))
        why = until(lambda: node.waits("q"))
        assert "GPU-n1-1) has insufficient capacity" in why
        assert why.endswith("held by a pod of another namespace")


def test_card_of_an_occupy_pod_from_nvidias_plugin_is_reported(node: Node) -> None:
    nvidia = NvidiaPlugin(node.folder / "device-plugins", ["GPU-n1-0", UUID])
    nvidia.start()
    until(lambda: node.allocatable().get(WHOLE) == "2")
    try:
        with node.agent():
            until(lambda: label(node) == "nvidia")
            uid = run_occupy_pod(node, occupy_pod())
            (row,) = until(lambda: listed(node))
            assert (row["podUID"], row["deviceIDs"]) == (uid, [node.visible(OCCUPY)])
            (card,) = row["deviceIDs"]
            node.create(pod_of("a", card, node="n1"))
            node.runs("a")
            wait_for_limits(node, "1\n" + line("a"), card)
            node.create(recorded(share("q", node="n1"), {"c": int(card[-1])}))
            assert "has insufficient capacity" in until(lambda: node.waits("q"))
            assert [row["podUID"] for row in listed(node)] == [uid], "the Pod of the MtgpuPod holds no card"
    finally:
        nvidia.stop()


def test_limits_of_a_card_follow_its_pods_and_stay_without_an_agent(node: Node) -> None:
    with node.agent():
        node.create(pod_of("b", UUID, "0.4", node="n1"))
        wait_for_limits(node, "1\n" + line("b", "0.4"))
        inode = (node.limits / UUID).stat().st_ino
        node.create(pod_of("a", UUID, node="n1"))
        wait_for_limits(node, "2\n" + line("a") + line("b", "0.4"))
        node.api.delete(f"{PODS}/b")
        wait_for_limits(node, "1\n" + line("a"))
    assert (node.limits / UUID).read_text() == "1\n" + line("a"), "its pod still runs"
    node.api.delete(f"{PODS}/a")
    until(lambda: not node.api.list(PODS)[0])
    with node.agent():
        wait_for_limits(node, "0\n")
    assert (node.limits / UUID).stat().st_ino == inode


@pytest.mark.parametrize("where", ["", "cards.yaml/no folder"])
def test_limits_that_are_not_written_stop_no_pod(node: Node, where: str) -> None:
    with node.agent(limitsDir=str(node.folder / where) if where else "") as agent:
        node.create(pod_of("a", UUID, node="n1"))
        node.create(recorded(share("p", node="n1"), {"c": 0}))
        node.runs("a")
        node.runs("p")
        assert not agent.not_ready_reason()
        if where:
            (event,) = until(lambda: [e for e in node.api.list("/api/v1/events")[0] if e["reason"] == "MgpuLimits"])
            assert "Not a directory" in event["message"]
        assert not node.limits.exists()
