"""Paths and query parameters of the API, parsed into one typed call."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from playground.apiserver.attributes import User
from playground.apiserver.errors import ApiError, Cause, bad_request, invalid, unsupported
from playground.apiserver.kinds import Kind, Registry

_TRUE = ("true", "1", "t", "T", "TRUE", "True")


@dataclass(frozen=True)
class Path:
    """Where a request goes. `namespace` is empty for cluster-scoped resources and for lists over all namespaces."""

    kind: Kind
    namespace: str = ""
    name: str = ""
    subresource: str = ""


@dataclass(frozen=True)
class Call:
    """One request to a resource. `warnings` become `Warning` headers."""

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
        """0 when absent. Raises a 400 for what is no number."""
        text = self.query.get(name) or "0"
        if not text.isdecimal():
            raise bad_request(f'strconv.ParseInt: parsing "{text}": invalid syntax')
        return int(text)

    @property
    def dry_run(self) -> bool:
        return check_dry_run([self.query["dryRun"]] if "dryRun" in self.query else [])

    @property
    def field_validation(self) -> str:
        mode = self.query.get("fieldValidation") or "Warn"
        if mode not in ("Strict", "Warn", "Ignore"):
            cause = unsupported("fieldValidation", mode, ("", "Ignore", "Strict", "Warn"))
            raise invalid("meta.k8s.io", "CreateOptions", "", [cause])
        return mode


def check_dry_run(values: list[str]) -> bool:
    """Whether this is a dry run. Raises a 422 for anything but `All`."""
    if values not in ([], ["All"]):
        shown = " ".join(f'"{v}"' for v in values)
        cause = Cause("dryRun", f'Unsupported value: [{shown}]: supported values: "All"', "FieldValueNotSupported")
        raise invalid("meta.k8s.io", "CreateOptions", "", [cause])
    return bool(values)


def parse_path(path: str, registry: Registry) -> Path | None:
    """The resource that a path names; None when there is none.

    `/api/v1/namespaces/default/pods/p/log`, `/apis/apps/v1/deployments`, `/apis/<group>/<version>/<plural>/<name>`.
    """
    parts = [p for p in path.split("/") if p]
    if parts[:2] == ["api", "v1"]:
        group, version, rest = "", "v1", parts[2:]
    elif parts[:1] == ["apis"] and len(parts) >= 3:
        group, version, rest = parts[1], parts[2], parts[3:]
    else:
        return None
    namespace = ""
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


def wrong_kind(path: Path, body_version: str, body_kind: str) -> ApiError | None:
    """The 400 for a body of another kind or version than its path."""
    kind = path.kind
    version, name = body_version or kind.api_version, body_kind or kind.kind
    if (version, name) == (kind.api_version, kind.kind):
        return None
    short = version.rpartition("/")[2]
    return bad_request(
        f'{name} in version "{short}" cannot be handled as a {kind.kind}: this path serves {kind.api_version}'
    )
