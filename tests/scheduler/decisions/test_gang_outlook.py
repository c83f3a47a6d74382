"""The outlook on a gang says how many members are placed, how many more fit, and why the next one does not."""

from typing import Any

import pytest

from mgpu.model.gangs import VOLCANO
from mgpu.model.pods import VOLCANO_GROUP
from mgpu.presentation.gang_views import GangView, Outlook, describe_gang
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.decisions.gang_outlook import GangOutlooks
from tests.scheduler.gangs import GangCluster, in_own_gang, labelled, wanting

FULL = "insufficient GPU (3 cards: 3 core 20 percent short) (beside the other members of its gang)"


def views(cluster: GangCluster) -> list[GangView]:
    replica = cluster.replica
    outlooks = GangOutlooks(replica.state, replica.filter, replica.settings)
    found = outlooks.incomplete(replica.state.gpu_pods())
    return [outlooks.with_outlook(view, [*cluster.api.nodes]) for view in found]


def only(cluster: GangCluster) -> str:
    (view,) = views(cluster)
    return describe_gang(view)


@pytest.fixture
def three() -> GangCluster:
    return GangCluster(("n1", 3))


def test_gang_without_places_names_the_first_member_that_does_not_fit(three: GangCluster) -> None:
    three.gang("a", 4)
    waiting = "waiting: a-0, a-1, a-2, a-3"
    assert only(three) == f"0 of 4 placed; 3 more fit now, but a-3 does not fit: 1 node: {FULL}; {waiting}"


def test_bound_members_are_placed_and_the_others_fit_beside_them(three: GangCluster) -> None:
    three.gang("a", 4)
    for name in ("a-0", "a-1"):
        three.api.bind(name, "n1")
    three.replica.deliver()
    assert only(three).startswith("2 of 4 placed; 1 more fits now, but a-3 does not fit: 1 node: ")


def test_reserved_members_are_placed(three: GangCluster) -> None:
    three.gang("a", 3)
    for name in three.gangs["a"]:
        assert three.passed(name) == ["n1"]
    assert views(three) == []


def test_gang_that_fits_does_not_wait_for_cards(three: GangCluster) -> None:
    three.gang("a", 3)
    assert only(three).startswith("0 of 3 placed; 3 more fit now, so it does not wait for cards; waiting: ")


def test_members_that_fit_make_up_for_one_that_does_not() -> None:
    """A scheduler goes on with the next member of a gang with more members than it needs."""
    cluster = GangCluster(("n1", 2))
    cluster.create(wanting("x"))
    cluster.api.bind("x", "n1")
    cluster.replica.deliver()
    cluster.gang("a", 2, core=40, minimum=2)
    cluster.create(wanting("a-two", 200, "a", priority=9))
    (view,) = views(cluster)
    assert view.waiting == ("a-two", "a-0", "a-1")
    assert describe_gang(view).startswith("0 of 2 placed; 2 more fit now, so it does not wait for cards; ")


def test_outlook_is_what_the_filter_then_does() -> None:
    cluster = GangCluster(("n1", 3), ("n2", 2))
    cluster.gang("a", 5)
    cluster.create(wanting("x"))
    cluster.api.bind("x", "n2")
    cluster.replica.deliver()
    (view,) = views(cluster)
    assert view.outlook is not None
    rows = [cluster.passed(name) for name in cluster.gangs["a"]]
    assert sum(map(bool, rows)) == view.outlook.fits == 4
    assert rows[4] == []
    assert view.outlook.misfit == "a-4"


def test_gang_of_many_different_members_is_not_examined(three: GangCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request takes a look at all nodes, and a user chooses how many members differ."""
    searched: list[str] = []
    filter_ = three.replica.filter.filter

    def counted(gpu_pod: GpuPod, *rest: Any) -> Any:
        searched.append(gpu_pod.pod.name)
        return filter_(gpu_pod, *rest)

    monkeypatch.setattr(three.replica.filter, "filter", counted)
    for i in range(30):
        three.create(in_own_gang(wanting(f"p-{i:02}", 50 + i), "own", 30))
    (view,) = views(three)
    assert (view.outlook, len(searched)) == (None, 0)
    assert describe_gang(view).startswith("0 of 30 placed; waiting: p-00, ")


def test_nothing_is_reserved_by_looking(three: GangCluster) -> None:
    three.gang("a", 3)
    version = three.replica.state.version
    views(three)
    assert (three.replica.state.version, three.held()) == (version, set())


def test_missing_and_gated_members_are_named(three: GangCluster) -> None:
    three.create(in_own_gang(wanting("p"), "own", 4))
    three.create(in_own_gang(wanting("q", schedulingGates=[{"name": "team/quota"}]), "own", 4))
    text = "0 of 4 placed; 1 more fits now; 2 more pods do not exist yet; waiting: p; with scheduling gates: q"
    assert only(three) == text


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        ({"scheduling.x-k8s.io/pod-group": "g"}, "its PodGroup (scheduling.x-k8s.io) is not known"),
        ({"mgpu.io/gang": "g", "mgpu.io/gang-size": "many"}, "its label mgpu.io/gang-size must be a number"),
    ],
)
def test_gang_of_unknown_size_says_so(three: GangCluster, labels: dict[str, str], reason: str) -> None:
    three.create(labelled(wanting("p"), **labels))
    assert only(three) == f"0 placed; how many it needs is unknown: {reason}; waiting: p"


def in_volcano(pod: dict[str, Any], group: str) -> dict[str, Any]:
    pod["metadata"]["annotations"] = {VOLCANO_GROUP: group}
    return pod


def test_gang_of_volcano_is_shown_but_not_placed_by_the_filter(three: GangCluster) -> None:
    group = {"metadata": {"namespace": "default", "name": "job-1"}, "spec": {"minMember": 4}}
    three.replica.state.gangs.pod_group_changed(VOLCANO, group)
    for i in range(4):
        three.create(in_volcano(wanting(f"v-{i}"), "job-1"))
    assert only(three).startswith("0 of 4 placed; 3 more fit now, but v-3 does not fit: ")
    assert [three.passed(f"v-{i}") for i in range(4)] == [["n1"]] * 4
    assert three.held() == set()


@pytest.mark.parametrize("size", [0, 1])
def test_pods_without_others_to_wait_for_are_no_gang(three: GangCluster, size: int) -> None:
    three.create(in_own_gang(wanting("p"), "own", size))
    assert views(three) == []


def test_nodes_beyond_those_that_the_filter_for_gangs_tries_are_not_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.decisions.gang_outlook.SPARE_NODES", 0)
    cluster = GangCluster(("n1", 1), ("n2", 1))
    cluster.gang("a", 2)
    (view,) = views(cluster)
    assert view.outlook == Outlook(0, "a-0", "2 nodes: not examined for a member of a gang")
