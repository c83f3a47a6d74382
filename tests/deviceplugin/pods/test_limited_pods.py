"""Which pods are those of MtgpuPods, and what they are limited to."""

from typing import Any

import pytest

from deviceplugin.pods.gpu_pod import LimitedPod, read_limited
from deviceplugin.pods.node_pods import NodePods
from mgpu.dialects import mtgpu
from mgpu.settings import load_settings
from tests.builders import container, pod, share
from tests.deviceplugin.mtgpu import GIB, occupy_pod, pod_of

CARD = "GPU-n1-1"


def changed(meta: dict[str, Any], **more: Any) -> dict[str, Any]:
    raw = pod_of("p", CARD)
    return {**raw, "metadata": {**raw["metadata"], **meta}, **more}


def test_a_pod_of_an_mtgpupod_is_known_with_its_card_and_share() -> None:
    assert read_limited(pod_of("p", CARD, "0.125", "0.5")) == LimitedPod("default", "p", "uid-p", CARD, 125, 500, GIB)


def test_a_container_that_somebody_put_before_its_own_has_no_card() -> None:
    raw = pod_of("p", CARD)
    raw["spec"]["containers"].insert(0, {"name": "mesh", "image": "m", "env": [{"name": "A", "value": "B"}]})
    found = read_limited(raw)
    assert found is not None
    assert found.card == CARD


@pytest.mark.parametrize(
    "raw",
    [
        changed({"ownerReferences": []}),
        changed({"ownerReferences": [{**pod_of("p", CARD)["metadata"]["ownerReferences"][0], "controller": False}]}),
        changed({"ownerReferences": [{"apiVersion": "v1", "kind": "MtgpuPod", "controller": True}]}),
        changed({"ownerReferences": [{"apiVersion": mtgpu.API_VERSION, "kind": "Other", "controller": True}]}),
        changed({"annotations": {}}),
        changed({"annotations": {**pod_of("p", CARD)["metadata"]["annotations"], mtgpu.REQUEST: "NaN"}}),
        changed({}, spec={"containers": [container("c")]}),
        changed({}, spec={"containers": [{"name": "c", "env": [{"name": mtgpu.VISIBLE}]}]}),
        occupy_pod(),
        share(),
    ],
    ids=[
        "no owner",
        "an owner that is no controller",
        "another group",
        "another kind",
        "no annotations",
        "annotations that say nothing",
        "no card",
        "a card from elsewhere",
        "an occupy pod",
        "a share",
    ],
)
def test_others_are_none(raw: dict[str, Any]) -> None:
    assert read_limited(raw) is None


def test_the_store_has_them_while_they_run_and_tells_of_every_change() -> None:
    changes: list[int] = []
    pods = NodePods(load_settings(), lambda: changes.append(1))
    pods.take(pod("plain", container("c")))
    pods.take(pod_of("q", CARD))
    pods.take(pod_of("p", CARD))
    assert [one.name for one in pods.limited()] == ["p", "q"]
    assert not pods.all(), "they ask the kubelet for nothing, so they are nobody's to refuse"
    assert len(changes) == 3
    pods.take(pod_of("q", CARD, phase="Running"))
    assert len(changes) == 3
    pods.take(pod_of("q", CARD, "0.3"))
    assert [one.request for one in pods.limited()] == [200, 300]
    pods.take(pod_of("q", CARD, "0.3", phase="Succeeded"))
    assert [one.name for one in pods.limited()] == ["p"]
    pods.drop(pod("p"))
    assert not pods.limited()
    assert len(changes) == 6


def test_one_that_is_orphaned_is_limited_until_it_ends() -> None:
    pods = NodePods(load_settings(), lambda: None)
    pods.take(pod_of("p", CARD))
    pods.take(changed({"ownerReferences": []}))
    assert [one.name for one in pods.limited()] == ["p"]
    pods.take(changed({"ownerReferences": []}, status={"phase": "Failed"}))
    assert not pods.limited()
