"""Fixtures of the end-to-end tests: a cluster with the three real processes, and clients of it.

Most modules use `shared_cluster`. A start takes 1 to 5 seconds of CPU, so the modules that run in one pytest process
share it. It ends with the last of them, because even an idle cluster takes CPU. A module that needs other nodes or
settings overrides `cluster`. In every cluster the processes have only the rights of manifests/base/rbac.yaml.
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
    """Add the last log lines of the processes to the report of a failed test, which may never fail again."""
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

    Modules that attack the shared cluster with the token of a process use `attacked`.
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


@pytest.fixture(scope="package")
def attacks() -> set[Request]:
    """The refused requests of the modules that attack the shared cluster with the token of a process."""
    return set()


@pytest.fixture(scope="package")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory, attacks: set[Request]) -> Iterator[Cluster]:
    """Two nodes of four cards, whose processes accept calls from their API server alone."""
    config = tmp_path_factory.mktemp("shared") / "mgpu.yaml"
    config.write_text("webhook: {apiServers: [127.0.0.1]}\nscheduler: {apiServers: [127.0.0.1]}\n")
    with patient(make_nodes(2, 4), config=config) as cluster:
        yield cluster
        assert set(_refused(cluster)) <= attacks


@pytest.fixture(scope="module")
def attacked(shared_cluster: Cluster, attacks: set[Request]) -> Iterator[Cluster]:
    """The shared cluster for a module whose requests with the tokens of processes may be refused."""
    before = set(_refused(shared_cluster))
    yield shared_cluster
    attacks |= set(_refused(shared_cluster)) - before


@pytest.fixture(scope="module")
def cluster(shared_cluster: Cluster) -> Cluster:
    """The cluster of a module. A module that needs another one, or that leaves more than Pods behind, overrides it."""
    return shared_cluster


@pytest.fixture(scope="module")
def module_bench(cluster: Cluster) -> Iterator[Bench]:
    """The clients of the module's cluster; creating them takes longer than most tests use them."""
    bench = Bench(cluster)
    yield bench
    bench.close()


@pytest.fixture
def bench(module_bench: Bench) -> Iterator[Bench]:
    """The clients of a cluster that has no pods, neither before nor after the test."""
    yield module_bench
    module_bench.clear()


@pytest.fixture
def stolen(cluster: Cluster, account: str) -> Iterator[Api]:
    """A connection with the token of `account`, which is webhook, scheduler or deviceplugin."""
    api = cluster.connect(account)
    yield api
    api.close()


@pytest.fixture
def kubectl(cluster: Cluster, tmp_path: Path) -> Kubectl:
    """A function that runs kubectl as the administrator."""
    found = shutil.which("kubectl")
    if not found:
        pytest.skip("kubectl is not installed")
    environ = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig), "HOME": str(tmp_path)}

    def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
        command = [found, *map(str, arguments)]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)

    return run
