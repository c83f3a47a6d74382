"""A cluster of the playground's own parts."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from playground.apiserver import ApiServer, User, running
from tests.playground.fake_cluster import FakeCluster


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    """Only an API server."""
    with (
        tempfile.TemporaryDirectory(prefix="k") as folder,  # a short path, as Unix sockets need it
        running(ApiServer(tokens={"admin": User("admin", ("system:masters",))})) as url,
    ):
        made = FakeCluster(url, Path(folder))
        yield made
        made.close()


@pytest.fixture
def node(cluster: FakeCluster) -> FakeCluster:
    """An API server, and a kubelet for the node n1."""
    cluster.start_kubelet()
    return cluster
