"""gpushare pods on a node, with the cases that gpushare's own plugin gets wrong (docs/design/gpushare.md)."""

from typing import Any

from mgpu.dialects import gpushare
from mgpu.dialects.protocol import SHARE
from tests.builders import pod
from tests.deviceplugin.node import PODS, Node
from tests.scheduler.gpushare import container
from tests.waiting import until

OLDEST = 1_632_984_663_000_000_000


def decided(name: str, age: int = 0, units: int = 2, **on: int) -> dict[str, Any]:
    """Return a pod with containers on these cards. A larger `age` means an earlier decision."""
    allocation = ",".join(f'"{c}":{{"{card}":{units}}}' for c, card in on.items())
    record = {
        gpushare.INDEX: str(next(iter(on.values()))),
        gpushare.OF_CARD: "80",
        gpushare.OF_POD: str(units * len(on)),
        gpushare.ASSUME_TIME: str(OLDEST - age),
        gpushare.ASSIGNED: "false",
        gpushare.ALLOCATION: f"{{{allocation}}}",
    }
    return pod(name, *(container(c, units) for c in on), annotations=record, node="n1")


def wait_for_capacity(node: Node, amount: str = "160") -> None:
    until(lambda: node.allocatable().get(gpushare.MEMORY) == amount)


def test_pod_with_two_containers_does_not_take_the_cards_of_another_pod(node: Node) -> None:
    with node.agent():
        wait_for_capacity(node)
        with node.kubelet.holding():
            node.create(decided("two", a=0, b=1))
            node.create(decided("other", c=0))
        for name in ("two", "other"):
            node.runs(name)
        assert (node.visible("two", "a"), node.visible("two", "b")) == ("GPU-n1-0", "GPU-n1-1")
        assert node.visible("other") == "GPU-n1-0"


def test_equal_pods_keep_their_cards_if_the_kubelet_admits_them_in_another_order(node: Node) -> None:
    with node.agent():
        wait_for_capacity(node)
        with node.kubelet.holding():
            for i in range(4):  # decided in the opposite order
                node.create(decided(f"p{i}", age=i, c=i % 2))
        for i in range(4):
            node.runs(f"p{i}")
            assert node.visible(f"p{i}") == f"GPU-n1-{i % 2}"


def test_container_gets_its_share_and_the_record_is_acknowledged(node: Node) -> None:
    with node.agent():
        wait_for_capacity(node)
        node.create(decided("p", units=3, c=1))
        node.runs("p")
        own = {
            "NVIDIA_VISIBLE_DEVICES": "GPU-n1-1",
            "ALIYUN_COM_GPU_MEM_IDX": "1",
            "ALIYUN_COM_GPU_MEM_POD": "3",
            "ALIYUN_COM_GPU_MEM_CONTAINER": "3",
            "ALIYUN_COM_GPU_MEM_DEV": "80",
        }
        assert node.env("p").items() >= own.items()
        until(lambda: node.pod("p")["metadata"]["annotations"][gpushare.ASSIGNED] == "true")


def test_next_agent_writes_a_missing_acknowledgement(node: Node) -> None:
    with node.agent():
        wait_for_capacity(node)
        node.create(decided("p", c=1))
        node.runs("p")
        until(lambda: node.pod("p")["metadata"]["annotations"][gpushare.ASSIGNED] == "true")
    node.api.patch(f"{PODS}/p", {"metadata": {"annotations": {gpushare.ASSIGNED: "false"}}})
    with node.agent():
        until(lambda: node.pod("p")["metadata"]["annotations"][gpushare.ASSIGNED] == "true")


def test_changed_unit_waits_for_pods_with_the_former_unit(node: Node) -> None:
    """The kubelet would fail running pods that hold more than the node has."""
    amount = str(2 * 80 * 1024)
    with node.agent(**{"dialects.gpushare.memoryUnit": "MiB"}):
        wait_for_capacity(node, amount)
        raw = decided("p", units=8138, c=1)
        raw["spec"]["containers"][0]["resources"]["limits"][SHARE] = "1"
        node.create(raw)
        node.runs("p")
    with node.agent():
        until(lambda: node.allocatable().get(SHARE) == "32")
        assert node.allocatable()[gpushare.MEMORY] in (amount, "160Ki")
        node.api.delete(f"{PODS}/p")
        wait_for_capacity(node)


def test_record_with_an_absent_card_keeps_the_container_waiting(node: Node) -> None:
    with node.agent():
        wait_for_capacity(node)
        node.create(decided("p", c=7))
        until(lambda: "names card 7, which this node does not have" in node.waits("p"))
        assert not [c for c in node.runtime.containers() if c.pod == "p"]


def test_share_resource_carries_the_card_if_the_unit_is_mib(node: Node) -> None:
    with node.agent(**{"dialects.gpushare.memoryUnit": "MiB"}):
        wait_for_capacity(node, str(2 * 80 * 1024))
        until(lambda: node.allocatable().get(SHARE) == "32")
        raw = decided("p", units=8138, c=1)
        raw["spec"]["containers"][0]["resources"]["limits"][SHARE] = "1"
        node.create(raw)
        node.runs("p")
        assert (node.visible("p"), node.env("p")["ALIYUN_COM_GPU_MEM_DEV"]) == ("GPU-n1-1", str(80 * 1024))
