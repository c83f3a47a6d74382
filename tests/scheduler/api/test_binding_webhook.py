"""The admission of Bindings decides the cards, and denies bindings by other users."""

import base64
import json
from typing import Any

import jsonpatch
import orjson
import pytest
from werkzeug.test import Client

from mgpu.serving.review import Reply, parse_review
from mgpu.settings import load_settings
from scheduler.api.binding_webhook import BindingAdmission
from tests import builders as b
from tests.scheduler.fake import FakeApi, Replica, admitted, clients, cluster, review

INDEX = "vke.volcengine.com/gpu-index-container-c"
ASSUMED = "vke.volcengine.com/assumed"


@pytest.fixture
def replica() -> Replica:
    return Replica(cluster(("n1", 2)))


@pytest.fixture
def client(replica: Replica) -> Client:
    return clients(replica)[0]


def submit(replica: Replica, *pods: dict[str, Any]) -> None:
    for raw in pods:
        replica.api.put("pods", raw)
    replica.deliver()


def binding(name: str = "p", node: str = "n1", kind: str = "Node", **meta: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, **meta}, "target": {"kind": kind, "name": node}}


def answer(client: Client, body: dict[str, Any], **more: Any) -> dict[str, Any]:
    reply = client.post("/bind-admission", json=review(body, **more))
    assert reply.status_code == 200
    response = orjson.loads(reply.data)["response"]
    assert isinstance(response, dict)
    return response


