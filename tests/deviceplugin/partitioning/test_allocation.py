"""Containers that request slices get those of the allocation record, or do not start."""

import json
from pathlib import Path

import pytest

from deviceplugin.pods.identity import Refused
from mgpu.model.cards import Card
from mgpu.model.node_slices import NodeSlices, slice_devices
from mgpu.model.slice_names import Slice
from tests.builders import cards, pod, share
from tests.deviceplugin.fake_node import FakeNode
from tests.deviceplugin.partitioning.rig import place, slice_pod
from tests.deviceplugin.records import ASSUMED, RECORD, requesting

TWO, ONE, MPS = "nvidia.com/mig-2g.20gb", "nvidia.com/mig-1g.10gb", "nvidia.com/gpu-4gb"
GPUS = cards(2)


def made(*slices: Slice) -> tuple[Card, ...]:
    """Card 1 whole, and these slices of card 0."""
    return (GPUS[1], *slice_devices(NodeSlices("mig", existing=slices), GPUS))


def mig(text: str, uuid: str = "") -> Slice:
    found = place(text)
    return Slice(0, found.start, found.name, uuid or f"MIG-{text}")


@pytest.fixture
def fake_node(tmp_path: Path) -> FakeNode:
    fake_node = FakeNode(tmp_path, wait_seconds=0.3)
    fake_node.all_gpus = GPUS
    fake_node.cards = made(mig("2g.20gb@0"), mig("2g.20gb@2"), mig("1g.10gb@4"))
    return fake_node


def test_container_sees_the_slices_of_its_record(fake_node: FakeNode) -> None:
    answer = fake_node.deploy(
        slice_pod("p", mig("2g.20gb@2"), mig("2g.20gb@0"), phase="Pending"), ["5", "9"], resource=TWO
    )
    fake_node.start(["5", "9"], resource=TWO)
    assert fake_node.visible(answer) == "MIG-2g.20gb@0,MIG-2g.20gb@2"


def test_first_of_several_types_carries_all_slices(fake_node: FakeNode) -> None:
    fake_node.pods.take(slice_pod("p", mig("2g.20gb@2"), mig("1g.10gb@4"), phase="Pending"))
    answers = [fake_node.admit(["0"], "uid-p", resource=resource) for resource in (TWO, ONE)]
    for resource in (TWO, ONE):
        fake_node.start(["0"], resource=resource)
    assert fake_node.visible(answers[1]) == "MIG-1g.10gb@4,MIG-2g.20gb@2"
    assert fake_node.env(answers[1])["MGPU_PLACES"] == "0:4,0:2"
    assert "NVIDIA_VISIBLE_DEVICES" not in fake_node.env(answers[0])


def test_share_of_a_card_under_mps_sees_the_card(fake_node: FakeNode) -> None:
    fake_node.cards = (GPUS[1], *slice_devices(NodeSlices("mps", existing=(place("4gb@3"),)), GPUS))
    answer = fake_node.deploy(slice_pod("p", place("4gb@3"), phase="Pending"), ["0"], resource=MPS)
    fake_node.start(["0"], resource=MPS)
    assert fake_node.visible(answer) == GPUS[0].uuid
    assert fake_node.env(answer)["MGPU_PLACES"] == "0:3"
    assert fake_node.env(answer)["MGPU_MEMORY_BYTES"] == str(4 << 30)


def test_start_waits_for_a_slice_that_is_being_made(fake_node: FakeNode) -> None:
    late = mig("1g.10gb@5")
    answer = fake_node.deploy(slice_pod("p", late, phase="Pending"), ["0"], resource=ONE)

    def make() -> None:
        fake_node.cards = made(late)
        fake_node.changed.wake()

    fake_node.start(["0"], make, resource=ONE)
    assert fake_node.visible(answer) == "MIG-1g.10gb@5"


def test_missing_slice_is_named_in_the_refusal(fake_node: FakeNode) -> None:
    fake_node.deploy(slice_pod("p", mig("1g.10gb@5"), phase="Pending"), ["0"], resource=ONE)
    with pytest.raises(Refused, match=r"its record names mig-1g.10gb slice 0:5, which does not exist on this node"):
        fake_node.start(["0"], resource=ONE)
    assert not list((fake_node.folder / "cdi").glob("*.json"))


def test_first_of_two_pods_with_the_same_slice_runs(fake_node: FakeNode) -> None:
    for name, i in (("p", "0"), ("q", "1")):
        fake_node.pods.take(slice_pod(name, mig("2g.20gb@2"), phase="Pending"))
        fake_node.admit([i], f"uid-{name}", resource=TWO)
    fake_node.start(["0"], resource=TWO)
    with pytest.raises(Refused, match=r"mig-2g.20gb slice 2 .* has insufficient capacity: .* held by default/p"):
        fake_node.start(["1"], resource=TWO)
    fake_node.restart(*(slice_pod(name, mig("2g.20gb@2"), phase="Pending") for name in ("q", "p")))
    fake_node.cards = made(mig("2g.20gb@2"))
    with pytest.raises(Refused, match="held by default/p"):
        fake_node.start(["1"], resource=TWO)


def test_record_with_a_cut_card_is_refused(fake_node: FakeNode) -> None:
    fake_node.deploy(share("p", core=2, annotations={ASSUMED: "true", RECORD + "c": "0"}), ["0", "1"])
    with pytest.raises(Refused, match="names card 0, which this node does not have; it has 1"):
        fake_node.start(["0", "1"])


def test_record_with_too_few_slices_is_refused(fake_node: FakeNode) -> None:
    raw = slice_pod("p", mig("2g.20gb@2"), phase="Pending")
    raw["spec"]["containers"][0] = requesting("c", {TWO: 2})
    fake_node.pods.take(raw)
    fake_node.admit(["0", "1"], "uid-p", resource=TWO)
    with pytest.raises(Refused, match="names 1 position, but the container requests 2"):
        fake_node.start(["0", "1"], resource=TWO)


def test_slices_are_refused_without_cdi(tmp_path: Path) -> None:
    fake_node = FakeNode(tmp_path, cdi=False, wait_seconds=0.1)
    fake_node.cards = made(mig("2g.20gb@2"))
    fake_node.restart(slice_pod("p", mig("2g.20gb@2"), phase="Pending"))
    with pytest.raises(Refused, match="slices need a container runtime with CDI"):
        fake_node.allocate(["0"], resource=TWO)


def test_init_containers_and_containers_have_slices_of_their_own(fake_node: FakeNode) -> None:
    raw = pod(
        "p",
        requesting("c", {TWO: 1}),
        init=(requesting("i", {ONE: 1}),),
        annotations={
            "mgpu.io/slices-given": json.dumps({"c": {"mig-2g.20gb": ["0:0"]}, "i": {"mig-1g.10gb": ["0:4"]}})
        },
    )
    fake_node.pods.take(raw)
    first = fake_node.admit(["0"], "uid-p", "i", ONE)
    second = fake_node.admit(["0"], "uid-p", "c", TWO)
    fake_node.start(["0"], resource=ONE)
    fake_node.start(["0"], resource=TWO)
    assert [fake_node.visible(first), fake_node.visible(second)] == ["MIG-1g.10gb@4", "MIG-2g.20gb@0"]
