"""Failures as the API states them: a `Status` object with code, reason and details, in the real server's words."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import orjson


@dataclass(frozen=True, slots=True)
class Cause:
    """One broken rule of an object: `spec.containers[0].image: Required value`."""

    field: str
    message: str
    reason: str = "FieldValueInvalid"

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


def required(field: str, detail: str = "") -> Cause:
    return Cause(field, f"Required value{': ' + detail if detail else ''}", "FieldValueRequired")


def invalid_value(field: str, value: object, detail: str) -> Cause:
    shown = orjson.dumps(value).decode() if isinstance(value, str) else value
    return Cause(field, f"Invalid value: {shown}: {detail}")


def unsupported(field: str, value: str, allowed: Iterable[str]) -> Cause:
    names = ", ".join(f'"{a}"' for a in allowed)
    return Cause(field, f'Unsupported value: "{value}": supported values: {names}', "FieldValueNotSupported")


def forbidden_field(field: str, detail: str) -> Cause:
    return Cause(field, f"Forbidden: {detail}", "FieldValueForbidden")


class ApiError(Exception):
    """Answers a request with a failure. `details` as in metav1.StatusDetails."""

    def __init__(self, code: int, reason: str, message: str, details: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code, self.reason, self.message, self.details = code, reason, message, details

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
        status["message"] = self.message
        if self.reason:
            status["reason"] = self.reason
        if self.details is not None:
            status["details"] = self.details
        return status | {"code": self.code}


def success(details: dict[str, Any] | None = None, code: int | None = None) -> dict[str, Any]:
    status: dict[str, Any] = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
    return status | ({"details": details} if details else {}) | ({"code": code} if code else {})


def _about(group: str, plural: str, name: str) -> dict[str, Any]:
    return ({"name": name} if name else {}) | ({"group": group} if group else {}) | ({"kind": plural} if plural else {})


def _qualified(group: str, plural: str) -> str:
    return f"{plural}.{group}" if group else plural


def bad_request(message: str) -> ApiError:
    return ApiError(400, "BadRequest", message)


def not_found(group: str, plural: str, name: str) -> ApiError:
    return ApiError(404, "NotFound", f'{_qualified(group, plural)} "{name}" not found', _about(group, plural, name))


def no_such_path() -> ApiError:
    return ApiError(404, "NotFound", "the server could not find the requested resource", {})


def already_exists(group: str, plural: str, name: str) -> ApiError:
    message = f'{_qualified(group, plural)} "{name}" already exists'
    return ApiError(409, "AlreadyExists", message, _about(group, plural, name))


def conflict(group: str, plural: str, name: str, why: str) -> ApiError:
    message = f'Operation cannot be fulfilled on {_qualified(group, plural)} "{name}": {why}'
    return ApiError(409, "Conflict", message, _about(group, plural, name))


def forbidden(group: str, plural: str, name: str, why: str, causes: Iterable[dict[str, str]] = ()) -> ApiError:
    details = _about(group, plural, name) | ({"causes": list(causes)} if causes else {})
    return ApiError(403, "Forbidden", f'{_qualified(group, plural)} "{name}" is forbidden: {why}', details)


def not_permitted(user: str, verb: str, group: str, resource: str, namespace: str, name: str) -> ApiError:
    """What authorization answers. resource: with its subresource."""
    where = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
    why = f'User "{user}" cannot {verb} resource "{resource}" in API group "{group}" {where}'
    plural = resource.partition("/")[0]
    if name:
        return forbidden(group, plural, name, why)
    return ApiError(403, "Forbidden", f"{_qualified(group, plural)} is forbidden: {why}", _about(group, plural, ""))


def invalid(group: str, kind: str, name: str, causes: Iterable[Cause]) -> ApiError:
    found = list(causes)
    text = str(found[0]) if len(found) == 1 else f"[{', '.join(map(str, found))}]"
    details = _about(group, kind, name)
    details["causes"] = [{"reason": c.reason, "message": c.message, "field": c.field} for c in found]
    title = f"{kind}.{group}" if group else kind
    return ApiError(422, "Invalid", f'{title} "{name}" is invalid: {text}', details)


def internal(message: str) -> ApiError:
    details = {"causes": [{"message": message}]}
    return ApiError(500, "InternalError", f"Internal error occurred: {message}", details)


def expired(message: str) -> ApiError:
    return ApiError(410, "Expired", message)


def too_large_version(wanted: int, current: int) -> ApiError:
    message = f"Too large resource version: {wanted}, current: {current}"
    causes = [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]
    return ApiError(504, "Timeout", f"Timeout: {message}", {"causes": causes, "retryAfterSeconds": 1})


def method_not_allowed() -> ApiError:
    return ApiError(405, "MethodNotAllowed", "the server does not allow this method on the requested resource", {})


def unauthorized() -> ApiError:
    return ApiError(401, "Unauthorized", "Unauthorized")


def field_immutable(field: str, value: object) -> Cause:
    return invalid_value(field, value, "field is immutable")


def plain(code: int, message: str) -> ApiError:
    """What the real server answers where an error of its own has no Status: no reason, no details."""
    return ApiError(code, "", message)


def unsupported_media_type(accepted: Iterable[str]) -> ApiError:
    message = f"the body of the request was in an unknown format - accepted media types include: {', '.join(accepted)}"
    return ApiError(415, "UnsupportedMediaType", message)
