"""Devices of other types than GPU: filtered, decided, kept and accounted for as cards are."""

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu.model.cards import Card, CardState
from mgpu.model.device_object import write_device
from mgpu.model.gpu_requests import ContainerRequest, GpuRequest, Placement, Rejection
from mgpu.model.pods import Node
from mgpu.settings import Settings, load_settings
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.reservations import Reservation
from scheduler.decisions.preemption import Victims
from scheduler.engine.node_assessment import assess, score
from tests import builders as b
from tests.examples import examples
from tests.scheduler.fake import SETTINGS, FakeApi, Replica

NODE = Node("n1")


def device(index: int, type: str = "rdma", *, healthy: bool = True) -> Card:
    return Card(index, f"{type}-{index}", "", 0, healthy=healthy, minor=index, type=type)


def used(index: int, core: int = 0, type: str = "rdma") -> CardState:
    return CardState(device(index, type), core, 0, 1 if core else 0)


def asking(name: str = "p", *containers: dict[str, object], **more: Any) -> dict[str, Any]:
    """`asking("p", {"gpu": 50, "rdma": 50})`: a pod of containers a, b, …"""
    made = []
    for letter, amounts in zip("abc", containers, strict=False):
        resources = {f"koordinator.sh/{key}": str(amount) for key, amount in amounts.items()}
        resources |= {"mgpu.io/share": "1"} if "gpu" in amounts else {}  # what admission adds
        made.append({"name": letter, "resources": {"requests": resources, "limits": dict(resources)}})
    return b.pod(name, *made, **more)


def cluster(settings: Settings = SETTINGS, **nodes: tuple[Card, ...]) -> Replica:
    api = FakeApi()
    for name, cards in nodes.items():
        api.put("nodes", b.node(name))
        api.put("devices", write_device(Node(name), "", cards))
    return Replica(api, settings=settings)


def request(*others: ContainerRequest, gpu: int = 0) -> GpuRequest:
    return GpuRequest("koordinator", (ContainerRequest("c", core=gpu, ratio=10),) if gpu else (), others=others)


def rdma(core: int = 500, count: int = 1, name: str = "c", type: str = "rdma") -> ContainerRequest:
    return ContainerRequest(name, count, core, type=type)


CASES = {
    "beside a GPU": (request(rdma(), gpu=500), [b.state(0), b.state(1), used(0, 700), used(1)], ((0,), (1,))),
    "alone": (request(rdma()), [used(0), used(1)], ((0,),)),
    "several": (request(rdma(1000, 2)), [used(0), used(1, 10), used(2)], ((0, 2),)),
    "of two types": (
        request(rdma(type="fpga"), rdma()),
        [used(0, 900, "fpga"), used(1, 0, "fpga"), used(0)],
        ((1,), (0,)),
    ),
    "of two containers": (request(rdma(600), rdma(600, name="d")), [used(0), used(1)], ((0,), (1,))),
}


@pytest.mark.parametrize("name", CASES)
def test_each_type_is_placed_by_itself_in_minor_order(name: str) -> None:
    wanted, cards, expected = CASES[name]
    found = assess(wanted, NODE, cards, SETTINGS)
    assert isinstance(found, Placement), str(found)
    assert (*(at for _, at in found.containers), *(at for *_, at in found.others)) == expected
    assert [type for type, *_ in found.others] == [c.type for c in wanted.others]


