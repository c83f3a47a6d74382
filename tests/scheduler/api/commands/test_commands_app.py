"""The endpoints of the commands answer only whom the API server has given a token, and say how old their data is."""

import gzip
from typing import Any

import pytest
from flask.testing import FlaskClient

from mgpu.kube import ApiError, Unreachable
from mgpu.model.errors import RetryLater
from mgpu.model.gangs import GANG, GANG_SIZE
from mgpu.presentation.answers import (
    AUDIENCE,
    CLUSTER_PATH,
    EXPLANATION_PATH,
    MOST_NODES,
    TOKEN_HEADER,
    USE_PATH,
    VERSION_HEADER,
    decode_cluster,
    decode_explanation,
    decode_use,
)
from mgpu.serving.app import new_app
from mgpu.serving.review import BadRequest
from mgpu.version import own_version
from scheduler.api.commands.commands_app import serve_commands
from scheduler.api.commands.readers import Readers
from scheduler.engine import FULL, SHORT, Limits
from scheduler.engine.node_assessment import assess
from tests import builders as b
from tests.clock import Clock
from tests.scheduler.fake import Replica, cluster

USER = "system:serviceaccount:mgpu-system:mgpu-inspect"
GOOD = {"authenticated": True, "user": {"username": USER}, "audiences": [AUDIENCE]}
TOKEN = {TOKEN_HEADER: "good"}


class Reviews:
    """The API server's reviews. status: what it answers, or the error that it raises."""

    def __init__(self, status: Any = None) -> None:
        self.status: Any = GOOD if status is None else status
        self.asked: list[str] = []

    def create(self, path: str, body: Any) -> dict[str, Any]:
        assert path == "/apis/authentication.k8s.io/v1/tokenreviews"
        assert body["spec"]["audiences"] == [AUDIENCE]
        self.asked.append(body["spec"]["token"])
        if isinstance(self.status, Exception):
            raise self.status
        return {"status": self.status if body["spec"]["token"] == "good" else {"error": "invalid bearer token"}}


@pytest.fixture
def replica() -> Replica:
    found = Replica(cluster(("n1", 2), ("n2", 1)))
    found.api.put("pods", b.share("p"))
    found.deliver()
    return found


