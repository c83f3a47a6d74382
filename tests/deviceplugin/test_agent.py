"""The agent between a kubelet, a runtime and an API server: what containers get, and what the node says of itself."""

import threading
from typing import Any

from mgpu.kube import ApiError
from tests.builders import CORE, MEMORY, container, pod, share
from tests.deviceplugin.cri import serving
from tests.deviceplugin.node import DEVICES, NODE, PODS, Node
from tests.waiting import until

ASSUMED = "vke.volcengine.com/assumed"
RECORD = "vke.volcengine.com/gpu-index-container-"


def decided(name: str, card: str = "1", **more: Any) -> dict[str, Any]:
    return share(name, node="n1", annotations={ASSUMED: "true", RECORD + "c": card}, **more)


def test_the_node_offers_its_cards(node: Node) -> None:
    with node.agent():
        until(lambda: node.allocatable().get(CORE) == "200")
        until(lambda: node.allocatable().get(MEMORY) in ("163840", "160Ki"))
        device = until(node.device)
        assert [d["id"] for d in device["spec"]["devices"]] == ["GPU-n1-0", "GPU-n1-1"]
        assert device["metadata"]["ownerReferences"][0]["uid"] == node.api.get(NODE)["metadata"]["uid"]
        model = "node.koordinator.sh/gpu-model"
        until(lambda: node.api.get(NODE)["metadata"]["labels"].get(model) == "A100-SXM4-80GB")


def test_a_container_gets_the_cards_of_its_record(node: Node) -> None:
    with node.agent():
        node.create(decided("p", "1"))
        node.runs("p")
        assert (
            node.env("p").items()
            >= {
                "NVIDIA_VISIBLE_DEVICES": "GPU-n1-1",
                "MGPU_CARDS": "1",
                "MGPU_CORE_PERCENT": "50",
                "MGPU_MEMORY_BYTES": str(1024 << 20),
            }.items()
        )


def test_equal_pods_get_their_own_records(node: Node) -> None:
    with node.agent():
        with node.kubelet.holding():
            for i in range(8):
                node.create(decided(f"p{i}", str(i % 2), core=10))
        for i in range(8):
            node.runs(f"p{i}")
            assert node.visible(f"p{i}") == f"GPU-n1-{i % 2}"


def test_every_container_of_a_pod_gets_its_own(node: Node) -> None:
    two = pod(
        "p",
        container("a", 20, 1024),
        container("b", 30, 1024),
        container("plain"),
        init=(container("i", 20, 1024),),
        node="n1",
        annotations={ASSUMED: "true", RECORD + "a": "0", RECORD + "b": "1", RECORD + "i": "1"},
    )
    with node.agent():
        node.create(two)
        node.runs("p")
        assert [node.visible("p", c) for c in ("i", "a", "b")] == ["GPU-n1-1", "GPU-n1-0", "GPU-n1-1"]
        assert "MGPU_CARDS" not in node.env("p", "plain")


def test_a_late_decision_is_waited_for(node: Node) -> None:
    with node.agent():
        node.create(share("p", node="n1"))
        until(lambda: node.kubelet.devices.ids(node.pod("p")["metadata"]["uid"], "c"))
        node.decide("p", c="1")
        node.runs("p")
        assert node.visible("p") == "GPU-n1-1"


def test_a_record_that_names_no_card_is_refused_with_the_reason(node: Node) -> None:
    with node.agent():
        node.create(decided("p", "7"))
        why = until(lambda: node.waits("p"))
        assert "card 7, which this node does not have" in why
        until(lambda: any(e["reason"] == "MgpuStartRefused" for e in node.api.list("/api/v1/events")[0]))
        node.decide("p", c="0")
        node.runs("p")


def test_a_lost_card_is_told_at_once_and_comes_back(node: Node) -> None:
    with node.agent():
        node.create(decided("p", "1"))
        node.runs("p")
        node.set_cards([{"memory": "80Gi"}, {"memory": "80Gi", "healthy": False}])
        until(lambda: node.allocatable().get(CORE) == "100")
        until(lambda: [d["health"] for d in (node.device() or {})["spec"]["devices"]] == [True, False])
        until(lambda: node.allocatable().get(MEMORY) in ("81920", "80Ki"))
        held = node.kubelet.devices.ids(node.pod("p")["metadata"]["uid"], "c")[CORE]
        assert {node.kubelet.devices.health(CORE, i) for i in held} == {"Unhealthy"}
        node.create(decided("q", "1"))
        assert "card 1 (GPU-n1-1) is unhealthy" in until(lambda: node.waits("q"))
        node.set_cards([{"count": 2, "memory": "80Gi"}])
        until(lambda: node.healthy_ids() == 200)
        node.runs("q")


def test_an_unreadable_cards_file_changes_nothing_but_is_told(node: Node) -> None:
    with node.agent() as agent:
        node.file.write_text("[")
        until(lambda: any(e["reason"] == "MgpuCards" for e in node.api.list("/api/v1/events")[0]))
        assert node.healthy_ids() == 200
        assert not agent.not_ready_reason()


