"""The CA bundle reaches the API server, and replicas share one CA."""

import base64
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jsonpatch
import pytest

from mgpu.kube import ApiError
from mgpu.kube.secrets import SecretStore
from mgpu.serving.certificates import CA, CHAIN, ensure
from mgpu.serving.folder import Folder
from mgpu.serving.keeper import Keeper
from mgpu.serving.trust import publish
from mgpu.version import VERSION, own_version

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Cluster:
    """Objects by path, with resourceVersions that must match on replace."""

    def __init__(self, **objects: Any) -> None:
        self.objects = objects
        self.writes = 0

    def get(self, path: str) -> dict[str, Any]:
        if path not in self.objects:
            raise ApiError(404, "NotFound", path)
        found: dict[str, Any] = self.objects[path]
        return found

    def patch(self, path: str, body: Any, content_type: str) -> dict[str, Any]:
        assert content_type == "application/json-patch+json"
        self.writes += 1
        self.objects[path] = jsonpatch.apply_patch(self.objects[path], body)
        return self.get(path)

    def create(self, path: str, body: Any) -> dict[str, Any]:
        full = f"{path}/{body['metadata']['name']}"
        if full in self.objects:
            raise ApiError(409, "AlreadyExists", full)
        return self._store(full, body, 1)

    def replace(self, path: str, body: Any) -> dict[str, Any]:
        version = self.get(path)["metadata"]["resourceVersion"]
        if body["metadata"]["resourceVersion"] != version:
            raise ApiError(409, "Conflict", path)
        return self._store(path, body, int(version) + 1)

    def _store(self, path: str, body: Any, version: int) -> dict[str, Any]:
        self.writes += 1
        self.objects[path] = {**body, "metadata": {**body["metadata"], "resourceVersion": str(version)}}
        return self.get(path)


PATH = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/mgpu-webhook"


def configuration() -> dict[str, Any]:
    webhooks = [{"name": "a", "clientConfig": {"caBundle": ""}}, {"name": "b", "clientConfig": {}}]
    return {"metadata": {"resourceVersion": "1"}, "webhooks": webhooks}


def test_the_bundle_is_put_into_every_webhook_once() -> None:
    api = Cluster(**{PATH: configuration()})
    assert publish(api, "mutatingwebhookconfigurations", "mgpu-webhook", b"PEM")
    bundles = [w["clientConfig"]["caBundle"] for w in api.get(PATH)["webhooks"]]
    assert bundles == [base64.b64encode(b"PEM").decode()] * 2
    assert not publish(api, "mutatingwebhookconfigurations", "mgpu-webhook", b"PEM")
    assert api.writes == 1


@pytest.mark.parametrize("before", [{}, {"a/b": "theirs", VERSION: "0.0.1"}], ids=["none", "others"])
def test_who_published_it_is_said_once(before: dict[str, str]) -> None:
    raw = configuration()
    raw["metadata"] |= {"annotations": before} if before else {}
    api = Cluster(**{PATH: raw})
    for _ in range(2):
        publish(api, "mutatingwebhookconfigurations", "mgpu-webhook", b"PEM")
    assert api.get(PATH)["metadata"]["annotations"] == before | {VERSION: own_version()}
    assert api.writes == 1


def test_a_list_that_changed_meanwhile_is_not_patched() -> None:
    class Changing(Cluster):
        def patch(self, path: str, body: Any, content_type: str) -> dict[str, Any]:
            self.objects[path]["webhooks"].reverse()
            return super().patch(path, body, content_type)

    with pytest.raises(jsonpatch.JsonPatchTestFailed):
        publish(Changing(**{PATH: configuration()}), "mutatingwebhookconfigurations", "mgpu-webhook", b"PEM")


def test_replicas_share_the_ca_of_the_one_that_was_first() -> None:
    api: Any = Cluster()
    first = ensure(SecretStore(api, "mgpu-system", "mgpu-webhook-tls"), {"a.svc"}, NOW)
    second = ensure(SecretStore(api, "mgpu-system", "mgpu-webhook-tls"), {"a.svc"}, NOW)
    assert second == first
    assert api.writes == 1


def test_a_replica_that_is_second_by_a_hair_takes_the_winners() -> None:
    api: Any = Cluster()

    class Late(SecretStore):
        def read(self) -> Any:
            found = super().read()
            if api.writes == 0:
                ensure(SecretStore(api, "mgpu-system", "mgpu-webhook-tls"), {"a.svc"}, NOW)
            return found

    files = ensure(Late(api, "mgpu-system", "mgpu-webhook-tls"), {"a.svc"}, NOW)
    assert api.writes == 1
    assert files == SecretStore(api, "mgpu-system", "mgpu-webhook-tls").read()[0]


def test_a_refused_secret_is_an_error() -> None:
    class Refusing(Cluster):
        def create(self, path: str, body: Any) -> dict[str, Any]:  # noqa: ARG002
            raise ApiError(403, "Forbidden", path)

    api: Any = Refusing()
    with pytest.raises(ApiError, match="Forbidden"):
        ensure(SecretStore(api, "mgpu-system", "mgpu-webhook-tls"), {"a.svc"}, NOW)


def test_the_keeper_is_ready_once_the_ca_is_published_and_tries_until_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mgpu.serving.keeper.RETRY_SECONDS", 0.0)
    published: list[bytes] = []
    done = threading.Event()

    def told(ca: bytes) -> None:
        published.append(ca)
        if len(published) < 3:
            raise ApiError(404, "NotFound", "not there yet")
        done.set()

    keeper = Keeper(Folder(tmp_path), {"a.svc"}, publish=told)
    assert keeper.ready() == "the CA bundle is not published yet"
    keeper.start()
    assert done.wait(20)
    keeper.stop()
    keeper.join(20)
    assert keeper.ready() == ""
    assert set(published) == {Folder(tmp_path).read()[0][CA]}


def test_a_shared_certificate_is_served_from_the_folder(tmp_path: Path) -> None:
    api: Any = Cluster()
    store = SecretStore(api, "mgpu-system", "mgpu-webhook-tls")
    Keeper(Folder(tmp_path), {"a.svc"}, store).renew()
    assert Folder(tmp_path).read()[0][CHAIN] == store.read()[0][CHAIN]
