"""`mgpu webhook` as a process, one for each module."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mgpu.serving.process import Server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the certificate."""
    return tmp_path_factory.mktemp("webhook") / "certs"


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    run = "from mgpu.cli.main import main; main()"
    options = ("--host", "127.0.0.1", "--port", "0", "--self-signed-dir", str(folder), "--names", "host.example")
    server = Server("-c", run, "webhook", *options)
    yield server
    server.close()
