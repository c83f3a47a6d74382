"""Bounds the size of a request's header lines to what legitimate callers send."""

from gunicorn.http.message import Request
from gunicorn.http.parser import RequestParser

HEAD_BYTES = 32 << 10
"""Header lines of one request. API servers, kube-scheduler, probes and Prometheus send less than 2 KiB, a bearer token
included; a browser's cookies may be 8 KiB."""


class _Request(Request):  # type: ignore[misc]
    """A request whose header lines have at most HEAD_BYTES together (HTTP 431).

    gunicorn bounds them by number times longest line, which is 0.8 MB. It reads a head before the app can ask who the
    peer is, keeps it twice, and looks through all of it again after each read: 64 unknown peers filled the memory of a
    webhook, and one that sent a head byte by byte kept a worker busy.
    """

    @property
    def max_buffer_headers(self) -> int:
        return HEAD_BYTES

    @max_buffer_headers.setter
    def max_buffer_headers(self, _: int) -> None:
        """Leave the bound as it is: gunicorn sets its own."""


class Parser(RequestParser):  # type: ignore[misc]
    """gunicorn's parser of the requests of one connection."""

    mesg_class = _Request
