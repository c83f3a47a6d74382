"""The Device object and the hand-written card list: what is written reads back, what is wrong is named."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu.model.cards import Card
from mgpu.model.device_object import read_card_list, read_device, write_device
from mgpu.model.errors import BadObject
from mgpu.model.pods import Node
from tests.builders import GIB, cards


def problems(read: Any, *args: object) -> list[str]:
    with pytest.raises(BadObject) as error:
        read(*args)
    return [str(problem) for problem in error.value.problems]


@st.composite
def _cards(draw: st.DrawFn) -> tuple[Card, ...]:
    indexes = draw(st.lists(st.integers(0, 40), unique=True, max_size=6))
    minors = draw(st.permutations(indexes))
    return tuple(
        Card(
            index=i,
            uuid=f"GPU-{i}",
            model=draw(st.sampled_from(["", "A100", "H200"])),
            memory=draw(st.integers(1, 1 << 40)) if type == "gpu" else 0,
            healthy=draw(st.booleans()),
            numa=draw(st.none() | st.integers(0, 3)),
            minor=minor,
            type=type,
        )
        for type in draw(st.sampled_from([("gpu",), ("gpu", "rdma"), ("fpga", "xpu")]))
        for i, minor in zip(indexes, minors, strict=True)
    )


@given(_cards())
def test_property_what_is_written_reads_back(given_cards: tuple[Card, ...]) -> None:
    device = write_device(Node("n1"), "uid-1", given_cards)
    assert read_device(device) == tuple(sorted(given_cards, key=lambda card: (card.type, card.index)))


def test_the_device_goes_with_its_node() -> None:
    device = write_device(Node("n1"), "uid-1", cards(1))
    assert device["metadata"]["name"] == "n1"
    assert device["metadata"]["ownerReferences"][0]["uid"] == "uid-1"


def test_a_topology_is_one_that_koordinators_own_crd_takes() -> None:
    """Which requires these three (config/crd/bases/scheduling.koordinator.sh_devices.yaml)."""
    (row,) = write_device(Node("n1"), "", (Card(0, "GPU-0", "", 8 * GIB, numa=1),))["spec"]["devices"]
    assert row["topology"] == {"socketID": -1, "nodeID": 1, "pcieID": ""}


def test_the_seeds_older_spellings_are_read() -> None:
    entry = {"deviceType": "gpu", "id": "GPU-a", "minor": 3, "resource": {"kubernetes.io/gpu-memory": "8Gi"}}
    well = {**entry, "health": True}
    assert read_device({"spec": {"devices": [well]}}) == (Card(3, "GPU-a", "", 8 * GIB, minor=3),)
    assert [card.minor for card in read_device({"spec": {"devices": [entry, {"type": "rdma"}]}})] == [3, 0]


def test_health_that_the_seeds_writer_leaves_out_is_false() -> None:
    """`json:"health,omitempty"` in its Go type, as minor."""
    older = {"deviceType": "gpu", "id": "GPU-a", "resource": {"kubernetes.io/gpu-memory": "8Gi"}}
    assert [card.healthy for card in read_device({"spec": {"devices": [older, gpu(minor=1)]}})] == [False, True]


def test_any_other_type_is_a_hundred_percent_of_itself() -> None:
    rows = [
        {"type": "rdma", "minor": 1, "id": "0000:1f:00.0", "health": False, "topology": {"nodeID": 1}},
        {"type": "xpu", "minor": 0, "resources": {"koordinator.sh/xpu": "100"}},
        gpu(),
        {"deviceType": "rdma", "minor": 0, "health": True, "labels": {"mgpu.io/index": "3"}},
    ]
    read = read_device({"spec": {"devices": rows}})
    assert [(c.type, c.index, c.uuid, c.core, c.memory, c.healthy) for c in read] == [
        ("gpu", 0, "GPU-0", 1000, 8 * GIB, True),
        ("rdma", 1, "0000:1f:00.0", 1000, 0, False),
        ("rdma", 3, "rdma-0", 1000, 0, True),
        ("xpu", 0, "xpu-0", 1000, 0, True),
    ]
    assert read_device({}) == ()


def gpu(**changed: object) -> dict[str, object]:
    return {"type": "gpu", "id": "GPU-0", "minor": 0, "resources": {"koordinator.sh/gpu-memory": "8Gi"}, **changed}


@pytest.mark.parametrize(
    ("device", "path"),
    [
        (gpu(minor="0"), "spec.devices[0].minor"),
        (gpu(minor=-1), "spec.devices[0].minor"),
        (gpu(minor=True), "spec.devices[0].minor"),
        (gpu(id=""), "spec.devices[0].id"),
        (gpu(id=7), "spec.devices[0].id"),
        (gpu(resources={}), "spec.devices[0].resources[koordinator.sh/gpu-memory]"),
        (gpu(resources={"koordinator.sh/gpu-memory": "0"}), "spec.devices[0].resources[koordinator.sh/gpu-memory]"),
        (gpu(resources={"koordinator.sh/gpu-memory": "8E"}), "spec.devices[0].resources[koordinator.sh/gpu-memory]"),
        (gpu(resources={"kubernetes.io/gpu-memory": "x"}), "spec.devices[0].resources[kubernetes.io/gpu-memory]"),
        (gpu(resources=7), "spec.devices[0].resources"),
        (
            gpu(resources={"koordinator.sh/gpu-memory": "8Gi", "koordinator.sh/gpu-core": "-100"}),
            "spec.devices[0].resources[koordinator.sh/gpu-core]",
        ),
        (gpu(type="rdma", resources={"koordinator.sh/rdma": -1}), "spec.devices[0].resources[koordinator.sh/rdma]"),
        (gpu(type="rdma", minor=-1), "spec.devices[0].minor"),
        (gpu(type="r/dma"), "spec.devices[0].type"),
        (gpu(type=None), "spec.devices[0].type"),
        (gpu(labels=7), "spec.devices[0].labels"),
        (gpu(topology="a"), "spec.devices[0].topology"),
        (gpu(labels={"mgpu.io/index": "x"}), "spec.devices[0].labels[mgpu.io/index]"),
        (gpu(labels={"mgpu.io/index": "-1"}), "spec.devices[0].labels[mgpu.io/index]"),
        ("card", "spec.devices[0]"),
    ],
)
def test_a_wrong_device_is_named(device: object, path: str) -> None:
    (problem,) = problems(read_device, {"spec": {"devices": [device]}})
    assert problem.startswith(f"{path}: ")


def test_device_with_more_devices_than_a_node_can_have_is_refused() -> None:
    rows = [{"type": "rdma", "minor": i} for i in range(1025)]
    assert problems(read_device, {"spec": {"devices": rows}}) == [
        "spec.devices: has 1025 devices, but a node has at most 1024"
    ]
    assert len(read_device({"spec": {"devices": rows[1:]}})) == 1024


def test_two_cards_are_never_the_same() -> None:
    found = problems(read_device, {"spec": {"devices": [gpu(), gpu(labels={"mgpu.io/index": "1"})]}})
    assert found == ["spec.devices: two cards have the minor 0", "spec.devices: two cards have the UUID GPU-0"]
    twice = [gpu(), {"type": "rdma", "minor": 0, "id": "a"}, {"type": "rdma", "minor": 0, "id": "b"}]
    assert problems(read_device, {"spec": {"devices": twice}}) == [
        "spec.devices: two rdma devices have the minor 0",
        "spec.devices: two rdma devices have the index 0",
    ]


def test_equal_cards_are_listed_once() -> None:
    read = read_card_list([{"count": 2, "memory": "80Gi", "model": "A100"}, {"memory": "40Gi"}], "n1", "cards")
    assert [(c.index, c.uuid, c.memory >> 30, c.model) for c in read] == [
        (0, "GPU-n1-0", 80, "A100"),
        (1, "GPU-n1-1", 80, "A100"),
        (2, "GPU-n1-2", 40, ""),
    ]


@pytest.mark.parametrize(
    ("rows", "path"),
    [
        ({}, "cards"),
        ([1], "cards[0]"),
        ([{"memory": "8Gi", "colour": "red"}], "cards[0].colour"),
        ([{}], "cards[0].memory"),
        ([{"memory": "-1"}], "cards[0].memory"),
        ([{"memory": "8E"}], "cards[0].memory"),
        ([{"memory": "8Gi", "index": "0"}], "cards[0].index"),
        ([{"memory": "8Gi", "index": -1}], "cards[0].index"),
        ([{"memory": "8Gi", "count": 0}], "cards[0].count"),
        ([{"memory": "8Gi", "count": 10**12}], "cards[0].count"),
        ([{"memory": "8Gi", "healthy": "yes"}], "cards[0].healthy"),
        ([{"memory": "8Gi", "uuid": 1}], "cards[0].uuid"),
        ([{"memory": "8Gi", "uuid": "GPU-1", "count": 2}], "cards[0].uuid"),
        ([{"memory": "8Gi", "minor": 1, "count": 2}], "cards[0].minor"),
        ([{"memory": "8Gi", "index": 1}, {"memory": "8Gi", "index": 1}], "cards"),
    ],
)
def test_a_wrong_list_is_named(rows: object, path: str) -> None:
    assert problems(read_card_list, rows, "n1", "cards")[0].startswith(f"{path}: ")


def test_every_problem_of_a_list_is_named() -> None:
    found = problems(read_card_list, [{"memory": "x", "count": 0}, 5], "n1", "cards")
    assert [line.split(":")[0] for line in found] == ["cards[0].count", "cards[0].memory", "cards[1]"]
