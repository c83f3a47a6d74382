"""Whether the client of the request at hand still waits for its answer.

The API server and kube-scheduler close the connection of a call that takes them too long and never read its answer.
Work that goes on then is lost, and delays the calls of others.
"""

import re
import select
import time
from collections.abc import Callable, Mapping
from typing import Any

from flask import request

_SECONDS = re.compile(r"([0-9]{1,4})s")
_CLOSED = select.POLLHUP | select.POLLERR | select.POLLNVAL | select.POLLRDHUP


def gone(seconds: float, clock: Callable[[], float] = time.monotonic) -> Callable[[], bool]:
    """Return a function that says whether the client of the current request waits no more.

    Args:
        seconds: How long the client waits where it does not say so. The API server does, in the parameter `timeout`
            of the URL, in whole seconds (apiserver/pkg/admission/plugin/webhook/mutating/dispatcher.go).
    """
    said = _SECONDS.fullmatch(request.args.get("timeout", ""))
    deadline = clock() + min(seconds, float(said.group(1)) if said else seconds)
    closed = _watch(request.environ)
    return lambda: clock() >= deadline or closed()


def _watch(environ: Mapping[str, Any]) -> Callable[[], bool]:
    """Whether the client has closed the connection. Another server than gunicorn does not give its socket away."""
    connection = environ.get("gunicorn.socket")
    if connection is None:
        return lambda: False
    poll = select.poll()
    # Not POLLIN: a client that pipelines its next request has not gone.
    poll.register(connection.fileno(), select.POLLRDHUP)
    return lambda: any(events & _CLOSED for _, events in poll.poll(0))
