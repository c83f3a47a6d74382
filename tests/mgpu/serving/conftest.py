"""Certificates for the servers and clients of these tests."""

import ssl
from datetime import UTC, datetime

import pytest

from mgpu.serving.certificate_folder import CertificateFolder
from mgpu.serving.certificates import CA, ensure_certificate
from tests.mgpu.serving.process import client_certificate


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> CertificateFolder:
    folder = CertificateFolder(tmp_path_factory.mktemp("certs"))
    ensure_certificate(folder, {"127.0.0.1", "localhost"}, datetime.now(UTC))
    return folder


@pytest.fixture(scope="module")
def client_context(folder: CertificateFolder, tmp_path_factory: pytest.TempPathFactory) -> ssl.SSLContext:
    """TLS for a client with a certificate that the server's own CA has signed."""
    context = ssl.create_default_context(cafile=str(folder.path / CA))
    context.load_cert_chain(client_certificate(folder, tmp_path_factory.mktemp("client")))
    return context
