"""Evaluates ValidatingAdmissionPolicies and match conditions with the CEL project's own library."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from cel_expr_python import cel
from cel_expr_python.ext import ext_optional, ext_strings

Raw = dict[str, Any]
ENVIRONMENT = cel.NewEnv(
    variables=dict.fromkeys(("object", "oldObject", "request", "variables"), cel.Type.DYN),
    extensions=[ext_optional.ExtOptional(), ext_strings.ExtStrings()],
)
COMPILED: dict[str, Any] = {}


def policies(file: Path) -> dict[str, Raw]:
    """Return the specs of the policies in a file, by name."""
    return {
        document["metadata"]["name"]: document["spec"]
        for document in yaml.safe_load_all(file.read_text())
        if document["kind"] == "ValidatingAdmissionPolicy"
    }


def evaluated(expression: str, data: Mapping[str, Any]) -> Any:
    if expression not in COMPILED:
        COMPILED[expression] = ENVIRONMENT.compile(expression)
    result = COMPILED[expression].eval(data=data)
    assert result.type() != cel.Type.ERROR, f"{expression}: {result}"
    return plain(result)


def plain(value: Any) -> Any:
    if hasattr(value, "value"):
        value = value.value()
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def denials(spec: Raw, new: Raw | None, old: Raw | None, *, user: str, node: str | None = None) -> tuple[str, ...]:
    """Return the messages with which the policy refuses the change, as the API server would evaluate it.

    Args:
        node: the node that the user's token is bound to.
    """
    operation = "CREATE" if old is None else "DELETE" if new is None else "UPDATE"
    extra = {"authentication.kubernetes.io/node-name": [node]} if node else {}
    request = {"operation": operation, "userInfo": {"username": user, "extra": extra}}
    data: Raw = {"object": new, "oldObject": old, "request": request, "variables": {}}
    if not all(evaluated(condition["expression"], data) for condition in spec["matchConditions"]):
        return ()
    for variable in spec["variables"]:
        data["variables"][variable["name"]] = evaluated(variable["expression"], data)
    rules = spec["validations"]
    return tuple(rule["message"] for rule in rules if not evaluated(rule["expression"], data))
