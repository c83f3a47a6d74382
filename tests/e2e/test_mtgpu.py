"""Tests MtgpuPods together with pods of the other vocabularies on nodes of two cards, and after failures."""

from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from mgpu.kube import ApiError
from playground.cluster import Cluster
from scheduler.inspect_command import command as inspect
from tests.e2e.bench import Bench, Json, asking, share
from tests.e2e.clusters import patient
from tests.e2e.mtgpu_bench import MTGPUPODS, OCCUPYING, OURS, PODS, STOCK, Named, gone, mtgpupod
from tests.mgpu.cli.served import ON_A_TERMINAL
from tests.waiting import until

DEVICES = "/apis/scheduling.koordinator.sh/v1alpha1/devices"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with patient([OURS, STOCK]) as made:
        yield made


@pytest.fixture
def named(bench: Bench) -> Iterator[Named]:
    """The MtgpuPods of a cluster that has none, neither before nor after the test."""
    made = Named(bench)
    yield made
    made.clear()


def on(node: str, pod: Json) -> Json:
    return {**pod, "spec": {**pod["spec"], "nodeSelector": {"kubernetes.io/hostname": node}}}


def pool() -> list[Json]:
    """Return one pod of each vocabulary that requests a share."""
    return [share("mgpu", core=30, mib=4096), asking("gpushare", gpu_mem=16), asking("koordinator", gpu=25)]


def card_of(uuid: str) -> int:
    return int(uuid.rpartition("-")[2])


_ORDINALS = ("first", "second", "third")


def occupy(node: str, gpuid: str) -> str:
    return f"mtgpupod-occupypod-{node}-{gpuid}"


@pytest.mark.parametrize("node", [OURS.name, STOCK.name])
def test_no_other_pod_lands_on_a_card_that_has_a_gpuid(named: Named, node: str) -> None:
    bench = named.bench
    named.create("first", "zxcvb", "0.2", node)
    theirs = card_of(named.runs("first"))
    for pod in pool():
        bench.create(on(node, pod))
        bench.exact(pod["metadata"]["name"])
        assert bench.sees(pod["metadata"]["name"]) == {"c": [theirs ^ 1]}
    bench.create(on(node, share("large", core=60)))
    bench.waits("large")
    bench.create(on(node, asking("whole", nvidia=1)))
    bench.waits("whole")
    named.create("second", "zxcvb", "0.8", node)
    assert card_of(named.runs("second")) == theirs
    assert bench.pod("large").spec.node_name is None
    assert bench.pod("whole").spec.node_name is None


def test_no_mtgpupod_lands_on_a_card_of_others(named: Named) -> None:
    bench = named.bench
    for pod in pool():
        bench.create(on(OURS.name, pod))
        bench.exact(pod["metadata"]["name"])
    shared = bench.sees("mgpu")["c"][0]
    named.create("first", "zxcvb", "0.2")
    assert card_of(named.runs("first")) == shared ^ 1
    named.create("second", "qwert", "0.2")
    why = named.waits("second", "ResourceExceeded")
    assert why
    for pod in pool():
        bench.delete(pod["metadata"]["name"])
    assert card_of(named.runs("second")) == shared


@pytest.mark.parametrize("node", [OURS.name, STOCK.name])
def test_whole_cards_and_mtgpupods_keep_out_of_each_others_way(named: Named, node: str) -> None:
    bench = named.bench
    bench.create(on(node, asking("whole", nvidia=1)))
    bench.runs("whole")
    named.create("first", "zxcvb", "1", node)
    card = card_of(named.runs("first"))
    assert bench.sees("whole") == {"c": [card ^ 1]}
    named.create("second", "qwert", "0.1", node)
    named.waits("second", "ResourceExceeded")
    bench.create(on(node, asking("more", nvidia=1)))
    bench.waits("more")
    named.delete("second")
    named.delete("first")
    bench.runs("more")
    assert bench.sees("more") == {"c": [card]}
    named.create("third", "asdfg", "0.1", node)
    bench.delete("whole")
    assert card_of(named.runs("third")) == card ^ 1


