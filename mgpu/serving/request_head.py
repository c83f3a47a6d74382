"""Limits the size of a request's header lines. `mgpu.serving.worker` parses the requests of all connections with it."""

from gunicorn.http.message import Request
from gunicorn.http.parser import RequestParser

HEAD_BYTES = 32 << 10
"""The limit for one request. API servers, kube-scheduler, probes and Prometheus send less than 2 KiB, including a
bearer token; the cookies of a browser may take 8 KiB."""


class _Request(Request):  # type: ignore[misc]
    """A request whose header lines have at most HEAD_BYTES together; otherwise it is answered with 431.

    gunicorn's own limits, of the number and of the length of lines, allow 0.8 MB. It reads the lines before the app can
    check the peer, stores them twice, and searches all of them again after each read: 64 strangers filled the memory of
    a webhook, and one that sent header lines byte by byte kept a worker busy.
    """

    @property
    def max_buffer_headers(self) -> int:
        return HEAD_BYTES

    @max_buffer_headers.setter
    def max_buffer_headers(self, _: int) -> None:
        """Ignore the limit that gunicorn sets."""


class Parser(RequestParser):  # type: ignore[misc]
    """gunicorn's parser of the requests of one connection."""

    mesg_class = _Request
