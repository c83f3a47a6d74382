"""Which webhooks a request concerns: rules and selectors."""

from collections.abc import Callable
from typing import Any

from playground.apiserver.attributes import Attributes
from playground.apiserver.selectors import selector_matches
from playground.apiserver.storage import Object


def _resource_fits(pattern: str, plural: str, subresource: str) -> bool:
    resource, _, sub = pattern.partition("/")
    if pattern in ("*", "*/*"):
        return pattern == "*/*" or not subresource
    return resource in ("*", plural) and sub in ("*", subresource)


def rule_fits(rule: Object, attrs: Attributes) -> bool:
    scope = rule.get("scope") or "*"
    return (
        any(o in ("*", attrs.operation) for o in rule.get("operations") or [])
        and any(g in ("*", attrs.group) for g in rule.get("apiGroups") or [])
        and any(v in ("*", attrs.version) for v in rule.get("apiVersions") or [])
        and any(_resource_fits(r, attrs.plural, attrs.subresource) for r in rule.get("resources") or [])
        and (scope == "*" or (scope == "Namespaced") is attrs.namespaced)
    )


def _labels(obj: Object | None) -> dict[str, str]:
    return ((obj or {}).get("metadata") or {}).get("labels") or {}


def hook_fits(
    hook: Object, attrs: Attributes, obj: Object | None, old: Object | None, namespace_labels: Callable[[str], Any]
) -> bool:
    """Whether rules and selectors of a webhook choose this request; `namespace_labels` looks them up by name."""
    if not any(rule_fits(rule, attrs) for rule in hook.get("rules") or []):
        return False
    selector = hook.get("objectSelector")
    if not any(o is not None and selector_matches(selector, _labels(o)) for o in (obj, old)):
        return False
    if attrs.plural == "namespaces" and not attrs.group:
        labels = _labels(obj or old)
    elif attrs.namespace:
        labels = namespace_labels(attrs.namespace)
    else:
        return True
    return selector_matches(hook.get("namespaceSelector"), labels)
