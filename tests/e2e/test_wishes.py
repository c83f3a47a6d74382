"""Tests constraints end to end: the three processes, and a scheduling loop that calls the extender."""

import json

import pytest
from kubernetes.client import ApiException

from tests.e2e.bench import Bench, Json, share

POLICY = {"vke.volcengine.com/mgpu-compute-policy": "native-burst-share"}
"""Pods with it go to node-2, all others to node-1."""


def wishing(name: str, core: int = 10, more: Json | None = None, **annotations: str) -> Json:
    pod = share(name, core)
    keys = {f"mgpu.io/{key.replace('_', '-')}": value for key, value in annotations.items()}
    return {**pod, "metadata": {**pod["metadata"], "annotations": keys | (more or {})}}


def places(bench: Bench, *names: str) -> list[tuple[str, int]]:
    return [(bench.runs(name).spec.node_name, bench.cards(name)["c"][0]) for name in names]


def test_workers_of_a_job_take_different_cards_while_there_are_any(bench: Bench) -> None:
    names = [f"worker-{i}" for i in range(5)]
    for name in names:
        bench.create(wishing(name, spread_group="job"))
    assert len(set(places(bench, *names))) == 4


def test_pods_that_share_a_card_do_or_wait(bench: Bench) -> None:
    names = [f"part-{i}" for i in range(3)]
    for name in names:
        bench.create(wishing(name, 30, same_card_group="team"))
    assert len(set(places(bench, *names))) == 1
    bench.create(wishing("late", 30, same_card_group="team"))
    assert "3 same-card-group team is on another card, 1 core 20 percent short" in bench.waits("late")


def test_a_group_on_another_node_is_named(bench: Bench) -> None:
    bench.create(wishing("first", more=POLICY, same_card_group="team"))
    assert places(bench, "first") == [("node-2", 0)]
    bench.create(wishing("second", same_card_group="team"))
    assert "same-card-group team is on card 0 of node-2" in bench.waits("second")


def test_a_model_that_nobody_has_and_a_wish_that_nobody_can_meet(bench: Bench) -> None:
    bench.create(wishing("picky", card_models="H100"))
    assert "not among card-models" in bench.waits("picky")
    with pytest.raises(ApiException) as refused:
        bench.create(wishing("odd", card_models="A100", exclude_card_models="a100"))
    status = json.loads(refused.value.body or "")
    assert status["details"]["causes"][0]["field"] == "metadata.annotations[mgpu.io/exclude-card-models]"


def test_one_certain_card(bench: Bench) -> None:
    bench.create(wishing("p", card_uuids="GPU-node-1-3"))
    bench.exact("p")
    assert places(bench, "p") == [("node-1", 3)]
