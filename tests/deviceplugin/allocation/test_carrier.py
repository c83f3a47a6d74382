"""Containers that request several id resources: one of them, the carrier, brings the cards."""

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
from tests.deviceplugin.fake_node import FakeNode
from tests.deviceplugin.records import decided, recorded, requesting

CORE, RATIO, MEMORY = "koordinator.sh/gpu-core", "koordinator.sh/gpu-memory-ratio", "koordinator.sh/gpu-memory"
GPU_MEM = "aliyun.com/gpu-mem"
BOTH = {CORE: 2, RATIO: 2}
A, B = ["1", "2"], ["3", "4"]


@pytest.fixture
def fake_node(tmp_path: Path) -> FakeNode:
    return FakeNode(tmp_path, wait_seconds=0.01)


def two(name: str, on: int, **more: Any) -> dict[str, Any]:
    return recorded(pod(name, requesting("c", BOTH), **more), {"c": on})


def merged(fake_node: FakeNode, *names: str) -> dict[str, str]:
    """Return the environment that the runtime makes of several CDI devices."""
    return dict(resolve(names, fake_node.folder / "cdi").env)


@pytest.mark.parametrize("asked", [(CORE, RATIO), (RATIO, CORE)], ids=["core first", "ratio first"])
@pytest.mark.parametrize("started", [(CORE, RATIO), (RATIO, CORE)], ids=["core first", "ratio first"])
def test_only_the_carrier_brings_cards_in_any_order(
    fake_node: FakeNode, asked: tuple[str, ...], started: tuple[str, ...]
) -> None:
    fake_node.pods.take(two("p", 1))
    answers = {resource: fake_node.admit(A, "uid-p", resource=resource) for resource in asked}
    assert answers[CORE].env["NVIDIA_VISIBLE_DEVICES"] == "GPU-n1-1"
    assert not answers[RATIO].env
    for resource in started:
        fake_node.start(A, resource=resource)
    for order in itertools.permutations([CORE, RATIO]):
        env = merged(fake_node, *(answers[resource].cdi[0] for resource in order))
        assert env["NVIDIA_VISIBLE_DEVICES"] == "GPU-n1-1"
    assert merged(fake_node, answers[RATIO].cdi[0]) == {"MGPU_CARRIER": CORE}


def test_resource_of_another_carrier_brings_cards_if_it_is_alone(fake_node: FakeNode) -> None:
    raw = recorded(pod("p", requesting("c", BOTH), requesting("d", {RATIO: 2})), {"c": 0, "d": 1})
    fake_node.pods.take(raw)
    fake_node.admit(A, "uid-p", "c", CORE)
    fake_node.admit(A, "uid-p", "c", RATIO)
    own = fake_node.admit(B, "uid-p", "d", RATIO)
    assert own.env["NVIDIA_VISIBLE_DEVICES"] == "GPU-n1-1"
    fake_node.start(B, resource=RATIO)
    assert fake_node.visible(own) == "GPU-n1-1"


def test_reused_ids_bring_cards_only_to_the_container_they_carry(fake_node: FakeNode) -> None:
    raw = recorded(pod("p", requesting("c", BOTH), init=(requesting("i", {RATIO: 2}),)), {"i": 1, "c": 0})
    fake_node.pods.take(raw)
    init = fake_node.admit(A, "uid-p", "i", RATIO)
    ratio, core = (fake_node.admit(A, "uid-p", "c", resource) for resource in (RATIO, CORE))
    fake_node.start(A, resource=RATIO)
    assert fake_node.visible(init) == "GPU-n1-1"
    with pytest.raises(Unresolvable):
        fake_node.visible(core)
    fake_node.start(A, resource=CORE)
    assert merged(fake_node, core.cdi[0], ratio.cdi[0])["NVIDIA_VISIBLE_DEVICES"] == "GPU-n1-0"


def test_container_refused_by_its_carrier_does_not_start(fake_node: FakeNode) -> None:
    fake_node.pods.take(two("p", 1))
    core, ratio = (fake_node.admit(A, "uid-p", resource=resource) for resource in (CORE, RATIO))
    fake_node.cards = (card(0), card(1, healthy=False))
    fake_node.start(A, resource=RATIO)
    with pytest.raises(Refused, match="unhealthy"):
        fake_node.start(A, resource=CORE)
    assert merged(fake_node, ratio.cdi[0]).keys() == {"MGPU_CARRIER"}
    with pytest.raises(Unresolvable):
        fake_node.visible(core)


def test_only_the_carrier_waits_for_the_decision(fake_node: FakeNode) -> None:
    fake_node.pods.take(pod("p", requesting("c", BOTH)))
    assert [fake_node.admit(A, "uid-p", resource=resource).env for resource in (CORE, RATIO)] == [VOID, {}]
    fake_node.start(A, resource=RATIO)
    with pytest.raises(Refused, match="no cards have been decided"):
        fake_node.start(A, resource=CORE)


def test_container_without_ids_of_its_carrier_is_refused(fake_node: FakeNode) -> None:
    """The kubelet ignores requests for resources that a node does not advertise."""
    fake_node.deploy(two("p", 1), A, resource=RATIO)
    with pytest.raises(Refused, match=f"gave it ids of {RATIO}, but none of {CORE}, which brings its cards"):
        fake_node.start(A, resource=RATIO)
    assert fake_node.resent
    assert [name for name, _ in fake_node.refusals] == ["p"]


