"""The renewal of certificates under the installation's CA, which no process creates."""

import base64
import logging
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from mgpu.kube import ApiError
from mgpu.kube.secrets import SecretStore
from mgpu.serving.certificate_folder import CertificateFolder
from mgpu.serving.certificate_renewer import CertificateRenewer
from mgpu.serving.certificates import (
    CA,
    CA_KEY,
    CA_LIFETIME,
    CHAIN,
    LIFETIME,
    Authority,
    Files,
    NoAuthority,
    create_authority,
    ensure_certificate,
    renew_if_due,
)
from tests.waiting import until

NOW = datetime(2026, 1, 1, tzinfo=UTC)
NAMES = {"a.svc"}
PATH = "/api/v1/namespaces/mgpu-system/secrets/mgpu-webhook-tls"


class Cluster:
    """An API server with one Secret, which can be replaced if the resourceVersion matches, but not created."""

    def __init__(self, files: Files | None) -> None:
        self.writes = 0
        self.secret: dict[str, Any] | None = None
        if files is not None:
            data = {name: base64.b64encode(content).decode() for name, content in files.items()}
            self.secret = {"type": "kubernetes.io/tls", "metadata": {"resourceVersion": "1"}, "data": data}

    def get(self, path: str) -> dict[str, Any]:
        if path != PATH or self.secret is None:
            raise ApiError(404, "NotFound", path)
        return self.secret

    def replace(self, path: str, body: Any) -> dict[str, Any]:
        version = self.get(path)["metadata"]["resourceVersion"]
        if body["metadata"]["resourceVersion"] != version:
            raise ApiError(409, "Conflict", path)
        assert body["type"] == self.get(path)["type"]  # immutable
        self.writes += 1
        self.secret = {**body, "metadata": {**body["metadata"], "resourceVersion": str(int(version) + 1)}}
        return self.secret


def store_of(cluster: Any) -> SecretStore:
    return SecretStore(cluster, "mgpu-system", "mgpu-webhook-tls")


def issuer(files: Files) -> x509.Name:
    return x509.load_pem_x509_certificate(files[CHAIN]).issuer


def subjects(files: Files) -> list[x509.Name]:
    return [ca.subject for ca in x509.load_pem_x509_certificates(files[CA])]


@pytest.mark.parametrize(
    "found",
    [
        None,
        {},
        {CA: b""},
        {CA_KEY: b"x"},
        {CA: create_authority(NOW)[CA]},
        create_authority(NOW - CA_LIFETIME - timedelta(days=1)),
    ],
    ids=["no Secret", "empty", "no CA", "noise", "no key", "expired"],
)
def test_missing_ca_is_an_error_and_nothing_is_written(found: Files | None) -> None:
    cluster = Cluster(found)
    with pytest.raises(NoAuthority):
        ensure_certificate(store_of(cluster), NAMES, NOW, Authority.GIVEN)
    assert cluster.writes == 0


@pytest.mark.parametrize("part", [0.0, 0.5, 0.7, 0.99])
def test_ca_of_the_installation_is_not_changed(part: float) -> None:
    given = create_authority(NOW)
    files = renew_if_due(given, NAMES, NOW + CA_LIFETIME * part, Authority.GIVEN)
    assert (files[CA], files[CA_KEY]) == (given[CA], given[CA_KEY])
    assert [issuer(files)] == subjects(files)


def test_certificate_is_renewed_after_two_thirds_of_its_lifetime() -> None:
    files = renew_if_due(create_authority(NOW), NAMES, NOW, Authority.GIVEN)
    assert renew_if_due(files, NAMES, NOW + LIFETIME * 0.6, Authority.GIVEN) is files
    assert renew_if_due(files, NAMES, NOW + LIFETIME * 0.7, Authority.GIVEN)[CHAIN] != files[CHAIN]


