"""The documents from which clients learn which groups, versions and resources are served.

`api_server` serves them.
"""

from playground.apiserver.kinds import Kind, Registry
from playground.apiserver.storage import Object

_VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
_SUBRESOURCES = {
    "status": ("", "", ["get", "patch", "update"]),
    "binding": ("", "Binding", ["create"]),
    "eviction": ("policy/v1", "Eviction", ["create"]),
    "log": ("", "", ["get"]),
}
# Reviews are answered but not stored, so the `Registry` does not contain them.
_REVIEWS = {
    "authorization.k8s.io/v1": ("selfsubjectaccessreviews", "SelfSubjectAccessReview"),
    "authentication.k8s.io/v1": ("selfsubjectreviews", "SelfSubjectReview"),
}
VERSION = {
    "major": "1",
    "minor": "36",
    "gitVersion": "v1.36.0+playground",
    "gitCommit": "",
    "gitTreeState": "clean",
    "buildDate": "1970-01-01T00:00:00Z",
    "goVersion": "none",
    "compiler": "cpython",
    "platform": "linux/amd64",
}


def document(registry: Registry, path: str) -> Object | None:
    """Return the discovery or OpenAPI document at a URL path, or None if there is no such document."""
    match path.strip("/").split("/"):
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
        case ["apis"]:
            found = _groups(registry)
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(g, found[g]) for g in sorted(found)]}
        case ["apis", name]:
            versions = _groups(registry).get(name)
            return {"kind": "APIGroup", "apiVersion": "v1"} | _group(name, versions) if versions else None
        case ["api", "v1"]:
            return resources(registry, "v1")
        case ["apis", name, version]:
            return resources(registry, f"{name}/{version}")
        case ["openapi", "v3"]:
            roots = sorted({_root(k.api_version) for k in registry})
            return {"paths": {root: {"serverRelativeURL": f"/openapi/v3/{root}"} for root in roots}}
        case ["openapi", "v3", *root]:
            return _openapi(registry, "/".join(root))
    return None


def _groups(registry: Registry) -> dict[str, list[str]]:
    """Return the versions of each group, without the core group, which has no name."""
    found: dict[str, list[str]] = {v.partition("/")[0]: ["v1"] for v in _REVIEWS}
    for kind in registry:
        if kind.group and kind.version not in found.setdefault(kind.group, []):
            found[kind.group].append(kind.version)
    return found


def _group(name: str, versions: list[str]) -> Object:
    """Return the APIGroup of a group, whose preferred version is the first one."""
    offered = [{"groupVersion": f"{name}/{v}", "version": v} for v in versions]
    return {"name": name, "versions": offered, "preferredVersion": offered[0]}


def _entries(kind: Kind) -> list[Object]:
    """Return the APIResources of a kind and of its subresources."""
    entry: Object = {"name": kind.plural, "singularName": kind.singular, "namespaced": kind.namespaced}
    entry |= {"kind": kind.kind, "verbs": _VERBS}
    if kind.short:
        entry["shortNames"] = list(kind.short)
    if kind.categories:
        entry["categories"] = list(kind.categories)
    entries = [entry]
    for name in kind.subresources:
        api_version, other, verbs = _SUBRESOURCES[name]
        sub: Object = {"name": f"{kind.plural}/{name}", "singularName": "", "namespaced": kind.namespaced}
        sub |= {"kind": other or kind.kind, "verbs": verbs}
        if api_version:
            sub["group"], _, sub["version"] = api_version.rpartition("/")
        entries.append(sub)
    return entries


def resources(registry: Registry, group_version: str) -> Object | None:
    """Return the APIResourceList of a group and version, such as `v1` or `apps/v1`, or None if it is not served."""
    entries = [e for k in registry if k.api_version == group_version for e in _entries(k)]
    if group_version == "v1":
        binding = {"name": "bindings", "singularName": "binding", "namespaced": True, "kind": "Binding"}
        entries.append(binding | {"verbs": ["create"]})
    if review := _REVIEWS.get(group_version):
        name, kind = review
        entries.append(
            {"name": name, "singularName": kind.lower(), "namespaced": False, "kind": kind, "verbs": ["create"]}
        )
    if not entries:
        return None
    head: Object = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version}
    return head | {"resources": sorted(entries, key=lambda e: str(e["name"]))}


def _root(group_version: str) -> str:
    return f"apis/{group_version}" if "/" in group_version else f"api/{group_version}"


def _openapi(registry: Registry, root: str) -> Object | None:
    """Return the OpenAPI document of a group and version, or None if nothing of it is served.

    The document contains only what clients look up: PATCH has the parameters `fieldValidation` and `dryRun`. A client
    that finds them leaves the validation of fields and the dry run to the server.
    """
    paths: Object = {}
    for kind in registry:
        if _root(kind.api_version) != root:
            continue
        place = "/namespaces/{namespace}" if kind.namespaced else ""
        parameters = [{"name": n, "in": "query", "schema": {"type": "string"}} for n in ("dryRun", "fieldValidation")]
        gvk = {"group": kind.group, "version": kind.version, "kind": kind.kind}
        answers = {"200": {"description": "OK"}}
        patch = {"parameters": parameters, "responses": answers, "x-kubernetes-group-version-kind": gvk}
        paths[f"/{root}{place}/{kind.plural}/{{name}}"] = {"patch": patch}
    if root == "api/v1":
        # kubectl looks up the parameters of PATCH for the kind that it creates. So Binding needs such an entry too,
        # although a Binding cannot be patched.
        binding = {**patch, "x-kubernetes-group-version-kind": {"group": "", "version": "v1", "kind": "Binding"}}
        paths["/api/v1/namespaces/{namespace}/bindings"] = {"patch": binding}
    info = {"title": "mgpu playground", "version": VERSION["gitVersion"]}
    return {"openapi": "3.0.0", "info": info, "paths": paths} if paths else None
