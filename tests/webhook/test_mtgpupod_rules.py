"""MtgpuPods at admission, and Pods that look like the Pod of an MtgpuPod. test_mtgpu.py has the rules of a request."""

from typing import Any

import pytest
from flask.testing import FlaskClient

from mgpu.dialects import mtgpu
from mgpu.dialects.mtgpu import ANNOTATIONS, GPUID, LIMIT, MEMORY, REQUEST
from mgpu.model.errors import Problem
from mgpu.settings import load_settings
from tests.builders import card, owned, pod, share
from tests.mgpu.serving.reviews import review
from webhook.admission import make_app
from webhook.mtgpupod_rules import validate_mtgpupod_create, validate_mtgpupod_update
from webhook.pod_mutation import mutate
from webhook.pod_rules import validate_create, validate_update

SETTINGS = load_settings()
OFF = load_settings(flags={"dialects.mtgpu.enabled": "false"})
SCHEDULER = "system:serviceaccount:mgpu-system:mgpu-scheduler"
SAID = {REQUEST: "0.2", LIMIT: "1", MEMORY: "1024", GPUID: "zxcvb"}
PLACED, WISH = "vke.volcengine.com/gpu-index-container-c", "mgpu.io/card-models"
ANEW = "it cannot be changed; delete the MtgpuPod and create another"


def mtgpupod(said: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    raw = pod("p", {"name": "c", "image": "cuda"}, annotations={**SAID, **(said or {})}, node="n1")
    return {**raw, "apiVersion": mtgpu.API_VERSION, "kind": mtgpu.KIND, "spec": {**raw["spec"], **spec}}


def without(raw: dict[str, Any], key: str) -> dict[str, Any]:
    kept = {k: v for k, v in raw["metadata"]["annotations"].items() if k != key}
    return {**raw, "metadata": {**raw["metadata"], "annotations": kept}}


def created(raw: Any, settings: Any = SETTINGS) -> list[str]:
    return [problem.field for problem in validate_mtgpupod_create(raw, settings)]


def changed(old: Any, new: Any) -> list[str]:
    return [str(problem) for problem in validate_mtgpupod_update(new, old, SETTINGS)]


def path(key: str) -> str:
    return f"metadata.annotations[{key}]"


def test_valid_mtgpupod_has_no_problem() -> None:
    assert created(mtgpupod()) == []


def test_invalid_mtgpupod_has_all_problems_whatever_its_status() -> None:
    asking = {"name": "c", "resources": {"limits": {"nvidia.com/gpu": 1}}}
    raw = without(mtgpupod({REQUEST: "2", PLACED: "0", WISH: "A100"}, containers=[asking]), MEMORY)
    found = created({**raw, "status": {"BoundDeviceID": "GPU-forged"}})
    where = "spec.containers[0].resources.limits[nvidia.com/gpu]"
    assert found == [path(PLACED), path(MEMORY), path(REQUEST), path(WISH), where]


def test_mtgpupod_with_wrong_types_has_problems() -> None:
    assert created(mtgpupod(containers=[{"name": "c", "env": "x"}])) == ["spec.containers[0].env"]


def test_mtgpupod_has_no_problem_if_mtgpupods_are_disabled() -> None:
    bad = mtgpupod({REQUEST: "NaN"})
    assert created(bad, OFF) == []
    assert validate_mtgpupod_update(bad, mtgpupod(), OFF) == []


def test_pod_like_that_of_an_mtgpupod_is_denied_if_mtgpupods_are_disabled() -> None:
    """Such a Pod would hold a card: the Pods of earlier MtgpuPods still hold their cards."""
    plain, marked = pod("p", {"name": "c"}), pod("p", {"name": "c"}, annotations=SAID)
    (problem,) = validate_create(marked, OFF, "alice")
    assert (problem.field, problem.message) == (
        path(min(SAID)),
        "is for MtgpuPods, whose Pods only mgpu creates; remove it; if another controller creates these Pods, add "
        "its user to webhook.identities",
    )
    assert [p.field for p in validate_update(marked, plain, "alice", OFF)] == [path(key) for key in sorted(SAID)]
    named = load_settings(flags={"dialects.mtgpu.enabled": "false", "webhook.identities": "peer"})
    assert validate_create(marked, named, "peer") == []
    assert validate_update(marked, plain, "peer", named) == []


@pytest.mark.parametrize("settings", [SETTINGS, OFF], ids=["on", "off"])
def test_pod_with_an_mtgpupod_as_controller_is_denied(settings: Any) -> None:
    plain = pod("p", {"name": "c"})
    claiming = {**plain, "metadata": {**plain["metadata"], "ownerReferences": [owned()]}}
    assert [p.field for p in validate_create(claiming, settings, "alice")] == ["metadata.ownerReferences"]
    assert [p.field for p in validate_update(claiming, plain, "alice", settings)] == ["metadata.ownerReferences"]
    assert validate_create(claiming, settings, SCHEDULER) == []
    assert validate_update(plain, claiming, "alice", settings) == []
    assert validate_update(claiming, claiming, "alice", settings) == []


@pytest.mark.parametrize("key", ANNOTATIONS)
def test_annotations_of_the_request_of_an_mtgpupod_are_immutable(key: str) -> None:
    other = {REQUEST: "0.3", LIMIT: "0.9", MEMORY: "2048", GPUID: "qwert"}[key]
    wanted = f"{path(key)}: determines the card; {ANEW}"
    assert changed(mtgpupod(), mtgpupod({key: other})) == [wanted]
    assert wanted in changed(mtgpupod(), without(mtgpupod(), key))
    assert changed(without(mtgpupod(), key), mtgpupod()) == [wanted]


def test_amount_of_an_mtgpupod_in_another_notation_is_a_change() -> None:
    """The Pod has a copy of the text, which other programs read."""
    assert changed(mtgpupod(), mtgpupod({REQUEST: "0.20"})) != []


SPECS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "another node": ({"nodeName": "n2"}, ["nodeName"]),
    "another image": ({"containers": [{"name": "c", "image": "other"}]}, ["containers"]),
    "a field more": ({"terminationGracePeriodSeconds": 0}, ["terminationGracePeriodSeconds"]),
    "several": ({"tolerations": [], "nodeName": "n2"}, ["nodeName", "tolerations"]),
}


