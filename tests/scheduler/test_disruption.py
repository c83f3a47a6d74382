from typing import Any

import pytest

from mgpu.model.pods import Pod
from scheduler.disruption import Budgets, selects


def budget(allowed: int, selector: dict[str, Any], name: str = "b", disrupted: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "metadata": {"namespace": "default", "name": name},
        "spec": {"selector": selector},
        "status": {"disruptionsAllowed": allowed, "disruptedPods": dict.fromkeys(disrupted, "2026-01-01T00:00:00Z")},
    }


def web(*names: str, namespace: str = "default") -> list[Pod]:
    return [Pod(namespace, name, name, labels={"app": "web"}) for name in names]


WEB = {"matchLabels": {"app": "web"}}


def test_all_but_the_first_so_many_violate() -> None:
    budgets = Budgets()
    assert not budgets.violated_by(web("a"))
    budgets.changed(budget(1, WEB))
    assert budgets.violated_by(web("a", "b", "c")) == {"b", "c"}
    budgets.changed(budget(1, WEB, disrupted=("a",)))
    assert budgets.violated_by(web("a", "b", "c")) == {"c"}
    budgets.changed(budget(0, {"matchLabels": {"app": "web", "tier": "x"}}, "other"))
    assert not budgets.violated_by([*web("a", "b", namespace="elsewhere"), Pod("default", "n", "n")])
    budgets.gone(budget(1, WEB))
    assert not budgets.violated_by(web("a", "b", "c"))


def test_a_budget_that_has_said_nothing_yet_allows_nothing() -> None:
    budgets = Budgets()
    budgets.changed({"metadata": {"namespace": "default", "name": "b"}, "spec": {"selector": WEB}})
    assert budgets.violated_by(web("a")) == {"a"}


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
def test_selectors(selector: dict[str, Any], found: bool) -> None:
    assert selects(selector, {"app": "web"}) is found
