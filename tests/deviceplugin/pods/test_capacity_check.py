"""Whether a start would put a card over its capacity, and who comes first."""

from typing import Any

from deviceplugin.pods.capacity_check import Grants, excess, holding, read_delivered
from deviceplugin.pods.gpu_pod import GpuPod, read_gpu_pod
from mgpu.settings import load_settings
from tests.builders import card, cards, container, pod, share
from tests.deviceplugin.partitioning.rig import place, slice_pod
from tests.deviceplugin.records import ASSUMED, RECORD

CARDS = cards(2)


def read(raw: dict[str, Any]) -> GpuPod:
    known = read_gpu_pod(raw, load_settings())
    assert known is not None
    return known


def decided(name: str, on: str = "0", core: int = 60, mib: int = 1024, **more: Any) -> GpuPod:
    return read(share(name, core, mib, annotations={ASSUMED: "true", RECORD + "c": on}, **more))


def started(name: str, on: str = "0", core: int = 60) -> GpuPod:
    raw = share(name, core, annotations={ASSUMED: "true", RECORD + "c": on})
    return read({**raw, "status": {"containerStatuses": [{"name": "c", "containerID": "x"}]}})


def over(*known: GpuPod) -> str | None:
    wanted, *others = [holding(one, CARDS) for one in known]
    return excess(wanted, others, CARDS)


def test_pods_that_fit_on_a_card_have_no_excess() -> None:
    assert over(decided("p", core=60), decided("q", core=40), decided("r", "1")) is None


def test_excess_names_the_dimension_and_the_holders() -> None:
    assert over(decided("p", mib=50 << 10, core=10), decided("q", mib=40 << 10, core=10)) == (
        "card 0 (GPU-n1-0) has no room: memory 50.0 GiB asked, 40.0 GiB free; held by default/q"
    )
    assert "core 60% asked, 40% free; held by default/q" in str(over(decided("p"), decided("q", "GPU-n1-0")))


def test_refusal_names_pods_of_its_own_namespace_alone() -> None:
    """The text goes into an Event and the status of the refused pod, which its tenant reads."""
    wanted = decided("p", core=60, namespace="mine")
    one = decided("secret", core=60, namespace="theirs")
    both = decided("secret", core=30, namespace="theirs"), decided("q", core=30, namespace="mine")
    assert str(over(wanted, one)).endswith("held by a pod of another namespace")
    assert str(over(wanted, *both)).endswith("held by mine/q, pods of other namespaces")


def test_whole_card_leaves_no_room_for_a_share() -> None:
    whole = read(pod("w", container("c", 100), annotations={ASSUMED: "true", RECORD + "c": "0"}))
    assert "core 100% asked, 90% free" in str(over(whole, decided("q", core=10)))


def test_slice_of_a_card_that_is_no_longer_cut_holds_the_whole_card() -> None:
    """The label was taken off the node while the pod runs."""
    sliced = read(slice_pod("s", place("4gb@0")))
    assert over(decided("p", core=10), sliced) == (
        "card 0 (GPU-n1-0) has no room: core 10% asked, 0% free, memory 1.0 GiB asked, 0 B free; held by default/s"
    )
    assert over(decided("p", "1", core=10), sliced) is None


def test_init_containers_and_containers_count_at_the_busiest_moment() -> None:
    record = {ASSUMED: "true", RECORD + "c": "0", RECORD + "i": "0"}
    both = pod("p", container("c", 60, 1024), init=(container("i", 60, 1024),), annotations=record)
    assert over(read(both), decided("q", core=40)) is None


def test_holding_follows_what_was_handed_out_and_not_the_record() -> None:
    held = holding(decided("p", "garbage"), CARDS, {("uid-p", "c"): ("GPU-n1-1",)})
    assert [(s.card, s.core) for s in held.shares] == [(1, 600)]
    assert holding(decided("p", "GPU-n1-1"), CARDS) == held


def test_pod_with_an_unreadable_record_holds_every_card() -> None:
    unknown = holding(decided("p", "garbage"), CARDS)
    assert all(unknown.uses(one).core == 600 for one in CARDS)


def test_container_that_has_not_run_and_was_handed_nothing_holds_nothing() -> None:
    raw = pod("p", container("ran", 10, 1024), container("waits", 50, 1024))
    known = read({**raw, "status": {"containerStatuses": [{"name": "ran", "containerID": "x"}]}})
    assert [share.container for share in holding(known, CARDS, {}).shares] == ["ran"]


def test_first_granted_pod_keeps_its_cards_also_against_an_older_one() -> None:
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


def test_pods_that_ran_or_were_handed_cards_before_this_agent_are_granted() -> None:
    mine = decided("p")
    assert "held by default/q" in str(Grants({}).refusal(mine, [mine, started("q")], CARDS))
    handed = {("uid-q", "c"): ("GPU-n1-0",)}
    assert "held by default/q" in str(Grants(handed).refusal(mine, [mine, decided("q")], CARDS))
    assert Grants({}).refusal(mine, [mine, decided("q")], CARDS) is None


def test_of_two_running_pods_that_do_not_fit_exactly_one_may_start_again() -> None:
    """The card came back smaller, say."""
    both = [started("a"), started("b")]
    grants = Grants({})
    assert [bool(grants.refusal(known, both, CARDS)) for known in both] == [False, True]


def test_record_changed_by_hand_waits_for_earlier_grants() -> None:
    grants, first, second = Grants({}), decided("a", "0"), decided("b", "1")
    for known in (first, second):
        assert grants.refusal(known, [first, second], CARDS) is None
        grants.grant(known, CARDS)
    moved = decided("a", "1")
    assert "held by default/b" in str(grants.refusal(moved, [moved, second], CARDS))


def test_card_that_does_not_exist_is_not_counted() -> None:
    assert excess(holding(decided("p", "7"), CARDS), (), (card(0),)) is None


def test_handed_reads_cards_and_slices_from_environments() -> None:
    told = {
        ("a", "c"): {"NVIDIA_VISIBLE_DEVICES": "GPU-0,GPU-1", "X": "1"},
        ("b", "c"): {"NVIDIA_VISIBLE_DEVICES": "MIG-1", "MGPU_SLICES": "2g.20gb", "MGPU_PLACES": "0:4"},
        ("c", "c"): {"NVIDIA_VISIBLE_DEVICES": "GPU-0", "MGPU_SLICES": "4gb", "MGPU_PLACES": "0:3"},
        ("d", "c"): {"MGPU_CARRIER": "x"},
    }
    assert read_delivered(told) == {
        ("a", "c"): ("GPU-0", "GPU-1"),
        ("b", "c"): ("MIG-1",),
        ("c", "c"): ("GPU-0/4gb/3",),
    }