def test_card_that_nvidias_plugin_gave_out_is_never_shared(bench: Bench) -> None:
    bench.create(on(STOCK.name, asking("stock", nvidia=1)))
    bench.runs("stock")
    (theirs,) = bench.sees("stock")["c"]
    until(lambda: sum(state.idle for state in bench.samples.states()[STOCK.name]) == 1)
    shares = [share("mgpu", core=60), asking("gpushare", gpu_mem=20), asking("koordinator", gpu=60)]
    for pod in (*shares, asking("gpushare-2", gpu_mem=25)):
        bench.create(on(STOCK.name, pod))
        outcome = bench.samples.settled(pod["metadata"]["name"])
        assert not outcome.running or bench.sees(pod["metadata"]["name"])["c"] == [theirs ^ 1]
    for pod in shares[:2]:
        bench.exact(pod["metadata"]["name"])
    done = CliRunner(env=ON_A_TERMINAL).invoke(
        inspect, ["--kubeconfig", str(bench.cluster.kubeconfig)], catch_exceptions=False
    )
    assert "default/stock · nvidia" in done.output
    assert bench.within_capacity()


def test_decimal_requests_fill_a_card_exactly_and_waiting_mtgpupods_are_served_in_order(named: Named) -> None:
    for i, request in enumerate(("0.2", "0.4", "0.3", "0.1")):
        named.create(f"p{i}", "zxcvb", request)
    assert len({named.runs(f"p{i}") for i in range(4)}) == 1
    named.create("q0", "zxcvb", "0.3")
    named.waits("q0", "ResourceExceeded")
    named.create("q1", "zxcvb", "0.1")
    named.waits("q1", "ResourceExceeded")
    until(lambda: named.events("q0", "ResourceExceeded"))
    named.delete("p3")  # 0.1: enough for q1, but q0 came first
    named.waits("q1", "ResourceExceeded")
    assert named.names() == {"p0", "p1", "p2", "q0", "q1"}
    named.delete("p0")
    card = named.runs("q0")
    assert named.status("q1").get("BoundDeviceID") in (None, card)
    assert len(named.events("q0", "ResourceExceeded")) == 1
    named.delete("p1")
    assert named.runs("q1") == card


def test_memory_is_never_more_than_the_card(named: Named) -> None:
    named.create("half", "zxcvb", "0", gib=40)
    named.create("rest", "zxcvb", "0", gib=40)
    assert named.runs("half") == named.runs("rest")
    named.create("more", "zxcvb", "0", gib=1)
    named.waits("more", "ResourceExceeded")
    named.create("giant", "qwert", "0", gib=81)
    named.waits("giant", "ResourceExceeded")
    named.create("small", "asdfg", "0", gib=80)
    named.runs("small")


def test_scheduler_killed_while_mtgpupods_come_and_go_continues_after_its_restart(named: Named) -> None:
    bench, nodes = named.bench, (OURS.name, STOCK.name)
    for node in nodes:
        named.create(f"first-{node}", "zxcvb", "0.2", node)
    until(lambda: named.occupying().keys() >= {occupy(node, "zxcvb") for node in nodes})
    bench.cluster.processes["scheduler"].kill()
    for node in nodes:
        named.create(f"second-{node}", "qwert", "0.3", node)
        named.create(f"third-{node}", "zxcvb", "0.4", node)
    bench.cluster.restart("scheduler")
    cards: dict[str, str] = {}
    for node in nodes:
        first, second, third = (cards.setdefault(f"{n}-{node}", named.runs(f"{n}-{node}")) for n in _ORDINALS)
        assert first == third != second
    assert set(named.occupying()) == {occupy(node, gpuid) for node in nodes for gpuid in ("zxcvb", "qwert")}
    for node in nodes:
        named.api.delete(f"{MTGPUPODS}/second-{node}")
        del cards[f"second-{node}"]
    bench.cluster.processes["scheduler"].kill()
    bench.cluster.restart("scheduler")
    until(lambda: set(named.occupying()) == {occupy(node, "zxcvb") for node in nodes})
    assert {name: named.runs(name) for name in cards} == cards


