"""What happens between the place of a member and its binding: members change, reservations end, cards are taken."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from mgpu.kube import ApiError
from mgpu.model.gangs import KUBERNETES
from tests.scheduler.fake import bind_all
from tests.scheduler.gangs import GangCluster, in_own_gang, pod_group, wanting

Raw = dict[str, Any]


@pytest.fixture
def three() -> GangCluster:
    return GangCluster(("n1", 3))


def own_gang(cluster: GangCluster, name: str, count: int) -> list[str]:
    return [cluster.create(in_own_gang(wanting(f"{name}-{i}"), name, count)) for i in range(count)]


def edit(cluster: GangCluster, pod: str, change: Callable[[Raw], None]) -> None:
    cluster.api.edit_pod(pod, change)
    cluster.replica.deliver()


def take_cards(cluster: GangCluster, count: int, node: str = "n1") -> None:
    for i in range(count):
        name = cluster.create(wanting(f"plain-{i}"))
        assert bind_all(cluster.replica, {f"uid-{name}": node}) == []


def test_complete_gang_that_loses_a_member_before_its_bindings_waits_again(three: GangCluster) -> None:
    """kube-scheduler does not know a gang of mgpu's labels, and would bind the other two."""
    pods = own_gang(three, "a", 3)
    assert [three.passed(pod) for pod in pods] == [[], [], ["n1"]]
    three.api.remove("pods", "a-2")
    three.replica.deliver()
    assert three.passed("a-0") == []
    assert three.held() == set()
    three.create(in_own_gang(wanting("a-3"), "a", 3))
    assert three.passed("a-3") == ["n1"]
    assert three.held() == {"a-0", "a-1", "a-3"}


def test_gang_that_lost_a_member_holds_nothing_although_another_one_moves() -> None:
    cluster = GangCluster(("n1", 2), ("n2", 2))
    cluster.gang("a", 3)
    nodes = {pod: cluster.passed(pod)[0] for pod in cluster.gangs["a"]}
    assert cluster.held() == {"a-0", "a-1", "a-2"}
    cluster.api.remove("pods", "a-1")
    cluster.replica.deliver()
    other = {"n1": "n2", "n2": "n1"}[nodes["a-2"]]
    assert cluster.passed("a-2", other) == [other]
    assert cluster.held() == set()


def test_complete_gang_whose_size_grows_holds_nothing(three: GangCluster) -> None:
    three.gang("a", 4, minimum=2)
    assert three.passed("a-0") == three.passed("a-1") == ["n1"]
    assert three.held() == {"a-0", "a-1"}
    three.replica.state.gangs.pod_group_changed(KUBERNETES, pod_group("a", 4))
    assert three.passed("a-0") == ["n1"]
    assert three.held() == set()


def test_gang_whose_size_shrinks_is_complete_at_its_next_call(three: GangCluster) -> None:
    three.gang("a", 4)
    assert three.passed("a-0") == three.passed("a-1") == ["n1"]
    three.replica.state.gangs.pod_group_changed(KUBERNETES, pod_group("a", 2))
    assert three.passed("a-0") == ["n1"]
    assert three.held() == {"a-0", "a-1"}


def test_place_of_a_member_that_moves_to_another_gang_does_not_count(three: GangCluster) -> None:
    pods = own_gang(three, "a", 3)
    assert [three.passed(pod) for pod in pods[:2]] == [[], []]
    edit(three, "a-1", lambda raw: raw["metadata"]["labels"].update({"mgpu.io/gang": "b"}))
    assert three.passed("a-2") == []
    assert three.held() == set()


