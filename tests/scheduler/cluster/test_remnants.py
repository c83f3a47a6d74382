"""Namespaces whose pods were deleted by force and still run get no more cards."""

from typing import Any

import pytest

from mgpu.model.device_checkpoints import DELETED_POD
from scheduler.cluster import remnants as module
from scheduler.cluster.events import Publisher, RemnantsEnded
from scheduler.cluster.remnants import WAIT_SECONDS, Remnants
from tests import builders as b
from tests.clock import Clock
from tests.scheduler.cluster.objects import Raw, put, record, report
from tests.scheduler.fake import Replica, admitted, clients, cluster, review

BINDING = {
    "apiVersion": "v1",
    "kind": "Binding",
    "metadata": {"name": "next", "namespace": "default"},
    "target": {"kind": "Node", "name": "n2"},
}
BOTH = ["n1", "n2"]


def remnant_row(uid: str = "uid-old", card: str = "GPU-n1-0") -> Raw:
    share = {"core": 300, "memory": 1 << 30, "ratio": None}
    return {"podUID": uid, "containerName": "0", "resourceName": DELETED_POD, "deviceIDs": [card], "share": share}


def filtered(replica: Replica, raw: Raw) -> tuple[list[str], str]:
    """Return the nodes that the filter passes, and why it rejects n2."""
    answer = clients(replica)[1].post("/filter", json={"Pod": raw, "NodeNames": BOTH}).get_json()
    rejected = {**(answer["FailedNodes"] or {}), **(answer["FailedAndUnresolvableNodes"] or {})}
    return answer["NodeNames"] or [], rejected.get("n2", "")


def deleted_by_force(*, report_from: str = "n1", row: Raw | None = None, **more: Any) -> Replica:
    """A scheduler that has seen pod `old` run on n1 and its deletion, and then the report of a node."""
    api = cluster(("n1", 2), ("n2", 2))
    api.put("pods", b.share("old", 30, annotations=record(), node="n1", **{"phase": "Running", **more}))
    replica = Replica(api)
    api.remove("pods", "old", more.get("namespace", "default"))
    replica.deliver()
    report(api, row or remnant_row(), node=report_from)
    replica.deliver()
    return replica


class TestNamespace:
    def test_filter_passes_no_node_until_the_remnant_has_ended(self) -> None:
        replica = deleted_by_force()
        nodes, reason = filtered(replica, b.share("next", 30))
        assert nodes == []
        assert "pod default/old was deleted by force and still runs on n1" in reason
        report(replica.api)
        replica.deliver()
        assert filtered(replica, b.share("next", 30))[0] == BOTH

    def test_filter_passes_pods_of_other_namespaces(self) -> None:
        assert filtered(deleted_by_force(), b.share("next", 30, namespace="other"))[0] == BOTH

    @pytest.mark.parametrize(
        "case",
        [
            pytest.param({"row": remnant_row("uid-unknown")}, id="the pod was never seen"),
            # Otherwise a stolen token of one agent could block any namespace.
            pytest.param({"row": remnant_row(card="GPU-n2-0"), "report_from": "n2"}, id="the pod ran on another node"),
            pytest.param({"phase": "Succeeded"}, id="the pod had ended before"),
        ],
    )
    def test_reported_pod_is_no_remnant_when(self, case: dict[str, Any]) -> None:
        assert filtered(deleted_by_force(**case), b.share("next", 30))[0] == BOTH

    def test_binding_is_denied(self) -> None:
        replica = deleted_by_force()
        put(replica, b.share("next", 30))
        answer = admitted(replica)(review(BINDING, name="next"))["response"]
        assert not answer["allowed"]
        assert "was deleted by force" in answer["status"]["message"]

    def test_pod_that_is_already_bound_waits_and_does_not_fail(self) -> None:
        replica = deleted_by_force()
        put(replica, b.share("next", 30, node="n2"))
        replica.settle()
        assert replica.api.pod("next")["status"].get("phase") != "Failed"
        assert replica.state.undecided_pods() == ("uid-next",)

    def test_occupy_pod_gets_its_card_beside_a_remnant_in_kube_system(self) -> None:
        """Occupy pods are created for the MtgpuPods of all namespaces."""
        replica = deleted_by_force(namespace="kube-system")
        occupy = b.occupy_pod("x", "n2")
        assert filtered(replica, occupy)[0] == BOTH
        del occupy["metadata"]["labels"]
        assert filtered(replica, occupy)[0] == []


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ended() -> list[str]:
    return []


@pytest.fixture
def remnants(monkeypatch: pytest.MonkeyPatch, clock: Clock, ended: list[str]) -> Remnants:
    """Remembers two deleted pods that no node reports, and publishes into `ended`."""
    monkeypatch.setattr(module, "_MAX_UNREPORTED", 2)
    events = Publisher()
    events.subscribe(RemnantsEnded, lambda event: ended.append(event.namespace))
    return Remnants(events, clock)


def delete(remnants: Remnants, *uids: str) -> None:
    """Delete pods, each in a namespace of its own."""
    for uid in uids:
        remnants.deleted(uid, f"of-{uid}", uid, "n1")


def with_problem(remnants: Remnants, *uids: str) -> str:
    return "".join(uid for uid in uids if remnants.problem(f"of-{uid}") is not None)


class TestRemnants:
    def test_only_the_latest_unreported_pods_are_remembered(self, remnants: Remnants) -> None:
        delete(remnants, *"abc")
        for uid in "abc":
            remnants.hold(uid, "n1")
        assert with_problem(remnants, *"abc") == "bc"

    def test_reported_remnant_is_not_forgotten_after_more_deletions(self, remnants: Remnants) -> None:
        """Otherwise a tenant would delete as many small pods by force, and get cards again."""
        delete(remnants, "a")
        remnants.hold("a", "n1")
        delete(remnants, *"bcde")
        assert with_problem(remnants, "a") == "a"
        remnants.release("a")
        assert with_problem(remnants, "a") == ""

    def test_remnant_whose_report_changes_stays_a_remnant(self, remnants: Remnants) -> None:
        delete(remnants, "a")
        for _ in range(3):
            remnants.hold("a", "n1")
            remnants.release("a")
        remnants.hold("a", "n1")
        assert with_problem(remnants, "a") == "a"

    def test_end_of_the_last_remnant_of_a_namespace_is_published_once(
        self, remnants: Remnants, ended: list[str]
    ) -> None:
        for uid in "ab":
            remnants.deleted(uid, "team", uid, "n1")
            remnants.hold(uid, "n1")
        remnants.release("a")
        assert ended == []
        remnants.release("b")
        remnants.release("b")
        assert ended == ["team"]

    def test_seconds_are_those_of_the_latest_remnant_and_limited(self, remnants: Remnants, clock: Clock) -> None:
        start = clock.now
        for uid in "ab":
            remnants.deleted(uid, "team", uid, "n1")
            clock.now += 100
        assert remnants.seconds("team") == 0, "no node reports any"
        remnants.hold("a", "n1")
        assert remnants.seconds("team") == WAIT_SECONDS - 200
        assert remnants.problem("team")
        remnants.hold("b", "n1")
        assert remnants.seconds("team") == WAIT_SECONDS - 100
        clock.now = start + WAIT_SECONDS + 100
        assert (remnants.seconds("team"), remnants.problem("team")) == (0, None)