def test_an_occupy_pod_that_is_deleted_comes_back_on_the_same_card(named: Named) -> None:
    bench = named.bench
    named.create("first", "zxcvb", "0.2")
    card = named.runs("first")
    uid = bench.pod("first").metadata.uid
    name = occupy(OURS.name, "zxcvb")
    before = named.occupying()[name]["metadata"]["uid"]
    bench.create(
        on(OURS.name, asking("whole", nvidia=2))
    )  # a pod that waits for cards must not take this one meanwhile
    named.api.delete(f"{OCCUPYING}/{name}", {"gracePeriodSeconds": 0})
    again = until(lambda: (p := named.occupying().get(name)) and p["metadata"]["uid"] != before and p)
    until(lambda: named.occupying()[name]["status"]["phase"] == "Running")
    runtime = bench.cluster.kubelets[OURS.name].runtime
    (container,) = runtime.containers(again["metadata"]["uid"])
    assert container.env["NVIDIA_VISIBLE_DEVICES"] == card
    assert named.runs("first") == card
    assert bench.pod("first").metadata.uid == uid
    assert named.condition("first", "Degraded").get("status") != "True"


def test_pod_of_an_mtgpupod_deleted_by_a_user_is_created_again(named: Named) -> None:
    named.create("first", "zxcvb", "0.2")
    card = named.runs("first")
    before = named.bench.pod("first").metadata.uid
    named.api.delete(f"{PODS}/first", {"gracePeriodSeconds": 0})
    until(lambda: "first" in named.bench.names() and named.bench.pod("first").metadata.uid != before)
    assert named.runs("first") == card


def test_a_pod_of_that_name_is_never_taken_over(named: Named) -> None:
    bench = named.bench
    plain = {"metadata": {"name": "first"}, "spec": {"containers": [{"name": "c", "image": "busybox"}]}}
    uid = bench.create(plain).metadata.uid
    named.create("first", "zxcvb", "0.2")
    named.waits("first", "NameConflict")
    named.create("second", "zxcvb", "1")
    named.runs("second")
    assert bench.pod("first").metadata.uid == uid
    named.delete("first")
    assert bench.pod("first").metadata.uid == uid
    named.create("first", "qwert", "0.2")
    bench.delete("first")
    named.runs("first")


def test_mtgpupod_that_has_ended_frees_its_share_and_keeps_its_status(named: Named) -> None:
    named.create("job", "zxcvb", "1", restartPolicy="Never")
    card = named.runs("job")
    named.create("next", "zxcvb", "0.5")
    named.waits("next", "ResourceExceeded")
    named.bench.cluster.kubelets[OURS.name].complete("default", "job")
    assert named.runs("next") == card
    assert named.status("job")["phase"] == "Succeeded"


def test_a_node_that_is_gone_and_back_has_its_pods_again(named: Named) -> None:
    cluster, node = named.bench.cluster, OURS.name
    named.create("first", "zxcvb", "0.2")
    card = named.runs("first")
    kubelet, agent = cluster.kubelets[node], f"deviceplugin-{node}"
    kubelet.stop()
    cluster.processes[agent].kill()
    kubelet.runtime.reboot()
    cluster.api.delete(f"/api/v1/nodes/{node}")
    until(lambda: gone(named, f"{PODS}/first") and not named.occupying())
    until(lambda: named.status("first")["phase"] == "Pending")
    assert named.status("first")["BoundDeviceID"] == card
    kubelet.start()
    cluster.restart(agent)
    cluster.wait_offers(node)
    assert named.runs("first") == card
    assert named.condition("first", "Degraded").get("status") != "True"


def test_on_a_node_that_is_gone_a_deletion_ends_too(named: Named) -> None:
    cluster, node = named.bench.cluster, OURS.name
    named.create("first", "zxcvb", "0.2")
    named.runs("first")
    kubelet, agent = cluster.kubelets[node], f"deviceplugin-{node}"
    kubelet.stop()
    cluster.processes[agent].kill()
    kubelet.runtime.reboot()
    cluster.api.delete(f"/api/v1/nodes/{node}")
    named.delete("first")
    until(lambda: gone(named, f"{PODS}/first") and not named.occupying())
    kubelet.start()
    cluster.restart(agent)
    cluster.wait_offers(node)


