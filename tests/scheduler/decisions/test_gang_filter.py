"""Gangs under kube-scheduler: all members that a gang needs get cards, or none."""

import itertools
import logging
import time

import pytest

from mgpu.model.gangs import KUBERNETES
from playground.scheduling.gang_session import Group
from tests.scheduler.fake import bind_all
from tests.scheduler.gangs import GangCluster, coscheduled, in_own_gang, labelled, pod_group, wanting


@pytest.fixture
def three() -> GangCluster:
    return GangCluster(("n1", 3))


def test_gang_that_fits_is_bound_whole(three: GangCluster) -> None:
    three.gang("a", 3)
    assert three.cycle("a") == []
    assert three.bound("a") == 3
    assert three.used("n1") == [60, 60, 60]


def test_gang_that_does_not_fit_is_not_bound_and_holds_nothing(three: GangCluster) -> None:
    three.gang("a", 4)
    assert [three.cycle("a") for _ in range(3)] == [[], [], []]
    assert three.bound("a") == 0
    assert three.held() == set()
    reason = "insufficient GPU (3 cards: 3 core 20 percent short) (beside the other members of its gang)"
    assert three.why("a-3", "n1") == reason


def test_more_members_than_the_gang_needs_do_not_make_up_for_cards(three: GangCluster) -> None:
    """The cycle goes on after the member that fits nowhere."""
    three.gang("a", 6, minimum=4)
    assert [three.cycle("a") for _ in range(3)] == [[], [], []]
    assert three.bound("a") == 0


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_of_two_gangs_for_the_same_cards_one_is_bound_whole(order: tuple[str, str]) -> None:
    cluster = GangCluster(("n1", 3), ("n2", 3))
    cluster.gang("a", 4)
    cluster.gang("b", 4)
    for _ in range(3):
        assert cluster.cycle(*order) == []
    assert [cluster.bound(gang) for gang in order] == [4, 0]
    assert cluster.held() == {*cluster.gangs[order[0]]}


@pytest.mark.parametrize("turns", ["abababab", "aaabbbab", "abbbbaaa"])
def test_of_two_gangs_whose_members_wait_in_permit_one_is_bound_whole(turns: str) -> None:
    cluster = GangCluster(("n1", 3), ("n2", 3))
    cluster.gang("a", 4)
    cluster.gang("b", 4)
    for _ in range(3):
        rest = {gang: iter([*cluster.waiting(gang)]) for gang in "ab"}
        for gang in turns:
            pod = next(rest[gang], None)
            if pod is not None:
                assert bind_all(cluster.replica, cluster.scheduling.pod_cycle(cluster.groups[gang], pod)) == []
    assert sorted(cluster.bound(gang) for gang in "ab") == [0, 4]


def test_gang_comes_once_cards_are_free(three: GangCluster) -> None:
    three.create(wanting("plain"))
    three.api.bind("plain", "n1")
    three.replica.deliver()
    three.gang("a", 3)
    three.cycle("a")
    assert three.bound("a") == 0
    three.api.remove("pods", "plain")
    three.replica.deliver()
    assert three.cycle("a") == []
    assert three.bound("a") == 3


def test_tentative_places_keep_no_cards_from_other_pods(three: GangCluster) -> None:
    three.gang("a", 4)
    three.cycle("a")
    for i in range(3):
        three.create(wanting(f"plain-{i}"))
        assert three.passed(f"plain-{i}") == ["n1"]
        three.api.bind(f"plain-{i}", "n1")
        three.replica.deliver()
    assert three.passed("a-0") == []


def test_members_after_those_that_the_gang_needs_are_ordinary_pods() -> None:
    cluster = GangCluster(("n1", 3), ("n2", 3))
    cluster.gang("a", 5, minimum=2)
    assert len(cluster.passed("a-0")) == 1
    assert len(cluster.passed("a-1")) == 1
    assert cluster.held() == {"a-0", "a-1"}
    assert len(cluster.passed("a-2")) == 2
    assert cluster.held() == {"a-0", "a-1"}


