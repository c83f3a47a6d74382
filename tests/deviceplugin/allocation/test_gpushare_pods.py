"""gpushare pods on a node, and what the peer's plugin gets wrong there (gpushare.md's list); here it holds."""

from typing import Any

from mgpu.dialects import gpushare
from mgpu.dialects.protocol import SHARE
from tests.builders import pod
from tests.deviceplugin.node import PODS, Node
from tests.scheduler.gpushare import container
from tests.waiting import until

Json = dict[str, Any]
OLDEST = 1_632_984_663_000_000_000


def decided(name: str, age: int = 0, units: int = 2, **on: int) -> Json:
    """A pod whose containers are on these cards. age: the larger, the earlier it was decided."""
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


def serving(node: Node, amount: str = "160") -> None:
    until(lambda: node.allocatable().get(gpushare.MEMORY) == amount)


def test_a_pod_with_two_gpu_containers_does_not_consume_another_pods_assignment(node: Node) -> None:
    with node.agent():
        serving(node)
        with node.kubelet.holding():
            node.create(decided("two", a=0, b=1))
            node.create(decided("other", c=0))
        for name in ("two", "other"):
            node.runs(name)
        assert (node.visible("two", "a"), node.visible("two", "b")) == ("GPU-n1-0", "GPU-n1-1")
        assert node.visible("other") == "GPU-n1-0"


def test_equal_sized_pods_do_not_swap_cards_when_the_kubelet_admits_in_another_order(node: Node) -> None:
    with node.agent():
        serving(node)
        with node.kubelet.holding():
            for i in range(6):  # decided in the opposite order
                node.create(decided(f"p{i}", age=i, c=i % 2))
        for i in range(6):
            node.runs(f"p{i}")
            assert node.visible(f"p{i}") == f"GPU-n1-{i % 2}"


def test_a_container_sees_its_share_and_the_record_says_that_it_was_given(node: Node) -> None:
    with node.agent():
        serving(node)
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


def test_what_an_agent_that_died_did_not_write_the_next_one_does(node: Node) -> None:
    with node.agent():
        serving(node)
        node.create(decided("p", c=1))
        node.runs("p")
        until(lambda: node.pod("p")["metadata"]["annotations"][gpushare.ASSIGNED] == "true")
    node.api.patch(f"{PODS}/p", {"metadata": {"annotations": {gpushare.ASSIGNED: "false"}}})
    with node.agent():
        until(lambda: node.pod("p")["metadata"]["annotations"][gpushare.ASSIGNED] == "true")


def test_a_change_of_the_unit_waits_for_the_pods_that_count_in_the_other_one(node: Node) -> None:
    """The kubelet would fail running pods that hold more than the node has."""
    amount = str(2 * 80 * 1024)
    with node.agent(**{"dialects.gpushare.memoryUnit": "MiB"}):
        serving(node, amount)
        raw = decided("p", units=8138, c=1)
        raw["spec"]["containers"][0]["resources"]["limits"][SHARE] = "1"
        node.create(raw)
        node.runs("p")
    with node.agent():
        until(lambda: node.allocatable().get(SHARE) == "32")
        assert node.allocatable()[gpushare.MEMORY] in (amount, "160Ki")
        node.api.delete(f"{PODS}/p")
        serving(node)


def test_where_nothing_can_be_given_the_container_waits_and_says_why(node: Node) -> None:
    with node.agent():
        serving(node)
        node.create(decided("p", c=7))
        until(lambda: "names card 7, which this node does not have" in node.waits("p"))
        assert not [c for c in node.runtime.containers() if c.pod == "p"]


def test_in_mib_the_carrier_brings_the_card(node: Node) -> None:
    with node.agent(**{"dialects.gpushare.memoryUnit": "MiB"}):
        serving(node, str(2 * 80 * 1024))
        until(lambda: node.allocatable().get(SHARE) == "32")
        raw = decided("p", units=8138, c=1)
        raw["spec"]["containers"][0]["resources"]["limits"][SHARE] = "1"
        node.create(raw)
        node.runs("p")
        assert (node.visible("p"), node.env("p")["ALIYUN_COM_GPU_MEM_DEV"]) == ("GPU-n1-1", str(80 * 1024))
