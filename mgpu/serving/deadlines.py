"""Finds out whether the client of the current request still waits for the answer.

The API server and kube-scheduler close the connection of a call that takes them too long and never read its answer.
Further work on it is lost, and delays other calls.
"""

import re
import select
import time
from collections.abc import Callable, Mapping
from typing import Any

from flask import request

_SECONDS = re.compile(r"([0-9]{1,4})s")
_CLOSED = select.POLLHUP | select.POLLERR | select.POLLNVAL | select.POLLRDHUP


def watch_client(seconds: float, clock: Callable[[], float] = time.monotonic) -> Callable[[], bool]:
    """Return a function that returns True once the client of the current request no longer waits.

    Args:
        seconds: how long the client waits by default. The API server sends its own limit in the parameter `timeout`
            of the URL, in whole seconds (apiserver/pkg/admission/plugin/webhook/mutating/dispatcher.go).
    """
    said = _SECONDS.fullmatch(request.args.get("timeout", ""))
    deadline = clock() + min(seconds, float(said.group(1)) if said else seconds)
    closed = _watch(request.environ)
    return lambda: clock() >= deadline or closed()


def _watch(environ: Mapping[str, Any]) -> Callable[[], bool]:
    """Return a function for whether the client has closed the connection; False where the socket is unknown."""
    connection = environ.get("gunicorn.socket")
    if connection is None:
        return lambda: False
    poll = select.poll()
    # Not POLLIN: a client that pipelines its next request still waits.
    poll.register(connection.fileno(), select.POLLRDHUP)
    return lambda: any(events & _CLOSED for _, events in poll.poll(0))