def test_reservations_of_a_complete_gang_count_for_other_pods_and_end(three: GangCluster) -> None:
    three.gang("a", 3)
    for pod in three.gangs["a"]:
        assert three.passed(pod) == ["n1"]
    three.create(wanting("plain"))
    assert three.passed("plain") == []
    three.replica.settle()
    assert three.held() == set()
    assert three.passed("plain") == ["n1"]


def test_member_whose_node_is_filtered_out_gets_another_one() -> None:
    cluster = GangCluster(("n1", 2), ("n2", 2))
    cluster.gang("a", 2)
    first = cluster.passed("a-0")[0]
    other = {"n1": "n2", "n2": "n1"}[first]
    assert cluster.passed("a-0", other) == [other]
    assert cluster.passed("a-1", first) == [first]
    assert cluster.held() == {"a-0", "a-1"}
    assert cluster.passed("a-0", first) == [first]
    assert cluster.used(first) == [60, 60]


def test_reserved_gang_of_which_a_member_fits_nowhere_any_more_holds_nothing() -> None:
    cluster = GangCluster(("n1", 2), ("n2", 1))
    cluster.gang("a", 3)
    for pod in cluster.gangs["a"]:
        assert cluster.passed(pod)
    assert len(cluster.held()) == 3
    on_second = next(h.name for h in cluster.replica.state.holdings("n2"))
    assert cluster.passed(on_second, "n1") == []
    assert cluster.held() == set()


def test_nominated_node_alone_is_refused_without_an_effect_on_the_gang(three: GangCluster) -> None:
    three.api.put("nodes", {**three.api.nodes["n1"], "metadata": {**three.api.nodes["n1"]["metadata"], "name": "n9"}})
    three.gang("a", 3)
    for pod in three.gangs["a"]:
        three.passed(pod, "n1")
    three.api.edit_pod("a-0", lambda pod: pod["status"].update(nominatedNodeName="n9"))
    three.replica.deliver()
    assert three.passed("a-0", "n9") == []
    assert len(three.held()) == 3
    assert three.passed("a-0", "n1", "n9") == ["n1"]


def test_card_that_another_pod_takes_meanwhile_refuses_the_gang(three: GangCluster) -> None:
    three.gang("a", 3)
    for pod in ("a-0", "a-1"):
        assert three.passed(pod) == ["n1"]
    for name in ("one", "two"):
        three.create(wanting(name))
        three.api.bind(name, "n1")
    three.replica.deliver()
    assert three.passed("a-2") == []
    assert three.held() == {"one", "two"}


def test_place_that_is_lost_withdraws_the_reservations_of_the_others() -> None:
    cluster = GangCluster(("n1", 2), ("n2", 1))
    cluster.gang("a", 3)
    assert cluster.passed("a-0", "n1") == ["n1"]
    assert cluster.passed("a-1", "n2") == ["n2"]
    cluster.create(wanting("plain"))
    bind_all(cluster.replica, {"uid-plain": "n2"})
    assert "took the cards that gang default/a needs on n2" in cluster.why("a-2", "n1")
    assert cluster.held() == {"plain"}


def test_member_whose_cards_are_taken_gets_others_of_its_node(three: GangCluster) -> None:
    three.gang("a", 2)
    assert three.passed("a-0") == ["n1"]
    three.create(wanting("plain"))
    three.api.bind("plain", "n1")
    three.replica.deliver()
    assert three.passed("a-1") == ["n1"]
    assert three.held() == {"a-0", "a-1", "plain"}


