"""Defines parsed requests to the API server, and the AdmissionReviews that describe them.

`api_server` makes a `Call` from each HTTP request, and the modules that handle requests get it. `admission_webhooks`
sends the reviews.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from playground.apiserver.api_errors import Cause, bad_request, invalid, unsupported
from playground.apiserver.kinds import Kind, Registry
from playground.apiserver.storage import Object

_TRUE = ("true", "1", "t", "T", "TRUE", "True")


@dataclass(frozen=True)
class User:
    """An authenticated user. Every user is also in the group `system:authenticated`, which `groups` omits.

    Attributes:
        node: The node of the pod to which the token of a service account is bound, or "".
    """

    name: str
    groups: tuple[str, ...] = ()
    uid: str = ""
    node: str = ""

    def as_info(self) -> Object:
        """Return the `userInfo` of an AdmissionReview or a SelfSubjectReview."""
        info: Object = {"username": self.name, "groups": [*self.groups, "system:authenticated"]}
        extra = {"extra": {"authentication.kubernetes.io/node-name": [self.node]}} if self.node else {}
        return info | ({"uid": self.uid} if self.uid else {}) | extra


@dataclass(frozen=True)
class Attributes:
    """The attributes of a request that admission webhooks receive.

    Attributes:
        operation: CREATE, UPDATE or DELETE.
        plural: The name of the resource, such as `pods`.
        kind: The group, version and kind of the object in the request. For a subresource it may differ from the kind of
            the resource.
        namespace: The namespace of the object. If the object is a namespace, this is its name.
        options: The options of the operation, such as CreateOptions.
        warnings: The list to which the warnings of webhooks are added.
    """

    operation: str
    group: str
    version: str
    plural: str
    subresource: str
    kind: tuple[str, str, str]
    namespace: str
    name: str
    user: User
    dry_run: bool
    namespaced: bool
    options: Object = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list, compare=False)

    def review(self, uid: str, obj: Object | None, old: Object | None) -> dict[str, Any]:
        """Return the AdmissionReview that a webhook receives.

        Args:
            uid: The UID of the review.
            obj: The new object, or None for a deletion.
            old: The stored object, or None for a creation.
        """
        gvk = dict(zip(("group", "version", "kind"), self.kind, strict=True))
        gvr = {"group": self.group, "version": self.version, "resource": self.plural}
        sub = self.subresource
        optional = {"subResource": sub, "requestSubResource": sub, "name": self.name, "namespace": self.namespace}
        request: Object = {"uid": uid, "kind": gvk, "resource": gvr, "requestKind": gvk, "requestResource": gvr}
        request |= {key: value for key, value in optional.items() if value}
        request |= {"operation": self.operation, "userInfo": self.user.as_info(), "object": obj, "oldObject": old}
        request |= {"dryRun": self.dry_run, "options": self.options}
        return {"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": request}


@dataclass(frozen=True)
class Path:
    """The resource or object that a request is for.

    Attributes:
        namespace: The namespace, or "" for a cluster-scoped resource and for a request over all namespaces.
        name: The name of the object, or "" for a request to the whole collection.
    """

    kind: Kind
    namespace: str = ""
    name: str = ""
    subresource: str = ""


@dataclass(frozen=True)
class Call:
    """One request to a resource. `warnings` become the `Warning` headers of the response."""

    path: Path
    user: User
    query: Mapping[str, str]
    accept: str = ""
    content_type: str = ""
    body: bytes = b""
    warnings: list[str] = field(default_factory=list)

    def flag(self, name: str) -> bool:
        return self.query.get(name, "") in _TRUE

    def number(self, name: str) -> int:
        """Return an integer query parameter, or 0 if it is absent. Raises a 400 if it is not a non-negative integer."""
        text = self.query.get(name) or "0"
        if not text.isdecimal():
            raise bad_request(f'strconv.ParseInt: parsing "{text}": invalid syntax')
        return int(text)

    @property
    def dry_run(self) -> bool:
        """Whether the query requests a dry run. Raises a 422 for an unknown value."""
        return check_dry_run([self.query["dryRun"]] if "dryRun" in self.query else [])

    @property
    def field_validation(self) -> str:
        """How unknown fields are handled: `Strict`, `Warn` or `Ignore`. Raises a 422 for another value."""
        mode = self.query.get("fieldValidation") or "Warn"
        if mode not in ("Strict", "Warn", "Ignore"):
            cause = unsupported("fieldValidation", mode, ("", "Ignore", "Strict", "Warn"))
            raise invalid("CreateOptions.meta.k8s.io", "", [cause])
        return mode

    def attributes(self, operation: str, name: str, **differing: Any) -> Attributes:
        """Return the attributes of this request for admission. `differing` replaces fields of the result."""
        kind, dry_run = self.path.kind, self.dry_run
        own = name if kind.resource == "namespaces" else ""
        found: dict[str, Any] = {
            "operation": operation,
            "group": kind.group,
            "version": kind.version,
            "plural": kind.plural,
            "subresource": "",
            "kind": (kind.group, kind.version, kind.kind),
            "namespace": self.path.namespace if kind.namespaced else own,
            "name": name,
            "user": self.user,
            "dry_run": dry_run,
            "namespaced": kind.namespaced,
            "options": {"kind": f"{operation.capitalize()}Options", "apiVersion": "meta.k8s.io/v1"}
            | ({"dryRun": ["All"]} if dry_run else {}),
            "warnings": self.warnings,
        }
        return Attributes(**found | differing)


def check_dry_run(values: list[str]) -> bool:
    """Return whether the values of `dryRun` request a dry run. Raises a 422 for any value but `All`."""
    if values not in ([], ["All"]):
        shown = " ".join(f'"{v}"' for v in values)
        cause = Cause("dryRun", f'Unsupported value: [{shown}]: supported values: "All"', "FieldValueNotSupported")
        raise invalid("CreateOptions.meta.k8s.io", "", [cause])
    return bool(values)


def parse_path(path: str, registry: Registry) -> Path | None:
    """Return the resource or object that a URL path names, or None if it names no served resource.

    Whether the resource has the subresource is not checked. Examples of paths are
    `/api/v1/namespaces/default/pods/p/log`, `/apis/apps/v1/deployments` and `/apis/<group>/<version>/<plural>/<name>`.
    """
    parts = [p for p in path.split("/") if p]
    if parts[:2] == ["api", "v1"]:
        group, version, rest = "", "v1", parts[2:]
    elif parts[:1] == ["apis"] and len(parts) >= 3:
        group, version, rest = parts[1], parts[2], parts[3:]
    else:
        return None
    namespace = ""
    # `namespaces/<name>/status` and `…/finalize` are subresources of the namespace. Other paths name resources in it.
    if rest[:1] == ["namespaces"] and len(rest) >= 3 and not (len(rest) == 3 and rest[2] in ("status", "finalize")):
        namespace, rest = rest[1], rest[2:]
    if not 1 <= len(rest) <= 3:
        return None
    kind = registry.find(group, version, rest[0])
    if kind is None or (namespace and not kind.namespaced):
        return None
    name, subresource = [*rest[1:], "", ""][:2]
    if name and kind.namespaced and not namespace:
        return None
    return Path(kind, namespace, name, subresource)


def check_kind(kind: Kind, body: Any) -> Object:
    """Return the body of a write. Raises a 400 if it is not an object or has another kind or apiVersion."""
    if not isinstance(body, dict):
        raise bad_request(f"the body of the request is not a {kind.kind}")
    version, name = body.get("apiVersion") or kind.api_version, body.get("kind") or kind.kind
    if (version, name) != (kind.api_version, kind.kind):
        short = version.rpartition("/")[2]
        served = f"this path serves {kind.api_version}"
        raise bad_request(f'{name} in version "{short}" cannot be handled as a {kind.kind}: {served}')
    return body
