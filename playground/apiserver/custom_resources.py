"""Prunes and validates custom resources, and sets their defaults, according to the schema of their CRD.

Keywords of schemas that the project's CRDs do not use, such as `pattern` and `x-kubernetes-validations`, are ignored.
`objects` calls this module.
"""

import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import orjson

from playground.apiserver.api_errors import Cause, required
from playground.apiserver.storage import Object

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,)
}  # fmt: skip
_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", re.ASCII | re.IGNORECASE)
"""The format of RFC 3339. It is checked because `datetime.fromisoformat` also accepts other formats."""
_PRESERVE = "x-kubernetes-preserve-unknown-fields"
_ROOT = ("apiVersion", "kind", "metadata")


def normalise(obj: Object, schema: Mapping[str, Any]) -> tuple[Object, list[str]]:
    """Return a copy of `obj` without unknown fields and with defaults, and the paths of the unknown fields.

    Without a schema, nothing is unknown.
    """
    dropped: list[str] = []
    fresh = orjson.loads(orjson.dumps(obj))
    body = {k: v for k, v in fresh.items() if k not in _ROOT}
    pruned = _prune(body, schema, "", dropped) if schema else body
    return {k: fresh[k] for k in _ROOT if k in fresh} | pruned, dropped


def _prune(value: Any, schema: Mapping[str, Any], path: str, dropped: list[str]) -> Any:
    """Do the same as `normalise` for one value, but append the paths of its unknown fields to `dropped`."""
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        return [_prune(v, schema["items"], f"{path}[{i}]", dropped) for i, v in enumerate(value)]
    if not isinstance(value, dict) or schema.get("x-kubernetes-int-or-string"):
        return value
    properties, extra = schema.get("properties") or {}, schema.get("additionalProperties")
    result = {}
    for key, inner in value.items():
        inner_path = f"{path}.{key}" if path else key
        known = properties.get(key, extra if isinstance(extra, dict) else None)
        if inner is None and known is not None and not known.get("nullable"):
            continue  # null counts as missing, because the field may be required or have a default
        if key in properties:
            result[key] = _prune(inner, properties[key], inner_path, dropped)
        elif isinstance(extra, dict):
            result[key] = _prune(inner, extra, inner_path, dropped)
        elif extra or schema.get(_PRESERVE) or schema.get("x-kubernetes-embedded-resource"):
            result[key] = inner
        else:
            dropped.append(inner_path)
    for key, inner in properties.items():
        if key not in result and "default" in inner:
            result[key] = _prune(orjson.loads(orjson.dumps(inner["default"])), inner, f"{path}.{key}", dropped)
    return result


def problems(obj: Object, schema: Mapping[str, Any]) -> list[Cause]:
    """Return a cause for each violation of the schema."""
    return list(_check({k: v for k, v in obj.items() if k not in _ROOT}, {**schema, "type": "object"}, ""))


def _invalid(path: str, shown: object, detail: str, reason: str = "FieldValueTypeInvalid") -> Cause:
    text = f'"{shown}"' if isinstance(shown, str) else shown
    return Cause(path or "<nil>", f"Invalid value: {text}: {path or '<nil>'} in body {detail}", reason)


def _check(value: Any, schema: Mapping[str, Any], path: str) -> Iterator[Cause]:
    if value is None and (schema.get("nullable") or not path):
        return
    kind = schema.get("type")
    if schema.get("x-kubernetes-int-or-string"):
        kind = None
    if kind and not (isinstance(value, _TYPES[kind]) and (kind == "boolean") == isinstance(value, bool)):
        got = _NAMES.get(type(value), "null")
        yield _invalid(path, got, f'must be of type {kind}: "{got}"')
        return
    if (allowed := schema.get("enum")) and value not in allowed:
        names = ", ".join(f'"{a}"' for a in allowed)
        yield Cause(path, f'Unsupported value: "{value}": supported values: {names}', "FieldValueNotSupported")
    for bound, word, wrong in (("minimum", "greater", -1), ("maximum", "less", 1)):
        limit = schema.get(bound)
        if limit is not None and isinstance(value, int | float) and (value - limit) * wrong > 0:
            yield _invalid(path, value, f"should be {word} than or equal to {limit}", "FieldValueInvalid")
    yield from _too_much(value, schema, path)
    if isinstance(value, dict):
        yield from _check_object(value, schema, path)
    elif isinstance(value, list):
        yield from _check_list(value, schema, path)
    elif isinstance(value, str):
        yield from _check_text(value, schema, path)


def _too_much(value: Any, schema: Mapping[str, Any], path: str) -> Iterator[Cause]:
    for kind, bound in ((list, "maxItems"), (dict, "maxProperties")):
        most = schema.get(bound)
        if isinstance(value, kind) and most is not None and len(value) > most:
            yield Cause(path, f"Too many: {len(value)}: must have at most {most} items", "FieldValueTooMany")
    longest = schema.get("maxLength")
    if isinstance(value, str) and longest is not None and len(value) > longest:
        yield Cause(path, f"Too long: may not be more than {longest} bytes", "FieldValueTooLong")


def _check_text(value: str, schema: Mapping[str, Any], path: str) -> Iterator[Cause]:
    if len(value) < (least := schema.get("minLength", 0)):
        yield _invalid(path, value, f"should be at least {least} chars long", "FieldValueInvalid")
    if schema.get("format") == "date-time" and not _is_time(value):
        yield _invalid(path, value, f'must be of type date-time: "{value}"')


def _is_time(text: str) -> bool:
    try:
        return bool(_TIME.fullmatch(text) and datetime.fromisoformat(text.upper()))
    except ValueError:
        return False


def _check_list(value: list[Any], schema: Mapping[str, Any], path: str) -> Iterator[Cause]:
    if len(value) < (least := schema.get("minItems", 0)):
        yield _invalid(path, len(value), f"should have at least {least} items", "FieldValueInvalid")
    inner = schema.get("items")
    for i, item in enumerate(value if isinstance(inner, dict) else ()):
        yield from _check(item, inner or {}, f"{path}[{i}]")
    keys = schema.get("x-kubernetes-list-map-keys") or ()
    seen = set()
    for i, item in enumerate(value if keys else ()):
        named = {key: item[key] for key in keys if key in item} if isinstance(item, dict) else {}
        shown = orjson.dumps(named, option=orjson.OPT_SORT_KEYS).decode()
        if named and shown in seen:
            yield Cause(f"{path}[{i}]", f"Duplicate value: {shown}", "FieldValueDuplicate")
        seen.add(shown)


def _check_object(value: Object, schema: Mapping[str, Any], path: str) -> Iterator[Cause]:
    properties, extra = schema.get("properties") or {}, schema.get("additionalProperties")
    for key in schema.get("required") or []:
        if key not in value and not (not path and key in _ROOT):
            yield required(f"{path}.{key}" if path else key)
    for key in sorted(value):
        inner = properties.get(key, extra if isinstance(extra, dict) else None)
        if inner is not None:
            yield from _check(value[key], inner, f"{path}.{key}" if path else key)
