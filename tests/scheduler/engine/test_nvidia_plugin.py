"""Nodes where NVIDIA's own plugin serves `nvidia.com/gpu` (scheduler/engine/nvidia_plugin.py)."""

import json
from typing import Any

import pytest

from mgpu.model.gpu_requests import Rejection
from scheduler.decisions.filter import Filtered
from scheduler.decisions.preemption import Victims
from tests import builders as b
from tests.scheduler.fake import FakeApi, Replica, admitted, cluster

Raw = dict[str, Any]
STOCK = {"mgpu.io/whole-cards": "nvidia"}
WHOLE = "nvidia.com/gpu"


def plain(name: str, cards: int = 1, **more: Any) -> Raw:
    amounts = {WHOLE: str(cards)}
    return b.pod(name, {"name": "c", "resources": {"requests": amounts, "limits": dict(amounts)}}, **more)


def label(api: FakeApi, name: str = "n1", **labels: str) -> None:
    api.put("nodes", b.node(name, labels=labels))


@pytest.fixture
def api() -> FakeApi:
    """n1: two cards, NVIDIA's plugin. n2: two cards that mgpu serves alone."""
    api = cluster(("n1", 2), ("n2", 2))
    label(api, **STOCK)
    return api


@pytest.fixture
def replica(api: FakeApi) -> Replica:
    replica = Replica(api)
    api.admit = admitted(replica)
    return replica


def told(api: FakeApi, *given: tuple[str, str], node: str = "n1") -> None:
    """What the kubelet gave out, as the agent writes it: (uid, card's UUID)."""
    rows = [{"podUID": u, "containerName": "c", "resourceName": WHOLE, "deviceIDs": [card]} for u, card in given]
    device = json.loads(json.dumps(api.devices[node]))
    device["metadata"]["annotations"] = {"node.koordinator.sh/devices-checkpoints": json.dumps(rows)}
    api.put("devices", device)


def bound(replica: Replica, raw: Raw, node: str = "n1") -> Raw:
    replica.api.put("pods", raw)
    replica.deliver()
    replica.api.bind(raw["metadata"]["name"], node)
    replica.deliver()
    return replica.api.pod(raw["metadata"]["name"])


def filtered(replica: Replica, raw: Raw, *names: str) -> Filtered:
    replica.api.put("pods", raw)
    replica.deliver()
    known = replica.state.gpu_pod(raw["metadata"]["uid"])
    assert known is not None
    return replica.filter.filter(known, names or ("n1", "n2"))


def free(replica: Replica, node: str = "n1") -> list[int]:
    return [s.core_free for s in replica.state.node_snapshot(node, "").cards]


def refused(replica: Replica, raw: Raw, node: str = "n1") -> str:
    replica.api.put("pods", raw)
    replica.deliver()
    known = replica.state.gpu_pod(raw["metadata"]["uid"])
    assert known is not None
    found = replica.decider.decide(known, node)
    assert isinstance(found, Rejection)
    return str(found)


def test_plugin_pod_is_bound_without_record_and_not_decided_late(replica: Replica) -> None:
    assert bound(replica, plain("p"))["metadata"]["annotations"] == {}
    assert replica.state.undecided_pods() == ()
    assert [(h.dialect, h.bound) for h in replica.state.holdings()] == [("nvidia", True)]


def test_plugin_pod_on_other_node_gets_cards_of_mgpu(replica: Replica) -> None:
    assert bound(replica, plain("p"), "n2")["metadata"]["annotations"]
    assert free(replica, "n2") == [0, 1000]


def test_node_shares_no_card_until_it_reports_the_cards_of_plugin_pods(replica: Replica) -> None:
    bound(replica, plain("p"))
    assert "2 cards" in refused(replica, b.share("q", 10))
    told(replica.api, ("uid-p", "GPU-n1-1"))
    replica.deliver()
    assert free(replica) == [1000, 0]
    bound(replica, b.share("q", 10))
    assert free(replica) == [900, 0]


def test_plugin_pods_do_not_block_each_other(replica: Replica) -> None:
    bound(replica, plain("p"))
    assert filtered(replica, plain("q")).passed == ["n1", "n2"]
    assert bound(replica, plain("q"))["spec"]["nodeName"] == "n1"


