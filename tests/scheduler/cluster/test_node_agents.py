"""The filter, bindings and preemption on nodes whose mgpu agent is not ready."""

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
from tests.scheduler.cluster.objects import put, record
from tests.scheduler.fake import FakeApi, Replica, admitted, cluster


def filtered(replica: Replica, *names: str, pod: Raw | None = None) -> Filtered:
    known = read_gpu_pod(pod or b.share("asking"), replica.settings)
    assert known is not None
    return replica.filter.filter(known, names)


@pytest.fixture
def two() -> Replica:
    return Replica(cluster(("n1", 2), ("n2", 2)))


def served(replica: Replica, admit: bool = True) -> FakeApi:
    replica.api.admit = admitted(replica) if admit else None
    return replica.api


@pytest.mark.parametrize(
    ("agents", "problem"),
    [
        ([agent("n1", ready=False, waiting="CrashLoopBackOff"), agent("n2")], "CrashLoopBackOff"),
        ([agent("n1", deleting=True)], "Terminating"),
        ([agent("n1", ready=False, name="new"), agent("n1", name="old")], None),
        ([agent("n1", name="new"), agent("n1", name="old", deleting=True)], None),
        ([agent("n1", ready=False, namespace="tenant")], None),
        ([agent("n1", ready=False, labels={"app.kubernetes.io/component": "deviceplugin"})], None),
        ([agent("n1", ready=False, labels={**LABELS, "app.kubernetes.io/component": "webhook"})], None),
        ([agent("", ready=False)], None),
    ],
    ids=[
        "not ready",
        "terminating",
        "rolling update begins",
        "rolling update ends",
        "another namespace",
        "another project",
        "another component",
        "no node yet",
    ],
)
def test_filter_rejects_a_node_only_if_none_of_its_agents_is_ready(
    two: Replica, agents: list[Raw], problem: str | None
) -> None:
    put(two, *agents)
    found = filtered(two, "n1", "n2")
    rejected = {} if problem is None else {"n1": f"the node's mgpu agent is not ready ({problem})"}
    assert found.hopeless == rejected
    assert found.passed == [name for name in ("n1", "n2") if name not in rejected]
    assert all(found.kinds[reason] is RejectionKind.AGENT for reason in rejected.values())


def test_node_is_announced_only_once_its_agent_is_ready_again(two: Replica) -> None:
    """Otherwise kube-scheduler would try it again only after five minutes."""
    put(two, agent("n1", ready=False))
    two.freed.clear()
    put(two, agent("n1", ready=False, waiting="CrashLoopBackOff"))
    assert (filtered(two, "n1").passed, two.freed) == ([], [])
    put(two, agent("n1"))
    assert (filtered(two, "n1").passed, two.freed) == (["n1"], ["n1"])


@pytest.mark.parametrize("others", [[], [agent("n1", name="new")]], ids=["the only agent", "a rolling update"])
def test_filter_when_an_agents_pod_is_deleted_passes_the_node(two: Replica, others: list[Raw]) -> None:
    """Without a Pod, the agent may run elsewhere or belong to another project."""
    put(two, agent("n1", ready=False), *others)
    two.api.remove("pods", "agent-n1", "mgpu-system")
    two.deliver()
    assert filtered(two, "n1").passed == ["n1"]


def test_filter_without_the_setting_passes_the_node() -> None:
    settings = load_settings("scheduler: {requireReadyAgents: false}")
    replica = Replica(cluster(("n1", 2)), settings=settings)
    put(replica, agent("n1", ready=False))
    assert filtered(replica, "n1").passed == ["n1"]


def test_filter_of_a_pod_with_slices_rejects_the_node_too(two: Replica) -> None:
    resources = {"limits": {"nvidia.com/mig-1g.10gb": "1"}, "requests": {"nvidia.com/mig-1g.10gb": "1"}}
    pod = b.pod("sliced", {"name": "c", "resources": resources})
    put(two, agent("n1", ready=False))
    assert filtered(two, "n1", pod=pod).hopeless == {"n1": "the node's mgpu agent is not ready (Running)"}


def test_filter_of_a_pod_for_nvidias_plugin_needs_no_agent() -> None:
    replica = Replica(cluster(("n1", 2)))
    replica.api.put("nodes", b.node(labels={WHOLE_CARDS_LABEL: "nvidia"}))
    put(replica, agent("n1", ready=False))
    resources = {"limits": {"nvidia.com/gpu": "1"}, "requests": {"nvidia.com/gpu": "1"}}
    pod = b.pod("whole", {"name": "c", "resources": resources})
    assert filtered(replica, "n1", pod=pod).passed == ["n1"]
    assert not filtered(replica, "n1").passed


def test_binding_when_the_agent_is_not_ready_is_denied_without_a_reservation(two: Replica) -> None:
    put(two, agent("n1", ready=False, waiting="CrashLoopBackOff"), b.share("p"))
    text = f"the mgpu agent of node n1 is not ready since {SINCE} \\(Pod agent-n1: CrashLoopBackOff\\)"
    with pytest.raises(ApiError, match=text):
        served(two).bind("p", "n1")
    assert two.state.reservation("uid-p") is None
    served(two).bind("p", "n2")


def test_binding_with_a_reservation_is_denied_once_the_agent_has_failed(two: Replica) -> None:
    put(two, agent("n1"), b.share("p"))
    two.api.refuse_bindings = True
    with pytest.raises(ApiError, match="refused"):
        served(two).bind("p", "n1")
    assert two.state.reservation("uid-p") is not None
    two.api.refuse_bindings = False
    put(two, agent("n1", ready=False))
    with pytest.raises(ApiError, match="mgpu agent of node n1"):
        served(two).bind("p", "n1")


def test_late_decision_is_made_though_the_agent_is_not_ready(two: Replica) -> None:
    """The pod is already on its node, and starts there once the agent is back."""
    put(two, agent("n1", ready=False), b.share("p"))
    served(two, admit=False).bind("p", "n1")
    two.settle()
    assert two.cards_held()["p"]
    assert two.api.pod("p")["status"]["phase"] == "Pending"


def test_preemption_when_the_agent_is_not_ready_evicts_no_pod(two: Replica) -> None:
    put(two, b.share("low", 99, annotations=record(), node="n1"), agent("n1"))
    pod = b.share("high", 99)
    pod["spec"]["priority"] = 10
    known = read_gpu_pod(pod, two.settings)
    assert known is not None
    assert two.preemption.choose(known, pod, {"n1": Victims(())})
    put(two, agent("n1", ready=False))
    assert two.preemption.choose(known, pod, {"n1": Victims(())}) == {}


def test_restarted_scheduler_rejects_the_same_nodes(two: Replica) -> None:
    put(two, agent("n1", ready=False), agent("n2"))
    again = Replica(two.api)
    again.deliver()
    assert filtered(again, "n1", "n2").passed == filtered(two, "n1", "n2").passed == ["n2"]
    assert again.state.nodes_without_agent() == 1
