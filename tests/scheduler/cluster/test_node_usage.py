"""The cpu and memory that pods reserve on each node, in whatever order their events arrive."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu.model.compute_resources import NO_CPU_MEMORY, UNBOUNDED, CpuMemory
from mgpu.model.gpu_requests import ContainerRequest, GpuRequest, Placement
from mgpu.model.pods import Pod
from scheduler.cluster.node_usage import NodeUsage
from scheduler.cluster.reservations import Reservation
from tests import builders as b
from tests.examples import examples
from tests.scheduler.cluster.objects import put, record
from tests.scheduler.fake import Replica, cluster

FREE = CpuMemory(64_000, 256 * b.GIB)

nodes = st.sampled_from(["", "n1", "n2"])
rooms = st.sampled_from([NO_CPU_MEMORY, CpuMemory(500, 0), CpuMemory(1000, 3), CpuMemory(0, 7)])
pods = st.builds(
    lambda uid, node, phase, needs: Pod("default", uid, uid, node=node, phase=phase, cpu_memory=needs),
    st.sampled_from("abcd"),
    nodes,
    st.sampled_from(["Pending", "Running", "Failed"]),
    rooms,
)
events = st.lists(st.tuples(pods, nodes) | st.tuples(pods, st.none()), max_size=30)


@given(events)
@examples(53)
def test_usage_after_any_events_is_the_sum_of_the_present_pods(events: list[tuple[Pod, str | None]]) -> None:
    usage = NodeUsage()
    expected = dict[str, tuple[str, CpuMemory]]()
    for pod, node in events:
        before = {name: usage.on(name) for name in ("n1", "n2")}
        if node is None:
            changed = usage.drop(pod.uid)
            expected.pop(pod.uid, None)
        else:
            changed = usage.put(pod.uid, node, pod.cpu_memory)
            expected[pod.uid] = (node, pod.cpu_memory)
        assert {name for name, sum_ in before.items() if usage.on(name) != sum_} <= changed
    for node in ("n1", "n2"):
        for without in ("", "a"):
            held = [needs for uid, (on, needs) in expected.items() if on == node and uid != without]
            assert usage.on(node, without) == CpuMemory(sum(r.cpu for r in held), sum(r.memory for r in held))


def test_usage_of_pods_that_are_gone_or_reserve_nothing_takes_no_memory() -> None:
    usage = NodeUsage()
    usage.put("a", "n1", CpuMemory(1, 1))
    usage.put("b", "n1", NO_CPU_MEMORY)
    usage.drop("a")
    assert not usage._pods
    assert not usage._sums


def plain(name: str, cpu: str, **more: Any) -> dict[str, Any]:
    return b.pod(name, {"name": "c", "resources": {"requests": {"cpu": cpu}}}, **more)


@pytest.fixture
def replica() -> Replica:
    return Replica(cluster(("n1", 2)))


def free(replica: Replica, uid: str = "") -> CpuMemory:
    return replica.state.node_snapshot("n1", uid).free_resources


def test_pod_without_gpu_request_reserves_resources_until_it_ends(replica: Replica) -> None:
    put(replica, plain("p", "1500m", node="n1"))
    assert free(replica) == CpuMemory(62_500, FREE.memory)
    assert free(replica, "uid-p") == FREE
    put(replica, plain("p", "1500m", node="n1", phase="Succeeded"))
    assert free(replica) == FREE


def test_deleted_pod_frees_its_resources(replica: Replica) -> None:
    put(replica, plain("p", "1", node="n1"))
    replica.api.remove("pods", "p")
    replica.deliver()
    assert free(replica) == FREE


def test_node_without_allocatable_resources_is_unbounded() -> None:
    replica = Replica(cluster())
    put(replica, plain("p", "1", node="n1"))
    assert free(replica) == UNBOUNDED
    replica.api.put("nodes", b.node("n1"))
    replica.deliver()
    assert free(replica).cpu == 63_000
    bare = b.node("n1")
    del bare["status"]["allocatable"], bare["status"]["capacity"]
    replica.api.put("nodes", bare)
    replica.deliver()
    assert free(replica) == UNBOUNDED


def test_pod_reserves_resources_where_its_cards_are_reserved_until_that_is_cancelled(replica: Replica) -> None:
    raw = b.share("p")
    raw["spec"]["containers"][0]["resources"]["requests"]["cpu"] = "2"
    request = GpuRequest("mgpu", (ContainerRequest("c", core=500),))
    decision = Reservation("uid-p", "default", "p", "n1", request, Placement((("c", (0,)),)), {}, CpuMemory(2000, 0))
    assert replica.state.reservations.reserve(decision, replica.state.node_snapshot("n1", "").version)
    assert free(replica).cpu == 62_000
    put(replica, raw)  # An event from before the decision.
    assert free(replica).cpu == 62_000
    replica.state.reservations.cancel(decision)
    assert free(replica) == FREE
    bound = b.share("p", annotations=record(), node="n1")
    bound["spec"]["containers"][0]["resources"]["requests"]["cpu"] = "2"
    put(replica, bound)
    replica.state.reservations.cancel(decision)
    assert free(replica).cpu == 62_000
