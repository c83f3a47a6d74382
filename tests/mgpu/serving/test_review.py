"""Parsing AdmissionReviews and building replies."""

from typing import Any

import orjson
import pytest

from mgpu.model.errors import Problem
from mgpu.serving.review import BadRequest, allow, deny, json_pointer, parse_review
from tests.mgpu.serving.reviews import patch_of, review


def parsed(tree: Any) -> Any:
    return parse_review(orjson.dumps(tree))


def test_review_of_an_update_is_parsed() -> None:
    got = parsed(review({"a": 1}, "UPDATE", old={"a": 0}, user="bob", subresource="status", dryRun=True))
    assert (got.uid, got.operation, got.kind, got.resource) == ("review-1", "UPDATE", "Pod", "pods/status")
    assert (got.user, got.groups, got.dry_run) == ("bob", ("system:authenticated",), True)
    assert (got.object, got.old) == ({"a": 1}, {"a": 0})


def test_review_of_a_delete_has_only_the_old_object() -> None:
    got = parsed(review(None, "DELETE", old={"a": 0}))
    assert (got.object, got.old) == (None, {"a": 0})


WRONG = {
    "nothing": (b"", "is not JSON"),
    "not JSON": (b"{", "is not JSON"),
    "not UTF-8": (b'{"kind":"\xff"}', "is not JSON"),
    "NaN": (b'{"kind":NaN}', "is not JSON"),
    "deeper than any object": (b"[" * 100_000, "is not JSON"),
    "a list": (b"[]", "not an AdmissionReview"),
    "a number": (b"17", "not an AdmissionReview"),
    "a pod": (orjson.dumps({"apiVersion": "v1", "kind": "Pod"}), "not an AdmissionReview"),
    "an old version": (orjson.dumps({**review({}), "apiVersion": "admission.k8s.io/v1beta1"}), "v1beta1"),
    "no request": (orjson.dumps({**review({}), "request": None}), "request is missing"),
    "a request of a wrong type": (orjson.dumps({**review({}), "request": []}), "request must be an object, not list"),
    "no uid": (orjson.dumps(review({"a": 1}, uid="")), "request.uid is missing"),
    "a uid of a wrong type": (orjson.dumps(review({"a": 1}, uid=7)), "request.uid must be a string, not int"),
    "an unknown operation": (orjson.dumps(review({"a": 1}, "PAINT")), "request.operation must be one of"),
    "no object": (orjson.dumps(review(None)), "request.object is missing in a review of CREATE"),
    "an object of a wrong type": (orjson.dumps(review("p")), "request.object must be an object, not str"),
    "no old object": (orjson.dumps(review({"a": 1}, "UPDATE")), "request.oldObject is missing"),
    "groups of a wrong type": (orjson.dumps(review({"a": 1}, userInfo={"groups": [1]})), "userInfo.groups"),
    "a kind of a wrong type": (orjson.dumps(review({"a": 1}, kind="Pod")), "request.kind must be an object"),
}


@pytest.mark.parametrize(("body", "says"), WRONG.values(), ids=WRONG)
def test_body_that_is_no_review_is_a_bad_request_with_the_reason(body: bytes, says: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_review(body)
    assert caught.value.status == 400
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_allow_returns_patch_and_warnings() -> None:
    patch = [{"op": "add", "path": json_pointer("metadata", "annotations", "a/b~c"), "value": "x"}]
    answer = allow(parsed(review({"a": 1})), patch, ["mind"]).body
    assert answer["response"] == answer["response"] | {"uid": "review-1", "allowed": True, "warnings": ["mind"]}
    assert patch_of(answer) == [{"op": "add", "path": "/metadata/annotations/a~1b~0c", "value": "x"}]


def test_allow_without_changes_has_no_patch() -> None:
    assert allow(parsed(review({"a": 1}))).body["response"] == {"uid": "review-1", "allowed": True}


def test_deny_returns_every_problem_in_message_and_causes() -> None:
    answer = deny(parsed(review({"a": 1})), [Problem("spec.a", "is odd"), Problem("spec.b", "is even")])
    status = answer.body["response"]["status"]
    assert not answer.allowed
    assert (status["code"], status["reason"]) == (422, "Invalid")
    assert status["message"] == "spec.a: is odd; spec.b: is even"
    assert [c["field"] for c in status["details"]["causes"]] == ["spec.a", "spec.b"]


def test_deny_with_a_text_returns_its_code() -> None:
    status = deny(parsed(review({"a": 1})), "no card fits", 409).body["response"]["status"]
    assert (status["code"], status["reason"], status["message"]) == (409, "Conflict", "no card fits")
