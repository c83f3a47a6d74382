"""Access to API objects as decoded JSON that nothing has checked yet."""

from collections.abc import Mapping
from typing import Any


def table_at(raw: object, *path: str) -> Mapping[str, Any]:
    """Return the object at a path; empty where there is none, or a value of another type. Never raises."""
    for key in path:
        raw = raw.get(key) if isinstance(raw, dict) else None
    return raw if isinstance(raw, dict) else {}


def annotation_path(key: str) -> str:
    """Return the path of an annotation, as messages write it."""
    return f"metadata.annotations[{key}]"
