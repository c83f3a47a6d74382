from dataclasses import replace

import pytest

from mgpu.model.device_object import write_device
from mgpu.model.pods import Node
from mgpu.settings import load_settings
from scheduler.cluster.cache import ClusterCache
from tests import builders as b
from tests.scheduler.fake import SETTINGS, FakeApi, Replica, cluster

INDEX = "vke.volcengine.com/gpu-index-container-c"
ASSUMED = "vke.volcengine.com/assumed"


def record(cards: str = "0") -> dict[str, str]:
    return {ASSUMED: "true", INDEX: cards}


def bound(name: str = "p", cards: str = "0", core: int = 50, **more: object) -> dict[str, object]:
    return b.share(name, core, annotations=record(cards), node="n1", **more)  # type: ignore[arg-type]


def running(raw: dict[str, object]) -> dict[str, object]:
    return {**raw, "status": {"phase": "Running"}}


@pytest.fixture
def one() -> Replica:
    """A node with two cards."""
    return Replica(cluster(("n1", 2)))


def given(replica: Replica, raw: dict[str, object]) -> None:
    replica.api.put("pods", raw)
    replica.deliver()


def free(replica: Replica, node: str = "n1") -> list[int]:
    return [state.core_free for state in replica.state.node_snapshot(node, "").cards]


def test_a_bound_pod_holds_what_its_record_says(one: Replica) -> None:
    given(one, bound(cards="1"))
    assert free(one) == [1000, 500]


def test_a_pod_that_changes_in_nothing_but_its_status_leaves_its_node_as_it_was(one: Replica) -> None:
    """Else every probe of its containers makes who decides on the node at that moment begin anew."""
    given(one, bound())
    before = one.state.node_snapshot("n1", "")
    given(one, running(bound()))
    assert one.state.node_snapshot("n1", "") == before


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_pod_that_has_ended_holds_nothing(one: Replica, phase: str) -> None:
    given(one, bound())
    given(one, bound(phase=phase))
    assert free(one) == [1000, 1000]


