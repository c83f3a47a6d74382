"""Builds the Flask apps that the webhook and the scheduler serve: admission reviews, probes and metrics.

The app that `new_app` returns answers every error with a status and one line of JSON. Routes must raise errors instead
of building such answers. `mgpu.serving.posts` answers the POST requests in front of Flask.
"""

import logging
import time
from collections.abc import Callable, Collection

from flask import Flask, Response, request
from werkzeug.exceptions import HTTPException

from mgpu.model.errors import BadObject
from mgpu.serving.posts import EXPECTED, FAILED, Posts, View, content_type, encode, error_reply, read_body
from mgpu.serving.request_memory import REVIEWS, Limits
from mgpu.serving.review import BadRequest, Reply, Review, deny, parse_review

_log = logging.getLogger(__name__)
_POSTS = "mgpu-posts"

ReviewObserver = Callable[[str, Review, Reply | None, float], None]
"""A function that is called after a review with the path, the review, the reply and the duration in seconds.

The path has no leading slash. The reply is None if the handler raised an error other than BadObject.
"""


def new_app(limits: Limits = REVIEWS) -> Flask:
    """Return an app without routes.

    It answers an error with the status of the error and `{"error": "…"}`. It logs an unexpected error and answers 500.
    """
    app = Flask(__name__, static_folder=None)
    posts = app.extensions[_POSTS] = Posts(app.wsgi_app, limits)
    app.wsgi_app = posts  # type: ignore[method-assign]
    app.register_error_handler(Exception, _answer_error)
    return app


def serve_posts(app: Flask, path: str, view: View) -> None:
    """Answer POST requests for exactly this path with the view."""
    posts: Posts = app.extensions[_POSTS]
    posts.add(path, view)


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

    def answer() -> Reply:
        if content_type() != "application/json":
            raise BadRequest(415, "the content type must be application/json")
        with read_body() as body:
            return decide(parse_review(body))

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

    serve_posts(app, path, answer)


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


def _answer_error(error: Exception) -> Response:
    if isinstance(error, HTTPException):
        reply = Reply({"error": error.description or error.name}, error.code or 500)
    elif isinstance(error, EXPECTED):
        reply = error_reply(error, request.environ)
    else:
        _log.error("request failed", exc_info=error, extra={"path": request.path})
        reply = FAILED
    response = Response(encode(reply), reply.status, mimetype="application/json")
    if reply.close:
        response.headers["Connection"] = "close"
    return response
