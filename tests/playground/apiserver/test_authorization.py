"""RBAC for restricted users, with the real API server's messages, and the record of what they ask for."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from playground.apiserver import Request, User
from tests.playground.apiserver.api import Api, Reply, binding, pod
from tests.playground.apiserver.conftest import served
from tests.waiting import until

NAME = "system:serviceaccount:ns:worker"
TOKENS = {"admin": User("kubernetes-admin"), "worker": User(NAME, ("system:serviceaccounts",))}
RBAC = "/apis/rbac.authorization.k8s.io/v1"
NS = "/api/v1/namespaces/ns"


@dataclass(frozen=True)
class Server:
    """`admin` may do everything, `worker` what roles allow; `asked` returns what `worker` has asked for."""

    admin: Api
    worker: Api
    asked: Callable[[], frozenset[Request]]

    def give(self, kind: str, name: str, *rules: Any) -> str:
        """Bind a new role to the worker, a `Role` in the namespace ns or a `ClusterRole`. Return the binding's path."""
        where = f"{RBAC}/namespaces/ns" if kind == "Role" else RBAC
        plural, meta = kind.lower(), {"name": name}
        self.admin.ok("POST", f"{where}/{plural}s", {"metadata": meta, "rules": list(rules)})
        return self.bind(where, kind, name)

    def bind(self, where: str, kind: str, name: str) -> str:
        plural = "clusterrolebindings" if where == RBAC else "rolebindings"
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name}
        subjects = [{"kind": "ServiceAccount", "name": "worker", "namespace": "ns"}]
        made = {"metadata": {"name": name}, "roleRef": role, "subjects": subjects}
        self.admin.ok("POST", f"{where}/{plural}", made)
        return f"{where}/{plural}/{name}"

    def allowed(self, method: str, path: str, body: Any = None) -> Reply:
        """Repeat the request until it is allowed; a real API server's authorizer reads new roles from a cache."""
        return until(lambda: r if (r := self.worker.call(method, path, body)).code != 403 else None)

    def refused(self, method: str, path: str, body: Any = None) -> str:
        reply = self.worker.call(method, path, body)
        assert (reply.code, reply.reason) == (403, "Forbidden")
        return reply.message