def test_plugin_pod_is_rejected_where_a_card_is_shared(replica: Replica) -> None:
    bound(replica, b.share("q", 10))
    found = filtered(replica, plain("p"))
    assert (found.passed, list(found.failed)) == (["n2"], ["n1"])
    assert "card 0" in found.failed["n1"]
    assert "card 0" in refused(replica, plain("p"))
    replica.api.remove("pods", "q")
    replica.deliver()
    assert filtered(replica, plain("p")).passed == ["n1", "n2"]


def test_share_beside_reserved_plugin_pod_is_rejected(replica: Replica) -> None:
    """Reserved is held: neither has been bound yet when the other asks."""
    for raw in (plain("p"), b.share("q", 10)):
        replica.api.put("pods", raw)
    replica.deliver()
    known = [replica.state.gpu_pod(uid) for uid in ("uid-p", "uid-q")]
    answers = [replica.decider.decide(pod, "n1") for pod in known if pod is not None]
    assert [isinstance(answer, Rejection) for answer in answers] == [False, True]


def test_pod_with_plugin_cards_and_shares_is_rejected(replica: Replica) -> None:
    shared = {"koordinator.sh/gpu-core": "50", "koordinator.sh/gpu-memory-ratio": "50"}
    raw = plain("p")
    raw["spec"]["containers"].append({"name": "d", "resources": {"requests": shared, "limits": dict(shared)}})
    found = filtered(replica, raw)
    assert (found.passed, list(found.hopeless)) == (["n2"], ["n1"])


@pytest.mark.parametrize(
    "constraint",
    [{"mgpu.io/card-models": "H100"}, {"mgpu.io/card-uuids": "GPU-n1-0"}, {"mgpu.io/same-card-group": "g"}],
)
def test_plugin_pod_with_card_constraints_is_rejected(replica: Replica, constraint: dict[str, str]) -> None:
    assert list(filtered(replica, plain("p", annotations=constraint), "n1").hopeless) == ["n1"]


def test_preemption_for_plugin_pod_keeps_victims_of_kube_scheduler(replica: Replica) -> None:
    """It counts cards as the kubelet does; but no eviction of whole-card pods helps where a card carries a share."""
    bound(replica, plain("low"))
    raw = plain("high", 2)
    filtered(replica, raw)
    known, theirs = replica.state.gpu_pod("uid-high"), {"n1": Victims(("uid-low",))}
    assert known is not None
    assert replica.preemption.choose(known, raw, theirs) == theirs
    told(replica.api, ("uid-low", "GPU-n1-1"))
    bound(replica, b.share("q", 10))
    assert replica.preemption.choose(known, raw, theirs) == {}


def test_plugin_node_without_device_accepts_plugin_pod(replica: Replica) -> None:
    label(replica.api, "n3", **STOCK)
    assert filtered(replica, plain("p"), "n3").passed == ["n3"]


def test_label_changed_while_pods_run_changes_holdings(api: FakeApi) -> None:
    """The pods may be listed before the nodes; and the label goes when the plugin does."""
    replica = Replica(FakeApi())
    replica.state.pod_changed({**plain("p", node="n1"), "status": {"phase": "Pending"}})
    assert replica.state.undecided_pods() == ("uid-p",)
    replica.state.node_changed(api.nodes["n1"])
    assert replica.state.undecided_pods() == ()
    replica.state.node_changed(b.node("n1"))
    assert replica.state.undecided_pods() == ("uid-p",)


def test_restarted_scheduler_derives_the_same_holdings(replica: Replica) -> None:
    bound(replica, plain("p"))
    bound(replica, plain("r"))
    told(replica.api, ("uid-p", "GPU-n1-1"))
    replica.deliver()
    again = Replica(replica.api)
    assert again.state.holdings() == replica.state.holdings()
    assert free(again) == free(replica)


def test_ended_plugin_pod_holds_nothing(replica: Replica) -> None:
    raw = bound(replica, plain("p"))
    replica.api.put("pods", {**raw, "status": {"phase": "Succeeded"}})
    replica.deliver()
    assert free(replica) == [1000, 1000]


def test_used_cards_are_computed_once_for_each_change(replica: Replica) -> None:
    """A filter asks it of thousands of nodes, under the lock for which bindings wait."""
    bound(replica, b.share("q", 10))
    before = replica.state.node_snapshot("n1", "uid-p").mgpu_cards
    filtered(replica, plain("p"))
    assert before == (0,)
    assert replica.state.node_snapshot("n1", "uid-p").mgpu_cards is before
    assert replica.state.node_snapshot("n1", "uid-q").mgpu_cards == ()
