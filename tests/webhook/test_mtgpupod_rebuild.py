"""The Pod of an MtgpuPod is built from the MtgpuPod, whatever its creator sends."""

import json
from collections.abc import Mapping
from typing import Any

import jsonpatch
import pytest

from mgpu.dialects.mtgpu import read_mtgpupod
from mgpu.dialects.mtgpu_pods import manifest
from mgpu.kube import ApiError, Unreachable
from mgpu.model.errors import RetryLater
from mgpu.settings import load_settings
from tests.builders import container, mtgpupod, owned, pod
from tests.mgpu.serving.reviews import patch_of, review
from webhook.admission import make_app
from webhook.mtgpupod_rebuild import FindMtgpuPod, make_finder

SCHEDULER = "system:serviceaccount:mgpu-system:mgpu-scheduler"
PEER = "system:serviceaccount:sharing:controller"
CARD = "GPU-n1-1"
SEAL = f"v1.{'0' * 16}.uid-m.{'1' * 128}"
MTGPU_OFF = {"dialects": {"mtgpu": {"enabled": False}}}


def with_meta(raw: dict[str, Any], **meta: Any) -> dict[str, Any]:
    return {**raw, "metadata": {**raw["metadata"], **meta}}


def held(**meta: Any) -> dict[str, Any]:
    """Return an MtgpuPod with a card."""
    return with_meta(mtgpupod("m", bound=CARD), **{"labels": {"app": "tenant"}, **meta})


def sent(card: str = CARD, index: str = "1", **meta: Any) -> dict[str, Any]:
    """Return a Pod for `held()` as an attacker with the scheduler's token would create it."""
    env = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": card}, {"name": "MGPU_CARDS", "value": index}]
    raw = pod("m", container(image="attackers", env=env), node="n1", annotations={"mgpu.io/seal": SEAL, "a": "b"})
    raw["spec"]["serviceAccountName"] = "administrator"
    said = {"labels": {"app": "service"}, "ownerReferences": [owned()], "finalizers": ["example.com/a"]}
    return with_meta(raw, **{**said, **meta})


def answer(raw: Any, find: FindMtgpuPod | None, user: str = SCHEDULER, **settings: Any) -> Any:
    app = make_app(load_settings(json.dumps(settings)), find_mtgpupod=find)
    return app.test_client().post("/rebuild", json=review(raw, user=user))


def none(_namespace: str, _name: str) -> None:
    return None


def test_pod_of_an_mtgpupod_is_replaced_by_the_one_that_mgpu_builds() -> None:
    asked: list[tuple[str, str]] = []

    def find(namespace: str, name: str) -> Mapping[str, Any]:
        asked.append((namespace, name))
        return held()

    raw = sent()
    found = jsonpatch.apply_patch(raw, patch_of(answer(raw, find).json))
    built = manifest(held(), read_mtgpupod(held()), CARD, 1)
    built["metadata"]["annotations"]["mgpu.io/seal"] = SEAL
    assert asked == [("default", "m")]
    assert found["spec"] == built["spec"]
    kept = {key: found["metadata"].get(key) for key in built["metadata"]}
    assert (kept, "finalizers" in found["metadata"]) == (built["metadata"], False)


@pytest.mark.parametrize(
    ("raw", "found", "why"),
    [
        (sent(), None, "does not exist"),
        (sent(), held(uid="uid-other"), "names another uid"),
        (sent(), held(deletionTimestamp="2026-01-01T00:00:00Z"), "is being deleted"),
        (sent(), mtgpupod("m"), "names no card"),
        (sent("GPU-n1-0"), held(), "must be the card of"),
        (sent("all"), mtgpupod("m", bound="all"), "must be the card of"),
        (sent("0"), mtgpupod("m", bound="0"), "must be the card of"),
        (sent("GPU-a,GPU-b"), mtgpupod("m", bound="GPU-a,GPU-b"), "must be the card of"),
        (sent(index="x"), held(), "must be the index"),
        (sent(), held(annotations={}), "is missing"),
    ],
    ids=["none", "uid", "deleted", "no card", "other card", "all", "index", "two", "no index", "unreadable"],
)
def test_pod_that_mgpu_would_not_create_is_denied(raw: Any, found: Any, why: str) -> None:
    got = answer(raw, lambda *_: found).json["response"]
    assert (got["allowed"], got["status"]["code"], why in got["status"]["message"]) == (False, 422, True)


def test_webhook_without_api_server_denies_pods_of_mtgpupods() -> None:
    got = answer(sent(), None).json["response"]
    assert (got["allowed"], "--kubeconfig" in got["status"]["message"]) == (False, True)


class Failing:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def get(self, _path: str) -> Any:
        raise self.error


@pytest.mark.parametrize("error", [ApiError(500, "", "no"), ApiError(403, "Forbidden", "no"), Unreachable("no")])
def test_mtgpupod_that_cannot_be_read_is_answered_with_503(error: Exception) -> None:
    find = make_finder(Failing(error))  # type: ignore[arg-type]
    with pytest.raises(RetryLater):
        find("default", "m")
    assert answer(sent(), find).status_code == 503
    assert make_finder(Failing(ApiError(404, "NotFound", "no")))("default", "m") is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("user", "settings", "built"),
    [
        (SCHEDULER, {}, True),
        (SCHEDULER, MTGPU_OFF, True),
        (SCHEDULER, {**MTGPU_OFF, "webhook": {"identities": [SCHEDULER, PEER]}}, True),
        (PEER, {"webhook": {"identities": [PEER]}}, True),
        (PEER, {**MTGPU_OFF, "webhook": {"identities": [PEER]}}, False),
        ("tenant", {}, False),
    ],
    ids=["scheduler", "disabled", "beside a peer", "another scheduler", "a peer's own", "a tenant, denied later"],
)
def test_pod_is_rebuilt_for_trusted_users_of_mgpu(user: str, settings: Any, *, built: bool) -> None:
    raw = sent()
    got = answer(raw, lambda *_: held(), user, **settings).json
    assert (got["response"]["allowed"], bool(patch_of(got))) == (True, built)


@pytest.mark.parametrize("raw", [pod("m"), sent(ownerReferences=[{**owned(), "apiVersion": "example.com/v1"}])])
def test_pod_without_an_mtgpupod_as_owner_is_not_rebuilt(raw: Any) -> None:
    assert patch_of(answer(raw, none).json) == []
