"""Answers POST requests without Flask. They come for every pod, and Flask takes longer than many of their views.

`mgpu.serving.app.new_app` puts `Posts` in front of a Flask app, which answers all other requests. An answer is one line
of JSON. Errors have the same statuses and texts as those of the Flask app.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import orjson

from mgpu.model.errors import RetryLater
from mgpu.serving.request_memory import Busy, Limits, RequestMemory, TooLarge
from mgpu.serving.review import BadRequest, Reply

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

log = logging.getLogger(__name__)
_CHUNK = 1 << 16  # bytes
_MOST_DISCARDED = 32 << 20  # bytes

View = Callable[[], Reply]
"""Answers a request, which it reads with `read_body` and `environ`. It raises errors instead of returning them."""


class _Current(threading.local):
    """The request that a thread answers.

    Attributes:
        environ: the WSGI environment.
        memory: the memory of the app.
    """

    environ: "WSGIEnvironment"
    memory: RequestMemory


_current = _Current()
EXPECTED = (BadRequest, RetryLater, TooLarge)
"""The errors that a view raises. Any other error is a fault."""
FAILED = Reply({"error": "internal error; the log has the details"}, 500)


class _Input:
    """The body of a request whose client may disconnect.

    Args:
        left: the length of the body, if `stream` does not end with it; else None (`wsgi.input_terminated`).
    """

    def __init__(self, stream: Any, left: int | None) -> None:
        self._stream = stream
        self._left = left

    def read(self, size: int, /) -> bytes:
        try:
            data: bytes = self._stream.read(size if self._left is None else min(size, self._left))
        except OSError as error:
            raise BadRequest(400, "the client has disconnected") from error
        if self._left is not None:
            self._left -= len(data)
        return data


class Posts:
    """A WSGI app with a view for each path, and another app for all other paths."""

    def __init__(self, others: "WSGIApplication", limits: Limits) -> None:
        self._others = others
        self._memory = RequestMemory(limits)
        self._views: dict[str, View] = {}

    def add(self, path: str, view: View) -> None:
        """Answer POST requests for exactly this path with the view."""
        self._views[path] = view

    def __call__(self, environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        view = self._views.get(environ.get("PATH_INFO", ""))
        if view is None:
            return self._others(environ, start_response)
        _current.environ, _current.memory = environ, self._memory
        return _send(_answer(view, environ), start_response)


@contextmanager
def read_body() -> Iterator[bytearray]:
    """Read the body of the current request as `RequestMemory.read` does, within the limits of the app."""
    environ = _current.environ
    text = str(environ.get("CONTENT_LENGTH") or "")
    length = int(text) if text.isdecimal() else 0
    _current.memory.check_length(length)
    is_terminated = environ.get("wsgi.input_terminated", False)
    with _current.memory.read(_Input(environ["wsgi.input"], None if is_terminated else length)) as body:
        yield body


def environ() -> "WSGIEnvironment":
    """Return the WSGI environment of the current request."""
    return _current.environ


def content_type() -> str:
    """Return the media type of the body of the current request, without parameters and in lower case."""
    return str(_current.environ.get("CONTENT_TYPE", "")).partition(";")[0].strip().lower()


def _answer(view: View, environ: "WSGIEnvironment") -> Reply:
    if environ["REQUEST_METHOD"] != "POST":
        return Reply({"error": "The method is not allowed: only POST is"}, 405)
    try:
        return view()
    except EXPECTED as error:
        return error_reply(error, environ)
    except Exception:
        log.exception("request failed", extra={"path": environ["PATH_INFO"]})
        return FAILED


def error_reply(error: Exception, environ: Mapping[str, Any]) -> Reply:
    """Return the status of one of the `EXPECTED` errors and `{"error": "…"}`."""
    if isinstance(error, Busy | TooLarge):
        _discard(environ["wsgi.input"])
    if isinstance(error, BadRequest):
        return Reply({"error": str(error)}, error.status)
    if isinstance(error, RetryLater):
        return Reply({"error": str(error)}, 503, close=True)
    return Reply({"error": str(error)}, 413)


def encode(reply: Reply) -> bytes:
    return orjson.dumps(reply.body, option=orjson.OPT_APPEND_NEWLINE)


def _send(reply: Reply, start_response: "StartResponse") -> Iterable[bytes]:
    data = encode(reply)
    headers = [("Content-Type", "application/json"), ("Content-Length", str(len(data)))]
    if reply.status == HTTPStatus.METHOD_NOT_ALLOWED:
        headers.append(("Allow", "POST"))
    if reply.close:
        headers.append(("Connection", "close"))
    start_response(f"{reply.status} {HTTPStatus(reply.status).phrase}", headers)
    return [data]


def _discard(body: Any) -> None:
    """Read the rest of the body, at most `_MOST_DISCARDED` bytes.

    A client that is still sending when the connection closes would not get the answer.
    """
    with suppress(OSError):  # a client that disconnected or sends too slowly gets no answer anyway
        for _ in range(_MOST_DISCARDED // _CHUNK):
            if not body.read(_CHUNK):
                return
