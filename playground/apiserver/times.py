"""Times as Go reads and writes them: whole seconds in UTC, or exactly six decimals where a field is a MicroTime."""

import re
from datetime import UTC, datetime

_MICRO_FIELDS = ("acquireTime", "renewTime", "eventTime", "lastObservedTime")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")
_MICRO = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}(Z|[+-]\d\d:\d\d)")


def read_time(text: str, field: str) -> str:
    """The form in which it is kept. Raises ValueError, also for a Lease's time without its six decimals."""
    micro = field in _MICRO_FIELDS
    layout = "2006-01-02T15:04:05.000000Z07:00" if micro else "2006-01-02T15:04:05Z07:00"
    wrong = ValueError(f'parsing time "{text}" as "{layout}": cannot parse "{text}" as "2006"')
    if not (_MICRO if micro else _TIME).fullmatch(text):
        raise wrong
    try:
        at = datetime.fromisoformat(text).astimezone(UTC)
    except ValueError as problem:
        raise wrong from problem
    return at.strftime("%Y-%m-%dT%H:%M:%S.%fZ" if micro else "%Y-%m-%dT%H:%M:%SZ")
