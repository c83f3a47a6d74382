"""Containers with several id resources: one of them brings the cards, whichever the kubelet asks first."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.pods.identity import VOID, Refused
from mgpu.dialects.protocol import SHARE
from mgpu.model.ledger import Holding, Share
from playground.container_runtime import Unresolvable, resolve
from tests.builders import CORE as MGPU
from tests.builders import GIB, card, pod
from tests.deviceplugin.desk import Desk, asking, decided, recorded

CORE, RATIO, MEMORY = "koordinator.sh/gpu-core", "koordinator.sh/gpu-memory-ratio", "koordinator.sh/gpu-memory"
GPU_MEM = "aliyun.com/gpu-mem"
BOTH = {CORE: 2, RATIO: 2}
A, B = ["1", "2"], ["3", "4"]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path, wait_seconds=0.01)


def two(name: str, on: int, **more: Any) -> dict[str, Any]:
    return recorded(pod(name, asking("c", BOTH), **more), {"c": on})


def merged(desk: Desk, *names: str) -> dict[str, str]:
    """What the runtime makes of several CDI devices."""
    return dict(resolve(names, desk.folder / "cdi").env)


@pytest.mark.parametrize("asked", [(CORE, RATIO), (RATIO, CORE)], ids=["core first", "ratio first"])
@pytest.mark.parametrize("started", [(CORE, RATIO), (RATIO, CORE)], ids=["core first", "ratio first"])
def test_only_the_carrier_brings_cards_in_whatever_order(
    desk: Desk, asked: tuple[str, ...], started: tuple[str, ...]
) -> None:
    desk.pods.take(two("p", 1))
    answers = {resource: desk.admit(A, "uid-p", resource=resource) for resource in asked}
    assert answers[CORE].env["NVIDIA_VISIBLE_DEVICES"] == "GPU-n1-1"
    assert not answers[RATIO].env
    for resource in started:
        desk.start(A, resource=resource)
    for order in itertools.permutations([CORE, RATIO]):
        env = merged(desk, *(answers[resource].cdi[0] for resource in order))
        assert env["NVIDIA_VISIBLE_DEVICES"] == "GPU-n1-1"
    assert merged(desk, answers[RATIO].cdi[0]) == {"MGPU_CARRIER": CORE}


def test_the_same_resource_brings_cards_where_it_is_alone(desk: Desk) -> None:
    raw = recorded(pod("p", asking("c", BOTH), asking("d", {RATIO: 2})), {"c": 0, "d": 1})
    desk.pods.take(raw)
    desk.admit(A, "uid-p", "c", CORE)
    desk.admit(A, "uid-p", "c", RATIO)
    own = desk.admit(B, "uid-p", "d", RATIO)
    assert own.env["NVIDIA_VISIBLE_DEVICES"] == "GPU-n1-1"
    desk.start(B, resource=RATIO)
    assert desk.visible(own) == "GPU-n1-1"


def test_ids_that_an_init_container_lends_bring_it_cards_and_the_other_one_none(desk: Desk) -> None:
    raw = recorded(pod("p", asking("c", BOTH), init=(asking("i", {RATIO: 2}),)), {"i": 1, "c": 0})
    desk.pods.take(raw)
    init = desk.admit(A, "uid-p", "i", RATIO)
    ratio, core = (desk.admit(A, "uid-p", "c", resource) for resource in (RATIO, CORE))
    desk.start(A, resource=RATIO)
    assert desk.visible(init) == "GPU-n1-1"
    with pytest.raises(Unresolvable):
        desk.visible(core)
    desk.start(A, resource=CORE)
    assert merged(desk, core.cdi[0], ratio.cdi[0])["NVIDIA_VISIBLE_DEVICES"] == "GPU-n1-0"


def test_what_the_carrier_refuses_does_not_start_whatever_the_other_one_says(desk: Desk) -> None:
    desk.pods.take(two("p", 1))
    core, ratio = (desk.admit(A, "uid-p", resource=resource) for resource in (CORE, RATIO))
    desk.cards = (card(0), card(1, healthy=False))
    desk.start(A, resource=RATIO)
    with pytest.raises(Refused, match="unhealthy"):
        desk.start(A, resource=CORE)
    assert merged(desk, ratio.cdi[0]).keys() == {"MGPU_CARRIER"}
    with pytest.raises(Unresolvable):
        desk.visible(core)


def test_the_other_one_does_not_wait_for_the_decision(desk: Desk) -> None:
    desk.pods.take(pod("p", asking("c", BOTH)))
    assert [desk.admit(A, "uid-p", resource=resource).env for resource in (CORE, RATIO)] == [VOID, {}]
    desk.start(A, resource=RATIO)
    with pytest.raises(Refused, match="no cards have been decided"):
        desk.start(A, resource=CORE)


def test_without_ids_of_its_carrier_a_container_does_not_start(desk: Desk) -> None:
    """The kubelet drops what a node does not have at all from a pod's requests."""
    desk.pods.take(two("p", 1))
    desk.admit(A, "uid-p", resource=RATIO)
    with pytest.raises(Refused, match=f"gave it ids of {RATIO}, but none of {CORE}, which brings its cards"):
        desk.start(A, resource=RATIO)
    assert desk.resent
    assert [name for name, _ in desk.refusals] == ["p"]


