"""Pods with claims that fit, and that kube-scheduler does not retry, are woken by an annotation of a ResourceSlice."""

from itertools import count
from typing import Any

import pytest

from mgpu.model.resource_slices import WAKE, slice_name
from tests import builders as b
from tests.scheduler.claim_objects import (
    allocated,
    claim,
    denial,
    request,
    resource_slice,
    result,
    serving,
    share,
    submit,
    waiting_pod,
)
from tests.scheduler.cluster.objects import put, record
from tests.scheduler.fake import Replica

Raw = dict[str, Any]


@pytest.fixture
def replica() -> Replica:
    return serving(("n1", 1))


def wait(replica: Replica, *pods: Raw) -> None:
    put(replica, *pods)
    replica.claim_waker.work()  # It notes the pods, and examines them after a pause.


def wakes(replica: Replica, seconds: int, node: str = "n1") -> int:
    """Return how many times the waker changes the slice of a node in this time, one round per second."""
    found = 0
    for _ in range(seconds):
        replica.clock.now += 1
        before = replica.api.resourceslices.get(slice_name(node), {}).get("metadata", {}).get("resourceVersion")
        replica.claim_waker.work()
        after = replica.api.resourceslices.get(slice_name(node), {}).get("metadata", {}).get("resourceVersion")
        found += before != after
    return found


def full(replica: Replica, node: str = "n1") -> None:
    put(replica, b.share("full", 90, annotations=record("0"), node=node))


def test_pod_that_fits_is_woken_once_per_second(replica: Replica) -> None:
    submit(replica.api, claim())
    wait(replica, waiting_pod("p", "c"))
    assert wakes(replica, 1) == 1
    assert WAKE in replica.api.resourceslices[slice_name("n1")]["metadata"]["annotations"]
    replica.claim_waker.work()
    assert wakes(replica, 3) == 3


def test_one_annotation_serves_all_pods(replica: Replica) -> None:
    submit(replica.api, claim(), claim("d"))
    wait(replica, waiting_pod("p", "c"), waiting_pod("q", "d"))
    assert wakes(replica, 3) == 3


def test_first_second_is_left_to_kube_scheduler(replica: Replica) -> None:
    submit(replica.api, claim())
    wait(replica, waiting_pod("p", "c"))
    replica.clock.now += 0.9
    assert wakes(replica, 0) == 0
    replica.claim_waker.work()
    assert "annotations" not in replica.api.resourceslices[slice_name("n1")]["metadata"]


def test_pauses_grow_and_are_at_most_a_minute(replica: Replica) -> None:
    submit(replica.api, claim())
    wait(replica, waiting_pod("p", "c"))
    assert wakes(replica, 60) < 12
    assert wakes(replica, 60) <= 2
    assert wakes(replica, 120) == 2


def test_pauses_of_a_pod_that_waits_for_days_end(replica: Replica) -> None:
    submit(replica.api, claim())
    wait(replica, waiting_pod("p", "c"))
    for _ in range(1100):
        replica.clock.now += 64
        replica.claim_waker.work()
    assert wakes(replica, 64) == 1


def test_pods_that_wait_for_something_else_share_their_wakes(replica: Replica) -> None:
    """Each came at another time, and all fit by the ledger."""
    for i in range(60):
        submit(replica.api, claim(f"c{i}", request(cores=1, memory="1Gi")))
        wait(replica, waiting_pod(f"p{i}", f"c{i}"))
        wakes(replica, 7)
    wakes(replica, 300)
    assert wakes(replica, 640) <= 20


def test_wakes_for_other_pods_do_not_lengthen_the_pauses_of_one_that_does_not_fit(replica: Replica) -> None:
    submit(replica.api, claim("big", request(cores=50, memory="8Gi")), claim("small", request(cores=1, memory="1Gi")))
    full(replica)
    wait(replica, waiting_pod("p", "small"), waiting_pod("q", "big"))
    for i in range(60):
        put(replica, b.share("other", 1 + i % 2, annotations=record("0"), node="n1"))
        wakes(replica, 1)
    replica.api.remove("pods", "full")
    replica.deliver()
    replica.api.remove("pods", "p")
    replica.deliver()
    assert wakes(replica, 2) == 2


def test_pod_that_does_not_fit_is_woken_once_it_fits(replica: Replica) -> None:
    submit(replica.api, claim())
    full(replica)
    wait(replica, waiting_pod("p", "c"))
    assert wakes(replica, 30) == 0
    replica.api.remove("pods", "full")
    replica.deliver()
    assert wakes(replica, 2) == 2


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda raw: raw["spec"].update(nodeName="n1"), id="bound"),
        pytest.param(lambda raw: raw["metadata"].update(deletionTimestamp="now"), id="being deleted"),
        pytest.param(lambda raw: raw["status"].update(conditions=[]), id="not tried yet"),
        pytest.param(lambda raw: raw["status"]["conditions"][0].update(reason="SchedulingGated"), id="gated"),
        pytest.param(lambda raw: raw["spec"].pop("resourceClaims"), id="without claims"),
    ],
)
def test_pod_that_kube_scheduler_does_not_hold_back_is_not_woken(replica: Replica, change: Any) -> None:
    submit(replica.api, claim())
    wait(replica, waiting_pod("p", "c"))
    replica.api.edit_pod("p", change)
    replica.deliver()
    assert wakes(replica, 3) == 0


def test_pod_whose_claims_are_allocated_is_not_woken(replica: Replica) -> None:
    submit(replica.api, allocated(claim(), share("card-0")))
    wait(replica, waiting_pod("p", "c"))
    assert wakes(replica, 3) == 0