@pytest.mark.parametrize(
    ("wanted", "cards", "reason", "hopeless"),
    [
        (request(rdma()), [b.state(0)], "node n1 has no rdma device", True),
        (request(rdma(), gpu=100), [used(0)], "node n1 has no GPU cards (no Device)", True),
        (request(rdma(), gpu=100), [b.state(0, 1000), used(0)], "1 card: 1 core 10 percent short", False),
        (request(rdma(), gpu=100), [b.state(0), used(0, 600)], "1 rdma device: 1 10 percent short", False),
        (
            request(rdma()),
            [used(0, 600), CardState(device(1, healthy=False))],
            "2 rdma devices: 1 10 percent short, 1 unhealthy",
            False,
        ),
        (request(rdma(1000, 2)), [used(0)], "container 'c' requests 2 rdma devices, but the node has 1", True),
        (request(rdma(600), rdma(600, name="d")), [used(0)], "each of the 2 rdma containers fits alone", True),
    ],
)
def test_a_rejection_names_the_type(wanted: GpuRequest, cards: list[CardState], reason: str, hopeless: bool) -> None:
    found = assess(wanted, NODE, cards, SETTINGS)
    assert isinstance(found, Rejection)
    assert str(found).startswith(reason)
    assert found.hopeless is hopeless


def test_a_node_is_scored_by_what_the_pod_asks_for() -> None:
    found = assess(request(rdma()), NODE, [b.state(0, 900), used(0), used(1)], SETTINGS)
    assert isinstance(found, Placement)
    assert score(request(rdma()), found, [b.state(0, 900), used(0), used(1)], SETTINGS) == 2


def test_only_nodes_with_such_devices_pass_and_what_is_decided_counts() -> None:
    replica = cluster(n1=(b.card(0), device(0)), n2=(*b.cards(1, node="n2"),), n3=(device(0), device(1)))
    for name in ("p", "q"):
        replica.api.put("pods", asking(name, {"gpu": 50, "rdma": 60}))
    replica.api.put("pods", asking("r", {"rdma": 200}))
    replica.deliver()
    first, second, third = (replica.state.gpu_pod(f"uid-{name}") for name in "pqr")
    assert first
    assert second
    assert third
    names = ["n1", "n2", "n3", "n4"]
    found = replica.filter.filter(first, names)
    assert found.passed == ["n1"]
    assert found.hopeless == {
        "n2": "node n2 has no rdma device",
        "n3": "node n3 has no GPU cards (no Device)",
        "n4": "the node is not known to mgpu (yet)",
    }
    assert isinstance(replica.decider.decide(first, "n1"), Reservation)
    assert replica.filter.filter(second, names).failed == {
        "n1": "insufficient rdma (1 rdma device: 1 20 percent short)"
    }
    assert replica.filter.filter(third, names).passed == ["n3"]
    assert replica.filter.scores(third, names) == [0, 0, 10, 0]


def test_a_learnt_node_policy_leaves_pods_without_gpus_to_fullness() -> None:
    settings = load_settings("nodePolicy: fragmentation")
    replica = cluster(settings, n1=(b.card(0), device(0)), n2=(device(0), device(1)))
    replica.api.put("pods", asking("p", {"gpu": 50, "rdma": 10}))
    replica.api.put("pods", asking("q", {"rdma": 50}))
    replica.deliver()
    replica.state.forecast.refresh()
    replica.filter.refresh()
    gpu, without = (replica.state.gpu_pod(f"uid-{name}") for name in "pq")
    assert gpu
    assert without
    assert replica.filter.scores(gpu, ["n1"]) == [10]
    assert isinstance(replica.decider.decide(without, "n2"), Reservation)
    assert replica.filter.scores(without, ["n1", "n2"]) == [5, 2]


def test_what_is_recorded_is_held_while_the_device_is_away() -> None:
    replica = cluster(n1=(b.card(0), device(0), device(1)))
    replica.api.put("pods", asking("p", {"gpu": 50, "rdma": 60}, {"rdma": 70}))
    replica.deliver()
    known = replica.state.gpu_pod("uid-p")
    assert known
    made = replica.decider.decide(known, "n1")
    assert isinstance(made, Reservation)
    bound = asking("p", {"gpu": 50, "rdma": 60}, {"rdma": 70}, node="n1", annotations=dict(made.annotations))
    device_object = replica.api.devices["n1"]
    replica.api.put("pods", bound)
    replica.api.remove("devices", "n1")
    replica.deliver()
    assert replica.state.node_snapshot("n1", "").other_devices == ()
    replica.api.put("devices", device_object)
    replica.deliver()
    view = replica.state.node_snapshot("n1", "")
    assert [(s.card.index, s.core_used) for s in (*view.cards, *view.other_devices)] == [(0, 500), (0, 600), (1, 700)]
    assert Replica(replica.api).state.node_snapshot("n1", "").other_devices == view.other_devices