def test_a_terminating_pod_still_holds(one: Replica) -> None:
    raw = bound()
    raw["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"  # type: ignore[index]
    given(one, raw)
    assert free(one) == [500, 1000]


def test_a_pod_recreated_under_its_name_is_another_pod(one: Replica) -> None:
    given(one, bound(uid="first"))
    one.api.remove("pods", "p")
    one.api.put("pods", b.share("p", uid="second"))
    one.deliver()
    assert free(one) == [1000, 1000]
    assert one.state.uid_of("default", "p") == "second"


def test_the_old_pods_end_does_not_hide_the_new_one(one: Replica) -> None:
    """A re-list hands over what is new before what is gone."""
    one.state.pod_changed(b.share("p", uid="first"))
    one.state.pod_changed(b.share("p", uid="second"))
    one.state.pod_gone(b.share("p", uid="first"))
    assert one.state.uid_of("default", "p") == "second"


def test_a_pod_on_a_node_that_does_not_exist_is_held_until_the_node_comes() -> None:
    api = FakeApi()
    replica = Replica(api)
    given(replica, bound())
    assert [h.node for h in replica.state.holdings()] == ["n1"]
    for kind, items in (("nodes", cluster(("n1", 2)).nodes), ("devices", cluster(("n1", 2)).devices)):
        api.put(kind, items["n1"])
    replica.deliver()
    assert free(replica) == [500, 1000]


def test_a_deleted_device_takes_the_cards_and_leaves_the_accounts(one: Replica) -> None:
    given(one, bound())
    device = one.api.devices["n1"]
    one.api.remove("devices", "n1")
    one.deliver()
    assert one.state.node_snapshot("n1", "").cards == ()
    one.api.put("devices", device)
    one.deliver()
    assert free(one) == [500, 1000]


def test_a_device_that_cannot_be_read_leaves_the_last_one_in_force(one: Replica) -> None:
    device = write_device(Node("n1"), "", b.cards(2))
    device["spec"]["devices"][1]["resources"]["koordinator.sh/gpu-memory"] = "much"
    one.api.put("devices", device)
    one.deliver()
    assert free(one) == [1000, 1000]
    (name, reason, message), *_ = one.events
    assert (name, reason) == ("n1", "BadDevice")
    assert "spec.devices[1].resources[koordinator.sh/gpu-memory]" in message


def test_two_cards_of_one_uuid_are_no_inventory(one: Replica) -> None:
    first = b.card(0)
    one.api.put("devices", write_device(Node("n1"), "", (first, replace(first, index=1, minor=1))))
    one.deliver()
    assert "UUID" in one.events[0][2]
    assert len(one.state.node_snapshot("n1", "").cards) == 2


def test_a_node_without_device_offers_equal_cards() -> None:
    api = FakeApi()
    raw = b.node("n1")
    raw["status"]["capacity"] |= {"aliyun.com/gpu-mem": "30", "aliyun.com/gpu-count": "2"}
    api.put("nodes", raw)
    cards = Replica(api).state.node_snapshot("n1", "").cards
    assert [state.card.memory for state in cards] == [15 * b.GIB] * 2


def test_a_node_of_mgpus_agent_has_no_cards_before_its_device() -> None:
    """Its status says gpu-count first. What was recorded of cards that were made up, no card would have."""
    other, api = cluster(("n1", 2)), FakeApi()
    raw = b.node("n1", labels={}, **{"mgpu.io/agent": "{}"})
    raw["status"]["capacity"] |= {"aliyun.com/gpu-mem": "160", "aliyun.com/gpu-count": "2"}
    api.put("nodes", raw)
    replica = Replica(api)
    assert replica.state.node_snapshot("n1", "").cards == ()
    api.put("devices", other.devices["n1"])
    replica.deliver()
    assert [s.card.uuid for s in replica.state.node_snapshot("n1", "").cards] == ["GPU-n1-0", "GPU-n1-1"]


def test_a_running_pod_with_a_garbled_record_is_held_on_every_card(one: Replica) -> None:
    given(one, running(bound(cards="banana")))
    assert free(one) == [500, 500]
    assert [(name, reason) for name, reason, _ in one.events] == [("p", "UnknownCards")]
    assert "banana" in one.events[0][2]


def test_a_record_of_a_card_that_is_not_there_is_told_and_held_for_when_it_is(one: Replica) -> None:
    given(one, running(bound(cards="7")))
    assert free(one) == [1000, 1000]
    assert [(name, reason) for name, reason, _ in one.events] == [("p", "UnknownCards")]
    assert "card 7, which n1 does not have" in one.events[0][2]


def test_a_running_pod_without_a_record_is_held_on_every_card(one: Replica) -> None:
    given(one, running(b.share("p", node="n1")))
    assert free(one) == [500, 500]
    assert not one.state.undecided_pods()
    one.api.edit_pod("p", lambda raw: raw["metadata"].update(labels={"kubelet": "was here"}))
    one.deliver()
    assert len(one.events) == 1, "its status changes every now and then"


def test_a_pod_of_which_one_container_ran_holds_on_every_card_what_that_one_asks_for(one: Replica) -> None:
    """The kubelet starts a container whose resource the node does not offer; the others still wait for their cards."""
    raw = b.pod("p", b.container("ran", 10, 1024), b.container("waits", 50, 1024), node="n1")
    given(one, {**raw, "status": {"containerStatuses": [{"name": "ran", "containerID": "x"}]}})
    assert free(one) == [900, 900]


def test_a_running_pod_whose_very_ask_is_garbled_may_use_up_any_card(one: Replica) -> None:
    raw = running(bound())
    raw["metadata"]["annotations"]["vke.volcengine.com/container-multiple-gpu"] = "x"  # type: ignore[index]
    given(one, raw)
    assert free(one) == [0, 0]
    assert one.events[0][1] == "UnknownCards"


def test_init_containers_and_sidecars_count_as_they_run(one: Replica) -> None:
    sidecar = b.container("s", 20, 1024, restartPolicy="Always")
    init = b.container("i", 70, 1024)
    raw = b.pod(
        "p",
        b.container("c", 60, 1024),
        init=(init, sidecar),
        annotations={ASSUMED: "true", **{f"{INDEX[:-1]}{name}": "0" for name in "isc"}},
        node="n1",
    )
    given(one, raw)
    assert free(one) == [200, 1000]  # sidecar and app container together; the init container ran before both


@pytest.mark.parametrize("now", ["minGPUMemory: 4096", "enabled: false", "MGPUEnable: false"])
def test_settings_that_change_take_no_cards_away(now: str) -> None:
    settings = load_settings(f"dialects: {{mgpu: {{{now}}}}}")
    replica = Replica(cluster(("n1", 2)), settings=settings)
    given(replica, running(bound(cards="1")))
    assert free(replica) == [1000, 500]


def test_pods_without_gpu_are_known_by_name_only(one: Replica) -> None:
    given(one, b.pod("plain", b.container("c"), node="n1"))
    assert one.state.uid_of("default", "plain") == "uid-plain"
    assert one.state.gpu_pod("uid-plain") is None
    assert free(one) == [1000, 1000]


def test_what_is_held_on_a_card_that_comes_back_smaller_stays_held(one: Replica) -> None:
    given(one, b.share("p", 50, 70 * 1024, annotations=record(), node="n1"))
    one.api.put("devices", write_device(Node("n1"), "", b.cards(2, gib=40)))
    one.deliver()
    assert [s.memory_free for s in one.state.node_snapshot("n1", "").cards] == [0, 40 * b.GIB]
    one.api.remove("pods", "p")
    one.deliver()
    assert [s.memory_free for s in one.state.node_snapshot("n1", "").cards] == [40 * b.GIB] * 2


def test_a_pod_that_is_no_pod_is_refused_by_its_path() -> None:
    raw = b.share("p")
    raw["spec"]["containers"] = "none"
    with pytest.raises(Exception, match=r"spec\.containers"):
        ClusterCache(SETTINGS).pod_changed(raw)
