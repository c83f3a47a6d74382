"""The kubelet's pods: admitted, started, restarted, ended."""

from collections.abc import Callable

import pytest

from tests.playground.kubelet_bench import NODE, PODS, Bench
from tests.playground.kubelet_plugin import CORE
from tests.waiting import until


def test_a_pod_runs_with_what_the_plugin_answered_and_its_deletion_frees_the_ids(bench: Bench) -> None:
    plugin = bench.plugin(ids=2)
    bench.create("a", core=2)
    pod = bench.runs("a")
    status = pod["status"]["containerStatuses"][0]
    assert (status["ready"], status["started"], bool(status["containerID"])) == (True, True, True)
    assert pod["status"]["podIP"]
    assert "IDS=id-0,id-1\n" in bench.runtime.logs("default", "a")
    assert plugin.started == plugin.allocated
    bench.api.delete(f"{PODS}/a")
    until(lambda: bench.gone("a"))
    bench.create("b", core=2)
    bench.runs("b")
    assert not any(c.running for c in bench.runtime.containers(pod["metadata"]["uid"]))


def test_too_few_ids_fail_the_pod_and_the_failed_pod_can_be_deleted(bench: Bench) -> None:
    bench.plugin(ids=2)
    bench.create("a", core=3)
    until(lambda: bench.phase("a") == "Failed")
    status = bench.pod("a")["status"]
    assert status["reason"] == "UnexpectedAdmissionError"
    assert "Requested: 3, Available: 2" in status["message"]
    events = until(lambda: bench.api.list("/api/v1/namespaces/default/events", fieldSelector="type=Warning")[0])
    assert events[0]["reason"] == "UnexpectedAdmissionError"
    bench.api.delete(f"{PODS}/a")
    until(lambda: bench.gone("a"))


def test_a_plugins_error_fails_the_pod(bench: Bench) -> None:
    bench.plugin().refuse_allocate = "no cards"
    bench.create("a")
    until(lambda: bench.phase("a") == "Failed")
    assert "rpc error: code = Internal desc = no cards" in bench.pod("a")["status"]["message"]


def test_a_request_for_what_the_node_does_not_have_is_dropped(bench: Bench) -> None:
    bench.create("a")
    bench.runs("a")
    assert bench.runtime.logs("default", "a") == "NVIDIA_VISIBLE_DEVICES=all\n"


def test_more_than_the_node_has_is_refused_by_the_kubelet_too(bench: Bench) -> None:
    own = {"name": "c", "image": "i", "resources": {"requests": {"cpu": "65"}}}
    bench.create("a", containers=[own])
    until(lambda: bench.phase("a") == "Failed")
    assert bench.pod("a")["status"]["reason"] == "OutOfcpu"


def test_a_refused_start_waits_and_is_tried_again(bench: Bench) -> None:
    plugin = bench.plugin()
    plugin.refuse_start = "no decision yet"
    bench.create("a")
    until(lambda: bench.waits("a").get("reason") == "CreateContainerConfigError")
    failed = "device plugin PreStartContainer rpc failed with err: "
    assert bench.waits("a")["message"] == f"{failed}rpc error: code = FailedPrecondition desc = no decision yet"
    assert bench.phase("a") == "Pending"
    plugin.refuse_start = ""
    bench.runs("a")
    assert len(plugin.allocated) == 1


def test_a_start_that_takes_too_long_is_given_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("playground.kubelet.services.PRE_START_SECONDS", 0.1)
    plugin = bench.plugin()
    plugin.hold_start.clear()
    bench.create("a")
    until(lambda: "DeadlineExceeded" in bench.waits("a").get("message", ""))
    plugin.hold_start.set()
    bench.runs("a")


def test_every_start_of_a_container_calls_pre_start_again(bench: Bench) -> None:
    plugin = bench.plugin()
    bench.create("a")
    bench.runs("a")
    bench.kubelet.restart_container("default", "a", "c")
    until(lambda: bench.pod("a")["status"]["containerStatuses"][0]["restartCount"] == 1)
    assert len(plugin.started) == 2
    assert len(plugin.allocated) == 1


def test_a_kubelet_restart_leaves_containers_alone_and_skips_pre_start_until_the_plugin_is_back(bench: Bench) -> None:
    plugin = bench.plugin()
    bench.create("a")
    before = bench.runs("a")["status"]["containerStatuses"][0]["containerID"]
    bench.kubelet.stop()
    plugin.stop()
    bench.kubelet.start()
    until(lambda: "a" in bench.listed() and bench.listed()["a"]["c"])
    bench.kubelet.restart_container("default", "a", "c")
    until(lambda: bench.pod("a")["status"]["containerStatuses"][0]["restartCount"] == 1)
    row = bench.pod("a")["status"]["containerStatuses"][0]
    assert row["containerID"] != before
    assert row["lastState"]["terminated"]["containerID"] == before
    assert len(plugin.started) == len(plugin.allocated) == 1


