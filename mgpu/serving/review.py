"""Parses an AdmissionReview (`admission.k8s.io/v1`) and builds the replies.

`mgpu.serving.app` parses the reviews, and the handlers of the webhook and the scheduler build the replies. A request
that is not an AdmissionReview raises BadRequest, which becomes an HTTP error, and the API server applies
`failurePolicy`. A denial, in contrast, is a valid answer that rejects the object.
"""

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from mgpu.model.errors import MAX_PROBLEMS, Problem, Rule, shorten, summarize

API_VERSION = "admission.k8s.io/v1"
_MOST_CHARACTERS = 1024
"""The most characters of a text outside the objects of a review. Answers and logs repeat these texts. Names in
Kubernetes have at most 253 characters."""
WARNINGS = 20
"""The most warnings of one answer, before one that says how many are left out. The API server truncates all warnings
together to 4 KiB."""
_OPERATIONS = ("CREATE", "UPDATE", "DELETE", "CONNECT")
_REASONS = {400: "BadRequest", 403: "Forbidden", 409: "Conflict", 422: "Invalid"}

Patch = Sequence[Mapping[str, Any]]


class BadRequest(Exception):
    """The HTTP request is invalid. `status` is the HTTP status of the answer."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Review:
    """The request of an AdmissionReview.

    Attributes:
        uid: the UID of the review, which the answer repeats.
        resource: the resource with its subresource: `pods`, `pods/status`, `pods/binding`, `bindings`.
        name: the name of the object; "" for a CREATE with generateName.
        object: the object after the operation; None for DELETE.
        old: the object before an UPDATE or DELETE; None for CREATE and CONNECT.
    """

    uid: str
    operation: str
    kind: str
    resource: str
    namespace: str
    name: str
    user: str
    groups: tuple[str, ...]
    dry_run: bool
    object: dict[str, Any] | None
    old: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a request: an HTTP status and a JSON body.

    Attributes:
        close: whether to close the connection, so that the client's next call can reach another replica.
        broken_rules: the rules that the denied object breaks, for the metrics.
    """

    body: Mapping[str, Any]
    status: int = 200
    close: bool = False
    broken_rules: frozenset[Rule] = frozenset()

    @property
    def allowed(self) -> bool:
        return bool(self.body.get("response", {}).get("allowed"))


def parse_review(body: bytes | bytearray) -> Review:
    """Parse the review in `body`. Raises BadRequest (400) with a message that names the field."""
    try:
        top = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(400, f"the body is not JSON: {error}") from error
    if not isinstance(top, dict) or top.get("kind") != "AdmissionReview":
        raise BadRequest(400, "the body is not an AdmissionReview")
    if top.get("apiVersion") != API_VERSION:
        version = top.get("apiVersion")
        other = f", not {version[:100]!r}" if isinstance(version, str) else ""
        raise BadRequest(400, f"apiVersion must be {API_VERSION}{other}")
    request = _table(top, "request")
    if not request:
        raise BadRequest(400, "request is missing")
    operation = _text(request, "request.operation")
    if operation not in _OPERATIONS:
        raise BadRequest(400, f"request.operation must be one of {', '.join(_OPERATIONS)}, not {operation[:100]!r}")
    user = _table(request, "request.userInfo")
    subresource = _text(request, "request.subResource")
    resource = _text(_table(request, "request.resource"), "request.resource.resource")
    review = Review(
        uid=_text(request, "request.uid"),
        operation=operation,
        kind=_text(_table(request, "request.kind"), "request.kind.kind"),
        resource=f"{resource}/{subresource}" if subresource else resource,
        namespace=_text(request, "request.namespace"),
        name=_text(request, "request.name"),
        user=_text(user, "request.userInfo.username"),
        groups=_texts(user, "request.userInfo.groups"),
        dry_run=request.get("dryRun") is True,
        object=_table(request, "request.object") or None,
        old=_table(request, "request.oldObject") or None,
    )
    if not review.uid:
        raise BadRequest(400, "request.uid is missing")
    if review.object is None and operation in ("CREATE", "UPDATE"):
        raise BadRequest(400, f"request.object is missing in a review of {operation}")
    if review.old is None and operation == "UPDATE":
        raise BadRequest(400, "request.oldObject is missing in a review of UPDATE")
    return review


def allow(review: Review, patch: Patch = (), warnings: Sequence[str] = ()) -> Reply:
    """Return a reply that admits the object, changed by the operations of the JSON Patch (RFC 6902) `patch`."""
    response: dict[str, Any] = {"uid": review.uid, "allowed": True}
    if patch:
        response["patchType"] = "JSONPatch"
        response["patch"] = base64.b64encode(orjson.dumps(list(patch))).decode()
    return _reply(response, warnings)


def deny(
    review: Review,
    reasons: str | Iterable[Problem],
    code: int = 422,
    warnings: Sequence[str] = (),
) -> Reply:
    """Return a reply that denies the object.

    If `reasons` are problems, the message and `details.causes`, which kubectl lists, contain the first MAX_PROBLEMS of
    them.

    Args:
        reasons: the message, or the problems of the object.
        code: the HTTP status that the user's client gets. A client retries after 429 and 5xx
            (docs/design/kubernetes.md).
    """
    status: dict[str, Any] = {"status": "Failure", "code": code, "reason": _REASONS.get(code, "Forbidden")}
    problems: list[Problem] = []
    if isinstance(reasons, str):
        status["message"] = reasons
    else:
        problems = list(reasons)
        status["message"] = summarize(problems)
        status["details"] = {
            "kind": review.kind,
            "name": review.name,
            "causes": [
                {"reason": "FieldValueInvalid", "field": shorten(p.field), "message": shorten(p.message)}
                for p in problems[:MAX_PROBLEMS]
            ],
        }
    rules = frozenset(problem.rule for problem in problems)
    return _reply({"uid": review.uid, "allowed": False, "status": status}, warnings, rules)


def json_pointer(*parts: str | int) -> str:
    """Return the JSON Pointer (RFC 6901) of a path, such as `/metadata/annotations/a~1b`."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in parts)


def _reply(response: dict[str, Any], warnings: Sequence[str], rules: frozenset[Rule] = frozenset()) -> Reply:
    if warnings:
        more = len(warnings) - WARNINGS
        response["warnings"] = [*map(shorten, warnings[:WARNINGS]), *([f"and {more} more"] if more > 0 else ())]
    body = {"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response}
    return Reply(body, broken_rules=rules)


def _get(table: Mapping[str, Any], path: str, kind: type, kind_name: str) -> Any:
    value = table.get(path.rpartition(".")[2])
    if value is not None and not isinstance(value, kind):
        raise BadRequest(400, f"{path} must be {kind_name}, not {type(value).__name__}")
    return value


def _table(table: Mapping[str, Any], path: str) -> dict[str, Any]:
    return _get(table, path, dict, "an object") or {}


def _text(table: Mapping[str, Any], path: str) -> str:
    text: str = _get(table, path, str, "a string") or ""
    if len(text) > _MOST_CHARACTERS:
        raise BadRequest(400, f"{path} must have at most {_MOST_CHARACTERS} characters, not {len(text)}")
    return text


def _texts(table: Mapping[str, Any], path: str) -> tuple[str, ...]:
    values = _get(table, path, list, "a list") or ()
    if not all(isinstance(value, str) for value in values):
        raise BadRequest(400, f"{path} must be a list of strings")
    return tuple(values)