def test_members_that_are_being_deleted_do_not_count() -> None:
    """A gang that is started again comes while the pods of its last run are still ending."""
    cluster = GangCluster(("n1", 3), ("n2", 3))
    cluster.gang("a", 3)
    assert cluster.cycle("a") == []
    assert cluster.bound("a") == 3
    for pod in cluster.gangs["a"]:
        edit(cluster, pod, lambda raw: raw["metadata"].update(deletionTimestamp="2026-11-23T15:00:00Z"))
    for i in range(3, 6):
        cluster.create(wanting(f"a-{i}", gang="a"))
    assert cluster.passed("a-3")
    assert cluster.passed("a-4")
    assert cluster.held() == {"a-0", "a-1", "a-2"}
    assert cluster.passed("a-5")
    assert cluster.held() == {f"a-{i}" for i in range(6)}


def test_place_of_a_pod_that_is_being_deleted_ends(three: GangCluster) -> None:
    three.gang("a", 3)
    for pod in ("a-0", "a-1"):
        assert three.passed(pod) == ["n1"]
    edit(three, "a-0", lambda raw: raw["metadata"].update(deletionTimestamp="2026-11-23T15:00:00Z"))
    assert three.passed("a-2") == ["n1"]
    assert three.held() == set()


@pytest.fixture
def permitted(three: GangCluster) -> GangCluster:
    """A complete gang that waits in Permit, for a member without GPUs for example, until its reservations end."""
    three.gang("a", 3)
    for pod in three.gangs["a"]:
        assert three.passed(pod) == ["n1"]
    three.replica.clock.now += 31
    three.replica.decider.check_overdue()
    assert three.held() == set()
    return three


def test_gang_that_waits_longer_than_its_reservations_gets_its_cards_at_the_first_binding(
    permitted: GangCluster,
) -> None:
    permitted.api.bind("a-1", "n1")
    assert permitted.held() == {"a-0", "a-1", "a-2"}
    take = permitted.create(wanting("plain"))
    assert permitted.passed(take) == []
    assert bind_all(permitted.replica, {"uid-a-0": "n1", "uid-a-2": "n1"}) == []


def test_no_member_is_bound_if_another_pod_took_cards_after_the_reservations_ended(permitted: GangCluster) -> None:
    take_cards(permitted, 1)
    refused = bind_all(permitted.replica, {f"uid-{pod}": "n1" for pod in permitted.gangs["a"]})
    assert len(refused) == 3
    assert "another pod took the cards that gang default/a needs on n1" in refused[0]
    assert permitted.bound("a") == 0
    assert permitted.held() == {"plain-0"}


def test_gang_that_was_refused_is_bound_once_the_cards_are_free(permitted: GangCluster) -> None:
    take_cards(permitted, 1)
    bind_all(permitted.replica, {f"uid-{pod}": "n1" for pod in permitted.gangs["a"]})
    permitted.cycle("a")
    assert permitted.bound("a") == 0
    permitted.api.remove("pods", "plain-0")
    permitted.replica.deliver()
    assert permitted.cycle("a") == []
    assert permitted.bound("a") == 3


def test_binding_elsewhere_than_the_place_is_decided_as_without_a_gang() -> None:
    cluster = GangCluster(("n1", 2), ("n2", 2))
    cluster.gang("a", 2)
    assert cluster.passed("a-0", "n1") == ["n1"]
    assert bind_all(cluster.replica, {"uid-a-0": "n2"}) == []


def test_dry_run_of_a_binding_reserves_no_gang(permitted: GangCluster) -> None:
    permitted.api.bind("a-0", "n1", dry_run=True)
    assert permitted.held() == set()


def test_members_may_be_filtered_at_the_same_time() -> None:
    cluster = GangCluster(("n1", 3), ("n2", 3))
    pods = cluster.gang("a", 6)
    answers: dict[str, list[str]] = {}
    together = threading.Barrier(len(pods))

    def call(name: str) -> None:
        gpu_pod = cluster.replica.state.gpu_pod(f"uid-{name}")
        assert gpu_pod is not None
        together.wait(10)
        answers[name] = cluster.replica.gang_filter.filter(gpu_pod, ["n1", "n2"]).passed

    threads = [threading.Thread(target=call, args=(pod,)) for pod in pods]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(answers.values()) == [["n1"]] * 3 + [["n2"]] * 3
    assert cluster.held() == {*pods}
    assert bind_all(cluster.replica, {f"uid-{pod}": node for pod, (node,) in answers.items()}) == []


