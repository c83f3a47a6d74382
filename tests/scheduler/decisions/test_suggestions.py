"""Volcano without the verb `predicate` finds the nodes with enough cards by the suggestions of mgpu."""

from typing import Any

import pytest

from mgpu.kube import ApiError
from mgpu.model.pods import SUGGESTED_NODE
from scheduler.decisions import suggestions
from tests import builders as b
from tests.scheduler.api.test_volcano import Volcano, task, wanting


class Blind(Volcano):
    """Volcano that learns only from `allocate` whether the cards suffice."""

    predicate = False

    def sessions(self, count: int, binpack: str = b.CORE) -> None:
        for _ in range(count):
            self.replica.clock.now += 1
            self.session(binpack=binpack)

    def nominated(self, pod: str) -> Any:
        return (self.api.pod(pod).get("status") or {}).get("nominatedNodeName")


def test_pod_is_bound_at_the_second_attempt_if_the_cards_of_the_first_node_do_not_suffice() -> None:
    volcano = Blind(("n0", 2), ("n1", 2))
    volcano.job("old", 2, 60)
    volcano.sessions(2, binpack="")
    full = str(volcano.api.pod("old-0")["spec"]["nodeName"])
    assert volcano.used(full) == [60, 60]
    volcano.job("new", 1, 60)
    volcano.sessions(1)
    assert volcano.nominated("new-0") not in (None, full)
    volcano.sessions(1)
    assert volcano.bound("new") == 1


def test_gang_that_does_not_fit_holds_nothing() -> None:
    volcano = Blind(("n1", 3))
    volcano.job("a", 4, 60)
    volcano.sessions(4)
    assert volcano.bound("a") == 0
    assert volcano.used("n1") == [0, 0, 0]
    assert volcano.nominated("a-3") is None
    volcano.job("b", 3, 60)
    volcano.session(["b", "a"], binpack=b.CORE)
    assert volcano.bound("b") == 3


@pytest.mark.parametrize(("cards", "size"), [((3, 3), 4), ((4, 4, 4), 8)])
def test_of_two_gangs_for_the_same_cards_one_is_bound_whole_within_three_sessions(
    cards: tuple[int, ...], size: int
) -> None:
    volcano = Blind(*((f"n{i}", count) for i, count in enumerate(cards)))
    volcano.job("a", size, 60)
    volcano.job("b", size, 60)
    volcano.sessions(3)
    assert sorted((volcano.bound("a"), volcano.bound("b"))) == [0, size]
    held = sum(core for i in range(len(cards)) for core in volcano.used(f"n{i}"))
    assert held == size * 60


def test_gang_is_complete_at_the_second_attempt_whichever_node_volcano_prefers() -> None:
    volcano = Blind(("n0", 3), ("n1", 3))
    volcano.job("a", 4, 60)
    volcano.session(binpack=b.CORE, prefer="n0")
    suggested = volcano.nominated("a-3")
    assert suggested == "n1"
    volcano.session(binpack=b.CORE, prefer=suggested)
    assert volcano.bound("a") == 4


def test_gang_that_lacks_something_else_is_nominated_to_no_node() -> None:
    volcano = Blind(("n0", 3))
    volcano.job("a", 2, 60)
    name, _, pods = volcano.jobs.pop()
    volcano.jobs.append((name, 3, pods))  # A pod of the gang does not exist yet.
    volcano.sessions(2)
    assert [volcano.nominated(pod) for pod in pods] == [None, None]


def test_all_cards_are_used_and_no_binding_is_refused() -> None:
    volcano = Blind(*((f"n{i}", 4) for i in range(4)))
    volcano.job("a", 20, 60, minimum=1)
    refused: list[str] = []
    for _ in range(3):
        refused += volcano.session(binpack=b.CORE)
    assert volcano.bound("a") == 16
    assert not [text for text in refused if "denied" in text.lower()]


def test_suggestion_keeps_no_cards_from_other_pods() -> None:
    volcano = Blind(("n0", 2), ("n1", 2))
    volcano.job("old", 2, 60)
    volcano.sessions(1)
    volcano.job("a", 3, 60)
    volcano.sessions(2)
    suggested = {volcano.nominated(f"a-{i}") for i in range(3)} - {None}
    assert len(suggested) == 1
    other = volcano.api.put("pods", wanting("other", 60))
    volcano.replica.deliver()
    gpu_pod = volcano.replica.state.gpu_pod(other["metadata"]["uid"])
    assert gpu_pod
    assert set(volcano.replica.filter.filter(gpu_pod, ["n0", "n1"]).passed) == suggested


