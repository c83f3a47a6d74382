"""What others notice of who is away for a while. That nothing is misplaced, stuck or left behind: test_losses."""

import pytest
from kubernetes.client import ApiException

from tests.e2e.bench import Bench, share
from tests.waiting import until

PLAIN = {"metadata": {"name": "plain"}, "spec": {"containers": [{"name": "c", "image": "busybox"}]}}


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
