"""kube-scheduler's filters (playground/fit.py)."""

from typing import Any

import pytest

from playground.fit import fits, message
from tests.builders import node

EXISTS = {"operator": "Exists"}


def a_pod(*requests: dict[str, str], init: tuple[dict[str, Any], ...] = (), **spec: Any) -> dict[str, Any]:
    rows = [{"name": f"c{i}", "resources": {"requests": r}} for i, r in enumerate(requests)]
    return {"metadata": {"name": "p"}, "spec": {"containers": rows, "initContainers": list(init), **spec}}


def tainted(**taint: str) -> dict[str, Any]:
    raw = node()
    raw["spec"]["taints"] = [{"key": "gpu", "value": "a", "effect": "NoSchedule", **taint}]
    return raw


def affinity(*expressions: dict[str, Any], fields: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    term = {"matchExpressions": list(expressions), "matchFields": list(fields)}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    return {"affinity": {"nodeAffinity": required}}


@pytest.mark.parametrize(
    ("pod", "raw_node", "reasons"),
    [
        pytest.param(a_pod({"cpu": "64"}), node(), [], id="fits to the last core"),
        pytest.param(a_pod({"cpu": "65"}), node(), ["Insufficient cpu"], id="one core short"),
        pytest.param(a_pod({"x/y": "1"}), node(), ["Insufficient x/y"], id="a resource the node does not have"),
        pytest.param(
            a_pod({"cpu": "65", "memory": "1Ti"}), node(), ["Insufficient cpu", "Insufficient memory"], id="all"
        ),
        pytest.param(a_pod(nodeSelector={"a": "b"}), node(labels={"a": "b"}), [], id="selector"),
        pytest.param(
            a_pod(nodeSelector={"a": "c"}),
            node(labels={"a": "b"}),
            ["node(s) didn't match Pod's node affinity/selector"],
            id="selector of another value",
        ),
        pytest.param(a_pod(), tainted(), ["node(s) had untolerated taint {gpu: a}"], id="taint"),
        pytest.param(a_pod(), tainted(effect="PreferNoSchedule"), [], id="soft taint"),
        pytest.param(a_pod(tolerations=[EXISTS]), tainted(), [], id="tolerates everything"),
        pytest.param(a_pod(tolerations=[{"key": "gpu", "value": "a"}]), tainted(), [], id="tolerates the value"),
        pytest.param(
            a_pod(tolerations=[{"key": "gpu", "value": "a", "effect": "NoExecute"}]),
            tainted(),
            ["node(s) had untolerated taint {gpu: a}"],
            id="tolerates another effect",
        ),
        pytest.param(
            a_pod(), {**node(), "spec": {"unschedulable": True}}, ["node(s) were unschedulable"], id="cordoned"
        ),
        pytest.param(a_pod(tolerations=[EXISTS]), {**node(), "spec": {"unschedulable": True}}, [], id="daemon pods"),
    ],
)
def test_fits_returns_the_reasons_of_the_first_plugin(
    pod: dict[str, Any], raw_node: dict[str, Any], reasons: list[str]
) -> None:
    assert fits(pod, raw_node, {}) == reasons


@pytest.mark.parametrize(
    ("expression", "fit"),
    [
        ({"key": "a", "operator": "In", "values": ["x", "5"]}, True),
        ({"key": "a", "operator": "NotIn", "values": ["5"]}, False),
        ({"key": "b", "operator": "NotIn", "values": ["5"]}, True),
        ({"key": "a", "operator": "Exists"}, True),
        ({"key": "a", "operator": "DoesNotExist"}, False),
        ({"key": "a", "operator": "Gt", "values": ["4"]}, True),
        ({"key": "a", "operator": "Lt", "values": ["5"]}, False),
        ({"key": "b", "operator": "Lt", "values": ["5"]}, False),
        ({"key": "a", "operator": "Like", "values": ["5"]}, False),
    ],
)
def test_fits_evaluates_affinity_expressions(expression: dict[str, Any], *, fit: bool) -> None:
    assert (fits(a_pod(**affinity(expression)), node(labels={"a": "5"}), {}) == []) is fit


def test_fits_evaluates_node_names_and_empty_terms() -> None:
    by_name = affinity(fields=({"key": "metadata.name", "operator": "In", "values": ["n1"]},))
    assert fits(a_pod(**by_name), node(), {}) == []
    assert fits(a_pod(**by_name), node("n2"), {}) != []
    assert fits(a_pod(**affinity()), node(), {}) != []


def test_fits_counts_used_resources_and_pods() -> None:
    assert fits(a_pod({"cpu": "2"}), node(), {"cpu": 63_000}) == ["Insufficient cpu"]
    assert fits(a_pod(), node(), {"pods": 250}) == ["Too many pods"]


def test_fits_ignores_resources_that_are_not_counted() -> None:
    assert fits(a_pod({"x/y": "1"}), node(), {}, counted=lambda name: name != "x/y") == []


def test_message_counts_reasons_over_nodes() -> None:
    reasons = {"n1": ["Insufficient cpu"], "n2": ["Insufficient cpu", "Insufficient memory"]}
    assert message(reasons, 3) == "0/3 nodes are available: 1 Insufficient memory, 2 Insufficient cpu."