def test_node_that_volcano_does_not_take_is_followed_by_the_next_one() -> None:
    volcano = Blind(("n0", 1), ("n1", 1), ("n2", 1))
    volcano.job("old", 1, 60)
    volcano.session(binpack=b.CORE)
    full = volcano.api.pod("old-0")["spec"]["nodeName"]
    pod = volcano.api.put("pods", wanting("p", 60))
    seen = []
    for _ in range(4):
        volcano.replica.deliver()
        assert volcano.call("allocate", {"task": task(volcano.api.pod("p"), full)})["errorMessage"]
        volcano.replica.suggestions.work()
        seen.append(volcano.nominated("p"))
    assert pod["metadata"]["name"] == "p"
    assert set(seen[:2]) == {"n0", "n1", "n2"} - {full}
    assert seen[2] is None  # Volcano has taken neither node, so each of them may be suggested again.
    assert seen[3] == seen[0]


def test_only_nodes_of_the_pods_node_selector_are_suggested() -> None:
    volcano = Blind(("n0", 1), ("n1", 1), ("n2", 1))
    volcano.api.put("nodes", b.node("n2", labels={"pool": "a"}))
    volcano.job("old", 1, 60)
    volcano.session(binpack=b.CORE)
    raw = wanting("p", 60)
    raw["spec"]["nodeSelector"] = {"pool": "a"}
    pod = volcano.api.put("pods", raw)
    volcano.replica.deliver()
    full = volcano.api.pod("old-0")["spec"]["nodeName"]
    assert full != "n2"
    volcano.call("allocate", {"task": task(pod, full)})
    volcano.replica.suggestions.work()
    assert volcano.nominated("p") == "n2"


def refused_pod() -> Blind:
    """Return a cluster with a pod `p` for which a node is suggested."""
    volcano = Blind(("n0", 1), ("n1", 1))
    volcano.job("old", 1, 60)
    volcano.session(binpack=b.CORE)
    pod = volcano.api.put("pods", wanting("p", 60))
    volcano.replica.deliver()
    volcano.call("allocate", {"task": task(pod, volcano.api.pod("old-0")["spec"]["nodeName"])})
    return volcano


def test_suggestion_is_removed_once_its_time_is_up() -> None:
    volcano = refused_pod()
    volcano.replica.suggestions.work()
    volcano.replica.deliver()
    assert volcano.nominated("p")
    volcano.replica.clock.now += suggestions._KEEP_SECONDS + 1
    volcano.replica.suggestions.work()
    assert volcano.nominated("p") is None
    assert SUGGESTED_NODE not in volcano.api.annotations("p")


def test_suggestion_of_the_last_leader_is_removed() -> None:
    volcano = refused_pod()
    volcano.replica.suggestions.work()
    volcano.replica.deliver()
    assert volcano.nominated("p")
    volcano.replica.suggestions.begin()
    volcano.replica.clock.now += suggestions._KEEP_SECONDS + 1
    volcano.replica.suggestions.work()
    assert volcano.nominated("p") is None
    assert not volcano.replica.suggestions._by_uid


def test_removal_that_fails_is_repeated() -> None:
    volcano = refused_pod()
    volcano.replica.suggestions.work()
    volcano.replica.deliver()
    volcano.replica.clock.now += suggestions._KEEP_SECONDS + 1
    volcano.api.reachable = False
    volcano.replica.suggestions.work()
    volcano.api.reachable = True
    volcano.replica.clock.now += 1
    volcano.replica.suggestions.work()
    assert volcano.nominated("p") is None


def test_nomination_by_a_scheduler_after_a_suggestion_is_not_removed() -> None:
    volcano = refused_pod()
    volcano.replica.suggestions.work()
    suggested = volcano.nominated("p")
    other = "n0" if suggested == "n1" else "n1"
    volcano.api.edit_pod("p", lambda pod: pod["status"].update(nominatedNodeName=other))
    volcano.replica.deliver()
    volcano.replica.clock.now += suggestions._KEEP_SECONDS + 1
    volcano.replica.suggestions.work()
    assert volcano.nominated("p") == other
    assert SUGGESTED_NODE not in volcano.api.annotations("p")


