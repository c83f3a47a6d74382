"""Nodes whose mgpu agent is not ready: refused by the filter and the binding admission, and taken again afterwards."""

import pytest

from mgpu.kube import ApiError
from mgpu.model.device_object import WHOLE_CARDS_LABEL
from mgpu.model.gpu_requests import RejectionKind
from mgpu.settings import load_settings
from scheduler.cluster.gpu_pods import read_gpu_pod
from scheduler.decisions.filter import Filtered
from scheduler.decisions.preemption import Victims
from tests import builders as b
from tests.agent_pods import LABELS, SINCE, Raw, agent
from tests.scheduler.fake import FakeApi, Replica, admitted, cluster


def given(replica: Replica, *agents: Raw) -> None:
    for raw in agents:
        replica.api.put("pods", raw)
    replica.deliver()


def asked(replica: Replica, *names: str, pod: Raw | None = None) -> Filtered:
    known = read_gpu_pod(pod or b.share("asking"), replica.settings)
    assert known is not None
    return replica.filter.filter(known, names)


@pytest.fixture
def two() -> Replica:
    return Replica(cluster(("n1", 2), ("n2", 2)))


def served(replica: Replica, admit: bool = True) -> FakeApi:
    replica.api.admit = admitted(replica) if admit else None
    return replica.api


def test_filter_agent_not_ready_node_is_refused_with_its_reason(two: Replica) -> None:
    given(two, agent("n1", ready=False, waiting="CrashLoopBackOff"), agent("n2"))
    found = asked(two, "n1", "n2")
    assert found.passed == ["n2"]
    assert found.hopeless == {"n1": "the node's mgpu agent is not ready (CrashLoopBackOff)"}
    assert found.kinds[found.hopeless["n1"]] is RejectionKind.AGENT


def test_filter_agent_ready_again_node_is_offered_and_announced(two: Replica) -> None:
    given(two, agent("n1", ready=False), agent("n2"))
    assert asked(two, "n1", "n2").passed == ["n2"]
    two.freed.clear()
    given(two, agent("n1"))
    assert asked(two, "n1", "n2").passed == ["n1", "n2"]
    assert two.freed == ["n1"]  # else kube-scheduler asks again only after five minutes


def test_filter_cause_changes_node_is_not_announced(two: Replica) -> None:
    given(two, agent("n1", ready=False))
    two.freed.clear()
    given(two, agent("n1", ready=False, waiting="CrashLoopBackOff"))
    assert not asked(two, "n1").passed
    assert two.freed == []


def test_filter_second_agent_of_a_rolling_update_ready_node_is_offered(two: Replica) -> None:
    given(two, agent("n1", ready=False, name="new"), agent("n1", name="old"))
    assert asked(two, "n1").passed == ["n1"]
    given(two, agent("n1", name="new"), agent("n1", name="old", deleting=True))
    assert asked(two, "n1").passed == ["n1"]
    two.api.remove("pods", "old-n1", "mgpu-system")
    two.deliver()
    assert asked(two, "n1").passed == ["n1"]


def test_filter_only_agent_terminating_node_is_refused(two: Replica) -> None:
    given(two, agent("n1", deleting=True))
    assert asked(two, "n1").hopeless == {"n1": "the node's mgpu agent is not ready (Terminating)"}


@pytest.mark.parametrize(
    "other",
    [
        agent("n1", ready=False, namespace="tenant"),
        agent("n1", ready=False, labels={"app.kubernetes.io/component": "deviceplugin"}),
        agent("n1", ready=False, labels={**LABELS, "app.kubernetes.io/component": "webhook"}),
        agent("", ready=False),
    ],
    ids=["another namespace", "another project", "another part", "no node yet"],
)
def test_filter_pod_of_nobodys_agent_changes_nothing(two: Replica, other: Raw) -> None:
    given(two, other)
    assert asked(two, "n1", "n2").passed == ["n1", "n2"]


