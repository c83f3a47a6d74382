"""Defines the errors of the API server. Each becomes a `Status` with code, reason and details, as in kube-apiserver.

Keep the messages in kube-apiserver's words, because clients and tests compare them. The argument `resource` is a name
as in `storage` (`pods` or `deployments.apps`), unless a docstring says otherwise. A `Cause` describes one broken rule
of an object, and `invalid` makes a 422 of one or more causes. All modules of the API server may raise these errors.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import orjson


@dataclass(frozen=True, slots=True)
class Cause:
    """One broken rule of an object, such as `spec.containers[0].image: Required value`.

    Attributes:
        field: The path of the field that breaks the rule.
        message: What is wrong with the field.
        reason: The type of the cause, as in metav1.StatusCause.
    """

    field: str
    message: str
    reason: str = "FieldValueInvalid"

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


def required(field: str, detail: str = "") -> Cause:
    """Return the cause for a field that is missing."""
    return Cause(field, f"Required value{': ' + detail if detail else ''}", "FieldValueRequired")


def invalid_value(field: str, value: object, detail: str) -> Cause:
    """Return the cause for a value that is malformed or outside its range."""
    shown = orjson.dumps(value).decode() if isinstance(value, (str, dict, list)) else value
    return Cause(field, f"Invalid value: {shown}: {detail}")


def unsupported(field: str, value: str, allowed: Iterable[str]) -> Cause:
    """Return the cause for a value that is not one of the allowed ones."""
    names = ", ".join(f'"{a}"' for a in allowed)
    return Cause(field, f'Unsupported value: "{value}": supported values: {names}', "FieldValueNotSupported")


def forbidden_field(field: str, detail: str) -> Cause:
    """Return the cause for a field that must not be set or changed."""
    return Cause(field, f"Forbidden: {detail}", "FieldValueForbidden")


def duplicate(field: str, value: str) -> Cause:
    """Return the cause for an item of a list that equals an earlier one, or has the same key."""
    return Cause(field, f'Duplicate value: "{value}"', "FieldValueDuplicate")


def too_many(field: str, count: int, most: int) -> Cause:
    """Return the cause for a list with too many items."""
    return Cause(field, f"Too many: {count}: must have at most {most} items", "FieldValueTooMany")


def too_long(field: str, most: int) -> Cause:
    """Return the cause for a text that has more than `most` bytes."""
    return Cause(field, f"Too long: may not be more than {most} bytes", "FieldValueTooLong")


class ApiError(Exception):
    """The failure of a request.

    Attributes:
        code: The HTTP status code.
        reason: The reason in the Status, such as `NotFound`; "" if the Status has no reason.
        message: The message in the Status.
        details: The details in the Status, as in metav1.StatusDetails.
    """

    def __init__(self, code: int, reason: str, message: str, details: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = details

    def status(self) -> dict[str, Any]:
        """Return the Status that is the body of the answer."""
        status: dict[str, Any] = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
        status["message"] = self.message
        if self.reason:
            status["reason"] = self.reason
        if self.details is not None:
            status["details"] = self.details
        return status | {"code": self.code}


def success(details: dict[str, Any] | None = None, code: int | None = None) -> dict[str, Any]:
    """Return the Status that answers a successful request if the answer contains no other object."""
    status: dict[str, Any] = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
    return status | ({"details": details} if details else {}) | ({"code": code} if code else {})


def bad_request(message: str) -> ApiError:
    return ApiError(400, "BadRequest", message)


def not_found(resource: str, name: str) -> ApiError:
    return ApiError(404, "NotFound", f'{resource} "{name}" not found', _details(resource, name))


def no_such_path() -> ApiError:
    return ApiError(404, "NotFound", "the server could not find the requested resource", {})


def already_exists(resource: str, name: str) -> ApiError:
    return ApiError(409, "AlreadyExists", f'{resource} "{name}" already exists', _details(resource, name))


def conflict(resource: str, name: str, reason: str) -> ApiError:
    message = f'Operation cannot be fulfilled on {resource} "{name}": {reason}'
    return ApiError(409, "Conflict", message, _details(resource, name))


def forbidden(resource: str, name: str, reason: str, causes: Iterable[dict[str, str]] = ()) -> ApiError:
    details = _details(resource, name) | ({"causes": list(causes)} if causes else {})
    return ApiError(403, "Forbidden", f'{resource} "{name}" is forbidden: {reason}', details)


def not_permitted(user: str, verb: str, group: str, resource: str, namespace: str, name: str) -> ApiError:
    """Return the 403 for a user who has no right to make the request.

    Here `resource` has no group, but includes the subresource (`pods/binding`). `namespace` and `name` may be "".
    """
    where = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
    reason = f'User "{user}" cannot {verb} resource "{resource}" in API group "{group}" {where}'
    plural = resource.partition("/")[0]
    about = f"{plural}.{group}" if group else plural
    if name:
        return forbidden(about, name, reason)
    return ApiError(403, "Forbidden", f"{about} is forbidden: {reason}", _details(about, ""))


def invalid(kind: str, name: str, causes: Iterable[Cause]) -> ApiError:
    """Return the 422 for an object that breaks rules. `kind` includes the group: `Pod`, `Deployment.apps`."""
    found = list(causes)
    text = str(found[0]) if len(found) == 1 else f"[{', '.join(map(str, found))}]"
    details = _details(kind, name)
    details["causes"] = [{"reason": c.reason, "message": c.message, "field": c.field} for c in found]
    return ApiError(422, "Invalid", f'{kind} "{name}" is invalid: {text}', details)


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


def plain(code: int, message: str) -> ApiError:
    """Return a failure without reason and details, such as kube-apiserver's answer to an error without a Status."""
    return ApiError(code, "", message)


def unsupported_media_type(accepted: Iterable[str]) -> ApiError:
    message = f"the body of the request was in an unknown format - accepted media types include: {', '.join(accepted)}"
    return ApiError(415, "UnsupportedMediaType", message)


def _details(resource: str, name: str) -> dict[str, Any]:
    """Return the details that name an object. Their `kind` is the part of `resource` before the group."""
    plural, _, group = resource.partition(".")
    return {key: value for key, value in (("name", name), ("group", group), ("kind", plural)) if value}
