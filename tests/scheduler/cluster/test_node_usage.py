"""The cpu and memory that are free on each node: from all pods, whatever the order of what is seen of them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu.model.compute_resources import NO_CPU_MEMORY, UNBOUNDED, CpuMemory
from mgpu.model.gpu_requests import ContainerRequest, GpuRequest, Placement
from mgpu.model.pods import Pod
from scheduler.cluster.node_usage import Usage
from scheduler.cluster.reservations import Reservation
from tests import builders as b
from tests.examples import examples
from tests.scheduler.fake import Replica, cluster

FREE = CpuMemory(64_000, 256 * b.GIB)

nodes = st.sampled_from(["", "n1", "n2"])
rooms = st.sampled_from([NO_CPU_MEMORY, CpuMemory(500, 0), CpuMemory(1000, 3), CpuMemory(0, 7)])
pods = st.builds(
    lambda uid, node, phase, needs: Pod("default", uid, uid, node=node, phase=phase, needs=needs),
    st.sampled_from("abcd"),
    nodes,
    st.sampled_from(["Pending", "Running", "Failed"]),
    rooms,
)
events = st.lists(st.tuples(st.just("follow"), pods, nodes) | st.tuples(st.just("drop"), pods, nodes), max_size=30)


@given(events)
@examples(300)
def test_property_a_node_carries_what_its_pods_reserve(events: list[tuple[str, Pod, str]]) -> None:
    usage, truth = Usage(), dict[str, tuple[str, CpuMemory]]()
    for kind, pod, reserved in events:
        if kind == "drop":
            usage.drop(pod.uid)
            truth.pop(pod.uid, None)
        else:
            usage.follow(pod, reserved)
            truth[pod.uid] = ("" if pod.ended else pod.node or reserved, pod.needs)
    for node in ("n1", "n2"):
        for without in ("", "a"):
            held = [needs for uid, (on, needs) in truth.items() if on == node and uid != without]
            assert usage.on(node, without) == CpuMemory(sum(r.cpu for r in held), sum(r.memory for r in held))


@given(events)
@examples(100)
def test_property_every_node_that_moves_is_told(events: list[tuple[str, Pod, str]]) -> None:
    told = list[str]()
    usage = Usage(told.append)
    for kind, pod, reserved in events:
        before = {node: usage.on(node) for node in ("n1", "n2")}
        told.clear()
        if kind == "drop":
            usage.drop(pod.uid)
        else:
            usage.follow(pod, reserved)
        assert {node for node, room in before.items() if usage.on(node) != room} <= set(told)


def test_nothing_is_kept_of_pods_that_are_gone_or_reserve_nothing() -> None:
    usage = Usage()
    usage.put("a", "n1", CpuMemory(1, 1))
    usage.put("b", "n1", NO_CPU_MEMORY)
    usage.drop("a")
    assert not usage._of_pod
    assert not usage._on_node


def plain(name: str, cpu: str, **more: Any) -> dict[str, Any]:
    return b.pod(name, {"name": "c", "resources": {"requests": {"cpu": cpu}}}, **more)


@pytest.fixture
def one() -> Replica:
    return Replica(cluster(("n1", 2)))


def given_(replica: Replica, raw: dict[str, Any]) -> None:
    replica.api.put("pods", raw)
    replica.deliver()


def test_pods_without_gpu_count(one: Replica) -> None:
    given_(one, plain("p", "1500m", node="n1"))
    assert one.state.view("n1", "").room == CpuMemory(62_500, FREE.memory)
    assert one.state.view("n1", "uid-p").room == FREE
    given_(one, plain("p", "1500m", node="n1", phase="Succeeded"))
    assert one.state.view("n1", "").room == FREE


def test_a_pod_that_is_gone_counts_no_more(one: Replica) -> None:
    given_(one, plain("p", "1", node="n1"))
    one.api.remove("pods", "p")
    one.deliver()
    assert one.state.view("n1", "").room == FREE


def test_a_node_that_comes_after_its_pods_or_reports_nothing() -> None:
    replica = Replica(cluster())
    given_(replica, plain("p", "1", node="n1"))
    assert replica.state.view("n1", "").room == UNBOUNDED
    replica.api.put("nodes", b.node("n1"))
    replica.deliver()
    assert replica.state.view("n1", "").room.cpu == 63_000
    bare = b.node("n1")
    del bare["status"]["allocatable"], bare["status"]["capacity"]
    replica.api.put("nodes", bare)
    replica.deliver()
    assert replica.state.view("n1", "").room == UNBOUNDED


def test_a_pod_counts_where_its_cards_are_reserved_until_it_is_bound_or_given_up(one: Replica) -> None:
    raw = b.share("p")
    raw["spec"]["containers"][0]["resources"]["requests"]["cpu"] = "2"
    request = GpuRequest("mgpu", (ContainerRequest("c", core=500),))
    decision = Reservation("uid-p", "default", "p", "n1", request, Placement((("c", (0,)),)), {}, CpuMemory(2000, 0))
    assert one.state.reserve(decision, one.state.view("n1", "").version)
    assert one.state.view("n1", "").room.cpu == 62_000
    given_(one, raw)  # an event from before the decision
    assert one.state.view("n1", "").room.cpu == 62_000
    one.state.cancel(decision)
    assert one.state.view("n1", "").room == FREE
    bound = b.share(
        "p",
        annotations={"vke.volcengine.com/assumed": "true"} | {"vke.volcengine.com/gpu-index-container-c": "0"},
        node="n1",
    )
    bound["spec"]["containers"][0]["resources"]["requests"]["cpu"] = "2"
    given_(one, bound)
    one.state.cancel(decision)
    assert one.state.view("n1", "").room.cpu == 62_000
