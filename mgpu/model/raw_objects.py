"""Reads values from decoded JSON that has not been validated yet.

Users and agents write these values, so `table_at` and `is_integer` accept values of any type. `mgpu.model`,
`mgpu.dialects`, the webhook and the scheduler call these functions.
"""

import json
from collections.abc import Mapping
from typing import Any, TypeGuard

from mgpu.model.errors import BadObject, Problem


def table_at(raw: object, *path: str) -> Mapping[str, Any]:
    """Return the object at a path, or {} if there is none or the value has another type. Never raises."""
    for key in path:
        raw = raw.get(key) if isinstance(raw, dict) else None
    return raw if isinstance(raw, dict) else {}


def annotation_path(key: str) -> str:
    return f"metadata.annotations[{key}]"


def is_integer(value: object, least: int, most: int) -> TypeGuard[int]:
    """Return whether a decoded value is an integer within these limits. A boolean does not count as an integer."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def parse_json_object(text: str, path: str) -> dict[str, Any]:
    """Return the JSON object in the text of an annotation. Raises BadObject with the annotation's `path`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadObject([Problem(path, f"is not JSON: {str(error)[:80]}")]) from error
    if not isinstance(value, dict):
        raise BadObject([Problem(path, "must be a JSON object")])
    return value
