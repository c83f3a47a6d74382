"""Parses label selectors and field selectors, and matches objects with them.

`reads` passes the selectors of a list or watch to `both`. `admission_webhooks` passes the metav1.LabelSelectors of a
webhook to `selector_matches`.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from playground.apiserver.api_errors import bad_request
from playground.apiserver.kinds import Kind
from playground.apiserver.storage import Object

Match = Callable[[Object], bool]
Labels = Mapping[str, str]

_SET = re.compile(r"\s*([\w./-]+)\s+(in|notin)\s*\(([^()]*)\)\s*")
_EQUAL = re.compile(r"\s*([\w./-]+)\s*(==|=|!=)\s*([\w.-]*)\s*")
_EXISTS = re.compile(r"\s*(!?)\s*([\w./-]+)\s*")
_FIELD = re.compile(r"([^=!]+?)(==|=|!=)(.*)", re.DOTALL)
_COMMA = re.compile(r",(?![^()]*\))")


def _requirement(text: str) -> Callable[[Labels], bool]:
    """Return a predicate for one requirement of a label selector. Raises a 400 if the requirement is malformed."""
    if found := _SET.fullmatch(text):
        key, wanted, values = found[1], found[2] == "in", {v.strip() for v in found[3].split(",")}
        return lambda labels: (key in labels and labels[key] in values) is wanted
    if found := _EQUAL.fullmatch(text):
        key, equal, value = found[1], found[2] != "!=", found[3]
        return lambda labels: (labels.get(key) == value) is equal
    if found := _EXISTS.fullmatch(text):
        key, present = found[2], not found[1]
        return lambda labels: (key in labels) is present
    raise bad_request(f"unable to parse requirement: {text!r}")


def label_match(text: str) -> Match:
    """Return a predicate for a label selector such as `a=b,c!=d,e in (f,g),h,!i`. Raises a 400 if it is malformed."""
    requirements = [_requirement(part) for part in _COMMA.split(text)] if text.strip() else []

    def matches(obj: Object) -> bool:
        labels = obj["metadata"].get("labels") or {}
        return all(r(labels) for r in requirements)

    return matches


def selector_matches(selector: Mapping[str, Any] | None, labels: Labels) -> bool:
    """Return whether labels match a metav1.LabelSelector. A missing or empty selector matches all labels."""
    for key, value in ((selector or {}).get("matchLabels") or {}).items():
        if labels.get(key) != value:
            return False
    for rule in (selector or {}).get("matchExpressions") or []:
        key, values = rule["key"], rule.get("values") or []
        fits = {
            "In": labels.get(key) in values,
            "NotIn": labels.get(key) not in values,
            "Exists": key in labels,
            "DoesNotExist": key not in labels,
        }
        if not fits.get(rule["operator"], False):
            return False
    return True


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


def field_value(obj: Object, path: str) -> str:
    """Return the field at a path such as `status.phase` as text, or "" if the field is missing."""
    value: Any = obj
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return _text(value)


def field_match(text: str, kind: Kind) -> Match:
    """Return a predicate for a field selector such as `status.phase!=Failed`.

    Raises a 400 if the selector is malformed or names a field that the kind does not support.
    """
    terms: list[tuple[str, bool, str]] = []
    for part in filter(None, text.split(",")):
        found = _FIELD.fullmatch(part)
        if not found:
            raise bad_request(f"invalid selector: '{text}'; can't understand '{part}'")
        if found[1] not in kind.fields:
            raise bad_request(f"field label not supported: {found[1]}")
        terms.append((kind.fields[found[1]], found[2] != "!=", found[3]))
    return lambda obj: all((field_value(obj, path) == value) is equal for path, equal, value in terms)


def both(labels: str, fields: str, kind: Kind) -> Match | None:
    """Return one predicate for a label selector and a field selector, or None if both are empty.

    Raises a 400 if one of them is malformed, or if the field selector names a field that the kind does not support.
    """
    if not labels and not fields:
        return None
    by_label, by_field = label_match(labels), field_match(fields, kind)
    return lambda obj: by_label(obj) and by_field(obj)
