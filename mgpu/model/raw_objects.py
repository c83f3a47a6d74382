"""Looking into JSON objects that nobody has checked yet."""

from collections.abc import Mapping
from typing import Any


def table_at(raw: object, *path: str) -> Mapping[str, Any]:
    """The object at a path; empty where there is none, or something of another type. Never raises."""
    for key in path:
        raw = raw.get(key) if isinstance(raw, dict) else None
    return raw if isinstance(raw, dict) else {}
