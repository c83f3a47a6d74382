"""What a container that asks for slices gets: those of its pod's record, as they are made now, or nothing."""

import json
from pathlib import Path

import pytest

from deviceplugin.pods.identity import Refused
from mgpu.model.cards import Card
from mgpu.model.node_slices import NodeSlices, slice_devices
from mgpu.model.slice_names import Slice
from tests.builders import cards, pod, share
from tests.deviceplugin.desk import ASSUMED, RECORD, Desk, asking
from tests.deviceplugin.partitioning.rig import place, slice_pod

TWO, ONE, MPS = "nvidia.com/mig-2g.20gb", "nvidia.com/mig-1g.10gb", "nvidia.com/gpu-4gb"
GPUS = cards(2)


def made(*slices: Slice) -> tuple[Card, ...]:
    """Card 1 whole, and these slices of card 0."""
    return (GPUS[1], *slice_devices(NodeSlices("mig", existing=slices), GPUS))


def mig(text: str, uuid: str = "") -> Slice:
    found = place(text)
    return Slice(0, found.start, found.name, uuid or f"MIG-{text}")


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    desk = Desk(tmp_path, wait_seconds=0.3)
    desk.all_gpus = GPUS
    desk.cards = made(mig("2g.20gb@0"), mig("2g.20gb@2"), mig("1g.10gb@4"))
    return desk


def test_container_sees_the_slices_of_its_record(desk: Desk) -> None:
    desk.pods.take(slice_pod("p", mig("2g.20gb@2"), mig("2g.20gb@0"), phase="Pending"))
    answer = desk.admit(["5", "9"], "uid-p", resource=TWO)
    desk.start(["5", "9"], resource=TWO)
    assert desk.visible(answer) == "MIG-2g.20gb@0,MIG-2g.20gb@2"


def test_first_of_several_types_carries_all_slices(desk: Desk) -> None:
    desk.pods.take(slice_pod("p", mig("2g.20gb@2"), mig("1g.10gb@4"), phase="Pending"))
    answers = [desk.admit(["0"], "uid-p", resource=resource) for resource in (TWO, ONE)]
    for resource in (TWO, ONE):
        desk.start(["0"], resource=resource)
    assert desk.visible(answers[1]) == "MIG-1g.10gb@4,MIG-2g.20gb@2"
    assert desk.env(answers[1])["MGPU_PLACES"] == "0:4,0:2"
    assert "NVIDIA_VISIBLE_DEVICES" not in desk.env(answers[0])


def test_share_of_a_card_under_mps_sees_the_card(desk: Desk) -> None:
    desk.cards = (GPUS[1], *slice_devices(NodeSlices("mps", existing=(place("4gb@3"),)), GPUS))
    desk.pods.take(slice_pod("p", place("4gb@3"), phase="Pending"))
    answer = desk.admit(["0"], "uid-p", resource=MPS)
    desk.start(["0"], resource=MPS)
    assert desk.visible(answer) == GPUS[0].uuid
    assert desk.env(answer)["MGPU_PLACES"] == "0:3"
    assert desk.env(answer)["MGPU_MEMORY_BYTES"] == str(4 << 30)


def test_start_waits_for_a_slice_that_is_being_made(desk: Desk) -> None:
    late = mig("1g.10gb@5")
    desk.pods.take(slice_pod("p", late, phase="Pending"))
    answer = desk.admit(["0"], "uid-p", resource=ONE)

    def make() -> None:
        desk.cards = made(late)
        desk.changed.wake()

    desk.start(["0"], make, resource=ONE)
    assert desk.visible(answer) == "MIG-1g.10gb@5"


def test_missing_slice_is_named_in_the_refusal(desk: Desk) -> None:
    desk.pods.take(slice_pod("p", mig("1g.10gb@5"), phase="Pending"))
    desk.admit(["0"], "uid-p", resource=ONE)
    with pytest.raises(Refused, match=r"its record names mig-1g.10gb slice 0:5, which does not exist on this node"):
        desk.start(["0"], resource=ONE)
    assert not list((desk.folder / "cdi").glob("*.json"))


def test_first_of_two_pods_with_the_same_slice_runs(desk: Desk) -> None:
    for name, i in (("p", "0"), ("q", "1")):
        desk.pods.take(slice_pod(name, mig("2g.20gb@2"), phase="Pending"))
        desk.admit([i], f"uid-{name}", resource=TWO)
    desk.start(["0"], resource=TWO)
    with pytest.raises(Refused, match=r"mig-2g.20gb slice 2 .* has no room: .* held by default/p"):
        desk.start(["1"], resource=TWO)
    desk.restart(*(slice_pod(name, mig("2g.20gb@2"), phase="Pending") for name in ("q", "p")))
    desk.cards = made(mig("2g.20gb@2"))
    with pytest.raises(Refused, match="held by default/p"):
        desk.start(["1"], resource=TWO)


def test_record_with_a_cut_card_is_refused(desk: Desk) -> None:
    desk.pods.take(share("p", core=2, annotations={ASSUMED: "true", RECORD + "c": "0"}))
    desk.admit(["0", "1"], "uid-p")
    with pytest.raises(Refused, match="names card 0, which this node does not have; it has 1"):
        desk.start(["0", "1"])


def test_record_with_too_few_slices_is_refused(desk: Desk) -> None:
    raw = slice_pod("p", mig("2g.20gb@2"), phase="Pending")
    raw["spec"]["containers"][0] = asking("c", {TWO: 2})
    desk.pods.take(raw)
    desk.admit(["0", "1"], "uid-p", resource=TWO)
    with pytest.raises(Refused, match="names 1 place, the container asks for 2"):
        desk.start(["0", "1"], resource=TWO)


def test_slices_are_refused_without_cdi(tmp_path: Path) -> None:
    desk = Desk(tmp_path, cdi=False, wait_seconds=0.1)
    desk.cards = made(mig("2g.20gb@2"))
    desk.restart(slice_pod("p", mig("2g.20gb@2"), phase="Pending"))
    with pytest.raises(Refused, match="slices need a container runtime with CDI"):
        desk.allocate(["0"], resource=TWO)


def test_init_containers_and_containers_have_slices_of_their_own(desk: Desk) -> None:
    raw = pod(
        "p",
        asking("c", {TWO: 1}),
        init=(asking("i", {ONE: 1}),),
        annotations={
            "mgpu.io/slices-given": json.dumps({"c": {"mig-2g.20gb": ["0:0"]}, "i": {"mig-1g.10gb": ["0:4"]}})
        },
    )
    desk.pods.take(raw)
    first = desk.admit(["0"], "uid-p", "i", ONE)
    second = desk.admit(["0"], "uid-p", "c", TWO)
    desk.start(["0"], resource=ONE)
    desk.start(["0"], resource=TWO)
    assert [desk.visible(first), desk.visible(second)] == ["MIG-1g.10gb@4", "MIG-2g.20gb@0"]
