"""Authorizes the requests of the users that RBAC restricts, and records these requests.

`api_server` checks each request with the `Authorizer`. In the playground's cluster, mgpu's processes are the restricted
users. The roles and the bindings are read from the storage. ClusterRoles are not aggregated: an aggregated ClusterRole
has only the rules that its object contains. The recorded requests show which of the rights in `manifests/` are needed.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from playground.apiserver.api_errors import not_permitted
from playground.apiserver.calls import Call, User
from playground.apiserver.storage import Object, Storage

_GROUP = "rbac.authorization.k8s.io"
_BINDINGS, _CLUSTER_BINDINGS = f"rolebindings.{_GROUP}", f"clusterrolebindings.{_GROUP}"
_ROLES, _CLUSTER_ROLES = f"roles.{_GROUP}", f"clusterroles.{_GROUP}"
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch"}


@dataclass(frozen=True, slots=True, order=True)
class Request:
    """One request of a restricted user.

    Attributes:
        verb: The verb of RBAC, such as `get`, `list` or `deletecollection`.
        resource: The resource and its subresource as roles name them, such as `pods/binding`.
        namespace: The namespace, or "" for a cluster-scoped resource and for a request over all namespaces.
        name: The name of the object, or "" if the request names none, as in most creations and lists.
    """

    user: str
    verb: str
    group: str
    resource: str
    namespace: str = ""
    name: str = ""
    allowed: bool = True


@dataclass(frozen=True, slots=True)
class _Grant:
    """The rules that a binding grants in one namespace, or everywhere if the namespace is ""."""

    namespace: str
    rules: tuple[Object, ...]

    def allows(self, request: Request) -> bool:
        return self.namespace in ("", request.namespace) and any(allows(rule, request) for rule in self.rules)


def allows(rule: Object, request: Request) -> bool:
    """Return whether a rule of a role allows the request. The namespace is not compared."""
    _, slash, sub = request.resource.partition("/")
    resources = {"*", request.resource, f"*/{sub}"} if slash else {"*", request.resource}
    names = rule.get("resourceNames")
    return (
        bool({"*", request.verb} & {*rule["verbs"]})
        and bool({"*", request.group} & {*(rule.get("apiGroups") or ())})
        and bool(resources & {*(rule.get("resources") or ())})
        and (not names or request.name in names)
    )


class Authorizer:
    """Authorizes and records requests.

    Args:
        users: The names of the restricted users, to whom RBAC applies. All other users may do everything.

    Attributes:
        requests: The requests that the restricted users have made. The names of objects are left out, except in refused
            requests.
    """

    def __init__(self, storage: Storage, users: Collection[str]) -> None:
        self._storage = storage
        self._users = frozenset(users)
        self._grants: dict[User, tuple[_Grant, ...]] = {}
        self._version: tuple[int, ...] = ()
        self.requests: set[Request] = set()

    def check(self, method: str, call: Call) -> None:
        """Record the request if its user is restricted. Raises a 403 if the user lacks the right."""
        self.require(_request(method, call), call.user)

    def require(self, request: Request, user: User | None = None) -> None:
        """Do what `check` does, for a request of this user. By default, the user has no groups."""
        if not self.permits(request, user or User(request.user)):
            of = request.namespace, request.name
            raise not_permitted(request.user, request.verb, request.group, request.resource, *of)

    def permits(self, request: Request, user: User) -> bool:
        """Record the request if its user is restricted. Return whether the user has the right to make it."""
        if request.user not in self._users:
            return True
        allowed = self._allows(user, request)
        self.requests.add(replace(request, name="") if allowed else replace(request, allowed=False))
        return allowed

    def may(self, user: User, wanted: Mapping[str, str]) -> bool:
        """Return whether a user has the right that the resourceAttributes of a SelfSubjectAccessReview describe."""
        if user.name not in self._users:
            return True
        resource = "/".join(filter(None, (wanted.get("resource", ""), wanted.get("subresource", ""))))
        verb, group, namespace, name = (wanted.get(key, "") for key in ("verb", "group", "namespace", "name"))
        return self._allows(user, Request(user.name, verb, group, resource, namespace, name))

    def _allows(self, user: User, request: Request) -> bool:
        """Return whether a grant of the user allows the request.

        The grants are read again whenever a role or a binding has changed.
        """
        rows = (self._storage.collection(name) for name in (_BINDINGS, _CLUSTER_BINDINGS, _ROLES, _CLUSTER_ROLES))
        version = tuple(row.history[-1].rv if row.history else 0 for row in rows)
        if version != self._version:
            self._version = version
            self._grants = {}
        if user not in self._grants:
            self._grants[user] = tuple(self._granted(user))
        return any(grant.allows(request) for grant in self._grants[user])

    def _granted(self, user: User) -> Iterator[_Grant]:
        """Yield a grant for each binding that names the user."""
        for collection in (_BINDINGS, _CLUSTER_BINDINGS):
            for (namespace, _), item in sorted(self._storage.collection(collection).items.items()):
                if any(_is(user, subject, namespace) for subject in item.obj.get("subjects") or ()):
                    role = item.obj["roleRef"]
                    of = (_ROLES, namespace) if role["kind"] == "Role" else (_CLUSTER_ROLES, "")
                    found = self._storage.get(*of, role["name"])
                    yield _Grant(namespace, tuple(found.obj.get("rules") or ()) if found else ())


def _is(user: User, subject: Object, namespace: str) -> bool:
    """Return whether the subject of a binding in a namespace is the user or one of the user's groups."""
    if subject["kind"] == "ServiceAccount":
        account = f"system:serviceaccount:{subject.get('namespace') or namespace}:{subject['name']}"
        return user.name == account
    if subject["kind"] == "Group":
        return subject["name"] in (*user.groups, "system:authenticated")
    return bool(subject["name"] == user.name)


def _request(method: str, call: Call) -> Request:
    """Return the request, with the verb and the name that kube-apiserver derives for RBAC.

    Source: k8s.io/apiserver/pkg/endpoints/request/requestinfo.go.
    """
    path, name = call.path, call.path.name
    verb = _VERBS.get(method, method.lower())
    if method == "DELETE":
        verb = "delete" if name else "deletecollection"
    elif method in ("GET", "HEAD") and name:
        verb = "get"
    elif method in ("GET", "HEAD"):
        verb = "watch" if call.flag("watch") else "list"
    if not name and verb in ("list", "watch"):
        name = _selected(call.query.get("fieldSelector", ""))
    legacy = path.subresource == "bindings"
    resource = "bindings" if legacy else "/".join(filter(None, (path.kind.plural, path.subresource)))
    return Request(call.user.name, verb, path.kind.group, resource, path.namespace, name)


def _selected(selector: str) -> str:
    """Return the name in a field selector `metadata.name=…`, or "". For RBAC it is the name of the object."""
    for part in selector.split(","):
        key, _, value = part.replace("==", "=").partition("=")
        if key.strip() == "metadata.name":
            return value.strip()
    return ""