def test_mtgpupod_waits_while_a_pod_of_its_namespace_runs_that_was_deleted_by_force(named: Named) -> None:
    """The stopped kubelet simulates a program that ignores SIGTERM: the container runs on after its Pod is deleted."""
    cluster, node = named.bench.cluster, OURS.name
    named.create("first", "zxcvb", "0.2")
    named.runs("first")
    uid, kubelet = named.bench.pod("first").metadata.uid, cluster.kubelets[node]
    kubelet.stop()
    named.api.delete(f"{MTGPUPODS}/first")
    named.api.delete(f"{PODS}/first", {"gracePeriodSeconds": 0})
    until(lambda: uid in str(named.api.get(f"{DEVICES}/{node}")["metadata"].get("annotations")))
    named.create("second", "qwert", "0.2", STOCK.name)
    # If the scheduler received the MtgpuPod before the Device, the MtgpuPod has a card but no Pod.
    until(lambda: "DeletedPodsRunning" in [row["reason"] for row in named.status("second").get("conditions") or ()])
    assert "second" not in named.bench.names()
    (container,) = kubelet.runtime.containers(uid)
    kubelet.runtime.end(container)
    kubelet.runtime.remove_sandbox(uid)
    named.runs("second")
    kubelet.runtime.reboot()  # the occupy pod's container has lost its object too
    kubelet.start()
    cluster.wait_offers(node)


def test_mtgpupod_that_names_a_missing_node_waits_for_the_node(named: Named) -> None:
    named.create("first", "zxcvb", "0.2", "elsewhere")
    named.waits("first", "NodeNotFound")
    assert not named.occupying()


def test_a_crowd_of_all_kinds_at_once_and_the_scheduler_dies_in_it(named: Named) -> None:
    bench, gpuids = named.bench, ("aa", "bb", "cc")
    for i in range(12):
        named.create(f"n{i}", gpuids[i % 3], "0.15")
        if i % 3 == 0:
            bench.create(on(OURS.name, share(f"s{i}", core=15, mib=1024)))
        if i == 6:
            bench.cluster.processes["scheduler"].kill()
    bench.cluster.restart("scheduler")
    until(lambda: sum(named.status(f"n{i}").get("phase") == "Running" for i in range(12)) >= 4)
    while names := {raw["metadata"]["name"]: raw for raw in named.api.list(MTGPUPODS)[0]}:
        where: dict[str, set[str]] = {}
        for raw in names.values():
            if card := (raw.get("status") or {}).get("BoundDeviceID"):
                where.setdefault(raw["metadata"]["annotations"]["lsalab.nthu/GPUID"], set()).add(card)
        cards = [card for found in where.values() for card in found]
        assert len(cards) == len(where) == len(set(cards))
        assert bench.within_capacity()
        # One GPUID after the other goes, so that those that waited for a card get one.
        gpuid = min(where)
        left = [name for name, raw in names.items() if raw["metadata"]["annotations"]["lsalab.nthu/GPUID"] != gpuid]
        for name in names.keys() - {*left}:
            named.api.delete(f"{MTGPUPODS}/{name}", {"propagationPolicy": "Background"})
        until(lambda left=left: named.names() == {*left})  # type: ignore[misc]
        until(lambda left=left: not left or any(named.status(name).get("phase") == "Running" for name in left))  # type: ignore[misc]


def test_every_container_sees_the_card_and_its_share(named: Named) -> None:
    containers = [{"name": name, "image": "cuda"} for name in ("a", "b")]
    inits = [{"name": "i", "image": "cuda"}, {"name": "s", "image": "cuda", "restartPolicy": "Always"}]
    named.create("first", "zxcvb", "0.25", containers=containers, initContainers=inits)
    card = named.runs("first")
    share = {"NVIDIA_VISIBLE_DEVICES": card, "MGPU_CORE_PERCENT": "25", "MGPU_MEMORY_BYTES": str(1 << 30)}
    for name in ("a", "b", "i", "s"):
        assert share.items() <= named.bench.environment("first", name).items()


