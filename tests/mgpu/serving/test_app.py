"""The HTTP answers of reviews, errors and probes."""

import io
import logging
from collections.abc import Callable
from typing import Any

import pytest
from flask.testing import FlaskClient

from mgpu.model.errors import BadObject, Problem, RetryLater
from mgpu.serving.app import new_app, serve_probes, serve_reviews
from mgpu.serving.request_memory import REVIEWS
from mgpu.serving.review import Reply, Review, allow
from tests.mgpu.serving.reviews import review


def client(handler: Callable[[Review], Reply] = allow, not_ready_reason: str | None = None) -> FlaskClient:
    app = new_app()
    serve_reviews(app, "/review", handler, kinds=("Pod",))
    serve_probes(app, lambda: not_ready_reason)
    return app.test_client()


def raising(error: Exception) -> Callable[[Review], Reply]:
    def handler(_: Review) -> Reply:
        raise error

    return handler


def post(to: FlaskClient, tree: Any) -> Any:
    return to.post("/review", json=tree)


def test_reply_of_the_handler_is_answered() -> None:
    answer = post(client(), review({"a": 1}))
    assert (answer.status_code, answer.mimetype) == (200, "application/json")
    assert answer.json["response"] == {"uid": "review-1", "allowed": True}


def test_bad_object_is_denied() -> None:
    answer = post(client(raising(BadObject([Problem("spec.a", "is odd")]))), review({"a": 1}))
    assert answer.status_code == 200
    assert answer.json["response"]["status"]["message"] == "spec.a: is odd"


def test_retry_later_is_a_503_that_closes_the_connection() -> None:
    answer = post(client(raising(RetryLater("not in sync"))), review({"a": 1}))
    assert (answer.status_code, answer.json) == (503, {"error": "not in sync"})
    assert answer.headers["Connection"] == "close"


def test_review_of_another_kind_is_denied() -> None:
    answer = post(client(), review({"a": 1}, kind={"kind": "Node"}))
    status = answer.json["response"]["status"]
    assert (answer.status_code, answer.json["response"]["allowed"], status["code"]) == (200, False, 400)
    assert status["message"] == "/review reviews objects of kind Pod, not 'Node'"


def test_unexpected_error_is_logged_and_not_shown_to_the_caller(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        answer = post(client(raising(KeyError("secret"))), review({"a": 1}))
    assert answer.status_code == 500
    assert answer.text == '{"error":"internal error; the log has the details"}\n'
    assert "secret" in caplog.text


@pytest.mark.parametrize("content_type", ["text/plain", "application/yaml", ""])
def test_other_content_type_is_415(content_type: str) -> None:
    answer = client().post("/review", data=b"{}", content_type=content_type)
    assert (answer.status_code, answer.json) == (415, {"error": "the content type must be application/json"})


def test_review_of_three_megabytes_is_admitted() -> None:
    answer = post(client(), review({"a": "x" * 1_500_000}, "UPDATE", old={"a": "y" * 1_500_000}))
    assert answer.json["response"]["allowed"]


def test_body_above_the_limit_is_413() -> None:
    answer = client().post("/review", data=b"x" * (REVIEWS.body + 1), content_type="application/json")
    assert (answer.status_code, answer.json) == (413, {"error": f"the body is larger than {REVIEWS.body} bytes"})


def test_client_that_disconnects_within_a_large_body_causes_no_error() -> None:
    class Gone(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:  # noqa: ARG002
            raise ConnectionResetError

    sent = {"wsgi.input": Gone(), "CONTENT_LENGTH": str(REVIEWS.body + 1)}
    answer = client().post("/review", content_type="application/json", environ_overrides=sent)
    assert answer.status_code == 413


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/review", 405), ("POST", "/nope", 404)])
def test_other_method_or_path_is_an_error_in_json(method: str, path: str, status: int) -> None:
    answer = client().open(path, method=method)
    assert answer.status_code == status
    assert answer.is_json
    assert answer.text.count("\n") == 1


def test_readiness_probe_returns_the_reason() -> None:
    assert client().get("/readyz").status_code == 200
    waiting = client(not_ready_reason="pods are not in sync")
    assert (waiting.get("/readyz").status_code, waiting.get("/readyz").text) == (503, "pods are not in sync\n")
    assert waiting.get("/healthz").status_code == 200