@pytest.fixture
def client(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> FlaskClient:
    return client_of(replica, Reviews(), monkeypatch)


def client_of(replica: Replica, reviews: Reviews, monkeypatch: pytest.MonkeyPatch) -> FlaskClient:
    monkeypatch.setattr(replica.api, "create", reviews.create)
    app = new_app()
    process: Any = replica
    serve_commands(app, process, Clock())
    return app.test_client()


@pytest.mark.parametrize(
    "path", [CLUSTER_PATH, f"{EXPLANATION_PATH}?kind=Pod&namespace=default&name=p", f"{USE_PATH}?node=n1"]
)
def test_without_a_valid_token_nothing_is_answered(client: FlaskClient, path: str) -> None:
    assert client.get(path).status_code == 401
    refused = client.get(path, headers={TOKEN_HEADER: "stolen"})
    assert (refused.status_code, list(refused.get_json())) == (403, ["error"])
    assert client.get(path, headers=TOKEN).status_code == 200


def test_what_is_used_is_answered_for_some_nodes(client: FlaskClient) -> None:
    found = decode_use(gzip.decompress(client.get(f"{USE_PATH}?node=n1,n1,nobody", headers=TOKEN).data))
    assert found.unknown == dict.fromkeys(["n1", "nobody"], "there is no Pod of an agent")
    many = ",".join(f"n{i}" for i in range(MOST_NODES + 1))
    assert client.get(f"{USE_PATH}?node={many}", headers=TOKEN).status_code == 400


@pytest.mark.parametrize(
    "status",
    [
        GOOD | {"authenticated": False},
        GOOD | {"user": {"username": "system:serviceaccount:team-a:mgpu-inspect"}},
        GOOD | {"user": {}},
        GOOD | {"audiences": ["https://kubernetes.default.svc"]},
        {key: value for key, value in GOOD.items() if key != "audiences"},
        {},
    ],
)
def test_only_a_token_of_the_service_account_for_this_audience_is_accepted(status: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as refused:
        Readers(Reviews(status), "mgpu-system").check("good")
    assert refused.value.status == 403


@pytest.mark.parametrize("error", [ApiError(403, "Forbidden", "no right"), Unreachable("no answer")])
def test_a_token_that_is_not_reviewed_is_not_accepted(error: Exception) -> None:
    with pytest.raises(RetryLater):
        Readers(Reviews(error), "mgpu-system").check("good")


def test_an_accepted_token_is_reviewed_once_a_minute() -> None:
    reviews, clock = Reviews(), Clock()
    readers = Readers(reviews, "mgpu-system", clock)
    for _ in range(3):
        readers.check("good")
    assert len(reviews.asked) == 1
    clock.now += 60
    readers.check("good")
    assert len(reviews.asked) == 2


def test_a_long_token_is_refused_without_a_review() -> None:
    reviews = Reviews()
    with pytest.raises(BadRequest):
        Readers(reviews, "mgpu-system").check("x" * 9000)
    assert reviews.asked == []


def test_many_accepted_tokens_are_forgotten_rather_than_kept() -> None:
    class Accepting(Reviews):
        def create(self, path: str, body: Any) -> dict[str, Any]:
            super().create(path, body)
            return {"status": GOOD}

    readers = Readers(Accepting(), "mgpu-system", Clock())
    for i in range(600):
        readers.check(str(i))
    assert len(readers._accepted) <= 256


@pytest.mark.parametrize("accepted", ["gzip", "identity", ""])
def test_the_cluster_is_always_packed_and_says_its_version_and_age(client: FlaskClient, accepted: str) -> None:
    reply = client.get(CLUSTER_PATH, headers={**TOKEN, "Accept-Encoding": accepted})
    assert reply.content_encoding == "gzip"
    answer = decode_cluster(gunzip(reply.data))
    assert [node.name for node in answer.overview.nodes] == ["n1", "n2"]
    assert answer.overview.pending == ("default/p",)
    assert (reply.headers[VERSION_HEADER], reply.headers["Age"]) == (own_version(), "0")
    assert reply.headers["Cache-Control"] == "no-store"


def test_an_unchanged_cluster_is_not_sent_again(client: FlaskClient) -> None:
    tag = client.get(CLUSTER_PATH, headers=TOKEN).headers["ETag"]
    again = client.get(CLUSTER_PATH, headers={**TOKEN, "If-None-Match": tag})
    assert (again.status_code, again.data) == (304, b"")
    assert again.headers[VERSION_HEADER] == own_version()


def test_a_replica_that_does_not_lead_answers_and_says_so(replica: Replica, client: FlaskClient) -> None:
    replica.leading = False
    assert decode_cluster(gunzip(client.get(CLUSTER_PATH, headers=TOKEN).data)).replica != ""


def test_an_incomplete_cache_is_not_shown(
    replica: Replica, client: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise RetryLater("not in sync yet: pods")

    monkeypatch.setattr(replica, "may_answer", refuse)
    assert client.get(CLUSTER_PATH, headers=TOKEN).status_code == 503


def test_a_pod_is_explained_with_the_reservations_of_others(replica: Replica, client: FlaskClient) -> None:
    replica.api.put("pods", b.pod("whole", b.container("c", 100)))
    replica.deliver()
    holder = replica.state.gpu_pod("uid-p")
    assert holder is not None
    replica.decider.decide(holder, "n2")
    query = {"kind": "Pod", "namespace": "default", "name": "whole"}
    found = decode_explanation(gunzip(client.get(EXPLANATION_PATH, query_string=query, headers=TOKEN).data)).explanation
    assert [(row.name, row.reason is None) for row in found.nodes] == [("n1", True), ("n2", False)]
    assert found.cards["n2"][0].holders == ("default/p",)
    only = client.get(EXPLANATION_PATH, query_string=query | {"node": "n2"}, headers=TOKEN)
    assert [row.name for row in decode_explanation(gunzip(only.data)).explanation.nodes] == ["n2"]


def gunzip(data: bytes) -> bytes:
    return gzip.decompress(data)


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ({}, 400),
        ({"kind": "Secret", "namespace": "default", "name": "p"}, 400),
        ({"kind": "Pod", "namespace": "default", "name": "none"}, 404),
        ({"kind": "Pod", "namespace": "default", "name": "p", "node": "n9"}, 404),
        ({"kind": "Pod", "namespace": "default", "name": "p", "node": ",".join(map(str, range(51)))}, 400),
    ],
)
def test_a_question_that_cannot_be_answered_is_refused(client: FlaskClient, query: dict[str, str], status: int) -> None:
    assert client.get(EXPLANATION_PATH, query_string=query, headers=TOKEN).status_code == status


@pytest.mark.parametrize("name", [".", "..", "a/b", "a%2fb", "P", "-p", "p.", "p\n", "x" * 254])
@pytest.mark.parametrize("parameter", ["namespace", "name"])
def test_a_name_that_could_lead_to_another_path_is_refused_before_the_api_server_is_asked(
    replica: Replica, client: FlaskClient, monkeypatch: pytest.MonkeyPatch, parameter: str, name: str
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(replica.api, "get", asked.append)
    for kind in ("Pod", "MtgpuPod"):
        query = {"kind": kind, "namespace": "default", "name": "p"} | {parameter: name}
        refused = client.get(EXPLANATION_PATH, query_string=query, headers=TOKEN)
        assert refused.status_code == 400
        assert refused.get_json()["error"].startswith(f"{parameter} must be")
    assert asked == []


def test_a_namespace_has_no_dots(client: FlaskClient) -> None:
    query = {"kind": "Pod", "namespace": "team.a", "name": "p.1"}
    refused = client.get(EXPLANATION_PATH, query_string=query, headers=TOKEN)
    assert (refused.status_code, refused.get_json()["error"][:9]) == (400, "namespace")


def test_an_object_that_the_api_server_does_not_return_is_asked_for_later(
    replica: Replica, client: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: str) -> None:
        raise Unreachable("no answer")

    monkeypatch.setattr(replica.api, "get", fail)
    query = {"kind": "Pod", "namespace": "default", "name": "p"}
    assert client.get(EXPLANATION_PATH, query_string=query, headers=TOKEN).status_code == 503


def test_a_fault_of_the_explanation_is_not_taken_for_a_pod_that_is_not_cached(
    client: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("a fault")

    monkeypatch.setattr("scheduler.decisions.explanation.Explainer.object", fail)
    query = {"kind": "Pod", "namespace": "default", "name": "p"}
    assert client.get(EXPLANATION_PATH, query_string=query, headers=TOKEN).status_code == 500


def test_a_pod_that_the_cache_does_not_have_yet_is_asked_for_later(replica: Replica, client: FlaskClient) -> None:
    replica.api.put("pods", b.share("new"))
    query = {"kind": "Pod", "namespace": "default", "name": "new"}
    assert client.get(EXPLANATION_PATH, query_string=query, headers=TOKEN).status_code == 503


@pytest.mark.parametrize("path", [CLUSTER_PATH, EXPLANATION_PATH])
@pytest.mark.parametrize("method", ["post", "put", "delete", "patch"])
def test_the_endpoints_are_read_only(client: FlaskClient, path: str, method: str) -> None:
    assert client.open(path, method=method.upper(), headers=TOKEN).status_code == 405


def test_more_requests_than_threads_may_wait_are_refused(
    replica: Replica, client: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waiting request asks again, as 17 callers at the same time do."""
    depth = 0
    statuses: list[int] = []

    def again() -> None:
        nonlocal depth
        depth += 1
        if depth < 20:
            statuses.append(client.get(CLUSTER_PATH, headers=TOKEN).status_code)

    monkeypatch.setattr(replica, "may_answer", again)
    assert client.get(CLUSTER_PATH, headers=TOKEN).status_code == 200
    assert (depth, statuses.count(503), statuses.count(200)) == (16, 1, 15)


def test_an_answer_occupies_its_place_until_it_is_sent(client: FlaskClient) -> None:
    """A reader that reads slowly occupies a thread that the admission of bindings may need."""
    unread = [client.get(CLUSTER_PATH, headers=TOKEN, buffered=False) for _ in range(16)]
    assert [reply.status_code for reply in unread] == [200] * 16
    assert client.get(CLUSTER_PATH, headers=TOKEN).status_code == 503
    for reply in unread:
        reply.close()
        reply.close()
    again = [client.get(CLUSTER_PATH, headers=TOKEN) for _ in range(17)]
    assert [reply.status_code for reply in again] == [200] * 16 + [503]


def test_searches_for_an_explanation_are_short_and_make_pauses(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[Limits] = []
    pauses: list[float] = []

    def search(*arguments: Any, **options: Any) -> Any:
        limits.append(options.get("limits", FULL))
        return assess(*arguments, **options)

    monkeypatch.setattr("scheduler.decisions.explanation.assess", search)
    monkeypatch.setattr("scheduler.decisions.gang_outlook.assess", search)
    monkeypatch.setattr(
        "scheduler.api.commands.commands_app.Pace", lambda pause_ratio: lambda: pauses.append(pause_ratio)
    )
    client = client_of(replica, Reviews(), monkeypatch)
    raw = b.share("member")
    raw["metadata"]["labels"] = {GANG: "g", GANG_SIZE: "2"}
    replica.api.put("pods", raw)
    replica.deliver()
    query = {"kind": "Pod", "namespace": "default", "name": "member", "node": "n1,n2"}
    assert client.get(EXPLANATION_PATH, query_string=query, headers=TOKEN).status_code == 200
    assert len(limits) >= 2
    assert all(one.search <= SHORT.search for one in limits)
    assert len(pauses) >= len(limits)
