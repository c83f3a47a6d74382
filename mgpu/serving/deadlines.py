"""Detects that the client of a request no longer waits for the answer.

The API server and kube-scheduler close the connection of a call that takes too long. Further work on such a call would
be wasted, and would delay other calls. The binding admission and the extender (`scheduler.api`) call `watch_client`.
"""

import re
import select
import time
from collections.abc import Callable, Mapping
from typing import Any

from mgpu.serving.posts import environ

_TIMEOUT = re.compile(r"(?:^|&)timeout=([0-9]{1,4})s(?:&|$)")
_CLOSED = select.POLLHUP | select.POLLERR | select.POLLNVAL | select.POLLRDHUP


def watch_client(seconds: float, clock: Callable[[], float] = time.monotonic) -> Callable[[], bool]:
    """Return a function that returns True once the client of the current request no longer waits.

    Call this in the thread that handles the request.

    Args:
        seconds: the longest time that the client waits. The API server sends its own limit in the parameter `timeout`
            of the URL, in whole seconds (apiserver/pkg/admission/plugin/webhook/mutating/dispatcher.go). If it is
            shorter than `seconds`, it applies.
        clock: a monotonic clock, in seconds.
    """
    request = environ()
    timeout = _TIMEOUT.search(request.get("QUERY_STRING", ""))
    deadline = clock() + min(seconds, float(timeout.group(1)) if timeout else seconds)
    is_closed = _watch_connection(request)
    return lambda: clock() >= deadline or is_closed()


def _watch_connection(environ: Mapping[str, Any]) -> Callable[[], bool]:
    """Return a function that returns True once the client has closed the connection.

    If the WSGI server is not gunicorn, the function always returns False.
    """
    connection = environ.get("gunicorn.socket")
    if connection is None:
        return lambda: False
    poll = select.poll()
    # Do not ask for POLLIN: a client that has already sent its next request still waits for this answer.
    poll.register(connection.fileno(), select.POLLRDHUP)
    return lambda: any(events & _CLOSED for _, events in poll.poll(0))