def test_a_pod_that_waits_for_its_gang_keeps_its_devices() -> None:
    replica = cluster(n1=(device(0), device(1)))
    for name in ("member", "other", "third"):
        replica.api.put("pods", asking(name, {"rdma": 60}))
    replica.api.edit_pod("member", lambda raw: raw["status"].update(nominatedNodeName="n1"))
    replica.deliver()
    other, third = (replica.state.gpu_pod(f"uid-{name}") for name in ("other", "third"))
    assert other
    assert third
    made = replica.decider.decide(other, "n1")
    assert isinstance(made, Reservation)
    assert made.placement.cards("a", "rdma") == (1,)
    assert replica.filter.filter(third, ["n1"]).passed == []


@pytest.mark.parametrize(("theirs", "expected"), [(("uid-low",), ("uid-low",)), ((), None)])
def test_what_the_scheduler_evicts_for_devices_stands_where_it_helps(
    theirs: tuple[str, ...], expected: tuple[str, ...] | None
) -> None:
    replica = cluster(n1=(device(0),))
    replica.api.put("pods", asking("low", {"rdma": 60}))
    replica.deliver()
    low = replica.state.gpu_pod("uid-low")
    assert low
    made = replica.decider.decide(low, "n1")
    assert isinstance(made, Reservation)
    replica.api.put("pods", asking("low", {"rdma": 60}, node="n1", annotations=dict(made.annotations)))
    wanting = asking("high", {"rdma": 100})
    wanting["spec"]["priority"] = 10
    replica.api.put("pods", wanting)
    replica.deliver()
    high = replica.state.gpu_pod("uid-high")
    assert high
    found = replica.preemption.choose(high, wanting, {"n1": Victims(theirs)})
    assert found == ({"n1": Victims(expected)} if expected else {})


@examples(12)
@given(
    st.lists(st.sampled_from([{"rdma": 30}, {"gpu": 40, "rdma": 50}, {"rdma": 200}, {"gpu": 100}]), max_size=6),
    st.randoms(use_true_random=False),
)
def test_property_no_device_is_given_twice_and_the_order_of_events_does_not_matter(
    asked: list[dict[str, object]], random: Random
) -> None:
    replica = cluster(n1=(b.card(0), b.card(1), device(0), device(1)))
    objects = [("nodes", replica.api.nodes["n1"]), ("devices", replica.api.devices["n1"])]
    for i, amounts in enumerate(asked):
        replica.api.put("pods", asking(f"p{i}", amounts))
        replica.deliver()
        known = replica.state.gpu_pod(f"uid-p{i}")
        assert known
        made = replica.decider.decide(known, "n1")
        assert isinstance(made, Reservation) == (replica.filter.filter(known, ["n1"]).passed == ["n1"])
        if isinstance(made, Reservation):
            raw = asking(f"p{i}", amounts, node="n1", annotations=dict(made.annotations))
            objects.append(("pods", replica.api.put("pods", raw)))
    replica.deliver()
    view = replica.state.node_snapshot("n1", "")
    states = (*view.cards, *view.other_devices)
    assert all(s.core_used <= 1000 and s.memory_used <= s.card.memory and s.ratio_used <= 100 for s in states)
    random.shuffle(objects)
    again = ClusterCache(SETTINGS)
    for kind, raw in objects:
        {"nodes": again.node_changed, "devices": again.device_changed, "pods": again.pod_changed}[kind](raw)
    assert again.node_snapshot("n1", "").other_devices == view.other_devices
    assert again.node_snapshot("n1", "").cards == view.cards
