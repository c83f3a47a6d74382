"""Who may bind GPU pods (docs/design/koordinator.md, "Upgrade webhook")."""

import json
from typing import Any

import orjson
import pytest

from mgpu.serving.review import Reply, parse_review
from mgpu.settings import load_settings
from scheduler.api.binding_webhook import BindingAdmission
from tests import builders as b
from tests.scheduler.fake import FakeApi, Replica, clients, cluster, review

OURS = "system:serviceaccount:kube-system:koord-scheduler"


@pytest.fixture
def api() -> FakeApi:
    api = cluster(("n1", 2))
    api.put("pods", b.share("p"))
    return api


def request(api: FakeApi, user: str, *groups: str, users: tuple[str, ...] = (OURS,), **more: Any) -> Reply:
    replica = Replica(api)
    body = review({"metadata": {"name": "p"}, "target": {"name": "n1"}}, **{"name": "p", **more})
    body["request"]["userInfo"] = {"username": user, "groups": list(groups)}
    reply = BindingAdmission(replica.decider, lambda: None, users)(parse_review(json.dumps(body).encode()))
    if not reply.allowed:
        assert replica.state.holdings() == ()
    return reply


def message(reply: Reply) -> str:
    status = reply.body["response"]["status"]
    assert status["code"] == 403
    return str(status["message"])


@pytest.mark.parametrize("resource", [{}, {"resource": "bindings", "name": ""}], ids=["pods/binding", "bindings"])
@pytest.mark.parametrize("dry_run", [False, True])
def test_binding_by_other_user_is_denied(api: FakeApi, resource: Any, *, dry_run: bool) -> None:
    told = message(request(api, "system:kube-scheduler", "system:authenticated", dry_run=dry_run, **resource))
    assert "system:kube-scheduler" in told
    assert "scheduler.bindingUsers" in told


@pytest.mark.parametrize(
    ("user", "groups", "users"),
    [
        (OURS, (), (OURS,)),
        ("anybody", ("schedulers",), ("other", "schedulers")),
        ("anybody", (), ()),
    ],
    ids=["a user that is named", "a member of a group that is named", "nobody is named: anybody"],
)
def test_binding_by_configured_user_or_group_is_allowed(
    api: FakeApi, user: str, groups: tuple[str, ...], users: tuple[str, ...]
) -> None:
    assert "patch" in request(api, user, *groups, users=users).body["response"]


def test_binding_by_unnamed_user_is_denied(api: FakeApi) -> None:
    assert "an unnamed user" in message(request(api, ""))


def test_binding_of_malformed_pod_by_other_user_is_denied(api: FakeApi) -> None:
    api.put("pods", b.share("p", 150))
    assert "may not bind" in message(request(api, "someone"))


@pytest.mark.parametrize(
    "raw",
    [b.pod("p", b.container("c")), b.share("p", node="n1")],
    ids=["no GPU pod", "bound already: the API server refuses it"],
)
def test_binding_of_other_pods_by_any_user_is_allowed(api: FakeApi, raw: dict[str, Any]) -> None:
    api.put("pods", raw)
    assert request(api, "someone").allowed


def test_setting_binding_users_is_applied(api: FakeApi) -> None:
    settings = load_settings("scheduler: {bindingUsers: [koord]}")
    replica = Replica(api, settings=settings)
    body = review({"metadata": {"name": "p"}, "target": {"name": "n1"}}, name="p")
    reply = clients(replica)[0].post("/bind-admission", json=body)
    assert orjson.loads(reply.data)["response"]["allowed"] is False


@pytest.mark.parametrize(("lease", "allowed"), [("mgpu-kube-scheduler", True), ("", False)], ids=["beside", "none"])
def test_former_account_of_mgpu_allows_its_kube_scheduler(api: FakeApi, lease: str, allowed: bool) -> None:
    """Both had one account before; a takeover that names it must not refuse every GPU pod after an upgrade."""
    users = '["system:serviceaccount:mgpu-system:mgpu-scheduler"]'
    settings = load_settings(f"scheduler: {{bindingUsers: {users}, kubeSchedulerLease: '{lease}'}}")
    body = review({"metadata": {"name": "p"}, "target": {"name": "n1"}}, name="p")
    body["request"]["userInfo"] = {"username": "system:serviceaccount:mgpu-system:mgpu-kube-scheduler"}
    reply = clients(Replica(api, settings=settings))[0].post("/bind-admission", json=body)
    assert orjson.loads(reply.data)["response"]["allowed"] is allowed
