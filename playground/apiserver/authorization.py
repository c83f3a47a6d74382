"""Who may do what: RBAC, for the users that are held to it; and what these have asked for.

As rbac.authorization.k8s.io/v1 says, from the Roles, ClusterRoles and bindings that are stored; aggregated ClusterRoles
have the rules that were written into them.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from playground.apiserver.attributes import User
from playground.apiserver.errors import not_permitted
from playground.apiserver.routes import Call
from playground.apiserver.storage import Object, Storage

_GROUP = "rbac.authorization.k8s.io"
_BINDINGS, _CLUSTER_BINDINGS = f"rolebindings.{_GROUP}", f"clusterrolebindings.{_GROUP}"
_ROLES, _CLUSTER_ROLES = f"roles.{_GROUP}", f"clusterroles.{_GROUP}"
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch"}


@dataclass(frozen=True, slots=True, order=True)
class Request:
    """What was asked for. resource: with its subresource, as roles name it (`pods/binding`).

    namespace: "" for cluster-scoped resources, and for all namespaces at once. name: of one object; "" for several,
    for a new one, and where it is not known.
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
    """Rules that hold in one namespace; "": everywhere."""

    namespace: str
    rules: tuple[Object, ...]

    def allows(self, asked: Request) -> bool:
        return self.namespace in ("", asked.namespace) and any(allows(rule, asked) for rule in self.rules)


def allows(rule: Object, asked: Request) -> bool:
    """Whether a rule of a role covers the request, wherever the role holds."""
    _, slash, sub = asked.resource.partition("/")
    resources = {"*", asked.resource, f"*/{sub}"} if slash else {"*", asked.resource}
    names = rule.get("resourceNames")
    return (
        bool({"*", asked.verb} & {*rule["verbs"]})
        and bool({"*", asked.group} & {*(rule.get("apiGroups") or ())})
        and bool(resources & {*(rule.get("resources") or ())})
        and (not names or asked.name in names)
    )


class Authorizer:
    """users: the names of those who may do only what roles allow them; all others may do everything.

    requests: what those users have asked for; names stand only in what was refused.
    """

    def __init__(self, storage: Storage, users: Collection[str]) -> None:
        self._storage, self._users = storage, frozenset(users)
        self._grants: dict[User, tuple[_Grant, ...]] = {}
        self._version: tuple[int, ...] = ()
        self.requests: set[Request] = set()

    def check(self, method: str, call: Call) -> None:
        """Raises the 403 for who may not."""
        if call.user.name not in self._users:
            return
        asked = _request(method, call)
        if self._allows(call.user, asked):
            self.requests.add(replace(asked, name=""))
            return
        self.requests.add(replace(asked, allowed=False))
        raise not_permitted(asked.user, asked.verb, asked.group, asked.resource, asked.namespace, asked.name)

    def may(self, user: User, wanted: Mapping[str, str]) -> bool:
        """wanted: the resourceAttributes of a SelfSubjectAccessReview."""
        get = wanted.get
        resource = "/".join(filter(None, (get("resource", ""), get("subresource", ""))))
        verb, group, namespace, name = (get(key, "") for key in ("verb", "group", "namespace", "name"))
        return user.name not in self._users or self._allows(
            user, Request(user.name, verb, group, resource, namespace, name)
        )

    def _allows(self, user: User, asked: Request) -> bool:
        rows = (self._storage.collection(name) for name in (_BINDINGS, _CLUSTER_BINDINGS, _ROLES, _CLUSTER_ROLES))
        version = tuple(row.history[-1].rv if row.history else 0 for row in rows)
        if version != self._version:
            self._version, self._grants = version, {}
        if user not in self._grants:
            self._grants[user] = tuple(self._granted(user))
        return any(grant.allows(asked) for grant in self._grants[user])

    def _granted(self, user: User) -> Iterator[_Grant]:
        for collection in (_BINDINGS, _CLUSTER_BINDINGS):
            for (namespace, _), item in sorted(self._storage.collection(collection).items.items()):
                if any(_is(user, subject, namespace) for subject in item.obj.get("subjects") or ()):
                    role = item.obj["roleRef"]
                    of = (_ROLES, namespace) if role["kind"] == "Role" else (_CLUSTER_ROLES, "")
                    found = self._storage.get(*of, role["name"])
                    yield _Grant(namespace, tuple(found.obj.get("rules") or ()) if found else ())


def _is(user: User, subject: Object, namespace: str) -> bool:
    if subject["kind"] == "ServiceAccount":
        account = f"system:serviceaccount:{subject.get('namespace') or namespace}:{subject['name']}"
        return user.name == account
    if subject["kind"] == "Group":
        return subject["name"] in (*user.groups, "system:authenticated")
    return bool(subject["name"] == user.name)


def _request(method: str, call: Call) -> Request:
    """As the API server reads it (apiserver/pkg/endpoints/request/requestinfo.go)."""
    path, name = call.path, call.path.name
    if method == "DELETE":
        verb = "delete" if name else "deletecollection"
    elif method in ("GET", "HEAD"):
        verb = "get" if name else "watch" if call.flag("watch") else "list"
    else:
        verb = _VERBS.get(method, method.lower())
    if not name and verb in ("list", "watch"):
        name = _selected(call.query.get("fieldSelector", ""))
    legacy = path.subresource == "bindings"
    resource = "bindings" if legacy else "/".join(filter(None, (path.kind.plural, path.subresource)))
    return Request(call.user.name, verb, path.kind.group, resource, path.namespace, name)


def _selected(selector: str) -> str:
    """The name that a field selector holds its objects to: roles see it as theirs."""
    for part in selector.split(","):
        key, _, value = part.replace("==", "=").partition("=")
        if key.strip() == "metadata.name":
            return value.strip()
    return ""
