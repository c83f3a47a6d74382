"""Violations of PodDisruptionBudgets are counted as kube-scheduler counts them."""

from typing import Any

import pytest

from mgpu.model.pods import Pod
from scheduler.decisions.disruption_budgets import BUDGETS, SELECTOR, DisruptionBudgets, selects


def budget(allowed: int, selector: dict[str, Any], name: str = "b", disrupted: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "metadata": {"namespace": "default", "name": name},
        "spec": {"selector": selector},
        "status": {"disruptionsAllowed": allowed, "disruptedPods": dict.fromkeys(disrupted, "2026-01-01T00:00:00Z")},
    }


def web(*names: str, namespace: str = "default") -> list[Pod]:
    return [Pod(namespace, name, name, labels={"app": "web"}) for name in names]


WEB = {"matchLabels": {"app": "web"}}


def test_evictions_beyond_the_allowed_number_violate_the_budget() -> None:
    budgets = DisruptionBudgets()
    assert not budgets.violated_by(web("a"))
    budgets.changed(budget(1, WEB))
    assert budgets.violated_by(web("a", "b", "c")) == {"b", "c"}
    budgets.changed(budget(1, WEB, disrupted=("a",)))
    assert budgets.violated_by(web("a", "b", "c")) == {"c"}
    budgets.changed(budget(0, {"matchLabels": {"app": "web", "tier": "x"}}, "other"))
    assert not budgets.violated_by([*web("a", "b", namespace="elsewhere"), Pod("default", "n", "n")])
    budgets.gone(budget(1, WEB))
    assert not budgets.violated_by(web("a", "b", "c"))


def test_budget_without_status_allows_no_eviction() -> None:
    budgets = DisruptionBudgets()
    budgets.changed({"metadata": {"namespace": "default", "name": "b"}, "spec": {"selector": WEB}})
    assert budgets.violated_by(web("a")) == {"a"}


@pytest.mark.parametrize(
    "selector",
    [
        {"matchExpressions": [{"key": "app", "operator": "Exists"}, *({"key": f"k{i}"} for i in range(SELECTOR))]},
        {"matchExpressions": [{"key": "app", "operator": "In", "values": ["web", *map(str, range(SELECTOR))]}]},
        {"matchLabels": {"app": "web", **{f"k{i}": "v" for i in range(SELECTOR)}}},
    ],
)
def test_budget_with_huge_selector_is_ignored(selector: dict[str, Any]) -> None:
    """100 of 25,000 expressions each took 850 MiB of the scheduler's memory."""
    budgets = DisruptionBudgets()
    budgets.changed(budget(0, WEB))
    budgets.changed(budget(0, selector))
    assert not budgets.violated_by(web("a"))
    assert not budgets._by_group


def test_many_budgets_of_one_namespace_do_not_slow_down_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def matches_nothing(*which: Any) -> bool:
        asked.append(which)
        return False

    monkeypatch.setattr("scheduler.decisions.disruption_budgets.selects", matches_nothing)
    budgets = DisruptionBudgets()
    for i in range(BUDGETS + 50):
        budgets.changed(budget(0, WEB, f"b{i:03}"))
    assert not budgets.violated_by(web("a", namespace="elsewhere"))
    assert not asked
    budgets.violated_by(web("a", "b"))
    assert len(asked) == 2 * BUDGETS


def test_budgets_of_many_workloads_each_protect_their_pods() -> None:
    """A namespace with 150 workloads had 50 of them unprotected."""
    budgets = DisruptionBudgets()
    names = [f"w{i:03}" for i in range(BUDGETS + 50)]
    for name in names:
        budgets.changed(budget(0, {"matchLabels": {"app": name}}, name))
    pods = [Pod("default", name, name, labels={"app": name, "tier": "x"}) for name in names]
    assert budgets.violated_by(pods) == set(names)
    budgets.changed(budget(0, {"matchLabels": {"tier": "x"}}, names[0]))
    assert names[0] in budgets.violated_by(pods[:1])
    budgets.changed(budget(0, {"matchExpressions": [{"key": "tier", "operator": "Exists"}]}, "any"))
    budgets.gone(budget(0, {}, names[1]))
    assert budgets.violated_by(pods[:2]) == {*names[:2]}
    for name in (*names, "any"):
        budgets.gone(budget(0, {}, name))
    assert not budgets.violated_by(pods)
    assert not budgets._by_group


@pytest.mark.parametrize(
    ("selector", "found"),
    [
        ({}, False),
        (WEB, True),
        ({"matchLabels": {"app": "db"}}, False),
        ({"matchExpressions": [{"key": "app", "operator": "In", "values": ["db", "web"]}]}, True),
        ({"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["web"]}]}, False),
        ({"matchExpressions": [{"key": "tier", "operator": "NotIn", "values": ["x"]}]}, True),
        ({"matchExpressions": [{"key": "app", "operator": "Exists"}]}, True),
        ({"matchExpressions": [{"key": "app", "operator": "DoesNotExist"}]}, False),
        ({**WEB, "matchExpressions": [{"key": "tier", "operator": "Exists"}]}, False),
        ({"matchExpressions": [{"key": "app", "operator": "Like", "values": ["web"]}]}, False),
    ],
)
def test_selector_matches_labels_as_in_kubernetes(selector: dict[str, Any], found: bool) -> None:
    assert selects(selector, {"app": "web"}) is found