GROUP_OF_A = "/apis/scheduling.k8s.io/v1alpha2/namespaces/default/podgroups?metadata.name=a"


def test_pod_group_that_the_watch_has_not_delivered_is_read(three: GangCluster) -> None:
    """kube-scheduler calls milliseconds after the PodGroup was created."""
    three.api.podgroups[GROUP_OF_A] = [pod_group("a", 4)]
    for i in range(4):
        three.create(wanting(f"a-{i}", gang="a"))
    assert [three.passed(f"a-{i}") for i in range(4)] == [["n1"]] * 3 + [[]]
    assert three.held() == set()


def test_pod_group_that_comes_after_its_pods_is_read(three: GangCluster) -> None:
    three.create(wanting("a-0", gang="a"))
    three.passed("a-0")
    three.api.podgroups[GROUP_OF_A] = [pod_group("a", 2)]
    three.create(wanting("a-1", gang="a"))
    assert three.passed("a-1") == ["n1"]
    assert three.held() == set()
    assert three.passed("a-0") == ["n1"]
    assert three.held() == {"a-0", "a-1"}


def test_filter_does_not_answer_while_a_pod_group_cannot_be_read(three: GangCluster) -> None:
    three.create(wanting("a-0", gang="a"))
    three.api.reachable = False
    assert three.client.post("/filter", json={"Pod": three.api.pod("a-0"), "NodeNames": ["n1"]}).status_code == 503


def test_pod_group_that_does_not_exist_is_read_less_often_after_some_seconds(three: GangCluster) -> None:
    three.create(wanting("a-0", gang="a"))
    for _ in range(5):
        three.passed("a-0")
    assert three.api.lists == 5
    three.replica.clock.now += 11
    for _ in range(5):
        assert three.passed("a-0") == ["n1"]
    assert three.api.lists == 6
    three.replica.clock.now += 11
    three.passed("a-0")
    assert three.api.lists == 7


@pytest.mark.parametrize("status", [404, 403])
def test_pod_group_of_a_kind_that_cannot_be_read_is_no_gang(
    three: GangCluster, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    three.create(wanting("a-0", gang="a"))
    calls = []

    def refuse(path: str, **_: str) -> None:
        calls.append(path)
        raise ApiError(status, "No", path)

    monkeypatch.setattr(three.api, "list", refuse)
    assert [three.passed("a-0") for _ in range(3)] == [["n1"]] * 3
    assert len(calls) == 1


def test_gang_whose_reservations_have_ended_often_is_bound_within_a_short_one(three: GangCluster) -> None:
    """The members wait for one without GPUs. The pause after a short reservation is not for its first Binding."""
    three.gang("a", 3)
    for _ in range(5):
        for pod in three.gangs["a"]:
            assert three.passed(pod) == ["n1"]
        assert three.held() == {"a-0", "a-1", "a-2"}
        three.replica.clock.now += 31
        three.replica.decider.check_overdue()
        assert three.held() == set()
    for pod in three.gangs["a"]:
        assert three.passed(pod) == ["n1"]
    assert three.held() == {"a-0", "a-1", "a-2"}
    assert bind_all(three.replica, {f"uid-{pod}": "n1" for pod in three.gangs["a"]}) == []


def test_reservation_of_a_member_that_is_being_deleted_ends_at_the_next_call() -> None:
    cluster = GangCluster(("n1", 1), ("n2", 1))
    cluster.gang("a", 2)
    for pod in cluster.gangs["a"]:
        assert len(cluster.passed(pod)) == 1
    edit(cluster, "a-0", lambda raw: raw["metadata"].update(deletionTimestamp="2026-11-23T15:00:00Z"))
    assert len(cluster.passed("a-1")) == 1
    assert cluster.held() == set()
