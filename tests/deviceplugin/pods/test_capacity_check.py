"""The capacity check, and the order of grants."""

from typing import Any

from deviceplugin.pods.capacity_check import Grants, excess, holding, read_delivered
from deviceplugin.pods.gpu_pod import GpuPod
from tests.builders import card, cards, container, pod
from tests.deviceplugin import records
from tests.deviceplugin.partitioning.rig import place, slice_pod
from tests.deviceplugin.records import ASSUMED, RECORD, read

CARDS = cards(2)


def decided(name: str, card: str = "0", core: int = 60, **more: Any) -> GpuPod:
    return read(records.decided(name, card, core, **more))


def started(name: str) -> GpuPod:
    return read(records.started(records.decided(name, "0", 60)))


def over(*pods: GpuPod) -> str | None:
    first, *others = [holding(gpu_pod, CARDS) for gpu_pod in pods]
    return excess(first, others, CARDS)


def test_pods_that_fit_on_a_card_have_no_excess() -> None:
    assert over(decided("p", core=60), decided("q", core=40), decided("r", "1")) is None


def test_excess_names_the_dimension_and_the_holders() -> None:
    assert over(decided("p", mib=50 << 10, core=10), decided("q", mib=40 << 10, core=10)) == (
        "card 0 (GPU-n1-0) has insufficient capacity: memory 50.0 GiB requested, 40.0 GiB free; held by default/q"
    )
    assert "core 60% requested, 40% free; held by default/q" in str(over(decided("p"), decided("q", "GPU-n1-0")))


def test_excess_names_only_pods_of_the_same_namespace() -> None:
    """The tenant of the refused pod reads the text in an Event and in the pod's status."""
    refused = decided("p", core=60, namespace="mine")
    one = decided("secret", core=60, namespace="theirs")
    both = decided("secret", core=30, namespace="theirs"), decided("q", core=30, namespace="mine")
    assert str(over(refused, one)).endswith("held by a pod of another namespace")
    assert str(over(refused, *both)).endswith("held by mine/q, pods of other namespaces")


def test_whole_card_leaves_no_room_for_a_share() -> None:
    whole = read(pod("w", container("c", 100), annotations={ASSUMED: "true", RECORD + "c": "0"}))
    assert "core 100% requested, 90% free" in str(over(whole, decided("q", core=10)))


def test_slice_of_an_unpartitioned_card_holds_the_whole_card() -> None:
    """The node's label was removed while the pod runs."""
    sliced = read(slice_pod("s", place("4gb@0")))
    assert over(decided("p", core=10), sliced) == (
        "card 0 (GPU-n1-0) has insufficient capacity: core 10% requested, 0% free, "
        "memory 1.0 GiB requested, 0 B free; held by default/s"
    )
    assert over(decided("p", "1", core=10), sliced) is None


def test_init_containers_and_containers_count_at_the_busiest_moment() -> None:
    record = {ASSUMED: "true", RECORD + "c": "0", RECORD + "i": "0"}
    both = pod("p", container("c", 60, 1024), init=(container("i", 60, 1024),), annotations=record)
    assert over(read(both), decided("q", core=40)) is None


def test_holding_follows_delivered_devices_and_not_the_record() -> None:
    held = holding(decided("p", "garbage"), CARDS, {("uid-p", "c"): ("GPU-n1-1",)})
    assert [(s.card, s.core) for s in held.shares] == [(1, 600)]
    assert holding(decided("p", "GPU-n1-1"), CARDS) == held


def test_pod_with_an_unreadable_record_holds_every_card() -> None:
    unknown = holding(decided("p", "garbage"), CARDS)
    assert all(unknown.uses(one).core == 600 for one in CARDS)


def test_container_that_has_not_run_holds_nothing() -> None:
    raw = pod("p", container("ran", 10, 1024), container("waits", 50, 1024))
    gpu_pod = read({**raw, "status": {"containerStatuses": [{"name": "ran", "containerID": "x"}]}})
    assert [share.container for share in holding(gpu_pod, CARDS, {}).shares] == ["ran"]


def test_first_granted_pod_keeps_its_cards() -> None:
    grants, first, second = Grants({}), decided("z"), decided("a")
    assert grants.refusal(first, [first, second], CARDS) is None
    grants.grant(first, CARDS)
    assert "held by default/z" in str(grants.refusal(second, [first, second], CARDS))
    assert grants.refusal(first, [first, second], CARDS) is None


def test_ended_and_deleted_pods_hold_nothing() -> None:
    grants, first, second = Grants({}), decided("z"), decided("a")
    grants.grant(first, CARDS)
    assert grants.refusal(second, [decided("z", phase="Failed"), second], CARDS) is None
    assert grants.refusal(second, [second], CARDS) is None
    grants.keep_only({"uid-a"})
    assert grants.refusal(second, [first, second], CARDS) is None


def test_pods_that_earlier_agents_started_are_granted() -> None:
    mine = decided("p")
    assert "held by default/q" in str(Grants({}).refusal(mine, [mine, started("q")], CARDS))
    delivered = {("uid-q", "c"): ("GPU-n1-0",)}
    assert "held by default/q" in str(Grants(delivered).refusal(mine, [mine, decided("q")], CARDS))
    assert Grants({}).refusal(mine, [mine, decided("q")], CARDS) is None


def test_of_two_running_pods_that_do_not_fit_exactly_one_may_start_again() -> None:
    both = [started("a"), started("b")]
    grants = Grants({})
    assert [bool(grants.refusal(gpu_pod, both, CARDS)) for gpu_pod in both] == [False, True]


def test_changed_record_waits_for_earlier_grants() -> None:
    grants, first, second = Grants({}), decided("a", "0"), decided("b", "1")
    for gpu_pod in (first, second):
        assert grants.refusal(gpu_pod, [first, second], CARDS) is None
        grants.grant(gpu_pod, CARDS)
    moved = decided("a", "1")
    assert "held by default/b" in str(grants.refusal(moved, [moved, second], CARDS))


def test_card_that_does_not_exist_is_not_counted() -> None:
    assert excess(holding(decided("p", "7"), CARDS), (), (card(0),)) is None


def test_delivered_devices_are_read_from_environments() -> None:
    environments = {
        ("a", "c"): {"NVIDIA_VISIBLE_DEVICES": "GPU-0,GPU-1", "X": "1"},
        ("b", "c"): {"NVIDIA_VISIBLE_DEVICES": "MIG-1", "MGPU_SLICES": "2g.20gb", "MGPU_PLACES": "0:4"},
        ("c", "c"): {"NVIDIA_VISIBLE_DEVICES": "GPU-0", "MGPU_SLICES": "4gb", "MGPU_PLACES": "0:3"},
        ("d", "c"): {"MGPU_CARRIER": "x"},
    }
    assert read_delivered(environments) == {
        ("a", "c"): ("GPU-0", "GPU-1"),
        ("b", "c"): ("MIG-1",),
        ("c", "c"): ("GPU-0/4gb/3",),
    }
