"""Whose a call is, and what that container gets."""

from typing import Any

import pytest

from deviceplugin.pods.gpu_pod import GpuPod, read_gpu_pod
from deviceplugin.pods.identity import Refused, Target, candidates, environment
from mgpu.settings import load_settings
from tests.builders import CORE, card, cards, container, pod, share

ASSUMED = "vke.volcengine.com/assumed"
RECORD = "vke.volcengine.com/gpu-index-container-"


def read(raw: dict[str, Any]) -> GpuPod:
    known = read_gpu_pod(raw, load_settings())
    assert known is not None
    return known


def decided(card_list: str = "1", **more: Any) -> GpuPod:
    return read(share("p", annotations={ASSUMED: "true", RECORD + "c": card_list}, **more))


def found(*pods: GpuPod, amount: int = 50, served: set[tuple[str, str]] | None = None) -> list[str]:
    return [str(target) for target in candidates(pods, CORE, amount, served or set())]


def test_candidates_are_all_pods_that_wait_for_the_amount() -> None:
    assert found(read(share("a")), read(share("b")), read(share("c", core=20))) == [
        "default/a container c",
        "default/b container c",
    ]


def test_started_ended_and_served_pods_are_no_candidates() -> None:
    started = {**share("a"), "status": {"phase": "Running"}}
    assert found(read(started), read(share("b", phase="Failed")), read(share("c")), served={("uid-c", "c")}) == []


def test_candidate_of_a_pod_is_its_next_container() -> None:
    two = read(pod("p", container("a", 20, 512), container("b", 30, 512)))
    assert found(two, amount=30) == []
    assert found(two, amount=30, served={("uid-p", "a")}) == ["default/p container b"]


def test_environment_has_the_cards_of_the_record() -> None:
    env = environment(Target(decided(), "c"), cards(2))
    assert env["NVIDIA_VISIBLE_DEVICES"] == "GPU-n1-1"
    assert environment(Target(decided("GPU-n1-0"), "c"), cards(2))["MGPU_CARDS"] == "0"


def test_several_cards_are_in_the_order_of_their_indexes() -> None:
    whole = pod("p", container("c", 200), annotations={ASSUMED: "true", RECORD + "c": "2,0"})
    env = environment(Target(read(whole), "c"), cards(3))
    assert (env["NVIDIA_VISIBLE_DEVICES"], env["MGPU_CARDS"]) == ("GPU-n1-0,GPU-n1-2", "0,2")


@pytest.mark.parametrize(
    ("known", "why"),
    [
        (read(share("p")), "no cards have been decided"),
        (decided("7"), r"names card 7, which this node does not have; it has 0 \(GPU-n1-0\), 1 \(GPU-n1-1\)"),
        (decided("GPU-elsewhere"), "names card GPU-elsewhere"),
        (decided("0"), r"card 0 \(GPU-n1-0\) is unhealthy"),
        (decided("0,1"), "names 2 cards"),
        (decided("zero"), "'zero' is neither"),
    ],
)
def test_start_is_refused_with_the_reason(known: GpuPod, why: str) -> None:
    with pytest.raises(Refused, match=why):
        environment(Target(known, "c"), (card(0, healthy=False), card(1)))


def test_two_names_of_one_card_count_once() -> None:
    twice = pod("p", container("c", 200), annotations={ASSUMED: "true", RECORD + "c": "0,GPU-n1-0"})
    with pytest.raises(Refused, match="names 1 cards, it requests 2"):
        environment(Target(read(twice), "c"), cards(2))
