"""The answers of the webhook, through Flask."""

import logging
from typing import Any

import pytest
from flask.testing import FlaskClient

from mgpu.settings import load_settings
from tests.builders import container, pod, share
from tests.mgpu.serving.reviews import patch_of, review
from webhook.admission import make_app

INDEX = "vke.volcengine.com/gpu-index-container-c"


@pytest.fixture
def client() -> FlaskClient:
    return make_app(load_settings()).test_client()


def answer(client: FlaskClient, path: str, tree: Any) -> Any:
    got: Any = client.post(path, json=tree)
    assert got.status_code == 200
    return got.json["response"]


@pytest.mark.parametrize("path", ["/mutate", "/validate"])
@pytest.mark.parametrize("raw", [share(), pod("p", {"name": "c"})], ids=["GPU", "no GPU"])
def test_valid_pod_is_admitted_unchanged(client: FlaskClient, path: str, raw: Any) -> None:
    assert answer(client, path, review(raw)) == {"uid": "review-1", "allowed": True}


def test_denial_names_the_field_and_is_logged_with_the_uid(
    client: FlaskClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        got = answer(client, "/validate", review(pod("p", container("c", 120), uid="uid-7")))
    assert (got["allowed"], got["status"]["code"]) == (False, 422)
    assert got["status"]["message"].startswith("spec.containers[0].resources.requests[vke.volcengine.com/mgpu-core]: ")
    assert vars(caplog.records[0])["pod"] == "uid-7"


def test_change_of_a_placement_in_the_status_subresource_is_forbidden(client: FlaskClient) -> None:
    old, new = share(annotations={INDEX: "0"}), share(annotations={INDEX: "1"})
    got = answer(client, "/validate", review(new, "UPDATE", old=old, subresource="status"))
    assert (got["allowed"], got["status"]["code"], got["status"]["reason"]) == (False, 403, "Forbidden")


def test_update_is_not_mutated(client: FlaskClient) -> None:
    raw = share(annotations={INDEX: "0"})
    assert patch_of({"response": answer(client, "/mutate", review(raw, "UPDATE", old=raw))}) == []


@pytest.mark.parametrize("path", ["/mutate", "/validate"])
def test_deletion_is_admitted(client: FlaskClient, path: str) -> None:
    assert answer(client, path, review(None, "DELETE", old=pod("p", container("c", 120))))["allowed"]


def test_old_pod_that_breaks_a_rule_may_change(client: FlaskClient) -> None:
    old = pod("p", container("c", 120))
    new = {**old, "metadata": {**old["metadata"], "finalizers": []}}
    assert answer(client, "/validate", review(new, "UPDATE", old=old))["allowed"]


@pytest.mark.parametrize("path", ["/mutate", "/validate"])
def test_object_of_another_kind_is_denied(client: FlaskClient, path: str) -> None:
    got = answer(client, path, review({"a": 1}, kind={"kind": "Binding"}, subresource="binding"))
    assert (got["allowed"], got["status"]["code"]) == (False, 400)


@pytest.mark.parametrize("path", ["/mutate", "/validate"])
def test_pod_with_wrong_types_is_denied_with_the_field(client: FlaskClient, path: str) -> None:
    got = answer(client, path, review({"spec": {"containers": [{"name": 7}]}}))
    assert (got["allowed"], got["status"]["details"]["causes"][0]["field"]) == (False, "spec.containers[0].name")