def test_on_a_cordoned_node_nothing_new_starts(named: Named) -> None:
    node = f"/api/v1/nodes/{OURS.name}"
    named.create("first", "zxcvb", "0.2")
    card = named.runs("first")
    named.api.patch(node, {"spec": {"unschedulable": True}})
    second = next(name for name in map("second-{}".format, range(5)) if waits_for_the_node(named, name))
    named.api.delete(f"{PODS}/first", {"gracePeriodSeconds": 0})
    until(lambda: named.condition("first", "PodCreated").get("reason") == "NodeUnschedulable")
    assert "first" not in named.bench.names()
    named.api.patch(node, {"spec": {"unschedulable": None}})
    assert named.runs("first") == named.runs(second) == card


def waits_for_the_node(named: Named, name: str) -> bool:
    """Create an MtgpuPod and return whether it waits for its node.

    The scheduler may receive the event of the MtgpuPod before it receives the event that its node is cordoned.
    """
    named.create(name, "zxcvb", "0.1")
    return bool(until(lambda: named.condition(name, "Bound").get("reason")) == "NodeUnschedulable")


def test_occupy_pod_that_gets_another_card_moves_no_mtgpupod_and_is_reported(named: Named) -> None:
    """NVIDIA's plugin may give the new occupy pod any card that is free."""
    name = occupy(STOCK.name, "zxcvb")
    named.create("first", "zxcvb", "0.2", STOCK.name)
    card = named.runs("first")
    uid = named.bench.pod("first").metadata.uid

    def moved(wanted: str) -> bool:
        """Delete the occupy pod, and return whether the new one makes the condition Degraded `wanted`."""
        before = named.occupying()[name]["metadata"]["uid"]
        named.api.delete(f"{OCCUPYING}/{name}", {"gracePeriodSeconds": 0})
        again = until(lambda: (p := named.occupying().get(name)) and p["metadata"]["uid"] != before and p)
        uid = again["metadata"]["uid"]
        runtime = named.bench.cluster.kubelets[STOCK.name].runtime
        env = until(lambda: [c.env for c in runtime.containers(uid)])[0]
        there = "False" if env["NVIDIA_VISIBLE_DEVICES"] == card else "True"
        until(lambda: named.condition("first", "Degraded").get("status") == there)
        return there == wanted

    assert any(moved("True") for _ in range(30))
    named.create("second", "zxcvb", "0.2", STOCK.name)
    named.waits("second", "Degraded")
    assert named.runs("first") == card
    assert any(moved("False") for _ in range(30))
    assert named.runs("second") == card
    assert named.bench.pod("first").metadata.uid == uid


def test_pod_with_annotations_of_an_mtgpupod_is_rejected(named: Named) -> None:
    pod = {"metadata": {"name": "forged", "annotations": {"lsalab.nthu/GPUID": "zxcvb"}}}
    with pytest.raises(Exception, match="MtgpuPod"):
        named.bench.create({**pod, "spec": {"containers": [{"name": "c", "image": "busybox"}]}})


@pytest.mark.parametrize(
    ("field", "value"),
    [("gpu_request", "NaN"), ("gpu_request", "-0.1"), ("gpu_limit", "1e0"), ("gpu_mem", "1Gi"), ("GPUID", "Z")],
)
def test_mtgpupod_with_an_invalid_amount_is_rejected_with_the_field(named: Named, field: str, value: str) -> None:
    raw = mtgpupod("first", "zxcvb", "0.2")
    raw["metadata"]["annotations"][f"lsalab.nthu/{field}"] = value
    with pytest.raises(ApiError, match=rf"lsalab\.nthu/{field}") as refused:
        named.api.create(MTGPUPODS, raw)
    assert refused.value.status == 422
