"""Strategic merge patches in all their directives, on a kind whose lists may change."""

from typing import Any

import pytest

from tests.playground.apiserver.api import STRATEGIC, Api

_CASES: dict[str, tuple[Any, list[tuple[str, str]]]] = {
    "items are found by name": ([{"name": "b", "image": "new"}], [("a", "1"), ("b", "new"), ("c", "1")]),
    "an unknown item is added": ([{"name": "d", "image": "1"}], [("d", "1"), ("a", "1"), ("b", "1"), ("c", "1")]),
    "an item is deleted": ([{"name": "b", "$patch": "delete"}], [("a", "1"), ("c", "1")]),
    "the list is replaced": ([{"$patch": "replace"}, {"name": "d", "image": "1"}], [("d", "1")]),
}


def _deployment() -> Any:
    containers = [{"name": name, "image": "1", "env": [{"name": "A", "value": "1"}]} for name in "abc"]
    template = {"metadata": {"labels": {"app": "x"}}, "spec": {"containers": containers}}
    spec = {"selector": {"matchLabels": {"app": "x"}}, "template": template}
    return {"metadata": {"name": "d", "finalizers": ["a.b/c"]}, "spec": spec}


@pytest.fixture
def deployment(api: Api, ns: str) -> str:
    path = f"/apis/apps/v1/namespaces/{ns}/deployments"
    api.ok("POST", path, _deployment())
    return f"{path}/d"


def _patched(api: Api, path: str, spec: Any) -> Any:
    return api.patch(path, {"spec": {"template": {"spec": spec}}}, STRATEGIC).body["spec"]["template"]["spec"]


@pytest.mark.parametrize(("containers", "expected"), _CASES.values(), ids=_CASES)
def test_strategic_merge_of_lists_goes_by_key(
    api: Api, deployment: str, containers: Any, expected: list[tuple[str, str]]
) -> None:
    found = _patched(api, deployment, {"containers": containers})["containers"]
    assert [(c["name"], c["image"]) for c in found] == expected


@pytest.mark.parametrize(
    ("order", "expected"), [("cab", "cab"), ("dba", "dbac"), ("ca", "bca"), ("da", "dabc")]
)  # fmt: skip
def test_strategic_merge_sets_the_order_of_elements(api: Api, deployment: str, order: str, expected: str) -> None:
    changes = [{"name": name, "image": "1"} for name in order]
    spec = {"$setElementOrder/containers": [{"name": name} for name in order], "containers": changes}
    assert "".join(c["name"] for c in _patched(api, deployment, spec)["containers"]) == expected


def test_strategic_merge_of_nested_lists_goes_by_key(api: Api, deployment: str) -> None:
    env = [{"name": "A", "$patch": "delete"}, {"name": "B", "value": "2"}]
    found = _patched(api, deployment, {"containers": [{"name": "a", "env": env}]})["containers"]
    assert [c["env"] for c in found] == [[{"name": "B", "value": "2"}], *[[{"name": "A", "value": "1"}]] * 2]


def test_strategic_merge_adds_and_removes_plain_values(api: Api, deployment: str) -> None:
    more = api.patch(deployment, {"metadata": {"finalizers": ["d.e/f"]}}, STRATEGIC).body
    assert sorted(more["metadata"]["finalizers"]) == ["a.b/c", "d.e/f"]
    less = api.patch(deployment, {"metadata": {"$deleteFromPrimitiveList/finalizers": ["a.b/c"]}}, STRATEGIC).body
    assert less["metadata"]["finalizers"] == ["d.e/f"]
    api.patch(deployment, {"metadata": {"finalizers": None}})


def test_strategic_merge_replaces_maps(api: Api, deployment: str) -> None:
    api.patch(deployment, {"metadata": {"labels": {"a": "1", "b": "2"}}}, STRATEGIC)
    changed = api.patch(deployment, {"metadata": {"labels": {"$patch": "replace", "c": "3"}}}, STRATEGIC).body
    assert changed["metadata"]["labels"] == {"c": "3"}
    api.patch(deployment, {"metadata": {"finalizers": None}})


def test_strategic_merge_retain_keys_removes_other_keys(api: Api, deployment: str) -> None:
    volume = {"name": "v", "emptyDir": {}}
    _patched(api, deployment, {"volumes": [volume]})
    other = {"name": "v", "configMap": {"name": "m"}, "$retainKeys": ["name", "configMap"]}
    found = _patched(api, deployment, {"volumes": [other]})["volumes"]
    assert [sorted(v) for v in found] == [["configMap", "name"]]