def test_what_was_deleted_or_zeroed_is_asserted_again(node: Node) -> None:
    with node.agent():
        first = until(node.device)["metadata"]["uid"]
        node.api.delete(f"{DEVICES}/n1")
        until(lambda: (node.device() or {"metadata": {"uid": first}})["metadata"]["uid"] != first)
        node.api.patch(f"{NODE}/status", {"status": {"capacity": {MEMORY: "0"}}})
        until(lambda: node.allocatable().get(MEMORY) in ("163840", "160Ki"))


def test_what_others_wrote_on_the_device_stays(node: Node) -> None:
    rdma = {"type": "rdma", "id": "mlx5_0", "minor": 0, "health": True}
    with node.agent():
        own = until(node.device)["spec"]["devices"]
        theirs = {"metadata": {"annotations": {"a": "1"}, "labels": {"l": "2"}}, "spec": {"devices": [rdma, *own]}}
        node.api.patch(f"{DEVICES}/n1", theirs)
        node.set_cards([{"memory": "80Gi"}, {"memory": "80Gi", "healthy": False}])
        device = until(lambda: next((d for d in [until(node.device)] if not healthy(d)), None))
        assert device["metadata"]["annotations"]["a"] == "1"
        assert device["metadata"]["labels"] == {"l": "2"}
        assert rdma in device["spec"]["devices"]
        assert len(device["spec"]["devices"]) == 3


def test_a_kubelet_restart_is_survived(node: Node) -> None:
    with node.agent() as agent:
        node.create(decided("p", "1"))
        node.runs("p")
        node.kubelet.stop()
        until(agent.not_ready_reason)
        node.kubelet.start()
        until(lambda: not agent.not_ready_reason() and node.healthy_ids() == 200)
        node.create(decided("q", "0"))
        node.runs("q")
        assert node.visible("q") == "GPU-n1-0"


def test_an_agent_restart_is_survived_and_files_of_gone_pods_go(node: Node) -> None:
    with node.agent():
        node.create(decided("p", "1"))
        node.create(decided("gone", "0"))
        node.runs("p")
        node.runs("gone")
    assert not (node.folder / "device-plugins" / "mgpu-core.sock").exists()
    node.api.delete(f"{PODS}/gone")
    until(lambda: missing(node, "gone"))
    with serving(node.folder / "cri.sock"), node.agent():
        until(lambda: len(node.cdi_files()) == 1)
        before = len(node.runtime.containers())
        node.kubelet.restart_container("default", "p", "c")
        until(lambda: len(node.runtime.containers()) > before)
        assert node.visible("p") == "GPU-n1-1"
        node.api.delete(f"{PODS}/p")
        until(lambda: not node.cdi_files())


def test_agent_starts_beside_files_that_are_not_its_own(node: Node) -> None:
    folder = node.folder / "cdi"
    folder.mkdir(exist_ok=True)
    (folder / "mgpu_a_b_c_d.json").write_text("{}")
    (folder / "mgpu_a_receipt").write_text('{"uid": "a", "kubelets_uid": "a", "grace": 1, "shares": [{"card": []}]}')
    with node.agent():
        node.create(decided("p"))
        node.runs("p")


def test_where_there_are_fewer_ids_than_before_those_that_pods_hold_are_among_them(node: Node) -> None:
    """A kubelet that restarts would fail a pod whose ids are gone, unless its containers run in that moment."""
    with node.agent():
        node.create(share("p", core=60, node="n1", annotations={ASSUMED: "true", RECORD + "c": "0"}))
        node.runs("p")
        held = node.kubelet.devices.ids(node.pod("p")["metadata"]["uid"], "c")[CORE]
    node.set_cards([{"memory": "80Gi"}])
    with node.agent():
        assert node.healthy_ids() == 100
        assert {node.kubelet.devices.health(CORE, i) for i in held} == {"Healthy"}


def test_without_cdi_the_oldest_decision_of_the_amount_is_given(node: Node) -> None:
    with node.agent(cdi=False):
        node.create(decided("p", "1"))
        node.runs("p")
        assert node.visible("p") == "GPU-n1-1"
        node.create(share("q", node="n1"))
        until(lambda: node.pod("q")["status"]["phase"] == "Failed")
        assert "no cards have been decided" in node.pod("q")["status"]["message"]
        assert not node.cdi_files()


def healthy(device: dict[str, Any]) -> bool:
    return all(entry["health"] for entry in device["spec"]["devices"])


def missing(node: Node, name: str) -> bool:
    try:
        node.pod(name)
    except ApiError as error:
        return error.status == 404
    return False


def test_agent_that_has_ended_leaves_no_thread_that_posts_events(node: Node) -> None:
    """The process goes on: it makes another agent after each hand-over."""

    def threads() -> int:
        return sum(thread.name == "events" for thread in threading.enumerate())

    before = threads()
    with node.agent():
        assert threads() == before + 1
    until(lambda: threads() == before)
