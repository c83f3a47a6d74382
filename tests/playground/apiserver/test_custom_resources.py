"""CustomResourceDefinitions: creating one serves its kind, with its schema and its status."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.playground.apiserver.api import MERGE, STRATEGIC, TABLE, Api

_DEVICE = {
    "type": "object",
    "required": ["type", "minor"],
    "properties": {
        "type": {"type": "string", "enum": ["gpu", "rdma"]},
        "minor": {"type": "integer", "minimum": 0},
        "health": {"type": "boolean", "default": True},
        "resources": {"type": "object", "additionalProperties": {"x-kubernetes-int-or-string": True}},
    },
}
_SCHEMA = {
    "type": "object",
    "properties": {
        "spec": {"type": "object", "properties": {"devices": {"type": "array", "items": _DEVICE}}},
        "status": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
    },
}


@pytest.fixture
def cards(api: Api, name: str) -> Iterator[str]:
    """The path of a new cluster-scoped kind `Card<n>` with schema, status and a column."""
    column = {"name": "First", "type": "string", "jsonPath": ".spec.devices[0].type"}
    version = {
        "name": "v1alpha1", "served": True, "storage": True, "schema": {"openAPIV3Schema": _SCHEMA},
        "subresources": {"status": {}}, "additionalPrinterColumns": [column],
    }  # fmt: skip
    names = {"kind": f"Card{name}", "plural": f"cards{name}", "shortNames": [f"c{name}"]}
    spec = {"group": "test.mgpu.io", "scope": "Cluster", "names": names, "versions": [version]}
    definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    definition = f"{definitions}/cards{name}.test.mgpu.io"
    rv = api.ok("POST", definitions, {"metadata": {"name": f"cards{name}.test.mgpu.io"}, "spec": spec})
    path = f"/apis/test.mgpu.io/v1alpha1/cards{name}"
    if api.real:
        watch = f"{definitions}?fieldSelector=metadata.name=cards{name}.test.mgpu.io"
        list(api.events(watch, rv["metadata"]["resourceVersion"], _established))
        _wait_served(api, path)
    yield path
    api.ok("DELETE", definition)


def _established(events: list[Any]) -> bool:
    conditions = events[-1]["object"].get("status", {}).get("conditions", [])
    return any(c["type"] == "Established" and c["status"] == "True" for c in conditions)


def _wait_served(api: Api, path: str) -> None:
    for _ in range(1000):
        if api.call("GET", path).code == 200:
            return
    raise TimeoutError(f"{path} is not served")


def _card(name: str = "n1", *devices: Any, **more: Any) -> Any:
    return {"metadata": {"name": name}, "spec": {"devices": list(devices)}, **more}


def _of(path: str) -> Any:
    kind = "Card" + path.rpartition("cards")[2]
    return {"apiVersion": "test.mgpu.io/v1alpha1", "kind": kind}


def test_custom_resource_is_pruned_defaulted_and_kept(api: Api, cards: str) -> None:
    device = {"type": "gpu", "minor": 0, "resources": {"a/core": "100", "a/mem": 5}, "unknown": 1}
    made = api.ok("POST", cards, _of(cards) | _card("n1", device, status={"x": 1}))
    kept = {"type": "gpu", "minor": 0, "health": True, "resources": {"a/core": "100", "a/mem": 5}}
    assert made["spec"] == {"devices": [kept]}
    assert "status" not in made
    assert made["metadata"]["generation"] == 1
    assert api.get(f"{cards}/n1") == made
    listed = api.get(cards)
    assert listed["kind"] == made["kind"] + "List"
    assert listed["items"] == [made], "items of custom lists say what they are"


def test_null_in_a_known_field_counts_as_missing(api: Api, cards: str) -> None:
    device = {"type": "gpu", "minor": 0, "health": None, "resources": {"a/core": None}}
    made = api.ok("POST", cards, _of(cards) | _card("n1", device))
    assert made["spec"]["devices"] == [{"type": "gpu", "minor": 0, "health": True, "resources": {}}]


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ({"type": "gpu", "minor": "0"}, 'spec.devices[0].minor in body must be of type integer: "string"'),
        ({"type": "gpu", "minor": -1}, "should be greater than or equal to 0"),
        ({"type": "tpu", "minor": 0}, 'Unsupported value: "tpu": supported values: "gpu", "rdma"'),
        ({"type": "gpu"}, "spec.devices[0].minor: Required value"),
    ],
)
def test_schema_violation_is_refused(api: Api, cards: str, device: object, words: str) -> None:
    reply = api.call("POST", cards, _of(cards) | _card("n1", device))
    assert (reply.code, reply.reason) == (422, "Invalid")
    assert words in reply.message


def test_custom_resource_status_and_spec_are_written_separately(api: Api, cards: str) -> None:
    api.ok("POST", cards, _of(cards) | _card())
    mixed = {
        "metadata": {"labels": {"a": "1"}},
        "spec": {"devices": [{"type": "gpu", "minor": 1}]},
        "status": {"ok": True},
    }
    through_status = api.patch(f"{cards}/n1/status", mixed).body
    assert (through_status["status"], through_status["spec"]) == ({"ok": True}, {"devices": []})
    assert "labels" not in through_status["metadata"]
    through_object = api.patch(f"{cards}/n1", {**mixed, "status": {"ok": False}}).body
    assert through_object["status"] == {"ok": True}
    assert through_object["metadata"]["generation"] == 2


def test_strategic_merge_is_not_for_custom_resources(api: Api, cards: str) -> None:
    api.ok("POST", cards, _of(cards) | _card())
    assert api.patch(f"{cards}/n1", {}, STRATEGIC).code == 415
    assert api.patch(f"{cards}/n1", {"metadata": {"labels": {"a": "1"}}}, MERGE).code == 200


def test_update_must_name_the_version_it_is_based_on(api: Api, cards: str) -> None:
    made = api.ok("POST", cards, _of(cards) | _card())
    blind = {**made, "metadata": {"name": "n1"}}
    assert "must be specified for an update" in api.call("PUT", f"{cards}/n1", blind).message
    assert api.call("PUT", f"{cards}/n1", made).code == 200


def test_custom_resource_is_discovered_watched_and_printed(api: Api, cards: str) -> None:
    rv = api.get(cards)["metadata"]["resourceVersion"]
    api.ok("POST", cards, _of(cards) | _card("n1", {"type": "rdma", "minor": 0}))
    assert api.watch(cards, rv, 1)[0]["object"]["kind"] == _of(cards)["kind"]
    table = api.call("GET", cards, Accept=TABLE).body
    assert [c["name"] for c in table["columnDefinitions"]] == ["Name", "First"]
    assert table["rows"][0]["cells"] == ["n1", "rdma"]
    found = api.get("/apis/test.mgpu.io/v1alpha1")["resources"]
    plural = cards.rpartition("/")[2]
    assert {r["name"] for r in found if r["name"].startswith(plural)} == {plural, f"{plural}/status"}


def test_deleted_definition_deletes_its_objects(api: Api, cards: str) -> None:
    if api.real:
        pytest.skip("the real server takes its time over it")
    api.ok("POST", cards, _of(cards) | _card())
    definition = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{cards.rpartition('/')[2]}.test.mgpu.io"
    made = api.get(definition)
    api.ok("DELETE", definition)
    assert api.call("GET", cards).code == 404
    api.ok(
        "POST", definition.rpartition("/")[0], {"metadata": {"name": made["metadata"]["name"]}, "spec": made["spec"]}
    )
    assert api.get(cards)["items"] == []
