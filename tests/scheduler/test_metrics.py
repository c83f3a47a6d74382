"""The scheduler counts its decisions and rejections, and serves them on the metrics address only."""

from typing import Any

import pytest
from werkzeug.test import Client

from scheduler import metrics
from scheduler.api.app import listeners
from tests import builders as b
from tests.scheduler.fake import Replica, clients, cluster, review


class Since:
    """What has been added to a sample since this was made: the counters are the process's."""

    def __init__(self, name: str, **labels: str) -> None:
        self._name, self._labels, self._before = name, labels, 0.0
        self._before = self.added

    @property
    def added(self) -> float:
        return (metrics.REGISTRY.get_sample_value(self._name, self._labels) or 0.0) - self._before


def decisions(policy: str = "binpack", dialect: str = "mgpu") -> Since:
    return Since("mgpu_decisions_total", policy=policy, dialect=dialect)


def rejections(stage: str, reason: str) -> Since:
    return Since("mgpu_rejections_total", stage=stage, reason=reason)


def reviews(result: str) -> Since:
    return Since("mgpu_admission_reviews_total", path="bind-admission", kind="Binding", result=result)


@pytest.fixture
def replica() -> Replica:
    return Replica(cluster(("n1", 1), ("n2", 0)))


def bind(replica: Replica, name: str, node: str = "n1") -> Any:
    binding = {"metadata": {"name": name}, "target": {"kind": "Node", "name": node}}
    return clients(replica)[0].post("/bind-admission", json=review(binding, name=name)).json


def submit(replica: Replica, *pods: dict[str, Any]) -> None:
    for raw in pods:
        replica.api.put("pods", raw)
    replica.deliver()


def test_decision_is_counted_once_by_its_policy(replica: Replica) -> None:
    submit(replica, b.share("p", 30), b.share("s", 30, annotations={"mgpu.io/card-policy": "spread"}))
    ours, wished, changed = decisions(), decisions("spread"), reviews("changed")
    for name in "pps":  # a repeated binding renews the reservation
        assert bind(replica, name)["response"]["allowed"]
    assert (ours.added, wished.added, changed.added) == (1, 1, 3)


def test_denied_binding_is_counted_as_rejection_of_stage_decision(replica: Replica) -> None:
    submit(replica, b.share("p", 60), b.share("q", 60))
    short, denied = rejections("decision", "core"), reviews("denied")
    assert bind(replica, "p")["response"]["allowed"]
    assert not bind(replica, "q")["response"]["allowed"]
    assert (short.added, denied.added) == (1, 1)


def test_replica_that_does_not_lead_is_counted_as_unavailable(replica: Replica) -> None:
    submit(replica, b.share("p", 60))
    replica.leading = False
    gone = reviews("unavailable")
    assert "error" in bind(replica, "p")
    assert gone.added == 1


def test_pod_without_node_is_counted_as_rejection_of_stage_filter(replica: Replica) -> None:
    client, took = clients(replica)[1], Since("mgpu_extender_seconds_count", verb="filter")
    counted = [rejections("filter", reason) for reason in ("no-device", "malformed")]
    for pod, names in ((b.share("p"), ["n1"]), (b.share("p"), ["n2"]), (b.share("p", 150), ["n1"])):
        assert client.post("/filter", json={"Pod": pod, "NodeNames": names}).status_code == 200
    assert [since.added for since in counted] == [1, 1]
    assert took.added == 3


def test_late_decisions_and_released_reservations_are_counted(replica: Replica) -> None:
    made, failed = (Since("mgpu_late_decisions_total", result=result) for result in ("decided", "failed"))
    submit(replica, b.share("p", 60, node="n1"), b.share("q", 60, node="n1"))
    replica.late.work()
    assert (made.added, failed.added) == (1, 1)
    released = Since("mgpu_reservations_released_total")
    submit(replica, b.share("r", 20))
    assert bind(replica, "r")["response"]["allowed"]
    replica.settle()
    assert released.added == 1


def test_metrics_are_served_only_on_their_address(replica: Replica) -> None:
    process: Any = replica
    settings = replica.settings.model_copy(
        update={"scheduler": replica.settings.scheduler.model_copy(update={"metrics_port": 0, "web_port": 0})}
    )
    process.settings = settings
    made = listeners(process)
    answers = [Client(listen.app).get("/metrics") for listen in made]
    assert [answer.status_code == 200 for answer in answers] == [False, False, True, False]
    assert answers[2].content_type.startswith("text/plain; version=")
    assert 'mgpu_build_info{part="scheduler",version="' in answers[2].text