def test_restarted_agent_finds_the_answers_of_both_resources(fake_node: FakeNode) -> None:
    core, ratio = (fake_node.admit(A, "uid-p", resource=resource) for resource in (CORE, RATIO))
    fake_node.restart(two("p", 1))
    for resource in (RATIO, CORE):
        fake_node.start(A, resource=resource)
    assert merged(fake_node, ratio.cdi[0], core.cdi[0])["NVIDIA_VISIBLE_DEVICES"] == "GPU-n1-1"


@pytest.mark.parametrize("amounts", [{MEMORY: "8Gi"}, {"aliyun.com/gpu-mem": 4}], ids=["bytes", "another id resource"])
def test_share_resource_is_the_carrier_if_there_is_no_other(fake_node: FakeNode, amounts: dict[str, object]) -> None:
    answer = fake_node.deploy(
        recorded(pod("p", requesting("c", {**amounts, SHARE: 1})), {"c": 1}), ["7"], resource=SHARE
    )
    assert bool(answer.env) == (MEMORY in amounts)
    if MEMORY in amounts:
        fake_node.start(["7"], resource=SHARE)
        assert fake_node.visible(answer) == "GPU-n1-1"


def test_without_cdi_only_the_carrier_brings_cards(tmp_path: Path) -> None:
    fake_node = FakeNode(tmp_path, cdi=False, wait_seconds=0.01)
    fake_node.pods.take(two("p", 1))
    ratio, core = (fake_node.admit(A, "uid-p", resource=resource) for resource in (RATIO, CORE))
    assert (ratio.env, core.env["NVIDIA_VISIBLE_DEVICES"]) == ({}, "GPU-n1-1")
    for resource in (CORE, RATIO):
        fake_node.start(A, resource=resource)
    fake_node.restart(two("p", 1))
    for resource in (CORE, RATIO):
        fake_node.start(A, resource=resource)


def test_without_cdi_cards_of_a_pod_with_another_carrier_are_refused(tmp_path: Path) -> None:
    """Both request two of ratio, which is the carrier of one only. The kubelet admits them in the other order."""
    fake_node = FakeNode(tmp_path, cdi=False, wait_seconds=0.01)
    alone = recorded(pod("alone", requesting("c", {RATIO: 2})), {"c": 0})
    alone["metadata"]["creationTimestamp"], both = "2026-01-01T00:00:00Z", two("p", 1)
    both["metadata"]["creationTimestamp"] = "2026-01-01T00:00:01Z"
    for raw in (alone, both):
        fake_node.pods.take(raw)
    assert fake_node.admit(A, "uid-p", resource=RATIO).env["NVIDIA_VISIBLE_DEVICES"] == "GPU-n1-0"
    fake_node.admit(A, "uid-p", resource=CORE)
    fake_node.admit(B, "uid-alone", resource=RATIO)
    for ids in (A, B):
        with pytest.raises(Refused, match="was given the cards of another container at admission"):
            fake_node.start(ids, resource=RATIO)


def test_capacity_of_a_card_counts_all_vocabularies_together(fake_node: FakeNode) -> None:
    """mGPU and gpushare count bytes. Koordinator also counts percents: 33 and 68, rounded up, are too much."""
    full, sixty = 80 * GIB, 60 * GIB
    fake_node.pods.take(recorded(pod("k", requesting("c", {MEMORY: sixty, SHARE: 1})), {"c": 1}))
    fake_node.pods.take(recorded(pod("g", requesting("c", {GPU_MEM: 2})), {"c": 1}))
    fake_node.pods.take(decided("m", "1", mib=19 << 10))
    fake_node.pods.take(recorded(pod("r", requesting("c", {MEMORY: full - sixty - 20, CORE: 2})), {"c": 1}))
    fake_node.admit(["1"], "uid-k", resource=SHARE)
    fake_node.admit(A, "uid-g", resource=GPU_MEM)
    fake_node.admit(A, "uid-m", resource=MGPU)
    fake_node.admit(A, "uid-r", resource=CORE)
    fake_node.start(["1"], resource=SHARE)
    fake_node.start(A, resource=GPU_MEM)
    with pytest.raises(Refused, match=r"memory 19\.0 GiB requested, 18\.0 GiB free; held by default/g, default/k"):
        fake_node.start(A)
    fake_node.pods.drop(recorded(pod("g", requesting("c", {GPU_MEM: 2})), {"c": 1}))
    fake_node.start(A, resource=CORE)
    fake_node.deploy(recorded(pod("s", requesting("c", {CORE: 2, RATIO: 1})), {"c": 1}), B, resource=CORE)
    fake_node.admit(["9"], "uid-s", resource=RATIO)
    with pytest.raises(Refused, match="memory ratio 1% requested, 0% free; held by default/k, default/r"):
        fake_node.start(B, resource=CORE)


def test_card_given_out_by_another_plugin_is_refused(fake_node: FakeNode) -> None:
    fake_node.pods.take(two("p", 1))
    core, _ = (fake_node.admit(A, "uid-p", resource=resource) for resource in (CORE, RATIO))
    fake_node.foreign = (Holding("u", "", "pod u", "", "nvidia", (Share("c", "GPU-n1-1", whole=True),)),)
    with pytest.raises(Refused, match="held by a pod of another namespace"):
        fake_node.start(A, resource=CORE)
    fake_node.foreign = (Holding("u", "", "pod u", "", "nvidia", (Share("c", "GPU-n1-0", whole=True),)),)
    fake_node.start(A, resource=CORE)
    assert fake_node.visible(core) == "GPU-n1-1"
    assert fake_node.granted == ["p"]
