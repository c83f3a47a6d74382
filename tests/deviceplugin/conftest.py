"""Fixtures: a node with two 80 GiB cards."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from playground.apiserver import ApiServer, User, running
from tests.deviceplugin.node import CRD, Node, api_of

CARDS = [{"count": 2, "model": "A100-SXM4-80GB", "memory": "80Gi"}]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder with a short path, since a unix socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="m", dir="/tmp") as path:
        yield Path(path)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse a start that waits for cards after a second. The kubelet repeats it, so no test depends on the time."""
    monkeypatch.setattr("deviceplugin.allocation.allocator.WAIT_SECONDS", 1.0)


@pytest.fixture
def node(folder: Path) -> Iterator[Node]:
    with running(ApiServer(tokens={"admin": User("admin", ("system:masters",))})) as url:
        api = api_of(url)
        api.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", CRD)
        api.close()
        node = Node(url, folder, CARDS)
        yield node
        node.close()
