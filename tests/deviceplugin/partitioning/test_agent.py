"""The agent with a kubelet, a runtime, simulated NVML and an API server: from a plan to a container on its slice."""

import functools
import shlex

import pytest

from deviceplugin.partitioning import partition_worker
from mgpu.kube import ApiError
from mgpu.model.mps_config import write_config
from mgpu.model.node_slices import ANNOTATION, LABEL, PLANNED, NodeSlices, read_slices, with_spec, write_planned
from mgpu.model.pods import read_node
from mgpu.model.slice_names import Slice, count_slices
from playground.nvml_state import reboot, state_file
from playground.simulated_nvml import SimulatedMig
from tests.builders import CORE, share
from tests.deviceplugin.isolation.mps.fake import COMMAND
from tests.deviceplugin.node import NODE, PODS, Node
from tests.deviceplugin.partitioning.rig import places, slice_pod
from tests.waiting import until

FULL = places("2g.20gb@0", "2g.20gb@2", "3g.40gb@4")


def label(node: Node, mode: str | None) -> None:
    node.api.patch(NODE, {"metadata": {"labels": {LABEL: mode}}})


def plan(node: Node, number: int, *wanted: Slice) -> None:
    text = (node.api.get(NODE)["metadata"].get("annotations") or {}).get(ANNOTATION)
    written = {ANNOTATION: with_spec(text, count_slices(wanted), number), PLANNED: write_planned(wanted, number)}
    node.api.patch(NODE, {"metadata": {"annotations": written}})


def reported(node: Node) -> NodeSlices:
    return read_slices(read_node(node.api.get(NODE)))


def users(node: Node) -> dict[Slice, str]:
    return {s.place: s.pod for s in reported(node).existing}


def made(node: Node, card: int = 0) -> dict[Slice, str]:
    found = SimulatedMig(node.file, "n1").read()[card]
    return {Slice(card, *one.instance): one.uuid for one in found.instances}


def partition(node: Node, number: int, *wanted: Slice) -> None:
    plan(node, number, *wanted)
    until(lambda: (now := reported(node)) and now.partitioning.applied == number and now.existing)


def settled(node: Node, pod: str) -> bool:
    return bool(node.pod(pod)["status"].get("phase", "Pending") != "Pending")


def ids(node: Node, resource: str) -> int:
    return node.kubelet.devices.capacity()[1].get(resource, 0)


def test_plan_becomes_a_slice_with_a_container_and_ends_with_it(node: Node) -> None:
    with node.agent() as agent:
        assert agent._state.objects.partition_mode() == ""
        label(node, "mig")
        until(agent._state.objects.partition_mode)
        partition(node, 5, *FULL)
        assert users(node) == dict.fromkeys(FULL, "")
        assert not agent.unhealthy_reason()
        assert (ids(node, "nvidia.com/mig-2g.20gb"), ids(node, "nvidia.com/mig-3g.40gb")) == (2, 1)
        pod = node.create(slice_pod("p", FULL[1], FULL[2], phase="Pending"))
        node.runs("p")
        env = node.env("p")
        uuids = made(node)
        assert env["NVIDIA_VISIBLE_DEVICES"] == f"{uuids[FULL[1]]},{uuids[FULL[2]]}"
        assert env["MGPU_PLACES"] == "0:2,0:4"
        assert env["MGPU_CARDS"] == "0"
        until(lambda: users(node)[FULL[1]] == pod["metadata"]["uid"] == users(node)[FULL[2]])
        node.api.delete(f"{PODS}/p")
        until(lambda: users(node) == dict.fromkeys(FULL, ""))


def test_pod_is_admitted_as_soon_as_its_slice_is_reported(node: Node) -> None:
    """A kubelet that did not know the id would fail the pod for good."""
    with node.agent():
        label(node, "mig")
        for number in range(1, 4):
            wanted = places("2g.20gb@0") if number % 2 else places("1g.10gb@0", "1g.10gb@1")
            partition(node, number, *wanted)
            name = f"p{number}"
            node.create(slice_pod(name, wanted[-1], phase="Pending"))
            until(functools.partial(settled, node, name))
            assert node.pod(name)["status"]["phase"] == "Running", node.pod(name)["status"]
            node.api.delete(f"{PODS}/{name}")
            until(lambda: not any(users(node).values()))


