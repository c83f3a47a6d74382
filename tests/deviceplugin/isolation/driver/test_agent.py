"""`isolation: driver` through the agent, a kubelet and a runtime with simulated cards."""

from collections.abc import Iterator
from typing import Any

import pytest

from playground.cri import Cri
from playground.gpu_processes import OutOfMemory, use
from playground.nvml_state import cgroup_root, set_driver
from tests.builders import GIB, share
from tests.deviceplugin.node import DEVICES, NODE, Node
from tests.waiting import until

EVENTS = "/api/v1/namespaces/default/events"
CARD = "GPU-n1-0"


@pytest.fixture
def cri(node: Node) -> Iterator[Node]:
    """The node with driver R615, cgroups of version 2, and the socket of its container runtime."""
    set_driver(node.nvml, "615.65.06", memory_accounting="dmem")
    cgroup_root(node.nvml).mkdir(exist_ok=True)
    (cgroup_root(node.nvml) / "cgroup.controllers").touch()
    service = Cri(node.folder / "cri.sock", node.runtime)
    service.start()
    yield node
    service.stop()


def settings(node: Node, **more: Any) -> dict[str, Any]:
    return {"isolation": "driver", "cgroupDir": str(cgroup_root(node.nvml)), **more}


def decided(name: str, mib: int) -> dict[str, Any]:
    record = {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": "0"}
    return share(name, node="n1", core=30, mib=mib, annotations=record)


def hard(node: Node, name: str) -> int | None:
    """Return the limit of the running container of the pod, in bytes."""
    (container,) = [c for c in node.runtime.containers() if c.pod == name and c.running]
    file = cgroup_root(node.nvml) / container.cgroup.lstrip("/") / "dmem.max"
    limits = dict(line.split(" ", 1) for line in file.read_text().splitlines())
    return int(limits[CARD]) if CARD in limits else None


def test_container_gets_no_more_memory_than_its_share_after_restarts_too(cri: Node) -> None:
    node = cri
    with node.agent(**settings(node)):
        node.create(decided("p", 2048))
        node.runs("p")
        assert node.env("p")["MGPU_ISOLATION"] == "driver"
        until(lambda: hard(node, "p") == 2 * GIB)
        (container,) = node.runtime.containers()
        use(node.nvml, CARD, container.pid, memory=2 * GIB)
        with pytest.raises(OutOfMemory):
            use(node.nvml, CARD, container.pid, memory=2 * GIB + 1)
        device, of_node = node.api.get(f"{DEVICES}/n1"), node.api.get(NODE)
        assert device["metadata"]["labels"]["mgpu.io/isolation"] == "driver"
        assert '"backend":"driver"' in of_node["metadata"]["annotations"]["mgpu.io/agent"]
        said = until(lambda: [e["message"] for e in node.api.get(EVENTS)["items"] if e["reason"] == "MgpuNotEnforced"])
        assert said == [
            "the share of container c is not enforced: its compute on card 0 is not limited; isolation back end driver"
        ]
    # The next agent keeps the limit of a running container, whatever its setting is. Then it is that of a new start.
    with node.agent(**settings(node, isolation="none")):
        node.kubelet.restart_container("default", "p", "c")
        until(lambda: [c for c in node.runtime.containers() if c.running and c.id != container.id])
        assert "MGPU_ISOLATION" not in node.env("p")
    with node.agent(**settings(node, isolation="auto")):
        again = node.runtime.containers()[-1]
        node.kubelet.restart_container("default", "p", "c")
        until(lambda: [c for c in node.runtime.containers() if c.running and c.id != again.id])
        until(lambda: hard(node, "p") == 2 * GIB)