def test_filter_agent_pod_gone_node_is_offered(two: Replica) -> None:
    """Without a Pod of an agent nothing is known of it: it may run elsewhere, or be another project's."""
    given(two, agent("n1", ready=False))
    two.api.remove("pods", "agent-n1", "mgpu-system")
    two.deliver()
    assert asked(two, "n1").passed == ["n1"]


def test_filter_setting_off_node_is_offered() -> None:
    settings = load_settings("scheduler: {requireReadyAgents: false}")
    replica = Replica(cluster(("n1", 2)), settings=settings)
    given(replica, agent("n1", ready=False))
    assert asked(replica, "n1").passed == ["n1"]


def test_filter_slices_agent_not_ready_node_is_refused(two: Replica) -> None:
    resources = {"limits": {"nvidia.com/mig-1g.10gb": "1"}, "requests": {"nvidia.com/mig-1g.10gb": "1"}}
    pod = b.pod("sliced", {"name": "c", "resources": resources})
    given(two, agent("n1", ready=False))
    assert asked(two, "n1", pod=pod).hopeless == {"n1": "the node's mgpu agent is not ready (Running)"}


def test_filter_cards_of_nvidias_plugin_need_no_agent() -> None:
    replica = Replica(cluster(("n1", 2)))
    replica.api.put("nodes", b.node(labels={WHOLE_CARDS_LABEL: "nvidia"}))
    given(replica, agent("n1", ready=False))
    resources = {"limits": {"nvidia.com/gpu": "1"}, "requests": {"nvidia.com/gpu": "1"}}
    pod = b.pod("whole", {"name": "c", "resources": resources})
    assert asked(replica, "n1", pod=pod).passed == ["n1"]
    assert not asked(replica, "n1").passed


def test_binding_agent_not_ready_is_refused_and_nothing_is_reserved(two: Replica) -> None:
    given(two, agent("n1", ready=False, waiting="CrashLoopBackOff"), b.share("p"))
    text = f"the mgpu agent of node n1 is not ready since {SINCE} \\(Pod agent-n1: CrashLoopBackOff\\)"
    with pytest.raises(ApiError, match=text):
        served(two).bind("p", "n1")
    assert two.state.reservation("uid-p") is None
    served(two).bind("p", "n2")


def test_binding_reservation_held_agent_fails_meanwhile_is_refused(two: Replica) -> None:
    given(two, agent("n1"), b.share("p"))
    two.api.refuse_bindings = True
    with pytest.raises(ApiError, match="refused"):
        served(two).bind("p", "n1")
    assert two.state.reservation("uid-p") is not None
    two.api.refuse_bindings = False
    given(two, agent("n1", ready=False))
    with pytest.raises(ApiError, match="mgpu agent of node n1"):
        served(two).bind("p", "n1")


def test_late_decision_agent_not_ready_is_made(two: Replica) -> None:
    """The pod is on its node already, and starts there once the agent is back: failing it would help nobody."""
    given(two, agent("n1", ready=False), b.share("p"))
    served(two, admit=False).bind("p", "n1")
    two.settle()
    assert two.cards_held()["p"]
    assert two.api.pod("p")["status"]["phase"] == "Pending"


def test_preemption_agent_not_ready_evicts_nobody(two: Replica) -> None:
    record = {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": "0"}
    given(two, b.share("low", 99, annotations=record, node="n1"), agent("n1"))
    pod = b.share("high", 99)
    pod["spec"]["priority"] = 10
    known = read_gpu_pod(pod, two.settings)
    assert known is not None
    assert two.preemption.choose(known, pod, {"n1": Victims(())})
    given(two, agent("n1", ready=False))
    assert two.preemption.choose(known, pod, {"n1": Victims(())}) == {}


def test_scheduler_restarted_comes_to_the_same_answer(two: Replica) -> None:
    given(two, agent("n1", ready=False), agent("n2"))
    again = Replica(two.api)
    again.deliver()
    assert asked(again, "n1", "n2").passed == asked(two, "n1", "n2").passed == ["n2"]
    assert again.state.nodes_without_agent() == 1