def test_after_a_restart_both_are_known_by_their_own_names(desk: Desk) -> None:
    core, ratio = (desk.admit(A, "uid-p", resource=resource) for resource in (CORE, RATIO))
    desk.restart(two("p", 1))
    for resource in (RATIO, CORE):
        desk.start(A, resource=resource)
    assert merged(desk, ratio.cdi[0], core.cdi[0])["NVIDIA_VISIBLE_DEVICES"] == "GPU-n1-1"


@pytest.mark.parametrize("amounts", [{MEMORY: "8Gi"}, {"aliyun.com/gpu-mem": 4}], ids=["bytes", "another id resource"])
def test_a_share_brings_cards_where_nothing_else_does(desk: Desk, amounts: dict[str, object]) -> None:
    desk.pods.take(recorded(pod("p", asking("c", {**amounts, SHARE: 1})), {"c": 1}))
    answer = desk.admit(["7"], "uid-p", resource=SHARE)
    assert bool(answer.env) == (MEMORY in amounts)
    if MEMORY in amounts:
        desk.start(["7"], resource=SHARE)
        assert desk.visible(answer) == "GPU-n1-1"


def test_without_cdi_only_the_carrier_answers(tmp_path: Path) -> None:
    desk = Desk(tmp_path, cdi=False, wait_seconds=0.01)
    desk.pods.take(two("p", 1))
    ratio, core = (desk.admit(A, "uid-p", resource=resource) for resource in (RATIO, CORE))
    assert (ratio.env, core.env["NVIDIA_VISIBLE_DEVICES"]) == ({}, "GPU-n1-1")
    for resource in (CORE, RATIO):
        desk.start(A, resource=resource)
    desk.restart(two("p", 1))
    for resource in (CORE, RATIO):
        desk.start(A, resource=resource)


def test_without_cdi_cards_that_were_guessed_for_another_pod_start_nobody(tmp_path: Path) -> None:
    """Both ask for two of ratio; of one it is the carrier, and the kubelet takes them the other way round."""
    desk = Desk(tmp_path, cdi=False, wait_seconds=0.01)
    alone = recorded(pod("alone", asking("c", {RATIO: 2})), {"c": 0})
    alone["metadata"]["creationTimestamp"], both = "2026-01-01T00:00:00Z", two("p", 1)
    both["metadata"]["creationTimestamp"] = "2026-01-01T00:00:01Z"
    for raw in (alone, both):
        desk.pods.take(raw)
    assert desk.admit(A, "uid-p", resource=RATIO).env["NVIDIA_VISIBLE_DEVICES"] == "GPU-n1-0"
    desk.admit(A, "uid-p", resource=CORE)
    desk.admit(B, "uid-alone", resource=RATIO)
    for ids in (A, B):
        with pytest.raises(Refused, match="the cards of another pod were given to it"):
            desk.start(ids, resource=RATIO)


def test_a_card_has_room_for_all_vocabularies_together(desk: Desk) -> None:
    """mGPU and gpushare count bytes, Koordinator counts them in percent too: rounded up, 33 and 68 are too much."""
    full, sixty = 80 * GIB, 60 * GIB
    desk.pods.take(recorded(pod("k", asking("c", {MEMORY: sixty, SHARE: 1})), {"c": 1}))
    desk.pods.take(recorded(pod("g", asking("c", {GPU_MEM: 2})), {"c": 1}))
    desk.pods.take(decided("m", "1", mib=19 << 10))
    desk.pods.take(recorded(pod("r", asking("c", {MEMORY: full - sixty - 20, CORE: 2})), {"c": 1}))
    desk.admit(["1"], "uid-k", resource=SHARE)
    desk.admit(A, "uid-g", resource=GPU_MEM)
    desk.admit(A, "uid-m", resource=MGPU)
    desk.admit(A, "uid-r", resource=CORE)
    desk.start(["1"], resource=SHARE)
    desk.start(A, resource=GPU_MEM)
    with pytest.raises(Refused, match=r"memory 19\.0 GiB asked, 18\.0 GiB free; held by default/g, default/k"):
        desk.start(A)
    desk.pods.drop(recorded(pod("g", asking("c", {GPU_MEM: 2})), {"c": 1}))
    desk.start(A, resource=CORE)
    desk.pods.take(recorded(pod("s", asking("c", {CORE: 2, RATIO: 1})), {"c": 1}))
    desk.admit(B, "uid-s", resource=CORE)
    desk.admit(["9"], "uid-s", resource=RATIO)
    with pytest.raises(Refused, match="memory ratio 1% asked, 0% free; held by default/k, default/r"):
        desk.start(B, resource=CORE)


def test_a_card_that_another_plugin_gave_out_takes_no_share(desk: Desk) -> None:
    desk.pods.take(two("p", 1))
    core, _ = (desk.admit(A, "uid-p", resource=resource) for resource in (CORE, RATIO))
    desk.foreign = (Holding("u", "", "pod u", "", "nvidia", (Share("c", "GPU-n1-1", whole=True),)),)
    with pytest.raises(Refused, match="held by a pod of another namespace"):
        desk.start(A, resource=CORE)
    desk.foreign = (Holding("u", "", "pod u", "", "nvidia", (Share("c", "GPU-n1-0", whole=True),)),)
    desk.start(A, resource=CORE)
    assert desk.visible(core) == "GPU-n1-1"
    assert desk.given == ["p"]