@pytest.fixture(scope="module", params=["playground", "real"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An API server for the module; each test gives rights for another resource."""
    real = request.param == "real"
    folder = tmp_path_factory.mktemp(request.param)
    with served(folder, TOKENS, [NAME], real=real) as (url, ca, asked):
        admin, worker = (Api(url, str(ca), token, folder, real=real) for token in TOKENS)
        admin.ok("POST", "/api/v1/namespaces", {"metadata": {"name": "ns"}})
        yield Server(admin, worker, asked)
        admin.close()
        worker.close()


def rule(verbs: str, resources: str, group: str = "", names: str = "") -> dict[str, Any]:
    made: dict[str, Any] = {"apiGroups": [group], "resources": resources.split(), "verbs": verbs.split()}
    return made | ({"resourceNames": names.split()} if names else {})


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("GET", "/api/v1/secrets", 'secrets is forbidden: User "{}" cannot list resource "secrets" in API group "" at '
         "the cluster scope"),
        ("GET", f"{NS}/secrets/s", 'secrets "s" is forbidden: User "{}" cannot get resource "secrets" in API group "" '
         'in the namespace "ns"'),
        ("GET", f"{NS}/secrets?fieldSelector=metadata.name%3Ds", 'secrets "s" is forbidden: User "{}" cannot list '
         'resource "secrets" in API group "" in the namespace "ns"'),
        ("DELETE", f"{NS}/secrets?fieldSelector=metadata.name%3Ds", 'secrets is forbidden: User "{}" cannot '
         'deletecollection resource "secrets" in API group "" in the namespace "ns"'),
        ("PATCH", "/api/v1/nodes/n/status", 'nodes "n" is forbidden: User "{}" cannot patch resource "nodes/status" in '
         'API group "" at the cluster scope'),
        ("PUT", "/apis/coordination.k8s.io/v1/namespaces/ns/leases/l", 'leases.coordination.k8s.io "l" is forbidden: '
         'User "{}" cannot update resource "leases" in API group "coordination.k8s.io" in the namespace "ns"'),
        ("POST", f"{NS}/bindings", 'bindings is forbidden: User "{}" cannot create resource "bindings" in API group "" '
         'in the namespace "ns"'),
    ],
)  # fmt: skip
def test_restricted_user_without_right_gets_the_real_message(
    server: Server, method: str, path: str, words: str
) -> None:
    body: Any = None if method in ("GET", "DELETE") else {"metadata": {}}
    assert server.refused(method, path, body) == words.format(NAME)


def test_role_holds_in_its_namespace_and_for_its_resource_names(server: Server) -> None:
    server.give("Role", "maps", rule("get list watch", "configmaps", names="mine"), rule("create", "configmaps"))
    assert server.allowed("POST", f"{NS}/configmaps", {"metadata": {"name": "mine"}}).code == 201
    for path in ("configmaps/mine", "configmaps?fieldSelector=metadata.name%3Dmine"):
        server.worker.ok("GET", f"{NS}/{path}")
    assert server.worker.watch(f"{NS}/configmaps?fieldSelector=metadata.name%3Dmine", "", 1)
    for path in ("configmaps", "configmaps/other", "configmaps?fieldSelector=metadata.name%3Dother"):
        server.refused("GET", f"{NS}/{path}")
    server.refused("GET", "/api/v1/namespaces/default/configmaps/mine")
    server.refused("DELETE", f"{NS}/configmaps/mine")


def test_rule_for_a_resource_does_not_cover_its_subresource(server: Server) -> None:
    server.give("ClusterRole", "pods", rule("create", "pods pods/binding"), rule("patch", "pods/status"))
    assert server.allowed("POST", f"{NS}/pods", pod()).code == 201
    assert server.allowed("POST", f"{NS}/pods/p/binding", binding()).code == 201
    phase = server.worker.patch(f"{NS}/pods/p/status", {"status": {"message": "m"}})
    assert phase.code == 200
    assert server.worker.patch(f"{NS}/pods/p", {"metadata": {"labels": {"a": "b"}}}).code == 403
    assert 'cannot create resource "pods/eviction"' in server.refused("POST", f"{NS}/pods/p/eviction", {})


def test_cluster_role_bound_in_a_namespace_holds_there(server: Server) -> None:
    rules = [rule("get list", "serviceaccounts")]
    server.admin.ok("POST", f"{RBAC}/clusterroles", {"metadata": {"name": "accounts"}, "rules": rules})
    bound = server.bind(f"{RBAC}/namespaces/ns", "ClusterRole", "accounts")
    server.allowed("GET", f"{NS}/serviceaccounts")
    server.refused("GET", "/api/v1/serviceaccounts")
    server.admin.ok("DELETE", bound)
    until(lambda: server.worker.call("GET", f"{NS}/serviceaccounts").code == 403)


def test_requests_of_restricted_users_are_recorded(server: Server) -> None:
    server.give("Role", "quotas", rule("list watch", "resourcequotas"))
    server.allowed("GET", f"{NS}/resourcequotas")
    server.worker.watch(f"{NS}/resourcequotas", "", 1, seconds=1)
    server.refused("GET", f"{NS}/resourcequotas/q")
    wanted = {
        Request(NAME, "list", "", "resourcequotas", "ns"),
        Request(NAME, "watch", "", "resourcequotas", "ns"),
        Request(NAME, "get", "", "resourcequotas", "ns", "q", allowed=False),
    }
    until(lambda: wanted <= server.asked())
    assert {request.user for request in server.asked()} == {NAME}


def test_self_subject_access_review_answers_every_user(server: Server) -> None:
    server.give("Role", "limits", rule("list", "limitranges"))
    server.allowed("GET", f"{NS}/limitranges")
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"

    def may(api: Api, verb: str) -> bool:
        asked = {"verb": verb, "resource": "limitranges", "namespace": "ns"}
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        made = api.ok("POST", path, {**review, "spec": {"resourceAttributes": asked}})
        return bool(made["status"]["allowed"])

    assert [may(server.worker, verb) for verb in ("list", "delete")] == [True, False]
    assert may(server.admin, "delete")
