"""The device manager, fact by fact (docs/design/kubernetes.md, "Device manager")."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from playground.kubelet.checkpoint import FILE
from playground.kubelet.devices import AdmissionError, DeviceManager, PluginError
from playground.kubelet.status import Json
from proto import deviceplugin_pb2 as api

CORE, MEM = "example.com/core", "example.com/mem"


class FakePlugin:
    """Answers with a variable that names the call; refuses where told to."""

    def __init__(self, *, pre_start_required: bool = True) -> None:
        self.pre_start_required = pre_start_required
        self.allocated: list[tuple[str, ...]] = []
        self.started: list[tuple[str, ...]] = []
        self.refuse = ""

    def allocate(self, ids: Any) -> api.ContainerAllocateResponse:
        if self.refuse:
            raise PluginError(self.refuse)
        self.allocated.append(tuple(ids))
        number = len(self.allocated)
        return api.ContainerAllocateResponse(
            envs={"ANSWER": str(number)}, cdi_devices=[api.CDIDevice(name=f"example.com/gpu={number}")]
        )

    def pre_start(self, ids: Any) -> None:
        self.started.append(tuple(ids))


class Bench:
    def __init__(self, folder: Path, ids: int = 4, seed: int = 0) -> None:
        self.folder, self.seed, self.clock = folder, seed, 0.0
        self.active: set[str] = set()
        self.plugin = FakePlugin()
        self.manager = self.restart()
        self.register(CORE, ids)

    def restart(self) -> DeviceManager:
        rng = random.Random(self.seed)
        self.manager = DeviceManager(
            self.folder / FILE, lambda: self.active, rng=rng, grace=300, clock=lambda: self.clock
        )
        return self.manager

    def register(self, resource: str, ids: int) -> None:
        self.manager.connected(resource, self.plugin)
        self.manager.update(resource, {f"{resource[-3:]}-{i}": True for i in range(ids)})

    def admit(self, pod: Json, *, running: bool = False) -> None:
        for container in [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]:
            self.manager.allocate(pod, container, running=running)
        self.active.add(pod["metadata"]["uid"])

    def ids(self, uid: str, container: str = "c") -> set[str]:
        return set(self.manager.ids(uid, container).get(CORE, ()))


def container(name: str = "c", core: int = 1, **more: Any) -> Json:
    return {"name": name, "resources": {"limits": {CORE: str(core)}}, **more}


def pod(uid: str, *containers: Json, init: tuple[Json, ...] = ()) -> Json:
    return {
        "metadata": {"uid": uid, "name": uid},
        "spec": {"containers": list(containers) or [container()], "initContainers": list(init)},
    }


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_pods_hold_different_ids_until_they_end(bench: Bench) -> None:
    bench.admit(pod("a", container(core=2)))
    bench.admit(pod("b", container(core=2)))
    assert not bench.ids("a") & bench.ids("b")
    with pytest.raises(AdmissionError, match=r"Requested: 1, Available: 0"):
        bench.admit(pod("c"))
    bench.active.discard("a")
    bench.admit(pod("d", container(core=2)))
    assert bench.ids("d") == {"ore-0", "ore-1", "ore-2", "ore-3"} - bench.ids("b")


def test_a_refused_pod_leaves_no_id_taken(bench: Bench) -> None:
    bench.plugin.refuse = "not now"
    with pytest.raises(AdmissionError, match="not now"):
        bench.admit(pod("a", container(core=4)))
    bench.plugin.refuse = ""
    bench.admit(pod("b", container(core=4)))


def test_init_containers_lend_their_ids_and_sidecars_keep_theirs(bench: Bench) -> None:
    init = (container("sidecar", restartPolicy="Always"), container("init", core=2))
    bench.admit(pod("a", container(core=2), init=init))
    assert bench.ids("a") == bench.ids("a", "init")
    assert not bench.ids("a", "sidecar") & bench.ids("a")


def test_the_ids_of_an_init_container_serve_every_app_container_once(bench: Bench) -> None:
    bench.admit(pod("a", container("c1"), container("c2"), init=(container("init", core=2),)))
    assert bench.ids("a", "c1") | bench.ids("a", "c2") == bench.ids("a", "init")
    assert bench.ids("a", "c1") != bench.ids("a", "c2")


def test_which_ids_and_which_resource_first_is_chance(tmp_path: Path) -> None:
    seen_ids, seen_orders = set(), set()
    for seed in range(20):
        (folder := tmp_path / str(seed)).mkdir()
        bench = Bench(folder, seed=seed)
        bench.register(MEM, 4)
        both = {"name": "c", "resources": {"limits": {CORE: "2", MEM: "2"}}}
        bench.admit(pod("a", both))
        seen_ids.add(frozenset(bench.ids("a")))
        seen_orders.add(bench.plugin.allocated[0][0][:3])
    assert len(seen_ids) > 1
    assert seen_orders == {"ore", "mem"}


def test_of_conflicting_variables_any_may_win(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.register(MEM, 4)
    a_pod = pod("a", {"name": "c", "resources": {"limits": {CORE: "1", MEM: "1"}}})
    bench.admit(a_pod)
    options = [bench.manager.run_options(a_pod, a_pod["spec"]["containers"][0]) for _ in range(20)]
    assert {dict(o.env)["ANSWER"] for o in options} == {"1", "2"}
    assert {frozenset(o.cdi) for o in options} == {frozenset({"example.com/gpu=1", "example.com/gpu=2"})}


def test_the_answer_is_kept_across_a_restart(bench: Bench) -> None:
    a_pod = pod("a")
    bench.admit(a_pod)
    bench.restart()
    bench.register(CORE, 4)
    bench.admit(a_pod)
    options = bench.manager.run_options(a_pod, container())
    assert (dict(options.env), options.cdi) == ({"ANSWER": "1"}, ("example.com/gpu=1",))
    assert len(bench.plugin.allocated) == 1


def test_pre_start_is_called_with_the_ids_and_skipped_after_a_restart_until_the_plugin_is_back(bench: Bench) -> None:
    a_pod = pod("a")
    bench.admit(a_pod)
    bench.manager.run_options(a_pod, container())
    assert bench.plugin.started == bench.plugin.allocated
    bench.restart()
    bench.manager.run_options(a_pod, container())
    assert len(bench.plugin.started) == 1
    bench.register(CORE, 4)
    bench.manager.run_options(a_pod, container())
    assert len(bench.plugin.started) == 2


def test_pre_start_is_not_called_where_the_plugin_does_not_ask_for_it(bench: Bench) -> None:
    bench.plugin.pre_start_required = False
    a_pod = pod("a")
    bench.admit(a_pod)
    bench.manager.run_options(a_pod, container())
    assert bench.plugin.started == []


def test_after_a_restart_pods_that_do_not_run_fail_until_the_plugin_is_back(bench: Bench) -> None:
    a_pod = pod("a")
    bench.admit(a_pod)
    bench.restart()
    bench.admit(a_pod, running=True)
    with pytest.raises(AdmissionError, match="no healthy devices present"):
        bench.admit(a_pod)


def test_an_unhealthy_id_blocks_the_readmission_of_its_pod(bench: Bench) -> None:
    a_pod = pod("a")
    bench.admit(a_pod)
    (held,) = bench.ids("a")
    bench.manager.update(CORE, {f"ore-{i}": f"ore-{i}" != held for i in range(4)})
    assert bench.manager.health(CORE, held) == "Unhealthy"
    with pytest.raises(AdmissionError, match="no longer healthy"):
        bench.admit(a_pod)


def test_unhealthy_ids_are_capacity_but_not_allocatable(bench: Bench) -> None:
    bench.manager.update(CORE, {"a": True, "b": False})
    assert bench.manager.capacity() == ({CORE: 2}, {CORE: 1}, set())


def test_a_gone_plugin_leaves_capacity_and_after_the_grace_nothing(bench: Bench) -> None:
    bench.manager.disconnected(CORE)
    assert bench.manager.capacity() == ({CORE: 4}, {CORE: 0}, set())
    bench.clock = 301
    assert bench.manager.capacity() == ({}, {}, {CORE})


def test_a_resource_nobody_registered_is_dropped_from_the_request(bench: Bench) -> None:
    a_pod = pod("a", {"name": "c", "resources": {"limits": {"example.com/other": "1"}}})
    bench.admit(a_pod)
    assert bench.manager.run_options(a_pod, a_pod["spec"]["containers"][0]).env == ()
    assert bench.plugin.allocated == bench.plugin.started == []


def test_a_plugin_that_comes_after_the_pod_makes_its_next_start_fail(bench: Bench) -> None:
    other = {"name": "c", "resources": {"limits": {MEM: "1"}}}
    bench.admit(pod("a", other))
    bench.register(MEM, 4)
    with pytest.raises(PluginError, match="no devices found allocated"):
        bench.manager.run_options(pod("a", other), other)


def test_a_changed_request_is_refused(bench: Bench) -> None:
    bench.admit(pod("a"))
    with pytest.raises(AdmissionError, match="changed request"):
        bench.admit(pod("a", container(core=2)))


def test_the_checkpoint_is_written_before_a_container_starts_and_has_init_containers(bench: Bench) -> None:
    bench.admit(pod("a", container(core=2), init=(container("init"),)))
    whole = json.loads((bench.folder / FILE).read_text())
    rows = {row["ContainerName"]: row for row in whole["Data"]["PodDeviceEntries"]}
    assert set(rows) == {"init", "c"}
    assert rows["c"]["PodUID"] == "a"
    assert rows["c"]["ResourceName"] == CORE
    assert set(rows["c"]["DeviceIDs"]["-1"]) == bench.ids("a")
    assert sorted(whole["Data"]["RegisteredDevices"][CORE]) == ["ore-0", "ore-1", "ore-2", "ore-3"]


def test_a_device_list_makes_the_kubelet_write_its_checkpoint_again(bench: Bench) -> None:
    bench.admit(pod("a"))
    (bench.folder / FILE).unlink()
    bench.register(CORE, 4)
    rows = json.loads((bench.folder / FILE).read_text())["Data"]["PodDeviceEntries"]
    assert [row["PodUID"] for row in rows] == ["a"]


def test_a_damaged_checkpoint_is_refused(bench: Bench) -> None:
    bench.admit(pod("a"))
    file = bench.folder / FILE
    file.write_text(file.read_text().replace('"PodUID": "a"', '"PodUID": "b"'))
    with pytest.raises(ValueError, match="corrupt"):
        bench.restart()