def test_gang_is_not_completed_while_a_force_deleted_pod_of_its_namespace_runs(
    three: GangCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bindings would be refused, one by one."""
    three.gang("a", 2)
    assert three.passed("a-0") == ["n1"]
    with monkeypatch.context() as patch:
        patch.setattr(three.replica.state, "remnant_problem", lambda _: "pod default/old still runs")
        assert three.passed("a-0") == three.passed("a-1") == []
        assert three.held() == set()
    assert three.passed("a-1") == ["n1"]
    assert three.held() == {"a-0", "a-1"}


def test_place_of_a_deleted_member_counts_no_more(three: GangCluster) -> None:
    three.gang("a", 4)
    for pod in ("a-0", "a-1", "a-2"):
        three.passed(pod)
    three.api.remove("pods", "a-0")
    three.replica.deliver()
    assert three.passed("a-3") == ["n1"]
    assert three.held() == set()


def test_member_that_was_bound_otherwise_counts(three: GangCluster) -> None:
    three.gang("a", 3)
    three.passed("a-0")
    three.api.bind("a-0", "n1")
    three.api.bind("a-1", "n1")
    three.replica.deliver()
    assert three.passed("a-2") == ["n1"]
    assert three.held() == {"a-0", "a-1", "a-2"}


def test_member_without_gpus_counts_as_placed(three: GangCluster) -> None:
    three.gang("a", 2, minimum=3)
    launcher = wanting("launcher", gang="a")
    launcher["spec"]["containers"][0]["resources"] = {}
    three.create(launcher)
    three.passed("a-0")
    three.passed("a-1")
    assert three.held() == {"a-0", "a-1"}


def test_place_ends_without_calls_unless_its_pod_is_nominated_to_it(three: GangCluster) -> None:
    three.gang("a", 3)
    three.passed("a-0")
    three.passed("a-1")
    three.api.edit_pod("a-0", lambda pod: pod["status"].update(nominatedNodeName="n1"))
    three.replica.deliver()
    three.replica.clock.now += 61
    three.passed("a-2")
    assert three.held() == set()  # a-1 has no place any more.
    three.passed("a-1")
    assert three.held() == {"a-0", "a-1", "a-2"}


def test_node_that_is_gone_is_given_up() -> None:
    cluster = GangCluster(("n1", 1), ("n2", 2))
    cluster.gang("a", 2)
    first = cluster.passed("a-0")[0]
    cluster.api.remove("devices", first)
    cluster.api.remove("nodes", first)
    cluster.replica.deliver()
    rest = [name for name in ("n1", "n2") if name != first]
    assert cluster.passed("a-1", *rest) in ([], rest)
    assert cluster.held() in (set(), {"a-0", "a-1"})
    assert not cluster.replica.state.holdings(first)


def test_unknown_pod_group_is_no_gang_and_is_logged_once(three: GangCluster, caplog: pytest.LogCaptureFixture) -> None:
    three.create(wanting("p", gang="unknown"))
    with caplog.at_level(logging.WARNING):
        assert three.passed("p") == ["n1"]
        assert three.passed("p") == ["n1"]
    assert [r.getMessage() for r in caplog.records if "default/unknown" in r.getMessage()] == [
        "the pods of the gang default/unknown are placed one by one: its PodGroup (scheduling.k8s.io) is not known"
    ]


def test_group_with_the_policy_basic_and_a_group_that_was_deleted_are_no_gangs(three: GangCluster) -> None:
    gangs = three.replica.state.gangs
    basic = {"metadata": {"namespace": "default", "name": "a"}, "spec": {"schedulingPolicy": {"basic": {}}}}
    gangs.pod_group_changed(KUBERNETES, basic)
    gangs.pod_group_changed(KUBERNETES, pod_group("b", 2))
    gangs.pod_group_gone(KUBERNETES, pod_group("b", 2))
    for name in ("a", "b"):
        gpu_pod = three.replica.decider.read(wanting("p", gang=name))
        assert gpu_pod is not None
        assert gangs.of(gpu_pod.pod) is None


def test_gang_of_the_coscheduling_plugin(three: GangCluster) -> None:
    member = coscheduled(three, "a", 4)
    three.gangs["a"] = [three.create(member(wanting(f"a-{i}"))) for i in range(4)]
    three.groups["a"] = Group(4)
    for pod in three.waiting("a"):
        assert bind_all(three.replica, three.scheduling.pod_cycle(three.groups["a"], pod)) == []
    assert three.bound("a") == 0
    assert three.held() == set()


def test_gang_by_labels_of_mgpu_waits_in_the_filter(three: GangCluster) -> None:
    """kube-scheduler binds each pod that passes, so none may pass before all have a place."""
    pods = [three.create(in_own_gang(wanting(f"a-{i}"), "a", 3)) for i in range(3)]
    assert [three.passed(pod) for pod in pods] == [[], [], ["n1"]]
    assert three.held() == {*pods}
    three.replica.announcements.work()
    assert "mgpu.io/cards-changed" in three.api.nodes["n1"]["metadata"]["annotations"]
    assert [three.passed(pod) for pod in pods] == [["n1"]] * 3


def test_gang_by_labels_of_mgpu_that_does_not_fit_says_how_far_it_is(three: GangCluster) -> None:
    pods = [three.create(in_own_gang(wanting(f"a-{i}"), "a", 4)) for i in range(4)]
    assert [three.passed(pod) for pod in pods] == [[]] * 4
    assert three.why("a-0", "n1") == "the pod waits for its gang default/a: 3 of 4 members fit now"
    reply = three.answer(three.api.pod("a-0"), ["n1"])
    assert not reply["FailedNodes"]  # Otherwise kube-scheduler would evict pods for it.


@pytest.mark.parametrize("size", ["", "many", "2000"])
def test_gang_size_that_cannot_be_used_is_no_gang(three: GangCluster, size: str) -> None:
    three.create(labelled(wanting("p"), **{"mgpu.io/gang": "a", "mgpu.io/gang-size": size}))
    assert three.passed("p") == ["n1"]


def test_members_of_a_same_card_group_get_one_card() -> None:
    cluster = GangCluster(("n1", 2), ("n2", 2))
    for name in cluster.gang("a", 3, 30):
        cluster.api.edit_pod(
            name, lambda pod: pod["metadata"].setdefault("annotations", {}).update({"mgpu.io/same-card-group": "g"})
        )
    cluster.replica.deliver()
    assert cluster.cycle("a") == []
    assert cluster.bound("a") == 3
    assert sorted(itertools.chain(cluster.used("n1"), cluster.used("n2"))) == [0, 0, 0, 90]


def test_victims_are_chosen_beside_the_places_of_the_gang(three: GangCluster) -> None:
    for i in range(2):
        three.create(wanting(f"low-{i}"))
        three.api.bind(f"low-{i}", "n1")
        three.replica.deliver()
    for pod in three.gang("a", 2):
        three.api.edit_pod(pod, lambda raw: raw["spec"].update(priority=10))
    three.replica.deliver()
    assert three.passed("a-0") == ["n1"]
    assert three.passed("a-1") == []
    body = {"Pod": three.api.pod("a-1"), "NodeNameToMetaVictims": {"n1": {"Pods": [{"UID": "uid-low-0"}]}}}
    victims = three.client.post("/preempt", json=body).json
    assert victims is not None
    assert len(victims["NodeNameToMetaVictims"]["n1"]["Pods"]) == 1


def test_waiting_gang_is_answered_quickly() -> None:
    """kube-scheduler asks for a waiting gang hundreds of times a second. Here, it may take a tenth of the time."""
    cluster = GangCluster(*((f"n{i}", 4) for i in range(50)))
    cluster.gang("a", 8, minimum=9)
    names = list(cluster.api.nodes)
    pods = [gpu_pod for pod in cluster.waiting("a") if (gpu_pod := cluster.replica.decider.read(pod)) is not None]
    for gpu_pod in pods:
        cluster.replica.gang_filter.filter(gpu_pod, names)
    began = time.thread_time()
    for gpu_pod in pods * 10:
        assert len(cluster.replica.gang_filter.filter(gpu_pod, names).passed) == 1
    assert (time.thread_time() - began) / 80 < 0.003
