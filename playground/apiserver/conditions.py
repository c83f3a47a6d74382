"""Match conditions of webhooks: CEL over `object`, `oldObject` and `request`. `authorizer` is not there."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from cel_expr_python import cel
from cel_expr_python.ext import ext_optional, ext_strings

from playground.apiserver.attributes import Attributes
from playground.apiserver.errors import Cause, forbidden, invalid_value
from playground.apiserver.storage import Object

_ENVIRONMENT = cel.NewEnv(
    variables=dict.fromkeys(("object", "oldObject", "request"), cel.Type.DYN),
    extensions=[ext_optional.ExtOptional(), ext_strings.ExtStrings()],
)


@lru_cache(maxsize=256)
def _compiled(expression: str) -> Any:
    """Raises RuntimeError for what is no CEL."""
    return _ENVIRONMENT.compile(expression)


def condition_problems(hook: Object, path: str) -> Iterator[Cause]:
    """Conditions that do not compile."""
    for i, condition in enumerate(hook.get("matchConditions") or []):
        expression = condition.get("expression", "")
        try:
            _compiled(expression)
        except RuntimeError as problem:
            where = f"{path}.matchConditions[{i}].expression"
            yield invalid_value(where, expression, f"compilation failed: {problem}")


def conditions_hold(hook: Object, attrs: Attributes, obj: Object | None, old: Object | None) -> bool:
    """Whether all conditions are true. One that fails counts as false, but refuses the request under `Fail`."""
    conditions = hook.get("matchConditions") or []
    if not conditions:
        return True
    request = attrs.review("", None, None)["request"]
    known = {"object": obj, "oldObject": old, "request": request}
    results = [_compiled(c["expression"]).eval(data=known) for c in conditions]
    if any(r.type() == cel.Type.BOOL and not r.value() for r in results):
        return False
    errors = [str(r) for r in results if r.type() != cel.Type.BOOL]
    if errors and hook.get("failurePolicy") != "Ignore":
        raise forbidden(attrs.group, attrs.plural, attrs.name, "; ".join(errors))
    return not errors
