"""Processes die and come back: nothing is left behind, nobody runs on wrong cards."""

import pytest
from kubernetes.client import ApiException

from tests.e2e.bench import Bench, share
from tests.waiting import until

PLAIN = {"metadata": {"name": "plain"}, "spec": {"containers": [{"name": "c", "image": "busybox"}]}}


def idle(bench: Bench) -> bool:
    return all(state.idle for states in bench.samples.states().values() for state in states)


def fills_every_card(bench: Bench) -> None:
    """What the scheduler process still holds in its own mind would show here."""
    bench.create(share("all-1", core=400, mib=None, nodeSelector={"kubernetes.io/hostname": "node-1"}))
    bench.create(share("all-2", core=400, mib=None, nodeSelector={"kubernetes.io/hostname": "node-2"}))
    bench.exact("all-1")
    bench.exact("all-2")


def test_the_scheduler_killed_midway_leaves_nothing_behind(bench: Bench) -> None:
    names = [f"p{i}" for i in range(12)]
    for i, name in enumerate(names):
        bench.create(share(name))
        if i == 5:
            bench.cluster.processes["scheduler"].kill()
    bench.cluster.restart("scheduler")
    for name in names:
        bench.exact(name)
    assert bench.within_capacity()
    bench.clear()
    assert idle(bench)
    fills_every_card(bench)


def test_pods_bound_during_an_outage_of_the_scheduler_are_decided_afterwards(bench: Bench) -> None:
    bench.cluster.processes["scheduler"].kill()
    bench.create(share("p", nodeName="node-1"))
    until(lambda: bench.pod("p").status.container_statuses)
    assert bench.cards("p") == {}
    bench.cluster.restart("scheduler")
    bench.exact("p")


def test_without_the_webhook_gpu_pods_wait_outside_and_others_do_not_notice(bench: Bench) -> None:
    bench.create(share("before"))
    bench.runs("before")
    bench.cluster.processes["webhook"].kill()
    with pytest.raises(ApiException, match="failed calling webhook"):
        bench.create(share("p"))
    bench.create(PLAIN)
    bench.runs("plain")
    bench.cluster.restart("webhook")
    bench.create(share("p"))
    bench.exact("p")
    bench.exact("before")


def test_a_killed_agent_comes_back_to_its_running_pods(bench: Bench) -> None:
    bench.create(share("before", core=60, nodeSelector={"kubernetes.io/hostname": "node-1"}))
    bench.exact("before")
    bench.cluster.processes["deviceplugin-node-1"].kill()
    bench.cluster.restart("deviceplugin-node-1")
    bench.create(share("after", core=60, nodeSelector={"kubernetes.io/hostname": "node-1"}))
    bench.exact("after")
    bench.exact("before")
    assert bench.within_capacity()


def test_a_restarted_kubelet_keeps_what_runs_and_serves_again(bench: Bench) -> None:
    bench.create(share("before", nodeSelector={"kubernetes.io/hostname": "node-1"}))
    bench.exact("before")
    container = bench.pod("before").status.container_statuses[0].container_id
    kubelet = bench.cluster.kubelets["node-1"]
    kubelet.stop()
    kubelet.start()
    bench.cluster.wait_offers("node-1")
    bench.create(share("after", nodeSelector={"kubernetes.io/hostname": "node-1"}))
    bench.exact("after")
    assert bench.pod("before").status.container_statuses[0].container_id == container