def test_cut_cards_are_not_offered_to_other_vocabularies(node: Node) -> None:
    node.set_cards([{"model": "A100-SXM4-80GB", "memory": "80Gi"}, {"model": "T4", "memory": "16Gi"}])
    with node.agent():
        until(lambda: node.allocatable().get(CORE) == "200")
        label(node, "mig")
        until(lambda: node.allocatable().get(CORE) == "100")
        until(lambda: node.allocatable().get("vke.volcengine.com/mgpu-memory") in ("16384", "16Ki"))
        assert [d["id"] for d in (node.device() or {})["spec"]["devices"]] == ["GPU-n1-0", "GPU-n1-1"]
        record = {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": "0"}
        node.create(share("q", node="n1", annotations=record))
        assert "its record names card 0, which this node does not have" in until(lambda: node.waits("q"))


def test_stopped_agent_reports_no_free_slices_until_the_next_one_runs(node: Node) -> None:
    node.set_cards([{"model": "A100-SXM4-80GB", "memory": "80Gi"}, {"model": "T4", "memory": "16Gi"}])
    with node.agent():
        label(node, "mig")
        partition(node, 5, *FULL)
        pod = node.create(slice_pod("p", FULL[2], phase="Pending"))
        node.runs("p")
        until(lambda: users(node)[FULL[2]])
    assert users(node) == {FULL[2]: pod["metadata"]["uid"]}
    with node.agent():
        until(lambda: users(node) == {FULL[0]: "", FULL[1]: "", FULL[2]: pod["metadata"]["uid"]})


def test_ids_of_gone_pods_are_removed_without_the_label(node: Node) -> None:
    with node.agent():
        label(node, "mig")
        partition(node, 5, *FULL)
        node.create(slice_pod("p", FULL[0], FULL[2], phase="Pending"))
        node.runs("p")
        until(lambda: users(node)[FULL[0]])
        node.api.delete(f"{PODS}/p")
        label(node, None)
        until(lambda: (ids(node, "nvidia.com/mig-2g.20gb"), ids(node, "nvidia.com/mig-3g.40gb")) == (0, 0))
        assert node.kubelet.devices.all_ids()["nvidia.com/mig-2g.20gb"] == ()


def test_container_gets_its_slice_again_after_a_reboot(node: Node) -> None:
    node.set_cards([{"model": "A100-SXM4-80GB", "memory": "80Gi"}, {"model": "T4", "memory": "16Gi"}])
    with node.agent():
        label(node, "mig")
        partition(node, 5, *FULL)
        node.create(slice_pod("p", FULL[2], phase="Pending"))
        node.runs("p")
        old = node.visible("p")
    reboot(state_file(node.file))
    with node.agent():
        until(lambda: {*made(node)} == {*FULL})
        before = len(node.runtime.containers())
        until(lambda: {s.place: s.uuid for s in reported(node).existing} == made(node))
        node.kubelet.restart_container("default", "p", "c")
        until(lambda: len(node.runtime.containers()) > before)
        assert node.visible("p") == made(node)[FULL[2]] != old


def test_restarted_kubelet_gets_the_slices_again(node: Node) -> None:
    with node.agent() as agent:
        label(node, "mig")
        partition(node, 5, *FULL)
        node.create(slice_pod("p", FULL[0], phase="Pending"))
        node.runs("p")
        node.kubelet.stop()
        until(agent.not_ready_reason)
        node.kubelet.start()
        until(lambda: ids(node, "nvidia.com/mig-2g.20gb") == 2)
        until(lambda: len(users(node)) == 3)
        node.create(slice_pod("q", FULL[1], phase="Pending"))
        node.runs("q")
        assert node.visible("q") == made(node)[FULL[1]]
        assert node.pod("p")["status"]["phase"] == "Running"


def test_invalid_annotation_is_an_event_on_the_node(node: Node) -> None:
    with node.agent():
        label(node, "mig")
        node.api.patch(NODE, {"metadata": {"annotations": {ANNOTATION: "{"}}})
        until(lambda: [e for e in node.api.list("/api/v1/events")[0] if e["reason"] == "MgpuSlices"])


def test_without_cdi_slices_are_refused(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_worker, "_QUIET_SECONDS", 0.0)
    with node.agent(cdi=False):
        label(node, "mig")
        until(lambda: any("CDI" in e["message"] for e in node.api.list("/api/v1/events")[0]))
        assert "mgpu.io/slices" not in (node.api.get(NODE)["metadata"].get("annotations") or {})


def configure(node: Node, *wanted: Slice) -> None:
    data = {"data": {"n1": write_config(count_slices(wanted))}}
    path = "/api/v1/namespaces/mgpu-system/configmaps"
    try:
        node.api.patch(f"{path}/mps-configmap", data)
    except ApiError:
        node.api.create(path, {"metadata": {"name": "mps-configmap"}, **data})


def test_configmap_becomes_a_container_with_its_limits(node: Node) -> None:
    shares = places("2gb@0", "4gb@1", "4gb@2")
    program = {"mpsDir": str(node.folder / "mps"), "mpsControl": shlex.join(COMMAND), "mpsRequireMounts": False}
    with node.agent(**program):
        label(node, "mps")
        plan(node, 5, *shares)
        configure(node, *shares)
        until(lambda: reported(node).partitioning.applied == 5)
        assert users(node) == dict.fromkeys(shares, "")
        until(lambda: node.allocatable().get(CORE) == "100")
        pod = node.create(slice_pod("p", shares[2], phase="Pending"))
        node.runs("p")
        env = node.env("p")
        assert (env["NVIDIA_VISIBLE_DEVICES"], env["MGPU_PLACES"]) == ("GPU-n1-0", "0:2")
        assert env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=4G"
        until(lambda: users(node)[shares[2]] == pod["metadata"]["uid"])
        configure(node, *shares[2:])
        until(lambda: users(node) == {shares[2]: pod["metadata"]["uid"]})
        assert node.pod("p")["status"]["phase"] == "Running"
        node.api.delete(f"{PODS}/p")
        plan(node, 6)
        configure(node)
        until(lambda: node.allocatable().get(CORE) == "200")
        until(lambda: users(node) == {})