def patched(client: Client, body: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The Binding as the API server has it after the admission."""
    response = answer(client, body, **more)
    assert response["allowed"], response
    result = jsonpatch.apply_patch(body, base64.b64decode(response["patch"])) if "patch" in response else body
    assert isinstance(result, dict)
    return result


@pytest.mark.parametrize("meta", [{}, {"annotations": {}}, {"annotations": {"mine": "kept"}}])
def test_binding_gets_cards_and_uid(replica: Replica, client: Client, meta: dict[str, Any]) -> None:
    submit(replica, b.share())
    result = patched(client, binding(**meta), name="p")["metadata"]
    assert result["annotations"] == {ASSUMED: "true", INDEX: "0", **meta.get("annotations", {})}
    assert result["uid"] == "uid-p"


def test_repeated_binding_gets_the_same_answer(replica: Replica, client: Client) -> None:
    submit(replica, b.share("p", 60), b.share("q", 60))
    first = patched(client, binding(), name="p")
    patched(client, binding("q"), name="q")
    assert patched(client, binding(), name="p") == first
    assert patched(client, first, name="p") == first  # reinvocation


def test_placement_annotations_of_the_binding_are_replaced(replica: Replica, client: Client) -> None:
    """Volcano copies all of a pod's annotations into its Binding."""
    submit(replica, b.share())
    stale = {INDEX: "7", INDEX + "-gone": "3", "other/annotation": "x"}
    result = patched(client, binding(annotations=stale), name="p")["metadata"]["annotations"]
    assert result == {ASSUMED: "true", INDEX: "0", "other/annotation": "x"}


def test_binding_without_metadata_gets_metadata(replica: Replica, client: Client) -> None:
    submit(replica, b.share())
    result = patched(client, {"target": {"name": "n1"}}, name="p")
    assert result["metadata"] == {"uid": "uid-p", "annotations": {ASSUMED: "true", INDEX: "0"}}


@pytest.mark.parametrize(
    "raw",
    [b.pod("p", b.container("c")), b.share("p", node="n1", annotations={ASSUMED: "true", INDEX: "1"})],
    ids=["no GPU pod", "bound already: the API server refuses it"],
)
def test_binding_of_other_or_bound_pod_is_allowed_unchanged(
    replica: Replica, client: Client, raw: dict[str, Any]
) -> None:
    submit(replica, raw)
    before = replica.state.holdings()
    assert "patch" not in answer(client, binding(), name="p")
    assert replica.state.holdings() == before


@pytest.mark.parametrize("body", [binding(kind="Machine"), binding("gone"), binding(uid="other")])
def test_binding_that_the_api_server_rejects_is_allowed(replica: Replica, client: Client, body: dict[str, Any]) -> None:
    submit(replica, b.share())
    assert "patch" not in answer(client, body, name=body["metadata"]["name"])
    assert replica.state.holdings() == ()


def test_pod_missing_in_the_cache_is_read_from_the_api(replica: Replica, client: Client) -> None:
    replica.api.put("pods", b.share())
    assert patched(client, binding(), name="p")["metadata"]["uid"] == "uid-p"


def test_recreated_pod_gets_its_own_decision(replica: Replica, client: Client) -> None:
    submit(replica, b.share("p", 30))
    patched(client, binding(uid="uid-p"), name="p")
    replica.api.put("pods", b.share("p", 60, uid="second"))
    patched(client, binding(uid="second"), name="p")
    assert {h.uid: h.shares[0].core for h in replica.state.holdings()} == {"uid-p": 300, "second": 600}


def test_bindings_resource_reads_the_pod_from_the_api(replica: Replica, client: Client) -> None:
    """`POST bindings` ignores the UID in the Binding, so a stale UID would put the record on another pod."""
    submit(replica, b.share("p", 30))
    replica.api.put("pods", b.share("p", 60, uid="second"))
    assert patched(client, binding(), resource="bindings")["metadata"]["uid"] == "second"


def test_binding_without_fitting_card_is_denied(replica: Replica, client: Client) -> None:
    submit(replica, *(b.share(name, 60) for name in "pqr"))
    for name in "pq":
        patched(client, binding(name), name=name)
    status = answer(client, binding("r"), name="r")["status"]
    assert status["code"] == 409
    assert "2 cards: 2 core 20 percent short" in status["message"]
    assert "retryAfterSeconds" not in orjson.dumps(status).decode()


def test_binding_of_malformed_pod_is_denied_with_all_problems(replica: Replica, client: Client) -> None:
    submit(replica, b.pod("p", b.container("a", 150, 1024), b.container("b", 50, 1)))
    status = answer(client, binding(), name="p")["status"]
    assert status["code"] == 409
    assert len(status["details"]["causes"]) == 2


def test_dry_run_for_missing_pod_is_denied(replica: Replica, client: Client) -> None:
    """`mgpu doctor` finds out by the denial that bindings reach the webhook."""
    found = answer(client, binding("none"), name="none", dry_run=True)
    assert (found["allowed"], found["status"]["code"]) == (False, 404)
    assert answer(client, binding("none"), name="none")["allowed"]
    submit(replica, b.pod("plain", {"name": "c", "image": "x"}))
    assert answer(client, binding("plain"), name="plain", dry_run=True)["allowed"]


def test_dry_run_reserves_nothing(replica: Replica, client: Client) -> None:
    submit(replica, b.share())
    assert INDEX in patched(client, binding(), name="p", dry_run=True)["metadata"]["annotations"]
    assert replica.state.holdings() == ()


@pytest.mark.parametrize("why", ["not leading", "API unreachable"])
def test_replica_that_cannot_decide_answers_503_and_closes_the_connection(
    replica: Replica, client: Client, why: str
) -> None:
    if why == "not leading":
        replica.leading = False
    else:
        replica.api.reachable = False  # and the pod is not in the cache
    reply = client.post("/bind-admission", json=review(binding(), name="p"))
    assert (reply.status_code, reply.headers["Connection"]) == (503, "close")


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b"null",
        orjson.dumps({"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1"}),
        orjson.dumps(review({"metadata": "x", "target": {"name": "n1"}}, name="p")),
        orjson.dumps(review({"metadata": {"name": ["p"]}, "target": {"name": "n1"}})),
        orjson.dumps(review({"metadata": {}, "target": [1]}, name="p")),
    ],
)
def test_malformed_body_is_a_bad_request(client: Client, body: bytes) -> None:
    reply = client.post("/bind-admission", data=body, content_type="application/json")
    assert reply.status_code == 400
    assert "Traceback" not in reply.text


def test_extender_is_not_served_beside_the_webhook(client: Client) -> None:
    assert client.post("/bind", json={}).status_code == 404


def test_node_and_record_are_written_together(replica: Replica) -> None:
    replica.api.admit = admitted(replica)
    submit(replica, b.share())
    replica.api.bind("p", "n1")
    assert replica.api.pod("p")["spec"]["nodeName"] == "n1"
    assert replica.api.annotations("p")[INDEX] == "0"
    replica.deliver()
    assert [h.bound for h in replica.state.holdings()] == [True]


OURS = "system:serviceaccount:kube-system:koord-scheduler"


@pytest.fixture
def api(replica: Replica) -> FakeApi:
    replica.api.put("pods", b.share("p"))
    return replica.api


def bind_as(api: FakeApi, user: str, *groups: str, users: tuple[str, ...] = (OURS,), **more: Any) -> Reply:
    replica = Replica(api)
    body = review(binding(), **{"name": "p", **more})
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
    told = message(bind_as(api, "system:kube-scheduler", "system:authenticated", dry_run=dry_run, **resource))
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
    assert "patch" in bind_as(api, user, *groups, users=users).body["response"]


