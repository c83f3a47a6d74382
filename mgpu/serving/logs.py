"""Structured logs: one JSON object per line on stderr.

All processes call `set_up_logging`, and the modules of `mgpu.serving` use the limits. Add fields to a log line with
`extra={"pod": uid}`. No field may have the name of an attribute of LogRecord, such as `name`.
"""

import json
import logging
import math
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """A formatter that writes JSON: time (UTC), level, logger, message, the fields of `extra`, and any traceback."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{key: value for key, value in vars(record).items() if key not in _STANDARD},
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        # Do not use orjson, which refuses large integers and lone surrogates: a log line must never fail.
        return json.dumps(entry, default=str)


class RateLimit:
    """A limit of one event in `SECONDS` seconds. It is thread-safe: `_lock` guards the counters.

    Args:
        clock: a monotonic clock, in seconds.
    """

    SECONDS = 60.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._next = -math.inf
        self._suppressed = 0

    def try_pass(self) -> int | None:
        """Return the number of events suppressed since the last one that passed, or None if this one is suppressed."""
        with self._lock:
            now = self._clock()
            if now < self._next:
                self._suppressed += 1
                return None
            suppressed = self._suppressed
            self._suppressed = 0
            self._next = now + self.SECONDS
            return suppressed


class RateLimitFilter(logging.Filter):
    """A filter that passes every record of level ERROR or higher, and one other record a minute.

    The message of the latter is shortened to 300 characters, and its field `left_out` is the number of records that
    were not passed since the last one. The filter is for loggers whose records strangers can cause: thousands of bad
    requests a second would push everything else out of the few log files that the kubelet keeps for a container.
    """

    CHARACTERS = 300

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._limit = RateLimit(clock)

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            return True
        suppressed = self._limit.try_pass()
        if suppressed is None:
            return False
        record.left_out = suppressed
        record.msg = record.getMessage()[: self.CHARACTERS]
        record.args = ()
        return True


def set_up_logging(level: str = "info") -> None:
    """Make all loggers of this process write JSON lines to stderr.

    Args:
        level: `debug`, `info`, `warning` or `error`.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