@pytest.mark.parametrize("newest_first", [True, False])
def test_new_ca_of_the_installation_signs_at_once(newest_first: bool) -> None:
    old = renew_if_due(create_authority(NOW), NAMES, NOW, Authority.GIVEN)
    new = create_authority(NOW + timedelta(seconds=1))
    both = new[CA] + old[CA] if newest_first else old[CA] + new[CA]
    rotated = renew_if_due({**old, CA: both, CA_KEY: new[CA_KEY]}, NAMES, NOW, Authority.GIVEN)
    assert issuer(rotated) == subjects(new)[0]
    assert set(subjects(rotated)) == {*subjects(new), *subjects(old)}
    alone = renew_if_due({**rotated, CA: new[CA]}, NAMES, NOW, Authority.GIVEN)
    assert alone[CHAIN] == rotated[CHAIN]


def test_replicas_share_one_certificate() -> None:
    cluster = Cluster(create_authority(NOW))
    first = ensure_certificate(store_of(cluster), NAMES, NOW, Authority.GIVEN)
    second = ensure_certificate(store_of(cluster), NAMES, NOW, Authority.GIVEN)
    assert second == first
    assert cluster.writes == 1


def test_replica_that_writes_second_uses_the_first_certificate() -> None:
    cluster: Any = Cluster(create_authority(NOW))

    class Late(SecretStore):
        def read(self) -> Any:
            found = super().read()
            if cluster.writes == 0:
                ensure_certificate(store_of(cluster), NAMES, NOW, Authority.GIVEN)
            return found

    files = ensure_certificate(Late(cluster, "mgpu-system", "mgpu-webhook-tls"), NAMES, NOW, Authority.GIVEN)
    assert cluster.writes == 1
    assert files == store_of(cluster).read()[0]


def test_forbidden_write_of_the_secret_is_an_error() -> None:
    class Refusing(Cluster):
        def replace(self, path: str, body: Any) -> dict[str, Any]:  # noqa: ARG002
            raise ApiError(403, "Forbidden", path)

    with pytest.raises(ApiError, match="Forbidden"):
        ensure_certificate(store_of(Refusing(create_authority(NOW))), NAMES, NOW, Authority.GIVEN)


def test_shared_certificate_is_copied_to_the_folder(tmp_path: Path) -> None:
    cluster = Cluster(create_authority(datetime.now(UTC)))
    CertificateRenewer(CertificateFolder(tmp_path), NAMES, store_of(cluster)).renew()
    assert CertificateFolder(tmp_path).read()[0][CHAIN] == store_of(cluster).read()[0][CHAIN]


def test_renewer_without_ca_logs_the_remedy_and_retries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mgpu.serving.certificate_renewer.RETRY_SECONDS", 0.0)
    cluster = Cluster({})
    renewed_again = threading.Event()

    class Mended(SecretStore):
        reads = 0

        def read(self) -> Any:
            self.reads += 1
            if self.reads == 5:
                cluster.secret = Cluster(create_authority(datetime.now(UTC))).secret
            return super().read()

        def write(self, files: Files, version: str) -> bool:
            written = super().write(files, version)
            renewed_again.set()
            return written

    store = Mended(cluster, "mgpu-system", "mgpu-webhook-tls")  # type: ignore[arg-type]
    keeper = CertificateRenewer(CertificateFolder(tmp_path), NAMES, store, "run mend.sh")
    with caplog.at_level(logging.ERROR):
        keeper.start()
        assert renewed_again.wait(20)
        keeper.stop()
        keeper.join(20)
    (record,) = caplog.records
    assert record.getMessage() == "Serving certificate not renewed: there is no valid CA with its key; run mend.sh"


def test_renewer_with_a_ca_that_expires_soon_logs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster(create_authority(datetime.now(UTC) - CA_LIFETIME + timedelta(days=30)))
    keeper = CertificateRenewer(CertificateFolder(tmp_path), NAMES, store_of(cluster), "run mend.sh")
    with caplog.at_level(logging.ERROR):
        keeper.start()
        until(lambda: any("The CA of the serving certificate expires at" in r.getMessage() for r in caplog.records))
        keeper.stop()
        keeper.join(20)
