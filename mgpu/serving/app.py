"""Builds the Flask apps of the processes: admission reviews, probes, metrics, and one place for errors.

The webhook and the scheduler add their routes to `new_app`. Every error becomes one line of JSON in `_failed`.
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
_CHUNK = 1 << 16
_DISCARDED = 32 << 20
_IN_FLIGHT = "mgpu-in-flight"

ReviewObserver = Callable[[str, Review, Reply | None, float], None]
"""Called with (path, review, reply, seconds) after each review. reply is None if the API server has to call again."""


def new_app(limits: Limits = REVIEWS) -> Flask:
    """Return an app without routes.

    An error is answered with its status and `{"error": "…"}`. An unexpected error is logged and answered with 500.
    """
    app = Flask(__name__, static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = limits.body
    app.extensions[_IN_FLIGHT] = RequestMemory(limits)
    app.register_error_handler(Exception, _failed)
    return app


def serve_reviews(
    app: Flask,
    path: str,
    handler: Callable[[Review], Reply],
    kinds: Collection[str],
    observe: ReviewObserver = lambda *_: None,
) -> None:
    """Answer AdmissionReviews of these kinds at POST `path` with the handler's reply.

    The handler can raise BadObject, which denies the object with 422 and all its problems, and RetryLater, which
    answers 503 and closes the connection: the API server then applies `failurePolicy`, and its next call can reach
    another replica.
    """

    def answer() -> Response:
        if request.mimetype != "application/json":
            raise BadRequest(415, "the content type must be application/json")
        with read_body() as sent:
            return respond(reviewed(parse_review(sent)))

    def reviewed(review: Review) -> Reply:
        if review.kind not in kinds:
            wanted = " and ".join(sorted(kinds))
            return deny(review, f"{path} reviews objects of kind {wanted}, not {review.kind[:100]!r}", 400)
        began, reply = time.perf_counter(), None
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
    """Read the body of the current request, within the limits of its app (`InFlight.body`)."""
    in_flight: RequestMemory = current_app.extensions[_IN_FLIGHT]
    with in_flight.body(request.stream) as found:
        yield found


def serve_probes(app: Flask, not_ready_reason: Callable[[], str | None] = lambda: None) -> None:
    """Serve GET `/healthz`, which always answers 200, and GET `/readyz`."""
    serve_probe(app, "/healthz", lambda: None)
    serve_probe(app, "/readyz", not_ready_reason)


def serve_probe(app: Flask, path: str, failure_reason: Callable[[], str | None]) -> None:
    """Serve GET `path`: 200 with `ok`, or 503 with the reason for the failure."""

    def answer() -> Response:
        reason = failure_reason()
        if reason is None:
            return Response("ok\n", 200, mimetype="text/plain")
        return Response(f"{reason}\n", 503, mimetype="text/plain")

    app.add_url_rule(path, f"probe {path}", answer)


def serve_metrics(app: Flask, page: Callable[[], bytes], content_type: str) -> None:
    """Serve GET `/metrics`."""
    app.add_url_rule("/metrics", "metrics", lambda: Response(page(), content_type=content_type))


def respond(reply: Reply) -> Response:
    response = Response(orjson.dumps(reply.body, option=orjson.OPT_APPEND_NEWLINE), reply.status)
    response.mimetype = "application/json"
    if reply.close:
        response.headers["Connection"] = "close"
    return response


def _failed(error: Exception) -> Response:
    """Map every error to its HTTP answer."""
    if isinstance(error, BadRequest):
        return respond(Reply({"error": str(error)}, error.status))
    if isinstance(error, Busy):
        _discard_body()
    if isinstance(error, RetryLater):
        return respond(Reply({"error": str(error)}, 503, close=True))
    if isinstance(error, TooLarge | RequestEntityTooLarge):
        _discard_body()
        most = current_app.config["MAX_CONTENT_LENGTH"]
        text = str(error) if isinstance(error, TooLarge) else f"the body is larger than {most} bytes"
        return respond(Reply({"error": text}, 413))
    if isinstance(error, HTTPException):
        return respond(Reply({"error": error.description or error.name}, error.code or 500))
    _log.error("request failed", exc_info=error, extra={"path": request.path})
    return respond(Reply({"error": "internal error; the log has the details"}, 500))


def _discard_body() -> None:
    """Read the rest of the body: a client that is still sending when the connection closes loses the answer."""
    body = request.environ["wsgi.input"]
    with suppress(OSError):  # a client that hung up or sends too slowly gets no answer anyway
        for _ in range(_DISCARDED // _CHUNK):
            if not body.read(_CHUNK):
                return