def test_suggestion_that_was_removed_by_others_is_written_again() -> None:
    volcano = refused_pod()
    volcano.replica.suggestions.work()
    volcano.api.edit_pod("p", lambda pod: pod["status"].pop("nominatedNodeName"))
    volcano.replica.deliver()
    volcano.call("allocate", {"task": task(volcano.api.pod("p"), volcano.api.pod("old-0")["spec"]["nodeName"])})
    volcano.replica.suggestions.work()
    assert volcano.nominated("p")


def test_refusal_during_an_attempt_does_not_remove_the_suggestion() -> None:
    volcano = refused_pod()
    full = volcano.api.pod("old-0")["spec"]["nodeName"]
    volcano.api.between = lambda: volcano.call("allocate", {"task": task(volcano.api.pod("p"), full)})
    volcano.replica.suggestions.work()
    volcano.replica.deliver()
    volcano.replica.suggestions.work()
    assert volcano.nominated("p")


def test_more_pods_than_a_search_has_attempts_get_nodes_of_their_own() -> None:
    volcano = Blind(*((f"n{i:02}", 1) for i in range(30)))
    volcano.job("old", 1, 60)
    volcano.session(binpack=b.CORE)
    full = volcano.api.pod("old-0")["spec"]["nodeName"]
    for i in range(24):
        volcano.api.put("pods", wanting(f"p{i}", 60))
    volcano.replica.deliver()
    for i in range(24):
        volcano.call("allocate", {"task": task(volcano.api.pod(f"p{i}"), full)})
    volcano.replica.suggestions.work()
    assert len({volcano.nominated(f"p{i}") for i in range(24)} - {None, full}) == 24


def test_rejection_of_the_pod_itself_removes_no_suggestion() -> None:
    volcano = refused_pod()
    volcano.replica.suggestions.work()
    volcano.replica.deliver()
    suggested = volcano.nominated("p")
    volcano.api.edit_pod("p", lambda pod: pod["spec"].update(schedulingGates=[{"name": "a/b"}]))
    volcano.replica.deliver()
    volcano.call("allocate", {"task": task(volcano.api.pod("p"), suggested)})
    volcano.replica.suggestions.work()
    assert volcano.nominated("p") == suggested


def test_nomination_by_a_scheduler_is_not_removed() -> None:
    volcano = Blind(("n0", 1))
    volcano.job("old", 1, 60)
    volcano.session()
    raw = wanting("p", 60)
    raw["status"] = {"nominatedNodeName": "n0"}
    pod = volcano.api.put("pods", raw)
    volcano.replica.deliver()
    assert volcano.call("allocate", {"task": task(pod, "n0")})["errorMessage"]
    volcano.replica.suggestions.work()
    assert volcano.nominated("p") == "n0"


def test_replica_that_does_not_lead_suggests_nothing() -> None:
    volcano = refused_pod()
    volcano.replica.leading = False
    volcano.replica.suggestions.work()
    assert volcano.nominated("p") is None


def test_suggestion_that_could_not_be_written_is_written_after_the_next_refusal() -> None:
    volcano = refused_pod()

    def fail() -> None:
        raise ApiError(503, "Down", "pods")

    volcano.api.between = fail
    volcano.replica.suggestions.work()
    assert volcano.nominated("p") is None
    volcano.call("allocate", {"task": task(volcano.api.pod("p"), volcano.api.pod("old-0")["spec"]["nodeName"])})
    volcano.replica.suggestions.work()
    assert volcano.nominated("p")


def test_suggestions_of_few_pods_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suggestions, "_MAX_PODS", 2)
    volcano = Blind(("n0", 1))
    volcano.job("old", 1, 60)
    volcano.session()
    for i in range(4):
        pod = volcano.api.put("pods", wanting(f"p{i}", 60))
        volcano.replica.deliver()
        volcano.call("allocate", {"task": task(pod, "n0")})
    assert len(volcano.replica.suggestions._by_uid) == 2
