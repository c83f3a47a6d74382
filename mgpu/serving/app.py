"""Builds the Flask apps that the webhook and the scheduler serve: admission reviews, probes and metrics.

The app that `new_app` returns answers every error with a status and one line of JSON. Routes must raise errors instead
of building such answers.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress

import orjson
from flask import Flask, Response, current_app, request
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge

from mgpu.model.errors import BadObject, RetryLater
from mgpu.serving.request_memory import REVIEWS, Busy, Limits, RequestMemory, TooLarge
from mgpu.serving.review import BadRequest, Reply, Review, deny, parse_review

_log = logging.getLogger(__name__)
_CHUNK = 1 << 16  # bytes
_MOST_DISCARDED = 32 << 20  # bytes
_REQUEST_MEMORY = "mgpu-in-flight"

ReviewObserver = Callable[[str, Review, Reply | None, float], None]
"""A function that is called after a review with the path, the review, the reply and the duration in seconds.

The path has no leading slash. The reply is None if the handler raised an error other than BadObject.
"""


def new_app(limits: Limits = REVIEWS) -> Flask:
    """Return an app without routes.

    It answers an error with the status of the error and `{"error": "…"}`. It logs an unexpected error and answers 500.
    """
    app = Flask(__name__, static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = limits.body
    app.extensions[_REQUEST_MEMORY] = RequestMemory(limits)
    app.register_error_handler(Exception, _answer_error)
    return app


def serve_reviews(
    app: Flask,
    path: str,
    handler: Callable[[Review], Reply],
    kinds: Collection[str],
    observe: ReviewObserver = lambda *_: None,
) -> None:
    """Answer AdmissionReviews of these kinds at POST `path` with the handler's reply.

    If the handler raises BadObject, the object is denied with 422 and the problems. If it raises RetryLater, the answer
    is 503 and the connection is closed. Then the API server applies `failurePolicy`, and its next call can reach
    another replica.

    Args:
        kinds: the kinds of objects that the path reviews. A review of another kind is denied with 400.
        observe: the function that is called after each review of one of these kinds, for the metrics.
    """

    def answer() -> Response:
        if request.mimetype != "application/json":
            raise BadRequest(415, "the content type must be application/json")
        with read_body() as body:
            return _response(decide(parse_review(body)))

    def decide(review: Review) -> Reply:
        if review.kind not in kinds:
            expected = " and ".join(sorted(kinds))
            return deny(review, f"{path} reviews objects of kind {expected}, not {review.kind[:100]!r}", 400)
        began = time.perf_counter()
        reply = None
        try:
            reply = handler(review)
        except BadObject as error:
            reply = deny(review, error.problems)
        finally:
            observe(path.removeprefix("/"), review, reply, time.perf_counter() - began)
        return reply

    app.add_url_rule(path, f"review {path}", answer, methods=["POST"])


@contextmanager
def read_body() -> Iterator[bytearray]:
    """Read the body of the current request as `RequestMemory.read` does, within the limits of the app."""
    memory: RequestMemory = current_app.extensions[_REQUEST_MEMORY]
    with memory.read(request.stream) as body:
        yield body


def serve_probes(app: Flask, not_ready_reason: Callable[[], str | None] = lambda: None) -> None:
    """Serve GET `/healthz`, which always answers 200, and GET `/readyz`.

    Args:
        not_ready_reason: returns the reason why the process is not ready, or None if it is ready.
    """
    serve_probe(app, "/healthz", lambda: None)
    serve_probe(app, "/readyz", not_ready_reason)


def serve_probe(app: Flask, path: str, failure_reason: Callable[[], str | None]) -> None:
    """Serve GET `path`, which answers 200 with `ok`, or 503 with the reason that `failure_reason` returns."""

    def answer() -> Response:
        reason = failure_reason()
        if reason is None:
            return Response("ok\n", 200, mimetype="text/plain")
        return Response(f"{reason}\n", 503, mimetype="text/plain")

    app.add_url_rule(path, f"probe {path}", answer)


def serve_metrics(app: Flask, render: Callable[[], bytes], content_type: str) -> None:
    app.add_url_rule("/metrics", "metrics", lambda: Response(render(), content_type=content_type))


def _response(reply: Reply) -> Response:
    response = Response(orjson.dumps(reply.body, option=orjson.OPT_APPEND_NEWLINE), reply.status)
    response.mimetype = "application/json"
    if reply.close:
        response.headers["Connection"] = "close"
    return response


def _answer_error(error: Exception) -> Response:
    if isinstance(error, BadRequest):
        return _response(Reply({"error": str(error)}, error.status))
    if isinstance(error, Busy):
        _discard_body()
    if isinstance(error, RetryLater):
        return _response(Reply({"error": str(error)}, 503, close=True))
    if isinstance(error, TooLarge | RequestEntityTooLarge):
        _discard_body()
        limit = current_app.config["MAX_CONTENT_LENGTH"]
        text = str(error) if isinstance(error, TooLarge) else f"the body is larger than {limit} bytes"
        return _response(Reply({"error": text}, 413))
    if isinstance(error, HTTPException):
        return _response(Reply({"error": error.description or error.name}, error.code or 500))
    _log.error("request failed", exc_info=error, extra={"path": request.path})
    return _response(Reply({"error": "internal error; the log has the details"}, 500))


def _discard_body() -> None:
    """Read the rest of the body, at most `_MOST_DISCARDED` bytes.

    A client that is still sending when the connection closes would not get the answer.
    """
    body = request.environ["wsgi.input"]
    with suppress(OSError):  # a client that disconnected or sends too slowly gets no answer anyway
        for _ in range(_MOST_DISCARDED // _CHUNK):
            if not body.read(_CHUNK):
                return