@pytest.mark.parametrize(("spec", "fields"), SPECS.values(), ids=SPECS)
def test_spec_of_an_mtgpupod_is_immutable(spec: dict[str, Any], fields: list[str]) -> None:
    wanted = [f"spec.{field}: determines the Pod; {ANEW}" for field in fields]
    assert changed(mtgpupod(), mtgpupod(**spec)) == wanted
    assert changed(mtgpupod(**spec), mtgpupod()) == wanted


def test_labels_finalizers_and_other_annotations_of_an_mtgpupod_may_change() -> None:
    new = mtgpupod({"team": "a", "kubectl.kubernetes.io/last-applied-configuration": "{}"})
    new["metadata"] |= {
        "labels": {"a": "b"},
        "finalizers": [mtgpu.FINALIZER],
        "deletionTimestamp": "2026-01-01T00:00:00Z",
    }
    assert changed(mtgpupod(), new) == []
    assert changed(new, mtgpupod()) == []


@pytest.mark.parametrize("key", [PLACED, WISH])
def test_invalid_annotation_of_an_mtgpupod_can_be_removed_but_not_added(key: str) -> None:
    assert [line.partition(": ")[0] for line in changed(mtgpupod(), mtgpupod({key: "1"}))] == [path(key)]
    assert changed(mtgpupod({key: "1"}), mtgpupod()) == []
    assert changed(mtgpupod({key: "1"}), mtgpupod({key: "2"})) == []


def test_finalizer_of_an_invalid_mtgpupod_can_be_removed() -> None:
    old = without(mtgpupod({REQUEST: "NaN", WISH: "A100"}, nodeName=""), MEMORY)
    old["metadata"]["finalizers"] = [mtgpu.FINALIZER]
    assert changed(old, {**old, "metadata": {**old["metadata"], "finalizers": []}}) == []


@pytest.fixture
def client() -> FlaskClient:
    return make_app(SETTINGS).test_client()


def request(client: FlaskClient, raw: Any, operation: str = "CREATE", path: str = "/validate", **over: Any) -> Any:
    kind = {"group": "lsalab.nthu", "version": "v1", "kind": "MtgpuPod"}
    resource = {"group": "lsalab.nthu", "version": "v1", "resource": "mtgpupods"}
    got: Any = client.post(path, json=review(raw, operation, kind=kind, resource=resource, **over))
    return got.json["response"]


def test_webhook_reviews_mtgpupods(client: FlaskClient) -> None:
    assert request(client, mtgpupod()) == {"uid": "review-1", "allowed": True}
    denied = request(client, mtgpupod({REQUEST: "NaN"}))
    assert (denied["allowed"], denied["status"]["code"]) == (False, 422)
    assert denied["status"]["details"]["kind"] == "MtgpuPod"
    assert (
        "must be a decimal from 0 to 1 with at most three places, such as 0.25, not 'NaN'"
        in denied["status"]["message"]
    )


