"""Any one process is lost while pods of all vocabularies are being created: none misplaced, none stuck, none left."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from playground.cluster import Cluster
from tests.e2e.bench import Bench
from tests.e2e.clusters import patient
from tests.e2e.mixed import CUT, NODES, POOL, SHARED, Loss, Mixed
from tests.e2e.replicas import replicated
from tests.examples import SOAK


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with patient(NODES) as made:
        yield made


@pytest.fixture
def mixed(bench: Bench) -> Iterator[Mixed]:
    made = Mixed(bench)
    yield made
    made.clear()


def process(cluster: Cluster, name: str) -> Loss:
    return cluster.processes[name].kill, lambda: cluster.restart(name)


def worker(cluster: Cluster, name: str) -> Loss:
    """One of those that a process has, as when the kernel takes its memory; its parent starts another."""

    def kill() -> None:
        pid = cluster.processes[name].pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)

    return kill, lambda: cluster.wait_ready(name)


def agent(cluster: Cluster, node: str) -> Loss:
    return process(cluster, f"deviceplugin-{node}")


def kubelet(cluster: Cluster) -> Loss:
    return cluster.kubelets[POOL].stop, cluster.kubelets[POOL].start


def scheduling(cluster: Cluster) -> Loss:
    return lambda: cluster.scheduling.stop(), cluster.start_scheduling


def api_server(cluster: Cluster) -> Loss:
    """A real one (KUBEBUILDER_ASSETS) is left alone; docs/verified.md has what was seen with that."""
    if cluster.assets:
        return bool, bool
    return cluster.kill_api_server, cluster.start_api_server


ABOVE: dict[str, Callable[[Cluster], Loss]] = {
    "webhook": lambda cluster: process(cluster, "webhook"),
    "one worker of the webhook": lambda cluster: worker(cluster, "webhook"),
    "API server": api_server,
    "scheduler": lambda cluster: process(cluster, "scheduler"),
    "the scheduler's worker": lambda cluster: worker(cluster, "scheduler"),
    "kube-scheduler": scheduling,
}
ON_NODES: dict[str, Callable[[Cluster], Loss]] = {
    **{f"the agent of {node}": lambda cluster, node=node: agent(cluster, node) for node in (POOL, CUT, SHARED)},  # type: ignore[misc]
    "kubelet": kubelet,
}


def test_whatever_decides_is_lost_one_after_the_other(mixed: Mixed) -> None:
    mixed.create_all([of(mixed.cluster) for of in ABOVE.values()])
    assert mixed.settle() == set()
    mixed.check()


def test_whatever_is_on_a_node_is_lost_one_after_the_other(mixed: Mixed) -> None:
    """The kubelet itself fails pods that it admits while their plugin is not there; their controllers make others."""
    mixed.create_all([of(mixed.cluster) for of in ON_NODES.values()])
    mixed.settle()
    mixed.check()


@pytest.mark.skipif(not SOAK, reason="only with MGPU_TEST_EXAMPLES=soak: each alone")
@pytest.mark.parametrize("lost", [*ABOVE, *ON_NODES])
def test_one_is_lost(mixed: Mixed, lost: str) -> None:
    mixed.create_all([(ABOVE | ON_NODES)[lost](mixed.cluster)])
    again = mixed.settle()
    assert not again or lost in ON_NODES
    mixed.check()


def test_the_follower_takes_over_from_a_leader_that_is_killed(bench: Bench) -> None:
    mixed = Mixed(bench)
    with replicated(mixed.cluster) as replicas:
        mixed.create_all([(replicas.kill_leader, replicas.leader)])
        assert mixed.settle() == set()
        assert replicas.killed is not None
        assert replicas.leader() is not replicas.killed
        assert not replicas.killed.labelled
        mixed.check()
        mixed.clear()