def test_a_kubelet_restart_forgets_the_ids_of_no_pod_that_runs(bench: Bench) -> None:
    """All of them are admitted again, one by one: none is refused for what it holds itself."""
    plugin = bench.plugin(ids=3)
    for name in ("a", "b", "c"):
        bench.create(name)
        bench.runs(name)
    held = bench.listed()
    bench.kubelet.stop()
    plugin.stop()
    bench.kubelet.start()
    until(lambda: bench.listed() == held)
    bench.create("d", core=0)
    bench.runs("d")
    assert [bench.phase(name) for name in ("a", "b", "c")] == ["Running"] * 3


def test_a_resource_published_below_what_pods_hold_fails_them_at_the_next_restart(bench: Bench) -> None:
    bench.plugin()
    bench.api.patch(f"{NODE}/status", {"status": {"capacity": {"example.com/memory": "8"}}})
    until(lambda: bench.capacity("example.com/memory") == ("8", "8"))
    limits = {CORE: "1", "example.com/memory": "4"}
    bench.create("a", containers=[{"name": "c", "image": "i", "resources": {"limits": limits}}])
    bench.runs("a")
    bench.api.patch(f"{NODE}/status", {"status": {"capacity": {"example.com/memory": "3"}}})
    until(lambda: bench.capacity("example.com/memory") == ("3", "3"))
    assert bench.phase("a") == "Running"
    bench.kubelet.stop()
    bench.kubelet.start()
    until(lambda: bench.phase("a") == "Failed")
    assert bench.pod("a")["status"]["reason"] == "OutOfexample.com/memory"


def test_after_a_reboot_pods_are_admitted_before_the_plugin_is_back_and_fail(bench: Bench) -> None:
    bench.plugin()
    bench.create("a")
    bench.runs("a")
    bench.kubelet.stop()
    bench.runtime.reboot()
    bench.kubelet.start()
    until(lambda: bench.phase("a") == "Failed")
    assert bench.pod("a")["status"]["reason"] == "UnexpectedAdmissionError"


@pytest.mark.parametrize("order", ["arrival", "created", "random"])
def test_the_calls_of_a_pod_are_contiguous_in_any_order_of_pods(make: Callable[..., Bench], order: str) -> None:
    bench = make(admission=order, seed=1)
    plugin = bench.plugin(ids=32)
    names = [f"p{i}" for i in range(8)]
    two = [{"name": n, "image": "i", "resources": {"limits": {CORE: "1"}}} for n in ("c1", "c2")]
    with bench.kubelet.holding():
        for name in names:
            bench.create(name, containers=two)
        until(lambda: len(bench.listed()) == 8)
        assert plugin.allocated == []
    for name in names:
        bench.runs(name)
    owner = {i: (pod, c) for pod, ids in bench.listed().items() for c, held in ids.items() for i in held}
    calls = [owner[ids[0]] for ids in plugin.allocated]
    assert calls == [(pod, c) for pod, _ in calls[::2] for c in ("c1", "c2")]
    assert ([pod for pod, _ in calls[::2]] == names) is (order != "random")


def test_a_pod_completes_by_itself_and_its_ids_go_to_the_next(bench: Bench) -> None:
    bench.plugin(ids=1)
    own = {"name": "c", "image": "i", "resources": {"limits": {CORE: "1"}}}
    meta = {"name": "a", "annotations": {"playground.mgpu.io/run-seconds": "0.05"}}
    bench.api.create(
        PODS, {"metadata": meta, "spec": {"nodeName": "n1", "restartPolicy": "Never", "containers": [own]}}
    )
    until(lambda: bench.phase("a") == "Succeeded")
    bench.create("b")
    bench.runs("b")


def test_failed_from_outside_is_honoured(bench: Bench) -> None:
    bench.plugin(ids=1)
    bench.create("a")
    uid = bench.runs("a")["metadata"]["uid"]
    bench.api.patch(f"{PODS}/a/status", {"status": {"phase": "Failed", "reason": "Told"}})
    until(lambda: not any(c.running for c in bench.runtime.containers(uid)))
    assert (bench.phase("a"), bench.pod("a")["status"]["reason"]) == ("Failed", "Told")


def test_a_container_that_waits_when_its_pod_is_failed_never_starts(bench: Bench) -> None:
    bench.plugin().refuse_start = "no decision yet"
    bench.create("a")
    until(lambda: bench.waits("a").get("reason") == "CreateContainerConfigError")
    bench.api.patch(f"{PODS}/a/status", {"status": {"phase": "Failed", "reason": "Told"}})
    state = until(lambda: bench.pod("a")["status"]["containerStatuses"][0]["state"].get("terminated"))
    assert (state["reason"], state["exitCode"]) == ("ContainerStatusUnknown", 137)
    assert (bench.phase("a"), bench.pod("a")["status"]["reason"]) == ("Failed", "Told")


def test_force_deletion_frees_ids_at_once(bench: Bench) -> None:
    bench.plugin(ids=1)
    bench.create("a")
    bench.runs("a")
    bench.api.delete(f"{PODS}/a", {"gracePeriodSeconds": 0})
    until(lambda: bench.gone("a"))
    until(lambda: bench.listed() == {})
    bench.create("a")
    bench.runs("a")
