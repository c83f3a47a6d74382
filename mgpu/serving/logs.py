"""Structured logs: one JSON object per line on stderr. Fields come with `extra={"pod": uid}`."""

import json
import logging
import sys
from datetime import UTC, datetime

_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """time (UTC), level, logger, message, the fields of `extra`, and an exception's traceback as one string."""

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
        # orjson refuses large integers and lone surrogates; a log line must never fail.
        return json.dumps(entry, default=str)


def setup(level: str = "info") -> None:
    """All loggers of this process write to stderr from here on. `level`: debug, info, warning or error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