def test_pod_with_a_claim_from_a_template_is_woken(replica: Replica) -> None:
    submit(replica.api, claim("p-gpu-x7k"))
    pod = waiting_pod("p", resourceClaimStatuses=[{"name": "gpu", "resourceClaimName": "p-gpu-x7k"}])
    pod["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimTemplateName": "t"}]
    wait(replica, pod)
    assert wakes(replica, 1) == 1


def test_all_claims_of_a_pod_must_fit(replica: Replica) -> None:
    submit(replica.api, claim(), claim("d", request(cores=30, memory="100Gi")))
    wait(replica, waiting_pod("p", "c", "d"))
    assert wakes(replica, 3) == 0


def test_pod_is_not_woken_for_a_card_twice(replica: Replica) -> None:
    """The only card has room for both shares, but kube-scheduler chooses different devices for a request."""
    two = request(cores=30, memory="8Gi")
    two["exactly"]["count"] = 2
    submit(replica.api, claim("c", two))
    wait(replica, waiting_pod("p", "c"))
    assert wakes(replica, 3) == 0


def test_second_alternative_suffices(replica: Replica) -> None:
    alternatives = [
        {"name": "big", "deviceClassName": "mgpu"},
        {"name": "small", "deviceClassName": "mgpu", "capacity": {"requests": {"cores": "5", "memory": "1Gi"}}},
    ]
    submit(replica.api, claim("c", {"name": "gpu", "firstAvailable": alternatives}))
    full(replica)
    wait(replica, waiting_pod("p", "c"))
    assert wakes(replica, 1) == 1


def test_denied_write_of_another_claim_lets_the_stranded_pod_be_woken(replica: Replica) -> None:
    """kube-scheduler refused `p` because of `d`, whose write is denied later."""
    submit(replica.api, claim("c", request(cores=80, memory="1Gi")), claim("d", request(cores=60, memory="1Gi")))
    replica.api.refuse_allocations = True
    denial(replica.api, "d", result("card-0", cores="60", memory="1Gi"))
    wait(replica, waiting_pod("p", "c"))
    assert wakes(replica, 3) == 0
    replica.clock.now += 31
    replica.decider.check_overdue()
    assert wakes(replica, 2) == 2


class TestSlices:
    def test_node_without_slice_is_left_out(self) -> None:
        replica = serving(("n1", 1), ("n2", 1))
        replica.api.remove("resourceslices", slice_name("n1"))
        submit(replica.api, claim())
        wait(replica, waiting_pod("p", "c"))
        assert wakes(replica, 3, "n2") == 2

    def test_node_is_tried_again_after_a_minute(self, replica: Replica) -> None:
        """No other change of the cluster is needed."""
        replica.api.remove("resourceslices", slice_name("n1"))
        submit(replica.api, claim())
        wait(replica, waiting_pod("p", "c"))
        wakes(replica, 2)
        replica.api.put("resourceslices", resource_slice())
        assert wakes(replica, 130) >= 1

    def test_attempt_that_failed_does_not_lengthen_the_pauses(self, replica: Replica) -> None:
        submit(replica.api, claim())
        wait(replica, waiting_pod("p", "c"))
        replica.api.reachable = False
        wakes(replica, 60)
        replica.api.reachable = True
        assert wakes(replica, 3) == 3


class TestRounds:
    def test_all_nodes_are_examined_over_several_rounds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The time of a round suffices for two nodes, and only the last one has room."""
        names = [f"n{i}" for i in range(8)]
        replica = serving(*((name, 1) for name in names))
        seconds = count(step=0.06)
        monkeypatch.setattr(replica.claim_waker, "_cpu_clock", lambda: next(seconds))
        for name in names[:-1]:
            put(replica, b.share(f"full-{name}", 90, annotations=record("0"), node=name))
        submit(replica.api, claim())
        wait(replica, waiting_pod("p", "c"))
        assert wakes(replica, 10, "n7") >= 1

    def test_pod_that_fits_on_no_node_is_not_examined_again_until_something_changes(
        self, replica: Replica, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        examined = []
        monkeypatch.setattr(replica.claim_waker, "_fits", lambda *_: examined.append(1))
        submit(replica.api, claim())
        wait(replica, waiting_pod("p", "c"))
        wakes(replica, 30)
        assert len(examined) == 1

    def test_replica_that_does_not_lead_writes_nothing(self, replica: Replica) -> None:
        submit(replica.api, claim())
        wait(replica, waiting_pod("p", "c"))
        replica.leading = False
        assert wakes(replica, 3) == 0

    def test_pods_that_do_not_fit_do_not_keep_the_others_from_being_examined(
        self, replica: Replica, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The cluster changes all the time, so all pods are due in every round."""
        monkeypatch.setattr("scheduler.claims.waker._MOST_PODS", 2)
        submit(replica.api, claim("big", request(cores=50, memory="100Gi")), claim("small"))
        wait(replica, *(waiting_pod(f"p{i}", "big") for i in range(4)), waiting_pod("q", "small"))
        found = 0
        for i in range(4):
            put(replica, b.share("other", 1 + i, annotations=record("0"), node="n1"))
            found += wakes(replica, 1)
        assert found >= 1

    def test_claim_that_the_watch_delivers_late_is_examined_after_a_minute(self, replica: Replica) -> None:
        wait(replica, waiting_pod("p", "c"))
        assert wakes(replica, 3) == 0
        submit(replica.api, claim())
        replica.deliver()
        assert wakes(replica, 65) >= 1
