"""The collector computes the metrics of the cluster's current state."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from scheduler.api.collector import ClusterCollector, Totals
from tests import builders as b
from tests.scheduler.fake import Replica, cluster

INDEX = "vke.volcengine.com/gpu-index-container-c"
GIB = 1 << 30
MODEL = {"model": "A100-SXM4-80GB"}


class Watch:
    def __init__(self, restarts: int, *, synced: bool, broken_for: float = 0.0) -> None:
        self.restarts, self.synced, self.broken_for = restarts, synced, broken_for


@pytest.fixture
def replica() -> Replica:
    return Replica(cluster(("n1", 2), ("n2", 1), ("n3", 0)))


def running(name: str, core: int, mib: int, node: str, index: int) -> dict[str, Any]:
    record = {"vke.volcengine.com/assumed": "true", INDEX: str(index)}
    return b.share(name, core, mib, annotations=record, node=node, phase="Running")


def samples(replica: Replica) -> CollectorRegistry:
    process: Any = replica
    registry = CollectorRegistry()
    registry.register(ClusterCollector(process))
    return registry


def test_card_metrics_sum_up_cards_and_holdings(replica: Replica) -> None:
    replica.api.put("pods", running("p", 30, 1024, "n1", 0))
    replica.api.put("pods", running("q", 20, 2048, "n1", 0))
    replica.deliver()
    value = samples(replica).get_sample_value
    assert value("mgpu_nodes") == 2
    assert value("mgpu_cards", {**MODEL, "health": "healthy"}) == 3
    assert value("mgpu_cards_idle", MODEL) == 2
    assert (value("mgpu_core_capacity_cards", MODEL), value("mgpu_core_used_cards", MODEL)) == (3, 0.5)
    assert (value("mgpu_memory_capacity_bytes", MODEL), value("mgpu_memory_used_bytes", MODEL)) == (240 * GIB, 3 * GIB)
    assert value("mgpu_dialect_pods", {"dialect": "mgpu"}) == 2
    assert value("mgpu_dialect_core_cards", {"dialect": "mgpu"}) == 0.5
    assert value("mgpu_dialect_memory_bytes", {"dialect": "mgpu"}) == 3 * GIB


def test_fragmentation_is_the_fraction_of_free_compute_on_used_cards(replica: Replica) -> None:
    assert samples(replica).get_sample_value("mgpu_fragmentation_ratio") == 0
    replica.api.put("pods", running("p", 50, 1024, "n1", 0))
    replica.deliver()
    assert samples(replica).get_sample_value("mgpu_fragmentation_ratio") == pytest.approx(0.5 / 2.5)
    for name, node, index in (("q", "n1", 1), ("r", "n2", 0)):
        replica.api.put("pods", running(name, 50, 1024, node, index))
    replica.deliver()
    assert samples(replica).get_sample_value("mgpu_fragmentation_ratio") == 1


def test_totals_after_changes_equal_new_totals(replica: Replica) -> None:
    totals = Totals(replica.state, lambda: None)
    totals.sums()
    for change in (
        lambda: replica.api.put("pods", running("p", 30, 1024, "n1", 0)),
        lambda: replica.api.put("pods", running("q", 90, 1024, "n2", 0)),
        lambda: replica.api.remove("pods", "p"),
        lambda: replica.api.remove("nodes", "n2"),
        lambda: replica.api.put("nodes", b.node("n4")),
        lambda: replica.api.remove("devices", "n1"),
    ):
        change()
        replica.deliver()
        replica.state.refresh()  # forgets the versions of nodes that are gone
        assert +totals.sums() == +Totals(replica.state, lambda: None).sums()


def test_totals_pause_after_each_node_that_is_read(replica: Replica) -> None:
    rests: list[None] = []
    totals = Totals(replica.state, lambda: rests.append(None))
    totals.sums()
    assert len(rests) == 3
    replica.api.put("pods", running("p", 30, 1024, "n1", 0))
    replica.deliver()
    totals.sums()
    assert len(rests) == 4


def test_replica_metrics_show_leadership_and_watches(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    watches = {"nodes": Watch(2, synced=True), "pods": Watch(0, synced=False, broken_for=7.5)}
    monkeypatch.setattr(replica, "watches", lambda: watches)
    monkeypatch.setattr(replica, "not_ready_reason", lambda: "not in sync yet: pods")
    replica.leading = False
    value = samples(replica).get_sample_value
    assert [value(f"mgpu_{name}") for name in ("leader", "labelled", "ready", "decides")] == [0, 1, 0, 0]
    assert [value("mgpu_watch_synced", {"watch": watch}) for watch in ("nodes", "pods")] == [1, 0]
    assert value("mgpu_watch_broken_seconds", {"watch": "pods"}) == 7.5
    assert value("mgpu_watch_restarts_total", {"watch": "nodes"}) == 2


def test_mtgpupod_metrics_count_phases_and_conditions(replica: Replica) -> None:
    bound = {"type": "Bound", "status": "False", "reason": "NoCardFree", "message": "…"}
    statuses: tuple[dict[str, Any], ...] = ({"phase": "Failed", "conditions": [bound]}, {"phase": "Odd"}, {})
    for i, status in enumerate(statuses):
        replica.api.put("mtgpupods", {**b.mtgpupod(f"m{i}"), "status": status})
    replica.deliver()
    value = samples(replica).get_sample_value
    assert [value("mgpu_mtgpupods", {"phase": phase}) for phase in ("Failed", "Pending", "Running")] == [1, 2, 0]
    labels = {"type": "Bound", "status": "False", "reason": "NoCardFree"}
    assert value("mgpu_mtgpupod_conditions", labels) == 1


def test_undecided_metric_counts_pods_bound_without_cards(replica: Replica) -> None:
    replica.api.put("pods", b.share("p", 60, node="n1"))
    replica.deliver()
    assert samples(replica).get_sample_value("mgpu_undecided_pods") == 1