def test_binding_by_unnamed_user_is_denied(api: FakeApi) -> None:
    assert "an unnamed user" in message(bind_as(api, ""))


def test_binding_of_malformed_pod_by_other_user_is_denied(api: FakeApi) -> None:
    api.put("pods", b.share("p", 150))
    assert "may not bind" in message(bind_as(api, "someone"))


@pytest.mark.parametrize(
    "raw",
    [b.pod("p", b.container("c")), b.share("p", node="n1")],
    ids=["no GPU pod", "bound already: the API server refuses it"],
)
def test_binding_of_other_pods_by_any_user_is_allowed(api: FakeApi, raw: dict[str, Any]) -> None:
    api.put("pods", raw)
    assert bind_as(api, "someone").allowed


def test_setting_binding_users_is_applied(api: FakeApi) -> None:
    settings = load_settings("scheduler: {bindingUsers: [koord]}")
    replica = Replica(api, settings=settings)
    body = review(binding(), name="p")
    reply = clients(replica)[0].post("/bind-admission", json=body)
    assert orjson.loads(reply.data)["response"]["allowed"] is False


@pytest.mark.parametrize(("lease", "allowed"), [("mgpu-kube-scheduler", True), ("", False)], ids=["beside", "none"])
def test_former_account_of_mgpu_allows_its_kube_scheduler(api: FakeApi, lease: str, allowed: bool) -> None:
    """Both processes had the same account in earlier versions, and a setting may still name it."""
    users = '["system:serviceaccount:mgpu-system:mgpu-scheduler"]'
    settings = load_settings(f"scheduler: {{bindingUsers: {users}, kubeSchedulerLease: '{lease}'}}")
    body = review(binding(), name="p")
    body["request"]["userInfo"] = {"username": "system:serviceaccount:mgpu-system:mgpu-kube-scheduler"}
    reply = clients(Replica(api, settings=settings))[0].post("/bind-admission", json=body)
    assert orjson.loads(reply.data)["response"]["allowed"] is allowed


class TestWholeCardsThroughClaims:
    """On a node with the label `mgpu.io/whole-cards=dra`, kube-scheduler makes a claim for `nvidia.com/gpu`."""

    @pytest.fixture(autouse=True)
    def _pod(self, replica: Replica) -> None:
        replica.api.put("nodes", b.node(labels={"mgpu.io/whole-cards": "dra"}))
        amounts = {"nvidia.com/gpu": "1"}
        raw = b.pod("p", {"name": "c", "resources": {"limits": amounts, "requests": dict(amounts)}})
        submit(replica, raw)

    def add_claim(self, replica: Replica) -> None:
        mapping = {"containerName": "c", "resourceName": "nvidia.com/gpu", "requestName": "container-0-request-0"}
        status = {"resourceClaimName": "p-extended-resources-x", "requestMappings": [mapping]}
        replica.api.edit_pod("p", lambda raw: raw["status"].update(extendedResourceClaimStatus=status))

    def test_pod_without_claim_is_denied(self, replica: Replica, client: Client) -> None:
        response = answer(client, binding(), name="p")
        assert not response["allowed"]
        assert "served through ResourceClaims on this node" in response["status"]["message"]
        assert replica.state.holdings() == ()

    def test_pod_is_read_from_the_api_because_the_claim_was_just_written(
        self, replica: Replica, client: Client
    ) -> None:
        self.add_claim(replica)
        response = answer(client, binding(), name="p")
        assert (response["allowed"], "patch" in response) == (True, False)
        assert replica.state.holdings() == ()

    def test_pod_with_a_claim_that_is_known_is_allowed_unchanged(self, replica: Replica, client: Client) -> None:
        self.add_claim(replica)
        replica.deliver()
        response = answer(client, binding(), name="p")
        assert (response["allowed"], "patch" in response) == (True, False)

    def test_api_server_that_does_not_answer_leads_to_a_retry(self, replica: Replica, client: Client) -> None:
        replica.api.reachable = False
        assert client.post("/bind-admission", json=review(binding(), name="p")).status_code == 503

    def test_pod_with_a_share_needs_no_claim(self, replica: Replica, client: Client) -> None:
        submit(replica, b.share("q"))
        assert patched(client, binding("q"), name="q")["metadata"]["annotations"][INDEX] == "0"

    def test_pod_gets_its_card_by_a_record_on_other_nodes(self, replica: Replica, client: Client) -> None:
        replica.api.put("nodes", b.node())
        replica.deliver()
        assert "annotations" in patched(client, binding(), name="p")["metadata"]
