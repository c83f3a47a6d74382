"""One cluster of two nodes for most modules: the three real processes, and everything else of the playground.

Starting a cluster takes seconds of CPU, so that the modules of one pytest process share it. In every cluster the
processes have only the rights of manifests/base/rbac.yaml.
"""

import os
import shutil
import subprocess
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from mgpu.kube import Api
from playground.apiserver import Request
from playground.cluster import Cluster
from playground.nodes import make_nodes
from tests.e2e.bench import Bench
from tests.e2e.clusters import patient

Kubectl = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With a failure goes what the processes said last: what happens once in a hundred runs must tell of itself."""
    report = yield
    if report.failed:
        values = item.funcargs.values()
        clusters = {c for v in values if isinstance(c := getattr(v, "cluster", v), Cluster)}
        for process in (process for cluster in clusters for process in cluster.processes.values()):
            report.sections.append((f"log of {process.name}", process.tail()))
    return report


def _refused(cluster: Cluster) -> list[Request]:
    """Return the requests of mgpu's processes that the API server has refused."""
    return sorted(request for request in cluster.requests() if not request.allowed)


@pytest.fixture(scope="module", autouse=True)
def _no_request_is_refused() -> Iterator[None]:
    """Check the rights of every cluster that the module starts: a refused process mostly logs it and goes on.

    Modules that attack with the token of a process override this fixture.
    """
    refused: list[Request] = []
    leave = Cluster.__exit__

    def leave_checked(cluster: Cluster, *error: Any) -> None:
        refused.extend(_refused(cluster))
        leave(cluster, *error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cluster, "__exit__", leave_checked)
        yield
    assert refused == []


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[Cluster]:
    with patient(make_nodes(2, 4)) as cluster:
        yield cluster
        assert _refused(cluster) == []


@pytest.fixture(scope="module")
def cluster(shared_cluster: Cluster) -> Cluster:
    """The cluster of the module. Modules that need another one, or that leave more than Pods behind, override this."""
    return shared_cluster


@pytest.fixture
def bench(cluster: Cluster) -> Iterator[Bench]:
    """Starts and ends with no pods and idle cards."""
    made = Bench(cluster)
    yield made
    made.clear()
    made.close()


@pytest.fixture
def stolen(cluster: Cluster, account: str) -> Iterator[Api]:
    """A connection with the token of a process: webhook, scheduler or deviceplugin."""
    api = cluster.connect(account)
    yield api
    api.close()


@pytest.fixture
def kubectl(cluster: Cluster, tmp_path: Path) -> Kubectl:
    """Runs real kubectl as the administrator."""
    found = shutil.which("kubectl")
    if not found:
        pytest.skip("kubectl is not installed")
    environ = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig), "HOME": str(tmp_path)}

    def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
        command = [found, *map(str, arguments)]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)

    return run
