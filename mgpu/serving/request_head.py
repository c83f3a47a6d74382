"""Limits the size of a request's header lines.

`mgpu.serving.worker` uses the `Parser`, which depends on gunicorn's internals, so the version of gunicorn is locked.
"""

from gunicorn.http.message import Request
from gunicorn.http.parser import RequestParser

HEAD_BYTES = 32 << 10
"""The most bytes of the header lines of one request. API servers, kube-scheduler, probes and Prometheus send less than
2 KiB, including a bearer token; the cookies of a browser may take 8 KiB."""


class _Request(Request):  # type: ignore[misc]
    """A request whose header lines have at most HEAD_BYTES together. If they have more, the answer is 431.

    gunicorn itself limits only the number and the length of the lines, which allows 0.8 MB. It reads the lines before
    the app can check the peer, stores them twice, and searches all of them again after each read. With these limits
    alone, strangers together could fill the memory of a webhook, and a single one that sent its lines byte by byte
    could keep a worker busy.
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
