"""The candidates of an Allocate call, and the environment of a container."""

import pytest

from deviceplugin.pods.gpu_pod import GpuPod
from deviceplugin.pods.identity import Refused, Target, candidates, environment
from tests.builders import CORE, card, cards, container, pod, share
from tests.deviceplugin import records
from tests.deviceplugin.records import ASSUMED, RECORD, read


def decided(card_list: str = "1") -> GpuPod:
    return read(records.decided("p", card_list, 50))


def found(*pods: GpuPod, amount: int = 50, answered: set[tuple[str, str]] | None = None) -> list[str]:
    return [str(target) for target in candidates(pods, CORE, amount, answered or set())]


def test_candidates_are_the_pods_that_request_the_amount() -> None:
    assert found(read(share("a")), read(share("b")), read(share("c", core=20))) == [
        "default/a container c",
        "default/b container c",
    ]


def test_started_ended_and_answered_pods_are_no_candidates() -> None:
    started = {**share("a"), "status": {"phase": "Running"}}
    assert found(read(started), read(share("b", phase="Failed")), read(share("c")), answered={("uid-c", "c")}) == []


def test_only_the_next_container_of_a_pod_is_a_candidate() -> None:
    two = read(pod("p", container("a", 20, 512), container("b", 30, 512)))
    assert found(two, amount=30) == []
    assert found(two, amount=30, answered={("uid-p", "a")}) == ["default/p container b"]


def test_environment_has_the_cards_of_the_record() -> None:
    env = environment(Target(decided(), "c"), cards(2))
    assert env["NVIDIA_VISIBLE_DEVICES"] == "GPU-n1-1"
    assert environment(Target(decided("GPU-n1-0"), "c"), cards(2))["MGPU_CARDS"] == "0"


def test_several_cards_are_in_the_order_of_their_indexes() -> None:
    whole = pod("p", container("c", 200), annotations={ASSUMED: "true", RECORD + "c": "2,0"})
    env = environment(Target(read(whole), "c"), cards(3))
    assert (env["NVIDIA_VISIBLE_DEVICES"], env["MGPU_CARDS"]) == ("GPU-n1-0,GPU-n1-2", "0,2")


@pytest.mark.parametrize(
    ("gpu_pod", "reason"),
    [
        (read(share("p")), "no cards have been decided"),
        (decided("7"), r"names card 7, which this node does not have; it has 0 \(GPU-n1-0\), 1 \(GPU-n1-1\)"),
        (decided("GPU-elsewhere"), "names card GPU-elsewhere"),
        (decided("0"), r"card 0 \(GPU-n1-0\) is unhealthy"),
        (decided("0,1"), "names 2 cards"),
        (decided("zero"), "'zero' is neither"),
    ],
)
def test_start_is_refused_with_the_reason(gpu_pod: GpuPod, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        environment(Target(gpu_pod, "c"), (card(0, healthy=False), card(1)))


def test_two_names_of_one_card_count_once() -> None:
    twice = pod("p", container("c", 200), annotations={ASSUMED: "true", RECORD + "c": "0,GPU-n1-0"})
    with pytest.raises(Refused, match="names 1 cards, but it requests 2"):
        environment(Target(read(twice), "c"), cards(2))
