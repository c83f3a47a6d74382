"""What the forecast learns from pods and nodes: each pod counts once, and a restart learns the same."""

from collections.abc import Iterable
from typing import Any

import pytest

from mgpu.model.compute_resources import UNBOUNDED
from mgpu.model.device_object import write_device
from mgpu.model.pods import Node
from mgpu.settings import load_settings
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.forecast import LEARNING_POLICIES, MAX_WAITING_PODS
from scheduler.engine.learning.shapes import NodeClass, Shape, node_rows
from tests import builders as b

RECORD = {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": "0"}


def a_pod(name: str, core: int = 50, *, created: str = "", **more: Any) -> dict[str, Any]:
    raw = b.share(name, core, **more)
    raw["metadata"]["creationTimestamp"] = created
    return raw


def a_state(*pods: dict[str, Any], policy: str = "nodePolicy: fgd") -> ClusterCache:
    state = ClusterCache(load_settings(policy))
    for raw in pods:
        state.pod_changed(raw)
    return state


def learnt(state: ClusterCache) -> dict[int, float]:
    """Share in percent → how many pods of it."""
    return {shape.core // 10: count / 1000 for shape, count in state.forecast.counts()}


def test_pod_counts_once_in_its_life() -> None:
    state = a_state()
    state.forecast.refresh()
    for raw in (
        a_pod("p"),
        a_pod("p", annotations=RECORD, node="n1"),
        a_pod("p", annotations=RECORD, node="n1", phase="Succeeded"),
    ):
        state.pod_changed(raw)
    state.pod_gone(a_pod("p"))
    state.pod_changed(a_pod("rejected", 20))
    assert learnt(state) == {50: pytest.approx(1, abs=0.001), 20: 1}


def test_pod_of_the_same_name_counts_again() -> None:
    state = a_state(a_pod("p", uid="one"), a_pod("p", uid="two"))
    state.forecast.refresh()
    assert learnt(state) == {50: pytest.approx(2, abs=0.001)}


def test_pods_without_a_valid_gpu_request_do_not_count() -> None:
    state = a_state(b.pod("plain", b.container()), a_pod("odd", 120))
    state.forecast.refresh()
    assert learnt(state) == {}
    assert state.forecast.judges == {}


def test_pods_without_cards_count_up_to_the_allowance_of_their_namespace() -> None:
    """A tenant creates and deletes pods that wait for ever, and pods that name a node and fail there."""
    state = a_state(a_pod("p"))
    state.forecast.refresh()
    for i in range(3 * MAX_WAITING_PODS):
        raw = a_pod(f"flood{i}", 20, namespace="tenant", **({"node": "n1"} if i % 2 else {}))
        state.pod_changed(raw)
        state.pod_gone(raw)
    state.pod_changed(a_pod("q"))
    assert learnt(state) == {50: pytest.approx(2, abs=0.03), 20: pytest.approx(MAX_WAITING_PODS, rel=0.02)}


def test_pods_beyond_the_allowance_count_once_they_have_cards() -> None:
    state = a_state()
    state.forecast.refresh()
    names = [f"p{i}" for i in range(MAX_WAITING_PODS + 2)]
    for name in names:
        state.pod_changed(a_pod(name))
    assert learnt(state) == {50: pytest.approx(MAX_WAITING_PODS, rel=0.02)}
    for name in names:
        state.pod_changed(a_pod(name, annotations=RECORD, node="n1"))
    assert learnt(state) == {50: pytest.approx(MAX_WAITING_PODS + 2, rel=0.02)}
    state.pod_changed(a_pod("another"))
    assert learnt(state) == {50: pytest.approx(MAX_WAITING_PODS + 3, rel=0.02)}


def test_restart_counts_all_pods_with_cards_and_waiting_pods_up_to_the_allowance() -> None:
    placed = [a_pod(f"p{i}", annotations=RECORD, node="n1") for i in range(MAX_WAITING_PODS + 5)]
    state = a_state(*placed, *(a_pod(f"w{i}", 20) for i in range(MAX_WAITING_PODS + 5)))
    state.forecast.refresh()
    assert learnt(state) == {
        50: pytest.approx(MAX_WAITING_PODS + 5, rel=0.05),
        20: pytest.approx(MAX_WAITING_PODS, rel=0.05),
    }


def _pods(names: Iterable[int]) -> list[dict[str, Any]]:
    return [a_pod(f"p{i}", 10 + i % 5, created=f"2026-01-01T00:{i:02}:00Z") for i in names]


def test_restart_learns_the_same_from_pods_in_any_order() -> None:
    live = a_state()
    live.forecast.refresh()
    for raw in _pods(range(40)):
        live.pod_changed(raw)
    restarted = a_state(*_pods(reversed(range(40))))
    restarted.forecast.refresh()
    assert restarted.forecast.counts() == live.forecast.counts()


def test_refresh_replaces_judges_only_if_pods_or_nodes_have_changed() -> None:
    state = a_state()
    assert state.forecast.judges == {}
    state.pod_changed(a_pod("p"))
    assert state.forecast.refresh()
    before = state.forecast.judges
    assert list(before) == ["fgd"]
    assert not state.forecast.refresh()
    assert state.forecast.judges is before
    state.node_changed(b.node("n1"))
    state.device_changed(write_device(Node("n1"), "", b.cards(2)))
    assert state.forecast.refresh()
    assert state.forecast.judges is not before
    state.node_changed(b.node("n1", seen="now"))  # the same machine
    assert not state.forecast.refresh()


@pytest.mark.parametrize(
    ("settings", "made"),
    [
        ("", []),
        ("cardPolicy: spread", []),
        ("cardPolicy: fgd", ["fgd"]),
        ("dialects: {mgpu: {MGPUPolicy: fgd}}", ["fgd"]),
        (
            "cardPolicy: fgd\n"
            "dialects: {mgpu: {MGPUPolicy: spread}, gpushare: {policy: spread}, koordinator: {policy: spread}}",
            [],
        ),
    ],
)
def test_refresh_makes_judges_only_for_policies_in_use(settings: str, made: list[str]) -> None:
    state = a_state(a_pod("p"), policy=settings)
    state.forecast.refresh()
    assert list(state.forecast.judges) == made


def test_refresh_makes_a_judge_for_the_policy_of_a_pod() -> None:
    state = a_state(a_pod("p"), policy="")
    state.forecast.refresh()
    state.pod_changed(a_pod("q", annotations={"mgpu.io/card-policy": LEARNING_POLICIES[0]}))
    state.forecast.refresh()
    assert list(state.forecast.judges) == [LEARNING_POLICIES[0]]


def asking_for_more_than_any_node_has(name: str, policy: str) -> dict[str, Any]:
    """Quantities as an API server stores them, in every resource that is summed up over containers."""
    resources = {"limits": {"nvidia.com/gpu": "1", "cpu": "9E", "memory": "9E", "ephemeral-storage": "9E"}}
    rows = [{"name": f"c{i}", "resources": resources} for i in range(3)]
    raw = b.pod(name, *rows, annotations={"mgpu.io/card-policy": policy})
    raw["spec"]["overhead"] = {"cpu": "9E", "memory": "9223372036854775807"}
    return raw


@pytest.mark.parametrize("policy", LEARNING_POLICIES)
def test_refresh_with_the_largest_amounts_makes_a_judge(policy: str) -> None:
    state = a_state(asking_for_more_than_any_node_has("huge", policy), a_pod("p"), policy=f"nodePolicy: {policy}")
    state.node_changed(b.node())
    state.device_changed(write_device(Node("n1"), "", b.cards(2)))
    state.forecast.refresh()
    assert set(state.forecast.judges) == {policy}
    rows = node_rows(NodeClass(64_000, 256 << 30, 2, b.card().model, 80 << 30), UNBOUNDED, [[1000, 1000]])
    for shape, _ in state.forecast.counts():
        assert len(state.forecast.judges[policy].keys(rows, shape)) == 1


def test_refresh_keeps_the_judge_of_a_policy_that_fails_and_replaces_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    both = "{nodePolicy: fragmentation, cardPolicy: fgd}"
    state = a_state(a_pod("p"), policy=both)
    state.forecast.refresh()
    before = state.forecast.judges
    monkeypatch.setattr("scheduler.engine.policies.fgd.Fgd", lambda _: 1 // 0)
    state.pod_changed(a_pod("q", 20))
    state.forecast.refresh()
    assert state.forecast.judges["fgd"] is before["fgd"]
    assert state.forecast.judges["fragmentation"] is not before["fragmentation"]
    assert "the policy fgd cannot learn from the latest pods" in caplog.text


def test_shapes_name_only_models_of_present_nodes() -> None:
    state = a_state()
    state.node_changed(b.node("n1"))
    state.device_changed(write_device(Node("n1"), "", b.cards(2)))
    state.pod_changed(a_pod("p", annotations={"mgpu.io/exclude-card-models": "A100"}))
    state.forecast.refresh()
    assert [shape.models for shape, _ in state.forecast.counts()] == [("",)]
    state.node_gone(b.node("n1"))
    state.pod_changed(a_pod("q", annotations={"mgpu.io/exclude-card-models": "A100"}))
    assert Shape(0, 0, 1, 500, 1 << 30) in [shape for shape, _ in state.forecast.counts()]