def test_trusted_user_cannot_change_an_immutable_field(client: FlaskClient) -> None:
    for user in ("alice", SCHEDULER):
        denied = request(client, mtgpupod({GPUID: "qwert"}), "UPDATE", old=mtgpupod(), user=user)
        assert (denied["allowed"], denied["status"]["code"]) == (False, 422)
    assert request(client, mtgpupod({"team": "a"}), "UPDATE", old=mtgpupod())["allowed"]


def test_status_update_and_deletion_of_an_mtgpupod_are_admitted(client: FlaskClient) -> None:
    bad = mtgpupod({REQUEST: "NaN"})
    assert request(client, {**bad, "status": {"BoundDeviceID": "x"}}, "UPDATE", old=bad, subresource="status")[
        "allowed"
    ]
    assert request(client, None, "DELETE", old=bad)["allowed"]


def made(user_env: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the Pod that the controller creates for `mtgpupod()`."""
    given = mtgpu.environment(mtgpu.read_mtgpupod(mtgpupod()), card().uuid, 0)
    env = [{"name": k, "value": v} for k, v in given.items()]
    mine = {"name": "c", "env": [*({"name": name, "value": "x"} for name in user_env), *env]}
    return pod("p", mine, init=({**mine, "name": "i"},), annotations=SAID, node="n1")


def test_pod_of_an_mtgpupod_by_a_trusted_user_is_admitted_unchanged() -> None:
    assert validate_create(made(("A",)), SETTINGS, SCHEDULER) == []
    assert mutate(made(("A",)), SETTINGS).patch == ()


@pytest.mark.parametrize(
    "user", ["alice", "", "system:serviceaccount:kube-system:replicaset-controller", SCHEDULER + "x"]
)
@pytest.mark.parametrize("said", [SAID, {GPUID: "abc"}, {"lsalab.nthu/other": ""}], ids=["all", "one", "any"])
def test_pod_with_mtgpupod_annotations_is_denied(user: str, said: dict[str, str]) -> None:
    first = min(said)
    assert validate_create(pod("p", {"name": "c"}, annotations=said), SETTINGS, user) == [
        Problem(
            path(first),
            "is for MtgpuPods, whose Pods only mgpu creates; create an object of kind MtgpuPod (lsalab.nthu/v1) "
            "instead of this Pod",
        )
    ]


def test_webhook_distinguishes_trusted_users(client: FlaskClient) -> None:
    answers = [client.post("/validate", json=review(made(), user=user)).json for user in ("alice", SCHEDULER)]
    assert [answer["response"]["allowed"] for answer in answers if answer] == [False, True]


CHANGES: dict[str, tuple[dict[str, str], dict[str, str], list[str]]] = {
    "added": ({}, {GPUID: "a"}, [GPUID]),
    "changed": (SAID, {**SAID, MEMORY: "9"}, [MEMORY]),
    "removed": (SAID, {}, sorted(SAID)),
    "one removed": (SAID, {k: v for k, v in SAID.items() if k != LIMIT}, [LIMIT]),
    "unknown before": ({"lsalab.nthu/x": "1"}, {"lsalab.nthu/x": "2"}, ["lsalab.nthu/x"]),
}


@pytest.mark.parametrize(("before", "now", "keys"), CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("user", ["alice", SCHEDULER])
def test_copied_annotations_of_a_pod_are_immutable(before: Any, now: Any, keys: list[str], user: str) -> None:
    old, new = (pod("p", {"name": "c"}, annotations=said) for said in (before, now))
    found = validate_update(new, old, user, SETTINGS)
    assert [problem.field for problem in found] == [path(key) for key in keys]
    assert {problem.message for problem in found} == {
        "is copied from an MtgpuPod when its Pod is created; it cannot be added, changed or removed afterwards"
    }


def test_gpu_pod_cannot_become_the_pod_of_an_mtgpupod() -> None:
    found = validate_update(share(annotations=SAID), share(), "alice", SETTINGS)
    assert [problem.field for problem in found] == [path(key) for key in sorted(SAID)]


def test_existing_pod_with_mtgpupod_annotations_may_be_updated() -> None:
    old = pod("p", {"name": "c", "resources": {"limits": {"nvidia.com/gpu": "1"}}}, annotations=SAID, node="n1")
    meta = {**old["metadata"], "labels": {"a": "b"}, "finalizers": [], "annotations": {**SAID, "team": "a"}}
    assert validate_update({**old, "metadata": meta, "status": {"phase": "Running"}}, old, "alice", SETTINGS) == []
